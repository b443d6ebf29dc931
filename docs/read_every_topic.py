"""Read a whole installation from its log: how many records each topic holds, and what every customer used.

pip install "confluent-kafka[avro,schemaregistry]" && python docs/read_every_topic.py BOOTSTRAP REGISTRY_URL
Exits 1 when a record cannot be decoded: its place goes to standard error, and reading goes on.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

if len(sys.argv) != 3:
    sys.exit("expected BOOTSTRAP REGISTRY_URL, like  127.0.0.1:9092 http://127.0.0.1:8080/registry")
bootstrap, registry_url = sys.argv[1:]


def ask_registry() -> None:
    """Ends the program when the registry is away: no record could be decoded."""
    try:
        registry.get_subjects()
    except Exception as error:  # noqa: BLE001  # those of its HTTP library too
        sys.exit(f"the registry at {registry_url} does not answer: {error}")


def is_ours(topic: str) -> bool:
    """Whether the registry knows what lies on a topic."""
    try:
        return not topic.startswith("__") and bool(registry.get_versions(f"{topic}-value"))
    except SchemaRegistryError:
        return False


try:
    registry = SchemaRegistryClient({"url": registry_url})
except ValueError as error:
    sys.exit(f"BOOTSTRAP REGISTRY_URL: {error}")
ask_registry()
settings = {"bootstrap.servers": bootstrap, "group.id": "none", "enable.auto.commit": False, "log_level": 2}
consumer, decode = Consumer({**settings, "enable.partition.eof": True}), AvroDeserializer(registry)
try:
    topics = {name: t.partitions for name, t in consumer.list_topics(timeout=10).topics.items() if is_ours(name)}
except KafkaException as error:
    sys.exit(f"Kafka at {bootstrap} does not answer: {error}")
unread = {(topic, partition) for topic, partitions in topics.items() for partition in partitions}
consumer.assign([TopicPartition(topic, partition, 0) for topic, partition in unread])
records, billed, usage, undecodable = Counter(dict.fromkeys(topics, 0)), set(), defaultdict(Counter), 0
while unread:
    message = consumer.poll(30)
    if message is None:  # an empty record is false, too
        sys.exit("Kafka did not answer for 30 s")
    topic, error = message.topic(), message.error()
    if error and error.code() == KafkaError._PARTITION_EOF:
        unread.discard((topic, message.partition()))
    elif error:
        sys.exit(f"{topic}: {error}")
    else:
        try:
            record = decode(message.value(), SerializationContext(topic, MessageField.VALUE))
            if topic.endswith("inference.usage.v1") and record["request_id"] not in billed:
                usage[record["customer_id"]].update(record["quantities"])
                billed.add(record["request_id"])  # it may be there more than once, and is billed once
            records[topic] += 1
        except Exception as error:  # noqa: BLE001  # what decoders say of bytes that are no record has no common name
            ask_registry()
            undecodable += 1
            print(f"{topic} partition {message.partition()} offset {message.offset()}: {error!r}", file=sys.stderr)
consumer.close()
print(json.dumps({"records": records, "usage": usage, "undecodable": undecodable}))
sys.exit(1 if undecodable else 0)

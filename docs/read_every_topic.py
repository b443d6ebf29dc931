"""Read a whole installation from its log: how many records each topic holds, and what every customer used.

pip install "confluent-kafka[avro,schemaregistry]" && python docs/read_every_topic.py BOOTSTRAP REGISTRY_URL
Exits 1 when a record cannot be decoded: its place goes to standard error, and reading goes on.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict

from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

if len(sys.argv) != 3:
    sys.exit("expected BOOTSTRAP REGISTRY_URL, like 127.0.0.1:9092 http://127.0.0.1:8080/registry")
bootstrap, registry_url = sys.argv[1:]
registry = SchemaRegistryClient({"url": registry_url})
decode, subjects = AvroDeserializer(registry), set(registry.get_subjects())
consumer = Consumer(
    {"bootstrap.servers": bootstrap, "group.id": "none", "enable.auto.commit": False, "enable.partition.eof": True}
)
topics = [t for t in consumer.list_topics(timeout=10).topics.values() if f"{t.topic}-value" in subjects]
unread = {(t.topic, partition) for t in topics for partition in t.partitions}
consumer.assign([TopicPartition(topic, partition, 0) for topic, partition in unread])
records, billed, usage, undecodable = Counter({t.topic: 0 for t in topics}), set(), defaultdict(Counter), 0
while unread:
    message = consumer.poll(30)
    if message is None or (message.error() and message.error().code() != KafkaError._PARTITION_EOF):
        sys.exit(f"Kafka at {bootstrap} does not answer: {message and message.error()}")
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    if message.error():  # the partition is read to its end
        unread.discard((topic, partition))
        continue
    try:
        record = decode(message.value(), SerializationContext(topic, MessageField.VALUE))
        records[topic] += 1
        if (
            topic.endswith("inference.usage.v1") and record["request_id"] not in billed
        ):  # billed once, however often it is there
            billed.add(record["request_id"])
            usage[record["customer_id"]].update(record["quantities"])
    except Exception as error:  # noqa: BLE001 (what decoders say of bytes that are no record has no common name)
        undecodable += 1
        print(f"{topic} partition {partition} offset {offset}: {error!r}", file=sys.stderr)
print(json.dumps({"records": records, "usage": usage, "undecodable": undecodable}))
sys.exit(1 if undecodable else 0)

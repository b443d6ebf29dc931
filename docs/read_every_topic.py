"""Read a whole installation from its log: how many records each topic holds, and what every customer used.

pip install "confluent-kafka[avro,schemaregistry]" && python docs/read_every_topic.py BOOTSTRAP REGISTRY_URL
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict

from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

bootstrap, registry_url = sys.argv[1:]
registry = SchemaRegistryClient({"url": registry_url})
decode = AvroDeserializer(registry)
consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "none", "enable.partition.eof": True})


def is_ours(topic: str) -> bool:
    """Whether the registry knows what lies on a topic."""
    try:
        return not topic.startswith("__") and bool(registry.get_versions(f"{topic}-value"))
    except SchemaRegistryError:
        return False


topics = {name: found.partitions for name, found in consumer.list_topics(timeout=10).topics.items() if is_ours(name)}
unread = {(topic, partition) for topic, partitions in topics.items() for partition in partitions}
consumer.assign([TopicPartition(topic, partition, 0) for topic, partition in unread])
records, billed, usage = Counter(dict.fromkeys(topics, 0)), set(), defaultdict(Counter)
while unread:
    message = consumer.poll(30) or sys.exit("Kafka did not answer for 30 s")
    topic, error = message.topic(), message.error()
    if error and error.code() == KafkaError._PARTITION_EOF:
        unread.discard((topic, message.partition()))
    elif error:
        sys.exit(f"{topic}: {error}")
    else:
        record = decode(message.value(), SerializationContext(topic, MessageField.VALUE))
        records[topic] += 1
        if topic.endswith("inference.usage.v1") and record["request_id"] not in billed:
            billed.add(record["request_id"])  # it may be there more than once, and is billed once
            usage[record["customer_id"]].update(record["quantities"])
consumer.close()
print(json.dumps({"records": records, "usage": usage}))

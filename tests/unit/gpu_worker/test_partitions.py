"""Results written in batches land on the partition where any Kafka client looks for their key."""

from __future__ import annotations

from uuid import UUID

from aiokafka.partitioner import DefaultPartitioner
from hypothesis import given
from hypothesis import strategies as st

from infra.kafka import partition_of_key


@given(st.uuids(), st.integers(1, 64))
def test_the_partition_is_the_one_of_the_default_partitioner(request_id: UUID, partitions: int) -> None:
    everything = list(range(partitions))
    assert partition_of_key(request_id.bytes, partitions) == DefaultPartitioner()(
        request_id.bytes, everything, everything
    )

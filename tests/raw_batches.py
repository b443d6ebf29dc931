"""Record batches made by hand, as no client library makes them, and put on a topic as they are.

A broker checks some of what they say of themselves; what it takes, consumers have to live with.
"""

from __future__ import annotations

import gzip
import struct
from binascii import crc32
from collections.abc import Sequence

import cramjam
from aiokafka.client import AIOKafkaClient
from aiokafka.codec import lz4_encode, snappy_encode
from aiokafka.errors import for_code
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.util import calc_crc32c, encode_varint

GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4
PACK = {
    0: bytes,
    GZIP: lambda data: gzip.compress(data, 9),
    SNAPPY: snappy_encode,
    LZ4: lz4_encode,
    ZSTD: lambda data: bytes(cramjam.zstd.compress(data)),
}
NOW_MS = 1_780_000_000_000

RawHeaders = Sequence[tuple[bytes, "bytes | None"]]


def snappy_raw(data: bytes) -> bytes:
    """One block without the frame that Java's library puts around it, as librdkafka writes."""
    return bytes(cramjam.snappy.compress_raw(data))


def varint(number: int) -> bytes:
    out = bytearray()
    encode_varint(number, out.append)
    return bytes(out)


def sized(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def raw_record(
    at: int, value: bytes | None, *, key: bytes | None = b"k", headers: RawHeaders = (), length: int | None = None
) -> bytes:
    """A record of format 2 at this distance from the batch's first offset; `length` is what it says of its own."""
    named = b"".join(sized(name) + sized(content) for name, content in headers)
    body = b"\0" + varint(0) + varint(at) + sized(key) + sized(value) + varint(len(headers)) + named
    return varint(len(body) if length is None else length) + body


def raw_batch(
    records: bytes,
    count: int,
    *,
    codec: int = 0,
    attributes: int = 0,
    base: int = 0,
    last: int | None = None,
    packed: bytes | None = None,
    crc: int | None = None,
    magic: int = 2,
    says_codec: int | None = None,
) -> bytes:
    """A batch of format 2 of these records; what it says of itself may be a lie. `packed` replaces its contents."""
    contents = PACK[codec](records) if packed is None else packed
    said = attributes | (codec if says_codec is None else says_codec)
    rest = struct.pack(">hiqqqhii", said, count - 1 if last is None else last, NOW_MS, NOW_MS, -1, -1, -1, count)
    checked = rest + contents
    sum32c = calc_crc32c(checked) if crc is None else crc
    return struct.pack(">qiibI", base, 9 + len(checked), -1, magic, sum32c) + checked


def old_message(format_: int, value: bytes, *, attributes: int = 0, offset: int = 0) -> bytes:
    """A message of format 0 or 1; with a codec in its attributes `value` holds packed messages."""
    stamp = struct.pack(">q", NOW_MS) if format_ else b""
    body = struct.pack(">bb", format_, attributes) + stamp + struct.pack(">i1si", 1, b"k", len(value)) + value
    return struct.pack(">qiI", offset, len(body) + 4, crc32(body)) + body


async def put_raw(bootstrap: str, topic: str, batch: bytes, *, partition: int = 0) -> int:
    """Have the broker take this batch; returns the offset that it gave it. Raises the broker's refusal."""
    client = AIOKafkaClient(bootstrap_servers=bootstrap)
    await client.bootstrap()
    try:
        await client.add_topic(topic)
        (node, *_) = [broker.nodeId for broker in client.cluster.brokers()]
        request = ProduceRequest(None, -1, 10_000, [(topic, [(partition, batch)])])
        response = await client.send(node, request)
        ((_, ((_, code, offset, *_rest),)),) = response.topics
        if code:
            raise for_code(code)(f"{_rest}")
        return int(offset)
    finally:
        await client.close()

"""What the benchmarks write: keys, values and the bytes of requests, for every protocol.

One operation is a change that is stored and can be followed: a SET on the binary protocol, a SET
and an XADD to the key's stream in Redis, a Put in etcd, an acknowledged put into a bucket of NATS
JetStream. Keys and values are the same everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final

from benchmarks import etcd, nats
from vbucket.model.ids import vbucket_of

HEADER: Final = Struct(">BBHBBHIIQ")
SET_EXTRAS: Final = bytes(8)  # flags, expiry
OP_SET: Final = 0x01
OP_GET: Final = 0x00
OP_ADD: Final = 0x02
OP_REPLACE: Final = 0x03
OP_DELETE: Final = 0x04
OP_INCREMENT: Final = 0x05
OP_SETQ: Final = 0x11
OP_TOUCH: Final = 0x1C
OP_GAT: Final = 0x1D
OP_APPEND: Final = 0x0E
OP_HELLO: Final = 0x1F
OP_SASL_AUTH: Final = 0x21
OP_SELECT_BUCKET: Final = 0x89
STREAM_ENTRIES: Final = b"2000"
"""About the number of entries in each of the 1,024 streams of a bounded Redis."""
COLLECTIONS: Final = 0x12
FEATURES: Final = (0x04, 0x08, COLLECTIONS)  # mutation tokens, SELECT_BUCKET


def key_of(index: int) -> bytes:
    return b"key:%010d" % index


def values(seed: int, value_bytes: int, count: int = 64) -> list[bytes]:
    """Values to use in turn: text of random digits, without line ends, all of one length."""
    rng = random.Random(seed)
    return [bytes(rng.choices(b"0123456789abcdef", k=value_bytes)) for _ in range(count)]


def frame(opcode: int, *, vb_id: int = 0, extras: bytes = b"", key: bytes = b"", value: bytes = b"",
          opaque: int = 0, cas: int = 0) -> bytes:  # fmt: skip
    """One request of the binary protocol."""
    body = extras + key + value
    head = HEADER.pack(0x80, opcode, len(key), len(extras), 0, vb_id, len(body), opaque, cas)
    return head + body


def session_frames(features: tuple[int, ...] = FEATURES) -> list[bytes]:
    """The opening of a session: HELLO, authentication, the bucket."""
    hello = b"".join(code.to_bytes(2, "big") for code in features)
    return [
        frame(OP_HELLO, key=b"benchmark", value=hello),
        frame(OP_SASL_AUTH, key=b"PLAIN", value=b"\0guest\0guest"),
        frame(OP_SELECT_BUCKET, key=b"default"),
    ]


def binary_set(key: bytes, value: bytes) -> bytes:
    return frame(OP_SET, vb_id=vbucket_of(key), extras=SET_EXTRAS, key=b"\0" + key, value=value)


def binary_change(
    opcode: int, key: bytes, extras: bytes = b"", value: bytes = b"", cas: int = 0
) -> bytes:
    """Any change of a document."""
    return frame(
        opcode, vb_id=vbucket_of(key), extras=extras, key=b"\0" + key, value=value, cas=cas
    )


def binary_get(key: bytes) -> bytes:
    return frame(OP_GET, vb_id=vbucket_of(key), key=b"\0" + key)


def memcached_set(key: bytes, value: bytes) -> bytes:
    """A SET of a client without HELLO: no collection, and no partition."""
    return frame(OP_SET, extras=SET_EXTRAS, key=key, value=value)


def memcached_get(key: bytes) -> bytes:
    return frame(OP_GET, key=key)


def text_set(key: bytes, value: bytes) -> bytes:
    """A SET of memcached's text protocol."""
    return b"set %b 0 0 %d\r\n%b\r\n" % (key, len(value), value)


def text_get(*keys: bytes) -> bytes:
    return b"get %b\r\n" % b" ".join(keys)


def resp_command(*arguments: bytes) -> bytes:
    parts = [b"*%d\r\n" % len(arguments)]
    parts += [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    return b"".join(parts)


def stream_of(key: bytes) -> bytes:
    """The Redis stream that carries the changes of a key: one for each partition."""
    return b"stream:%d" % vbucket_of(key)


def resp_set(key: bytes, value: bytes) -> bytes:
    change = resp_command(b"XADD", stream_of(key), b"*", key, value)
    return resp_command(b"SET", key, value) + change


def resp_set_bounded(key: bytes, value: bytes) -> bytes:
    """The same with a stream of bounded length, for long runs."""
    change = resp_command(
        b"XADD", stream_of(key), b"MAXLEN", b"~", STREAM_ENTRIES, b"*", key, value
    )
    return resp_command(b"SET", key, value) + change


OPERATION: Final = {
    "binary": binary_set,
    "memcached": memcached_set,
    "text": text_set,
    "resp": resp_set,
    "resp-bounded": resp_set_bounded,
    "resp-wait": resp_set,
    "etcd": etcd.put_request,
    "nats": nats.put_request,
}


def batches(
    protocol: str, indexes: Sequence[int], in_flight: int, value_pool: Sequence[bytes]
) -> Iterator[bytes]:
    """The requests for the keys `indexes`, `in_flight` operations per batch."""
    make = OPERATION[protocol]
    for start in range(0, len(indexes), in_flight):
        yield b"".join(
            make(key_of(index), value_pool[(start + place) % len(value_pool)])
            for place, index in enumerate(indexes[start : start + in_flight])
        )

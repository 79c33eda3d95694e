"""Documents in which the server keeps what it knows of consumers. Pure.

    _dcpd:checkpoint:NAME:VB:DIGITS   a consumer's position in a partition (clients.checkpoint)
    _dcpd:keep:VB:DIGITS              what a partition keeps for consumers that are away
    _dcpd:group:NAME                  members and epoch of a group (dcp.session.group_command)

DIGITS end a key so that its hash is the partition that the document is about. So a partition has
what concerns it: its copies have it as they have its changes, and no other node is asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple
from zlib import crc32

import cbor2

from vbucket.model.ids import NUM_VBUCKETS, vbucket_of

OWN_PREFIX: Final = b"_dcpd:"
CHECKPOINT_PREFIX: Final = "_dcpd:checkpoint:"
GROUP_PREFIX: Final = b"_dcpd:group:"
_KEEP_HEAD: Final = "_dcpd:keep"
_DIGITS: Final = 4
"""Three do not reach every partition."""
NAME_BYTES_MAX: Final = 200
"""A key has 250 bytes at most."""
KEEPS_MAX: Final = 100
"""Each is looked at before a purge."""
FOR_MIN_S: Final = 60.0
FOR_MAX_S: Final = 365 * 86_400.0
BYTES_MIN: Final = 1 << 20
BYTES_MAX: Final = 1 << 50


class Keep(NamedTuple):
    """What a partition keeps for a consumer: the deletions that it has not seen."""

    for_s: float
    """They may be purged when the oldest change that it has not seen is older."""
    bytes_max: int
    """The same when the changes that it has not seen are more: in all partitions, of which each has
    its share.
    """
    seqno: int
    """The purge seqno when this was promised. It counts if the server has no position of the
    consumer: wherever that is, nothing more is purged.
    """


@cache
def _digits() -> dict[int, str]:
    """Return what the last digits add to a key's partition -> the digits."""
    zeros = crc32(b"0" * _DIGITS)
    found: dict[int, str] = {}
    for number in range(10**_DIGITS):
        text = f"{number:0{_DIGITS}}"
        found.setdefault((crc32(text.encode()) ^ zeros) >> 16 & (NUM_VBUCKETS - 1), text)
    assert len(found) == NUM_VBUCKETS, "the digits reach every partition"
    return found


def key_in(vb_id: int, head: str) -> bytes:
    """Return a key that begins with `head` and the partition, and lies in it.

    CRC-32 is linear: what the last bytes add to it does not depend on those before.
    """
    begun = f"{head}:{vb_id}:"
    zeros = vbucket_of((begun + "0" * _DIGITS).encode())
    return (begun + _digits()[zeros ^ vb_id]).encode()


@cache
def keep_key(vb_id: int) -> bytes:
    """Return the key of what a partition keeps."""
    return key_in(vb_id, _KEEP_HEAD)


def checkpoint_key(name: str, vb_id: int) -> bytes:
    """Return the key of a consumer's position."""
    return key_in(vb_id, CHECKPOINT_PREFIX + name)


def checkpoint_of(key: bytes) -> tuple[str, int] | None:
    """Return the consumer and the partition that a key is about; None: it is no such key."""
    try:
        name, vb, digits = key.decode().removeprefix(CHECKPOINT_PREFIX).rsplit(":", 2)
        vb_id = int(vb)
    except ValueError:
        return None
    is_one = 0 <= vb_id < NUM_VBUCKETS and len(digits) == _DIGITS
    return (name, vb_id) if is_one and checkpoint_key(name, vb_id) == key else None


def encode_keeps(keeps: Mapping[str, Keep]) -> bytes:
    """Return the document of a partition's keeps, by consumer."""
    rows = {
        name: {"for_s": keep.for_s, "bytes": keep.bytes_max, "seqno": keep.seqno}
        for name, keep in sorted(keeps.items())
    }
    return json.dumps({"keeps": rows}, ensure_ascii=False).encode()


def decode_keeps(value: bytes) -> dict[str, Keep]:
    """Return a partition's keeps, by consumer. Raises ValueError."""
    try:
        rows: dict[str, dict[str, Any]] = json.loads(value)["keeps"]
        return {
            name: Keep(float(row["for_s"]), int(row["bytes"]), int(row["seqno"]))
            for name, row in rows.items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"these are no keeps: {error!r}") from error


def position_in(value: bytes, vb_id: int) -> int:
    """Return up to which seqno a consumer's saved position needs no deletion. Raises ValueError.

    In the middle of a snapshot it is the snapshot's start, to which the consumer may have to go
    back.
    """
    try:
        _, seqno, snap_start, *_ = cbor2.loads(cbor2.loads(value)["positions"])[vb_id]
        return min(int(seqno), int(snap_start))
    except (cbor2.CBORDecodeError, EOFError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"this is no position: {error!r}") from error

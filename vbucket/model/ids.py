"""Identifiers of the keyspace: partition ids, sequence numbers, version UUIDs, CAS.

Everything may import this module; it imports nothing of ours.

Rules and their sources: the key hash is the one every Couchbase SDK computes (IEEE CRC-32, bits
16-30); a vb_uuid is a random 64-bit number shifted right by 16 and never 0, as in kv_engine's
failover table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol
from zlib import crc32

NUM_VBUCKETS: Final = 1024
"""Number of partitions of a node. SDKs, tools and the data folder depend on it.

Most code takes the number as an argument; this is the default."""

SEQNO_MAX: Final = 2**64 - 1
"""The largest sequence number; as the end of a stream it means "never ends"."""

DEFAULT_COLLECTION_PREFIX: Final = b"\x00"
"""Unsigned LEB128 of collection id 0, the prefix of every stored key of the default collection."""

_LOGICAL_MASK: Final = 0xFFFF
"""Low bits of a CAS: a counter. The other bits are nanoseconds since the epoch (hybrid clock)."""


def vbucket_of(logical_key: bytes, num_vbuckets: int = NUM_VBUCKETS) -> int:
    """Return the partition of a key; `logical_key` carries no collection-id prefix.

    `num_vbuckets` is a power of two: fewer partitions use fewer bits of the hash.
    """
    return ((crc32(logical_key) >> 16) & 0x7FFF) % num_vbuckets


class Draws(Protocol):
    """Randomness: `random.SystemRandom` in a server, a seeded `random.Random` in a simulation."""

    def getrandbits(self, bits: int, /) -> int:
        """Return so many random bits."""

    def randbytes(self, size: int, /) -> bytes:
        """Return so many random bytes."""

    def random(self) -> float:
        """Return a number in [0, 1)."""


def draw_vb_uuid(draws: Draws) -> int:
    """Return a new vb_uuid: 48 bits and never 0."""
    return (draws.getrandbits(64) >> 16) & 0xFFFF_FFFF_FFFF or 1


CAS_DRIFT_NS: Final = 3900 * 10**9
"""Default limit of how far ahead of the clock a CAS from outside may be: 65 minutes, as in
kv_engine (hlc_max_future_threshold_us). So a clock that is off by an hour passes."""


CAS_AHEAD_NS: Final = 60 * 10**9
"""How far above that limit a partition's own CAS may be before it needs mending. New changes
continue from the highest CAS that was accepted from outside, so they can exceed the limit."""


def time_ns_from_cas(cas: int) -> int:
    """Return the time at which a CAS was assigned, in nanoseconds since the Unix epoch."""
    return cas & ~_LOGICAL_MASK


def id_ranges(vb_ids: Iterable[int]) -> str:
    """Return partitions as ranges, in ascending order; "" for none."""
    ordered = sorted(set(vb_ids))
    starts = [n for at, n in enumerate(ordered) if at == 0 or ordered[at - 1] != n - 1]
    ends = [n for at, n in enumerate(ordered) if at + 1 == len(ordered) or ordered[at + 1] != n + 1]
    return ",".join(
        str(start) if start == end else f"{start}-{end}"
        for start, end in zip(starts, ends, strict=True)
    )


def ids_in(text: str) -> set[int]:
    """Return the partitions of such a text. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found

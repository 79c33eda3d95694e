"""Which seqno a partition had at a moment, from the CAS of its versions, which is their time.

Above the history floor every version is kept, and a server's own CAS rise with the seqnos. So a
search by halves finds the last change before a moment. A CAS that came from elsewhere
(SET_WITH_META, a restore) is the time at the other place; near such changes it may be off.
"""

from __future__ import annotations

from typing import Final

from vbucket.engine.partition import Partition
from vbucket.engine.versions import Versions
from vbucket.model.entry import META

NS: Final = 1_000_000_000


class NotKeptError(Exception):
    """The history does not reach back to a moment."""

    def __init__(self, since_s: float | None) -> None:
        super().__init__("the history does not reach back so far")
        self.since_s = since_s
        """The first moment as of which the partition can be read, Unix time; None: not known."""


def seqno_at(versions: Versions, part: Partition, at_s: float) -> int:
    """Return the last seqno of a partition at a moment (Unix time), 0 before its first change.

    Raises NotKeptError, StoreDamagedError.
    """
    at_ns, floor = int(at_s * NS), part.history_floor
    low, high = floor, part.committed_seqno
    while low < high:
        middle = (low + high + 1) // 2
        cas = _cas_at(versions, part, middle)
        if cas is None or cas <= at_ns:
            low = middle
        else:
            high = middle - 1
    if low > floor or not floor:
        return low
    # As of the floor: right if its own change, or the last one that is left of it, is old enough.
    cas = _cas_at(versions, part, floor)
    if cas is None and floor < part.committed_seqno:
        cas = _cas_at(versions, part, floor + 1)
    if cas is None or cas > at_ns:
        raise NotKeptError(None if cas is None else cas / NS)
    return floor


def _cas_at(versions: Versions, part: Partition, seqno: int) -> int | None:
    entry = versions.entry_at(part, seqno)
    return None if entry is None else int(META.unpack_from(entry)[4])

"""Finds the seqno of a partition at a point in time, for history windows and STAT `seqno-at`. Pure.

The time of a change is its CAS, a hybrid clock that rises with the seqnos of a partition. So a
bisection finds the seqno with about twenty reads of one version each.

Who calls it: the server on committed changes, and retention on the store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dcp.wire.frame import HEADER, HEADER_BYTES
from dcp.wire.message import U64
from vbucket.store.store import FrameBatch

_CAS: Final = 8
"""Place of the CAS among the fields of a header."""
_OPAQUE: Final = bytes(4)

Frames = Callable[[int, int, int, bytes, tuple[()], int], FrameBatch]
"""`Versions.frames`, or `StoreView.frames`."""


def seqno_before(
    frames: Frames, vb_id: int, end_seqno: int, time_ns: int, *, after_seqno: int = 0
) -> int:
    """Return the last seqno in (after, end] whose change has a CAS below `time_ns`, `after_seqno`
    if there is none.

    System events have no time. Those right after the found change count as newer. Raises
    StoreDamagedError.
    """
    below, above = after_seqno, end_seqno + 1
    # Invariant: changes at or below `below` are older, those at or above `above` are not.
    middle = below + 1  # usually all changes are newer than the window
    while above - below > 1:
        found = _first_with_cas(frames, vb_id, middle, above - 1)
        if found is not None and found[1] < time_ns:
            below = found[0]
        else:
            above = middle
        middle = (below + above) // 2
    return below


def _first_with_cas(frames: Frames, vb_id: int, start: int, end: int) -> tuple[int, int] | None:
    """Return seqno and CAS of the first change in [start, end] that is no system event, or None."""
    while start <= end:
        batch = frames(vb_id, start, end, _OPAQUE, (), 1)
        for frame in batch.frames:
            cas = HEADER.unpack_from(frame)[_CAS]
            if cas:
                return U64.unpack_from(frame, HEADER_BYTES)[0], cas
        start = batch.next_seqno
    return None

"""Which seqno a partition had at a point in time: what the STAT group `seqno-at` answers. Sans-IO.

A change's time is its CAS (a hybrid clock that rises with the seqnos of a partition), so the seqno
is found by bisection over what is committed: some twenty reads of one version each.
"""

from __future__ import annotations

from typing import Final

from dcp.wire.frame import HEADER, HEADER_BYTES
from dcp.wire.message import U64
from vbucket.engine import Engine

_CAS: Final = 8
"""Place of the CAS among the fields of a header."""


def seqno_before(engine: Engine, vb_id: int, time_ns: int) -> int:
    """Return the seqno right before the first change whose CAS is `time_ns` or later.

    What was changed at or after that moment lies above it; the partition's committed high seqno
    where nothing was. Raises StoreDamagedError.
    """
    below, above = 0, engine.partitions[vb_id].committed_seqno + 1
    # Invariant: changes at or below `below` are older, those at or above `above` are not.
    while above - below > 1:
        middle = (below + above) // 2
        found = _first_with_cas(engine, vb_id, middle, above - 1)
        if found is None:
            above = middle
            continue
        seqno, cas = found
        if cas < time_ns:
            below = seqno
        else:
            above = middle
    return below


def _first_with_cas(engine: Engine, vb_id: int, start: int, end: int) -> tuple[int, int] | None:
    """Return seqno and CAS of the first change in [start, end] that has one: system events do not.

    None where there is none.
    """
    while start <= end:
        batch = engine.frames(vb_id, start, end, bytes(4), (), 1)
        for frame in batch.frames:
            cas = HEADER.unpack_from(frame)[_CAS]
            if cas:
                return U64.unpack_from(frame, HEADER_BYTES)[0], cas
        start = batch.next_seqno
    return None

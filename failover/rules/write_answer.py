"""How a write is answered in a cluster: refused, ambiguous, or when it is done.

Who calls it: the master's core and sessions, before a write is applied (`refusal_of`) and when its
wait ends (`is_done`, `AMBIGUOUS`); the simulator.

The table is ordered: the first row that applies is the answer. Every row means that nothing was
done, so a client may send the write again. A write that was applied gets success or AMBIGUOUS. It
never gets NOT_MY_VBUCKET or ETMPFAIL: the client would send it again, and a counter count twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from dcp.wire.status import Status
from failover.rules.replication_record import majority

LEVEL_MIN: Final = 1
LEVEL_MAX: Final = 3
"""Durability levels: majority, majority and persisted on the master, persisted to a majority. All
three mean committed here, which is synced on the whole ISR."""

TIMEOUT_INVALID: Final = frozenset((0, 0xFFFF))
"""Timeouts in ms that the durability frame reserves."""


class Durability(NamedTuple):
    """A durability frame: its level, and its timeout in ms (None: the frame has no timeout)."""

    level: int
    timeout_ms: int | None = None


class WriteState(NamedTuple):
    """What a master knows when a write arrives."""

    durability: Durability | None
    isr_size: int
    counted_copies: int
    min_in_sync: int
    is_confirmed: bool
    """The read fence (failover/rules/isr.py): this master is confirmed, or alone in its ISR."""
    hw_seqno: int
    epoch_start_seqno: int
    """The master's end when it became master."""


class WriteGuard(Protocol):
    """What sessions ask about a partition with replicas. Pure: it reads no clock."""

    def write_state(self, durability: Durability | None) -> WriteState:
        """Return what the master knows now, for a write with this durability frame."""


class Row(NamedTuple):
    """One refusal: when it applies, and the status with and without a durability frame."""

    reason: str
    applies: Callable[[WriteState, Durability], bool]
    with_frame: Status
    without_frame: Status | None
    """None: the row is about the frame only."""


_NO_FRAME: Final = Durability(0)

AMBIGUOUS: Final = Status.SYNC_WRITE_AMBIGUOUS
"""The answer to an applied write that is not committed in time, or whose master was deposed."""

REFUSALS: Final = (
    Row(
        f"the durability level is not {LEVEL_MIN} to {LEVEL_MAX}",
        lambda _, frame: not LEVEL_MIN <= frame.level <= LEVEL_MAX,
        Status.DURABILITY_INVALID_LEVEL,
        None,
    ),
    Row(
        "the durability timeout must be 1 to 65534 ms, or be left out",
        lambda _, frame: frame.timeout_ms in TIMEOUT_INVALID,
        Status.EINVAL,
        None,
    ),
    Row(
        "too few copies are in sync to commit a write; try again when replicas are back",
        lambda state, _: state.isr_size < in_sync_wanted(state),
        Status.DURABILITY_IMPOSSIBLE,
        Status.ETMPFAIL,
    ),
    Row(
        "the new master does not know yet what is committed; try again",
        lambda state, _: state.hw_seqno < state.epoch_start_seqno,
        Status.ETMPFAIL,
        Status.ETMPFAIL,
    ),
    Row(
        "the replicas have not confirmed this master for 500 ms; try again",
        lambda state, _: not state.is_confirmed,
        Status.ETMPFAIL,
        Status.ETMPFAIL,
    ),
)
"""The rows of docs/replication.md, in order."""


class WriteRefusal(NamedTuple):
    """Why a write is refused. Nothing was done."""

    status: Status
    reason: str


def in_sync_wanted(state: WriteState) -> int:
    """Return how many members must be in sync: `min_in_sync`, with a frame at least a majority."""
    if state.durability is None:
        return state.min_in_sync
    return max(state.min_in_sync, majority(state.counted_copies))


def refusal_of(state: WriteState) -> WriteRefusal | None:
    """Return why a write is refused before it is applied; None: it may be applied."""
    frame = state.durability
    for row in REFUSALS:
        status = row.without_frame if frame is None else row.with_frame
        if status is not None and row.applies(state, frame or _NO_FRAME):
            return WriteRefusal(status, row.reason)
    return None


def is_done(state: WriteState, seqno: int) -> bool:
    """Return whether an applied write may be answered with success: it is committed.

    `state` has the present HW and ISR. With a durability frame the ISR must also be a majority of
    the copies now. A HW that rose with a smaller ISR (`min_in_sync` 1) is not enough for it.
    """
    return state.hw_seqno >= seqno and (
        state.durability is None or state.isr_size >= in_sync_wanted(state)
    )

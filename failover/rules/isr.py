"""The rules of the in-sync set (ISR), the high watermark (HW), and the read fence.

The ISR holds the members that have every committed change on disk. The HW is the last committed
seqno. Clients and consumers see changes up to the HW only.

Who calls it: a partition's master (all), a replica (`serves_from_ns`), the simulator and the
model checker.

Sources: KIP-101, KIP-279 and KIP-320 of Kafka. Each rule here is needed: the model checker finds a
committed change that is lost, or two histories under one version, if a rule is left out
(docs/replication.md).

Times are nanoseconds of one process's own clock, which goes on while the machine sleeps. Times of
two processes are never compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from failover.rules.replication_record import majority

CONFIRMATION_NS: Final = 500_000_000
"""How long a member's confirmation lets its master answer reads: five heartbeats."""

PROMOTED_WAIT_NS: Final = CONFIRMATION_NS + CONFIRMATION_NS // 10
"""How long a promoted replica waits after its last confirmation. The clocks of two machines may
differ in rate by 10 %; real ones differ by less than 0.1 %."""

REPLICA_LAG_MAX_NS: Final = 1_000_000_000
"""Default of `replica_lag_max`: ten heartbeats. A replica that is not level for this time leaves
the ISR, so one slow replica delays answers for no longer."""

ELECTION_NS: Final = 10_000_000_000
"""How long a master waits for its own successor before it leaves silent members out: ten times as
long as a coordinator may be late. The lease of a dead member (3 s by default) is over before."""


class Acknowledgement(NamedTuple):
    """What a member has acknowledged: all changes up to a seqno are on its disk, under an epoch.

    It is given only after the member has reconciled its log with the master of that epoch. The
    master's own syncs count as its acknowledgements.
    """

    epoch: int
    synced_seqno: int


class Sender(NamedTuple):
    """The former master from which a new master has its log: it had the same changes on disk, up to
    a seqno.
    """

    member: str
    seqno: int
    """See `sender_seqno`."""


def has_sent(reconciled_epoch: int, epoch: int) -> bool:
    """Return whether the master of `reconciled_epoch` counts as the sender of a new master's log.

    The new master reconciled with it last, and `epoch` is its own. With another epoch between there
    was a master that may lack some of these changes, and they may have been truncated elsewhere.
    """
    return epoch == reconciled_epoch + 1


def min_in_sync_of(setting: int | None, counted_copies: int) -> int:
    """Return how many members must be in sync for the HW to rise; the default is a majority. While
    there are fewer copies than the setting says, all of them must be.
    """
    return majority(counted_copies) if setting is None else min(setting, counted_copies)


class LeaveReason(StrEnum):
    """Why a member leaves the ISR."""

    NODE_GONE = "node_gone"
    LAGGING = "lagging"


def may_send_unsynced(isr_size: int, min_in_sync: int) -> bool:
    """Return whether a master sends what it writes before it has synced it.

    Not if its death would leave fewer members than `min_in_sync`: these count its disk then, to
    serve reads (`Sender`), and would not know what is on it.
    """
    return isr_size > min_in_sync


def sender_seqno(told_seqno: int, high_seqno: int) -> int:
    """Return up to where a new master counts the former one as a copy of its log (`Sender`).

    `told_seqno` is what it knows the former master to have synced. What it received is not enough.
    """
    return min(told_seqno, high_seqno)


def effective_isr(
    confirmed: frozenset[str],
    asked: frozenset[str] | None,
    parting: frozenset[str] = frozenset(),
) -> frozenset[str]:
    """Return the ISR that the HW and the read fence depend on while a change is under way.

    `confirmed` is the ISR that the metadata store has confirmed, `asked` the one that the master
    has asked for (None: no change is under way), `parting` who has left it by a record that not all
    members hold yet (`is_held`). A member that leaves counts until the store has confirmed it,
    because until then it can be elected. A member that joins counts from the moment the master
    asks, because the store may have it before the master hears of it. An unknown outcome leaves
    `asked` as it is.
    """
    return confirmed | parting if asked is None else confirmed | asked | parting


def is_held(isr: Iterable[str], revision: int, seen: Mapping[str, int]) -> bool:
    """Return whether every member of an ISR holds its record durably: who has left it counts no
    more.

    `revision` is the record's mod revision in the metadata store, `seen` up to which revision of
    that same store each member has the records on its disk, the master's own included. If the store
    goes back to an older copy later, each of these members knows better: nothing is committed
    without a member that has left and that the copy calls in sync.
    """
    return all(seen.get(member, 0) >= revision for member in isr)


def may_change_record(
    isr: Iterable[str], copies: Iterable[str], heard: Collection[str], min_in_sync: int
) -> bool:
    """Return whether a master may write its partition's record over a new connection to the store,
    which may have gone back to an older copy and name a master that was deposed since.

    `heard` are the members that have confirmed this master's epoch since that connection began,
    itself included. Only a member of its in-sync set can have been elected meanwhile, so it is
    enough if all of them confirm; and it is enough if so many copies confirm that those which do
    not are too few to commit anything under another master.
    """
    return all(member in heard for member in isr) or (
        sum(member not in heard for member in copies) < min_in_sync
    )


def high_watermark(
    hw_seqno: int,
    epoch: int,
    isr: Collection[str],
    acknowledged: Mapping[str, Acknowledgement],
    min_in_sync: int,
    sender: Sender | None = None,
) -> int:
    """Return the new HW: the smallest synced seqno over the effective ISR, the master included.

    `epoch` is the master's present one. An acknowledgement of another epoch does not count: that
    member has not reconciled with this master. The HW does not rise while the ISR has fewer members
    than `min_in_sync`, and it never falls.

    A `sender` that is not in the ISR counts as one more member up to its seqno: these changes were
    on its disk, too. A node that is left alone can thus serve reads of what it has; it takes no
    writes.

    For partitions with the same ISR that are in step, commit group numbers may stand for seqnos.
    """
    lowest: int | None = None
    members = 0
    for member in isr:
        members += 1
        given = acknowledged.get(member)
        if given is None or given.epoch != epoch:
            return hw_seqno
        if lowest is None or given.synced_seqno < lowest:
            lowest = given.synced_seqno
    if lowest is None or lowest < hw_seqno:
        return hw_seqno
    if members >= min_in_sync:
        return lowest
    if sender is None or sender.member in isr or members + 1 < min_in_sync:
        return hw_seqno
    return max(hw_seqno, min(lowest, sender.seqno))


class Candidate(NamedTuple):
    """What a master knows about a replica that is not in the ISR."""

    acknowledgement: Acknowledgement
    is_caught_up: bool
    """It has acknowledged every commit group before those under way."""
    has_incomplete_snapshot: bool = False
    """A de-duplicated snapshot is incomplete: its seqno says nothing about what it holds."""


def may_join(candidate: Candidate, epoch: int, hw_seqno: int, epoch_start_seqno: int) -> bool:
    """Return whether a master may ask the store to let a replica into the ISR.

    `epoch` and `hw_seqno` are the master's own; `epoch_start_seqno` is its end when it became
    master. That is at or above all that was committed before, while the HW of a new master may be
    too low. So the replica must have reached both. The start of the master's version is not enough:
    after a handover the version is older than the epoch.

    The HW itself need not have reached the epoch's start. It cannot while the ISR has fewer than
    `min_in_sync` members, and then only those who join can help: a master that was elected without
    a dead member would wait for it for ever.
    """
    given = candidate.acknowledgement
    return (
        given.epoch == epoch
        and given.synced_seqno >= max(hw_seqno, epoch_start_seqno)
        and candidate.is_caught_up
        and not candidate.has_incomplete_snapshot
    )


def must_leave(
    level_at_ns: int,
    now_ns: int,
    *,
    is_node_gone: bool,
    lag_max_ns: int = REPLICA_LAG_MAX_NS,
) -> LeaveReason | None:
    """Return why a replica must leave the ISR; None if it stays.

    `level_at_ns` is when it was last level, by the master's clock. A power cut is no reason by
    itself: what a member acknowledged was on its disk.
    """
    if is_node_gone:
        return LeaveReason.NODE_GONE
    return LeaveReason.LAGGING if now_ns - level_at_ns > lag_max_ns else None


class Lateness(NamedTuple):
    """Which members acknowledge late, all partitions taken together."""

    late: frozenset[str]
    """They are late at present."""
    slow: frozenset[str]
    """They were late for too long: they leave the ISR where the others can go on without them, and
    do not join."""


NOBODY_LATE: Final = Lateness(frozenset(), frozenset())


def slow_to_leave(
    isr: frozenset[str], master: str, lateness: Lateness, *, min_in_sync: int, counted_copies: int
) -> frozenset[str]:
    """Return who leaves the ISR because every answer waits for it.

    Nobody leaves if that would not help, because another member is late, too: then the machine or
    the master may be the slow part. Nobody leaves if the others were too few for a write, with a
    durability frame or without: a slow answer is better than none.
    """
    leaving = (isr & lateness.slow) - {master}
    staying = isr - leaving
    if (staying - {master}) & lateness.late or not is_enough(staying, min_in_sync, counted_copies):
        return frozenset()
    return leaving


def is_enough(isr: frozenset[str], min_in_sync: int, counted_copies: int) -> bool:
    """Return whether an ISR takes every write, also one with a durability frame. A slow member may
    join one that does not.
    """
    return len(isr) >= max(min_in_sync, majority(counted_copies))


def may_be_deposed(isr_size: int, silent: int) -> bool:
    """Return whether the silent members of an ISR are enough to depose their master.

    `silent` counts members other than the master that it does not hear although their nodes live.
    The master is then probably the one that is cut off. It must not take them out of the ISR at
    once: they would no longer be electable, and the partition would stay with a master that nobody
    follows. So it waits for the election, for `ELECTION_NS` at most. It serves nobody meanwhile.
    """
    return silent >= majority(isr_size)


def confirmed_until_ns(master: str, isr: Iterable[str], asked_ns: Mapping[str, int]) -> int | None:
    """Return until when a master may answer reads; None: without limit.

    `isr` is the effective ISR. `asked_ns` has, for each member, when the master asked the question
    that this member confirmed last under the present epoch. The time is the master's own, read
    before it asked. Every other member must have confirmed, because each of them can be elected. A
    master that is alone in its ISR needs no confirmation, because nobody else can be elected
    cleanly. 0 if a member has not confirmed yet.
    """
    oldest: int | None = None
    for member in isr:
        if member == master:
            continue
        asked = asked_ns.get(member)
        if asked is None:
            return 0
        if oldest is None or asked < oldest:
            oldest = asked
    return None if oldest is None else oldest + CONFIRMATION_NS


def may_answer_reads(now_ns: int, until_ns: int | None) -> bool:
    """Return whether reads may be answered; `until_ns` comes from `confirmed_until_ns`.

    The master asks with every batch of requests. So a process that was stopped answers nothing
    stale when it goes on.
    """
    return until_ns is None or now_ns < until_ns


def serves_from_ns(last_confirmed_ns: int, *, was_handed_over: bool) -> int:
    """Return from when a promoted replica may serve: when its own last confirmation has lapsed.

    `last_confirmed_ns` is when it last confirmed another master, by its own clock. A process that
    has started does not know what it confirmed before, so it uses the time of its start. A master
    that hands over answers nothing any more before it writes the record, so nobody waits for it.
    """
    return last_confirmed_ns + (0 if was_handed_over else PROMOTED_WAIT_NS)

"""One partition's mastership: high watermark, in-sync set, services."""

from __future__ import annotations

import pytest

from failover.replication.mastership import Mastership, ReplicationSettings, Service
from failover.rules.isr import CONFIRMATION_NS, Lateness
from failover.rules.replication_record import (
    ReplicationRecord,
    add_copy,
    create,
    elect,
    expand,
    shrink,
    want,
)
from support.memory_node import MemoryNode
from vbucket.engine.engine import SET
from vbucket.engine.partition import Partition

VB = 1
S = 1_000_000_000
NOW = 100 * S
ALIVE = {"a": 1, "b": 1, "c": 1}
RECORD = elect(create("abc"), "a")


def synced_part(changes: int) -> Partition:
    """Return a partition whose changes are on disk, and not committed."""
    node = MemoryNode()
    part = node.engine.partitions[VB]
    part.has_copies = True
    for number in range(changes):
        key = b"\0k%d" % number
        node.engine.store(SET, VB, key, key + b"v", 0, 0, 0, 0)
    node.commit()
    assert (part.synced_seqno, part.committed_seqno) == (changes, 0)
    return part


def mastership(
    changes: int = 0, record: ReplicationRecord = RECORD, *, known_seqno: int = 0,
    serves_from_ns: int = 0, min_in_sync: int | None = 1,
) -> Mastership:  # fmt: skip
    """Return that of member a; `changes` were there when it began."""
    made = Mastership(
        synced_part(changes), record, "a", ReplicationSettings(min_in_sync=min_in_sync),
        now_ns=NOW, ready_group=1, serves_from_ns=serves_from_ns, known_seqno=known_seqno,
    )  # fmt: skip
    made.become_ready()
    return made


def acknowledge(master: Mastership, *members: str, seqno: int, epoch: int = 2) -> None:
    for member in members:
        master.acknowledged(member, epoch, seqno)


# -- the high watermark ----------------------------------------------------------------------------


def test_it_is_the_smallest_synced_seqno_of_this_epoch() -> None:
    master = mastership(5)
    assert master.hw_seqno() == 0
    acknowledge(master, "b", seqno=5)
    acknowledge(master, "c", seqno=3, epoch=1)
    assert master.hw_seqno() == 0, "an acknowledgement of an earlier epoch does not count"
    acknowledge(master, "c", seqno=3)
    assert master.hw_seqno() == 3
    acknowledge(master, "b", "c", seqno=9)
    assert master.hw_seqno() == 5, "the master counts itself"


def test_it_waits_for_min_in_sync_and_for_the_version() -> None:
    alone = shrink(RECORD, "bc")
    assert mastership(5, alone, min_in_sync=2).hw_seqno() == 0
    master = mastership(5, alone)
    master._is_ready = False
    assert master.hw_seqno() == 0, "the version of the epoch is not on disk"
    master.become_ready()
    assert master.hw_seqno() == 5


def test_what_is_known_is_no_more_than_what_is_here() -> None:
    assert mastership(5, known_seqno=4).hw_seqno() == 4
    assert mastership(5, known_seqno=40).known_seqno == 5


def test_leavers_count_until_confirmed_joiners_from_the_question() -> None:
    master = mastership(5)
    acknowledge(master, "b", seqno=5)
    master.ask(shrink(RECORD, "c").isr)
    master.is_writing = True
    assert master.isr == {"a", "b", "c"}
    assert master.hw_seqno() == 0
    master.decided(is_written=True)
    master.take_record(shrink(RECORD, "c"))
    assert (master.isr, master.hw_seqno()) == ({"a", "b"}, 5)
    master = mastership(5, shrink(RECORD, "c"))
    acknowledge(master, "b", seqno=5)
    master.ask(frozenset("abc"))
    master.is_writing = True
    assert master.hw_seqno() == 0, "the store may have c in the set already"
    master.take_record(shrink(RECORD, "c"))
    assert master.asked is not None, "a view that is old decides nothing"
    master.decided(is_written=False)
    assert (master.isr, master.hw_seqno()) == ({"a", "b"}, 5)


# -- the in-sync set -------------------------------------------------------------------------------


def ticks(master: Mastership, until_ns: int, *heard: str) -> ReplicationRecord | None:
    """Let time pass; these members confirm questions. Return the record that is wanted."""
    for now_ns in range(NOW, NOW + until_ns, S // 10):
        heard_ns = dict.fromkeys(heard, now_ns - S // 100) | dict.fromkeys(
            ALIVE.keys() - set(heard), NOW - 5 * S
        )
        if (record := master.changed_isr(now_ns, ALIVE, heard_ns)) is not None:
            return record
    return None


def test_who_lags_leaves_after_the_limit() -> None:
    master = mastership(5)
    acknowledge(master, "b", seqno=5)
    acknowledge(master, "c", seqno=4)
    assert ticks(master, S, "b", "c") is None
    assert ticks(master, 2 * S, "b", "c") == shrink(RECORD, "c")


def test_who_says_nothing_leaves_although_nothing_is_written() -> None:
    master = mastership(5)
    acknowledge(master, "b", "c", seqno=5)
    assert ticks(master, 3 * S, "b", "c") is None
    master = mastership(5)
    acknowledge(master, "b", "c", seqno=5)
    assert ticks(master, S, "c") is None
    assert ticks(master, 2 * S, "c") == shrink(RECORD, "b")


def test_who_left_in_silence_joins_when_it_is_heard_again() -> None:
    master = mastership(5)
    acknowledge(master, "b", "c", seqno=5)
    later_ns = NOW + 2 * S
    heard_ns = {"b": later_ns, "c": NOW}
    assert master.changed_isr(NOW, ALIVE, {"b": NOW, "c": NOW}) is None
    assert master.changed_isr(later_ns, ALIVE, heard_ns) == shrink(RECORD, "c")
    master.take_record(shrink(RECORD, "c"))
    assert master.changed_isr(later_ns, ALIVE, heard_ns) is None, "it would leave at once"
    again = master.changed_isr(later_ns, ALIVE, heard_ns | {"c": later_ns})
    assert again == expand(master.record, "c")


def test_nobody_leaves_because_the_master_stood_still() -> None:
    master = mastership(5)
    acknowledge(master, "b", "c", seqno=5)
    heard_ns = {"b": NOW, "c": NOW}
    assert master.changed_isr(NOW, ALIVE, heard_ns) is None
    lost_ns = 20 * S
    assert master.changed_isr(NOW + lost_ns, ALIVE, heard_ns, lost_ns=lost_ns) is None
    later_ns, heard_ns = NOW + lost_ns + S, {"b": NOW, "c": NOW + lost_ns + S}
    assert master.changed_isr(later_ns, ALIVE, heard_ns, lost_ns=lost_ns) is None
    heard_ns["c"] = later_ns = later_ns + S // 10
    wanted = master.changed_isr(later_ns, ALIVE, heard_ns, lost_ns=lost_ns)
    assert wanted == shrink(RECORD, "b"), "b says nothing while this node runs"


def test_dead_nodes_copy_leaves_at_once_and_a_handover_stays() -> None:
    master = mastership(5)
    assert master.changed_isr(NOW, {"a": 1, "c": 1}, {}) == shrink(RECORD, "b")
    master.is_writing = True
    assert master.changed_isr(NOW, {"a": 1}, {}) is None, "one change at a time"


@pytest.mark.parametrize(
    ("epoch", "seqno", "is_heard", "joins"),
    [(2, 5, True, True), (2, 4, True, False), (1, 5, True, False), (2, 5, False, False)],
)
def test_who_joins(epoch: int, seqno: int, is_heard: bool, joins: bool) -> None:
    record = shrink(RECORD, "c")
    master = mastership(5, record)
    acknowledge(master, "b", seqno=5)
    acknowledge(master, "c", seqno=seqno, epoch=epoch)
    heard_ns = {"b": NOW, "c": NOW} if is_heard else {"b": NOW}
    expected = expand(record, "c") if joins else None
    assert master.changed_isr(NOW, ALIVE, heard_ns) == expected


def test_filled_copy_joins_when_others_may_unless_few_in_sync() -> None:
    record = add_copy(shrink(RECORD, "c"), "d")
    master = mastership(5, record)
    acknowledge(master, "b", "d", seqno=5)
    alive, heard_ns = ALIVE | {"d": 1}, {"b": NOW, "d": NOW}
    assert master.changed_isr(NOW, alive, heard_ns, may_fill=False) is None
    assert master.changed_isr(NOW, alive, heard_ns) == expand(record, "d")
    acknowledge(master, "c", seqno=5)
    assert master.changed_isr(NOW, alive, heard_ns | {"c": NOW}, may_fill=False) == expand(
        record, "c"
    ), "it was full before"
    alone = add_copy(shrink(RECORD, "bc"), "d")
    master = mastership(5, alone)
    acknowledge(master, "d", seqno=5)
    assert master.changed_isr(NOW, alive, {"d": NOW}, may_fill=False) == expand(alone, "d")


# -- services --------------------------------------------------------------------------------------


def test_the_services_in_order() -> None:
    master = mastership(5, serves_from_ns=NOW + S)
    master._is_ready = False
    assert master.service(NOW + 2 * S, None) is Service.PREPARING
    master.become_ready()
    assert master.service(NOW + 2 * S, None) is Service.REPLAYING, "the HW is below the start"
    master.part.committed_seqno = 5
    assert master.service(NOW, None) is Service.REPLAYING, "its own confirmation may count yet"
    assert master.service(NOW + S, None) is Service.SERVING
    master.handing_since_ns = NOW
    assert master.service(NOW + S, None) is Service.HANDING
    assert "another node becomes" in master.why_writes_wait
    master.has_handed = True
    assert master.service(NOW + S, None) is None
    master.decided(is_written=False)
    assert master.service(NOW + S, None) is Service.SERVING


def test_a_confirmation_lapses() -> None:
    master = mastership()
    asked_ns = {"b": NOW, "c": NOW - S // 10}
    until_ns = master.confirmed_until_ns(asked_ns)
    assert until_ns == NOW - S // 10 + CONFIRMATION_NS
    assert master.service(until_ns - 1, until_ns) is Service.SERVING
    assert master.service(until_ns, until_ns) is None
    assert master.confirmed_until_ns({"b": NOW}) == 0, "c has confirmed nothing"
    alone = mastership(record=shrink(RECORD, "bc"))
    assert alone.confirmed_until_ns({}) is None


def test_too_few_in_sync_hold_writes() -> None:
    master = mastership(record=shrink(RECORD, "bc"), min_in_sync=None)
    assert master.min_in_sync == 2
    assert master.why_writes_wait == "1 of 3 copies are in sync; 2 must be"
    assert mastership(record=want(RECORD, "b")).why_writes_wait == ""


# -- late members ----------------------------------------------------------------------------------


def test_a_slow_member_leaves_and_does_not_join() -> None:
    master = mastership()
    slow = Lateness(frozenset("c"), frozenset("c"))
    heard = {"b": NOW, "c": NOW}
    assert master.changed_isr(NOW, ALIVE, heard) is None
    assert master.changed_isr(NOW, ALIVE, heard, slow) == shrink(RECORD, "c")
    master.take_record(shrink(RECORD, "c"))
    acknowledge(master, "b", "c", seqno=0)
    assert master.changed_isr(NOW, ALIVE, heard, slow) is None
    joined = master.changed_isr(NOW, ALIVE, heard)
    assert joined is not None
    assert joined.isr == RECORD.isr


def test_a_master_that_may_be_deposed_leaves_no_slow_member_out() -> None:
    """It is probably the one that is cut off: the others must stay electable."""
    master = mastership()
    slow = Lateness(frozenset("c"), frozenset("c"))
    now_ns = NOW + S
    assert master.changed_isr(now_ns, ALIVE, {"b": NOW, "c": NOW}, slow) is None
    master = mastership()
    assert master.changed_isr(now_ns, ALIVE, {"b": now_ns, "c": NOW}, slow) == shrink(RECORD, "c")


def test_a_slow_member_joins_where_the_others_are_too_few() -> None:
    alone = shrink(RECORD, "bc")
    master = mastership(record=alone, min_in_sync=2)
    acknowledge(master, "c", seqno=0)
    slow = Lateness(frozenset("c"), frozenset("c"))
    master._caught_up_ns["c"] = NOW
    assert master.changed_isr(NOW, ALIVE, {"c": NOW}, slow) == expand(alone, "c")


def test_who_has_left_counts_until_all_members_hold_the_record() -> None:
    """The metadata store may go back to an older copy."""
    master = mastership()
    acknowledge(master, "b", seqno=5)
    master.take_record(shrink(RECORD, "c"), 9)
    assert master.isr == {"a", "b", "c"}
    assert not master.is_steady(ALIVE)
    assert not master.members_saw({"a": 9, "b": 8})
    assert master.isr == {"a", "b", "c"}
    assert master.members_saw({"a": 9, "b": 9})
    assert master.isr == {"a", "b"}


def test_revisions_of_another_connection_say_nothing_of_holders() -> None:
    """The store may have gone back, and come as far again with other records."""
    master = mastership()
    left = shrink(RECORD, "c")
    master.take_record(left, 9)
    master.store_begins_again()
    assert not master.members_saw({"a": 20, "b": 20})
    assert master.isr == {"a", "b", "c"}
    master.take_record(left, 9)  # it was read again: the store has not gone back
    assert master.members_saw({"a": 9, "b": 9})
    assert master.isr == {"a", "b"}

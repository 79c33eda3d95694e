"""A master sends a commit group while it writes it, and counts nothing as committed before."""

from __future__ import annotations

import pytest

from failover.replication.link import NewestGroup
from failover.replication.messages import GroupMessage, Message
from failover.replication.replica import Senders
from failover.rules.isr import Sender
from failover.rules.replication_record import elect, shrink
from support.copies import Copies, groups_to, holdings, messages_to, put
from support.stored_bytes import pack_mutation
from vbucket.log.record import split_entries
from vbucket.model.entry import seqno_of


@pytest.fixture
def copies() -> Copies:
    """Three nodes at rest. Node a is master."""
    found = Copies("abc")
    found.rest()
    return found


def committed(copies: Copies, member: str, vb_id: int = 0) -> int:
    return copies.nodes[member].engine.partitions[vb_id].committed_seqno


def equal(copies: Copies, vb_id: int = 0) -> bool:
    one, *others = (holdings(node, vb_id) for node in copies.nodes.values())
    return all(each == one for each in others)


def test_replicas_sync_a_group_before_their_master_has(copies: Copies) -> None:
    put(copies, 0)
    copies.a.begin()
    copies.move()
    for member in "bc":
        copies.nodes[member].commit()
        assert copies.nodes[member].engine.partitions[0].synced_seqno == 1
    copies.move()
    assert copies.a.engine.partitions[0].synced_seqno == 0
    assert [committed(copies, member) for member in "abc"] == [0, 0, 0]
    copies.a.commit()
    assert committed(copies, "a") == 1
    assert not groups_to(copies, "b"), "it is sent once"
    copies.rest()
    assert equal(copies)


def test_a_master_that_is_first_waits_for_its_replicas(copies: Copies) -> None:
    put(copies, 0)
    copies.a.begin()
    copies.a.commit()
    assert committed(copies, "a") == 0
    copies.rest()
    assert committed(copies, "a") == 1


def test_what_goes_section_by_section_is_sent_when_it_is_synced(copies: Copies) -> None:
    put(copies, 3)
    copies.rest()
    put(copies, 0)
    assert copies.a.engine.keyspace.raise_floor(3, 1, 0) == (1, 0)  # a control entry
    copies.a.begin()
    assert not [each for each in messages_to(copies, "b") if has_entries(each)]
    copies.a.commit()
    assert [each for each in messages_to(copies, "b") if has_entries(each)]
    copies.rest()
    assert equal(copies)


def has_entries(message: Message | GroupMessage) -> bool:
    if isinstance(message, GroupMessage):
        return bool(message.entries)
    return any(section.entries for section in message.sections)


def test_a_stream_opened_meanwhile_gets_group_from_its_cursor(copies: Copies) -> None:
    put(copies, 0)
    put(copies, 1)
    link = copies.b.core.replica.links["a"]
    copies.a.begin()
    link.leave(0)
    link.follow(0, copies.records[0].epoch, copies.now_ns)
    copies.move()
    copies.move()
    copies.a.commit()
    copies.rest()
    assert copies.problems == [], "no gap was seen"
    assert equal(copies)


def test_a_link_that_is_new_gets_the_group_when_it_is_synced(copies: Copies) -> None:
    put(copies, 0)
    copies.a.begin()
    for wire in copies.wires:
        if wire.node.member == "b":
            wire.cut()
    for _ in range(10):
        copies.tick()
        copies.move()
    assert copies.b.core.replica.links["a"].is_open(0)
    copies.a.commit()
    copies.rest()
    assert copies.problems == []
    assert equal(copies)


def test_replica_ahead_of_its_masters_disk_follows_later(
    copies: Copies,
) -> None:
    put(copies, 0)
    copies.a.begin()
    copies.move()
    copies.b.commit()
    link = copies.b.core.replica.links["a"]
    link.leave(0)
    link.follow(0, copies.records[0].epoch, copies.now_ns)
    copies.move()
    copies.move()
    assert not link.is_open(0), "the master cannot say what it has on disk yet"
    copies.a.commit()
    copies.rest()
    assert link.is_open(0)
    assert equal(copies)


def test_group_is_sent_although_the_in_sync_set_changes(copies: Copies) -> None:
    """The group falls apart before it is synced, and some replica has not got it."""
    put(copies, 0)
    put(copies, 1)
    feed = copies.a.core.master.feeds["c"]
    feed.window_bytes = 0  # no room now
    copies.a.begin()
    feed.window_bytes = 1 << 20
    assert groups_to(copies, "b")
    assert not groups_to(copies, "c")
    copies.a.core.master.masterships[1].ask(frozenset("abc"))
    copies.move()
    copies.b.commit()
    copies.move()  # the acknowledgement is taken, and partition 1 is left out
    copies.a.commit()
    copies.rest()
    assert copies.problems == []
    assert equal(copies)
    assert equal(copies, 1)


def test_master_that_loses_end_of_its_log_follows_who_has_it(copies: Copies) -> None:
    put(copies, 0)
    copies.rest()
    put(copies, 0)
    copies.a.begin()
    copies.move()
    for member in "bc":
        copies.nodes[member].commit()
    for wire in copies.wires:
        wire.cut()
    copies.a.crash()
    assert copies.a.engine.partitions[0].high_seqno == 1
    for vb_id in range(4):
        copies.write(vb_id, elect(copies.records[vb_id], "b"))
    copies.rest()
    assert copies.b.engine.partitions[0].high_seqno == 2
    assert equal(copies)


def test_master_that_is_elected_again_has_its_replicas_cut_back(copies: Copies) -> None:
    """It lost the end of its log, and a replica that has it follows."""
    put(copies, 0)
    copies.a.begin()
    copies.move()
    copies.b.commit()
    for wire in copies.wires:
        wire.cut()
    copies.a.crash()
    copies.show(copies.a)
    for vb_id in range(4):
        copies.write(vb_id, elect(copies.records[vb_id], "a"))
    copies.rest()
    put(copies, 0, b"\0another")
    copies.rest()
    assert copies.b.engine.partitions[0].high_seqno == 1
    assert equal(copies)


@pytest.mark.parametrize("is_told", [False, True], ids=["not told", "told"])
def test_a_node_left_alone_commits_what_its_master_had_on_disk(*, is_told: bool) -> None:
    """Of the newest group it knows that only if it was told, or if another group has come."""
    copies = Copies("ab")
    copies.rest()
    core = copies.b.core
    for _ in range(2):
        put(copies, 0)
        copies.a.begin()
        copies.move()
        copies.b.commit()
        if is_told:
            copies.rest()
        else:
            copies.move()
            copies.a.commit()
    for wire in copies.wires:
        wire.cut()
    link = core.replica.links["a"]
    for _ in range(10):
        copies.tick()
    assert core.replica.links["a"] is not link, "it dials again, and nobody answers"
    sender = core.replica.take_sender(0, copies.records[0].epoch + 1)
    assert sender == Sender("a", 2 if is_told else 1)


def test_master_with_few_in_sync_sends_what_it_has_synced() -> None:
    """Its replica would not know what is on its disk, and could not serve all that it has."""
    copies = Copies("ab")
    copies.rest()
    copies.a.core.master.take_min_in_sync(2)
    put(copies, 0)
    copies.a.begin()
    assert not groups_to(copies, "b")
    copies.a.commit()
    copies.move()
    copies.b.commit()
    for wire in copies.wires:
        wire.cut()
    sender = copies.b.core.replica.take_sender(0, copies.records[0].epoch + 1)
    assert sender == Sender("a", 1)


def test_what_was_reconciled_after_a_group_counts_wholly() -> None:
    senders = Senders()
    entries = b"".join(
        pack_mutation(vb_id=vb_id, key=b"\0k", value=b"v", cas=1, seqno=seqno, rev_seqno=1)
        for vb_id, seqno in ((7, 4), (8, 9), (7, 5))
    )
    assert [seqno_of(entry) for entry in split_entries(entries)] == [4, 9, 5]
    newest = NewestGroup(12, entries)
    senders.welcomed(7, 1, "a", 2)
    assert senders.take(7, 2, 5, {"a": newest}) == Sender("a", 3)
    senders.welcomed(7, 1, "a", 5)
    assert senders.take(7, 2, 5, {"a": newest}) == Sender("a", 5)
    senders.welcomed(9, 1, "a", 2)
    assert senders.take(9, 2, 6, {"a": newest}) == Sender("a", 6), "it is not in the group"
    senders.welcomed(8, 1, "a", 2)
    senders.welcomed(7, 1, "b", 2)
    senders.link_gone("a", newest)
    senders.link_gone("a", None)
    assert senders.take(8, 2, 9, {"a": None}) == Sender("a", 8), "of a link that is gone"
    assert senders.take(7, 2, 5, {}) == Sender("b", 5), "another master's"
    senders.welcomed(8, 1, "a", 2)
    senders.link_gone("a", newest)
    senders.welcomed(8, 1, "a", 9)
    assert senders.take(8, 2, 20, {"a": None}) == Sender("a", 20), "it was reconciled since"
    senders.welcomed(8, 1, "a", 2)
    assert senders.take(8, 3, 9, {}) is None, "another epoch is between"
    assert senders.take(8, 2, 9, {}) is None, "it never followed"


def test_a_member_that_was_left_out_meanwhile_is_not_waited_for(copies: Copies) -> None:
    put(copies, 0)
    copies.a.begin()
    copies.move()
    copies.b.commit()
    copies.move()
    copies.write(0, shrink(copies.records[0], ["c"]))
    copies.a.commit()
    copies.move()
    copies.move()
    assert committed(copies, "a") == 1

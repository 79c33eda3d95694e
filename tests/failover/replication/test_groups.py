"""Commit groups that go to replicas wholly: what is sent, what commits, and what falls back."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from dcp.session.replication_port import ACK_BYTES, ACK_HEAD, ReplicationError
from dcp.session.session import Session
from dcp.wire.frame import HEADER_BYTES, Frame, FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from failover.replication import link
from failover.replication.messages import (
    ANNOUNCED_GROUPS_MAX,
    NOTHING,
    Floors,
    GroupMessage,
    Message,
    StoreSeen,
    checked_group,
    pack_ack,
    pack_control_entry,
    pack_group,
    share,
    unpack_group,
)
from failover.replication.progress import Announcements
from failover.rules.replication_record import shrink
from support.copies import Copies, CopyNode, groups_to, holdings, messages_to, put
from support.stored_bytes import pack_deletion, pack_mutation
from vbucket.engine.leadership import begin_snapshot
from vbucket.log.record import split_entries
from vbucket.model.control import SnapshotWindow
from vbucket.model.entry import prev_seqno_of, vb_id_of
from vbucket.native import new_staged


def committed(node: CopyNode, vb_id: int) -> int:
    return node.engine.partitions[vb_id].committed_seqno


def level() -> Copies:
    """Return three nodes at rest."""
    copies = Copies("abc")
    copies.rest()
    return copies


@pytest.mark.skipif(new_staged() is None, reason="the loops in C are not built")
def test_a_group_is_applied_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python is not asked for a group that the loop can apply."""

    def asked(*_arguments: object) -> None:
        raise AssertionError("the group was checked in Python")

    monkeypatch.setattr(link, "checked_group", asked)
    copies = level()
    for vb_id in (0, 1, 3):
        put(copies, vb_id)
    copies.rest()
    for node in copies.nodes.values():
        assert [committed(node, vb_id) for vb_id in (0, 1, 3)] == [1, 1, 1]


def test_one_partitions_change_leaves_others_of_a_group_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While partitions are handed over, hundreds of others are written in the same groups."""
    copies = level()
    leading = copies.a.core.master
    one_by_one: list[int] = []
    raise_watermarks = leading.watermarks.advance
    monkeypatch.setattr(
        leading.watermarks,
        "advance",
        lambda vb_ids: one_by_one.extend(vb_ids) or raise_watermarks(vb_ids),
    )
    for vb_id in (0, 1, 3):
        put(copies, vb_id)
    copies.a.commit()
    leading.masterships[1].ask(frozenset("abc"))  # a record changes here
    copies.move()
    copies.nodes["c"].core.replica.links["a"].leave(3)  # a stream is opened again there
    copies.nodes["c"].core.replica.links["a"].follow(3, copies.records[3].epoch, copies.now_ns)
    for member in "bc":
        copies.nodes[member].commit()
    copies.move()
    assert [committed(copies.a, vb_id) for vb_id in (0, 1)] == [1, 1]
    assert 0 not in one_by_one
    assert {1, 3} <= set(one_by_one)
    copies.rest()
    assert [committed(node, 3) for node in copies.nodes.values()] == [1, 1, 1]


def test_what_is_not_in_step_everywhere_leaves_others_together() -> None:
    """A partition that has just come here is in the same groups as hundreds of others."""
    copies = level()
    put(copies, 3)
    copies.rest()
    link = copies.nodes["c"].core.replica.links["a"]
    link.leave(1)  # c is in sync, and does not follow it at present
    copies.move()
    for vb_id in (0, 1, 2):
        put(copies, vb_id)
    assert copies.a.engine.keyspace.raise_floor(3, 1, 0) == (1, 0)  # control entries
    copies.a.commit()
    (to_b,), (to_c,) = (groups_to(copies, member) for member in "bc")
    assert to_b == to_c
    assert {vb_id_of(entry) for entry in split_entries(to_b)} == {0, 2}
    (section,) = [each for each in messages_to(copies, "b") if isinstance(each, Message)]
    assert [each.vb_id for each in section.sections] == [1, 3], "b has them in step"
    copies.move()
    for member in "bc":
        copies.nodes[member].commit()
    copies.move()
    assert [committed(copies.a, vb_id) for vb_id in (0, 1, 2)] == [1, 0, 1]
    for member in "bc":
        told = messages_to(copies, member)
        assert [each.committed for each in told if isinstance(each, GroupMessage)] != [(0, 0)]
        assert not [each for each in told if isinstance(each, Message)], "they know it by number"
    link.follow(1, copies.records[1].epoch, copies.now_ns)
    copies.rest()
    assert copies.problems == []
    assert [committed(node, 1) for node in copies.nodes.values()] == [1, 1, 1]
    for vb_id in (0, 1, 2):
        assert holdings(copies.b, vb_id) == holdings(copies.a, vb_id)
        assert holdings(copies.nodes["c"], vb_id) == holdings(copies.a, vb_id)


def test_a_copy_that_is_filled_costs_the_others_nothing() -> None:
    copies = level()
    copies.write(1, shrink(copies.records[1], ["c"]))
    copies.rest()
    feed = copies.a.core.master.feeds["c"]
    feed.window_bytes = 1
    put(copies, 1)
    copies.rest()
    feed.window_bytes = 1 << 20
    feed.streams.fall_behind(copies.a.engine.partitions[1], ())
    put(copies, 1, b"\0more")
    put(copies, 2)
    copies.a.commit()
    (to_b,), (to_c,) = (groups_to(copies, member) for member in "bc")
    assert {vb_id_of(entry) for entry in split_entries(to_b)} == {1, 2}
    assert {vb_id_of(entry) for entry in split_entries(to_c)} == {2}
    copies.rest()
    assert copies.problems == []
    for vb_id in (1, 2):
        assert holdings(copies.nodes["c"], vb_id) == holdings(copies.a, vb_id)


def test_copy_fed_by_cursor_is_told_that_its_part_is_committed() -> None:
    """The rest of the group is told by its number, which says nothing of that part."""
    copies = level()
    copies.write(1, shrink(copies.records[1], ["c"]))
    copies.rest()
    feed = copies.a.core.master.feeds["c"]
    feed.streams.fall_behind(copies.a.engine.partitions[1], ())
    for vb_id in (1, 2):
        put(copies, vb_id)
    copies.a.commit()
    for member in "cb":  # so that all of the group commits at once
        assert committed(copies.a, 1) == committed(copies.a, 2) == 0
        copies.move()
        copies.nodes[member].commit()
        copies.move()
    copies.rest()
    assert [committed(copies.nodes["c"], vb_id) for vb_id in (1, 2)] == [1, 1]


def test_group_goes_to_all_replicas_as_one_message_of_same_bytes() -> None:
    copies = level()
    for vb_id in (0, 1, 3):
        put(copies, vb_id)
    assert messages_to(copies, "b") == messages_to(copies, "c") == []
    copies.a.commit()
    assert len(messages_to(copies, "b")) == len(messages_to(copies, "c")) == 1
    (to_b,), (to_c,) = (groups_to(copies, member) for member in "bc")
    assert to_b == to_c
    assert [vb_id_of(entry) for entry in split_entries(to_b)] == [0, 1, 3]
    copies.rest()
    for vb_id in range(4):
        held = holdings(copies.a, vb_id)
        assert held["seqnos"] == ((1, 1, 1) if vb_id != 2 else (0, 0, 0))
        assert holdings(copies.b, vb_id) == holdings(copies.nodes["c"], vb_id) == held
    assert copies.problems == []


def test_group_commits_when_whole_in_sync_set_has_it_on_disk() -> None:
    copies = level()
    put(copies, 1)
    copies.a.commit()
    copies.move()
    copies.b.commit()
    copies.move()
    assert committed(copies.a, 1) == 0, "c has received it, but not synced it"
    copies.nodes["c"].commit()
    copies.move()
    assert committed(copies.a, 1) == 1
    assert copies.a.engine.commits.committed_group == copies.a.engine.commits.synced_group


def test_an_acknowledgement_takes_the_short_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its length and its head tell it, see `dcp.session.replication_port`."""
    packet = pack_ack(1, 2, StoreSeen(3, 4))
    assert (len(packet), packet[:HEADER_BYTES]) == (ACK_BYTES, ACK_HEAD)
    copies = level()
    handled, resume = list[bytes](), Session.resume

    def noted(session: Session, now_ns: int) -> None:
        handled.append(bytes(session.state.buffer))
        resume(session, now_ns)

    monkeypatch.setattr(Session, "resume", noted)
    for count in range(1, 10):
        put(copies, 1)
        copies.rest()
        assert committed(copies.a, 1) == count
    opcodes = [packet[1] for packet in handled if packet]
    assert Opcode.X_REPLICA_ACK not in opcodes


def test_replicas_learn_commits_by_the_number_of_the_message() -> None:
    copies = level()
    put(copies, 1)
    put(copies, 2)
    copies.a.commit()
    copies.move()
    for member in "bc":
        copies.nodes[member].commit()
    copies.move()
    assert committed(copies.a, 1) == committed(copies.a, 2) == 1
    (told,) = messages_to(copies, "b")
    assert isinstance(told, GroupMessage)
    assert (told.entries, told.committed[0] > 0) == (b"", True)
    copies.move()
    assert committed(copies.b, 1) == committed(copies.b, 2) == 1


def test_news_of_commits_waits_for_the_next_group() -> None:
    copies = level()
    feed = copies.a.core.master.feeds["b"]
    assert (feed.has_output, feed.can_wait) == (False, True)
    put(copies, 1)
    copies.a.commit()
    assert (feed.has_output, feed.can_wait) == (True, False)
    copies.move()
    for member in "bc":
        copies.nodes[member].commit()
    copies.move()
    assert committed(copies.a, 1) == 1
    assert (feed.has_output, feed.can_wait) == (True, True)
    put(copies, 2)
    copies.a.commit()
    assert not feed.can_wait
    [message] = messages_to(copies, "b")
    assert isinstance(message, GroupMessage)
    assert (bool(message.entries), message.committed) == (True, (message.number - 1,) * 2)
    assert not feed.has_output


def test_group_sent_before_the_in_sync_change_commits_one_by_one() -> None:
    copies = level()
    put(copies, 1)
    copies.a.commit()
    copies.move()
    copies.b.commit()
    copies.move()
    copies.write(1, shrink(copies.records[1], ["c"]))
    assert committed(copies.a, 1) == 0, "b may not have seen yet that c does not count any more"
    copies.move()
    assert committed(copies.a, 1) == 1, "b has it, and c does not count any more"


def test_group_is_not_committed_for_what_an_earlier_one_has() -> None:
    """Partitions 1 and 2 have different in-sync sets, so a group commits in two steps."""
    copies = level()
    copies.write(1, shrink(copies.records[1], ["c"]))
    copies.rest()
    put(copies, 2)
    copies.a.commit()
    copies.move()
    copies.nodes["c"].commit()
    copies.move()
    put(copies, 1)
    put(copies, 2)
    copies.a.commit()
    copies.move()
    copies.b.commit()
    while copies.move():
        pass
    assert (committed(copies.a, 1), committed(copies.a, 2)) == (1, 1), "c has not synced the second"
    assert (committed(copies.b, 1), committed(copies.b, 2)) == (1, 1)
    copies.rest()
    assert committed(copies.b, 2) == 2


def test_acknowledgement_for_a_reopened_stream_does_not_count() -> None:
    copies = level()
    put(copies, 1)
    copies.a.commit()
    copies.move()
    copies.nodes["c"].commit()
    copies.move()
    feed = copies.a.core.master.feeds["b"]
    feed.close_stream(1)
    copies.b.commit()
    copies.move()
    assert committed(copies.a, 1) == 0


def test_acknowledgement_of_group_before_opening_does_not_count() -> None:
    copies = level()
    put(copies, 1)
    copies.a.commit()
    copies.move()
    copies.nodes["c"].commit()
    copies.move()
    feed = copies.a.core.master.feeds["b"]
    feed.close_stream(1)
    feed.open(1, 2, 1 << 20, 0)
    copies.b.commit()
    wire = next(wire for wire in copies.wires if wire.node is copies.b)
    wire.take()
    wire.deliver(1 << 30, 0)
    assert committed(copies.a, 1) == 0


def test_who_joins_while_a_group_is_on_its_way_counts() -> None:
    copies = level()
    copies.write(1, shrink(copies.records[1], ["c"]))
    copies.rest()
    put(copies, 1)
    copies.a.commit()
    copies.move()
    copies.a.core.master.masterships[1].ask(frozenset("abc"))
    copies.b.commit()
    copies.move()
    assert committed(copies.a, 1) == 0, "c may be elected by now"
    copies.nodes["c"].commit()
    copies.move()
    assert committed(copies.a, 1) == 1


def test_member_that_got_group_section_by_section_counts_as_well() -> None:
    copies = level()
    copies.a.core.master.feeds["c"].window_bytes = 300  # less than a whole group counts
    put(copies, 1)
    copies.a.commit()
    assert (len(groups_to(copies, "b")), len(groups_to(copies, "c"))) == (1, 0)
    copies.move()
    for member in "cb":
        copies.nodes[member].commit()
        copies.move()
    assert committed(copies.a, 1) == 1, "without a tick"


def test_group_on_link_that_is_closed_does_not_count_as_whole() -> None:
    copies = level()
    put(copies, 1)
    copies.a.commit()
    feed = copies.a.core.master.feeds["b"]
    (group,) = [sent.group.group for sent in feed.inflights.sent if sent.group is not None]
    assert group.sent_to.keys() == {"b", "c"}
    feed.close()
    assert group.sent_to.keys() == {"c"}


def test_a_full_window_puts_partitions_behind_and_they_catch_up() -> None:
    copies = level()
    feed = copies.a.core.master.feeds["b"]
    put(copies, 1)
    copies.rest()
    feed.window_bytes = 1
    put(copies, 1, b"\0again")
    copies.a.commit()
    feed.window_bytes = 1 << 20
    put(copies, 1, b"\0more")
    put(copies, 2)
    copies.a.commit()
    (group,) = groups_to(copies, "b")
    assert (b"\0more" in group, b"\0k" in group) == (False, True), (
        "partition 1 is behind, partition 2 is not"
    )
    copies.rest()
    assert copies.problems == [], "nothing was sent twice or left out"
    for vb_id in (1, 2):
        assert holdings(copies.b, vb_id) == holdings(copies.a, vb_id)
    put(copies, 1, b"\0last")
    copies.a.commit()
    assert len(groups_to(copies, "b")) == 1, "it is in step again"


def mutation(vb_id: int, seqno: int, key: bytes = b"\0k", **fields: int) -> bytes:
    given = {"cas": 7, "rev_seqno": 1, "epoch": 2, **fields}
    return pack_mutation(vb_id=vb_id, key=key, value=b"v", seqno=seqno, **given)


def no_check(_vb_id: int) -> None:
    """Other partitions are not followed."""


def test_entries_of_a_whole_group_are_checked_for_each_partition() -> None:
    entries = [mutation(1, 5), mutation(3, 1), mutation(1, 6), mutation(9, 77)]
    entries.append(
        pack_deletion(vb_id=3, key=b"\0k", cas=9, seqno=2, rev_seqno=2, prev_seqno=1, epoch=2)
    )
    changes, ends = checked_group(b"".join(entries), {1: 4, 3: 0}, {1: 2, 3: 2}, no_check, 100)
    assert ends == {1: 6, 3: 2}, "partition 9 is not followed"
    assert [(change[0], change[3], change[6]) for change in changes] == [
        (1, 5, True), (3, 1, True), (1, 6, True), (3, 2, False),
    ]  # fmt: skip
    assert [change[2] for change in changes] == [*entries[:3], entries[4]]
    assert {change[1] for change in changes} == {b"\0k"}


def long_mutation() -> bytes:
    value = bytes(2000)
    return pack_mutation(vb_id=1, key=b"\0k", value=value, cas=7, seqno=5, rev_seqno=1, epoch=2)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (mutation(1, 6), "seqno 6 follows 4"),
        (mutation(1, 5) + mutation(1, 5), "seqno 5 follows 5"),
        (mutation(1, 5, epoch=3), "leader epoch 3"),
        (mutation(1, 5, epoch=1), "no change of leader epoch 2"),
        (mutation(1, 5, cas=0), "CAS 0"),
        (mutation(1, 5, prev_seqno=5), "replaces seqno 5"),
        (mutation(1, 5)[:-1], "an entry of 70 bytes after seqno 4; 69 follow"),
        (mutation(1, 5)[:20], "too short"),
        (pack_control_entry(1, Floors(1, 0)), "a control entry after seqno 4"),
        (long_mutation(), "at most 1124 are allowed"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_bad_entry_refuses_the_whole_group(payload: bytes, words: str) -> None:
    with pytest.raises(ReplicationError, match=words):
        checked_group(payload, {1: 4}, {1: 2}, no_check, 100)


def frame_of(pieces: list[bytes]) -> Frame:
    (frame,) = FrameDecoder().feed(b"".join(pieces))
    return frame


def test_message_with_a_group_round_trips_and_damage_is_noticed() -> None:
    entries = mutation(1, 5)
    message = b"".join(pack_group(9, 8, 4, (3, 7), share(entries)))
    assert unpack_group(frame_of([message])) == GroupMessage(9, 8, 4, (3, 7), entries)
    unsynced = pack_group(9, 8, 4, (3, 7), share(entries), is_synced=False)
    assert not unpack_group(frame_of(unsynced)).is_synced
    assert unpack_group(frame_of(pack_group(9, 8, 4, (0, 0), NOTHING))).entries == b""
    for place in range(24, len(message)):
        changed = message[:place] + bytes([message[place] ^ 4]) + message[place + 1 :]
        with pytest.raises(ReplicationError, match="checksum"):
            unpack_group(frame_of([changed]))
    short = pack_request(Opcode.X_REPLICA_GROUP, extras=bytes(8))
    with pytest.raises(ReplicationError, match="41 bytes of extras"):
        unpack_group(frame_of([short]))


def test_of_what_is_committed_no_group_between_is_told_not() -> None:
    told = Announcements()
    for group, number in enumerate((3, 5, 6, 8)):
        told.sent(group, number)
    for group in (3, 1, 0):
        told.committed(group)
    assert [told.take() for _ in range(3)] == [(3, 5), (8, 8), (0, 0)]


def test_a_group_on_its_way_for_long_is_not_told_with_others() -> None:
    announcements = Announcements()
    announcements.sent(0, 1)
    announcements.sent(1, 2)
    announcements.committed(0)
    for group in range(2, ANNOUNCED_GROUPS_MAX + 2):
        announcements.sent(group, group + 1)
    assert not announcements.is_open(1), "too many followed it"
    announcements.committed(2)
    assert announcements.take() == (1, 1), "message 2 may not be committed"
    assert announcements.take() == (3, 3)
    assert not announcements


def test_changed_byte_closes_the_link_and_applies_nothing() -> None:
    copies = level()
    for vb_id in (0, 1):
        put(copies, vb_id)
    copies.a.commit()
    wire = next(wire for wire in copies.wires if wire.node is copies.b)
    wire.take()
    wire.to_replica = wire.to_replica[:-1] + bytes([wire.to_replica[-1] ^ 1])
    copies.move()
    [problem] = copies.problems
    assert "the checksum of its" in problem
    assert [copies.b.engine.partitions[vb_id].high_seqno for vb_id in (0, 1)] == [0, 0]
    copies.rest()
    assert holdings(copies.b, 1) == holdings(copies.a, 1)


def sent_by_a(copies: Copies, entries: list[bytes], opened: int = 1 << 20) -> None:
    """Let b receive a group of a that a did not make."""
    wire = next(wire for wire in copies.wires if wire.node is copies.b)
    number = wire.link.acks.number + 1
    pieces = pack_group(number, number, opened, (0, 0), share(b"".join(entries)))
    wire.link.receive(b"".join(pieces), copies.now_ns)


def test_a_group_is_applied_wholly_or_not_at_all() -> None:
    copies = level()
    sent_by_a(copies, [mutation(0, 1), mutation(1, 1), mutation(1, 3)])
    assert copies.b.engine.partitions[0].high_seqno == 0
    copies.move()
    assert "partition 1: seqno 3 follows 1" in copies.problems[0]


def test_reopened_stream_takes_no_group_made_before() -> None:
    copies = level()
    put(copies, 1)
    copies.a.commit()  # for the first stream
    wire = next(wire for wire in copies.wires if wire.node is copies.b)
    wire.take()
    late, wire.to_replica = wire.to_replica, b""
    record = copies.records[1]
    copies.b.core.replica.leave(1)
    copies.b.core.replica.follow(1, record, copies.now_ns)
    wire.take()
    wire.deliver(1 << 30, 0)
    wire.take()
    answer_bytes = 24 + int.from_bytes(wire.to_replica[8:12], "big")
    wire.to_replica = wire.to_replica[:answer_bytes] + late  # the answer overtakes the group
    wire.deliver(0, 1 << 30)
    assert copies.b.engine.partitions[1].high_seqno == 0, "it was not for this stream"
    assert wire.link.problem == ""


def test_commits_of_an_earlier_stream_do_not_count_for_a_later() -> None:
    copies = level()
    put(copies, 1)
    copies.a.commit()
    copies.move()
    copies.b.commit()
    wire = next(wire for wire in copies.wires if wire.node is copies.b)
    link, number = wire.link, wire.link.acks.number
    copies.b.core.replica.leave(1)
    pieces = pack_group(number + 1, number + 1, 1, (number, number), NOTHING)
    link.receive(b"".join(pieces), copies.now_ns)
    assert link.problem == ""
    assert committed(copies.b, 1) == 0


def test_a_group_inside_of_a_snapshot_is_refused() -> None:
    copies = level()
    begin_snapshot(copies.b.engine, 1, SnapshotWindow(0, 5, 0))
    wire = next(wire for wire in copies.wires if wire.node is copies.b)
    wire.link._note_high(1)
    sent_by_a(copies, [mutation(1, 1)])
    assert "inside of a snapshot" in wire.link.problem


def test_a_purged_deletion_that_is_still_here_is_linked() -> None:
    """The master has forgotten a key with its deletion; the replica has not compacted yet."""
    copies = level()
    part = copies.b.engine.partitions[1]
    deletion = pack_deletion(
        vb_id=1, key=b"\0k", cas=8, seqno=2, rev_seqno=2, prev_seqno=1, epoch=2
    )
    sent_by_a(copies, [mutation(1, 1), deletion, mutation(1, 3, key=b"\0other")])
    copies.b.commit()
    part.purge_seqno, part.history_floor = 2, 3
    sent_by_a(copies, [mutation(1, 4)])
    assert [prev_seqno_of(entry) for entry in part.active.entries] == [0, 1, 0, 2]
    assert part.item_count == 2


def calls_at_rest(partitions: int) -> int:
    """Return how many calls two nodes make in two seconds at rest."""
    copies = Copies("ab", partitions=partitions)
    copies.revive()
    copies.rest()
    for _ in range(20):
        copies.tick()
        copies.move()
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    for _ in range(40):
        copies.tick()
        copies.move()
    sys.setprofile(None)
    assert copies.problems == []
    return calls


def test_work_at_rest_does_not_grow_with_partitions() -> None:
    # One call for each partition would be 60 more, in each of 40 ticks.
    assert abs(calls_at_rest(64) - calls_at_rest(4)) < 60

"""A replica that was away for longer than its master keeps deletions: it keeps what it has."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_snapshot_model import Run, floors

from dcp.wire.opcode import Opcode
from failover.replication.messages import pack_rollback, unpack_rollback
from failover.rules.history import FailoverLog, Version
from support.replica_pair import VB, Member, ReplicaPair
from support.stored_bytes import pack_mutation
from vbucket.engine.leadership import begin_version
from vbucket.engine.resync import (
    BURST_S,
    DOCUMENTS_PER_S,
    UNENDED,
    Deletions,
    Looks,
    Remaining,
    Resync,
    deletions_for,
    is_of_now,
    pack_remaining,
    problem_of,
    remaining,
    resync_for,
    unpack_remaining,
)
from vbucket.model.entry import META, OPCODE_AT, head_of, key_of, seqno_of
from vbucket.store.environment import StoreDamagedError

KEYS = tuple(b"k%d" % number for number in range(8))
SECOND_NS = 10**9
U64 = st.integers(1, 2**64 - 1)


def away_pair(*, merged: bool = True, drops: bool = True) -> ReplicaPair:
    """Return a pair whose replica has 8 documents, and whose master has changed one and deleted
    three since. Two of the deletions are purged.
    """
    pair = ReplicaPair()
    pair.set(*KEYS)
    pair.follow()
    if merged:
        pair.replica.merge()
    pair.cut()
    pair.set(KEYS[0], value=b"new")  # 9
    pair.delete(KEYS[1], KEYS[2])  # 10, 11
    pair.set(b"other", b"more")  # 12, 13
    pair.delete(KEYS[3])  # 14
    pair.set(b"last")  # 15
    pair.raise_floor(14, purge=12, drops=drops)
    return pair


def step_until(pair: ReplicaPair, is_so: Callable[[], object]) -> None:
    """Let messages pass until a condition holds."""
    for _ in range(1_000):
        if is_so():
            return
        if not pair.step():
            pair.replica.tick()
            pair.master.tick()
    raise AssertionError("it does not happen")


def applied(pair: ReplicaPair) -> list[tuple[int, int, bytes]]:
    """Return opcode, seqno and key of what the replica has above seqno 8."""
    part, versions = pair.replica.part, pair.replica.node.engine.versions
    entries = versions.entries(part, 9, part.high_seqno, 1 << 30)
    return [(entry[OPCODE_AT], seqno_of(entry), key_of(entry)[1:]) for entry in entries]


@pytest.mark.parametrize("merged", [True, False])
def test_a_replica_keeps_what_its_master_still_has(merged: bool) -> None:
    pair = away_pair(merged=merged)
    pair.follow()
    assert pair.replica.core.replica.rollbacks == 0
    assert pair.replica.documents() == pair.master.documents()
    assert pair.replica.part.item_count == pair.master.part.item_count == 8
    assert floors(pair.replica) == floors(pair.master) == (14, 12)
    mutation, deletion = Opcode.DCP_MUTATION, Opcode.DCP_DELETION
    assert applied(pair) == [
        (mutation, 9, KEYS[0]), (deletion, 10, KEYS[1]), (deletion, 11, KEYS[2]),
        (mutation, 12, b"other"), (mutation, 13, b"more"), (deletion, 14, KEYS[3]),
        (mutation, 15, b"last"),
    ]  # fmt: skip
    pair.replica.merge()
    assert pair.replica.findings() == []
    pair.replica.node.raise_floor(VB, *floors(pair.replica))
    pair.replica.commit()
    pair.replica.compact()
    assert [seqno for _, seqno, _ in applied(pair)] == [9, 12, 13, 14, 15], "they are purged"


def test_what_was_read_again_meanwhile_is_no_deletion() -> None:
    pair = away_pair()
    step_until(pair, lambda: pair.replica.core.replica._resyncs)
    pair.set(KEYS[1], value=b"again")
    pair.follow()
    assert pair.replica.documents() == pair.master.documents()
    assert pair.replica.core.replica.rollbacks == 0


def test_what_was_set_again_above_the_floor_is_absent_at_it() -> None:
    pair = away_pair()
    pair.set(KEYS[1], value=b"again")
    pair.follow()
    floor = pair.replica.part.history_floor
    assert b"\0" + KEYS[1] in documents_at(pair.replica, pair.replica.part.high_seqno)
    assert documents_at(pair.replica, floor) == documents_at(pair.master, floor)
    assert b"\0" + KEYS[1] not in documents_at(pair.replica, floor)


def test_another_purge_while_it_asks_is_told_again() -> None:
    pair = away_pair()
    step_until(pair, lambda: pair.replica.core.replica._resyncs)
    pair.delete(KEYS[4])
    pair.set(b"end")
    pair.raise_floor(17, purge=16)
    pair.follow()
    assert pair.replica.documents() == pair.master.documents()
    assert pair.replica.core.replica.rollbacks == 0


def test_a_deletion_that_is_dropped_before_it_is_read_comes() -> None:
    pair = away_pair(drops=False)
    step_until(pair, lambda: pair.replica.part.incomplete_snapshot)
    assert pair.master.node.store.entry(VB, 10)
    pair.master.compact()
    assert not pair.master.node.store.entry(VB, 10)
    pair.follow()
    assert [seqno for _, seqno, _ in applied(pair)] == [9, 10, 11, 12, 13, 14, 15]
    assert pair.replica.documents() == pair.master.documents()
    assert pair.replica.core.replica.rollbacks == 0


def test_another_version_while_it_asks_is_told_again() -> None:
    pair = away_pair()
    step_until(pair, lambda: pair.replica.core.replica._resyncs)
    before = pair.replica.core.replica._resyncs[VB]
    pair.cut()
    begin_version(pair.master.node.engine, VB, pair.master.part.leader_epoch)
    pair.master.commit()
    assert not is_of_now(pair.master.part, before)
    pair.follow()
    assert pair.replica.documents() == pair.master.documents()
    assert pair.replica.core.replica.rollbacks == 0


def test_a_purge_on_the_way_ends_the_stream_and_it_asks_again() -> None:
    pair = away_pair()
    part = pair.replica.part
    step_until(pair, lambda: part.incomplete_snapshot)
    pair.delete(KEYS[4])
    pair.set(b"end")
    pair.raise_floor(17, purge=16)
    pair.follow()
    assert pair.replica.documents() == pair.master.documents()
    assert pair.replica.core.replica.rollbacks == 1, "back to seqno 8"
    assert part.history_floor == 17


@pytest.mark.parametrize("crash", [True, False])
def test_a_part_with_deletions_to_come_is_no_beginning(crash: bool) -> None:
    """Another master, or this one at another time, does not know what is left to delete."""
    pair = away_pair()
    step_until(pair, lambda: pair.replica.part.high_seqno == 9)
    pair.replica.commit()
    window = pair.replica.part.incomplete_snapshot
    assert window is not None
    assert (window.start, window.end) == (8, UNENDED)
    pair.cut()
    if crash:
        pair.replica.crash()
    step_until(pair, lambda: pair.replica.part.high_seqno == 8)
    assert pair.replica.part.incomplete_snapshot is None
    pair.follow()
    assert pair.replica.documents() == pair.master.documents()
    assert floors(pair.replica) == floors(pair.master)


def test_a_part_with_no_deletion_to_come_goes_on() -> None:
    pair = away_pair()
    step_until(pair, lambda: pair.replica.part.high_seqno == 13)
    pair.replica.commit()
    window = pair.replica.part.incomplete_snapshot
    assert window is not None
    assert window.end == 14
    pair.cut()
    pair.follow()
    assert pair.replica.documents() == pair.master.documents()
    assert pair.replica.core.replica.rollbacks == 0


def test_a_branch_and_a_purge_go_back_to_the_branch_only() -> None:
    pair = away_pair()
    pair.cut()
    node, part = pair.replica.node, pair.replica.part
    pair.lead(pair.replica)
    assert pair.client(pair.replica).set(VB, b"\0mine", b"v").status == 0
    pair.replica.commit()
    pair.lead(pair.master)
    assert part.high_seqno == 9
    step_until(pair, lambda: pair.replica.core.replica._resyncs)
    assert part.high_seqno == 8, "where the histories part, and not 0"
    pair.follow()
    assert part.history_floor == 14
    assert pair.replica.documents() == pair.master.documents()
    assert node.engine.partitions[VB].item_count == 8


def test_an_old_node_begins_at_0(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = away_pair()
    monkeypatch.setattr("failover.replication.master.RESYNC_FORMAT", 99)
    pair.follow()
    assert pair.replica.core.replica.rollbacks == 1
    assert pair.replica.part.history_floor == 14
    assert pair.replica.documents() == pair.master.documents()


@pytest.mark.parametrize(
    ("where", "limit"),
    [
        ("vbucket.engine.resync.KEYS_MAX", 2),
        ("vbucket.engine.resync.KEYS_BYTES_MAX", 5),
        ("vbucket.engine.resync.DOCUMENTS_MAX", 3),
    ],
)
def test_what_is_too_much_begins_at_0(
    where: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = away_pair()
    monkeypatch.setattr(where, limit)
    pair.follow()
    assert pair.replica.core.replica.rollbacks == 1
    assert pair.replica.documents() == pair.master.documents()


@pytest.mark.parametrize(
    "where",
    [
        "failover.replication.feed.remaining",
        "failover.replication.feed.deletions_for",
        "failover.replication.replica.resync_for",
    ],
)
def test_damage_begins_at_0(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: object) -> None:
        raise StoreDamagedError("a record is damaged", VB)

    pair = away_pair()
    monkeypatch.setattr(where, damaged)
    pair.follow()
    assert pair.replica.core.replica.rollbacks == 1
    assert pair.replica.documents() == pair.master.documents()


def test_no_room_for_deletions_is_no_answer() -> None:
    pair = away_pair()
    engine, part = pair.master.node.engine, pair.master.part
    known = remaining(engine, part, 8)
    assert sorted(known.seqnos) == [5, 6, 7, 8]
    asked = resync_for(pair.replica.node.engine, pair.replica.part, known)
    assert asked is not None
    assert sorted(key for key, _, _ in asked.documents) == [b"\0" + key for key in KEYS[:4]]
    found = deletions_for(engine, part, 8, asked)
    assert found
    assert not pair.master.node.store.entry(VB, 10), "it is purged"
    assert deletions_for(engine, part, 10, asked) is None, "only seqno 11 is free"


def test_a_deletion_that_is_known_by_a_link_keeps_its_seqno() -> None:
    pair = away_pair(drops=False)
    pair.set(KEYS[1], value=b"again")  # it names seqno 10, the deletion, as the version before
    pair.master.compact()  # before that is merged
    assert not pair.master.node.store.entry(VB, 10)
    engine, part = pair.master.node.engine, pair.master.part
    asked = Resync(12, str(part.vb_uuid), [(b"\0" + KEYS[1], 1, 1)])
    assert deletions_for(engine, part, 8, asked)
    others = [(b"\0never", 1, 1), (b"\0neither", 1, 1)]
    asked = Resync(12, str(part.vb_uuid), [(b"\0" + KEYS[1], 1, 1), *others])
    assert deletions_for(engine, part, 8, asked) is None, "only seqno 11 is free"


def test_what_a_master_with_a_lower_floor_still_has_stays() -> None:
    """The replica was told by another master, of a floor that this one has not heard of."""
    pair = away_pair()
    pair.set(KEYS[7], value=b"above the floor")
    engine, part = pair.master.node.engine, pair.master.part
    asked = Resync(12, "1", [(b"\0" + KEYS[7], 3, 1), (b"\0" + KEYS[1], 4, 2)])
    found = deletions_for(engine, part, 8, asked)
    assert found is not None
    end = pack_mutation(vb_id=VB, key=b"\0x", value=b"", cas=9, seqno=13, rev_seqno=1)
    deletion, last = found.among(9, [end])
    assert (key_of(deletion), last) == (b"\0" + KEYS[1], end)
    assert META.unpack_from(deletion)[4:] == (5, 9, 3), "CAS and revision follow the document's"


def test_much_to_look_through_waits_for_its_turn() -> None:
    looks = Looks()
    burst = round(DOCUMENTS_PER_S * BURST_S)
    assert looks.take(0, burst - 1)
    assert looks.take(0, burst)
    assert not looks.take(0, 1)
    assert not looks.take(SECOND_NS // 20, 1)
    assert looks.take(SECOND_NS, 1)
    pair = away_pair()
    looks = pair.master.core.master.pace.looks
    looks._left = -DOCUMENTS_PER_S / 4
    step_until(pair, lambda: pair.replica.core.replica._resyncs)
    looks._left = -DOCUMENTS_PER_S / 4
    for _ in range(3):
        pair.step()
    assert pair.replica.part.incomplete_snapshot is None, "the second request waits, too"
    pair.follow()
    assert pair.replica.core.replica.rollbacks == 0
    assert pair.replica.documents() == pair.master.documents()


@pytest.mark.parametrize(
    "document", [(b"", 1, 1), (b"\xff", 1, 1), (b"\0k", -1, 1), (b"\0k", 1, -1), (b"\0k", 2**64, 1)]
)
def test_what_no_replica_can_ask_is_named(document: tuple[bytes, int, int]) -> None:
    assert problem_of(Resync(1, "1", [(b"\0k", 0, 0)])) == ""
    assert f"no document has the key {document[0]!r}" in problem_of(Resync(1, "1", [document]))
    assert "twice" in problem_of(Resync(1, "1", [(b"\0k", 1, 1), (b"\0k", 2, 2)]))


@given(st.sets(U64), U64, U64)
def test_what_remains_is_packed(seqnos: set[int], purge: int, vb_uuid: int) -> None:
    known = Remaining(purge, vb_uuid, seqnos)
    assert unpack_remaining(pack_remaining(known)) == known
    assert unpack_rollback(VB, pack_rollback(0, 7, known)) == (0, 7, known)
    assert unpack_rollback(VB, pack_rollback(0, 7)) == (0, 7, None)


@pytest.mark.parametrize("cut", [1, 15, 16, 17, -1])
def test_what_remains_is_checked(cut: int) -> None:
    data = pack_remaining(Remaining(5, 1, {1, 2, 3}))
    with pytest.raises(ValueError, match="remain"):
        unpack_remaining(data[:cut])


def test_more_than_may_remain_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack_remaining(Remaining(5, 1, range(1, 12)))
    monkeypatch.setattr("vbucket.engine.resync.DOCUMENTS_MAX", 10)
    with pytest.raises(ValueError, match="too many"):
        unpack_remaining(data)


@given(
    st.sets(st.integers(1, 30), min_size=1), st.sets(st.integers(1, 30)), st.integers(0, 30),
    st.integers(0, 8), st.integers(0, 2**30 - 1),
)  # fmt: skip
def test_deletions_take_their_own_or_free_seqnos(
    others: set[int], placed: set[int], purge: int, lost: int, dropped: int
) -> None:
    """`placed` ones are there when the replica asks; bits of `dropped` say which are not later."""
    log = FailoverLog((Version(2, 10, 4), Version(1, 0, 1)))
    placed = {seqno for seqno in placed - others if seqno <= purge and seqno < max(others)}
    own = {seqno: b"\0own%d" % seqno for seqno in sorted(placed)}
    keys = [b"\0%d" % number for number in range(lost)]
    placed_ones = [(seqno, (key, 1, 1)) for seqno, key in own.items()]
    deletions = Deletions(VB, placed_ones, [(key, 1, 1) for key in keys], purge, log)
    stay = {seqno for seqno in placed if not dropped >> (seqno - 1) & 1}
    entries = [
        pack_mutation(vb_id=VB, key=own.get(seqno, b"\0x"), value=b"", cas=seqno, seqno=seqno,
                      rev_seqno=1, epoch=5)
        for seqno in sorted(others | stay)
    ]  # fmt: skip
    merged = list(deletions.among(1, entries))
    assert [entry for entry in merged if entry in entries] == entries
    seqnos = [seqno_of(entry) for entry in merged]
    assert seqnos == sorted(set(seqnos))
    found = {seqno_of(entry): key_of(entry) for entry in merged if seqno_of(entry) not in others}
    assert {seqno: key for seqno, key in found.items() if seqno in placed} == own
    taken = others | placed
    free = [each for each in range(1, max(others)) if each not in taken and each <= purge][:lost]
    assert [found[seqno] for seqno in free] == keys[: len(free)]
    assert found.keys() == {*free, *placed}
    epochs = [head_of(entry).epoch for entry in merged]
    assert epochs == sorted(epochs)
    assert bool(deletions) == (len(free) < lost)


class AwayRun(Run):
    """A replica that is away again and again, while deletions are purged."""

    def away(self, number: int) -> None:
        self.pair.follow()
        self.pair.cut()
        random_ = random.Random(number)
        for _ in range(random_.randrange(2, 12)):
            change: Callable[[int], None] = random_.choice((self.set, self.delete, self.delete))
            change(random_.randrange(99))
        master = self.pair.master
        self.set(random_.randrange(99))
        master.merge()
        floor = random_.randrange(2, master.part.merged_seqno + 1)
        master.node.raise_floor(VB, floor, floor - 1 - random_.randrange(2))
        master.commit()
        master.compact(random_.choice((None, None, 1)))

    def check_end(self) -> None:
        """As before; and both have the same documents at each seqno that may be branched at."""
        super().check_end()
        master, replica = self.pair.master, self.pair.replica
        for seqno in range(replica.part.history_floor, replica.part.high_seqno + 1):
            assert documents_at(replica, seqno) == documents_at(master, seqno)


def documents_at(member: Member, seqno: int) -> dict[bytes, int]:
    """Return key and seqno of a member's documents as of a seqno."""
    versions, part = member.node.engine.versions, member.part
    found = {}
    before = versions.first_changes_after(part, seqno)
    for key in member.documents().keys() | before.keys():
        entry = versions.newest_entry(part, key)
        if key in before:
            entry = versions.entry_at(part, before[key])
        if entry is not None and entry[OPCODE_AT] == Opcode.DCP_MUTATION:
            found[key] = seqno_of(entry)
    return found


STEPS = (
    "away", "away", "away", "step", "step", "step", "sync", "cut", "crash", "compact", "delete",
    "set", "compact_replica", "freeze", "consume",
)  # fmt: skip


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2**12)), max_size=40))
def test_any_absence_ends_with_what_the_master_has(actions: Collection[tuple[str, int]]) -> None:
    run = AwayRun()
    run.set(1)
    for name, number in actions:
        if name == "away" and run.pair.replica.node.engine.keyspace.memtables.is_merging:
            run.pair.replica.node.end_merge()
        getattr(run, name)(number)
        run.check()
    if run.pair.replica.node.engine.keyspace.memtables.is_merging:
        run.pair.replica.node.end_merge()
    run.check_end()
    run.check_promoted()

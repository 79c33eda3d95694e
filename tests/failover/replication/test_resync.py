"""A replica that was away for longer than its master keeps deletions: it keeps what it has."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.wire.opcode import Opcode
from failover.replication.messages import pack_rollback, unpack_rollback
from failover.replication.resync import (
    BURST_S,
    DOCUMENTS_PER_S,
    KEYS_BYTES_MAX,
    UNENDED,
    Deletions,
    Looks,
    Remaining,
    deletions_for,
    pack_remaining,
    remaining,
    resync,
    unpack_remaining,
)
from failover.rules.history import FailoverLog, Version
from support.replica_pair import VB, ReplicaPair
from support.stored_bytes import pack_mutation
from test_snapshot_model import Run, floors
from vbucket.model.entry import OPCODE_AT, head_of, key_of, seqno_of

KEYS = tuple(b"k%d" % number for number in range(8))
SECOND_NS = 10**9


def away_pair(*, merged: bool = True) -> ReplicaPair:
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
    pair.raise_floor(14, purge=12)
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


def test_another_purge_while_it_asks_is_told_again() -> None:
    pair = away_pair()
    step_until(pair, lambda: pair.replica.core.replica._resyncs)
    pair.delete(KEYS[4])
    pair.set(b"end")
    pair.raise_floor(17, purge=16)
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
    [("resync.KEYS_MAX", 2), ("resync.KEYS_BYTES_MAX", 5), ("master.DOCUMENTS_MAX", 3)],
)
def test_what_is_too_much_begins_at_0(
    where: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = away_pair()
    monkeypatch.setattr(f"failover.replication.{where}", limit)
    pair.follow()
    assert pair.replica.core.replica.rollbacks == 1
    assert pair.replica.documents() == pair.master.documents()


def test_no_room_for_deletions_is_no_answer() -> None:
    pair = away_pair()
    engine, part = pair.master.node.engine, pair.master.part
    known = remaining(engine, part, 8)
    assert sorted(known.seqnos) == [5, 6, 7, 8]
    asked = resync(pair.replica.node.engine, pair.replica.part, known)
    assert asked is not None
    assert sorted(asked.keys) == [b"\0" + key for key in KEYS[:4]]
    found = deletions_for(engine, part, 8, asked)
    assert found
    assert deletions_for(engine, part, 10, asked) is None, "only seqno 11 is free"


def test_much_to_look_through_waits_for_its_turn() -> None:
    looks = Looks()
    burst = round(DOCUMENTS_PER_S * BURST_S)
    assert looks.take(0, burst - 1)
    assert looks.take(0, burst)
    assert not looks.take(0, 1)
    assert not looks.take(SECOND_NS // 20, 1)
    assert looks.take(SECOND_NS, 1)
    pair = away_pair()
    pair.master.core.master.pace.looks._left = -DOCUMENTS_PER_S / 4
    pair.follow()
    assert pair.replica.core.replica.rollbacks == 0
    assert pair.replica.documents() == pair.master.documents()


@given(st.sets(st.integers(1, 2**64 - 1)), st.integers(0, 2**64 - 1))
def test_what_remains_is_packed(seqnos: set[int], purge: int) -> None:
    known = Remaining(purge, seqnos)
    assert unpack_remaining(pack_remaining(known)) == known
    assert unpack_rollback(VB, pack_rollback(0, 7, known)) == (0, 7, known)
    assert unpack_rollback(VB, pack_rollback(0, 7)) == (0, 7, None)


@pytest.mark.parametrize("cut", [1, 7, 8, 9, -1])
def test_what_remains_is_checked(cut: int) -> None:
    data = pack_remaining(Remaining(5, {1, 2, 3}))
    with pytest.raises(ValueError, match="remain"):
        unpack_remaining(data[:cut])


def test_more_than_may_remain_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack_remaining(Remaining(5, range(1, 12)))
    monkeypatch.setattr("failover.replication.resync.DOCUMENTS_MAX", 10)
    with pytest.raises(ValueError, match="too many"):
        unpack_remaining(data)
    assert array("Q").itemsize == 8
    assert KEYS_BYTES_MAX == 1 << 20


@given(st.sets(st.integers(1, 30), min_size=1), st.integers(0, 30), st.integers(0, 8))
def test_deletions_take_free_seqnos_only(taken: set[int], purge: int, lost: int) -> None:
    log = FailoverLog((Version(2, 10, 4), Version(1, 0, 1)))
    keys = [b"\0%d" % number for number in range(lost)]
    deletions = Deletions(VB, keys, purge, log)
    entries = [
        pack_mutation(vb_id=VB, key=b"\0x", value=b"", cas=seqno, seqno=seqno, rev_seqno=1, epoch=5)
        for seqno in sorted(taken)
    ]
    merged = list(deletions.among(1, entries, 99))
    seqnos = [seqno_of(entry) for entry in merged]
    assert seqnos == sorted(set(seqnos))
    made = [entry for entry in merged if entry not in entries]
    free = [seqno for seqno in range(1, max(taken)) if seqno not in taken and seqno <= purge]
    assert [seqno_of(entry) for entry in made] == free[:lost]
    assert [key_of(entry) for entry in made] == keys[: len(made)]
    assert [head_of(entry).epoch for entry in merged] == sorted(
        head_of(entry).epoch for entry in merged
    )
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
        if name == "away" and run.pair.replica.node.engine.keyspace.is_merging:
            run.pair.replica.node.end_merge()
        getattr(run, name)(number)
        run.check()
    if run.pair.replica.node.engine.keyspace.is_merging:
        run.pair.replica.node.end_merge()
    run.check_end()
    run.check_promoted()

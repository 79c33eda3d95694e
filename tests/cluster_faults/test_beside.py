"""A group of consumers and backups beside a round's load: what is wrong with them is noticed."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.consumer.batch_reader import Delivery
from clients.consumer.group_member import Share
from clients.errors import ConnectError, EpochGoneError
from clients.event import Deletion, Mutation, Rollback, SeqnoAdvanced, SnapshotStart, StreamOpened
from clients.kv.client import KvClient
from clients.position import Position
from clients.testing import DcpServer
from dcp.wire.message import MarkerFlag
from support.waiting import until_so
from tests.soak.cluster.backups import Backups, Run, against_loaded, newest_call, read_of
from tests.soak.cluster.group import GroupError, LivingGroup, Member
from tests.soak.cluster.group_member import GapError, GroupSink
from tests.soak.cluster.history import Kind, Operation
from tests.soak.cluster.linearizable import violation_of
from tests.soak.cluster.load import Load
from tests.soak.cluster.nodes import FaultyCluster

VB = 5
HISTORY = MarkerFlag.MEMORY | MarkerFlag.HISTORY | MarkerFlag.MAY_DUPLICATE_KEYS
FIRST, SECOND = b"register-1", b"register-2"
COUNTER = b"counter-0"


def share(epoch: int = 1) -> Share:
    return Share(epoch, (VB,), ("m",))


def change(seqno: int, key: bytes = b"k") -> Mutation:
    return Mutation(VB, key, b"%d" % seqno, seqno, 1, 0, 0, 0)


def opened(seqno: int = 0, flags: int = HISTORY) -> list:
    return [StreamOpened(VB, (), seqno, seqno), SnapshotStart(VB, seqno, 100, flags)]


def delivery(*events, at: int) -> Delivery:
    return Delivery([*events], {VB: Position((), at, at, at)})


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[GroupSink]:
    sink = GroupSink(tmp_path / "group.sqlite")
    yield sink
    sink.close()


def test_effects_are_the_documents_and_each_change_has_one(sink: GroupSink) -> None:
    assert sink.begin(share()) == {}
    gone = Deletion(VB, b"gone", 3, 1, 0)
    sink.take(share(), delivery(*opened(), change(1), change(2, b"gone"), gone, at=3))
    own = change(5, b"_dcpd:group:sinks")
    sink.take(share(3), delivery(change(4), own, at=5))
    assert sink.documents() == {b"k": b"4"}
    assert (sink.effects(), sink.epoch(), sink.unaccounted()) == (5, 3, {})
    assert sink.begin(share(3))[VB].seqno == 5


def test_a_second_effect_of_a_change_is_an_error(sink: GroupSink) -> None:
    sink.begin(share())
    sink.take(share(), delivery(*opened(), change(1), at=1))
    with pytest.raises(sqlite3.IntegrityError):
        sink.take(share(), delivery(*opened(), change(1), at=1))


def test_a_change_that_is_missing_from_a_history_is_an_error(sink: GroupSink) -> None:
    sink.begin(share())
    with pytest.raises(GapError, match="seqno 3 of partition 5 follows 1 in a history"):
        sink.take(share(), delivery(*opened(), change(1), change(3), at=3))
    assert sink.effects() == 0


def test_an_older_epoch_has_no_effect(sink: GroupSink, tmp_path: Path) -> None:
    other = GroupSink(tmp_path / "group.sqlite")
    sink.begin(share())
    other.begin(share(2))
    with pytest.raises(EpochGoneError, match="epoch 1 is gone"):
        sink.take(share(), delivery(*opened(), change(1), at=1))
    with pytest.raises(EpochGoneError):
        sink.begin(share())
    other.close()
    assert sink.effects() == 0


def test_what_is_passed_over_is_noted_and_undone(sink: GroupSink) -> None:
    sink.begin(share())
    newest = opened(flags=MarkerFlag.DISK)
    sink.take(share(), delivery(*newest, change(4), SeqnoAdvanced(VB, 9), at=9))
    assert (sink.effects(), sink.unaccounted()) == (1, {})
    sink.take(share(), delivery(Rollback(VB, 7, 7, 9, "r"), *opened(7), change(8), at=8))
    assert (sink.effects(), sink.unaccounted()) == (2, {})
    sink.take(share(), delivery(at=9))
    assert sink.unaccounted() == {VB: 1}


def test_a_member_that_ends_by_itself_is_noticed(tmp_path: Path) -> None:
    member = Member(tmp_path, 0, lambda: "no address!")
    member.start()
    assert member._process is not None
    member._process.wait()
    with pytest.raises(GroupError, match="a member of the group has ended: Traceback"):
        member.check()
    member.kill()


async def test_a_group_on_one_node_dies_and_has_each_effect_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.soak.cluster.group.AWAY_S", (0.0, 0.0))
    monkeypatch.setattr("tests.soak.cluster.group.WAYS", {"killed": 1, "left": 1})
    with DcpServer(tmp_path / "data", "--partitions", "64") as server:
        async with KvClient.connect(server.address) as kv:
            load = Load(kv, dict, 1)
            group = LivingGroup(tmp_path, lambda: server.address, random.Random(1), (0.0, 0.1))
            group.begin()
            load.begin()
            try:
                await until_so(lambda: len(group.deaths) == 2)
                group.check()
                await group.stop()
                await load.stop()
                assert await group.wrong(load, kv) == []
                assert group.effects >= len(load.loaded) > 0
            finally:
                await load.abandon()
                await group.abandon()


# -- backups ---------------------------------------------------------------------------------------


@pytest.fixture
def load() -> Load:
    """Two documents and a counter, each written at 10 and at 30; others were written once."""
    load = Load(None, dict, 1)
    for key in (FIRST, SECOND):
        load.histories[key] += [
            Operation(Kind.WRITE, at, at + 5, value=b"%d" % at) for at in (10, 30)
        ]
    load.histories[COUNTER] += [
        Operation(Kind.ADD, at, at + 5, found=number) for number, at in ((1, 10), (2, 30))
    ]
    load.loaded, load.maybe = {b"early": b"e", b"late": b"l"}, {b"maybe": b"m"}
    load.loading = {b"early": (10, 15), b"late": (30, 35), b"maybe": (10, 15), b"no": (10, 15)}
    return load


def run(called_ns: int = 20, returned_ns: int = 25) -> Run:
    return Run(1, called_ns, returned_ns, from_replicas=False, is_cut=True)


def is_right(load: Load, key: bytes, value: bytes | None, one: Run) -> bool:
    return violation_of([*load.histories[key], read_of(key, value, one)]) is None


def test_a_backup_has_what_was_answered_before_and_nothing_later(load: Load) -> None:
    assert is_right(load, FIRST, b"10", run())
    assert not is_right(load, FIRST, None, run()), "it was answered before"
    assert not is_right(load, FIRST, b"30", run()), "it was written later"
    assert is_right(load, FIRST, b"30", run(20, 32)), "while the backup ran"
    assert not is_right(load, FIRST, b"refused", run())
    assert is_right(load, COUNTER, b"1", run())
    assert not is_right(load, COUNTER, b"2", run())


def test_a_cut_with_a_write_has_what_was_answered_before_it(load: Load) -> None:
    long = run(0, 100)
    assert is_right(load, FIRST, b"10", long)
    assert newest_call({SECOND: b"10", COUNTER: b"1"}, load) == 10
    for held in ({SECOND: b"30"}, {COUNTER: b"2"}, {b"late": b"l"}):
        called_ns = newest_call(held, load)
        assert called_ns == 30
        assert is_right(load, FIRST, b"10", long._replace(called_ns=called_ns))
        assert not is_right(load, FIRST, None, long._replace(called_ns=called_ns))


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({b"early": b"e"}, []),
        ({b"early": b"e", b"maybe": b"m"}, []),
        ({}, ["1 writes that were answered before are not in it: [b'early']"]),
        ({b"early": b"x"}, ["b'early' is b'x', and b'e' was written"]),
        ({b"early": b"e", b"no": b"n"}, ["b'no' is b'n', and None was written"]),
        ({b"early": b"e", b"late": b"l"}, ["b'late' is in it, and was written later"]),
    ],
)
def test_documents_written_once_are_held_against_a_backup(load, held, words) -> None:
    assert list(against_loaded(held, load, run())) == words


async def test_backups_of_a_node_are_restored_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.soak.cluster.backups.FIRST_S", (0.0, 0.0))
    monkeypatch.setattr("tests.soak.cluster.backups.EVERY_S", 0.0)
    monkeypatch.setattr("tests.soak.cluster.backups.COPIES_SHARE", 0.0)
    with DcpServer(tmp_path / "data", "--partitions", "64") as server:
        cluster = FaultyCluster(tmp_path, {}, partitions=64)
        monkeypatch.setattr(cluster, "everywhere", lambda: server.address)
        async with KvClient.connect(server.address) as kv:
            load = Load(kv, dict, 1)
            load.begin()
            backups = Backups(cluster, random.Random(1))
            backups.begin()
            try:
                await until_so(lambda: len(backups.runs) > 1)
                backups.check()
                await backups.stop()
                await load.stop()
                await load.read_all()
                load.loaded[b"lost"], load.loading[b"lost"] = b"v", (0, 1)
                wrong = await backups.wrong(load, kv)
                assert len(wrong) == len(backups.runs), wrong
                assert "answered before are not in it: [b'lost']" in wrong[0]
                for history in load.histories.values():
                    assert violation_of(history) is None
                    assert sum(each.by.startswith("backup") for each in history) == len(wrong)
            finally:
                await load.abandon()
                await backups.abandon()


async def test_backups_give_up_if_nothing_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.soak.cluster.backups.FIRST_S", (0.0, 0.0))
    monkeypatch.setattr("tests.soak.cluster.backups.AGAIN_S", 0.0)
    monkeypatch.setattr("tests.soak.cluster.backups.GIVE_UP_S", 0.0)
    cluster = FaultyCluster(tmp_path, {}, partitions=64)
    monkeypatch.setattr(cluster, "everywhere", lambda: "127.0.0.1:1")
    backups = Backups(cluster, random.Random(1))
    backups.begin()
    assert backups._task is not None
    await asyncio.wait({backups._task})
    with pytest.raises(ConnectError, match="cannot connect"):
        backups.check()

"""Groups that live: members join, leave and are killed; each change has its effect once."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from clients import (
    AmbiguousWriteError,
    CheckpointError,
    Consumer,
    ConsumerOptions,
    DcpdError,
    Delivery,
    EpochGoneError,
    GroupMember,
    KvClient,
    OperationTimeoutError,
    Position,
    ServerCheckpoint,
    Share,
    TopologyError,
)
from clients.consumer import group_member
from clients.testing import DcpServer

SINK = """
CREATE TABLE positions (vb INTEGER PRIMARY KEY, epoch INTEGER, position BLOB);
CREATE TABLE effects (key TEXT PRIMARY KEY, times INTEGER);
CREATE TABLE begun (member TEXT, epoch INTEGER);
"""
MEMBER = '''
import asyncio, sqlite3, sys
from clients import EpochGoneError, GroupMember, Mutation, decode_position, encode_position

def begin(share):
    with db:
        db.execute("BEGIN IMMEDIATE")
        fence(share.epoch, share.vbuckets)
        db.execute("INSERT INTO begun VALUES (?, ?)", (member.member, share.epoch))
        rows = db.execute(
            "SELECT vb, position FROM positions WHERE position IS NOT NULL").fetchall()
    return {vb: decode_position(raw) for vb, raw in rows if vb in set(share.vbuckets)}

def fence(epoch, vbuckets):
    """Raise the epoch of partitions. Refuse if a later one has any of them."""
    for vb in vbuckets:
        done = db.execute(
            "INSERT INTO positions VALUES (?, ?, NULL) ON CONFLICT (vb) DO UPDATE"
            " SET epoch = excluded.epoch WHERE epoch <= excluded.epoch", (vb, epoch))
        if not done.rowcount:
            raise EpochGoneError(f"epoch {epoch} is gone: partition {vb} has a later one")

def take(share, delivery):
    events, positions = delivery
    with db:
        db.execute("BEGIN IMMEDIATE")
        fence(share.epoch, positions)
        for event in events:
            if isinstance(event, Mutation) and event.key.startswith(b"k"):
                db.execute("INSERT INTO effects VALUES (?, 1) ON CONFLICT (key)"
                           " DO UPDATE SET times = times + 1", (event.key.decode(),))
        db.executemany("UPDATE positions SET position = ? WHERE vb = ?",
                       [(encode_position(p), vb) for vb, p in positions.items()])

async def run():
    global member
    async with GroupMember(sys.argv[1], "sinks") as member:
        await member.run(begin, take)

db = sqlite3.connect(sys.argv[2], timeout=30, isolation_level=None)
asyncio.run(run())
'''


@pytest.fixture(scope="module")
def server() -> Iterator[DcpServer]:
    with DcpServer() as server:
        yield server


async def until(member: GroupMember, members: int) -> None:
    while member.share is None or len(member.share.members) != members:
        await member._changed.wait()


async def test_members_share_the_partitions_and_take_over(server: DcpServer) -> None:
    async with GroupMember(server.address, "three") as first:
        assert first.share is not None
        assert len(first.share.vbuckets) == 1024
        async with GroupMember(server.address, "three") as second:
            await until(first, 2)
            assert second.share is not None
            shares = [set(first.share.vbuckets), set(second.share.vbuckets)]
            assert shares[0] | shares[1] == set(range(1024))
            assert not shares[0] & shares[1]
            epoch = first.share.epoch
            assert second._beating is not None
            second._beating.cancel()  # as if it stood still
            await until(first, 1)
            assert first.share.epoch > epoch
            assert len(first.share.vbuckets) == 1024
            second._beating = asyncio.get_running_loop().create_task(second._beat_always())


async def test_a_beat_without_an_answer_can_be_tried_again(
    server: DcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a write, and one that may have happened is no harm: two beats are like one."""

    async def unanswered(*_: object, **__: object) -> list[DcpdError]:
        return [AmbiguousWriteError("no answer within 1 s; the change may have been applied")]

    with monkeypatch.context() as patched:
        patched.setattr(KvClient, "execute", unanswered)
        with pytest.raises(OperationTimeoutError, match="did not answer a beat within"):
            await GroupMember(server.address, "again").__aenter__()
    async with GroupMember(server.address, "again") as member:
        assert member.share is not None


async def test_nothing_of_a_share_follows_a_refusal(server: DcpServer) -> None:
    """The refused delivery may have had changes of partitions that the member keeps."""
    begun: list[int] = []
    taken: asyncio.Queue[int] = asyncio.Queue()
    keys = [b"refused-%d" % number for number in range(40)]

    async def take(share: Share, _: Delivery) -> None:
        taken.put_nowait(share.epoch)
        if share.epoch == begun[0]:
            raise EpochGoneError("a later epoch has partition 5")

    async with (
        KvClient.connect(server.address) as kv,
        GroupMember(server.address, "refused") as member,
    ):
        await kv.set_many(dict.fromkeys(keys, b"1"))
        running = asyncio.create_task(
            member.run(lambda share: begun.append(share.epoch) or {}, take)
        )
        assert await taken.get() == begun[0]
        await kv.set_many(dict.fromkeys(keys, b"2"))
        await asyncio.wait({running}, timeout=0.5)
        assert taken.empty()
        async with GroupMember(server.address, "refused"):
            assert await taken.get() == begun[-1] > begun[0]
            assert len(begun) == 2
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.mark.parametrize("give_up_after_s", [None, 0.0])
async def test_a_share_without_masters_is_begun_again(
    server: DcpServer, monkeypatch: pytest.MonkeyPatch, give_up_after_s: float | None
) -> None:
    """A node dies while the group changes: nobody is master of some partitions for a moment."""
    tries: list[Consumer] = []
    opened = Consumer.open

    async def open_later(consumer: Consumer) -> None:
        tries.append(consumer)
        if len(tries) < 3:
            raise TopologyError("no node is active for this partition")
        await opened(consumer)

    monkeypatch.setattr(Consumer, "open", open_later)
    monkeypatch.setattr(group_member, "REOPEN_S", 0.01)
    async with KvClient.connect(server.address) as kv:
        await kv.set("again", b"1")
    options = ConsumerOptions(until_now=True, give_up_after_s=give_up_after_s)
    async with GroupMember(server.address, "again", options) as member:
        if give_up_after_s is None:
            found: list[Share] = []
            await member.run(lambda _: {}, lambda share, _: found.append(share))
            assert found[0] == member.share
        else:
            with pytest.raises(TopologyError, match="no node is active"):
                await member.run(lambda _: {}, lambda *_: None)


async def test_positions_in_the_server_are_claimed(server: DcpServer) -> None:
    """A member whose partitions another one has claimed saves none of them any more."""
    position = Position(((9, 0),), 6, 6, 6, ((0, 6),))
    older, newer = (ServerCheckpoint(server.address, "claimed") for _ in range(2))
    await older.load()
    await older.save_changes({5: position, 6: position})
    assert await newer.claim_positions([5]) == {5: position, 6: position}
    with pytest.raises(CheckpointError, match="another consumer has saved partition 5"):
        await older.save_changes({5: position._replace(seqno=6, snap_end=7)})
    await older.save_changes({6: position})
    await older.close()
    await newer.close()


def test_each_effect_comes_once_while_members_are_killed(server: DcpServer, tmp_path: Path) -> None:
    path = tmp_path / "sink.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(SINK)
    members: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        members.append(subprocess.Popen([sys.executable, "-c", MEMBER, server.address, str(path)]))

    async def write(first: int) -> None:
        async with KvClient.connect(server.address) as kv:
            await kv.set_many({f"k{number}": b"1" for number in range(first, first + 500)})

    def rows(query: str) -> list[tuple[int, ...]]:
        with closing(sqlite3.connect(path, timeout=30)) as db:
            return db.execute(query).fetchall()

    def until_seen(count: int) -> None:
        while rows("SELECT count(*) FROM effects")[0][0] < count:
            assert any(member.poll() is None for member in members)

    try:
        for _ in range(3):
            start()
        for round_ in range(4):
            asyncio.run(write(500 * round_))
            until_seen(500 * round_ + 100)
            members[round_].send_signal(signal.SIGKILL)
            start()
        until_seen(2000)
        assert rows("SELECT times, count(*) FROM effects GROUP BY times") == [(1, 2000)]
        assert len(rows("SELECT DISTINCT member FROM begun")) >= 4, "others took over"
        assert rows("SELECT max(epoch) FROM begun")[0][0] >= 7
    finally:
        for member in members:
            member.kill()
            member.wait()

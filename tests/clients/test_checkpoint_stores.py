"""Checkpoints in LMDB, in the server and in a store of the user's: what is written, and when."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_consumer_steering import until

from clients import (
    CheckpointError,
    CheckpointFile,
    Consumer,
    KvClient,
    LmdbCheckpoint,
    MemoryCheckpoint,
    Mutation,
    Position,
    ServerCheckpoint,
    SyncConsumer,
    decode_position,
    encode_position,
)
from clients.checkpoint.checkpoint import decode_checkpoint, encode_checkpoint
from clients.testing import DcpServer
from vbucket.model.consumer_documents import CHECKPOINT_PREFIX as KEY_PREFIX
from vbucket.model.consumer_documents import OWN_PREFIX, checkpoint_key

ROOT = Path(__file__).parents[2]
POSITION = Position(((9, 4), (7, 0)), 6, 5, 8, ((0, 0), (3, 5)))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DcpServer(tmp_path_factory.mktemp("stores") / "data") as process:
        with process.connect() as kv:
            for n in range(50):
                kv.set(b"k%d" % n, b"1")
        yield process


async def until_now(server, store, **options):
    async with Consumer(server.address, store=store, until_now=True, **options) as consumer:
        keys = [event.key async for event in consumer if isinstance(event, Mutation)]
        await consumer.save()
    return keys


def test_a_position_survives_a_store_of_the_users():
    assert decode_position(encode_position(POSITION)) == POSITION
    for raw in (b"", b"\x80", encode_position(POSITION)[:-1]):
        with pytest.raises(ValueError, match="position"):
            decode_position(raw)


def test_lmdb_keeps_what_is_not_named_and_consumers_apart(tmp_path):
    store, other = LmdbCheckpoint(tmp_path / "c"), None
    store.save({1: POSITION, 2: Position()})
    store.save_changes({2: POSITION})
    store.close()
    other = LmdbCheckpoint(tmp_path / "c", "another")
    assert other.load() == {}
    other.close()
    assert store.load() == {1: POSITION, 2: POSITION}
    store.save({3: POSITION})
    assert store.load() == {3: POSITION}
    store.close()


def test_lmdb_refuses_a_file_of_something_else(tmp_path):
    from clients.mirror.lmdb_mirror import LmdbStore

    LmdbStore(tmp_path / "c").close()
    with pytest.raises(CheckpointError, match="is dcpd-mirror 4, not dcpd-checkpoints 1"):
        LmdbCheckpoint(tmp_path / "c").load()
    (tmp_path / "d").write_bytes(b"x" * 9000)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        LmdbCheckpoint(tmp_path / "d").load()


@pytest.mark.parametrize("kind", ["file", "lmdb", "server", "memory"])
async def test_a_consumer_goes_on_where_its_store_says(server, tmp_path, kind):
    def store():
        return {
            "file": lambda: CheckpointFile(tmp_path / "state"),
            "lmdb": lambda: LmdbCheckpoint(tmp_path / "state"),
            "server": lambda: ServerCheckpoint(server.address, f"me-{tmp_path.name}"),
            "memory": lambda: memory,
        }[kind]()

    memory = MemoryCheckpoint()
    # Other consumers' checkpoints are documents like any other for who does not keep his there.
    hidden = OWN_PREFIX
    first = [key for key in await until_now(server, store()) if not key.startswith(hidden)]
    assert len(first) == 50
    assert [key for key in await until_now(server, store()) if not key.startswith(hidden)] == []
    async with KvClient.connect(server.address) as kv:
        await kv.set("k7", b"2")
    again = await until_now(server, store())
    assert [key for key in again if not key.startswith(hidden)] == [b"k7"]


async def test_only_partitions_that_moved_are_written(server, tmp_path):
    store = LmdbCheckpoint(tmp_path / "c")
    await until_now(server, store)
    async with Consumer(server.address, store=store, save_every_s=0.01) as consumer:
        task = asyncio.create_task(_drain(consumer))
        await until(lambda: consumer.metrics.events >= 1024)
        before = consumer.metrics.positions_saved
        async with KvClient.connect(server.address) as kv:
            await kv.set("one", b"1")
        await until(lambda: consumer.metrics.positions_saved > before)
        assert consumer.metrics.positions_saved == before + 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _drain(consumer):
    async for _ in consumer.batches():
        pass


async def test_two_consumers_with_checkpoints_in_server_come_to_rest(server):
    """Their saves are changes that both are sent: they must not answer saving with saving."""
    consumers = [
        Consumer(
            server.address, store=ServerCheckpoint(server.address, name), save_every_s=0.02,
            validate=True,
        )
        for name in ("left", "right")
    ]  # fmt: skip
    async with consumers[0], consumers[1], KvClient.connect(server.address) as kv:
        tasks = [asyncio.create_task(_drain(consumer)) for consumer in consumers]
        await kv.set("wakes both", b"1")
        for consumer in consumers:
            await until(lambda consumer=consumer: consumer.metrics.saves)

        async def at_rest():
            seqnos = await kv.get_all_vb_seqnos()
            for consumer in consumers:
                await consumer.lag()
                await until(lambda consumer=consumer: not consumer.gauges()["lag"])
            # Several times the interval of saving.
            await asyncio.sleep(0.2)
            return await kv.get_all_vb_seqnos() == seqnos

        for _ in range(50):
            if await at_rest():
                break
        else:
            raise AssertionError("they keep saving")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    seen = [consumer.validator.documents() for consumer in consumers]
    assert not any(key.startswith(KEY_PREFIX.encode()) for held in seen for key in held)


async def test_a_store_that_fails_is_told_and_tried_again(server, caplog):
    class Failing(MemoryCheckpoint):
        failures = 2

        def save(self, checkpoint):
            if self.failures:
                self.failures -= 1
                raise OSError("no space left")
            super().save(checkpoint)

    store = Failing()
    async with Consumer(server.address, store=store, save_every_s=0.01) as consumer:
        task = asyncio.create_task(_drain(consumer))
        await until(lambda: consumer.metrics.saves)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert consumer.metrics.saves_failed == 2
    assert "no space left" in caplog.text
    assert store.saved
    store = Failing()
    async with Consumer(server.address, store=store) as consumer:
        await anext(consumer.batches())
        with pytest.raises(CheckpointError, match="no space left"):
            await consumer.save()


async def test_a_damaged_checkpoint_in_the_server_is_named(server):
    async with KvClient.connect(server.address) as kv:
        await kv.set(f"{KEY_PREFIX}damaged:17", b"nothing of ours")
    store = ServerCheckpoint(server.address, "damaged")
    with pytest.raises(CheckpointError, match="_dcpd:checkpoint:damaged:17"):
        await store.load()
    await store.close()


async def test_a_checkpoint_of_an_older_version_is_read(server):
    """It was in one document per partition, wherever its key's hash said."""
    older = f"{KEY_PREFIX}older:17"
    async with KvClient.connect(server.address) as kv:
        await kv.set(older, encode_checkpoint({17: POSITION}, "an older one"))
        store = ServerCheckpoint(server.address, "older")
        assert await store.load() == {17: POSITION}
        later = POSITION._replace(seqno=8)
        await store.save({17: later})
        assert await store.load() == {17: later}
        found = await kv.get(checkpoint_key("older", 17))
        assert decode_checkpoint(found.value) == {17: later}
    await store.close()


def test_a_name_fits_into_a_key():
    with pytest.raises(ValueError, match="1 to 200 bytes"):
        ServerCheckpoint("127.0.0.1:1", "x" * 201)


# -- real processes ------------------------------------------------------------------------------

COUNTING = """
import asyncio, os, sqlite3, sys
from clients import Consumer, Mutation, encode_position, decode_position

async def main(address, path):
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE IF NOT EXISTS positions (vb INTEGER PRIMARY KEY, position BLOB)")
    db.execute("CREATE TABLE IF NOT EXISTS applied (vb INTEGER, seqno INTEGER)")
    start = {vb: decode_position(raw) for vb, raw in db.execute("SELECT * FROM positions")}
    async with Consumer(address, start=start, history=True) as consumer:
        print("ready", flush=True)
        async for events, positions in consumer.deliveries():
            with db:
                for event in events:
                    if isinstance(event, Mutation):
                        db.execute("INSERT INTO applied VALUES (?, ?)", (event.vb_id, event.seqno))
                db.executemany(
                    "INSERT OR REPLACE INTO positions VALUES (?, ?)",
                    [(vb, encode_position(position)) for vb, position in positions.items()],
                )

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.crash
async def test_effects_are_there_once_however_often_it_is_killed(server, tmp_path):
    path = tmp_path / "effects.db"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", COUNTING, server.address, str(path)],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def rows(what):
        with sqlite3.connect(path, timeout=20) as db:
            found = db.execute(what).fetchall()
        db.close()
        return found

    process = await asyncio.to_thread(start)
    kills = 0
    async with KvClient.connect(server.address) as kv:
        for number in range(5):
            for part in range(4):
                await kv.set_many((f"n{n}", b"%d" % part) for n in range(400))
            if number < 4:
                # In the middle of what it is doing, whatever that is.
                await asyncio.to_thread(time.sleep, 0.02 * number)
                process.kill()
                await asyncio.to_thread(process.communicate)
                kills += 1
                process = await asyncio.to_thread(start)
        high = {vb: seqno for vb, seqno in (await kv.get_all_vb_seqnos()).items() if seqno}
    for _ in range(1000):
        held = dict(rows("SELECT vb, MAX(seqno) FROM applied GROUP BY vb"))
        if held == high:
            break
        await asyncio.sleep(0.02)
    process.kill()
    await asyncio.to_thread(process.communicate)
    assert held == high
    assert kills == 4
    # Every seqno of every partition, each once.
    counts = {vb: (n, distinct) for vb, n, distinct in rows(
        "SELECT vb, COUNT(*), COUNT(DISTINCT seqno) FROM applied GROUP BY vb"
    )}  # fmt: skip
    assert counts == {vb: (seqno, seqno) for vb, seqno in high.items()}


def test_lmdb_consumers_of_one_process_share_a_file(tmp_path):
    first, second = (
        LmdbCheckpoint(tmp_path / "c", "first"),
        LmdbCheckpoint(tmp_path / "c", "second"),
    )
    first.save({1: POSITION})
    second.save({2: POSITION})
    first.close()
    first.close()
    second.save_changes({3: POSITION})
    assert first.load() == {1: POSITION}
    assert second.load() == {2: POSITION, 3: POSITION}
    second.close()
    first.close()


@pytest.mark.parametrize("name", ["", "a\0b", "n" * 201])
def test_names_of_checkpoints_that_would_meet_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="1 to 200 bytes"):
        LmdbCheckpoint(tmp_path / "c", name)


# -- of which documents a checkpoint is ----------------------------------------------------------

KINDS = ("file", "lmdb", "server", "memory", "positions")


class Kept:
    """A checkpoint in one of the places that there are, and consumers that go on from it."""

    def __init__(self, kind, server, folder):
        self.kind, self.server, self.folder = kind, server, folder
        self.memory = MemoryCheckpoint()
        self.positions = {}

    def options(self):
        """What a consumer needs to go on; stores of the user's hand positions over by `start`."""
        if self.kind == "positions":
            kept = {vb: decode_position(raw) for vb, raw in self.positions.items()}
            return {"start": kept}
        return {"store": self.store()}

    def store(self):
        return {
            "file": lambda: CheckpointFile(self.folder / "state"),
            "lmdb": lambda: LmdbCheckpoint(self.folder / "state"),
            "server": lambda: ServerCheckpoint(self.server.address, f"of-{self.folder.name}"),
            "memory": lambda: self.memory,
        }[self.kind]()

    async def keys(self, **options):
        """Read what is there now, and keep where that ends; documents of other tests are not."""
        consumer = Consumer(
            self.server.address, until_now=True, vbuckets=range(100), **self.options(), **options
        )
        async with consumer:
            found = [event.key async for event in consumer if isinstance(event, Mutation)]
            if self.kind == "positions":
                kept = consumer.checkpoint()
                self.positions = {vb: encode_position(place) for vb, place in kept.items()}
            else:
                await consumer.save()
        return sorted(key for key in found if key.startswith(b"k"))

    async def forget_filters(self):
        """Make it one of an older version."""
        if self.kind == "positions":
            for vb, raw in self.positions.items():
                self.positions[vb] = encode_position(decode_position(raw)._replace(filter=None))
            return
        store = self.store()
        saved = store.load()
        saved = await saved if asyncio.iscoroutine(saved) else saved
        done = store.save({vb: place._replace(filter=None) for vb, place in saved.items()})
        if asyncio.iscoroutine(done):
            await done
        if hasattr(store, "close"):
            done = store.close()
            if asyncio.iscoroutine(done):
                await done


@pytest.fixture
def kept(request, server, tmp_path):
    return Kept(request.param, server, tmp_path)


@pytest.mark.parametrize("kept", KINDS, indirect=True)
async def test_a_checkpoint_of_other_documents_is_refused(kept):
    """Its consumer would miss those that it has passed already, and nothing would tell."""
    ones = await kept.keys(key_prefixes="k1")
    assert ones
    for options in ({"key_prefixes": "k2"}, {}, {"collections": "all", "key_prefixes": "k1"}):
        with pytest.raises(CheckpointError) as info:
            await kept.keys(**options)
        assert "it is for the default collection, keys that begin with 'k1' (" in str(info.value)
        wanted = "everything" if "collections" in options else "the default collection"
        assert f"this consumer follows {wanted}" in str(info.value)
        assert "start with another checkpoint (another file or name)" in info.value.hint
    assert await kept.keys(key_prefixes=["k1", "k12"]) == [], "the same, in other words"


@pytest.mark.parametrize("kept", KINDS, indirect=True)
async def test_checkpoint_of_an_older_version_takes_on_its_filter(kept):
    assert await kept.keys()
    await kept.forget_filters()
    assert await kept.keys(key_prefixes="k1") == [], "it is believed"
    with pytest.raises(CheckpointError, match="begin with 'k1'"):
        await kept.keys()


def test_a_consumer_without_asyncio_refuses_it_too(server, tmp_path):
    def read(**options):
        store = CheckpointFile(tmp_path / "state")
        with SyncConsumer(server.address, until_now=True, store=store, **options) as changes:
            count = sum(isinstance(event, Mutation) for event in changes)
            changes.save()
        return count

    assert read(key_prefixes="k1")
    with pytest.raises(CheckpointError, match="begin with 'k1'"):
        read(key_prefixes="k2")

"""Two consumers with one checkpoint are noticed, in each store; a killed one leaves no claim."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clients import (
    CheckpointError,
    CheckpointFile,
    Consumer,
    KvClient,
    LmdbCheckpoint,
    Mirror,
    Position,
    ServerCheckpoint,
)
from clients.checkpoint.checkpoint import decode_checkpoint, encode_checkpoint
from clients.testing import DcpServer
from vbucket.model.consumer_documents import checkpoint_key

ROOT = Path(__file__).parents[2]
STORES = {"file": CheckpointFile, "lmdb": LmdbCheckpoint}


def position(seqno: int) -> Position:
    return Position(((7, 0),), seqno, seqno, seqno, ((0, seqno),))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DcpServer(tmp_path_factory.mktemp("claims") / "data") as process:
        yield process


@pytest.mark.parametrize("kind", STORES)
async def test_a_second_consumer_is_refused_while_the_first_is_open(server, tmp_path, kind):
    make, path = STORES[kind], tmp_path / "state"
    store = make(path)
    async with Consumer(server.address, store=store) as first:
        for other in (make(path), store):
            with pytest.raises(CheckpointError, match=r"another consumer uses it.*this one") as e:
                await Consumer(server.address, store=other).open()
            assert str(path) in str(e.value)
            assert "its own file or name" in e.value.hint
        await first.save()
    async with Consumer(server.address, store=make(path)):
        pass


async def test_names_in_one_lmdb_file_do_not_hinder_each_other(server, tmp_path):
    path = tmp_path / "state"
    async with (
        Consumer(server.address, store=LmdbCheckpoint(path, "a/b")),
        Consumer(server.address, store=LmdbCheckpoint(path, "c")),
    ):
        with pytest.raises(CheckpointError, match="name 'c': another consumer"):
            await Consumer(server.address, store=LmdbCheckpoint(path, "c")).open()


async def test_an_open_that_fails_leaves_no_claim(server, tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"rubbish")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"cut short or damaged|not a checkpoint"):
            await Consumer(server.address, store=CheckpointFile(path)).open()


def test_positions_can_be_read_while_a_consumer_is_open(tmp_path):
    first, second = CheckpointFile(tmp_path / "state"), CheckpointFile(tmp_path / "state")
    first.claim()
    first.save({1: position(5)})
    assert second.load() == {1: position(5)}
    first.close()
    second.claim()
    second.close()


async def test_a_second_mirror_of_a_file_is_refused(server, tmp_path):
    path = tmp_path / "mirror"
    async with Mirror(server.address, path=path):
        with pytest.raises(CheckpointError, match="another mirror uses it"):
            await Mirror(server.address, path=path).open()
    async with Mirror(server.address, path=path):
        pass


@pytest.mark.parametrize("kind", STORES)
def test_a_killed_process_leaves_no_claim(tmp_path, kind):
    program = (
        "import sys, time; from clients import CheckpointFile, LmdbCheckpoint\n"
        f"store = {STORES[kind].__name__}(sys.argv[1]); store.claim()\n"
        "print('claimed', flush=True); time.sleep(600)\n"
    )
    store = STORES[kind](tmp_path / "state")
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "state")],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == "claimed\n"
        with pytest.raises(CheckpointError, match=f"in process {holder.pid}$"):
            store.claim()
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    store.claim()
    store.close()


async def test_two_consumers_of_one_name_in_the_server_are_noticed(server):
    first, second = (ServerCheckpoint(server.address, "shared") for _ in range(2))
    assert await first.load() == await second.load() == {}
    await first.save_changes({1: position(5), 2: position(5)})
    with pytest.raises(CheckpointError, match="another consumer has saved partition 1") as caught:
        await second.save_changes({1: position(4), 3: position(4)})
    assert "its own name" in caught.value.hint
    async with KvClient.connect(server.address) as kv:
        document = await kv.get(checkpoint_key("shared", 1))
        assert decode_checkpoint(document.value) == {1: position(5)}
    # Nothing of the first one was overwritten. If it goes away, the other one goes on.
    await first.save_changes({1: position(6)})
    await first.close()
    with pytest.raises(CheckpointError, match="another consumer"):
        await second.save_changes({1: position(7)})
    await second.save_changes({1: position(7)})
    assert (await second.load())[1] == position(7)
    await second.close()


async def test_members_of_a_group_share_a_name(server):
    members = [ServerCheckpoint(server.address, "group") for _ in range(2)]
    for seqno in (1, 2, 3):
        for index, member in enumerate(members):
            if seqno == 1:
                await member.load()
            await member.save_changes({index: position(seqno)})
    for member in members:
        await member.close()


async def test_what_a_failover_brings_back_is_no_other_consumer(server):
    """An older document of the same writer, or none; and an answer that was lost."""
    store = ServerCheckpoint(server.address, "back")
    key = checkpoint_key("back", 9)
    async with KvClient.connect(server.address) as kv:
        await kv.set(key, encode_checkpoint({9: position(2)}))
        await store.load()
        await store.save_changes({9: position(3)})
        await kv.set(key, encode_checkpoint({9: position(2)}))  # of the consumer before it
        with pytest.raises(CheckpointError, match="another consumer"):
            # Its own document is gone, and what is there could be of another one.
            await store.save_changes({9: position(4)})
        await store.save_changes({9: position(4)})
        written = (await kv.get(key)).value
        await store.save_changes({9: position(5)})
        await kv.set(key, written)
        await store.save_changes({9: position(6)})
        await kv.delete(key)
        await store.save_changes({9: position(7)})
        assert decode_checkpoint((await kv.get(key)).value) == {9: position(7)}
    await store.close()

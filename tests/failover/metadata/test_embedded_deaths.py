"""The owner of an embedded store dies, stands still, or has a full disk: answers stay true."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from metastore_harness import Watched, run_on

from failover.metadata.embedded.client import EmbeddedClient
from failover.metadata.embedded.server import EmbeddedServer, EmbeddedStoreError
from failover.metadata.embedded.store_file import StoreFileBrokenError
from failover.metadata.metastore import (
    LeaseGrant,
    LeaseKeepAlive,
    LeaseResult,
    OutcomeUnknown,
    Put,
    Range,
    RefusalKind,
    StoreUnavailable,
    Txn,
    TxnResult,
)
from support.embedded_store import KEYRING, EmbeddedHarness, LoopHarness
from support.etcd_members import free_ports
from support.forgetful_disk import fill, small_disk
from support.load import CountingWriter

TESTS = Path(__file__).parents[2]
KILLS = 6


class OwnerProcess:
    """The owner in a process of its own, always on one port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (self.port,) = free_ports(1)
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.embedded_store", str(self.folder), str(self.port)],
            cwd=TESTS,
            env={**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"},
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout.readline() == b"listening\n"

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        self.process.stdout.close()
        return self.process.wait()


@pytest.fixture
def owner(tmp_path):
    owner = OwnerProcess(tmp_path / "metastore")
    yield owner
    owner.end()


@pytest.fixture
def loop():
    loop = LoopHarness()
    yield loop
    loop.close()


def client_of(loop, owner):
    async def made():
        return EmbeddedClient("127.0.0.1", owner.port, KEYRING, loop.notices.append)

    loop.clients.append(loop.run(made()))
    return loop.clients[-1]


def test_what_was_answered_survives_kills_of_the_owner(loop, owner):
    """At random moments, with four writers and a watch."""
    client = client_of(loop, owner)
    watched = Watched(client, b"", 1)
    writers = [CountingWriter(client, b"%d" % number) for number in range(4)]
    random = Random(5)
    for _ in range(KILLS):
        wanted = sum(writer.answered for writer in writers) + random.randrange(2, 120)
        loop.wait(lambda wanted=wanted: sum(w.answered for w in writers) >= wanted)
        owner.end()
        answered = {writer.key: writer.answered for writer in writers}
        owner.start()
        found = run_on(loop, client_of(loop, owner), Range(b"", is_prefix=True))
        for item in found.items:
            assert int(item.value) >= answered[item.key]
    answered = {writer.key: writer.answered for writer in writers}
    last = run_on(loop, client_of(loop, owner), Range(b"", is_prefix=True)).revision
    loop.wait(lambda: watched.revisions and watched.revisions[-1] >= last)
    assert watched.revisions == list(range(2, watched.revisions[-1] + 1)), "none missing or twice"
    written = {(event.item.key, event.item.value) for batch in watched.batches
               for event in batch.events}  # fmt: skip
    assert written >= {(key, b"%d" % value) for key, value in answered.items()}


def test_frozen_owner_ends_requests_in_time_and_keeps_leases(loop, owner):
    client = client_of(loop, owner)
    lease = run_on(loop, client, LeaseGrant(2))
    assert isinstance(lease, LeaseResult)
    owner.process.send_signal(signal.SIGSTOP)
    # Deadlines of 0.8 s: longer than the lease.
    results = [run_on(loop, client, LeaseKeepAlive(lease.lease_id)) for _ in range(5)]
    assert all(isinstance(result, OutcomeUnknown | StoreUnavailable) for result in results)
    owner.process.send_signal(signal.SIGCONT)
    loop.wait(lambda: not client.trouble)
    assert run_on(loop, client, LeaseKeepAlive(lease.lease_id)) == lease


def test_a_full_disk_refuses_writes_in_words_and_serves_the_rest():
    with small_disk("1M") as disk:
        harness = EmbeddedHarness(disk / "metastore")
        try:
            client = harness.client()
            lease = run_on(harness, client, LeaseGrant(2))
            first = run_on(harness, client, Txn(then=(Put(b"k", b"v", lease.lease_id),)))
            filler = fill(disk)
            # What is left of the last block takes some more records.
            refused = first
            while isinstance(refused, TxnResult):
                refused = run_on(harness, client, Txn(then=(Put(b"other", bytes(100)),)))
            assert refused.kind is RefusalKind.NO_SPACE
            assert "Make room on that disk" in refused.text
            read = run_on(harness, client, Range(b"k"))
            assert [item.value for item in read.items] == [b"v"]
            lease_ids = iter(range(1, 200))  # small records fill what is left
            while isinstance(run_on(harness, client, LeaseGrant(60, next(lease_ids))), LeaseResult):
                pass
            harness.pass_time(5)
            assert run_on(harness, client, LeaseKeepAlive(lease.lease_id)) == lease, (
                "without a record it does not end"
            )
            (file,) = harness.folder.glob("meta-*")
            assert file.stat().st_size == harness.server._file.end, "parts of records are cut"
            assert any("until there is room" in notice for notice in harness.notices)
            filler.unlink()
            written = run_on(harness, client, Txn(then=(Put(b"other", b"v"),)))
            assert isinstance(written, TxnResult)
            harness.stop()
            harness.start()
            read = run_on(harness, client, Range(b"", is_prefix=True))
            assert [item.value for item in read.items] == [b"v", b"v"]
        finally:
            harness.close()


def test_a_file_that_was_damaged_is_refused_in_words(tmp_path):
    harness = EmbeddedHarness(tmp_path / "metastore")
    client = harness.client()
    for number in range(3):
        run_on(harness, client, Txn(then=(Put(b"%d" % number, b"v"),)))
    harness.close()
    (file,) = harness.folder.glob("meta-*")
    data = bytearray(file.read_bytes())
    data[-20] ^= 4
    file.write_bytes(data)
    loop = LoopHarness()

    async def started():
        await EmbeddedServer(harness.folder, KEYRING, loop.notices.append).start()

    with pytest.raises(EmbeddedStoreError, match=r"meta-000001: the record at byte \d+ of \d+ is"):
        loop.run(started())
    loop.close()
    assert file.read_bytes() == data


def test_after_failed_sync_nothing_is_answered_and_owner_is_told(tmp_path, monkeypatch):
    harness = EmbeddedHarness(tmp_path / "metastore")
    client = harness.client()
    harness.wait(lambda: not client.trouble)
    file = harness.server._file

    def failing(fd):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(file._disk, "sync_data", failing)
    result = run_on(harness, client, Txn(then=(Put(b"k", b"v"),)))
    assert isinstance(result, OutcomeUnknown)
    assert "nobody knows what is on disk" in harness.run(harness.server.failed)
    assert isinstance(run_on(harness, client, Range(b"k")), StoreUnavailable)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="takes no more"):
        file.append(b"more")
    assert issubclass(StoreFileBrokenError, Exception)
    harness.close()


def test_a_long_file_is_rewritten_while_it_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr("failover.metadata.embedded.server.LOG_BYTES_MIN", 2000)
    monkeypatch.setattr("failover.metadata.embedded.core.HISTORY_BYTES_MAX", 500)
    harness = EmbeddedHarness(tmp_path / "metastore")
    client = harness.client()
    writers = [CountingWriter(client, b"%d" % number) for number in range(3)]
    harness.wait(lambda: harness.server._file.generation >= 4)
    harness.wait(lambda: all(writer.answered > 20 for writer in writers))
    harness.stop()
    answered = {writer.key: writer.answered for writer in writers}
    harness.start()
    found = run_on(harness, harness.client(), Range(b"", is_prefix=True))
    assert {item.key: int(item.value) >= answered[item.key] for item in found.items} == {
        b"0": True, b"1": True, b"2": True,
    }  # fmt: skip
    assert len(list(harness.folder.glob("meta-*"))) == 1
    harness.close()

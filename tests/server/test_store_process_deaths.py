"""A store process that dies in every merge: reads go on, writes are refused, nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from clients.address import parse_address
from clients.errors import TemporaryError
from clients.kv.sync_client import SyncKv
from support.server import DcpdProcess
from support.waiting import until

VALUE = b"x" * 40_000
pytestmark = pytest.mark.crash


def children(pid: int) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (task / "children").read_text().split())


def kill_children(pid: int, until_set: threading.Event) -> None:
    while not until_set.wait(0.002):
        for child in children(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGSEGV)


def write_until_refused(server: DcpdProcess) -> int:
    """Return how many writes were answered."""
    with SyncKv(parse_address(server.address), timeout_s=1) as kv:
        for number in count():
            try:
                kv.set(f"key:{number}", VALUE)
            except TemporaryError as error:
                if "the store process" not in str(error):
                    raise
                return number
    raise AssertionError


def test_it_is_started_again_for_ever_and_the_server_goes_on(tmp_path: Path) -> None:
    arguments = ("--memtable-bytes", "1MiB", "--write-wait", "100ms")
    with DcpdProcess(tmp_path / "data", *arguments) as server:
        enough = threading.Event()
        killer = threading.Thread(target=kill_children, args=(server.pid, enough))
        killer.start()
        try:
            answered = write_until_refused(server)
            with server.connect() as kv:
                assert kv.get("key:0").value == VALUE
            until(lambda: server.metrics()["dcpd_merge_failures_total"] >= 2)
            assert "the store process" in server.status()["merge_trouble"]
        finally:
            enough.set()
            killer.join()
        until(lambda: not server.status()["write_refusal"])
        with server.connect() as kv:
            kv.set("again", VALUE)
            assert answered > 20
            assert all(kv.get(f"key:{number}").value == VALUE for number in range(answered))
        assert server.stop() == 0

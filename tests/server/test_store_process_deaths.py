"""A store process that dies in every merge: the server says so and ends, nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.errors import ConnectError, ConnectionLostError
from support.server import DcpdProcess

VALUE = b"x" * 40_000
pytestmark = pytest.mark.crash


def children(pid: int) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (task / "children").read_text().split())


def test_it_is_started_again_a_few_times_and_then_the_server_ends(tmp_path: Path) -> None:
    answered = 0
    with DcpdProcess(tmp_path / "data", "--memtable-bytes", "1MiB") as server:
        process = server._process
        assert process is not None
        with server.connect() as kv, contextlib.suppress(ConnectionLostError, ConnectError):
            while True:
                kv.set(f"key:{answered}", VALUE)
                answered += 1
                for pid in children(server.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSEGV)
        assert process.wait(20) == 1
        said = server.log_path.read_text()
        assert "the store process" in said
        assert "could not be merged" in said
    with DcpdProcess(tmp_path / "data") as server, server.connect() as kv:
        assert answered > 20
        assert all(kv.get(f"key:{number}").value == VALUE for number in range(answered))

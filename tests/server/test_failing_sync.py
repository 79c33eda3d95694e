"""A failed sync is final: nothing more is answered, the process ends, the next start recovers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp.server.storage.log_ahead import AVOIDING_GROUPS_MAX
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient
from support.server import DcpdProcess

FAILING = """\
import errno, os
good = {call: getattr(os, call) for call in ("fdatasync", "fsync")}
def make(call):
    def sync(fd):
        if os.path.exists(FLAG):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        good[call](fd)
    return sync
for call in good:
    setattr(os, call, make(call))
"""


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's own Python imports a module that lets its syncs fail once this file is there."""
    flag = tmp_path / "fail"
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "sitecustomize.py").write_text(FAILING.replace("FLAG", repr(str(flag))))
    monkeypatch.setenv("PYTHONPATH", str(faults), prepend=":")
    return flag


@pytest.mark.crash
@pytest.mark.parametrize("durability", ["commit", "interval"])
def test_nothing_is_answered_after_a_failed_sync(
    tmp_path: Path, failing: Path, durability: str
) -> None:
    with DcpdProcess(tmp_path / "data", "--durability", durability) as server:
        with RawClient(server.port) as client:
            assert client.set(b"before").status == Status.OK
            failing.touch()
            if durability == "interval":
                assert client.set(b"seen").status == Status.OK
            else:
                # After a slow sync the thread in C writes some groups, and its syncs do not fail.
                for _ in range(AVOIDING_GROUPS_MAX):
                    client.send(pack_request(Opcode.SET, key=b"never", extras=bytes(8), value=b"v"))
                    if (answer := client.receive()) is None:
                        break
                    assert answer.status == Status.OK
            assert client.is_closed()
        assert server._process is not None
        assert server._process.wait(timeout=20) == 1
        text = server.log_path.read_text()
        assert "could not be synced" in text
        assert "start again once the cause is gone" in text
        assert "Traceback" not in text
        failing.unlink()
        server.kill()
        server.start()
        with RawClient(server.port) as client:
            assert client.ask(Opcode.GET, key=b"before", vb_id=0).value == b"v"
        # The next start reads the group that was not synced, and serves it.
        assert "end of the log written again" in server.log_path.read_text()


@pytest.mark.crash
def test_sync_that_fails_in_last_moment_ends_process_and_is_said(
    tmp_path: Path, failing: Path
) -> None:
    """Without syncs of its own, the log is synced when the server stops."""
    with DcpdProcess(tmp_path / "data", "--durability", "none") as server:
        with RawClient(server.port) as client:
            assert client.set(b"seen").status == Status.OK
        failing.touch()
        assert server.stop() == 1
        text = server.log_path.read_text()
        assert "could not be synced" in text
        assert "may be lost; start again once the cause is gone" in text
        assert "Traceback" not in text
        failing.unlink()
        server.start()

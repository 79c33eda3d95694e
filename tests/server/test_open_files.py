"""Files that may be open: as many as the system gives, some of them kept from connections; and a
server that has none left loses nothing.
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clients.kv.client import KvClient
from dcp.server.config.settings import Settings
from dcp.server.net.open_files import (
    KEPT_FILES,
    admin_connections_within,
    connections_within,
    within_open_files,
)
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient, context_of
from support.server import DcpdProcess
from support.waiting import until
from vbucket.model.ids import vbucket_of


@pytest.mark.parametrize(
    ("asked", "files_max", "allowed"),
    [
        (10_000, 1 << 20, 10_000),
        (10_000, 10_256 + KEPT_FILES, 10_000),
        (10_000, 1_024, 1_024 - KEPT_FILES - 256),
        (100, 1_024, 100),
        (10_000, 100, 50),
    ],
)
def test_connections_leave_files_for_the_rest(asked: int, files_max: int, allowed: int) -> None:
    assert connections_within(asked, files_max, 256) == allowed


def test_admin_interface_takes_quarter_of_files_at_most() -> None:
    allowed = {files: admin_connections_within(256, files) for files in (1 << 20, 1_024, 300, 20)}
    assert allowed == {1 << 20: 256, 1_024: 256, 300: 75, 20: 16}


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append(f"{event} {fields}")


def test_fewer_connections_are_said_once_and_are_the_limit_then() -> None:
    said = Said()
    settings = Settings(connections_max=5_000)
    assert within_open_files(settings, 6_000, said) == settings  # type: ignore[arg-type]
    assert said.lines == []
    fewer = within_open_files(settings, 1_024, said)  # type: ignore[arg-type]
    assert fewer == Settings(connections_max=704)
    (line,) = said.lines
    for part in ("connections_max': 704", "asked': 5000", "1024 files open", "ulimit -Hn"):
        assert part in line
    fewer = within_open_files(settings, 300, said)  # type: ignore[arg-type]
    assert fewer == Settings(connections_max=161, admin_connections_max=75)
    assert "'admin_connections_max': 75, 'asked': 256" in said.lines[-1]


@pytest.mark.parametrize(("soft", "hard"), [(64, 300), (300, 300), (300, 400)])
def test_the_process_allows_itself_what_it_may(soft: int, hard: int) -> None:
    script = (
        "import resource, sys\n"
        "from dcp.server.net.open_files import allow_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[1:])))\n"
        "print(allow_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(soft), str(hard)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(hard)] * 3


def test_a_server_under_a_small_limit_says_how_many_it_takes(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            "sh", "-c", 'ulimit -n 300 && exec "$0" "$@"', sys.executable, "-m", "dcp.server.main",
            "--port", "0", "--admin-port", "0", "--data", str(tmp_path / "data"),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert any(line.startswith("  try ") for line in process.stdout)
    process.terminate()
    _, said = process.communicate(timeout=20)
    assert process.returncode == 0
    assert '"connections_max": 161' in said
    assert "300 files open" in said


# -- a server that has none left -------------------------------------------------------------------


@contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """The process can open nothing meanwhile; what is open stays."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def set_of(key: bytes, value: bytes) -> bytes:
    return pack_request(Opcode.SET, key=key, value=value, extras=bytes(8), vb_id=vbucket_of(key))


async def sizes_of(server: DcpdProcess, keys: list[bytes]) -> list[int]:
    async with KvClient.connect(server.address) as kv:
        return [len((await kv.get(key)).value) for key in keys]


async def test_small_and_large_writes_go_on_and_stop_comes_to_its_end(tmp_path: Path) -> None:
    """Room ahead of the log is made by opening it once more: without, there is none, no more."""
    sizes = [20_000 if number % 100 == 99 else 300 for number in range(600)]
    keys = [b"key-%d" % number for number in range(len(sizes))]
    with DcpdProcess(tmp_path / "data") as server:
        with RawClient(server.port) as client, no_descriptors(server.pid):
            for key, size in zip(keys, sizes, strict=True):
                client.send(set_of(key, bytes(size)))
                answer = client.receive()
                assert answer is not None
                assert answer.status == Status.OK
        assert server.stop() == 0
        server.start()
        assert await sizes_of(server, keys) == sizes


async def test_a_log_segment_that_cannot_be_begun_is_waited_for(tmp_path: Path) -> None:
    """Writes are refused with the reason, reads go on, and nothing that was answered is lost."""
    stored: list[bytes] = []
    with DcpdProcess(tmp_path / "data", "--memtable-bytes", "1MiB") as server:
        log = server.log_path.read_text
        with RawClient(server.port) as writer, RawClient(server.port) as client:
            with no_descriptors(server.pid):
                while True:
                    writer.send(set_of(b"key-%d" % len(stored), bytes(100_000)))
                    until(lambda: "log full" in log() or writer.has_answer())
                    if not writer.has_answer():
                        break  # it waits for the segment
                    answer = writer.receive()
                    assert answer is not None
                    if answer.status:
                        break
                    stored.append(b"key-%d" % len(stored))
                until(lambda: "log full" in log())
                assert "allow more open files (ulimit -n)" in log()
                client.send(set_of(b"new", b"v"))
                refused = client.receive()
                assert refused is not None
                assert refused.status == Status.ETMPFAIL
                assert "refused until there is room for the server's log" in context_of(refused)
                found = client.ask(Opcode.GET, key=stored[0], vb_id=vbucket_of(stored[0]))
                assert len(found.value) == 100_000
            until(lambda: "log has room again" in log())
            client.send(set_of(b"new", b"later"))
            taken = client.receive()
            assert taken is not None
            assert taken.status == Status.OK
        until(lambda: server.status()["merges"] >= 1)
        server.restart_after_kill()
        assert len(stored) >= 10
        assert await sizes_of(server, [*stored, b"new"]) == [100_000] * len(stored) + [5]

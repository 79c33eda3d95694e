"""Compaction in a real server: by command and by itself, and what is left afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from clients.testing import ServerRefusedError
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient
from support.server import DcpdProcess

VB = 7
KEYS = 100
VALUE_BYTES = 1_000
WAIT_S = 30.0


def dcpctl(server: DcpdProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clients.cli", "--server", server.address, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def compact(server: DcpdProcess, *arguments: str) -> dict[str, Any]:
    done = dcpctl(server, "compact", *arguments, "-o", "json")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def figures(server: DcpdProcess) -> dict[str, int]:
    with server.connect() as kv:
        stats = kv.stats(f"vbucket-seqno {VB}")
    return {name.partition(":")[2]: int(value) for name, value in stats.items()}


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DcpdProcess]:
    with DcpdProcess(tmp_path / "data", *getattr(request, "param", ())) as server:
        yield server


@pytest.fixture
def writer(server: DcpdProcess) -> Iterator[Writer]:
    with closing(Writer(server)) as writer:
        yield writer


class Writer:
    """Writes the same keys again and again, each time with another value."""

    def __init__(self, server: DcpdProcess) -> None:
        self.client = RawClient(server.port)
        self.client.ask(Opcode.HELLO, value=Feature.XERROR.to_bytes(2, "big"))
        self.rounds = 0

    def close(self) -> None:
        self.client.__exit__(None, None, None)

    def write(self, rounds: int) -> None:
        for _ in range(rounds):
            self.rounds += 1
            value = b"%d." % self.rounds * (VALUE_BYTES // 5)
            self.client.send(
                b"".join(
                    pack_request(
                        Opcode.SETQ, key=b"%d" % key, extras=bytes(8), value=value, vb_id=VB
                    )
                    for key in range(KEYS)
                )
            )
        assert self.client.ask(Opcode.NOOP).status == Status.OK

    def check(self) -> None:
        for key in range(KEYS):
            frame = self.client.ask(Opcode.GET, key=b"%d" % key, vb_id=VB)
            assert frame.value == b"%d." % self.rounds * (VALUE_BYTES // 5)

    def delete(self, key: int) -> None:
        assert self.client.ask(Opcode.DELETE, key=b"%d" % key, vb_id=VB).status == Status.OK


@pytest.mark.parametrize(
    "server", [("--history-window", "0", "--compact-interval", "0")], indirect=True
)
def test_overwriting_and_compacting_keeps_the_store_small(
    server: DcpdProcess, writer: Writer
) -> None:
    used = []
    for _ in range(5):
        writer.write(20)
        report = compact(server)
        assert report["versions"] == (20 if used else 19) * KEYS
        assert report["bytes_after"] < report["bytes_before"]
        used.append(report["bytes_after"])
    assert max(used) < 3 * KEYS * VALUE_BYTES + 1_024 * 4_096
    store = Path(server.data) / "store" / "data.mdb"
    assert store.stat().st_blocks * 512 < 20 * KEYS * VALUE_BYTES + 1_024 * 4_096
    high = writer.rounds * KEYS
    assert figures(server)["history_floor"] == high
    writer.check()
    server.restart()
    assert figures(server)["high_seqno"] == figures(server)["history_floor"] == high
    assert compact(server)["versions"] == 0, "nothing is left to do"


@pytest.mark.parametrize("server", [("--compact-interval", "0")], indirect=True)
def test_history_is_kept_within_the_window_and_ends_below_it(
    server: DcpdProcess, writer: Writer
) -> None:
    writer.write(3)
    assert compact(server, str(VB))["versions"] == 0, "all is within the hour and the gigabyte"
    assert figures(server)["history_floor"] == 0
    assert compact(server, str(VB), "--history", "0s")["versions"] == 2 * KEYS
    writer.write(1)
    refused = dcpctl(server, "vb", "branch", str(VB), "--at", "120")
    assert (refused.returncode, "history floor is 300" in refused.stderr) == (4, True)
    answer = server.ask("POST", f"/api/v1/vbuckets/{VB}/branch", {"at": 333})
    assert (answer["undone_seqnos"], answer["undone_keys"]) == (67, 67)
    back = dcpctl(server, "vb", "branch", str(VB), "--at", "120", "--or-zero", "-o", "json")
    answer = json.loads(back.stdout)
    assert (answer["seqno"], "or to 0" in answer["reason"]) == (0, True)
    now = figures(server)
    assert (now["high_seqno"], now["history_floor"], now["purge_seqno"]) == (0, 0, 0)
    writer.write(1)
    server.restart()
    assert figures(server)["high_seqno"] == KEYS


@pytest.mark.parametrize("server", [("--compact-interval", "0")], indirect=True)
def test_a_purge_frees_deletions(server: DcpdProcess, writer: Writer) -> None:
    writer.write(1)
    for key in range(50):
        writer.delete(key)
    dcpctl(server, "vb", "purge", str(VB), "--upto", "140")
    report = compact(server, str(VB))
    assert (report["versions"], report["tombstones"]) == (41 + 40, 40)
    now = figures(server)
    assert (now["purge_seqno"], now["history_floor"]) == (140, 141)
    report = compact(server, str(VB), "--history", "0s", "--purge-age", "0s")
    assert (report["versions"], report["tombstones"]) == (9 + 9, 9), "the last one stays"
    assert figures(server)["purge_seqno"] == 149


@pytest.mark.parametrize(
    "server",
    [("--history-window", "0", "--compact-interval", "100ms", "--memtable-bytes", "1MiB")],
    indirect=True,
)
def test_it_compacts_by_itself(server: DcpdProcess, writer: Writer) -> None:
    until = time.monotonic() + WAIT_S
    while server.metrics()["dcpd_compacted_versions_total"] < 20_000:
        assert time.monotonic() < until
        writer.write(50)
    floor = figures(server)["history_floor"]
    assert 0 < floor <= writer.rounds * KEYS
    with pytest.raises(ServerRefusedError, match="its history floor is"):
        server.ask("POST", f"/api/v1/vbuckets/{VB}/branch", {"at": 1})
    writer.check()


def test_what_is_asked_for_must_make_sense(server: DcpdProcess) -> None:
    for body, why in (
        ({"vbs": [1024]}, "0 to 1023"),
        ({"vbs": [True]}, "Expected `int`"),
        ({"history": "5"}, "duration"),
        ({"purge_age": "x"}, "duration"),
    ):
        with pytest.raises(ServerRefusedError, match=why):
            server.ask("POST", "/api/v1/compact", body)

"""A folder whose CAS ran ahead, in a real server: told by status, metrics and check, mended by a
command, and sound for all who follow it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clients import SyncConsumer
from clients.testing import ServerRefusedError
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.far_cas import FAR_CAS, KEY, VB, write_folder
from support.raw_client import RawClient
from support.server import DcpdProcess
from vbucket.model.ids import CAS_DRIFT_NS


def dcpctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clients.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def followed(server: DcpdProcess) -> dict[bytes, bytes]:
    """What somebody who begins now is told."""
    there: dict[bytes, bytes] = {}
    with SyncConsumer(server.address, vbuckets=[VB], until_now=True) as consumer:
        for event in consumer:
            key, value = getattr(event, "key", None), getattr(event, "value", None)
            if key is None:
                continue
            there.pop(key, None)
            if value is not None:
                there[key] = value
    return there


@pytest.fixture
def documents(tmp_path: Path) -> dict[bytes, bytes]:
    return write_folder(tmp_path / "data")


def test_it_is_told_mended_and_stays_so(tmp_path: Path, documents: dict[bytes, bytes]) -> None:
    folder = tmp_path / "data"
    with DcpdProcess(folder) as server:
        assert server.status()["cas_ahead"] == [VB]
        assert server.metrics()["dcpd_cas_ahead_vbuckets"] == 1
        told = dcpctl("--server", server.address, "status", "-o", "json")
        assert json.loads(told.stdout)["cas_ahead"] == 1
        with server.connect() as kv:
            held = kv.get(KEY.decode()).cas
        assert held == FAR_CAS
        before = followed(server)
        assert before == documents
        done = dcpctl("--server", server.address, "vb", "mend-cas")
        assert done.returncode == 0, done.stderr
        assert f"partition {VB}: {len(documents) - 1} documents and 1 deletions" in done.stdout
        assert server.status()["cas_ahead"] == []
        assert followed(server) == documents
        with server.connect() as kv:
            now = kv.get(KEY.decode())
            assert (now.value, now.cas < time.time_ns() + CAS_DRIFT_NS) == (b"v", True)
        again = dcpctl("--server", server.address, "vb", "mend-cas")
        assert "no partition's CAS is too far ahead" in again.stdout
        explicit = dcpctl("--server", server.address, "vb", "mend-cas", str(VB), "-o", "json")
        assert json.loads(explicit.stdout)["documents"] == 0
        assert dcpctl("--server", server.address, "compact").returncode == 0
    with DcpdProcess(folder) as server:
        assert server.status()["cas_ahead"] == []
        assert followed(server) == documents
        assert server.stop() == 0
    checked = dcpctl("verify", str(folder))
    assert checked.returncode == 0, checked.stdout
    assert "nothing is wrong" in checked.stdout


def test_a_check_names_the_partition(tmp_path: Path, documents: dict[bytes, bytes]) -> None:
    folder = tmp_path / "data"
    with DcpdProcess(folder) as server:
        assert dcpctl("--server", server.address, "compact").returncode == 0  # merges
        assert server.stop() == 0
    checked = dcpctl("verify", str(folder))
    assert checked.returncode == 0
    assert f"cas: partition {VB}: {len(documents)} keys have a CAS" in checked.stdout
    assert "dcpctl vb mend-cas" in checked.stdout


def test_a_kill_after_it_loses_nothing_of_it(tmp_path: Path, documents: dict[bytes, bytes]) -> None:
    folder = tmp_path / "data"
    server = DcpdProcess(folder)
    server.start()
    try:
        assert dcpctl("--server", server.address, "vb", "mend-cas").returncode == 0
        server.kill()
        server.start()
        assert server.status()["cas_ahead"] == []
        assert followed(server) == documents
    finally:
        server.kill()


def test_it_is_refused_where_the_partition_takes_no_writes(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data") as server:
        server.set_state(VB, "replica")
        with pytest.raises(ServerRefusedError, match="only active ones are mended"):
            server.ask("POST", f"/api/v1/vbuckets/{VB}/mend-cas", {})


def test_the_bound_is_a_setting(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data", "--cas-drift-max", "10s") as server:
        with RawClient(server.port) as client:
            statuses = []
            for ahead_s in (5, 60):
                cas = time.time_ns() + ahead_s * 10**9
                extras = bytes(15) + b"\1" + cas.to_bytes(8, "big")
                frame = client.ask(
                    Opcode.SET_WITH_META, vb_id=VB, key=b"k%d" % ahead_s, extras=extras
                )
                statuses.append(frame.status)
        assert statuses == [Status.OK, Status.CAS_VALUE_INVALID]

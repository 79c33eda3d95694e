"""A real server whose scrubber reads everything: it names what is damaged before a client asks."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.lmdb_layout import PAGE_BYTES, layout_of, overwrite
from support.raw_client import RawClient
from support.server import DcpdProcess
from vbucket.model.ids import vbucket_of

KEYS = 2_000


def dcpctl(node: DcpdProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clients.cli", "--server", node.address, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def done(node: DcpdProcess, *arguments: str) -> str:
    run = dcpctl(node, *arguments)
    assert run.returncode == 0, run.stderr
    return run.stdout


def write(server: DcpdProcess) -> None:
    draw = random.Random(5)
    with RawClient(server.port) as client:
        client.send(
            b"".join(
                pack_request(
                    Opcode.SETQ, key=key, value=draw.randbytes(900), extras=bytes(8),
                    vb_id=vbucket_of(key, 64),
                )
                for key in (b"key %04d" % number for number in range(KEYS))
            )
        )  # fmt: skip
        assert client.ask(Opcode.NOOP).status == Status.OK


def status_of(server: DcpdProcess) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(dcpctl(server, "scrub", "status", "-o", "json").stdout)
    return report


def scrubbed(server: DcpdProcess, passes: int) -> dict[str, Any]:
    """Have everything read; return what the scrubber says then."""
    done(server, "scrub", "start")
    while True:
        report = status_of(server)
        if report["passes"] >= passes and not report["is_running"]:
            return report
        time.sleep(0.05)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def test_what_is_damaged_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with DcpdProcess(folder, "--partitions", "64") as server:
        write(server)
        assert dcpctl(server, "compact").returncode == 0
        write(server)  # the log has something, too
        whole = scrubbed(server, 1)
        assert whole["damages"] == []
        assert whole["read_bytes"] > KEYS * 900
        assert "nothing is damaged" in done(server, "status")

        tables = layout_of(folder / "store")
        block = min(tables["by_seqno"].large)
        flip(folder / "store" / "data.mdb", block * PAGE_BYTES + 3 * PAGE_BYTES)
        leaf = min(tables["by_key"].leaves)
        overwrite(folder / "store", leaf, "zeros")
        segment = max((folder / "log").glob("*.log"))
        flip(segment, 40_000)

        report = scrubbed(server, 2)
        named = dcpctl(server, "scrub", "status")
        assert named.returncode == 1
        found = {row["kind"]: row for row in report["damages"]}
        assert set(found) == {"block", "pages", "log"}, report["damages"]
        vb_id = int.from_bytes(tables["by_seqno"].large[block][:2], "big")
        assert found["block"]["vb"] == vb_id
        assert found["block"]["seqnos"]
        lost = {key[3:].decode() for key in tables["by_key"].leaves[leaf]}
        first, _ = found["pages"]["keys"]
        assert "table by_key" in found["pages"]["where"]
        assert first <= min(lost)
        assert found["log"]["file"] == f"log/{segment.name}"
        for row in report["damages"]:
            assert row["advice"] in named.stdout
            assert row["file"] in named.stdout
        audit = [json.loads(line) for line in (folder / "audit.log").read_text().splitlines()]
        assert sum(line["event"] == "damage" for line in audit) == 3
        assert "3 damages" in done(server, "status")


def test_a_pass_goes_on_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with DcpdProcess(folder, "--partitions", "64", "--scrub-period", "0") as server:
        write(server)
        assert dcpctl(server, "compact").returncode == 0
        began = scrubbed(server, 1)["began_s"]
        assert server.stop() == 0
    kept = json.loads((folder / "scrub.json").read_text())
    kept["status"] |= {"is_running": True, "passes": 4}
    kept |= {"area": 4, "key": (30).to_bytes(2, "big").hex()}
    (folder / "scrub.json").write_text(json.dumps(kept))
    with DcpdProcess(folder, "--scrub-period", "0") as server:
        while (report := status_of(server))["is_running"]:
            time.sleep(0.05)
        assert report["passes"] == 5
        assert report["began_s"] == began
        assert report["read_bytes"] > 0

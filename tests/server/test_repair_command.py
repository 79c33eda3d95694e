"""`dcpctl repair --from-backup`: blocks come back from an archive, or not at all."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from support.raw_client import set_all
from support.server import DcpdProcess, command, printed
from support.stored_bytes import PAGE_BYTES, layout_of

KEYS = 1_600
ARGUMENTS = ("--partitions", "64", "--item-cache-bytes", "0")


def value_of(number: int, version: int) -> bytes:
    return random.Random(number * 100 + version).randbytes(900)


def write(server: DcpdProcess, version: int, numbers: range) -> None:
    documents = ((b"key %d" % number, value_of(number, version)) for number in numbers)
    set_all(server.port, documents, 64)


def damages(server: DcpdProcess) -> list[dict[str, Any]]:
    """Have everything read, and return what is damaged then."""
    passes = json.loads(command(server, "scrub", "status", "-o", "json").stdout)["passes"]
    printed(server, "scrub", "start")
    while True:
        report = json.loads(command(server, "scrub", "status", "-o", "json").stdout)
        if report["passes"] > passes:
            found: list[dict[str, Any]] = report["damages"]
            return found
        time.sleep(0.05)


def zero(path: Path, at: int, size: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(size))


def test_blocks_come_from_an_archive(tmp_path: Path) -> None:
    folder, archive = tmp_path / "data", str(tmp_path / "archive")
    path = folder / "store" / "data.mdb"
    with DcpdProcess(folder, *ARGUMENTS) as server:
        write(server, 1, range(KEYS))
        write(server, 2, range(0, KEYS, 3))
        printed(server, "backup", "run", "--archive", archive)
        printed(server, "compact")
        assert "nothing is damaged" in printed(server, "repair", "--from-backup", archive)
        sound = path.read_bytes()
        blocks = sorted(layout_of(folder / "store")["by_seqno"].large)
        zero(path, blocks[3] * PAGE_BYTES + PAGE_BYTES, 700)  # amid versions
        zero(path, blocks[9] * PAGE_BYTES, PAGE_BYTES)  # the head of a block
        assert [row["kind"] for row in damages(server)] == ["block", "block"]
        told = printed(server, "repair", "--from-backup", archive)
        assert told.count(": repaired\n") == 2
        assert path.read_bytes() == sound
        assert damages(server) == []
        receipts = [line for line in (folder / "audit.log").read_text().splitlines()
                    if '"repair"' in line and '"how"' in line]  # fmt: skip
        assert len(receipts) == 2
        assert all("an archive" in json.loads(line)["how"] for line in receipts)

        # What an archive does not have is refused, and nothing older replaces anything.
        write(server, 3, range(KEYS))
        printed(server, "compact")
        blocks = sorted(layout_of(folder / "store")["by_seqno"].large.items(),
                        key=lambda item: item[1][2:])  # fmt: skip
        zero(path, blocks[-1][0] * PAGE_BYTES, PAGE_BYTES)
        before = path.read_bytes()
        (row,) = damages(server)
        refused = command(server, "repair", "--from-backup", archive)
        assert refused.returncode == 8
        assert "the archive does not have it: seqno" in refused.stdout
        assert path.read_bytes() == before

        # So is one of another history.
        other = str(tmp_path / "other")
        with DcpdProcess(tmp_path / "second", *ARGUMENTS) as second:
            for version in (1, 2, 3):
                write(second, version, range(KEYS))
            printed(second, "backup", "run", "--archive", other)
        refused = command(server, "repair", "--from-backup", other)
        assert refused.returncode == 8
        assert f"seqno {row['seqnos'][1]} is of version" in refused.stdout
        assert path.read_bytes() == before
        assert server.stop() == 0

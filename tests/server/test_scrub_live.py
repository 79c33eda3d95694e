"""A real server whose scrubber reads everything: it names what is damaged before a client asks, and
mends what the folder itself can prove.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from dcp.wire.opcode import Opcode
from support.raw_client import RawClient, set_all
from support.server import DcpdProcess, command, printed
from support.stored_bytes import PAGE_BYTES, layout_of, overwrite
from vbucket.model.ids import vbucket_of

KEYS = 2_000


def value_of(number: int) -> bytes:
    return random.Random(number).randbytes(900)


def write(server: DcpdProcess) -> None:
    documents = ((b"key %04d" % number, value_of(number)) for number in range(KEYS))
    set_all(server.port, documents, 64)


def status_of(server: DcpdProcess) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(command(server, "scrub", "status", "-o", "json").stdout)
    return report


def scrubbed(server: DcpdProcess, passes: int) -> dict[str, Any]:
    """Have everything read; return what the scrubber says then."""
    printed(server, "scrub", "start")
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
        assert command(server, "compact").returncode == 0
        write(server)  # the log has something, too
        whole = scrubbed(server, 1)
        assert whole["damages"] == []
        assert whole["read_bytes"] > KEYS * 900
        assert "nothing is damaged" in printed(server, "status")

        tables = layout_of(folder / "store")
        block = max(tables["by_seqno"].large)
        for at in (100, 200):  # two bits: no checksum names them
            flip(folder / "store" / "data.mdb", block * PAGE_BYTES + 3 * PAGE_BYTES + at)
        keys = tables["by_key"]
        for page in (min(keys.branches), max(keys.leaves)):  # nobody can tell what is below
            overwrite(folder / "store", page, "zeros")
        flip(max((folder / "log").glob("*.log")), 40_000)

        report = scrubbed(server, 2)
        named = command(server, "scrub", "status")
        assert named.returncode == 1
        found = {row["kind"]: row for row in report["damages"]}
        assert set(found) == {"block", "pages"}, report["damages"]
        assert report["mended"] == 1, "the log"
        vb_id = int.from_bytes(tables["by_seqno"].large[block][:2], "big")
        assert found["block"]["vb"] == vb_id
        assert found["block"]["seqnos"]
        assert "table by_key" in found["pages"]["where"]
        for row in report["damages"]:
            assert row["advice"] in named.stdout
            assert row["file"] in named.stdout
        audit = [json.loads(line) for line in (folder / "audit.log").read_text().splitlines()]
        assert sum(line["event"] == "damage" for line in audit) == 2
        assert "2 damages" in printed(server, "status")
        block, first_key = min(tables["by_seqno"].large.items())
        for at in (100, 200):
            flip(folder / "store" / "data.mdb", block * PAGE_BYTES + 3 * PAGE_BYTES + at)
        scrubbed(server, 3)
        where = f"partition {int.from_bytes(first_key[:2], 'big')}, table by_seqno"
        while where not in printed(server, "status"):  # it is a second old at most
            time.sleep(0.1)


def wrong_answers(server: DcpdProcess) -> dict[int, int]:
    """GET everything; return the number of refusals by status. No answer has a wrong value."""
    refused: dict[int, int] = {}
    with RawClient(server.port) as client:
        for number in range(KEYS):
            key = b"key %04d" % number
            answer = client.ask(Opcode.GET, key=key, vb_id=vbucket_of(key, 64))
            if answer.status:
                refused[answer.status] = refused.get(answer.status, 0) + 1
            else:
                assert answer.value == value_of(number)
    return refused


def test_what_the_folder_can_prove_is_mended(tmp_path: Path) -> None:
    """By a pass, after a client met it, and before a merge would put it into quarantine."""
    folder = tmp_path / "data"
    path = folder / "store" / "data.mdb"
    arguments = ("--partitions", "64", "--item-cache-bytes", "0")
    with DcpdProcess(folder, *arguments) as server:
        write(server)
        assert command(server, "compact").returncode == 0
        tables = layout_of(folder / "store")
        sound = path.read_bytes()
        keys, blocks = tables["by_key"], tables["by_seqno"]
        overwrite(folder / "store", max(keys.leaves), "zeros")
        overwrite(folder / "store", min(keys.leaves), "other")
        flip(path, max(blocks.large) * PAGE_BYTES + 2 * PAGE_BYTES)  # the body of a block
        flip(path, min(blocks.large) * PAGE_BYTES + 40)  # the columns of one
        flip(path, min(blocks.branches or blocks.leaves) * PAGE_BYTES + 20)
        report = scrubbed(server, 1)
        assert report["damages"] == []
        assert report["mended"] == 5
        assert wrong_answers(server) == {}
        audit = [json.loads(line) for line in (folder / "audit.log").read_text().splitlines()]
        assert sum(line["event"] == "repair" for line in audit) == 5
        page = max(blocks.large) * PAGE_BYTES
        assert (
            path.read_bytes()[page : page + 3 * PAGE_BYTES] == sound[page : page + 3 * PAGE_BYTES]
        )

        overwrite(folder / "store", max(keys.leaves), "zeros")
        flip(path, max(blocks.large) * PAGE_BYTES + 2 * PAGE_BYTES)
        while wrong_answers(server):
            time.sleep(0.05)
        assert status_of(server)["mended"] == 7

        write(server)
        overwrite(folder / "store", max(layout_of(folder / "store")["by_key"].leaves), "zeros")
        assert command(server, "compact").returncode == 0
        assert "quarantined" not in server.output
        assert wrong_answers(server) == {}

        for page, what in ((0, "zeros"), (1, "ones")):
            mended = status_of(server)["mended"]
            overwrite(folder / "store", page, what)
            scrubbed(server, status_of(server)["passes"] + 1)
            assert status_of(server)["mended"] == mended + 1
        overwrite(folder / "store", 0, "ones")
        assert command(server, "compact").returncode == 0
        assert wrong_answers(server) == {}
        overwrite(folder / "store", 0, "zeros")
        assert server.stop() == 0
    verified = command(server, "verify", str(folder))
    assert verified.returncode == 0, verified.stdout


def test_a_damaged_log_is_written_again_until_it_is_merged(tmp_path: Path) -> None:
    """By a pass, and by the merge that meets it: a head, groups, and the last one."""
    folder = tmp_path / "data"
    with DcpdProcess(folder, "--partitions", "64", "--scrub-period", "0") as server:
        for number, is_read in enumerate((True, False) * 3):
            write(server)
            segment = max((folder / "log").glob("*.log"))
            sound = segment.read_bytes().rstrip(b"\0")
            places = ((0, 100), (50_000, 9_000), (len(sound) - 60, 30))
            at, length = places[number // 2]
            with segment.open("r+b") as file:
                file.seek(at)
                file.write(bytes(length))
            if is_read:
                assert scrubbed(server, 1 + number // 2)["damages"] == []
            assert command(server, "compact").returncode == 0
            assert not segment.exists()
            while status_of(server)["mended"] <= number:  # told after the merge
                time.sleep(0.05)
            assert wrong_answers(server) == {}
        audit = [json.loads(line) for line in (folder / "audit.log").read_text().splitlines()]
        files = [line["file"] for line in audit if line["event"] == "repair"]
        assert len(files) == 6
        assert all(file.startswith("log/") for file in files)


def test_a_start_puts_a_meta_page_back(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with DcpdProcess(folder, "--partitions", "64") as server:
        write(server)
        assert command(server, "compact").returncode == 0
        server.kill()
    for slot in (0, 1):
        overwrite(folder / "store", slot, "zeros")
        verified = command(server, "verify", str(folder))
        assert verified.returncode == 1
        assert f"its meta page {slot} is not what was written last" in verified.stdout
        with DcpdProcess(folder) as server:
            assert wrong_answers(server) == {}
            server.kill()
    audit = [json.loads(line) for line in (folder / "audit.log").read_text().splitlines()]
    mended = [line["where"] for line in audit if line["event"] == "repair"]
    assert mended == ["meta page 0", "meta page 1"]


def test_a_pass_goes_on_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with DcpdProcess(folder, "--partitions", "64", "--scrub-period", "0") as server:
        write(server)
        assert command(server, "compact").returncode == 0
        began = scrubbed(server, 1)["began_s"]
        assert server.stop() == 0
    kept = json.loads((folder / "scrub.json").read_text())
    kept["status"] |= {"is_running": True, "passes": 4}
    kept |= {"area": 4, "key": (30).to_bytes(2, "big").hex()}
    del kept["seal"]  # a file without one is taken as it is
    (folder / "scrub.json").write_text(json.dumps(kept))
    with DcpdProcess(folder, "--scrub-period", "0") as server:
        while (report := status_of(server))["is_running"]:
            time.sleep(0.05)
        assert report["passes"] == 5
        assert report["began_s"] == began
        assert report["read_bytes"] > 0

"""`dcpctl verify` on folders that a real server wrote."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from clients.address import parse_address
from clients.errors import ServerError, TemporaryError
from clients.kv.sync_client import SyncKv
from clients.testing import ServerStartError
from dcp.server.check import verify as shell
from dcp.server.storage.folder import FolderInUseError, open_folder
from support.server import DcpdProcess
from vbucket.check.finding import Finding, Kind
from vbucket.log.segment_files import segment_path, segments_in
from vbucket.model.ids import vbucket_of
from vbucket.store.lmdb.page_sums import SUMS_FILE_NAME

KEYS = 400
VALUE = b"x" * 4000


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clients.cli", "verify", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with merged keys and more in the log, of a server that was killed."""
    folder = tmp_path_factory.mktemp("verify") / "data"
    with DcpdProcess(folder, "--memtable-bytes", "1MiB") as server, server.connect() as kv:
        for number in range(KEYS):
            kv.set(f"key:{number}", VALUE)
        while not server.status()["merges"]:
            kv.set("more", b"1")
        kv.delete("key:1")
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", str(written), str(copy)], check=True)
    return copy


def files(folder: Path) -> Iterator[tuple[str, bytes, int]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield str(path), path.read_bytes(), path.stat().st_mtime_ns


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def flip_value(folder: Path) -> None:
    """Change bits within a value in the store; one could be put back. Without checksums of pages,
    only its own tells.
    """
    (folder / "store" / SUMS_FILE_NAME).unlink()
    path = folder / "store" / "data.mdb"
    at = path.read_bytes().rindex(VALUE[:500])
    flip(path, at + 100)
    flip(path, at + 150)


def test_a_whole_folder_is_clean_and_is_not_touched(folder: Path) -> None:
    before = list(files(folder))
    plain, as_json = run(folder), run(folder, "-o", "json")
    assert (plain.returncode, as_json.returncode) == (0, 0), plain.stdout + plain.stderr
    assert "nothing is wrong" in plain.stdout
    summary = json.loads(as_json.stdout.splitlines()[-1])["summary"]
    assert (summary["findings"], summary["partitions"]) == (0, 1024)
    assert 0 < summary["keys"] <= KEYS + 1
    assert list(files(folder)) == before


def test_changes_that_are_not_merged_are_counted(tmp_path: Path) -> None:
    """After a clean stop they are in the log only: `0 keys` alone looks like a loss."""
    folder = tmp_path / "data"
    with DcpdProcess(folder) as server:
        with server.connect() as kv:
            for n in range(7):
                kv.set(f"k{n}", b"1")
        assert server.stop() == 0
        server.start()
    plain, as_json = run(folder), run(folder, "-o", "json")
    assert "0 keys, 0 versions, 7 changes in the log that are not merged yet" in plain.stdout
    assert json.loads(as_json.stdout.splitlines()[-1])["summary"]["log_changes"] == 7


def test_a_running_server_is_named(folder: Path) -> None:
    with DcpdProcess(folder) as server:
        refused = run(folder)
        assert refused.returncode == 2
        assert f"in use by process {server.pid}" in refused.stderr


def test_no_server_starts_during_a_check(folder: Path) -> None:
    lock = shell.lock_folder_to_read(folder)
    with pytest.raises(FolderInUseError):
        open_folder(folder, orphan_wait_s=0)
    lock.close()
    open_folder(folder).close()


@pytest.mark.parametrize(
    "marker", [None, "something else\n", "dcpd data folder, format version 9\n"]
)
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, marker: str | None) -> None:
    if marker is not None:
        (tmp_path / "dcpd-folder").write_text(marker)
    refused = run(tmp_path)
    assert refused.returncode == 2
    assert str(tmp_path) in refused.stderr
    assert run(tmp_path / "missing").returncode == 2


def test_damage_is_told_line_by_line(folder: Path) -> None:
    flip_value(folder)
    newest = segments_in(folder / "log")[-1]
    data = segment_path(folder / "log", newest).read_bytes()
    segment_path(folder / "log", newest).write_bytes(data + b"torn")
    found = run(folder, "-o", "json")
    assert found.returncode == 1
    *findings, summary = map(json.loads, found.stdout.splitlines())
    assert {finding["kind"] for finding in findings} == {"block", "torn-tail"}
    (block,) = (finding for finding in findings if finding["kind"] == "block")
    assert block["where"].startswith("partition ")
    assert "does not match its checksum" in block["what"]
    assert "restore" in block["try"]
    assert (summary["summary"]["findings"], summary["summary"]["harmless"]) == (1, 1)
    plain = run(folder).stdout.splitlines()
    assert len(plain) == len(findings) + 1
    assert plain[-1].startswith(f"{folder}: 1 findings, 1 harmless")


def test_a_file_cut_short_is_told_and_its_crash_too(folder: Path) -> None:
    path = folder / "store" / "data.mdb"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    found = run(folder)
    assert found.returncode == 1
    assert "pages: store/data.mdb" in found.stdout


def test_a_crash_of_lmdb_ends_no_check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process that reads the tables dies of a signal after its first finding."""
    child = folder / "child.py"
    child.write_text(
        "import os\n"
        """print('["finding", "block", "partition 1", "damaged"]', flush=True)\n"""
        """print('["progress", 5, 6, 7, 8]', flush=True)\n"""
        "os.kill(os.getpid(), 11)\n"
    )
    start = subprocess.Popen
    monkeypatch.setattr(
        shell.subprocess, "Popen", lambda _, **more: start([sys.executable, str(child)], **more)
    )
    assert shell.verify(folder, as_json=False) == shell.CheckExitCode.FINDINGS
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("block: partition 1: damaged")
    assert "the check crashed (SIGSEGV) after 5 partitions" in lines[1]


def test_a_log_that_is_gone_is_told(folder: Path) -> None:
    for path in (folder / "log").iterdir():
        path.unlink()
    for _ in range(2):
        found = run(folder)
        assert found.returncode == 1
        assert "missing: the store has not merged it" in found.stdout
        shutil.rmtree(folder / "log", ignore_errors=True)


def test_a_check_that_fails_is_no_clean_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process that reads the tables ends with an error of its own, which is exit code 1."""
    start = subprocess.Popen
    broken = [sys.executable, "-c", "raise AssertionError('a fault')"]
    monkeypatch.setattr(shell.subprocess, "Popen", lambda _, **more: start(broken, **more))
    assert shell.verify(folder, as_json=False) == shell.CheckExitCode.FINDINGS
    assert "the check failed (exit code 1" in capsys.readouterr().out


def test_a_table_whose_name_is_damaged_is_not_made_anew(folder: Path) -> None:
    """LMDB would make an empty by_key, and every document would be gone."""
    (folder / "store" / SUMS_FILE_NAME).unlink()  # otherwise it tells before
    path = folder / "store" / "data.mdb"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"by_key", b"by_kex"))
    found = run(folder)
    assert found.returncode == 1
    assert "by_kex" in found.stdout
    with pytest.raises(ServerStartError, match="by_kex"), DcpdProcess(folder):
        pass
    assert path.read_bytes() == data.replace(b"by_key", b"by_kex")


def test_server_refuses_what_damage_hides_and_serves_the_rest(
    folder: Path,
) -> None:
    (finding,) = damaged_block(folder)
    vb_id = int(finding.where.removeprefix("partition "))
    with DcpdProcess(folder) as server, server.connect() as kv:
        refused = {}
        for number in range(2, KEYS):
            key = f"key:{number}"
            try:
                right = kv.get(key).value == VALUE
            except ServerError as error:
                refused[key] = str(error)
            else:
                assert right
        assert {vbucket_of(key.encode()) for key in refused} == {vb_id}
        assert all("damaged" in text for text in refused.values())
        kv.set("still", b"here")
        assert server.stop() == 0


def damaged_block(folder: Path) -> list[Finding]:
    flip_value(folder)
    found = json.loads(run(folder, "-o", "json").stdout.splitlines()[0])
    return [Finding(Kind(found["kind"]), found["where"], found["what"])]


def test_merge_that_needs_damaged_data_sets_partition_aside(folder: Path) -> None:
    """Its writes are refused by name, all others go on, over restarts too; a branch at 0 is the
    end of it.
    """
    (finding,) = damaged_block(folder)
    vb_id = int(finding.where.removeprefix("partition "))
    numbers = count()
    key = next(k for n in numbers if vbucket_of(k := b"new:%d" % n) == vb_id).decode()
    other = next(k for n in numbers if vbucket_of(k := b"new:%d" % n) != vb_id).decode()
    with DcpdProcess(folder, "--memtable-bytes", "1MiB") as server:
        with SyncKv(parse_address(server.address), timeout_s=1) as kv:
            with pytest.raises(
                TemporaryError, match=f"partition {vb_id} is in quarantine.*block of seqno"
            ):
                write_for_ever(kv, key)
            newest = kv.get(key)
            for _ in range(2):
                kv.set(other, VALUE)
                server.compact()
                assert kv.get(key) == newest, "what was answered is there"
        assert list(server.status()["quarantined"]) == [str(vb_id)]
        assert server.metrics()["dcpd_vbuckets_quarantined"] == 1
        server.restart_after_kill()
        with SyncKv(parse_address(server.address), timeout_s=1) as kv:
            assert kv.get(key) == newest
            with pytest.raises(TemporaryError, match="is in quarantine"):
                kv.set(key, VALUE)
            assert server.stop() == 0
        found = json.loads(run(folder, "-o", "json").stdout.splitlines()[0])
        assert (found["kind"], found["where"]) == ("quarantine", f"partition {vb_id}")
        server.start()
        server.branch(vb_id, 0)
        server.compact()
        assert server.status()["quarantined"] == {}
        with SyncKv(parse_address(server.address), timeout_s=1) as kv:
            kv.set(key, b"anew")
        server.compact()
        server.restart_after_kill()
        with SyncKv(parse_address(server.address), timeout_s=1) as kv:
            assert kv.get(key).value == b"anew"
        assert server.stop() == 0
    assert run(folder).returncode == 0


def write_for_ever(kv: SyncKv, key: str) -> None:
    while True:
        kv.set(key, VALUE)

"""The data folder: ours or not, free or in use; every refusal says what to try."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dcp.server.storage.folder import (
    FolderError,
    FolderFormatError,
    FolderInUseError,
    ForeignFolderError,
    open_folder,
)


class Clock:
    """Time that passes only by sleeping; `on_sleep` may change the world meanwhile."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.on_sleep = lambda: None

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.on_sleep()


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_missing_folder_is_created_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "data"
    folder = open_folder(path)
    assert folder.is_new
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert (path / "lock").read_text().split() == [str(os.getpid())]
    assert folder.log_path == path / "log"
    assert folder.store_path == path / "store"
    folder.close()
    folder.close()


def test_a_folder_of_ours_is_opened_again(tmp_path: Path) -> None:
    open_folder(tmp_path).close()
    (tmp_path / "log").mkdir()
    folder = open_folder(tmp_path)
    assert not folder.is_new
    folder.close()


def test_a_creation_that_was_cut_short_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / "dcpd-folder.tmp").write_text("dcpd")
    folder = open_folder(tmp_path)
    assert folder.is_new
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dcpd-folder", "dcpd-folder.twin", "lock",
    ]  # fmt: skip
    folder.close()


def test_a_foreign_folder_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(
        ForeignFolderError, match=r"it holds a, b, c, \.\.\.\); nothing was changed"
    ):
        open_folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "d"]


def test_a_foreign_marker_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dcpd-folder").write_bytes(b"\xff\xfe something else")
    with pytest.raises(ForeignFolderError, match="not the marker that dcpd writes"):
        open_folder(tmp_path)


def test_an_unknown_format_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dcpd-folder").write_text("dcpd data folder, format version 2\n")
    with pytest.raises(FolderFormatError, match="'2', this program knows 1; use the version"):
        open_folder(tmp_path)


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("")
    with pytest.raises(FolderError, match="is a file; give a folder with --data"):
        open_folder(path)
    with pytest.raises(FolderError, match="cannot be used: Not a directory"):
        open_folder(path / "below")


def test_a_second_user_is_refused_at_once_and_told_who_has_it(tmp_path: Path) -> None:
    clock = Clock()
    folder = open_folder(tmp_path)
    with pytest.raises(FolderInUseError, match=f"in use by process {os.getpid()}; stop it first"):
        open_folder(tmp_path, now_s=clock.now, sleep_s=clock.sleep)
    assert clock.now_s == 100.0
    folder.close()
    open_folder(tmp_path).close()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    script = (
        "import sys, pathlib\n"
        "from dcp.server.storage.folder import open_folder, FolderInUseError\n"
        "try: open_folder(pathlib.Path(sys.argv[1]))\n"
        "except FolderInUseError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert f"{tmp_path} is in use by process {os.getpid()}" in run.stdout
    folder.close()


@pytest.mark.parametrize("pid_text", ["dead", ""])
def test_an_orphan_that_holds_the_lock_is_waited_for(tmp_path: Path, pid_text: str) -> None:
    open_folder(tmp_path).close()
    lock = tmp_path / "lock"
    lock.write_text(f"{dead_pid()}\n" if pid_text == "dead" else "")
    orphan_fd = os.open(lock, os.O_RDWR)
    fcntl.flock(orphan_fd, fcntl.LOCK_EX)
    clock = Clock()
    with pytest.raises(FolderInUseError, match="still holds the lock after 5 s"):
        open_folder(tmp_path, now_s=clock.now, sleep_s=clock.sleep)
    assert clock.now_s == pytest.approx(105.0, abs=0.1)

    def end_orphan() -> None:
        os.close(orphan_fd)
        clock.on_sleep = lambda: None

    clock.on_sleep = end_orphan
    folder = open_folder(tmp_path, now_s=clock.now, sleep_s=clock.sleep)
    assert lock.read_text().split() == [str(os.getpid())]
    folder.close()

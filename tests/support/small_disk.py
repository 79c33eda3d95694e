"""A disk of a few megabytes that can be filled: a tmpfs, which only root may mount."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vbucket.log.record import written_bytes
from vbucket.log.segment_files import segment_path, segments_in


@contextmanager
def small_disk(size: str) -> Iterator[Path]:
    """Mount a disk of this size (in tmpfs notation) for a while; skip the test if not permitted.

    It has its own folder: in `tmp_path`, a killed run would leave a mount that pytest cannot
    remove, and every later run would fail.
    """
    path = Path(tempfile.mkdtemp(prefix="dcpd-disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    try:
        if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("a disk of its own is mounted by root only: run the tests as root")
        yield path
    finally:
        if path.is_mount():
            # Lazily: the store process of a killed server ends a moment later.
            subprocess.run(["umount", "--lazy", str(path)], check=True)
        path.rmdir()


def fill(disk: Path) -> Path:
    """Fill all free space; return the file to remove again."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1 << 9, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return filler


def strip_zeros(log: Path) -> None:
    """Remove the zeros ahead of the newest segment's end."""
    path = segment_path(log, segments_in(log)[-1])
    path.write_bytes(path.read_bytes()[: written_bytes(path.read_bytes())])

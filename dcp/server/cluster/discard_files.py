"""Writes what a replica cuts off into files of the data folder (docs/replication.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dcp.server.access.users_file import replace_file
from failover.replication.receipt import CutOff, pack_cut_off

DISCARD_FOLDER: Final = "discarded"
FORMER_DISCARD_FOLDER: Final = "quarantine"
"""Its name in the version before: what is there is read."""


def keep_cut_off(data_dir: Path, cut: CutOff) -> Path:
    """Write a discard file and make it durable; return its path. Call it in a thread. Raises
    OSError; then nothing of it is left.
    """
    path = data_dir / DISCARD_FOLDER / cut.file_name
    replace_file(path, pack_cut_off(cut))
    return path

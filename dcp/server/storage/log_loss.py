"""Saves and records what a start gives up of a damaged log (`--accept-log-loss`).

data/
lost-log-1/         one folder for each time, numbered
0000000007.log    copies of the segments before they were cut or removed
end.mark          a copy of the log's end mark
receipt.json      what was given up: damage, partitions, seqnos
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Final

from dcp.server.storage.folder import log_path
from vbucket.engine.recovery.startup import LogLoss
from vbucket.log.disk_folder import sync_folder
from vbucket.log.segment_files import MARK_NAME, segment_name

RECEIPT_NAME: Final = "receipt.json"
_FOLDER: Final = re.compile(r"\Alost-log-(\d+)\Z")


def keep_copies(data_path: Path, segments: list[int]) -> None:
    """Copy log segments, and the end mark, into a new folder; durable on return.

    Raises OSError, SyncFailedError; then nothing may be cut.
    """
    folder = data_path / f"lost-log-{newest(data_path) + 1}"
    folder.mkdir(mode=0o700)
    for name in (*map(segment_name, segments), MARK_NAME):
        source = log_path(data_path) / name
        if source.exists():
            _copy(source, folder / name)
    sync_folder(folder)
    sync_folder(data_path)


def write_receipt(data_path: Path, loss: LogLoss) -> None:
    """Record what was given up, beside the newest copies. Raises OSError, SyncFailedError."""
    folder = data_path / f"lost-log-{newest(data_path)}"
    document = {
        "why": loss.why,
        "log_ends_with": str(loss.end),
        "is_complete": loss.is_complete,
        "lost": [
            {"vb": vb_id, "first_seqno": first, "last_seqno": last}
            for vb_id, (first, last) in loss.seqnos.items()
        ],
        "new_versions": loss.new_versions,
    }
    with (folder / RECEIPT_NAME).open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def newest(data_path: Path) -> int:
    """Return the number of the newest folder of lost logs, 0 if there is none."""
    found = (_FOLDER.match(path.name) for path in data_path.iterdir())
    return max((int(match[1]) for match in found if match), default=0)


def lost_words(loss: LogLoss, most: int = 20) -> str:
    """Describe which seqnos are lost; at most `most` partitions are named."""
    named = [
        f"partition {vb_id}: {first} to {last}" if last > first else f"partition {vb_id}: {first}"
        for vb_id, (first, last) in list(loss.seqnos.items())[:most]
    ]
    more = len(loss.seqnos) - len(named)
    words = ", ".join(named) + (f" and of {more} more partitions" if more else "")
    if loss.is_complete:
        return words or "none"
    return f"{words or 'unknown'}; there may be more: it is not known what the log held"


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as old, target.open("wb") as new:
        shutil.copyfileobj(old, new)
        new.flush()
        os.fsync(new.fileno())

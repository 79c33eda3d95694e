"""What a node keeps of discarded changes and of elections: files of receipts, and lines of the log.

What a replica cuts off goes into files of the data folder (docs/replication.md), and so do receipts
of unclean elections:

    discarded/
      vb0017-version...-9-12.cut            changes that this node cut off (`receipt`)
      vb0017-epoch4-election.receipt.json   this node became master by an unclean election

A discard file is its own receipt: only its head is read for the list. Files that cannot be read
are listed with the reason, so that nothing is missing without a word. The folder had another name
in the version before; what is there is listed, too.

The log gets one line for each new master, however many partitions it got.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

import msgspec

from dcp.server.files.kept_twice import read_kept, twin_of, write_kept
from dcp.server.observe.event_log import EventLog
from dcp.server.operate.cluster_reports import ReceiptReport, ReceiptsReport
from failover.coordinator.coordinator import Elected
from failover.coordinator.view import ClusterView
from vbucket.model.receipt import (
    CutHead,
    CutOff,
    DiscardDamagedError,
    ElectionLoss,
    election_receipt,
    pack_cut_off,
    unpack_head,
)

DISCARD_FOLDER: Final = "discarded"
FORMER_DISCARD_FOLDER: Final = "quarantine"
"""Its name in the version before: what is there is read."""


def keep_cut_off(data_dir: Path, cut: CutOff) -> Path:
    """Write a discard file and make it durable; return its path. Call it in a thread. Raises
    OSError; then nothing of it is left.
    """
    path = data_dir / DISCARD_FOLDER / cut.file_name
    write_kept(path, pack_cut_off(cut))
    return path


RECEIPTS_MAX: Final = 2000
"""Receipts in one list, the newest ones: an unclean election of every partition fits."""
HEAD_BYTES: Final = 16 * 1024
"""Of a discard file, for its list entry. A failover log has at most 200 versions, in 10 KiB."""
ELECTION_SUFFIX: Final = "-election.receipt.json"
"""Of the receipt of an unclean election."""
_CUT_NAME: Final = re.compile(r"vb(\d+)-version\d+-epoch\d+-(\d+)-(\d+)\.cut")
_ELECTION_NAME: Final = re.compile(r"vb(\d+)-epoch(\d+)-election\.receipt\.json")


def keep_election(data_dir: Path, lost: ElectionLoss, at_s: float) -> Path:
    """Write the receipt of an unclean election and make it durable; return its path. Call it in a
    thread. Raises OSError.
    """
    name = f"vb{lost.vb_id:04d}-epoch{lost.epoch}{ELECTION_SUFFIX}"
    path = data_dir / DISCARD_FOLDER / name
    write_kept(path, msgspec.json.encode({**election_receipt(lost), "at": at_s}) + b"\n")
    return path


def receipts_in(data_dir: Path, node: str) -> ReceiptsReport:
    """Return the receipts of a data folder, the newest first. Call it in a thread."""
    folder = data_dir / DISCARD_FOLDER
    found: list[ReceiptReport] = []
    times = sorted([*_times(folder), *_times(data_dir / FORMER_DISCARD_FOLDER)], reverse=True)
    for at_s, path in times[:RECEIPTS_MAX]:
        is_cut = path.suffix == ".cut"
        try:
            found.append(_cut_off(path, at_s) if is_cut else read_election(path))
        except FileNotFoundError:
            continue  # somebody has moved it away meanwhile
        except (OSError, DiscardDamagedError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            kind = "cut_off" if is_cut else "unclean_election"
            found.append(
                ReceiptReport(kind=kind, at=at_s, file=str(path), problem=why or str(error))
            )
    return ReceiptsReport(
        node=node, folder=str(folder), receipts=found,
        left_out=max(0, len(times) - RECEIPTS_MAX),
    )  # fmt: skip


def _times(folder: Path) -> list[tuple[float, Path]]:
    """Return when each receipt in a folder was written, and its path."""
    times = []
    try:
        paths = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    for path in paths:
        if _CUT_NAME.fullmatch(path.name) or _ELECTION_NAME.fullmatch(path.name):
            try:
                times.append((path.stat().st_mtime, path))
            except FileNotFoundError:
                continue
    return times


def _head_of(path: Path) -> CutHead:
    with path.open("rb") as file:
        return unpack_head(file.read(HEAD_BYTES))


def _cut_off(path: Path, at_s: float) -> ReceiptReport:
    try:
        head = _head_of(path)
    except (OSError, DiscardDamagedError):
        if not twin_of(path).exists():
            raise
        head = _head_of(twin_of(path))
    named = _CUT_NAME.fullmatch(path.name)
    assert named is not None
    return ReceiptReport(
        kind="cut_off", at=at_s, vb=head.vb, epoch=head.epoch, versions=head.versions,
        first_seqno=named[2], last_seqno=named[3], count=head.entries, file=str(path),
    )  # fmt: skip


class _Election(msgspec.Struct, frozen=True):
    vb: int
    epoch: int
    versions: list[tuple[str, str]]
    end_seqno: str
    committed_seqno: str | None
    known_lost: int | None
    at: float


def read_election(path: Path) -> ReceiptReport:
    """Return the receipt of an unclean election. Raises OSError, msgspec.MsgspecError."""
    told: Any = msgspec.json.decode(read_kept(path).content, type=_Election)
    return ReceiptReport(
        kind="unclean_election", at=told.at, vb=told.vb, epoch=told.epoch, versions=told.versions,
        end_seqno=told.end_seqno, committed_seqno=told.committed_seqno,
        known_lost=told.known_lost, file=str(path),
    )  # fmt: skip


class ElectionLog:
    """Gathers elections until `tell`."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._partitions: Counter[tuple[str, bool]] = Counter()
        """(Master, whether it was in sync) -> partitions."""

    def note(self, elected: Elected) -> None:
        """Gather one."""
        self._partitions[elected.record.master or "", elected.is_clean] += 1

    def tell(self, log: EventLog) -> None:
        """Log what was gathered."""
        for (member, is_clean), count in self._partitions.items():
            stored = self._view.members.get(member)
            name = member if stored is None else stored.content.name
            if is_clean:
                log.info("masters elected", master=name, partitions=count)
            else:
                log.error("masters elected that were not in sync", master=name, partitions=count)
        self._partitions.clear()

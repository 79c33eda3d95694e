"""What the server was told of backups: their runs, and the checks of archives.

A backup is a consumer; its archive is elsewhere. So `dcpctl backup` reports when a run or a check
begins and how it ended (`POST /api/v1/backups`), to every node that it reaches. Each node keeps
what it was told in a file of its data folder, for the console and `dcpctl backup list`.

Invariants
- at most REPORTS_MAX reports are kept, the newest ones; texts are cut, so the file stays small;
- a check is kept only beside a run of the same archive: others are of another server.
A lost or damaged file costs the list, and nothing else: the archive has its own runs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from dcp.server.files.kept_twice import read_kept, write_kept
from dcp.server.observe.event_log import EventLog
from dcp.server.operate.reports import Count, UnixTime

BACKUPS_FILE: Final = "backups.json"
REPORTS_MAX: Final = 200
"""Half a year of daily runs: 100 KB."""
TEXT_CHARS_MAX: Final = 300

_Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
_Id = Annotated[str, Meta(min_length=1, max_length=64)]


class BackupReport(msgspec.Struct, forbid_unknown_fields=True):
    """What a client says of a run of a backup, or of a check."""

    id: Annotated[_Id, Meta(description="Chosen by the client; a later report replaces this one.")]
    kind: Annotated[str, Meta(pattern="^(run|verify)$")]
    archive_id: _Id
    archive: Annotated[_Text, Meta(description="Where the archive is, as the client names it.")]
    host: Annotated[_Text, Meta(description="The machine that runs it.")]
    result: Annotated[str, Meta(pattern="^(running|done|failed|damaged)$")]
    started_s: Annotated[UnixTime, Meta(ge=0)]
    ended_s: Annotated[UnixTime, Meta(ge=0)] | None = None
    why: Annotated[_Text, Meta(description="What went wrong.")] = ""
    run: Annotated[Count, Meta(description="Its number in the archive; 0: none yet.")] = 0
    partitions: Annotated[Count, Meta(description="Partitions that had something new.")] = 0
    changes: Count = 0
    raw_bytes: Annotated[Count, Meta(description="Of the changes.")] = 0
    stored_bytes: Annotated[Count, Meta(description="In the archive.")] = 0
    rollbacks: Annotated[Count, Meta(description="Partitions whose history had branched.")] = 0


class KeptReport(msgspec.Struct):
    """A report, and who made it."""

    user: str
    peer: str
    report: BackupReport


class KeptReports(msgspec.Struct):
    """The newest first."""

    backups: list[KeptReport]


class Backups:
    """See the module."""

    def __init__(self, data_dir: Path, log: EventLog) -> None:
        self._path = data_dir / BACKUPS_FILE
        self._writing = asyncio.Lock()
        try:
            self._kept = read_backups(data_dir).backups
        except FileNotFoundError:
            self._kept = []
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("list of backups lost", file=str(self._path), reason=str(error))
            self._kept = []

    def reports(self) -> KeptReports:
        """Return what is kept."""
        return KeptReports(self._kept)

    async def keep(self, user: str, peer: str, report: BackupReport) -> KeptReport | None:
        """Keep a report durably; None: it is a check of an archive of which no run is known.

        Raises OSError; then the list is as it was.
        """
        async with self._writing:
            others = [each for each in self._kept if each.report.id != report.id]
            known = {each.report.archive_id for each in others if each.report.kind == "run"}
            if report.kind == "verify" and report.archive_id not in known:
                return None
            fresh = KeptReport(user, peer, report)
            kept = sorted([fresh, *others], key=lambda each: each.report.started_s, reverse=True)
            kept = kept[:REPORTS_MAX]
            content = msgspec.json.encode(KeptReports(kept)) + b"\n"
            await asyncio.to_thread(write_kept, self._path, content)
            self._kept = kept
        return fresh


def read_backups(data_dir: Path) -> KeptReports:
    """Return what the file of a data folder holds. Raises OSError, msgspec.MsgspecError."""
    return msgspec.json.decode(read_kept(data_dir / BACKUPS_FILE).content, type=KeptReports)

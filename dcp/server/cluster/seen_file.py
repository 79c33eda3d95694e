"""The file seen.json of a data folder: the newest records of the metadata store that it has seen.

It is written whenever a record has changed, in a thread, and masters wait for it before a member
that has left an in-sync set counts no more. So if the store goes back to an older copy, the nodes
know that it is older, and `dcpctl cluster meta restore` builds the records anew from these files.

It has the users' SCRAM keys, as users.json has, so only its owner may read it.

Invariants
- one write is under way at a time, and what changed meanwhile comes with the next one;
- the file is replaced, so a crash leaves the old one or the new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from dcp.server.files.kept_twice import read_kept, write_kept
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.housekeeping import Tasks
from failover.coordinator.records import ClusterKeys
from failover.coordinator.seen_records import SeenContent, SeenPiece, SeenRecord, SeenRecords

FORMAT: Final = 1
SEEN_FILE: Final = "seen.json"
REST_S: Final = 0.05
"""Time between two writes: a rebalance changes records all the time."""
AGAIN_S: Final = 1.0
"""The same after one that failed."""
_ADVICE: Final = "Without it, this node does not notice a metadata store that went back"


class _SeenFileContent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int = FORMAT
    cluster: str
    """The cluster's id: a folder may get another cluster's file."""
    revision: int
    records: dict[str, tuple[str, int]]
    """Key without the root -> the record's JSON text, and its mod revision."""


def read_seen(path: Path, cluster: str) -> SeenContent | None:
    """Return what a folder has seen; None: there is no file, or another cluster's. Raises OSError,
    ValueError: the file cannot be read.
    """
    try:
        content = msgspec.json.decode(read_kept(path).content, type=_SeenFileContent)
    except FileNotFoundError:
        return None
    if content.format != FORMAT:
        raise ValueError(f"it has format {content.format}, this dcpd reads format {FORMAT}")
    if content.cluster != cluster:
        return None
    records = {
        name: SeenRecord(text.encode(), revision)
        for name, (text, revision) in content.records.items()
    }
    return SeenContent(records, content.revision)


def check_seen(path: Path, cluster: str | None) -> None:
    """Raise ValueError if a file cannot be read, is another cluster's (None: not compared), or has
    a record that cannot be read.
    """
    told = msgspec.json.decode(read_kept(path).content, type=_SeenFileContent)
    if cluster is not None and told.cluster != cluster:
        raise ValueError(f"it is of the cluster {told.cluster}, and cluster.json of {cluster}")
    content = read_seen(path, told.cluster)
    assert content is not None, "it was there, and is of this cluster"
    for name, seen in content.records.items():
        try:
            msgspec.json.decode(seen.value)
        except msgspec.DecodeError as error:
            raise ValueError(f"its record {name} cannot be read: {error}") from None


class SeenFile:
    """See the module. Lives on one event loop. `kept` is called after each write."""

    def __init__(
        self,
        data_dir: Path,
        cluster: str,
        keys: ClusterKeys,
        tasks: Tasks,
        log: EventLog,
        kept: Callable[[], None],
    ) -> None:
        """Read what the folder has. A file that cannot be read is told, and counts as none."""
        self._path = data_dir / SEEN_FILE
        self._cluster = cluster
        self._tasks = tasks
        self._log = log
        self._kept = kept
        self._is_keeping = self._has_failed = self._is_over = False
        try:
            content = read_seen(self._path, cluster)
        except (OSError, ValueError) as error:
            log.warning(f"{self._path} cannot be read. {_ADVICE}", reason=str(error))
            content = None
        self.records = SeenRecords(keys, content, is_kept_in_file=True)

    def changed(self) -> None:
        """Records may have changed: write them."""
        if not self._is_keeping and not self._is_over and self.records.has_news:
            self._is_keeping = True
            self._tasks.begin(self._keep())

    async def _keep(self) -> None:
        while not self._is_over and (piece := self.records.take_piece()) is not None:
            why_not = await asyncio.to_thread(self._write, piece)
            if why_not:
                self.records.not_kept()
                if not self._has_failed:  # it is tried again
                    self._log.warning(f"{self._path} cannot be written. {_ADVICE}", reason=why_not)
            else:
                self.records.kept(piece)
                self._kept()
            self._has_failed = bool(why_not)
            await asyncio.sleep(AGAIN_S if why_not else REST_S)
        self._is_keeping = False

    def _write(self, piece: SeenPiece) -> str:
        """Write all of it; return why that failed, or ""."""
        records = {
            name: (seen.value.decode(), seen.mod_revision)
            for name, seen in piece.content.records.items()
        }
        content = _SeenFileContent(
            cluster=self._cluster, revision=piece.content.revision, records=records
        )  # fmt: skip
        try:
            write_kept(self._path, msgspec.json.encode(content) + b"\n")
        except OSError as error:
            return str(error)
        return ""

    def finish(self) -> None:
        """The process ends: write nothing more. What is not kept was told to nobody."""
        self._is_over = True

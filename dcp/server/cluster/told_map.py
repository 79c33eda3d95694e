"""The version of the newest map that this node has told clients: the file map.json of its folder.

By it a node that starts knows that the metadata store was set back
(`failover.coordinator.map_life`). It is written KEEP_S after the last time at most, beside
everything else: a store that is restored from a copy that is not older than that is not recognised.
A folder without the file has told nothing.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Final

import msgspec

from dcp.server.access.users_file import replace_file
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.tasks import Tasks
from failover.coordinator.map_life import NEVER_TOLD, MapVersion

FORMAT: Final = 1
MAP_FILE: Final = "map.json"
KEEP_S: Final = 1.0
"""Time between two writes: elections and handovers make many maps a second."""
_ADVICE: Final = "Without it, this node does not notice a metadata store that was set back"


class MapContent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says."""

    format: int = FORMAT
    cluster: str
    """The cluster's id: a folder may get another cluster's file."""
    life: int
    rev: int


def read_told_map(data_dir: Path) -> MapContent | None:
    """Return what the file of a folder says; None: there is none. Raises OSError,
    msgspec.DecodeError.
    """
    try:
        return msgspec.json.decode((data_dir / MAP_FILE).read_bytes(), type=MapContent)
    except FileNotFoundError:
        return None


class ToldMap:
    """See the module. Lives on one event loop."""

    def __init__(
        self, data_dir: Path, cluster: str, tasks: Tasks, log: EventLog, keep_s: float = KEEP_S
    ) -> None:
        """Read what the folder has. A file that cannot be read is told, and counts as none."""
        self._path = data_dir / MAP_FILE
        self._cluster = cluster
        self._tasks = tasks
        self._log = log
        self._keep_s = keep_s
        self._kept = self._newest = self._read()
        self._writing = threading.Lock()
        self._on_disk = self._kept
        """What the file has; only while `_writing` is held."""
        self._is_keeping = False
        self._has_failed = False

    @property
    def version(self) -> MapVersion:
        """The newest one."""
        return self._newest

    def _read(self) -> MapVersion:
        try:
            content = read_told_map(self._path.parent)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._log.warning(f"{self._path} cannot be read. {_ADVICE}", reason=str(error))
            return NEVER_TOLD
        if content is None or content.format != FORMAT or content.cluster != self._cluster:
            return NEVER_TOLD
        return MapVersion(content.life, content.rev)

    def note(self, version: MapVersion) -> None:
        """Clients are told this version."""
        self._newest = max(self._newest, version)
        if self._newest != self._kept and not self._is_keeping:
            self._is_keeping = True
            self._tasks.begin(self._keep())

    async def _keep(self) -> None:
        """Write until the newest one is on disk."""
        while self._newest != self._kept:
            version = self._newest
            self._written(version, await asyncio.to_thread(self._write, version))
            await asyncio.sleep(self._keep_s)
        self._is_keeping = False

    def _write(self, version: MapVersion) -> str:
        """Write a version, unless the file has it or a newer one; return why that failed, or ""."""
        content = MapContent(cluster=self._cluster, life=version.life, rev=version.rev)
        with self._writing:
            if version <= self._on_disk:
                return ""
            try:
                replace_file(self._path, msgspec.json.encode(content) + b"\n")
            except OSError as error:
                return str(error)
            self._on_disk = version
        return ""

    def _written(self, version: MapVersion, why_not: str) -> None:
        if why_not and not self._has_failed:  # it is tried again
            self._log.warning(f"{self._path} cannot be written. {_ADVICE}", reason=why_not)
        self._has_failed = bool(why_not)
        if not why_not:
            self._kept = version

    def finish(self) -> None:
        """Write the newest one at the end of the process, after a write that is under way."""
        if self._newest != self._kept:
            self._written(self._newest, self._write(self._newest))

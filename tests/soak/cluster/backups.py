"""Backups of the cluster while faults happen; each is restored into an empty node, and compared.

A run reads masters or copies, every version or the newest ones. What a run has is one more read of
each key in its history, so what judges the histories judges backups:

- the read returned when the run had ended, so nothing is in it that was written later, and nothing
  that was refused;
- of masters, the read was called when the run began: what was answered before is in it;
- of a cut, it was also called when the last write was called that is in it, of any key: what was
  answered before another write began is in each cut that has that write;
- copies may be behind masters. Such a run has at least what the runs before it had.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from clients.address import parse_address
from clients.backup.archives.archive import create_archive, open_archive
from clients.backup.archives.point import Point
from clients.backup.restore import Restore
from clients.backup.run import Backup, BackupOptions
from clients.backup.selection import Selection
from clients.errors import TRANSIENT
from clients.kv.client import KvClient
from clients.testing import DcpServer
from tests.soak.cluster.beside import Beside
from tests.soak.cluster.contents import SHOWN, streamed
from tests.soak.cluster.history import Kind, Operation, Value
from tests.soak.cluster.load import COUNTER_KEYS, Load
from tests.soak.cluster.nodes import FaultyCluster

FIRST_S: Final = (1.0, 8.0)
"""When the first run begins: in each seed there is one while faults happen."""
EVERY_S: Final = 60.0
AGAIN_S: Final = 1.0
"""Pause after a run that failed."""
GIVE_UP_S: Final = 600.0
"""Longest time without a complete run."""
COPIES_SHARE: Final = 0.5
NEWEST_SHARE: Final = 0.3
OTHER_PARTITIONS: Final = 128
"""Of some of the nodes that are restored into: there documents go by their keys."""


class BackupError(Exception):
    """A run cannot be restored as of its end."""


class Run(NamedTuple):
    """A run that is complete."""

    number: int
    called_ns: int
    """What was answered before this moment is in it."""
    returned_ns: int
    from_replicas: bool
    is_cut: bool
    kind: str = ""
    """What it stored, and how it went, for messages."""

    def words(self) -> str:
        """Return what it is."""
        source = "copies" if self.from_replicas else "masters"
        return f"backup {self.number} of {source}{', a cut' if self.is_cut else ''}{self.kind}"


class Backups(Beside):
    """See the module."""

    def __init__(self, cluster: FaultyCluster, draw: random.Random) -> None:
        super().__init__()
        self.runs: list[Run] = []
        self._failed = 0
        """Runs that have failed since the last one that did not."""
        self._failed_since_s = 0.0
        self._cluster = cluster
        self._archive = str(cluster.folder / "archive")
        self._draw = draw

    async def _go_on(self) -> None:
        await self._rest(self._draw.uniform(*FIRST_S))
        while not (self.runs and self._is_over.is_set()):
            next_s = time.monotonic() + EVERY_S
            is_done = await self._try()
            await self._rest(next_s - time.monotonic() if is_done else AGAIN_S)

    async def _try(self) -> bool:
        """Run once; return whether it was complete. An error that does not go away is raised."""
        is_of_copies = self._draw.random() < COPIES_SHARE
        options = BackupOptions(
            history=self._draw.random() >= NEWEST_SHARE, from_replicas=is_of_copies
        )
        archive = await asyncio.to_thread(create_archive, self._archive, time.time_ns())
        called_ns = time.monotonic_ns()
        try:
            report = await Backup(archive, parse_address(self._cluster.everywhere()), options).run()
        except TRANSIENT:
            self._failed_since_s = self._failed_since_s or time.monotonic()
            if time.monotonic() - self._failed_since_s > GIVE_UP_S:
                raise
            self._failed += 1
            return False
        self._failed_since_s = 0.0
        if is_of_copies:
            called_ns = max((run.called_ns for run in self.runs), default=0)
        record = report.record
        is_cut = not (is_of_copies or report.why_no_cut or record.rollbacks)
        kind = f", {'every version' if record.is_history else 'newest only'}"
        kind += f", after {self._failed} failures" if self._failed else ""
        self._failed = 0
        self.runs.append(
            Run(record.run, called_ns, time.monotonic_ns(), is_of_copies, is_cut, kind)
        )
        return True

    # -- afterwards --------------------------------------------------------------------------------

    async def wrong(self, load: Load, kv: KvClient) -> list[str]:
        """Restore each run and read it; add that to the histories. Return what is wrong with keys
        that were written once.
        """
        wrong: list[str] = []
        for run in self.runs:
            held = await self.restored(run)
            called_ns = max(run.called_ns, newest_call(held, load)) if run.is_cut else run.called_ns
            read = run._replace(called_ns=called_ns)
            for key, history in load.histories.items():
                history.append(read_of(key, held.get(key), read))
            wrong += [f"{run.words()}: {text}" for text in against_loaded(held, load, read)]
        return wrong

    async def restored(self, run: Run) -> dict[bytes, bytes]:
        """Restore a run into an empty node; return its documents."""
        partitions = self._draw.choice((self._cluster.partitions, OTHER_PARTITIONS))
        folder = self._cluster.folder / f"restored-{run.number}"
        with DcpServer(folder, "--partitions", str(partitions)) as node:
            address = parse_address(node.address)
            archive = open_archive(self._archive)
            report = await Restore(archive, Point(run=run.number), Selection()).run(address)
            if not report.is_whole or report.plan.earlier or report.plan.damages:
                raise BackupError(f"{run.words()} was not restored whole: {report}")
            return await streamed(address)


def newest_call(held: Mapping[bytes, bytes], load: Load) -> int:
    """Return when the newest of these versions was called, as far as that is known."""
    calls = [load.loading[key][0] for key in held if key in load.loading]
    for key, history in load.histories.items():
        found = value_of(key, held.get(key))
        calls += [
            each.called_ns
            for each in history
            if found is not None and found == (each.found if each.kind is Kind.ADD else each.value)
        ]
    return max(calls, default=0)


def read_of(key: bytes, value: bytes | None, run: Run) -> Operation:
    """Return a run as a read of a key."""
    found = value_of(key, value)
    return Operation(Kind.READ, run.called_ns, run.returned_ns, found=found, by=run.words())


def value_of(key: bytes, value: bytes | None) -> Value:
    """Return a document as histories have it."""
    return int(value) if value is not None and key in COUNTER_KEYS else value


def against_loaded(held: Mapping[bytes, bytes], load: Load, run: Run) -> Iterator[str]:
    """Compare a run with the keys that were written once."""
    lost = [key for key, (_, returned_ns) in load.loading.items()
            if key in load.loaded and returned_ns < run.called_ns and key not in held]  # fmt: skip
    if lost:
        yield f"{len(lost)} writes that were answered before are not in it: {lost[:SHOWN]}"
    for key in held.keys() - load.histories.keys():
        written = load.loaded.get(key, load.maybe.get(key))
        if held[key] != written:
            yield f"{key!r} is {held[key]!r}, and {written!r} was written"
        elif load.loading[key][0] > run.returned_ns:
            yield f"{key!r} is in it, and was written later"

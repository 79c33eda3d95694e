"""The parts of a node that are on disk: the folder, the log, the store, and the engine over them.

The node opens and closes it. Each part is opened after those that it needs, and they are closed in
reverse order, also when opening fails half-way.

Invariants
- the clean mark is on disk only while nothing is open;
- if a part cannot be opened, nothing stays open, and the folder is unlocked;
- nothing is written into log or store before `begin` has returned.

What a start gives up of a damaged log (`--accept-log-loss`) is saved and recorded first:

    data/
      lost-log-1/         one folder for each time, numbered
        0000000007.log    copies of the segments before they were cut or removed
        end.mark          a copy of the log's end mark
        receipt.json      what was given up: damage, partitions, seqnos
"""

from __future__ import annotations

import contextlib
import secrets
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dcp.server.files.kept_twice import MENDED, mend_folder
from dcp.server.observe.event_log import EventLog
from dcp.server.storage.folder import FolderError, open_folder
from dcp.server.storage.memory_share import item_cache_size
from dcp.server.storage.process.log_mending import put_flips_back
from dcp.server.storage.process.scrub_work import ScrubWork
from vbucket.check.finding import Kind
from vbucket.check.scrub import Damage
from vbucket.engine.recovery.startup import OtherNumberError, recover_node
from vbucket.log.device import LogFullError, UnknownFormatError
from vbucket.log.device_files import FileLogDevice, sync_folder
from vbucket.log.record import LogDamagedError
from vbucket.store.environment import StoreDamagedError, StoreFailedError, StoreFullError
from vbucket.store.lmdb.environment_lmdb import LmdbEnv
from vbucket.store.records import RECORD_TABLES, TABLES, CleanEnd, NodeRecord
from vbucket.store.store import Store

if TYPE_CHECKING:
    from dcp.server.config.settings import Settings
import json
import os
import re
import shutil

from dcp.server.storage.folder import log_path
from vbucket.engine.recovery.startup import LogLoss
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


def stored_node(path: Path, settings: Settings) -> NodeRecord:
    """Return what the store of a folder says of its node. Raises FolderError, StoreDamagedError,
    StoreFailedError.
    """
    with contextlib.ExitStack() as opened:
        folder = open_folder(path)
        opened.callback(folder.close)
        env = LmdbEnv(folder.store_path, TABLES, map_size_bytes=settings.map_size_bytes)
        opened.callback(env.close)
        store = Store(env)
        opened.callback(store.close)
        node = store.node()
        assert node is not None, "recovery has read it"
        return node


NODE_ID_BYTES: Final = 16
MENDS_MAX: Final = 4
"""So often a start begins again after it has met damage that could be mended."""


class Storage:
    """See the module. The public attributes are the parts, and what recovery found."""

    def __init__(
        self,
        path: Path,
        settings: Settings,
        *,
        accepts_log_loss: bool = False,
        begins_versions: bool = True,
    ) -> None:
        """Open and recover; then everything that the engine knows is on disk. Call `begin` next.

        `accepts_log_loss`: if the log is damaged, copies of its segments are kept, everything after
        the damage is given up, and `loss` says what that was. `begins_versions`: as for
        `recover_node`. Raises FolderError, and what vbucket.engine.recovery.startup.recover_node
        raises.
        """
        self._begins_versions = begins_versions
        self.cache_size = item_cache_size(settings.item_cache_bytes)
        self.mended: list[Damage] = []
        """What was damaged before the start, and put right."""
        with contextlib.ExitStack() as opened:
            self.folder = open_folder(path)
            opened.callback(self.folder.close)
            self._recover(opened, settings, accepts_log_loss=accepts_log_loss)
            if self.loss is not None:
                write_receipt(self.folder.path, self.loss)
            self.mended += [
                Damage(str(Kind.FILE), name, f"file {name}", "it was damaged", mended=MENDED)
                for name in self.folder.mended
            ] + mend_folder(self.folder.path, is_start=True)
            self.has_begun = False
            self.engine.cas_drift_ns = int(settings.cas_drift_max_s * 1e9)
            self._opened = opened.pop_all()

    def _recover(
        self, opened: contextlib.ExitStack, settings: Settings, *, accepts_log_loss: bool
    ) -> None:
        """Open log and store, and recover. What the store itself can prove is mended before."""
        with contextlib.closing(ScrubWork(self.folder.path)) as work:
            self.mended += work.before_start()
            for attempt in range(MENDS_MAX + 1):
                try:
                    with contextlib.ExitStack() as parts:
                        accepts = accepts_log_loss and attempt > 0  # nothing that can be mended
                        self._open(parts, settings, accepts_log_loss=accepts)
                        opened.push(parts.pop_all())
                except (LogDamagedError, StoreDamagedError, UnknownFormatError) as error:
                    mended = self._met(error, work, is_first=not attempt)
                    goes_on = mended or (accepts_log_loss and not attempt)
                    if not goes_on or attempt == MENDS_MAX:
                        raise
                    self.mended += mended
                else:
                    return

    def _met(self, error: Exception, work: ScrubWork, *, is_first: bool) -> list[Damage]:
        """Mend what a start has met, as far as checksums prove it; return what was. A damaged
        header of a segment may look like one of an unknown format.
        """
        if isinstance(error, StoreDamagedError):
            return work.met_at_start(error.vb_id if is_first else None)
        return put_flips_back(self.folder.log_path)

    def _open(
        self, opened: contextlib.ExitStack, settings: Settings, *, accepts_log_loss: bool
    ) -> None:
        draws = secrets.SystemRandom()
        self.device = FileLogDevice(self.folder.log_path, draws)
        opened.callback(self.device.close)
        self.env = env = LmdbEnv(
            self.folder.store_path, TABLES, map_size_bytes=settings.map_size_bytes
        )
        opened.callback(env.close)
        for name in (self.folder.store_path, self.folder.path):
            sync_folder(name)  # LMDB syncs its file, but not the folders above it
        keep = partial(keep_copies, self.folder.path) if accepts_log_loss else None
        try:
            self._startup = startup = recover_node(
                env,
                self.device,
                durability=settings.durability,
                num_vbuckets=settings.partitions,
                draws=draws,
                draw_node_id=lambda: secrets.token_hex(NODE_ID_BYTES),
                memtable_bytes_max=settings.memtable_bytes,
                item_cache_bytes=self.cache_size.bytes_max,
                keep_copies=keep,
                begins_versions=self._begins_versions,
            )
        except OtherNumberError as error:
            raise FolderError(
                f"{self.folder.path}: this data folder has {error.num_vbuckets} partitions, not "
                f"{settings.partitions}. A folder keeps the number that it was made with, "
                "because the place of each key depends on it. Leave --partitions out, or start "
                f"an empty --data folder with --partitions {settings.partitions} and restore a "
                "backup into it"
            ) from error
        self.store, self.engine = startup.store, startup.engine
        self.writer = startup.writer
        self.torn, self.loss = startup.torn, startup.loss
        self.rewritten_bytes = startup.rewritten_bytes
        self.new_versions = startup.new_versions
        opened.callback(self.store.close)

    def tell(self, log: EventLog) -> None:
        """Log what recovery found, and the memory of the item cache."""
        log.debug("item cache", bytes=self.cache_size.bytes_max, why=self.cache_size.reason)
        if self.torn is not None:
            log.warning("torn tail cut from the log", **self.torn._asdict())
        if self.rewritten_bytes:
            log.info("end of the log written again", bytes=self.rewritten_bytes)
        if self.loss is not None:
            log.error("log damaged, the rest given up as accepted", reason=self.loss.why)
            log.error("lost seqnos", lost=lost_words(self.loss))
        if self.new_versions:
            why = "a loss of log" if self.loss is not None else "an unclean stop"
            log.warning(f"new versions after {why}", vbuckets=len(self.new_versions))
        for vb_id, reason in self.engine.keyspace.quarantined.items():
            log.error("quarantined", vb_id=vb_id, reason=reason)

    def begin(self) -> str:
        """Make the first writes. Return why there is no room for them, "" once they are made.

        Raises what Startup.begin raises, except for full disks.
        """
        try:
            self._startup.begin()
        except (LogFullError, StoreFullError) as error:
            return str(error)
        self.env.copy_rows(RECORD_TABLES)  # for a store process that finds them damaged
        self.has_begun = True
        return ""

    @property
    def node(self) -> NodeRecord:
        """The store's record of the node. Raises StoreDamagedError."""
        node = self.store.node()
        assert node is not None, "a store that was started has a node"
        return node

    @cached_property
    def node_id(self) -> str:
        """The node's id. It is read at the start: its page may be damaged later."""
        return self.node.node_id

    def close(self, *, is_clean: bool) -> str:
        """Close everything; write the clean mark if the node stopped in order.

        The store process must have ended. Returns why a clean mark could not be written, else "".
        Raises StoreDamagedError.
        """
        with self._opened:
            if not (is_clean and self.has_begun):
                return ""
            with contextlib.suppress(StoreFailedError):
                self.env.mend()
            self.store.refresh()
            parts = self.engine.partitions
            clean_end = CleanEnd(
                self.writer.end, {part.vb_id: (part.high_seqno, part.vb_uuid) for part in parts}
            )
            try:
                self.store.end(clean_end)
                self.env.copy_rows(RECORD_TABLES)
            except (StoreFullError, StoreFailedError) as error:
                return str(error)
            return ""

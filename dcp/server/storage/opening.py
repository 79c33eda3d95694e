"""What a node has on disk while it runs: the folder, the log, the store, and the engine over them.

Who calls it: the node. It is opened in the order in which one part needs another, and closed in
reverse, wherever it fails.

Invariants
- the clean mark is on disk only while nothing is open;
- what cannot be opened leaves nothing open, and the folder unlocked;
- nothing is written into log or store before `begin` has returned.
"""

from __future__ import annotations

import contextlib
import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dcp.server.observe.event_log import EventLog
from dcp.server.storage.folder import open_folder
from dcp.server.storage.log_loss import keep_copies, lost_words, write_receipt
from vbucket.engine.startup import recover_node
from vbucket.log.device import LogFullError
from vbucket.log.device_files import FileLogDevice, sync_folder
from vbucket.model.ids import NUM_VBUCKETS, vb_uuid_from_random
from vbucket.store.environment import StoreFailedError, StoreFullError
from vbucket.store.environment_lmdb import LmdbEnv
from vbucket.store.records import TABLES, CleanEnd, NodeRecord

if TYPE_CHECKING:
    from dcp.server.config.settings import Settings

NODE_ID_BYTES: Final = 16
READ_ONLY_TEXT: Final = (
    "writes are refused until there is room on the server's disk: it started read-only"
)


class Storage:
    """See the module. The public attributes are the parts, and what recovery found."""

    def __init__(self, path: Path, settings: Settings, *, accepts_log_loss: bool = False) -> None:
        """Open and recover; all that the engine knows then is on disk. Then `begin`.

        `accepts_log_loss`: where the log is damaged, copies of its segments are kept, what follows
        the damage is given up, and `loss` tells what that was. Raises FolderError, and what
        vbucket.engine.startup.recover_node raises.
        """
        with contextlib.ExitStack() as opened:
            self.folder = open_folder(path)
            opened.callback(self.folder.close)
            self.device = FileLogDevice(self.folder.log_path, lambda: secrets.randbits(64))
            opened.callback(self.device.close)
            env = LmdbEnv(self.folder.store_path, TABLES, map_size_bytes=settings.map_size_bytes)
            opened.callback(env.close)
            for name in (self.folder.store_path, self.folder.path):
                sync_folder(name)  # LMDB syncs its file, nobody the names above it
            keep = partial(keep_copies, self.folder.path) if accepts_log_loss else None
            self._startup = startup = recover_node(
                env,
                self.device,
                durability=settings.durability,
                num_vbuckets=NUM_VBUCKETS,
                draw_uuid=lambda: vb_uuid_from_random(secrets.randbits(64)),
                draw_node_id=lambda: secrets.token_hex(NODE_ID_BYTES),
                memtable_bytes_max=settings.memtable_bytes,
                item_cache_bytes=settings.item_cache_bytes,
                keep_copies=keep,
            )
            self.store, self.engine = startup.store, startup.engine
            self.writer = startup.writer
            self.torn, self.loss = startup.torn, startup.loss
            self.new_versions = startup.new_versions
            opened.callback(self.store.close)
            if self.loss is not None:
                write_receipt(self.folder.path, self.loss)
            self.has_begun = False
            self.engine.cas_drift_ns = int(settings.cas_drift_max_s * 1e9)
            self._opened = opened.pop_all()

    def tell(self, log: EventLog) -> None:
        """Log what recovery found."""
        if self.torn is not None:
            log.warning("torn tail cut from the log", **self.torn._asdict())
        if self.loss is not None:
            log.error("log damaged, the rest given up as accepted", reason=self.loss.why)
            log.error("lost seqnos", lost=lost_words(self.loss))
        if self.new_versions:
            why = "a loss of log" if self.loss is not None else "an unclean stop"
            log.warning(f"new versions after {why}", vbuckets=len(self.new_versions))
        for vb_id, reason in self.engine.quarantined.items():
            log.error("quarantined", vb_id=vb_id, reason=reason)

    def begin(self) -> str:
        """Make the first writes. Return why there is no room for them, "" once they are made.

        Raises what Startup.begin raises, but for full disks.
        """
        try:
            self._startup.begin()
        except (LogFullError, StoreFullError) as error:
            return str(error)
        self.has_begun = True
        return ""

    @property
    def node(self) -> NodeRecord:
        """What the store says of the node."""
        node = self.store.node()
        assert node is not None, "a store that was started has a node"
        return node

    def close(self, *, is_clean: bool) -> str:
        """Close all of it, with the clean mark where the node stopped in order.

        The store process has ended. Returns why there is no mark where there should be one, else
        "". Raises StoreDamagedError.
        """
        with self._opened:
            if not (is_clean and self.has_begun):
                return ""
            self.store.refresh()
            parts = self.engine.partitions
            clean_end = CleanEnd(
                self.writer.end, {part.vb_id: (part.high_seqno, part.vb_uuid) for part in parts}
            )
            try:
                self.store.end(self.node._replace(clean_shutdown=True), clean_end)
            except (StoreFullError, StoreFailedError) as error:
                return str(error)
            return ""

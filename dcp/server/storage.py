"""What a node has on disk while it runs: the folder, the log, the store, and the engine over them.

Who calls it: the node. It is opened in the order in which one part needs another, and closed in
reverse, wherever it fails.

Invariants
- the clean mark is on disk only while nothing is open;
- what cannot be opened leaves nothing open, and the folder unlocked.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dcp.server.folder import open_folder
from vbucket.device_files import FileLogDevice, sync_folder
from vbucket.ids import vb_uuid_from_random
from vbucket.kvenv import StoreFailedError, StoreFullError
from vbucket.kvenv_lmdb import LmdbEnv
from vbucket.recovery import start
from vbucket.store import TABLES, NodeRecord

if TYPE_CHECKING:
    from dcp.server.config import Settings

NODE_ID_BYTES: Final = 16


class Storage:
    """See the module. The public attributes are the parts, and what recovery found."""

    def __init__(self, path: Path, settings: Settings) -> None:
        """Open and recover; all that the engine knows then is on disk.

        Raises FolderError, and what vbucket.recovery.start raises.
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
            self.store, self.engine, self.torn, self.new_versions = start(
                env,
                self.device,
                durability=settings.durability,
                draw_uuid=lambda: vb_uuid_from_random(secrets.randbits(64)),
                draw_node_id=lambda: secrets.token_hex(NODE_ID_BYTES),
                memtable_bytes_max=settings.memtable_bytes,
                item_cache_bytes=settings.item_cache_bytes,
            )
            opened.callback(self.store.close)
            self.engine.cas_drift_ns = int(settings.cas_drift_max_s * 1e9)
            self._opened = opened.pop_all()

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
            if not is_clean:
                return ""
            self.store.refresh()
            try:
                self.store.set_node(self.node._replace(clean_shutdown=True))
            except (StoreFullError, StoreFailedError) as error:
                return str(error)
            return ""

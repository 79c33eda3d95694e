"""Data folders to damage, and everything known about them.

A folder holds many versions, deletions, documents with an expiry, two users, and sometimes a
collection. Some of its changes are merged into the store, the others are only in the log. Its
server was stopped cleanly or killed. It is made once for several cases; each case damages a copy.
"""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from typing import Any, Final

from support.raw_client import RawClient
from tests.soak.attack.case import AttackedServer
from tests.soak.attack.commands import dcpctl
from tests.soak.attack.truth import History, Place, keys_in, places, value_of, with_tokens
from vbucket.model.ids import NUM_VBUCKETS

PARTITIONS: Final = 12
KEYS: Final = 220
FAR_EXPIRY_S: Final = 30 * 86400 * 24
PASSWORDS: Final = {"ada": "correct-horse", "bob": "battery-staple"}
"""Ada may do everything; Bob may only read and write keys that begin with `key-`."""
ROLES: Final[dict[str, dict[str, Any]]] = {
    "ada": {role: [{}] for role in ("read", "write", "stream", "admin")},
    "bob": {"read": [{"prefix": "key-"}], "write": [{"prefix": "key-"}]},
}
ARGUMENTS: Final = ("--memtable-bytes", "1MiB", "--compact-interval", "0")


class MadeFolder:
    """A stopped data folder, and its contents."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.path = folder / "data"
        self.is_stopped = draw.random() < 0.5
        self.history = History(sorted(draw.sample(range(NUM_VBUCKETS), PARTITIONS)))
        self.early: dict[int, Place] = {}
        """The position of a consumer that has seen the first part of the changes."""
        self.late: dict[int, Place] = {}
        """The position of a consumer that has seen all changes."""
        self.older: list[bytes] = []
        """The store's file as it was after each merge but the last."""
        self._changes: dict[bytes, int] = {}
        server = AttackedServer(self.path, *ARGUMENTS)
        server.start()
        try:
            self._fill(server, draw)
            self.high_seqnos = {vb_id: place.seqno for vb_id, place in self.late.items()}
            if self.is_stopped:
                server.stop()
        finally:
            server.close()

    def close(self) -> None:
        """See tests.soak.attack.case.Closing."""

    @property
    def words(self) -> str:
        return "stopped folder" if self.is_stopped else "killed folder"

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.path, to))

    def _fill(self, server: AttackedServer, draw: random.Random) -> None:
        for name, password in PASSWORDS.items():
            body = {"name": name, "password": password, "roles": ROLES[name]}
            server.ask("POST", "/api/v1/users", body)
        if draw.random() < 0.5:
            dcpctl("--server", server.address, "collection", "create", "shop.orders").check()
        keys = keys_in(self.history.changes, KEYS)
        with RawClient(server.port) as plain:
            client = with_tokens(plain)
            parts = draw.randint(2, 4)
            for part in range(parts):
                self.history.write(client, self._part(keys, draw))
                if part < parts - 1:
                    server.compact()  # everything up to here is in the store
                    self.older.append((self.path / "store" / "data.mdb").read_bytes())
                if part == 0:
                    self.early = places(client, self.history.changes)
            self.late = places(client, self.history.changes)

    def _part(
        self, keys: list[bytes], draw: random.Random
    ) -> list[tuple[bytes, bytes | None, int]]:
        changes: list[tuple[bytes, bytes | None, int]] = []
        for key in draw.choices(keys, k=draw.randint(100, 600)):
            if draw.random() < 0.12:
                changes.append((key, None, 0))
                continue
            self._changes[key] = number = self._changes.get(key, 0) + 1
            expiry = int(time.time()) + FAR_EXPIRY_S if draw.random() < 0.2 else 0
            changes.append((key, value_of(key, number), expiry))
        return changes

"""Who may write to an archive: one at a time.

Local archives are locked by the system, which lets go of a process that dies; elsewhere a lease is
renewed while the holder lives (LEASE_S).

Invariant: `with` ends with the lock held, or with ArchiveLockedError.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Final

from clients.backup.errors import ArchiveLockedError
from clients.backup.place import Place, io_error

LOCK_FILE: Final = "lock"
LEASE_S: Final = 300
"""A lease that was not renewed for so long belongs to nobody: its holder was killed."""
RENEW_S: Final = 60.0
"""How often a lock is renewed; a fifth of its lease."""


class ArchiveLock:
    """The right to write to an archive; a context manager. Raises ArchiveLockedError."""

    def __init__(self, place: Place, purpose: str) -> None:
        self._place = place
        self._file: int | None = None
        self._document = {
            "purpose": purpose, "host": socket.gethostname(), "pid": os.getpid(),
            "token": secrets.token_hex(8),
        }  # fmt: skip

    def __enter__(self) -> ArchiveLock:
        """Lock."""
        if self._place.is_local:
            self._lock_local()
        else:
            self._take_lease()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Unlock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        elif self._holder().get("token") == self._document["token"]:
            self._place.delete(LOCK_FILE)

    def renew(self) -> None:
        """Say that the holder lives. Raises ArchiveLockedError where somebody took the lease."""
        if self._file is None:
            holder = self._holder()
            if holder.get("token") != self._document["token"]:
                raise self._refusal(holder)
            self._place.write(LOCK_FILE, self._bytes())

    def _lock_local(self) -> None:
        import fcntl

        path = self._place.local_path(LOCK_FILE)
        file = -1
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if file >= 0:
                os.close(file)
            if isinstance(error, BlockingIOError):
                raise self._refusal(self._holder()) from None
            raise io_error(self._place.url, "it cannot be locked", error) from error
        self._file = file
        with suppress(OSError):  # on a full disk it holds too, and does not say whose it is
            os.truncate(file, 0)
            os.pwrite(file, self._bytes(), 0)

    def _take_lease(self) -> None:
        if not self._place.create(LOCK_FILE, self._bytes()):
            holder = self._holder()
            age_s = time.time() - float(holder.get("renewed_s", 0))
            if age_s < LEASE_S:
                raise self._refusal(holder)
            self._place.write(LOCK_FILE, self._bytes())
        holder = self._holder()
        if holder.get("token") != self._document["token"]:
            raise self._refusal(holder)

    def _bytes(self) -> bytes:
        return json.dumps({**self._document, "renewed_s": time.time()}).encode()

    def _holder(self) -> dict[str, Any]:
        try:
            holder = json.loads(self._place.read(LOCK_FILE))
        except (FileNotFoundError, ValueError):
            return {}
        return holder if isinstance(holder, dict) else {}

    def _refusal(self, holder: dict[str, Any]) -> ArchiveLockedError:
        who = f"{holder.get('purpose', 'a command')} of process {holder.get('pid', '?')}"
        hint = "Wait until it has ended."
        if not self._place.is_local:
            hint += f" Was it killed? The lock is free {LEASE_S} s after its last sign of life."
        return ArchiveLockedError(
            f"the archive is in use by {who} on {holder.get('host', '?')}",
            node=self._place.url, hint=hint,
        )  # fmt: skip

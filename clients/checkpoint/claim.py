"""One consumer or mirror at a time uses a file: a lock of the operating system on a file beside it.

The lock ends with the process that holds it, however that ends; the file stays, and means nothing.
A file system without locks is used without one.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

from clients.errors import CheckpointError

_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_PID_BYTES_MAX: Final = 20


class Claim:
    """A lock file. It is locked from `take` to `release`."""

    def __init__(self, path: Path, what: str, user: str = "consumer") -> None:
        """`what` is locked for one `user`, for error texts."""
        self._path = path
        self._what = what
        self._user = user
        self._fd = -1

    @property
    def is_held(self) -> bool:
        """Whether it was taken here."""
        return self._fd >= 0

    def take(self) -> None:
        """Lock it. Raises CheckpointError if it is locked, here or in another process."""
        if self.is_held:
            raise self._taken(str(os.getpid()))
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, _PID_BYTES_MAX, 0).decode(errors="replace").strip()
            os.close(fd)
            if error.errno in {errno.EWOULDBLOCK, errno.EAGAIN}:
                raise self._taken(holder) from None
            if error.errno not in _NO_LOCKS:
                text = f"{self._path}: cannot be locked: {error.strerror}"
                raise CheckpointError(text) from error
            return
        self._fd = fd
        os.pwrite(fd, f"{os.getpid():<{_PID_BYTES_MAX - 1}}\n".encode(), 0)

    def release(self) -> None:
        """Unlock it. May be repeated."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _taken(self, holder: str) -> CheckpointError:
        by = f"process {holder}" if holder.isdigit() else "another process"
        here = " (this one)" if holder == str(os.getpid()) else ""
        return CheckpointError(
            f"{self._what}: another {self._user} uses it, in {by}{here}",
            hint=f"Close that {self._user} first, or give each its own file or name. Two would"
            " overwrite each other's positions.",
        )

"""Who may write to an archive: one at a time.

Local archives are locked by the system (flock), which lets go of a process that dies.

Other stores have no locks, and through fsspec no "create if it is not there" that all of them keep.
There the lock is a lease made of flags. A flag is a file below locks/ that one writer alone writes:
who it is, when it last renewed the flag, and whether it claims the lease or holds it.

    write a claim -> list all flags -> none is alive: write "held"
                                    -> one is held: delete the claim, ArchiveLockedError
                                    -> others claim too: the one with the lowest name waits for the
                                       others, they delete theirs, ArchiveLockedError

A flag that was not renewed for LEASE_S is dead. Who finds dead ones waits for SETTLE_S, looks
again before and after it writes "held", and deletes them.

Invariants
- `with` ends with the lock held, or with ArchiveLockedError and no flag left;
- a flag is written before the others are listed. So of two writers at least one sees the other, on
  any store whose listing shows what was written before;
- a holder looks before each manifest that it writes (`renew`): where its flag is gone, or another
  one is held, it raises ArchiveLockedError. It ignores claims, which give way to it;
- a holder that did not renew for LEASE_S, by any of its clocks, raises it too: somebody may have
  had the lease and be gone again.

What remains: the clocks of writers have to agree within LEASE_S - RENEW_S, and a write that a
holder began in time may arrive after somebody took the lease.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any, Final, NamedTuple

from clients.backup.errors import ArchiveError, ArchiveLockedError
from clients.backup.place import Place, io_error

LOCK_FILE: Final = "lock"
"""Of local archives. Elsewhere older programs wrote their lease there: it counts as a held flag."""
FLAGS_FOLDER: Final = "locks"
LEASE_S: Final = 300
"""A flag that was not renewed for so long belongs to nobody: its writer was killed."""
RENEW_S: Final = 60.0
"""How often a lease is renewed; a fifth of its time."""
SETTLE_S: Final = 2.0
"""How long a dead flag is looked at before its lease is taken: some stores show a file while it is
written, and some listings are late."""
CLAIM_WAIT_S: Final = 10.0
"""How long the first of several claimants waits for the others to give way: one request each."""
_PAUSE_S: Final = 0.2
_OPEN_TRIES: Final = 10
"""How often a lock file is opened again that somebody deleted meanwhile."""


class _Flag(NamedTuple):
    """A writer's flag, as another one sees it."""

    name: str
    document: dict[str, Any]
    is_held: bool
    is_alive: bool


class ArchiveLock:
    """The right to write to an archive; a context manager. Raises ArchiveLockedError.

    Any thread may renew it.
    """

    def __init__(self, place: Place, purpose: str) -> None:
        self._place = place
        self._file: int | None = None
        self._mutex = threading.Lock()
        # Names rise with time: the first of several claimants mostly is the one that gets it.
        self._name = f"{FLAGS_FOLDER}/{time.time_ns():020}-{secrets.token_hex(8)}"
        self._renewed = (0.0, 0.0)
        """When the last renewal began: steady clock, and wall clock, which counts sleep too."""
        self._document = {"purpose": purpose, "host": socket.gethostname(), "pid": os.getpid()}

    def __enter__(self) -> ArchiveLock:
        """Lock."""
        if self._place.is_local:
            self._lock_local()
        else:
            self._claim()
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
        else:
            with suppress(ArchiveError) if error is not None else nullcontext():
                self._place.delete(self._name)

    def renew(self) -> None:
        """Make sure that the lock is still held. Raises ArchiveLockedError where it is not."""
        with self._mutex:
            if self._file is not None:
                if not self._is_file_there():
                    raise self._lost()
            else:
                self._renew_lease()

    def keep(self) -> None:
        """Renew if the last time is RENEW_S ago; to be called at least so often."""
        if self._file is not None or self._age_s() >= RENEW_S:
            self.renew()

    # -- local archives ------------------------------------------------------------------------

    def _lock_local(self) -> None:
        for _ in range(_OPEN_TRIES):
            self._file = self._open_locked()
            if self._is_file_there():
                break
            os.close(self._file)  # somebody deleted it: the lock is on a file that no other sees
            self._file = None
        else:
            raise self._refusal(self._local_holder())
        with suppress(OSError):  # on a full disk it holds too, and does not say whose it is
            os.truncate(self._file, 0)
            os.pwrite(self._file, self._bytes(is_held=True), 0)

    def _open_locked(self) -> int:
        import fcntl

        file = -1
        try:
            file = os.open(self._place.local_path(LOCK_FILE), os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if file >= 0:
                os.close(file)
            if isinstance(error, BlockingIOError):
                raise self._refusal(self._local_holder()) from None
            raise io_error(self._place.url, "it cannot be locked", error) from error
        return file

    def _is_file_there(self) -> bool:
        """Whether the file that is locked is the one that others will lock."""
        assert self._file is not None
        try:
            found = self._place.local_path(LOCK_FILE).stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self._file))

    def _local_holder(self) -> dict[str, Any]:
        return self._flag(LOCK_FILE).document

    # -- leases --------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Get the lease, or raise ArchiveLockedError with no flag left."""
        try:
            self._write_flag(is_held=False)
            began = self._renewed
            dead = self._wait_for_others()
            if dead:
                time.sleep(SETTLE_S)
                dead = self._wait_for_others()
            self._write_flag(is_held=True)
            if dead:
                self._refuse_if_held(self._others())
            if _since_s(began) >= LEASE_S:  # others may have taken the claim for dead
                raise self._lost()
        except BaseException:
            with suppress(ArchiveError):
                self._place.delete(self._name)
            raise
        for flag in dead:
            self._place.delete(flag.name)

    def _wait_for_others(self) -> list[_Flag]:
        """Return the dead flags once no other is alive. Raises ArchiveLockedError."""
        give_up_at_s = time.monotonic() + CLAIM_WAIT_S
        while True:
            others = self._others()
            alive = [flag for flag in others if flag.is_alive]
            if not alive:
                return others
            is_first = all(not flag.is_held and flag.name > self._name for flag in alive)
            if not is_first or time.monotonic() > give_up_at_s:
                self._refuse_if_held(alive)
                raise self._refusal(alive[0].document)
            time.sleep(_PAUSE_S)

    def _renew_lease(self) -> None:
        before = self._renewed
        names = self._place.files(FLAGS_FOLDER)
        self._refuse_if_held(self._others(names))
        if self._name not in names:
            raise self._lost()
        self._write_flag(is_held=True)
        if _since_s(before) >= LEASE_S:  # somebody may have had the lease meanwhile
            raise self._lost()

    def _others(self, names: dict[str, int] | None = None) -> list[_Flag]:
        """Return the flags of others; where none are named, of programs of old too."""
        if names is None:
            names = {**self._place.files(FLAGS_FOLDER), LOCK_FILE: 0}
        flags = [self._flag(name) for name in names if name != self._name]
        return [flag for flag in flags if flag.document]

    def _flag(self, name: str) -> _Flag:
        """Return a flag; its document is empty where it is gone."""
        try:
            document = json.loads(self._place.read(name))
        except FileNotFoundError:
            return _Flag(name, {}, is_held=False, is_alive=False)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            # Half-written, or damaged: it lives for as long as if it had never been renewed.
            document = {"renewed_s": _begun_s(name)}
        age_s = time.time() - float(document.get("renewed_s", 0))
        return _Flag(name, document, document.get("state") != "claim", age_s < LEASE_S)

    def _refuse_if_held(self, flags: list[_Flag]) -> None:
        for flag in flags:
            if flag.is_held and flag.is_alive:
                raise self._refusal(flag.document)

    def _write_flag(self, *, is_held: bool) -> None:
        renewed = (time.monotonic(), time.time())
        self._place.write(self._name, self._bytes(is_held=is_held))
        self._renewed = renewed

    def _age_s(self) -> float:
        return _since_s(self._renewed)

    def _bytes(self, *, is_held: bool) -> bytes:
        state = "held" if is_held else "claim"
        return json.dumps({**self._document, "state": state, "renewed_s": time.time()}).encode()

    def _refusal(self, holder: dict[str, Any]) -> ArchiveLockedError:
        who = f"{holder.get('purpose', 'a command')} of process {holder.get('pid', '?')}"
        hint = "Wait until it has ended."
        if not self._place.is_local:
            hint += f" Was it killed? The lock is free {LEASE_S} s after its last sign of life."
        return ArchiveLockedError(
            f"the archive is in use by {who} on {holder.get('host', '?')}",
            node=self._place.url, hint=hint,
        )  # fmt: skip

    def _lost(self) -> ArchiveLockedError:
        return ArchiveLockedError(
            "the lock of the archive was lost: somebody deleted it, or it was not renewed for"
            f" {LEASE_S} s", node=self._place.url,
            hint="Run it again; what is written is kept.",
        )  # fmt: skip


def _since_s(then: tuple[float, float]) -> float:
    return max(time.monotonic() - then[0], time.time() - then[1])


def _begun_s(name: str) -> float:
    """Return when a flag's writer began, which is in its name; 0: it is not."""
    digits = name.rpartition("/")[2].partition("-")[0]
    return int(digits) / 1e9 if digits.isdigit() else 0.0

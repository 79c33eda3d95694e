"""The write lock of an archive: one writer at a time.

Local archives use flock, which the system releases when the process dies.

Remote stores have no locks, and fsspec offers no atomic "create if absent" for all of them. There
the lock is a lease made of flags. A flag is a file below locks/ that only its own writer writes. It
names the writer and the time of the last renewal, and says whether the writer claims or holds the
lease.

    write a claim -> list all flags -> none is alive: write "held"
                                    -> one is held: delete the claim, ArchiveLockedError
                                    -> only other claims: the lowest name waits for the others to
                                       go; the others delete theirs, ArchiveLockedError

A flag is dead when it was not renewed for LEASE_S. A claimant that finds dead flags waits SETTLE_S
and lists again before it writes "held", and once more after. Then it deletes them.

Invariants
- `with` ends with the lock held, or with ArchiveLockedError and no flag left;
- a writer writes its flag before it lists the others. If a listing shows all earlier writes, at
  least one of two writers sees the other;
- a holder checks before each manifest (`renew`). If its flag is gone or another flag is held, it
  raises ArchiveLockedError. It ignores claims: claimants give way to holders;
- a holder that did not renew for LEASE_S, by any of its clocks, raises it too. Another writer may
  have come and gone meanwhile.

Limits: the clocks of writers must agree within LEASE_S - RENEW_S. A write that a holder started in
time may still arrive after another writer took the lease.
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

from clients.backup.archives.archive_errors import ArchiveError, ArchiveLockedError
from clients.backup.archives.place import Place, io_error

LOCK_FILE: Final = "lock"
"""The locked file of a local archive. In remote archives older programs kept their lease in it:
there it counts as a held flag."""
FLAGS_FOLDER: Final = "locks"
LEASE_S: Final = 300
"""A flag that was not renewed for this long is dead: its writer was killed."""
RENEW_S: Final = 60.0
"""How often a lease is renewed: five times per LEASE_S."""
SETTLE_S: Final = 2.0
"""The pause before a dead lease is taken, because some stores show half-written files and some
listings lag behind."""
CLAIM_WAIT_S: Final = 10.0
"""How long the first of several claimants waits for the others to give way."""
_PAUSE_S: Final = 0.2
_OPEN_TRIES: Final = 10
"""Attempts to open a lock file that is deleted between open and flock."""


class LockTimes(NamedTuple):
    """How often a lease is renewed, and the pause before a dead one is taken."""

    renew_s: float = RENEW_S
    settle_s: float = SETTLE_S


LOCK_TIMES: Final = LockTimes()


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

    def __init__(self, place: Place, purpose: str, *, times: LockTimes = LOCK_TIMES) -> None:
        self._place = place
        self._times = times
        self._file: int | None = None
        self._mutex = threading.Lock()
        # Names sort by time, so the first claimant usually wins.
        self._name = f"{FLAGS_FOLDER}/{time.time_ns():020}-{secrets.token_hex(8)}"
        self._renewed = (0.0, 0.0)
        """When the last renewal began: by the steady clock, and by the wall clock, which includes
        the time that a machine sleeps."""
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
        """Check that the lock is held, and renew it. Raises ArchiveLockedError if it is lost."""
        with self._mutex:
            if self._file is not None:
                if not self._is_file_there():
                    raise self._lost()
            else:
                self._renew_lease()

    def keep(self) -> None:
        """Renew if the last renewal is RENEW_S old. Callers call it at least that often."""
        if self._file is not None or self._age_s() >= self._times.renew_s:
            self.renew()

    # -- local archives ------------------------------------------------------------------------

    def _lock_local(self) -> None:
        for _ in range(_OPEN_TRIES):
            self._file = self._open_locked()
            if self._is_file_there():
                break
            os.close(self._file)  # deleted meanwhile: others would lock a new file
            self._file = None
        else:
            raise self._refusal(self._local_holder())
        with suppress(OSError):  # on a full disk the lock holds, but does not name its owner
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
        """Whether the locked file still has its name, so that others lock the same one."""
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
        """Take the lease, or raise ArchiveLockedError and leave no flag."""
        try:
            self._write_flag(is_held=False)
            began = self._renewed
            dead = self._wait_for_others()
            if dead:
                time.sleep(self._times.settle_s)
                dead = self._wait_for_others()
            self._write_flag(is_held=True)
            if dead:
                self._refuse_if_held(self._others())
            if _since_s(began) >= LEASE_S:  # others may have treated the claim as dead
                raise self._lost()
        except BaseException:
            with suppress(ArchiveError):
                self._place.delete(self._name)
            raise
        for flag in dead:
            self._place.delete(flag.name)

    def _wait_for_others(self) -> list[_Flag]:
        """Wait until no other flag is alive; return the dead ones. Raises ArchiveLockedError."""
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
        if _since_s(before) >= LEASE_S:  # another writer may have had the lease meanwhile
            raise self._lost()

    def _others(self, names: dict[str, int] | None = None) -> list[_Flag]:
        """Return the flags of others. Without `names` the lease of older programs is included."""
        if names is None:
            names = {**self._place.files(FLAGS_FOLDER), LOCK_FILE: 0}
        flags = [self._flag(name) for name in names if name != self._name]
        return [flag for flag in flags if flag.document]

    def _flag(self, name: str) -> _Flag:
        """Read a flag. The document is empty if the file is gone."""
        try:
            document = json.loads(self._place.read(name))
        except FileNotFoundError:
            return _Flag(name, {}, is_held=False, is_alive=False)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            # Half-written or damaged: treat it as renewed when its writer started.
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
            hint += f" If it was killed, the lock is free {LEASE_S} s after its last renewal."
        return ArchiveLockedError(
            f"the archive is in use by {who} on {holder.get('host', '?')}",
            node=self._place.url, hint=hint,
        )  # fmt: skip

    def _lost(self) -> ArchiveLockedError:
        return ArchiveLockedError(
            "the lock of the archive was lost: it was deleted, or it was not renewed for"
            f" {LEASE_S} s", node=self._place.url,
            hint="Run the command again. Everything written so far is kept.",
        )  # fmt: skip


def _since_s(then: tuple[float, float]) -> float:
    return max(time.monotonic() - then[0], time.time() - then[1])


def _begun_s(name: str) -> float:
    """Return the start time in a flag's name, 0 if there is none."""
    digits = name.rpartition("/")[2].partition("-")[0]
    return int(digits) / 1e9 if digits.isdigit() else 0.0

"""The embedded metadata store: one process owns its file and serves the others over loopback.

Who calls it: the node that owns the store. It gives no high availability: while this process is
away there is no store, and `start` says so. Masters go on meanwhile.

Two tasks and a thread: connections answer what needs no record; one writer takes the other
requests in turn, and lets the thread write and sync each record. So a slow disk delays writes, and
neither reads nor leases.

Invariants
- one record is under way at a time
- a request is answered after its record is synced
- after a failed sync nothing is answered any more: `failed` says why, and the owner has to end
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from failover.metadata.embedded.connection import StoreConnection
from failover.metadata.embedded.core import EmbeddedCore, ReplayError, replayed
from failover.metadata.embedded.store_file import (
    STORE_ID_BYTES,
    StoreFile,
    StoreFileBrokenError,
    StoreFileError,
    StoreFileFullError,
    create_file,
    open_file,
)
from failover.metadata.keyring import Keyring
from failover.metadata.metastore import (
    LeaseRevoke,
    OutcomeUnknown,
    Put,
    RefusalKind,
    StoreRefused,
    StoreRequest,
    StoreResult,
    StoreUnavailable,
    Txn,
)
from failover.metadata.revision_store import RevisionStore
from failover.metadata.store_codec import encode_image
from vbucket.log.device_files import FolderDisk

CONNECTIONS_MAX: Final = 64
"""A cluster on one machine has a few nodes, with one connection each, and some commands."""
STRANGERS_MAX: Final = 16
"""Connections before their login. One more ends the oldest of them."""
WRITES_MAX: Final = 1024
"""Requests that wait for the disk; more are refused. One sync of 10 ms makes 100 a second."""
STORE_BYTES_MAX: Final = 32 << 20
"""Above this size of the snapshot no key is written. A cluster of 1,024 partitions needs 1 MiB."""
LOG_BYTES_MIN: Final = 4 << 20
"""The file is rewritten when it has this and twice the snapshot."""
TICK_S: Final = 0.1
FULL_RETRY_S: Final = 1.0
"""Pause before a lease's end or a snapshot is tried again after the disk was full."""
LOCK_NAME: Final = "lock"


class EmbeddedStoreError(Exception):
    """The store cannot be started; the text says why and what to try."""


class StorePortTakenError(EmbeddedStoreError):
    """Another process has the port of the store."""


class EmbeddedServer:
    """See the module. `folder` is made if it is missing; its parent has to exist."""

    def __init__(
        self,
        folder: Path,
        keyring: Keyring,
        notice: Callable[[str], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Gets the reason when the store cannot go on."""
        self._folder = folder
        self._keyring = keyring
        self._notice = notice
        self._now_ns = now_ns
        self._connections: dict[StoreConnection, None] = {}
        """Those that count, the oldest first."""
        self._serving: set[asyncio.Task[None]] = set()
        self._writes: deque[tuple[StoreRequest, Callable[[StoreResult], None]]] = deque()
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._thread = ThreadPoolExecutor(1, "metadata-store")
        self._full_until_ns = 0
        self._is_closed = False

    @property
    def store(self) -> RevisionStore:
        """The state, which is all on disk."""
        return self._core.store

    # ---- Start and stop

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Open the file and listen; return the port.

        Raises:
            StorePortTakenError: another process has the port.
            EmbeddedStoreError: the file is damaged or in use, or the address cannot be used.
        """
        if not _is_loopback(host):
            raise EmbeddedStoreError(
                "the embedded metadata store listens on a loopback address only, such as"
                f" 127.0.0.1, and {host} is none; use etcd for a cluster of several machines"
            )
        self._lock_fd = _locked(self._folder)
        try:
            await self._open()
            self._server = await asyncio.start_server(self._connected, host, port)
        except OSError as error:
            self._release()
            text = f"the embedded metadata store cannot use {host}:{port}: "
            if error.errno == errno.EADDRINUSE:
                raise StorePortTakenError(
                    text + "another process uses it. Stop that one (`ss -ltnp` shows it), then"
                    " start again: the other nodes of the cluster know this port"
                ) from error
            text += str(error.strerror)
            raise EmbeddedStoreError(text) from error
        except EmbeddedStoreError:
            self._release()
            raise
        self.store.subscribe(self._wake_connections)
        self._tasks = [asyncio.create_task(self._tick()), asyncio.create_task(self._write())]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        port = int(self._server.sockets[0].getsockname()[1])
        self._notice(
            f"metadata store: embedded, in {self._folder}, on {host}:{port}. It gives no high"
            " availability: while this process is away, nobody is elected, moved or joined"
        )
        return port

    async def close(self) -> None:
        """Disconnect everybody, finish the record under way, and close the file."""
        self._is_closed = True
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for connection in self._connections:
            connection.abort()
        await asyncio.gather(*self._tasks, *self._serving, return_exceptions=True)
        await self._server.wait_closed()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._file.close)
        self._release()

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._disk = FolderDisk(self._folder)
            self._file, store = await loop.run_in_executor(self._thread, self._load)
        except (StoreFileError, ReplayError, OSError) as error:
            raise EmbeddedStoreError(f"metadata store in {self._folder}: {error}") from error
        self._core = EmbeddedCore(store, self._now_ns(), secrets.SystemRandom())

    def _load(self) -> tuple[StoreFile, RevisionStore]:
        found = open_file(self._disk)
        if found is None:
            store = RevisionStore()
            store_id = secrets.token_bytes(STORE_ID_BYTES)
            return create_file(self._disk, store_id, encode_image(store.image())), store
        file, content = found
        try:
            return file, replayed(content.snapshot, content.records)
        except ReplayError:
            file.close()
            raise

    def _release(self) -> None:
        self._thread.shutdown()
        if hasattr(self, "_disk"):
            self._disk.release()
        os.close(self._lock_fd)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(f"metadata store: unexpected: {error!r}")

    def _fail(self, text: str) -> None:
        """Stop answering. Requests under way end unknown when their connections close."""
        if not self.failed.done():
            self.failed.set_result(text)
            self._notice(text)
        for connection in tuple(self._connections):
            connection.abort()

    # ---- Connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = StoreConnection(self.store, reader, writer)
        strangers = [one for one in self._connections if not one.is_logged_in]
        is_too_many = len(self._connections) - len(strangers) >= CONNECTIONS_MAX
        if self._is_closed or self.failed.done() or is_too_many:
            writer.close()
            return
        if len(strangers) >= STRANGERS_MAX:
            strangers[0].abort()
            del self._connections[strangers[0]]
        self._connections[connection] = None
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            async with contextlib.aclosing(
                connection.calls(self._keyring, self._file.store_id)
            ) as calls:
                async for call_id, request in calls:
                    self._call(request, partial(connection.answer, call_id))
        finally:
            self._serving.discard(task)
            self._connections.pop(connection, None)

    def _wake_connections(self) -> None:
        for connection in self._connections:
            connection.wake()

    # ---- Requests

    def _call(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        """Answer a request: now if it changes nothing, else after its record is on disk."""
        now_ns = self._now_ns()
        result = self._core.answer_now(now_ns, request)
        if result is None and len(self._writes) >= WRITES_MAX:
            result = StoreUnavailable(f"{WRITES_MAX} writes wait for the disk; try again later")
        if result is None and self._is_over_quota(request):
            result = StoreRefused(
                RefusalKind.NO_SPACE,
                f"the metadata store holds more than {STORE_BYTES_MAX} bytes; delete keys",
            )
        if result is not None:
            done(result)
            return
        self._writes.append((request, done))
        self._wake.set()

    def _is_over_quota(self, request: StoreRequest) -> bool:
        return (
            self._file.snapshot_bytes > STORE_BYTES_MAX
            and isinstance(request, Txn)
            and any(isinstance(entry, Put) for entry in (*request.then, *request.otherwise))
        )

    def tick(self) -> None:
        """Look which leases have run out."""
        self._core.tick(self._now_ns())
        if self._core.next_overdue() is not None or self._is_log_long():
            self._wake.set()

    async def _tick(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)

    async def _write(self) -> None:
        """End leases that ran out, carry out what waits, and rewrite a long file; in turn."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            is_full = self._now_ns() < self._full_until_ns
            while not is_full and (revoke := self._core.next_overdue()) is not None:
                is_full = isinstance(await self._write_one(revoke), StoreRefused)
            if not is_full and self._is_log_long():
                await self._rewrite()
            if self._writes:
                request, done = self._writes.popleft()
                self._wake.set()
                done(await self._write_one(request))

    async def _write_one(self, request: StoreRequest) -> StoreResult:
        """Write the record of a request, and then carry it out."""
        if self.failed.done():
            return OutcomeUnknown("the metadata store has failed")
        request = self._core.with_lease_id(request)
        if not self.store.will_change(request):  # what came before has changed that
            return self._core.carry_out(self._now_ns(), request)
        record = self._core.record_of(request)
        try:
            await self._in_thread(partial(self._file.append, record))
        except StoreFileFullError as error:
            self._disk_is_full(str(error))
            text = f"the metadata store in {self._folder}: {error}. Make room on that disk"
            return StoreRefused(RefusalKind.NO_SPACE, text)
        except StoreFileBrokenError as error:
            self._fail(f"metadata store in {self._folder}: {error}")
            return OutcomeUnknown(str(error))
        if self._full_until_ns and not isinstance(request, LeaseRevoke):
            self._full_until_ns = 0
            self._notice(f"metadata store in {self._folder}: there is room on the disk again")
        return self._core.carry_out(self._now_ns(), request)

    async def _rewrite(self) -> None:
        snapshot = self._core.snapshot()
        try:
            await self._in_thread(partial(self._file.rewrite, snapshot))
        except StoreFileFullError as error:
            self._disk_is_full(str(error))
        except StoreFileBrokenError as error:
            self._fail(f"metadata store in {self._folder}: {error}")

    async def _in_thread(self, work: Callable[[], None]) -> None:
        """Run in the thread. A cancelled wait does not leave the file in the middle of a write."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        await asyncio.shield(future)

    def _is_log_long(self) -> bool:
        return self._file.end >= LOG_BYTES_MIN + 2 * self._file.snapshot_bytes

    def _disk_is_full(self, text: str) -> None:
        if not self._full_until_ns:
            self._notice(
                f"metadata store in {self._folder}: {text}. Writes are refused, and leases do not"
                " end, until there is room"
            )
        self._full_until_ns = self._now_ns() + round(FULL_RETRY_S * 1e9)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _locked(folder: Path) -> int:
    """Lock the folder for this process; return the descriptor that holds the lock."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        lock_fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EmbeddedStoreError(
            f"the metadata store cannot use {folder}: {error.strerror}. Correct its rights, or"
            " make room"
        ) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.close(lock_fd)
        raise EmbeddedStoreError(
            f"the metadata store in {folder} is in use by another process; stop that one first"
        ) from error
    return lock_fd

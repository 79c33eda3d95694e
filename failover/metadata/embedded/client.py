"""A client of the embedded metadata store: see `MetaStore`.

Who calls it: every node of a cluster on one machine, also the one that owns the store. One task
keeps the connection; it connects again for as long as the client is open.

- Every request ends within `deadline_s`: as StoreUnavailable if it was not sent, else as
  OutcomeUnknown.
- A watch goes on over new connections, from the last delivered revision + 1.
- If nothing comes for SILENCE_S the connection is given up: the server sends a beat each second.
- If the store's history went back, because an older copy of the file was put back or another file
  is there, the client says so and goes on with it. `era` tells its callers that they must read
  again, and they know their records by rank.

Invariants
- `done` is called once for each request, and not from inside `submit`
- a watch gets rising revisions, and nothing after `cancel`
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Final

import msgspec

from failover.metadata.embedded.wire import (
    ANSWER_FRAME_BYTES_MAX,
    LENGTH,
    LOGIN_FRAME_BYTES_MAX,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    REQUEST_FRAME_BYTES_MAX,
    StoreAnswer,
    StoreBeat,
    StoreCall,
    StoreChallenge,
    StoreLogin,
    StoreRefusal,
    StoreWelcome,
    ToClient,
    ToServer,
    WatchBegin,
    WatchCancel,
    WatchDelivery,
    WireError,
    client_proof,
    frame_length,
    frame_of,
    is_same_proof,
    read_to_client,
    server_proof,
)
from failover.metadata.keyring import Keyring
from failover.metadata.metastore import (
    Lost,
    OutcomeUnknown,
    RefusalKind,
    StoreRefused,
    StoreRequest,
    StoreResult,
    StoreUnavailable,
    StoreWatch,
    WatchBatch,
    WatchMessage,
)
from failover.metadata.store_codec import (
    CodecError,
    decode_result,
    decode_watch_message,
    encode_request,
)

DEADLINE_S: Final = 0.8
"""Below ANSWER_NS_MAX of the cores, which would else ask again while this client still waits."""
CONNECT_S: Final = 2.0
SILENCE_S: Final = 3.0
"""Three beats."""
RETRY_S: Final = 0.1
RETRY_S_MAX: Final = 1.0
CALLS_MAX: Final = 256
"""Requests under way; a node has a few. More are refused."""
WATCHES_MAX: Final = 64
"""A node has one. The server allows as many."""
LOST_S: Final = 3.0
"""When a watch is lost that cannot begin: callers begin lost watches again at once."""
_SET_BACK: Final = "the store's history went back"


class _Pending:
    """A request under way."""

    __slots__ = ("done", "frame", "timer")

    def __init__(
        self, frame: bytes, done: Callable[[StoreResult], None], timer: asyncio.TimerHandle
    ) -> None:
        self.frame = frame
        """Empty once it was sent."""
        self.done = done
        self.timer = timer


class _NumberedWatch(StoreWatch):
    client: EmbeddedClient
    watch_id: int

    def cancel(self) -> None:
        """See StoreWatch."""
        super().cancel()
        self.client.end_watch(self.watch_id)


class EmbeddedClient:
    """See the module. Make it in a running event loop, and `close` it."""

    def __init__(
        self,
        host: str,
        port: int,
        keyring: Keyring,
        notice: Callable[[str], None],
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.trouble = "not connected yet"
        """Why the store does not answer; empty while it does."""
        self.era = 0
        """See `MetaStore`."""
        self._address = (host, port)
        self._keyring = keyring
        self._notice = notice
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._writer: asyncio.StreamWriter | None = None
        self._pending: dict[int, _Pending] = {}
        self._watches: dict[int, StoreWatch] = {}
        self._last_id = 0
        self._store_id = b""
        self._revision = 0
        """The highest one that the store told."""
        self._is_denied = False
        """Whether the last login was refused."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Disconnect. Requests under way end; watches deliver nothing more."""
        for watch in tuple(self._watches.values()):
            watch.cancel()
        self._task.cancel()
        await asyncio.wait([self._task])
        self._end_all("the client was closed")

    # ---- MetaStore

    def submit(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        """Send a request; `done` gets its result later."""
        if len(self._pending) >= CALLS_MAX:
            self._refuse(done, StoreUnavailable(f"{CALLS_MAX} requests are under way"))
            return
        call_id = self._next_id()
        try:
            frame = frame_of(StoreCall(call_id, msgspec.Raw(encode_request(request))))
        except CodecError as error:
            self._refuse(done, StoreRefused(RefusalKind.TOO_BIG, str(error)))
            return
        if len(frame) > REQUEST_FRAME_BYTES_MAX:
            text = (
                f"the request has {len(frame)} bytes; at most {REQUEST_FRAME_BYTES_MAX} are"
                " allowed. Split it"
            )
            self._refuse(done, StoreRefused(RefusalKind.TOO_BIG, text))
            return
        timer = self._loop.call_later(self._deadline_s, self._expire, call_id)
        self._pending[call_id] = _Pending(frame, done, timer)
        if self._writer is not None:
            self._send_pending(call_id, self._writer)

    def watch(
        self, prefix: bytes, from_revision: int, deliver: Callable[[WatchMessage], None]
    ) -> StoreWatch:
        """Deliver all changes of a prefix from `from_revision` on (at least 1)."""
        watch = _NumberedWatch(prefix, from_revision, deliver)
        watch.client, watch.watch_id = self, self._next_id()
        lost = self._why_no_watch()
        if lost:
            self._loop.call_later(LOST_S, watch.hand_over, Lost(lost))
            return watch
        self._watches[watch.watch_id] = watch
        self._send(WatchBegin(watch.watch_id, prefix, from_revision))
        return watch

    def _why_no_watch(self) -> str:
        return "" if len(self._watches) < WATCHES_MAX else f"{WATCHES_MAX} watches are running"

    def end_watch(self, watch_id: int) -> None:
        """A watch was cancelled."""
        if self._watches.pop(watch_id, None) is not None:
            self._send(WatchCancel(watch_id))

    # ---- Requests

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _refuse(self, done: Callable[[StoreResult], None], result: StoreResult) -> None:
        self._loop.call_soon(done, result)

    def _send(self, message: ToServer) -> None:
        if self._writer is not None:
            self._writer.write(frame_of(message))

    def _send_pending(self, call_id: int, writer: asyncio.StreamWriter) -> None:
        pending = self._pending[call_id]
        writer.write(pending.frame)
        pending.frame = b""

    def _expire(self, call_id: int) -> None:
        self._end(call_id, f"no answer within {self._deadline_s} s")

    def _end(self, call_id: int, text: str) -> None:
        """End a request without an answer."""
        pending = self._pending.pop(call_id)
        pending.timer.cancel()
        if pending.frame:
            why = f"{self._where}: {self.trouble or text}"
            pending.done(StoreUnavailable(why, self._is_denied))
        else:
            pending.done(OutcomeUnknown(f"{self._where}: {text}"))

    def _end_all(self, text: str) -> None:
        for call_id in tuple(self._pending):
            if call_id in self._pending:
                self._end(call_id, text)

    @property
    def _where(self) -> str:
        host, port = self._address
        return f"metadata store at {host}:{port}"

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._disconnected(f"unexpected: {task.exception()!r}")

    # ---- The connection

    async def _run(self) -> None:
        pause_s = RETRY_S
        while True:
            try:
                reader = await self._connect()
                pause_s = RETRY_S
                while True:
                    async with asyncio.timeout(SILENCE_S):
                        self._take(await _read_frame(reader, ANSWER_FRAME_BYTES_MAX))
            except TimeoutError:
                self._disconnected(f"nothing came for {SILENCE_S:g} s")
            except EOFError:
                self._disconnected("the connection was closed")
            except OSError as error:
                self._disconnected(f"{error.strerror or error}. Does its owner run?")
            except (WireError, CodecError) as error:
                self._disconnected(str(error))
            finally:
                self._abort()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    def _abort(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    def _disconnected(self, text: str) -> None:
        self._abort()
        if not self.trouble or self.trouble == "not connected yet":
            self._notice(f"{self._where} is away: {text}")
        self.trouble = text
        self._end_all(text)

    async def _connect(self) -> asyncio.StreamReader:
        """Connect and log in; send what waits, and resume the watches."""
        self._is_denied = False
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(*self._address)
            try:
                welcome = await self._log_in(reader, writer)
            except BaseException:
                writer.transport.abort()
                raise
        self._look_at_history(welcome)
        self.era += 1
        self._writer = writer
        if self.trouble and self._store_id:
            self._notice(f"{self._where} answers again")
        self.trouble = ""
        self._store_id = welcome.store_id
        for watch_id, watch in self._watches.items():
            self._send(WatchBegin(watch_id, watch.prefix, watch.next_revision))
        for call_id in self._pending:
            self._send_pending(call_id, writer)
        return reader

    async def _log_in(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> StoreWelcome:
        challenge = await _read_frame(reader, LOGIN_FRAME_BYTES_MAX)
        if not isinstance(challenge, StoreChallenge) or len(challenge.nonce) != NONCE_BYTES:
            raise WireError(f"this is no metadata store of dcpd: {type(challenge).__name__}")
        nonce = secrets.token_bytes(NONCE_BYTES)
        secret = self._keyring.in_use.encode()
        proof = client_proof(secret, challenge.nonce, nonce)
        writer.write(frame_of(StoreLogin(PROTOCOL_VERSION, nonce, proof)))
        welcome = await _read_frame(reader, LOGIN_FRAME_BYTES_MAX)
        if isinstance(welcome, StoreRefusal):
            self._is_denied = True
            raise WireError(welcome.text)
        wanted = server_proof(secret, challenge.nonce, nonce)
        if not isinstance(welcome, StoreWelcome) or not is_same_proof(welcome.proof, wanted):
            self._is_denied = True
            raise WireError("the other end has another secret: it is no store of this cluster")
        return welcome

    def _look_at_history(self, welcome: StoreWelcome) -> None:
        """Say so if this is not the history that this process knew, and go on with it."""
        is_another = bool(self._store_id) and welcome.store_id != self._store_id
        if not is_another and welcome.revision >= self._revision:
            return
        self._lose_watches()
        what = "it has another file" if is_another else f"it is at revision {welcome.revision}"
        self._notice(
            f"{self._where}: its history went back: {what}, and this node has seen revision"
            f" {self._revision}. Partitions whose record is older than what nodes have seen stay as"
            " they are. Put the newer file back, or build the records anew: dcpctl cluster meta"
            " restore"
        )
        self._revision = welcome.revision

    def _lose_watches(self) -> None:
        watches = tuple(self._watches.values())
        self._watches.clear()
        for watch in watches:
            self._loop.call_soon(watch.hand_over, Lost(_SET_BACK))

    # ---- What the server sends

    def _take(self, message: ToClient) -> None:
        if isinstance(message, StoreAnswer):
            self._answered(message)
        elif isinstance(message, WatchDelivery):
            self._delivered(message)
        elif isinstance(message, StoreBeat):
            self._revision = max(self._revision, message.revision)
        elif isinstance(message, StoreRefusal):
            raise WireError(message.text)
        else:
            raise WireError(f"unexpected {type(message).__name__}")

    def _answered(self, answer: StoreAnswer) -> None:
        pending = self._pending.get(answer.call_id)
        if pending is None:
            return  # it came after its deadline
        if pending.frame:
            raise WireError("an answer to a request that was not sent")
        result = decode_result(answer.result)
        del self._pending[answer.call_id]
        pending.timer.cancel()
        self._revision = max(self._revision, getattr(result, "revision", 0))
        self._loop.call_soon(pending.done, result)

    def _delivered(self, delivery: WatchDelivery) -> None:
        watch = self._watches.get(delivery.watch_id)
        if watch is None:
            return  # it was cancelled
        message = decode_watch_message(delivery.message)
        if isinstance(message, WatchBatch):
            if message.revision < watch.next_revision:
                raise WireError(f"a watch went back to revision {message.revision}")
            watch.next_revision = message.revision + 1
            self._revision = max(self._revision, message.revision)
        else:
            del self._watches[delivery.watch_id]
        self._loop.call_soon(watch.hand_over, message)


async def _read_frame(reader: asyncio.StreamReader, bytes_max: int) -> ToClient:
    head = await reader.readexactly(LENGTH.size)
    return read_to_client(await reader.readexactly(frame_length(head, bytes_max)))

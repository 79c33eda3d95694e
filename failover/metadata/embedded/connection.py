"""The server's side of one connection to the embedded store: login, calls, watches.

Who calls it: the embedded store's server, with a task for each connection.

Invariants
- before the login nothing is read but one frame of 1 KiB, and nothing is computed but two HMACs
- a watch gets each revision of its prefix once, in rising order
- a client that reads nothing is disconnected, and costs a bounded amount of memory until then
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator
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
    ToServer,
    WatchBegin,
    WatchCancel,
    WatchDelivery,
    WireError,
    client_proof,
    frame_length,
    frame_of,
    is_same_proof,
    read_to_server,
    server_proof,
)
from failover.metadata.keyring import Keyring
from failover.metadata.metastore import (
    FIRST_REVISION,
    Compacted,
    RefusalKind,
    StoreRefused,
    StoreRequest,
    StoreResult,
)
from failover.metadata.revision_store import RevisionStore
from failover.metadata.store_codec import (
    CodecError,
    decode_request,
    encode_result,
    encode_watch_message,
)

LOGIN_S: Final = 5.0
"""How long a login may take."""
BEAT_S: Final = 1.0
"""How often an idle connection gets a sign of life."""
STALL_S: Final = 10.0
"""A client that takes nothing for so long is disconnected. Its watches resume where they were."""
CALLS_MAX: Final = 256
"""Requests of one connection under way; more are not read. A node has a few at a time."""
WAITING_BYTES_MAX: Final = 8 << 20
"""Answers of one connection that wait; above that no request is read."""
WATCHES_MAX: Final = 64
"""Watches of one connection. A node has one."""
DELIVERY_BATCHES: Final = 64
DELIVERY_BYTES: Final = 1 << 20
"""About so much of a watch is sent at a time: a long history does not hold up answers."""


class StoreConnection:
    """See the module."""

    def __init__(
        self,
        store: RevisionStore,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.is_logged_in = False
        self._store = store
        self._reader = reader
        self._writer = writer
        self._outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        self._calls = 0
        self._watches: dict[int, tuple[bytes, int]] = {}
        """Watch id -> prefix, next revision to deliver."""
        self._wake = asyncio.Event()
        self._relief = asyncio.Event()

    def abort(self) -> None:
        """Close the connection now."""
        self._writer.transport.abort()

    def wake(self) -> None:
        """Look whether watches have something to deliver."""
        self._wake.set()

    async def calls(
        self, keyring: Keyring, store_id: bytes
    ) -> AsyncGenerator[tuple[int, StoreRequest], None]:
        """Serve the client until the connection ends. Yield its requests, each with its id: they
        are to be answered with `answer`, now or later.
        """
        try:
            async with asyncio.timeout(LOGIN_S):
                await self._log_in(keyring, store_id)
            sender = asyncio.create_task(self._send())
            try:
                while not sender.done():
                    if self._is_crowded():
                        self._relief.clear()
                        await self._relief.wait()
                        continue
                    message = read_to_server(await self._read_frame(REQUEST_FRAME_BYTES_MAX))
                    if isinstance(message, StoreCall):
                        yield self._call_of(message)
                    else:
                        self._take(message)
            finally:
                sender.cancel()
                await asyncio.wait([sender])
                if not sender.cancelled():
                    sender.result()
        except WireError as error:
            self._writer.write(frame_of(StoreRefusal(str(error))))
        except (OSError, EOFError, TimeoutError):
            pass  # the client has gone, or does not log in
        finally:
            self._writer.close()

    def answer(self, call_id: int, result: StoreResult) -> None:
        """Send the answer to a request."""
        frame = _answer_frame(call_id, result)
        self._outgoing.append(frame)
        self._outgoing_bytes += len(frame)
        self.wake()

    # ---- Login

    async def _log_in(self, keyring: Keyring, store_id: bytes) -> None:
        server_nonce = secrets.token_bytes(NONCE_BYTES)
        self._writer.write(frame_of(StoreChallenge(PROTOCOL_VERSION, server_nonce)))
        login = read_to_server(await self._read_frame(LOGIN_FRAME_BYTES_MAX))
        if not isinstance(login, StoreLogin) or len(login.nonce) != NONCE_BYTES:
            raise WireError("log in first")
        if login.version != PROTOCOL_VERSION:
            raise WireError(
                f"this store speaks version {PROTOCOL_VERSION} of its protocol, the client"
                f" {login.version}; use the same version of dcpd on all nodes"
            )
        for each in keyring.secrets:
            secret = each.encode()
            if is_same_proof(login.proof, client_proof(secret, server_nonce, login.nonce)):
                break
        else:
            raise WireError(
                "the client has another secret; give it the token of this cluster"
                " (`dcpctl cluster token` prints it)"
            )
        proof = server_proof(secret, server_nonce, login.nonce)
        revision = self._store.revision
        self._writer.write(frame_of(StoreWelcome(proof, store_id, revision)))
        self.is_logged_in = True

    async def _read_frame(self, bytes_max: int) -> bytes:
        head = await self._reader.readexactly(LENGTH.size)
        return await self._reader.readexactly(frame_length(head, bytes_max))

    # ---- Messages

    def _is_crowded(self) -> bool:
        return self._calls >= CALLS_MAX or self._outgoing_bytes >= WAITING_BYTES_MAX

    def _take(self, message: ToServer) -> None:
        if isinstance(message, WatchBegin):
            if len(self._watches) >= WATCHES_MAX or message.from_revision < FIRST_REVISION:
                raise WireError(f"at most {WATCHES_MAX} watches, each from revision 1 or later")
            self._watches[message.watch_id] = (message.prefix, message.from_revision)
            self.wake()
        elif isinstance(message, WatchCancel):
            self._watches.pop(message.watch_id, None)
        else:
            raise WireError("the login is over")

    def _call_of(self, call: StoreCall) -> tuple[int, StoreRequest]:
        try:
            request = decode_request(call.request)
        except CodecError as error:
            raise WireError(f"request {call.call_id}: {error}") from None
        self._calls += 1
        return call.call_id, request

    # ---- Sending

    async def _send(self) -> None:
        """Send answers, deliveries and beats; end the connection if the client takes nothing."""
        try:
            while True:
                self._wake.clear()
                data = self._next_data()
                if not data:
                    try:
                        async with asyncio.timeout(BEAT_S):
                            await self._wake.wait()
                        continue
                    except TimeoutError:
                        data = frame_of(StoreBeat(self._store.revision))
                self._writer.write(data)
                async with asyncio.timeout(STALL_S):
                    await self._writer.drain()
        except (OSError, TimeoutError):
            pass
        finally:
            self.abort()
            self._relief.set()

    def _next_data(self) -> bytes:
        frames = list(self._outgoing)
        self._calls -= len(frames)
        self._outgoing.clear()
        self._outgoing_bytes = 0
        self._relief.set()
        for watch_id in tuple(self._watches):
            frames += self._deliveries(watch_id)
        return b"".join(frames)

    def _deliveries(self, watch_id: int) -> list[bytes]:
        """Return the next messages of a watch, and move it behind them."""
        store = self._store
        prefix, next_revision = self._watches[watch_id]
        if next_revision > store.revision:
            return []
        found = store.batches(prefix, next_revision, DELIVERY_BATCHES)
        if isinstance(found, Compacted):
            del self._watches[watch_id]
            return [_delivery(watch_id, encode_watch_message(found))]
        frames: list[bytes] = []
        left = DELIVERY_BYTES
        for batch in found:
            if left <= 0:
                break
            frames.append(_delivery(watch_id, encode_watch_message(batch)))
            left -= len(frames[-1])
            next_revision = batch.revision + 1
        if len(frames) == len(found) < DELIVERY_BATCHES:
            next_revision = store.revision + 1
        else:
            self.wake()
        self._watches[watch_id] = (prefix, next_revision)
        return frames


def _delivery(watch_id: int, message: bytes) -> bytes:
    return frame_of(WatchDelivery(watch_id, msgspec.Raw(message)))


def _answer_frame(call_id: int, result: StoreResult) -> bytes:
    frame = frame_of(StoreAnswer(call_id, msgspec.Raw(encode_result(result))))
    if len(frame) <= ANSWER_FRAME_BYTES_MAX:
        return frame
    text = f"the answer has {len(frame)} bytes; read it in parts, with a limit"
    refused = StoreRefused(RefusalKind.TOO_BIG, text)
    return frame_of(StoreAnswer(call_id, msgspec.Raw(encode_result(refused))))

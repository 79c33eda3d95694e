"""Messages between the server and its store process, and the child's ends of the pipes.

    to the child     head: u8 kind, u32 length, u64 number
      REQUEST        then CBOR: {"id", "op": one of store_process.OPERATIONS, ...}
      PACKET         then a packet of a restore, which a later request names by its number
      FORGET         no request will name this packet
      HURRY          this request rests no more (dcp.server.storage.process.rests)
    to the server    u32 length, then CBOR
      reply          {"id", "result"} or {"id", "error": name of the exception, "text"}
      beat           {"beat": how much of a merge is done}, every BEAT_S while a request is handled

Packets travel before the request that needs them, so the child has the next load while it writes
the present one: a thread of the child (`Inbox`) reads while the main thread works.

Invariants
- a packet is written before the request that names it, and requests are read in order;
- the server bounds the bytes of packets that the child keeps (`vbucket.engine.loading.loads`).

All numbers are big-endian. The child does not import asyncio.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, BinaryIO, Final

import cbor2

from dcp.server.storage.process.rests import Rests

MESSAGE_BYTES_MAX: Final = 16 << 20
BEAT_S: Final = 0.25
HEAD: Final = struct.Struct(">BIQ")
LENGTH: Final = struct.Struct(">I")
REQUEST: Final = 0
PACKET: Final = 1
FORGET: Final = 2
HURRY: Final = 3


def pack_request(request: dict[str, Any]) -> bytes:
    """Return a request to the child."""
    data = cbor2.dumps(request)
    return HEAD.pack(REQUEST, len(data), 0) + data


def pack_reply(message: dict[str, Any]) -> bytes:
    """Return a reply or beat to the server."""
    data = cbor2.dumps(message)
    return LENGTH.pack(len(data)) + data


class Packets:
    """The packets that have arrived in the child, by number."""

    def __init__(self) -> None:
        self._packets: dict[int, bytes] = {}

    def put(self, number: int, packet: bytes) -> None:
        """Keep a packet."""
        self._packets[number] = packet

    def get(self, number: int) -> bytes:
        """Return a packet that was sent."""
        return self._packets[number]

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop packets that no later request names."""
        for number in numbers:
            self._packets.pop(number, None)


class Inbox:
    """Reads what the server sends, on a thread of its own."""

    def __init__(self, stream: BinaryIO, packets: Packets, rests: Rests) -> None:
        self._stream = stream
        self._packets = packets
        self._rests = rests
        self._requests: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        threading.Thread(target=self._read_all, name="inbox", daemon=True).start()

    def next_request(self) -> dict[str, Any] | None:
        """Wait for the next request; None: the server has closed its end."""
        return self._requests.get()

    def _read_all(self) -> None:
        try:
            while (request := self._read_request()) is not None:
                self._requests.put(request)
        finally:
            self._rests.hurry()
            self._requests.put(None)

    def _read_request(self) -> dict[str, Any] | None:
        """Return the next request, None at the end of the stream, also within a message. Packets
        before it are kept.
        """
        stream = self._stream
        while True:
            head = stream.read(HEAD.size)
            if len(head) < HEAD.size:
                return None
            kind, length, number = HEAD.unpack(head)
            assert length <= MESSAGE_BYTES_MAX, f"a message of {length} bytes"
            if kind == FORGET:
                self._packets.forget((number,))
                continue
            if kind == HURRY:
                self._rests.hurry(number)
                continue
            data = stream.read(length)
            if len(data) < length:
                return None
            if kind == REQUEST:
                request: dict[str, Any] = cbor2.loads(data)
                return request
            self._packets.put(number, data)


class Replies:
    """The child's replies, and beats while a request is handled."""

    def __init__(self, stream: BinaryIO, rests: Rests) -> None:
        self._stream = stream
        self._rests = rests
        self._turn = threading.Lock()
        self._is_busy = threading.Event()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Write one message."""
        with self._turn:
            self._stream.write(pack_reply(message))
            self._stream.flush()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Send beats until the block ends."""
        self._is_busy.set()
        try:
            yield
        finally:
            self._is_busy.clear()

    def _beat(self) -> None:
        while self._is_busy.wait():
            time.sleep(BEAT_S)
            if self._is_busy.is_set():
                # The server may be gone. Then the main thread ends at the end of its input.
                with suppress(OSError):
                    self.send({"beat": self._rests.part})

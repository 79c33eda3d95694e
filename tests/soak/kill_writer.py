"""One writer of the kill loop: a connection, the keys that only it writes, and their right state.

A writer's changes happen in order. So after a kill there is one question: how many of the
unanswered changes happened? `check` finds the number, or reports that none fits.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections import Counter
from typing import Any, Final, NamedTuple

from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.ids import NUM_VBUCKETS, vbucket_of

DOCUMENTS: Final = 60
COUNTERS: Final = 10
"""Keys of each writer. There are few, so versions pile up and every round touches most keys."""
IN_FLIGHT: Final = 48
WAIT_S: Final = 30.0

SET_EXTRAS: Final = bytes(8)
INCREMENT_EXTRAS: Final = struct.pack(">QQI", 1, 1, 0)
TOKEN: Final = struct.Struct(">QQ")


class KillLoopError(AssertionError):
    """A promise was broken. The text says which one, and how to reproduce it."""


class Stored(NamedTuple):
    """A document: its value, and its CAS if the server has told it."""

    value: bytes
    cas: int = 0


class Sent(NamedTuple):
    """An unanswered change, and the value that it leaves: None for a deletion."""

    opcode: int
    key: bytes
    leaves: bytes | None
    status: int


def value_of(key: bytes, number: int) -> bytes:
    """Return the value that the `number`-th change of a key stores. It names key and number."""
    drawn = random.Random(number * 1_000_003 + hash_of(key))
    size = drawn.choice((0, 20, 100, 300, 3000, 9000))
    return b"%s|%d|" % (key, number) + drawn.randbytes(size)


def hash_of(key: bytes) -> int:
    return int.from_bytes(key[-7:], "big")


class PartitionTruth:
    """The state of the partitions according to the answers, over all writers."""

    def __init__(self) -> None:
        self.seqnos = dict.fromkeys(range(NUM_VBUCKETS), 0)
        self.cas = dict.fromkeys(range(NUM_VBUCKETS), 0)
        self.uuids: dict[int, int] = {}

    def answered(self, vb_id: int, frame: Frame) -> None:
        """Note the answer to a change. On one node all answers come in the order of seqnos."""
        vb_uuid, seqno = TOKEN.unpack(frame.extras)
        if self.uuids.setdefault(vb_id, vb_uuid) != vb_uuid:
            raise KillLoopError(f"vb {vb_id}: the version changed to {vb_uuid}")
        self.seqnos[vb_id] = max(self.seqnos[vb_id], seqno)
        self.cas[vb_id] = max(self.cas[vb_id], frame.cas)

    def to_document(self) -> dict[str, Any]:
        return {name: dict(getattr(self, name)) for name in ("seqnos", "cas", "uuids")}

    def resume(self, document: dict[str, Any]) -> None:
        for name, numbers in document.items():
            setattr(self, name, {int(vb_id): number for vb_id, number in numbers.items()})


class Writer:
    """One connection and the keys that only it writes."""

    def __init__(self, number: int, draw: random.Random, truth: PartitionTruth) -> None:
        names = [b"k%d:%d" % (number, n) for n in range(DOCUMENTS)]
        self.documents = names
        self.counters = [b"n%d:%d" % (number, n) for n in range(COUNTERS)]
        self.stored: dict[bytes, Stored] = {}
        """The state after all answered changes."""
        self.expected: dict[bytes, bytes] = {}
        """The state after all changes that were sent."""
        self.sent: list[Sent] = []
        self.changes: Counter[bytes] = Counter()
        self.answers = 0
        self.is_open = False
        self._last_seqnos: dict[int, int] = {}
        self._draw = draw
        self._truth = truth
        self._socket: socket.socket
        self._decoder = FrameDecoder()
        self._unsent = b""

    # -- the connection ------------------------------------------------------------------------

    def connect(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self._decoder = FrameDecoder()
        self._unsent = b""
        features = (Feature.MUTATION_SEQNO, Feature.XERROR)
        hello = b"".join(int(code).to_bytes(2, "big") for code in features)
        self._socket.sendall(pack_request(Opcode.HELLO, key=b"kill", value=hello))
        (answer,) = self._receive(1)
        assert answer.value == hello, answer
        self.is_open = True

    def high_seqnos(self) -> dict[int, int]:
        """Return the high seqnos of all partitions."""
        self._socket.setblocking(True)
        self._socket.sendall(pack_request(Opcode.GET_ALL_VB_SEQNOS))
        (frame,) = self._receive(1)
        return dict(struct.iter_unpack(">HQ", frame.value))

    def close(self) -> None:
        if self.is_open:
            self._socket.close()
        self.is_open = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def _receive(self, count: int) -> list[Frame]:
        frames: list[Frame] = []
        while len(frames) < count:
            data = self._socket.recv(1 << 18)
            assert data, "the server closed a connection without a reason"
            frames += self._decoder.feed(data)
        return frames

    # -- changes -------------------------------------------------------------------------------

    def begin(self) -> None:
        self._socket.setblocking(False)

    def pump(self) -> None:
        """Read answers, send more changes; does not wait."""
        try:
            data = self._socket.recv(1 << 18)
            if not data:
                self.close()
                return
            for frame in self._decoder.feed(data):
                self._answered(frame)
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        while len(self.sent) < IN_FLIGHT:
            self._unsent += self._change()
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._unsent = self._unsent[self._socket.send(self._unsent) :]

    def settle(self) -> None:
        """Wait for all answers of a running server."""
        self._socket.settimeout(WAIT_S)
        self._socket.sendall(self._unsent)
        self._unsent = b""
        while self.sent:
            for frame in self._receive(1):
                self._answered(frame)

    def drain(self) -> None:
        """Read the answers that a dead server has still sent."""
        self._socket.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionError):
            while data := self._socket.recv(1 << 18):
                for frame in self._decoder.feed(data):
                    self._answered(frame)
        self.close()

    def _change(self) -> bytes:
        draw = self._draw.random()
        if draw < 0.15:
            key = self._draw.choice(self.counters)
            leaves = b"%d" % (int(self.expected.get(key, 0)) + 1)
            return self._send(Opcode.INCREMENT, key, leaves, extras=INCREMENT_EXTRAS)
        key = self._draw.choice(self.documents)
        if draw < 0.3:
            return self._send(Opcode.DELETE, key, None)
        self.changes[key] += 1
        value = value_of(key, self.changes[key])
        return self._send(Opcode.SET, key, value, extras=SET_EXTRAS, value=value)

    def _send(self, opcode: int, key: bytes, leaves: bytes | None, **parts: bytes) -> bytes:
        is_miss = opcode == Opcode.DELETE and key not in self.expected
        status = Status.KEY_ENOENT if is_miss else Status.OK
        self.sent.append(Sent(opcode, key, leaves, status))
        if leaves is None:
            self.expected.pop(key, None)
        else:
            self.expected[key] = leaves
        return pack_request(opcode, key=key, vb_id=vbucket_of(key), **parts)

    def _answered(self, frame: Frame) -> None:
        change = self.sent.pop(0)
        self.answers += 1
        if (frame.opcode, frame.status) != (change.opcode, change.status):
            raise KillLoopError(f"{change.key!r}: {change} was answered with {frame}")
        if frame.status:
            return
        vb_id = vbucket_of(change.key)
        _, seqno = TOKEN.unpack(frame.extras)
        if seqno <= self._last_seqnos.get(vb_id, 0):
            raise KillLoopError(f"vb {vb_id}: seqno {seqno} after {self._last_seqnos[vb_id]}")
        self._last_seqnos[vb_id] = seqno
        before = self.stored.get(change.key)
        if before is not None and frame.cas <= before.cas:
            raise KillLoopError(f"{change.key!r}: CAS {frame.cas} after {before.cas}")
        self._truth.answered(vb_id, frame)
        if change.leaves is None:
            del self.stored[change.key]
        else:
            self.stored[change.key] = Stored(change.leaves, frame.cas)

    # -- the state of the server ---------------------------------------------------------------

    def check(self) -> None:
        """Read every key, and find out how many of the unanswered changes have happened."""
        keys = [*self.documents, *self.counters]
        self._socket.setblocking(True)
        self._socket.settimeout(WAIT_S)
        gets = [pack_request(Opcode.GET, key=key, vb_id=vbucket_of(key)) for key in keys]
        self._socket.sendall(b"".join(gets))
        found: dict[bytes, Stored] = {}
        for key, frame in zip(keys, self._receive(len(keys)), strict=True):
            if frame.status == Status.OK:
                found[key] = Stored(frame.value, frame.cas)
            elif frame.status != Status.KEY_ENOENT:
                raise KillLoopError(f"{key!r}: GET was answered with {frame}")
        happened = self._happened(found)
        for key, stored in self.stored.items():
            touched = any(change.key == key for change in self.sent[:happened])
            if not touched and found[key].cas != stored.cas:
                raise KillLoopError(f"{key!r}: CAS {found[key].cas}, answered was {stored.cas}")
        self.stored = found
        self.expected = {key: stored.value for key, stored in found.items()}
        self.sent.clear()

    def _happened(self, found: dict[bytes, Stored]) -> int:
        state: dict[bytes, bytes | None] = {key: item.value for key, item in self.stored.items()}
        actual = {key: item.value for key, item in found.items()}
        wrong = {key for key in state.keys() | actual.keys() if state.get(key) != actual.get(key)}
        for count, change in enumerate([*self.sent, None]):
            if not wrong:
                return count
            if change is not None and change.status == Status.OK:
                state[change.key] = change.leaves
                is_right = change.leaves == actual.get(change.key)
                (wrong.discard if is_right else wrong.add)(change.key)
        key = min(wrong)
        raise KillLoopError(
            f"{len(wrong)} keys have a state that the answers do not allow, the first is {key!r}: "
            f"found {actual.get(key)!r:.80}, answered {self.stored.get(key)!r:.80}, then sent "
            f"{[change for change in self.sent if change.key == key]!r:.400}"
        )

    # -- resuming a run ------------------------------------------------------------------------

    def to_document(self) -> dict[str, Any]:
        """Return the expected state, values by their numbers. Call it right after a check."""
        assert not self.sent
        return {
            "changes": {key.decode(): count for key, count in self.changes.items()},
            "stored": {
                key.decode(): [_number_of(key, stored.value), stored.cas]
                for key, stored in self.stored.items()
            },
        }

    def resume(self, document: dict[str, Any]) -> None:
        """Restore the state from `to_document`."""
        self.changes = Counter({key.encode(): n for key, n in document["changes"].items()})
        for text, (number, cas) in document["stored"].items():
            key = text.encode()
            value = value_of(key, number) if key in self.documents else b"%d" % number
            self.stored[key] = Stored(value, cas)


def _number_of(key: bytes, value: bytes) -> int:
    return int(value) if key.startswith(b"n") else int(value.split(b"|", 2)[1])

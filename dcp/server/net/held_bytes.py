"""Limits the bytes that the server holds because its clients do not go on, for all together.

There are two limits per node: incomplete packets that were received (setting
receive_buffers_bytes_max), and data that peers have not read (send_buffers_bytes_max). Connections
note what they hold. If the total is too much, the holder that has not moved for the longest time is
closed.

Strangers (connections without a login, TLS handshakes) have their own queue. They are guaranteed
one part in STRANGERS_PART, so large packets of users leave room for logins. Users are guaranteed
the rest, so strangers cannot close their connections. Either may use what the other does not.

Invariants
- `held_bytes` is the sum over all holders, and at most the bound whenever `note` returns;
- a queue is in the order of the last move: a packet was taken, or PROGRESS_BYTES came or went. A
  peer that sends or reads a byte now and then does not move;
- a holder is in one queue; a closed one is in none.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, Protocol

from dcp.stream.snapshots import Message

TLS_PIECE_BYTES: Final = 64 << 10
"""What a TLS transport gets at a time."""
PIECE_BYTES: Final = 512 << 10
"""The same of another transport, and what either gets of larger data in one turn of the loop."""
PROGRESS_BYTES: Final = 16 << 10
"""A change of at least this many held bytes counts as a move."""
STRANGERS_PART: Final = 4
"""Strangers are guaranteed one part in this many."""


class Holder(Protocol):
    """Something that holds bytes and can be closed."""

    @property
    def is_stranger(self) -> bool:
        """Whether nobody has logged in on it."""

    @property
    def waits_for_peer(self) -> bool:
        """Whether it is the peer's turn, and not the server's, which may have commands left."""

    def abort(self, reason: str) -> None:
        """Close at once."""


class _Holding:
    __slots__ = ("held_bytes", "moved_bytes", "taken_bytes")

    def __init__(self, held_bytes: int, taken_bytes: int) -> None:
        self.held_bytes = self.moved_bytes = held_bytes
        """Held now, and at the last move."""
        self.taken_bytes = taken_bytes


class _HolderQueue:
    """Holders in the order of their last move."""

    def __init__(self) -> None:
        self.entries: OrderedDict[Holder, _Holding] = OrderedDict()
        self.held_bytes = 0

    def note(self, holder: Holder, held_bytes: int, taken_bytes: int, *, has_moved: bool) -> None:
        entry = self.entries.get(holder)
        if entry is None:
            self.entries[holder] = _Holding(held_bytes, taken_bytes)
            self.held_bytes += held_bytes
            return
        self.held_bytes += held_bytes - entry.held_bytes
        entry.held_bytes = held_bytes
        has_moved |= entry.taken_bytes != taken_bytes
        entry.taken_bytes = taken_bytes
        if has_moved or abs(held_bytes - entry.moved_bytes) >= PROGRESS_BYTES:
            entry.moved_bytes = held_bytes
            self.entries.move_to_end(holder)

    def forget(self, holder: Holder) -> None:
        entry = self.entries.pop(holder, None)
        if entry is not None:
            self.held_bytes -= entry.held_bytes

    def first(self) -> Holder:
        """Return the holder to close: preferably one that waits for its peer."""
        waiting = (holder for holder in self.entries if holder.waits_for_peer)
        return next(waiting, None) or next(iter(self.entries))


class HeldBytes:
    """See the module."""

    def __init__(self, bytes_max: int, setting: str, what: str) -> None:
        """`what` names the held data, for the reason that a closed connection gets."""
        self.bytes_max = bytes_max
        self._setting = setting
        self._what = what
        self._strangers, self._others = _HolderQueue(), _HolderQueue()
        self.closed_total = 0
        """Holders that were closed to make room."""

    @property
    def held_bytes(self) -> int:
        """All held bytes."""
        return self._strangers.held_bytes + self._others.held_bytes

    def note(
        self, holder: Holder, held_bytes: int, *, taken_bytes: int = 0, has_moved: bool = False
    ) -> None:
        """Note what a holder holds now, and what was taken from it since it is there: it moves with
        each packet. If the total is too much, close others, or this one.
        """
        line, other = self._strangers, self._others
        if not holder.is_stranger:
            line, other = other, line
        other.forget(holder)
        if not held_bytes:
            line.forget(holder)
            return
        line.note(holder, held_bytes, taken_bytes, has_moved=has_moved)
        while self.held_bytes > self.bytes_max:
            self._make_room()

    def forget(self, holder: Holder) -> None:
        """Remove a holder: it holds nothing any more."""
        self._strangers.forget(holder)
        self._others.forget(holder)

    def _make_room(self) -> None:
        strangers = self._strangers
        are_too_many = strangers.held_bytes > self.bytes_max // STRANGERS_PART
        line = strangers if are_too_many or not self._others.entries else self._others
        holder = line.first()
        before = self.held_bytes
        line.forget(holder)
        assert self.held_bytes < before, "a closed holder has held something"
        self.closed_total += 1
        holder.abort(
            f"{self._what} {before} bytes together, and this connection has not moved for the "
            f"longest time (setting {self._setting})"
        )


class Outgoing:
    """Data that waits for a transport, which gets it in pieces.

    A TLS transport encrypts all that it gets, and passes it to the transport below, whose buffer
    cannot be measured. Another one gives the kernel as much as that takes, which can be some MiB,
    and all other connections wait meanwhile.
    """

    __slots__ = ("_data", "_taken", "has_turn", "is_paused", "piece_bytes", "size")

    def __init__(self, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self.is_paused = False
        """Whether the transport has enough for now."""
        self.has_turn = False
        """Whether the next pieces come in the next turn of the loop."""
        self.size = 0
        """Bytes of all data. What was taken of the first one still counts."""
        self._data: deque[memoryview] | None = None
        self._taken = 0
        """How much of the first one the transport has got."""

    def add(self, data: Message) -> None:
        """Add data at the end."""
        if self._data is None:
            self._data = deque()
        self._data.append(memoryview(data))
        self.size += len(data)

    def hand_over(self, transport: asyncio.Transport, next_turn: Callable[[], None]) -> None:
        """Give the transport as many pieces as one turn of the loop may. If more are left that it
        has room for, `next_turn` is called in the next one.
        """
        left_bytes = PIECE_BYTES
        while self.size and not self.is_paused and left_bytes > 0:
            left_bytes -= self.piece_bytes
            transport.write(self.take())
        if self.size and not (self.is_paused or self.has_turn):
            self.has_turn = True
            asyncio.get_running_loop().call_soon(next_turn)

    def take(self) -> memoryview:
        """Return the next piece."""
        assert self._data, "something waits"
        data, begin = self._data[0], self._taken
        self._taken += self.piece_bytes
        if self._taken >= len(data):
            self._data.popleft()
            self.size -= len(data)
            self._taken = 0
            if not self._data:
                self._data = None
        return data[begin : begin + self.piece_bytes]

    def clear(self) -> None:
        """Forget all of it: the connection is over."""
        self._data, self.size, self._taken = None, 0, 0


def receive_buffers(bytes_max: int) -> HeldBytes:
    """Return the limit on received data that is no complete packet, or waits for its turn."""
    return HeldBytes(
        bytes_max, "receive_buffers_bytes_max", "incomplete packets and handshakes took"
    )


def send_buffers(bytes_max: int) -> HeldBytes:
    """Return the limit on data that clients have not read."""
    return HeldBytes(bytes_max, "send_buffers_bytes_max", "data that clients have not read took")

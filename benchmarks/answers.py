"""Counters of answers for the generator, of all its protocols. That of the binary protocol, and why
they count by slicing, is in `clients.cli.node.answers`.
"""

from __future__ import annotations

from typing import Protocol

from clients.cli.node.answers import ANSWER_BYTES, AnswerError, BinaryCounter


class Counter(Protocol):
    """Counts the answers to one batch at a time."""

    errors: int
    first_error: str

    def begin(self, operations: int) -> None:
        """Note that a batch of this many operations was sent."""

    def outgoing(self, batch: bytes) -> bytes | bytearray:
        """Return the batch in the form for this connection."""

    def feed(self, chunk: bytes) -> bool:
        """Process received bytes; True when the batch is fully answered."""


class MemcachedCounter(BinaryCounter):
    """The same for clients that said no HELLO, as memcached's: without tokens."""

    answer_bytes = ANSWER_BYTES


class TextCounter:
    """Answers to `set` of memcached's text protocol."""

    def __init__(self) -> None:
        self.errors = 0
        self.first_error = ""
        self._lines = 0
        self._buffer = b""

    def begin(self, operations: int) -> None:
        self._lines, self._buffer = operations, b""

    def outgoing(self, batch: bytes) -> bytes:
        return batch

    def feed(self, chunk: bytes) -> bool:
        buffer = self._buffer = self._buffer + chunk
        lines = buffer.count(b"\n")
        if lines < self._lines:
            return False
        if lines > self._lines or not buffer.endswith(b"\n"):
            raise AnswerError(f"more than {self._lines} answers: {buffer[-60:]!r}")
        wrong = lines - buffer.count(b"STORED\r\n") + buffer.count(b"NOT_STORED")
        if wrong:
            self.errors += wrong
            line = next(each for each in buffer.split(b"\r\n") if each != b"STORED")
            self.first_error = self.first_error or line.decode(errors="replace")
        return True


class RespCounter:
    """Answers to SET and XADD in Redis: `+OK` and an id, three lines for an operation."""

    def __init__(self) -> None:
        self.errors = 0
        self.first_error = ""
        self._operations = 0
        self._buffer = b""

    def begin(self, operations: int) -> None:
        self._operations, self._buffer = operations, b""

    def outgoing(self, batch: bytes) -> bytes:
        return batch

    def feed(self, chunk: bytes) -> bool:
        buffer = self._buffer = self._buffer + chunk if self._buffer else chunk
        wanted = self._operations
        if buffer[:1] != b"-" and b"\n-" not in buffer:
            if buffer.count(b"\n") < 3 * wanted:
                return False
            whole = buffer.count(b"+OK\r\n") == buffer.count(b"\n$") == wanted
            if whole and buffer.count(b"\n") == 3 * wanted and buffer.endswith(b"\r\n"):
                return True
            raise AnswerError(f"not {wanted} times +OK and an id: {buffer[:60]!r}")
        return self._read_one_by_one()

    def _read_one_by_one(self) -> bool:
        buffer, at, seen, errors = self._buffer, 0, 0, []
        while seen < 2 * self._operations:
            end = buffer.find(b"\n", at)
            if end < 0:
                return False
            line = buffer[at:end]
            at = end + 1
            if line[:1] == b"$":
                at += int(line[1:]) + 2
                if at > len(buffer):
                    return False
            elif line[:1] == b"-":
                errors.append(line)
            elif line[:1] != b"+":
                raise AnswerError(f"an answer starts with {line[:20]!r}")
            seen += 1
        self.errors += len(errors)
        self.first_error = self.first_error or (errors[0].decode(errors="replace").strip())
        return True


class WaitingRespCounter(RespCounter):
    """The same with one WAIT at the end of each batch, until two replicas have it."""

    _WAIT = b"*3\r\n$4\r\nWAIT\r\n$1\r\n2\r\n$1\r\n0\r\n"
    _ANSWER = b":2\r\n"

    def outgoing(self, batch: bytes) -> bytes:
        return batch + self._WAIT

    def feed(self, chunk: bytes) -> bool:
        self._buffer += chunk
        if not self._buffer.endswith(self._ANSWER):
            return False
        self._buffer = self._buffer.removesuffix(self._ANSWER)
        return super().feed(b"")

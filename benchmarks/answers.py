"""Counts and checks answers in the generator, at a cost far below a server's.

A counter takes received bytes until a batch of answers is complete. While all answers are good it
checks status bytes by slicing or counting. At the first sign of anything else it reads answer by
answer, so an error of another length is counted and the connection stays in step.
"""

from __future__ import annotations

from typing import Final, Protocol

ANSWER_BYTES: Final = 24
TOKEN_ANSWER_BYTES: Final = 40  # with a mutation token


class AnswerError(Exception):
    """The server sent something that is not an answer."""


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


class BinaryCounter:
    """Answers to SETs on the binary protocol, all of one size: status in bytes 6 and 7."""

    answer_bytes = TOKEN_ANSWER_BYTES

    def __init__(self) -> None:
        self.errors = 0
        self.first_error = ""
        self._left = 0
        self._buffer = b""
        self._plain = True

    def begin(self, operations: int) -> None:
        self._left, self._buffer, self._plain = operations, b"", True

    def outgoing(self, batch: bytes) -> bytes:
        return batch

    def feed(self, chunk: bytes) -> bool:
        buffer = self._buffer = self._buffer + chunk if self._buffer else chunk
        if self._plain:
            each = self.answer_bytes
            statuses, magics = buffer[6::each] + buffer[7::each], buffer[::each]
            if statuses.count(0) == len(statuses) and magics.count(0x81) == len(magics):
                wanted = self._left * each
                if len(buffer) > wanted:
                    raise AnswerError(f"{len(buffer) - wanted} bytes too many")
                return len(buffer) == wanted
            self._plain = False
        return self._read_one_by_one()

    def _read_one_by_one(self) -> bool:
        buffer, at = self._buffer, 0
        while self._left and at + 24 <= len(buffer):
            if buffer[at] != 0x81:
                raise AnswerError(f"an answer starts with byte 0x{buffer[at]:02x}, not 0x81")
            end = at + 24 + int.from_bytes(buffer[at + 8 : at + 12], "big")
            if end > len(buffer):
                break
            status = int.from_bytes(buffer[at + 6 : at + 8], "big")
            if status:
                self.errors += 1
                self.first_error = self.first_error or f"status 0x{status:02x}"
            self._left -= 1
            at = end
        self._buffer = buffer[at:]
        if not self._left and self._buffer:
            raise AnswerError(f"{len(self._buffer)} bytes too many")
        return not self._left


class MemcachedCounter(BinaryCounter):
    """The same for clients that said no HELLO, as memcached's: without tokens."""

    answer_bytes = ANSWER_BYTES


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

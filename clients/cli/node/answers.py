"""Answers of the binary protocol, counted by slicing: a load generator must cost far less than the
server that it drives.

While all answers are good their status bytes are checked at once. At the first sign of anything
else they are read one by one, so an error of another length is counted and the connection stays in
step.
"""

from __future__ import annotations

from typing import Final

ANSWER_BYTES: Final = 24
TOKEN_ANSWER_BYTES: Final = 40
"""With a mutation token."""


class AnswerError(Exception):
    """The server sent something that is not an answer."""


class BinaryCounter:
    """Counts the answers to one batch of requests, all of one size: status in bytes 6 and 7."""

    answer_bytes = TOKEN_ANSWER_BYTES

    def __init__(self) -> None:
        self.errors = 0
        self.first_error = ""
        self._left = 0
        self._buffer = b""
        self._plain = True

    def begin(self, operations: int) -> None:
        """Note that a batch of this many operations was sent."""
        self._left, self._buffer, self._plain = operations, b"", True

    def outgoing(self, batch: bytes) -> bytes:
        """Return the batch as it is sent."""
        return batch

    def feed(self, chunk: bytes) -> bool:
        """Process received bytes; True when the batch is fully answered. Raises AnswerError."""
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

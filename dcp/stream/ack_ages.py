"""How long a client has had bytes that it should have acknowledged by now. Pure.

Acknowledgements count the bytes of a connection, in the order in which they were sent. So it is
enough to note from time to time how many were sent: the oldest byte that is not acknowledged was
sent before the first note that counts it.

Many clients acknowledge a part of the window together, and never the rest while nothing follows. A
client may have processed what is less than its smallest acknowledgement, so this much is not late.

Invariant: an age is never longer than the truth, and short by MARK_NS or half of it at most.
"""

from __future__ import annotations

from collections import deque
from typing import Final

MARK_NS: Final = 2_000_000_000
"""Time between two notes; ages below it count as none."""
MARKS_MAX: Final = 64


class AckAges:
    """See the module. Bytes are those that count against the window."""

    def __init__(self) -> None:
        self._acked_bytes = 0
        self._smallest_bytes: int | None = None
        """The smallest acknowledgement; None: there was none."""
        self._marks: deque[tuple[int, int]] = deque()
        """(Time, all bytes that were sent until then), the oldest first."""

    def acknowledged(self, processed_bytes: int) -> None:
        """Take an acknowledgement."""
        self._acked_bytes += processed_bytes
        smallest = self._smallest_bytes
        if smallest is None or processed_bytes < smallest:
            self._smallest_bytes = processed_bytes

    def mark(self, now_ns: int, unacked_bytes: int) -> None:
        """Note what was sent, if it is time for that."""
        marks, sent_bytes = self._marks, self._acked_bytes + unacked_bytes
        if marks and (now_ns - marks[-1][0] < MARK_NS or marks[-1][1] == sent_bytes):
            return
        while marks and marks[0][1] <= self._acked_bytes:
            marks.popleft()
        if len(marks) >= MARKS_MAX:
            self._marks = marks = deque(tuple(marks)[::2])
        marks.append((now_ns, sent_bytes))

    def oldest_s(self, now_ns: int, window_bytes: int) -> float:
        """Return the age of the oldest byte that should have been acknowledged, in seconds."""
        held_bytes = self._smallest_bytes
        if held_bytes is None:
            held_bytes = window_bytes // 2
        for marked_ns, sent_bytes in self._marks:
            if sent_bytes > self._acked_bytes + held_bytes:
                age_ns = now_ns - marked_ns
                return age_ns / 1e9 if age_ns >= MARK_NS else 0.0
        return 0.0

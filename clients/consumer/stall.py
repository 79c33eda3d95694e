"""Finds streams that are behind and do not move. Pure.

A consumer's connection calls it regularly with the server's high seqnos, but only while no received
data waits for the user. So a slow user does not look like a stalled stream.

A stream is stalled if it was behind the server's high seqno at one check and has not moved by the
next. A server serves long backlogs in turns. So a stream that has sent nothing yet gets `PATIENCE`
checks while other streams move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from clients.consumer.partition_stream import PartitionStream

PATIENCE: Final = 5
"""Checks that a stream may wait for its first message while other streams move."""


class StallWatch:
    """See the module. One per connection."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int, int, bool]] = {}
        """Partition -> (opaque, seqno, checks behind without a move, whether it ever moved)."""

    def check(
        self, streams: Iterable[tuple[int, PartitionStream]], high_seqnos: Mapping[int, int]
    ) -> list[PartitionStream]:
        """Return the stalled streams. `streams`: (opaque, stream) of all open streams."""
        before, self._seen = self._seen, {}
        is_quiet = True
        late: list[tuple[int, PartitionStream]] = []
        for opaque, stream in streams:
            end = high_seqnos.get(stream.vb_id, 0)
            if stream.target is not None:
                end = min(end, stream.target)
            known, seqno, count, has_moved = before.get(
                stream.vb_id, (opaque, stream.seqno, 0, False)
            )
            if known != opaque:
                seqno, count, has_moved = stream.seqno, 0, False
            if stream.seqno > seqno:
                count, has_moved, is_quiet = 0, True, False
            count = count + 1 if stream.seqno < end else 0
            self._seen[stream.vb_id] = (opaque, stream.seqno, count, has_moved)
            if count > 1:
                late.append((opaque, stream))
        stalled = []
        for _, stream in late:
            _, _, count, has_moved = self._seen[stream.vb_id]
            if has_moved or is_quiet or count > PATIENCE:
                stalled.append(stream)
                del self._seen[stream.vb_id]
        return stalled

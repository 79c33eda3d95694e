"""The cut that the streams of one connection go towards. Pure.

Who calls it: the producer. The rule and its proof are in docs/consistent-cuts.md.

Invariants
- a stream that is `behind` has changes of before the cut to send; it sends nothing beyond the cut;
- the client is told the cut when no stream is behind, before anything beyond it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable

from dcp.stream.active_stream import ActiveStream
from vbucket.engine.cut import Cut


class PendingCut:
    """See the module."""

    __slots__ = ("behind", "seqnos", "time", "waiting")

    def __init__(self, cut: Cut, streams: Iterable[ActiveStream]) -> None:
        self.time, self.seqnos = cut
        self.behind = {
            stream.key for stream in streams if stream.next_seqno <= self.seqnos[stream.vb_id]
        }
        """Streams that are not there yet, by key."""
        self.waiting: list[ActiveStream] = []
        """Streams that are there, and have more to send."""

    def reached_by(self, stream: ActiveStream) -> bool:
        """Return whether a stream is at the cut; from then on the cut does not wait for it."""
        if stream.snap_end_seqno is not None or stream.next_seqno <= self.seqnos[stream.vb_id]:
            return False
        self.behind.discard(stream.key)
        return True

"""The cut that the streams of one connection go towards. Pure.

Who calls it: the producer. The rule and its proof are in docs/consistent-cuts.md.

Invariants
- a stream that is `behind` has changes of before the cut to send; it sends nothing beyond the cut;
- the client is told the cut when no stream is behind, before anything beyond it is sent.

In a cluster, a client goes towards one cut on several connections. Each of them may be too busy for
some cuts; so that they come together, all prefer the same ones (`note_next`).
"""

from __future__ import annotations

from collections.abc import Iterable

from dcp.stream.active_stream import ActiveStream
from dcp.stream.hub import StreamHub
from vbucket.engine.cut import Cut, draw_cut
from vbucket.engine.engine import Engine


class PendingCut:
    """See the module."""

    __slots__ = ("behind", "cut", "next", "seqnos", "waiting")

    def __init__(self, cut: Cut, streams: Iterable[ActiveStream]) -> None:
        self.cut = cut
        self.seqnos = cut.seqnos
        self.next: Cut | None = None
        """The cut of the cluster to go to after this one; None: the next that is drawn."""
        self.behind = {
            stream for stream in streams if stream.next_seqno <= self.seqnos[stream.vb_id]
        }
        """Streams that are not there yet."""
        self.waiting: list[ActiveStream] = []
        """Streams that are there, and have more to send."""

    def note_next(self, cut: Cut) -> None:
        """A later cut was drawn: of those that come meanwhile, keep the one with the most zeros at
        the end of its time. So a connection that is busy for long has those of all others.
        """
        if cut.round and (self.next is None or _rank(cut) >= _rank(self.next)):
            self.next = cut

    def reached_by(self, stream: ActiveStream) -> bool:
        """Return whether a stream is at the cut; from then on the cut does not wait for it."""
        if stream.snap_end_seqno is not None or stream.next_seqno <= self.seqnos[stream.vb_id]:
            return False
        self.behind.discard(stream)
        return True


def begin_cut(hub: StreamHub, cut: Cut) -> None:
    """Tell those that follow cuts of one that the node has drawn."""
    hub.cut_time = cut.time
    for follower in hub.cutting:
        follower.begin_cut(cut)


def draw_own_cut(engine: Engine, hub: StreamHub, wall_ns: int) -> None:
    """Draw a cut of a node alone, if somebody follows cuts, and the disk knows that its time may be
    closed.
    """
    if hub.cutting:
        engine.begin_batch(wall_ns)
        if engine.now_ns | 0xFFFF <= engine.closed_max:
            begin_cut(hub, draw_cut(engine, wall_ns))


def cut_age_s(hub: StreamHub, now_ns: int) -> float:
    """Return the age of the node's newest cut; 0: nobody follows cuts. `now_ns` is Unix time."""
    return max(0.0, (now_ns - hub.cut_time) / 1e9) if hub.cutting and hub.cut_time else 0.0


def _rank(cut: Cut) -> int:
    tick = cut.time >> 16
    return tick & -tick

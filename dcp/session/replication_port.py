"""What a session needs of replication: a replica's node may connect, who arrives, and how long
to wait. Pure.

`failover.replication` implements both. A node alone has no port, and refuses such connections.

**How long a connection waits** for partitions that are handed over to this node: a request for a
partition that is arriving (`ReplicationPort.arriving`) waits, and so does all that stands behind it
on its connection. Partitions arrive one group after the other, so a connection could wait again and
again. It has a credit of WAIT_NS_MAX: waiting uses it up, and time without waiting gives it back.
Without credit a request is refused at once.

Who calls it: `dcp.session.session`. The shell resumes the session at `until_ns` at the latest.

Invariant: of any time span a connection waits WAIT_NS_MAX and half of the span at most. So no
request waits longer than about WAIT_NS_MAX, whatever stands before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Final, NamedTuple, Protocol

from dcp.stream.snapshots import Message
from dcp.wire.frame import HEADER, HEADER_BYTES, Frame
from dcp.wire.opcode import Magic, Opcode
from failover.rules.cut import Ask

NEWS_WAIT_NS: Final = 10_000_000
"""How long output may wait that `can_wait`. Only GET_REPLICA shows the difference, and the next
commit group brings it earlier. A message of its own costs each replica as much as a small group."""

ACK_EXTRAS_BYTES: Final = 32
"""Of one that says nothing of streams, as nearly all (`failover.replication.messages.pack_ack`)."""
ACK_HEAD: Final = HEADER.pack(
    Magic.REQUEST, Opcode.X_REPLICA_ACK, 0, ACK_EXTRAS_BYTES, 0, 0, ACK_EXTRAS_BYTES, 0, 0
)
"""With what the packet of an acknowledgement begins. The extras follow."""
ACK_BYTES: Final = HEADER_BYTES + ACK_EXTRAS_BYTES


class FeedAnswer(NamedTuple):
    """The answer to a replica's stream request."""

    status: int
    value: bytes


class ReplicaSender(Protocol):
    """The feed of one replica's node. It pumps messages into a connection, as a `Producer` does."""

    is_superseded: bool
    damages: list[tuple[int, str]]
    """Why streams ended whose stored data is damaged, since the connection took them last."""

    @property
    def has_output(self) -> bool:
        """Whether `pump` would return anything now."""

    @property
    def can_wait(self) -> bool:
        """Whether all output may wait for NEWS_WAIT_NS, and for anything that comes before."""

    def pump(self, bytes_max: int) -> Sequence[Message]:
        """Return messages to send, about `bytes_max` of them."""

    def heard(self, now_ns: int) -> None:
        """Bytes have come from the peer; monotonic nanoseconds."""

    def tick(self, now_ns: int) -> bool:
        """Let time pass; False: disconnect."""

    def close(self) -> None:
        """The connection is gone."""

    def stream_request(self, request: Frame) -> FeedAnswer | None:
        """Answer the request for a partition; None: the answer comes with what `pump` returns.
        Raises ReplicationError.
        """

    def close_stream(self, vb_id: int) -> None:
        """The replica does not follow a partition any more."""

    def take_acknowledgement(self, extras: bytes, held: bytes = b"") -> None:
        """Take an X_REPLICA_ACK; `held` is its value. Raises ReplicationError."""


class ReplicationPort(Protocol):
    """Where replicas' nodes come in."""

    @property
    def arriving(self) -> Set[int]:
        """Partitions that this node masters and serves in a moment: their requests wait. It is the
        same object for ever.
        """

    def why_fenced(self, vb_id: int) -> str:
        """Return why this node, as its master, does not serve a partition now; "": not known."""

    @property
    def why_no_cuts(self) -> str:
        """Why this node takes part in no cut of the cluster; "": it does."""

    def draw_cut(self, ask: Ask, clock_ns: int) -> str:
        """Draw a cut of the cluster, and commit nothing until it is complete; return why not."""

    def complete_cut(self, round_: int, time: int) -> bool:
        """All nodes have drawn a cut; False: this one does not hold it."""

    def open_feed(
        self, greeting: bytes, schedule: Callable[[], None]
    ) -> tuple[ReplicaSender, bytes]:
        """Begin to feed the node that sends this greeting; return the value of the answer, too.
        Raises ReplicationError.
        """


class ReplicationError(Exception):
    """A peer broke the rules of replication, or is no member; the text says how. The connection is
    closed.
    """


WAIT_NS_MAX: Final = 100_000_000
"""As long as a handover may refuse a write."""


class ArrivalWait:
    """The wait of one connection. All times are Unix time."""

    __slots__ = ("_credit_from_ns", "until_ns")

    def __init__(self) -> None:
        self.until_ns = 0
        """When the wait under way ends at the latest; 0: nothing waits."""
        self._credit_from_ns = 0
        """The credit is the time since then, at most WAIT_NS_MAX."""

    def wait(self, now_ns: int) -> bool:
        """Begin to wait, or go on; False: the credit is used up, and nothing waits."""
        if not self.until_ns:
            credit_ns = min(now_ns - self._credit_from_ns, WAIT_NS_MAX)
            if credit_ns <= 0:
                return False
            self.until_ns = now_ns + credit_ns
        elif not self.until_ns - WAIT_NS_MAX <= now_ns < self.until_ns:  # or the clock was set back
            self.end(now_ns)
            return False
        return True

    def end(self, now_ns: int) -> None:
        """Nothing waits any more."""
        if self.until_ns:
            left_ns = min(max(0, self.until_ns - now_ns), WAIT_NS_MAX)
            self._credit_from_ns = now_ns - left_ns
            self.until_ns = 0

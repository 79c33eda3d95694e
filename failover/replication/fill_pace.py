"""How fast this node fills copies on other nodes: bytes a second, shared by all links. Sans-IO.

A copy that is filled for the first time can wait; the writes that go on must not wait for it. What
a full copy has missed is not paced: until it has that, the partition has a copy less.

Links that have something to fill share the rate (`failover.replication.fill_rate`) equally. Each
has an allowance, which grows with time up to BURST_NS of its share, and may be overdrawn by one
message. So the rate holds on average whatever the size of messages. A link waits for the next
acknowledgement or tick, and not for a timer.

Groups wait behind what fills on the same link. So no more of it is on its way than the link may
send within ON_THE_WAY_NS: a replica that stands still for a merge does not collect more.

Copies that are full join their in-sync sets together, once in JOIN_NS. Each alone would be a
transaction of the metadata store, and every node takes each of them over, and what follows it.

Who calls it: `failover.replication.replica_feed`; `failover.replication.leading` tells what was
measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from failover.replication.fill_rate import FillRate
from failover.replication.sent_messages import AckDelays

FILL_SECTION_BYTES: Final = 64 << 10
"""Entries of a copy that is filled, in one message: two blocks. A group waits for as much."""
ON_THE_WAY_NS: Final = 100_000_000
BURST_NS: Final = 200_000_000
"""What may be sent at once after a pause: a few turns of a link, which come every 50 ms."""
JOIN_NS: Final = 500_000_000
"""How long a full copy waits for others. It protects so much later, and the partition has all the
copies that it had."""
ACTIVE_NS: Final = 1_000_000_000
"""How long a link takes part in sharing after it asked last."""
_NS_PER_S: Final = 1_000_000_000


class _Allowance:
    """What one link may send."""

    __slots__ = ("asked_ns", "left")

    def __init__(self, now_ns: int) -> None:
        self.asked_ns = now_ns
        self.left = 1.0


class FillPace:
    """See the module. `bytes_per_s` bounds the rate; 0: only what writes bear does."""

    def __init__(self, bytes_per_s: int) -> None:
        self.rate = FillRate(bytes_per_s)
        self._links: dict[str, _Allowance] = {}
        self._lag_ns: int | None = None
        """How late the event loop was at most since the last look."""
        self._joined_ns: int | None = None
        """When full copies could join last."""

    def was_late(self, lag_ns: int) -> None:
        """The event loop did something so much later than it was due."""
        self._lag_ns = max(self._lag_ns or 0, lag_ns)

    def look(self, now_ns: int, delays: Iterable[AckDelays]) -> None:
        """Take what was measured since the last look: `delays` of all links. Call it at every
        tick.
        """
        acknowledged = [took for each in delays if (took := each.take_new(now_ns)) is not None]
        lag_ns, self._lag_ns = self._lag_ns, None
        self._forget_idle(now_ns)
        self.rate.look(
            now_ns, acknowledged_ns=max(acknowledged, default=None), lag_ns=lag_ns,
            is_filling=bool(self._links),
        )  # fmt: skip

    def may_join(self, now_ns: int) -> bool:
        """Return whether copies that are full may join now. Call it at every tick."""
        may = self._joined_ns is None or now_ns - self._joined_ns >= JOIN_NS
        if may:
            self._joined_ns = now_ns
        return may

    def may_send(self, link: str, now_ns: int, on_the_way: int = 0) -> bool:
        """Return whether a link may send something for a copy that is being filled. `on_the_way`:
        bytes of such copies that it has sent, and that are not acknowledged.
        """
        allowance = self._links.setdefault(link, _Allowance(now_ns))
        elapsed_ns = max(0, now_ns - allowance.asked_ns)
        allowance.asked_ns += elapsed_ns
        self._forget_idle(now_ns)
        share = self.rate.bytes_per_s / len(self._links)
        left = allowance.left + share * elapsed_ns / _NS_PER_S
        allowance.left = min(left, share * BURST_NS / _NS_PER_S)
        return allowance.left > 0 and on_the_way <= share * ON_THE_WAY_NS / _NS_PER_S

    def sent(self, link: str, size: int) -> None:
        """A link has sent so many bytes."""
        allowance = self._links.get(link)
        if allowance is not None:
            allowance.left -= size

    def _forget_idle(self, now_ns: int) -> None:
        """Let links that fill nothing any more take no share."""
        for link, allowance in tuple(self._links.items()):
            if now_ns - allowance.asked_ns > ACTIVE_NS:
                del self._links[link]


class LinkFill:
    """The copies that one link fills. Without a pace they come as fast as the window allows."""

    def __init__(self, pace: FillPace | None, member: str) -> None:
        self._pace = pace
        self._member = member
        self._waiting: dict[int, None] = {}
        """Partitions that wait until more may be sent, in turn."""
        self._on_the_way = 0

    def may_send(self, now_ns: int) -> bool:
        """Whether something may be sent for a copy that is filled."""
        return self._pace is None or self._pace.may_send(self._member, now_ns, self._on_the_way)

    def wait(self, vb_id: int) -> None:
        """A partition waits until more may be sent."""
        self._waiting[vb_id] = None

    def has_next(self, now_ns: int) -> bool:
        """Whether a partition has waited, and need not wait any more."""
        return bool(self._waiting) and self.may_send(now_ns)

    def take_next(self) -> int:
        """Return the partition that has waited longest."""
        vb_id = next(iter(self._waiting))
        del self._waiting[vb_id]
        return vb_id

    def sent(self, size: int) -> None:
        """So many bytes were sent."""
        self._on_the_way += size
        if self._pace is not None:
            self._pace.sent(self._member, size)

    def acknowledged(self, size: int) -> None:
        """So many bytes were acknowledged."""
        self._on_the_way -= size
        assert self._on_the_way >= 0

    def close(self) -> None:
        """The link is gone."""
        self._waiting.clear()

"""How fast this node fills copies on other nodes: bytes a second, shared by all links. Sans-IO.

A copy that is filled for the first time can wait; the writes that go on must not wait for it. What
a full copy has missed is not paced: until it has that, the partition has a copy less.

Links that have something to fill share the rate equally. Each has an allowance, which grows with
time up to BURST_NS of its share, and may be overdrawn by one message. So the rate holds on average
whatever the size of messages, and a link waits for the next turn and not for a timer.

Who calls it: `dcp.replication.replica_feed`.
"""

from __future__ import annotations

from typing import Final

BURST_NS: Final = 200_000_000
"""What may be sent at once after a pause: a few turns of a link, which come every 50 ms."""
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
    """See the module. `bytes_per_s` 0: without a limit."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._links: dict[str, _Allowance] = {}

    def may_send(self, link: str, now_ns: int) -> bool:
        """Return whether a link may send something for a copy that is being filled."""
        if not self._bytes_per_s:
            return True
        allowance = self._links.setdefault(link, _Allowance(now_ns))
        elapsed_ns = max(0, now_ns - allowance.asked_ns)
        allowance.asked_ns += elapsed_ns
        self._forget_idle(now_ns)
        share = self._bytes_per_s / len(self._links)
        left = allowance.left + share * elapsed_ns / _NS_PER_S
        allowance.left = min(left, share * BURST_NS / _NS_PER_S)
        return allowance.left > 0

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


UNPACED: Final = FillPace(0)
"""Of feeds that nobody limits."""

"""Connections between hosts, with everything that networks do to them.

    source ── connect ──> listener of the target         a round trip, refused, or never answered
    Side <── bytes, in order, in pieces ──> Side         each direction is a stream of bytes

Invariants
- the bytes of one direction arrive in order, each once, and a prefix of them if the connection
  breaks: a message may be cut anywhere;
- a direction that is cut keeps its bytes and delivers them when it is mended, unless the
  connection has ended meanwhile;
- a direction that was slow, and is mended, has no bytes left that arrive as late as if it were not;
- a side that is closed gets no more calls, and `on_closed` is called once at most;
- bytes that were written and not yet taken are bounded by what the writer checks (`can_write`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from sim.world import ARGS, MS, SECOND, Host, Timer, World

SEND_BUFFER_BYTES = 256 << 10
"""Bytes under way above which `can_write` is false: what kernels buffer, about."""
CONNECT_TRIES = 5
CONNECT_RETRY_NS = 300 * MS
"""A request to connect that gets no answer is repeated, as by TCP."""
SPLIT_SHARE = 0.04
"""Share of writes that arrive in two pieces."""
_NO_DATA = b""
"""Stands for the end of the stream among the pieces."""


class Handler(Protocol):
    """What a process does with a connection."""

    def on_bytes(self, data: bytes) -> None:
        """Bytes came."""

    def on_closed(self, why: str) -> None:
        """The connection is over."""

    def on_writable(self) -> None:
        """`can_write` is true again."""


class Link:
    """One direction between two hosts."""

    __slots__ = (
        "delay_max_ns", "delay_min_ns", "free_at_ns", "holding", "is_cut", "ns_per_byte", "queued",
    )  # fmt: skip

    def __init__(self, delay_min_ns: int, delay_max_ns: int) -> None:
        self.delay_min_ns = delay_min_ns
        self.delay_max_ns = delay_max_ns
        self.ns_per_byte = 0
        """A slow link; 0: as fast as needed."""
        self.free_at_ns = 0
        self.is_cut = False
        self.holding: dict[Side, None] = {}
        """Sides with bytes that wait because it is cut."""
        self.queued: dict[Side, None] = {}
        """Sides that sent bytes while it was slow."""

    def arrival_ns(self, world: World, size: int) -> int:
        """Return when bytes that are sent now arrive.

        Most delays are near the minimum; few are long.
        """
        drawn = world.draw.random()
        spread = self.delay_max_ns - self.delay_min_ns
        delay_ns = self.delay_min_ns + int(spread * drawn * drawn * drawn)
        if not self.ns_per_byte:
            return world.now_ns + delay_ns
        self.free_at_ns = max(self.free_at_ns, world.now_ns) + size * self.ns_per_byte
        return self.free_at_ns + delay_ns


class Side:
    """One end of a connection. `handler` is set by whoever owns it."""

    __slots__ = (
        "_flying",
        "_held",
        "_last_arrival_ns",
        "_unread",
        "_waits_for_room",
        "handler",
        "host",
        "incarnation",
        "is_broken",
        "is_open",
        "is_read_paused",
        "link",
        "name",
        "network",
        "peer",
        "unread_bytes",
    )

    peer: Side

    def __init__(self, network: Network, host: Host, link: Link, name: str) -> None:
        self.network = network
        self.host = host
        self.incarnation = host.incarnation
        self.link = link
        self.name = name
        self.handler: Handler | None = None
        self.is_open = True
        self.is_broken = False
        """Nothing more that is written here arrives."""
        self.is_read_paused = False
        self.unread_bytes = 0
        """Bytes that were written here and not taken by the peer."""
        self._flying: deque[Timer] = deque()
        """Pieces under way, in order."""
        self._held: deque[bytes] = deque()
        """Pieces that wait because the direction is cut."""
        self._unread: deque[bytes] = deque()
        """Pieces that arrived here while reading was paused."""
        self._last_arrival_ns = 0
        self._waits_for_room = False

    # -- what processes call -----------------------------------------------------------------------

    @property
    def can_write(self) -> bool:
        """Whether there is room; if not, `on_writable` is called once there is."""
        if self.unread_bytes < SEND_BUFFER_BYTES:
            return True
        self._waits_for_room = True
        return False

    def write(self, data: bytes) -> None:
        """Send bytes."""
        if not self.is_open or not data:
            return
        self.unread_bytes += len(data)
        world = self.network.world
        if len(data) > 1 and world.chance(SPLIT_SHARE):
            at = 1 + world.below(len(data) - 1)
            self._send(data[:at])
            data = data[at:]
        self._send(data)

    def close(self) -> None:
        """Close in order: the peer gets everything that was written, and then the end."""
        if self.is_open:
            self._end()
            self._send(_NO_DATA)

    def abort(self) -> None:
        """Close at once: what is under way is lost."""
        if self.is_open:
            self._end()
            self._drop_flying(keep=0)
            self._send(_NO_DATA)

    def pause_reading(self) -> None:
        """Take no bytes for now."""
        self.is_read_paused = True

    def resume_reading(self) -> None:
        """Take bytes again."""
        self.is_read_paused = False
        while self._unread and self.is_open and not self.is_read_paused:
            self._take(self._unread.popleft())

    # -- under way ---------------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        if self.is_broken:
            return
        if self.link.is_cut:
            self._held.append(data)
            self.link.holding[self] = None
            return
        world, peer = self.network.world, self.peer
        when_ns = max(self._last_arrival_ns, self.link.arrival_ns(world, len(data)))
        self._last_arrival_ns = when_ns
        timer = world.at(when_ns, peer.host, peer.incarnation, peer._arrive, (data,))
        self._flying.append(timer)
        if self.link.ns_per_byte:
            self.link.queued[self] = None

    def hurry(self) -> None:
        """The direction is fast again: what waited for its turn arrives after a delay, in order."""
        world = self.network.world
        flying, self._flying = self._flying, deque()
        self._last_arrival_ns = world.now_ns
        for timer in flying:
            when_ns = max(self._last_arrival_ns, self.link.arrival_ns(world, 0))
            self._last_arrival_ns = when_ns
            _, _, host, incarnation, action, args = timer
            assert action is not None, "what is cancelled flies no more"
            timer.cancel()
            self._flying.append(world.at(when_ns, host, incarnation, action, args))

    def mended(self) -> None:
        """The direction is whole again: send what it held back."""
        held, self._held = self._held, deque()
        for data in held:
            self._send(data)

    def _arrive(self, data: bytes) -> None:
        self.peer._flying.popleft()
        if not self.is_open:
            return
        if self._unread or self.is_read_paused:
            self._unread.append(data)
        else:
            self._take(data)

    def _take(self, data: bytes) -> None:
        if not data:
            self.lose("the peer closed the connection")
            return
        peer = self.peer
        peer.unread_bytes -= len(data)
        assert self.handler is not None
        self.handler.on_bytes(data)
        if peer._waits_for_room and peer.unread_bytes * 2 < SEND_BUFFER_BYTES and peer.is_open:
            peer._waits_for_room = False
            assert peer.handler is not None
            peer.network.world.at(
                self.network.world.now_ns, peer.host, peer.incarnation, peer.handler.on_writable, ()
            )

    def reset(self) -> None:
        """Tell the peer that nobody is here any more."""
        self._send(_NO_DATA)

    def forget(self) -> None:
        """The machine has lost its power, and with it what was not on the wire yet."""
        self._held.clear()

    def _drop_flying(self, *, keep: int) -> None:
        """Lose all pieces under way but the first `keep`; the next one may be cut in the middle."""
        flying = list(self._flying)
        for index, timer in enumerate(flying[keep:]):
            (data,) = timer[ARGS]
            cut = self.network.world.below(len(data)) if index == 0 and keep and data else 0
            timer[ARGS] = (data[:cut],)
            if not cut:
                timer.cancel()
                self._flying.remove(timer)
        self._held.clear()

    def _end(self) -> None:
        self.is_open = False
        self._unread.clear()
        self.network.sides[self.host.name].pop(self, None)

    def lose(self, why: str) -> None:
        """The connection is over for this side."""
        if self.is_open:
            self._end()
            if self.handler is not None:
                self.handler.on_closed(why)

    def lose_later(self, delay_ns: int, why: str) -> None:
        """Learn after a while that the connection is over."""
        world = self.network.world
        when_ns = max(world.now_ns + delay_ns, self.peer._last_arrival_ns)
        world.at(when_ns, self.host, self.incarnation, self.lose, (why,))


class Network:
    """See the module. Hosts are known by name."""

    def __init__(self, world: World, delay_min_ns: int, delay_max_ns: int) -> None:
        self.world = world
        self.delay_min_ns = delay_min_ns
        self.delay_max_ns = delay_max_ns
        self.hosts: dict[str, Host] = {}
        self.listeners: dict[str, Callable[[Side], None]] = {}
        self.sides: dict[str, dict[Side, None]] = {}
        """Open sides by host, in the order in which they were made."""
        self.refused_share = 0.0
        """Share of requests to connect that are refused."""
        self._links: dict[tuple[str, str], Link] = {}
        self._count = 0

    def add(self, host: Host) -> None:
        """Add a host."""
        self.hosts[host.name] = host
        self.sides[host.name] = {}

    def listen(self, host: Host, listener: Callable[[Side], None]) -> None:
        """Accept connections for a process; it sets the handler of each side."""
        self.listeners[host.name] = listener

    def link(self, source: str, target: str) -> Link:
        """Return one direction between two hosts."""
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = Link(self.delay_min_ns, self.delay_max_ns)
        return link

    @property
    def untouched(self) -> tuple[object, ...]:
        """The state of a direction that no fault has changed."""
        return False, 0, self.delay_max_ns

    def state(self) -> dict[str, tuple[object, ...]]:
        """Return what faults change of each direction, by its name."""
        return {
            f"{source} to {target}": (link.is_cut, link.ns_per_byte, link.delay_max_ns)
            for (source, target), link in self._links.items()
        }

    # -- connecting --------------------------------------------------------------------------------

    def connect(
        self,
        source: Host,
        target: str,
        on_connected: Callable[[Side], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """Connect a process to a host; one of the callbacks is called later."""
        self._try(source, source.incarnation, target, on_connected, on_failed, CONNECT_TRIES)

    def _try(
        self,
        source: Host,
        incarnation: int,
        target: str,
        on_connected: Callable[[Side], None],
        on_failed: Callable[[str], None],
        tries: int,
    ) -> None:
        """Send one request to connect, as the kernel of the source does."""
        world = self.world
        if incarnation != source.incarnation:
            return
        there, back = self.link(source.name, target), self.link(target, source.name)
        host = self.hosts[target]
        if there.is_cut or back.is_cut or not host.has_power:
            if tries > 1:
                world.after(
                    CONNECT_RETRY_NS,
                    self._try, source, incarnation, target, on_connected, on_failed, tries - 1,
                )  # fmt: skip
            else:
                world.at(world.now_ns, source, incarnation, on_failed, ("no answer",))
            return
        arrival_ns = there.arrival_ns(world, 0)
        delay_ns = arrival_ns - world.now_ns
        world.after(delay_ns, self._answer, source, incarnation, target, on_connected, on_failed)

    def _answer(
        self,
        source: Host,
        incarnation: int,
        target: str,
        on_connected: Callable[[Side], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """The request has reached the target."""
        world, host = self.world, self.hosts[target]
        back_ns = self.link(target, source.name).arrival_ns(world, 0)
        if not host.is_up or target not in self.listeners or world.chance(self.refused_share):
            world.at(back_ns, source, incarnation, on_failed, ("connection refused",))
            return
        if incarnation != source.incarnation:
            return
        self._count += 1
        near = Side(
            self, source, self.link(source.name, target), f"{source.name}>{target}#{self._count}"
        )
        far = Side(
            self, host, self.link(target, source.name), f"{target}<{source.name}#{self._count}"
        )
        near.peer, far.peer = far, near
        near._last_arrival_ns = far._last_arrival_ns = back_ns
        self.sides[source.name][near] = None
        self.sides[target][far] = None
        world.at(world.now_ns, host, host.incarnation, self.listeners[target], (far,))
        world.at(back_ns, source, incarnation, on_connected, (near,))

    # -- ends of processes -------------------------------------------------------------------------

    def process_died(self, host: Host, *, has_power: bool) -> None:
        """A process has ended. With the machine's kernel alive, its peers hear of that soon;
        without power they hear nothing until `machine_is_back`, or never.
        """
        self.listeners.pop(host.name, None)
        for side in list(self.sides[host.name]):
            side.is_open = False
            if has_power:
                side.reset()
            else:
                side.forget()
        if has_power:
            self.sides[host.name].clear()

    def machine_is_back(self, host: Host) -> None:
        """A machine has power again: it resets connections that it does not know."""
        for side in list(self.sides[host.name]):
            if not side.is_open:
                del self.sides[host.name][side]
                side.reset()

    # -- faults ------------------------------------------------------------------------------------

    def open_sides(self) -> list[Side]:
        """Return one side of each open connection."""
        return [side for sides in self.sides.values() for side in sides if ">" in side.name]

    def break_connection(self, side: Side, longest_ns: int) -> None:
        """Break a connection in the middle of what is under way. Each side learns of it later."""
        for end in (side, side.peer):
            end._drop_flying(keep=self.world.below(len(end._flying) + 1))
            end.is_broken = True
            end.lose_later(self.world.below(longest_ns + 1), "connection reset")

    def cut(self, source: str, target: str) -> None:
        """Let no more bytes pass in one direction."""
        self.link(source, target).is_cut = True

    def narrow(self, source: str, target: str, bytes_per_s: int) -> Callable[[], None]:
        """Give a direction little bandwidth; return what mends it."""
        link = self.link(source, target)
        link.ns_per_byte = SECOND // bytes_per_s

        def widen() -> None:
            link.ns_per_byte = link.free_at_ns = 0
            queued, link.queued = link.queued, {}
            for side in queued:
                side.hurry()

        return widen

    def mend(self, source: str, target: str) -> None:
        """Let bytes pass again."""
        link = self.link(source, target)
        if link.is_cut:
            link.is_cut = False
            holding, link.holding = link.holding, {}
            for side in holding:
                side.mended()

    def partition(self, group: Iterable[str]) -> list[tuple[str, str]]:
        """Cut a group of hosts off from all others; return the directions that were cut."""
        inside = set(group)
        cut = []
        for one in self.hosts:
            for other in self.hosts:
                if (one in inside) != (other in inside) and not self.link(one, other).is_cut:
                    self.cut(one, other)
                    cut.append((one, other))
        return cut

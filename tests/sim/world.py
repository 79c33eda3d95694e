"""Virtual time: a heap of events, one thread, one source of randomness.

Everything in a simulation happens as an event of the world. An event belongs to a host (a process
on a machine) or to nobody (the network, the faults).

Invariants
- events run in the order of their time; events of the same time run in the order in which they were
  made. Nothing depends on hashes, addresses or the real clock, so a seed always gives the same run;
- time only moves forward, and only `run_until` moves it;
- an event of a process that has died does not run. Events of a process that is stopped run when it
  goes on, in order.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any
from zlib import crc32

from sim.moments import Moment

Action = Callable[..., None]

MS = 1_000_000
"""Nanoseconds in a millisecond."""
SECOND = 1000 * MS


class EventEndedError(BaseException):
    """An event ends here, in its midst: who it belongs to is no more."""

    def happen(self) -> None:
        """Do what that means for everybody else."""


WHEN_NS, HOST, INCARNATION, ACTION, ARGS = 0, 2, 3, 4, 5


class Timer(list[Any]):
    """An event that will run, unless it is cancelled: when, its number, host, incarnation, action,
    arguments. The heap compares it as a list: that takes no call.
    """

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]

    def cancel(self) -> None:
        """Do not run it."""
        self[ACTION] = None


class Trace:
    """One line per event, and a hash over all lines.

    The lines that are hashed hold lengths and checksums of bytes, so equal hashes mean equal bytes
    everywhere. `write` gets the lines for people; `show` says there what an event carries.
    """

    def __init__(
        self,
        write: Callable[[str], None] | None = None,
        show: Callable[[Action, tuple[Any, ...]], str] | None = None,
    ) -> None:
        self._write = write
        self._show = show
        self._hash = hashlib.sha256()

    def event(self, now_ns: int, action: Action, args: tuple[Any, ...]) -> None:
        """Note an event."""
        text = " ".join([named(action), *map(described, args)])
        self.line(now_ns, text, None if self._show is None else self._show(action, args))

    def line(self, now_ns: int, text: str, shown: str | None = None) -> None:
        """Note anything else that happened. `shown`: what people read instead of it."""
        line = f"{now_ns / MS:12.6f} {text}"
        self._hash.update(line.encode())
        if self._write is not None:
            self._write(line if shown is None else f"{now_ns / MS:12.6f} {shown}")

    @property
    def digest(self) -> str:
        """The hash over all lines so far."""
        return self._hash.hexdigest()


class World:
    """See the module. `draw` is the only source of randomness of a simulation."""

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        self.draw = random.Random(seed)
        self.now_ns = 0
        self.events = 0
        self.trace = trace
        self.moments: list[Moment] = []
        """What happened that a story tells, in order. Nothing in a run depends on it."""
        self.observer: Callable[[], None] | None = None
        """Called after each event. It draws nothing and changes nothing, but may end the run with
        an exception."""
        self._heap: list[Timer] = []
        self._made = 0

    def after(self, delay_ns: int, action: Action, *args: Any) -> Timer:
        """Make an event of nobody, `delay_ns` from now."""
        return self.at(self.now_ns + delay_ns, None, 0, action, args)

    def at(
        self,
        when_ns: int,
        host: Host | None,
        incarnation: int,
        action: Action,
        args: tuple[Any, ...],
    ) -> Timer:
        """Make an event of one incarnation of a host's process."""
        assert when_ns >= self.now_ns, "nothing happens in the past"
        self._made = made = self._made + 1
        timer = Timer((when_ns, made, host, incarnation, action, args))
        heappush(self._heap, timer)
        return timer

    def note(self, text: str) -> None:
        """Put a line into the trace."""
        if self.trace is not None:
            self.trace.line(self.now_ns, text)

    def tell(self, kind: str, who: str, text: str, vb_id: int | None = None) -> None:
        """Note what a story tells: a kind of `sim.moments`, who or what it happened to."""
        self.moments.append(Moment(self.now_ns, kind, who, vb_id, text))

    def run_until(self, until_ns: int) -> None:
        """Run all events up to a time, which is then the present."""
        heap = self._heap
        while heap and heap[0][WHEN_NS] <= until_ns:
            timer = heappop(heap)
            self.now_ns = timer[WHEN_NS]
            self._run(timer)
        self.now_ns = until_ns

    def _run(self, timer: Timer) -> None:
        _, _, host, incarnation, action, args = timer
        if action is None:
            return
        if host is not None:
            if incarnation != host.incarnation:
                return
            if host.is_paused:
                host.late.append(timer)
                return
        self.events += 1
        if self.trace is not None:
            self.trace.event(self.now_ns, action, args)
        try:
            action(*args)
        except EventEndedError as ended:
            ended.happen()
        if self.observer is not None:
            self.observer()

    # -- randomness --------------------------------------------------------------------------------

    def chance(self, share: float) -> bool:
        """Return true with this probability."""
        return self.draw.random() < share

    def below(self, stop: int) -> int:
        """Return a number from 0 to stop - 1. Cheaper than `randrange`."""
        return int(self.draw.random() * stop)

    def between(self, low_ns: int, high_ns: int) -> int:
        """Return a time between these."""
        return low_ns + int(self.draw.random() * (high_ns - low_ns))


class Host:
    """A process on a machine: a server, a client or a consumer. It can be stopped and killed.

    `incarnation` counts its lives. Events of an earlier life never run.
    """

    def __init__(self, world: World, name: str, drift_ppm: int = 0) -> None:
        self.world = world
        self.name = name
        self.incarnation = 0
        self.is_up = True
        self.has_power = True
        self.is_paused = False
        self.late: deque[Timer] = deque()
        """Events that became due while it was stopped."""
        self.drift_ppm = drift_ppm
        """How much faster its clocks go, in millionths."""

    def __str__(self) -> str:
        return self.name

    def after(self, delay_ns: int, action: Action, *args: Any) -> Timer:
        """Make an event of this process, `delay_ns` of its own clock from now."""
        world = self.world
        if self.drift_ppm:
            delay_ns = delay_ns * 1_000_000 // (1_000_000 + self.drift_ppm)
        return world.at(world.now_ns + delay_ns, self, self.incarnation, action, args)

    def pause(self) -> None:
        """Stop the process."""
        self.is_paused = True

    def resume(self) -> None:
        """Let the process go on; what was due meanwhile runs now, in order."""
        if not self.is_paused:
            return
        self.is_paused = False
        while self.late and not self.is_paused:
            self.world._run(self.late.popleft())

    def die(self) -> None:
        """End the process."""
        self.is_up = self.is_paused = False
        self.incarnation += 1
        self.late.clear()

    def rise(self) -> None:
        """Begin another life."""
        assert not self.is_up
        self.is_up = self.has_power = True


def named(action: Action) -> str:
    """Return how the trace names an action: who does what."""
    owner = getattr(action, "__self__", None)
    name = getattr(action, "__qualname__", str(type(action)))
    return f"{described(owner)} {name}" if owner is not None else name


def described(thing: object) -> str:
    """Return how the trace describes an argument: equal in all runs of a seed."""
    if isinstance(thing, bytes):
        return f"{len(thing)}B:{crc32(thing):08x}"
    if isinstance(thing, int | str | float | None):
        return str(thing)
    name = getattr(thing, "name", None)
    return name if isinstance(name, str) else type(thing).__name__

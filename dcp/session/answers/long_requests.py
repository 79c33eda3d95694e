"""Requests that take longer than some milliseconds: they take turns, and go on in steps. Pure.

A handler is a generator. One that never yields is done at once, as almost all are. One that yields
has found that its work is long: it is closed, and becomes a `LongRequest` in the node's
`LongQueue`. When it is its turn, the generator is made again and takes a step each time the shell
resumes the session. So other connections get their answers between two steps, and the documents of
one long request at a time are in memory.

Who calls it: handlers begin one with `SessionState.begin_steps`, and `Session.resume` goes on.

Invariants
- a session takes no other command before its long request is done, so answers keep their order;
- only the request whose turn it is takes steps. One that does not go on for SILENT_NS (its client
  reads nothing, or a commit is waited for) loses its turn, and begins again later;
- at most QUEUED_MAX requests wait, half of them of one user; further ones are refused at once.

What changed while a request waited or took steps is the generator's to notice. Each of its steps
may find another document, state or right than the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Final

from dcp.wire.status import RefusedError, Status
from failover.rules.write_answer import Durability

QUEUED_MAX: Final = 256
QUEUED_PER_USER_MAX: Final = QUEUED_MAX // 2
SILENT_NS: Final = 250_000_000
TICK_NS_MAX: Final = 50_000_000
"""If nobody has asked for longer than that, the event loop was busy with something else, and nobody
was silent."""
PLACE_NS: Final = 2_000_000
"""How long a request waits for each that is before it, until it asks again."""
WAIT_NS_MAX: Final = TICK_NS_MAX // 2

Steps = Generator[None, None, None]


class LongRequest:
    """One of them; `make` returns its generator from the beginning."""

    __slots__ = (
        "asked_ns", "durability", "held_bytes", "make", "opaque", "opcode", "steps", "user",
        "vb_id", "wire_key",
    )  # fmt: skip

    def __init__(
        self,
        make: Callable[[], Steps],
        opcode: int,
        opaque: int,
        vb_id: int,
        wire_key: bytes,
        *,
        held_bytes: int,
        user: str | None,
        durability: Durability | None,
    ) -> None:
        self.make = make
        self.opcode = opcode
        self.opaque = opaque
        self.vb_id = vb_id
        self.wire_key = wire_key
        self.held_bytes = held_bytes
        """Bytes of the request, which are kept."""
        self.user = user
        self.durability = durability
        self.steps: Steps | None = None
        self.asked_ns = 0
        """When it last asked whether it is its turn."""

    def step(self) -> bool:
        """Take a step; return whether it was the last one. Raises what the handler raises."""
        if self.steps is None:
            self.steps = self.make()
            next(self.steps, None)  # up to where it found that its work is long
        try:
            next(self.steps)
        except StopIteration:
            return True
        return False

    def begin_again(self) -> None:
        """Forget the work that was done, and the documents of it."""
        if self.steps is not None:
            self.steps.close()
            self.steps = None


class LongQueue:
    """The long requests of a node. All times are Unix time."""

    def __init__(self) -> None:
        self._queued: dict[LongRequest, None] = {}
        self._asked_ns = self._clock_ns = 0
        """When somebody asked last, and a clock that stands still while nobody can."""

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._queued)

    def enter(self, request: LongRequest, now_ns: int) -> None:
        """Queue a request. Raises RefusedError if too many wait."""
        self._tick(now_ns)
        of_user = sum(each.user == request.user for each in self._queued)
        if len(self._queued) >= QUEUED_MAX or of_user >= QUEUED_PER_USER_MAX:
            raise RefusedError(
                Status.ETMPFAIL,
                f"{len(self._queued)} requests into large documents wait ({of_user} of this user), "
                f"and at most {QUEUED_MAX} may ({QUEUED_PER_USER_MAX} of one user); try again",
            )
        request.asked_ns = self._clock_ns
        self._queued[request] = None

    def wait_ns(self, request: LongRequest, now_ns: int) -> int:
        """Return 0 if it is the request's turn, else how long it waits before it asks again."""
        self._tick(now_ns)
        self._queued.setdefault(request)  # at the end, if it was silent for too long
        request.asked_ns = self._clock_ns
        for place, queued in enumerate(self._queued):
            if queued is request:
                return min(place * PLACE_NS, WAIT_NS_MAX)
        raise AssertionError("it has just asked, so it is queued")

    def leave(self, request: LongRequest) -> None:
        """Forget a request that is done, or whose connection is gone."""
        self._queued.pop(request, None)
        request.begin_again()

    def _tick(self, now_ns: int) -> None:
        """Let time pass, and take their places from those who were silent."""
        self._clock_ns += min(max(now_ns - self._asked_ns, 0), TICK_NS_MAX)
        self._asked_ns = now_ns
        oldest_ns = self._clock_ns - SILENT_NS
        for request in [each for each in self._queued if each.asked_ns < oldest_ns]:
            self.leave(request)

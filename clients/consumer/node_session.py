"""A consumer's connection to one node: passes bytes to the core, sends its output, runs timers.

Invariants
- after every call into the core, its output is sent, and its notes are logged and counted
  (`flush`);
- a connection is closed if nothing arrives for two NOOP intervals, or a request is not answered for
  `stall_s`. Its partitions then get a new connection;
- streams are checked for stalls only while no received data waits for the user.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Final, Protocol

from clients.consumer.core import ConsumerCore
from clients.consumer.counters import ConsumerMetrics
from clients.consumer.extensions import Closed
from clients.consumer.options import ConsumerOptions
from clients.consumer.streams import Batch, Wanted
from clients.errors import DcpdError, StatusError, StreamViolationError
from clients.link.pipelined_link import Link
from dcp.wire.frame import ProtocolError
from dcp.wire.message import EndReason

SILENT_NOOPS: Final = 2
"""After this many NOOP intervals of silence a connection is dead (java-dcp-client's rule)."""
QUEUE_WINDOWS: Final = 2
"""Reading pauses at this many flow control windows of unprocessed bytes, in case a server ignores
flow control."""
STALLS_MAX: Final = 3
"""After this many stalls of one partition the consumer reconnects."""

LOG: Final = logging.getLogger("dcpd.consumer")
_QUIET: Final = frozenset(
    ["retry", "moved", "rollback"]
    + [f"stream_end_{reason}" for reason in (EndReason.STATE_CHANGED, EndReason.ROLLBACK)]
)
"""Kinds of notes that are logged at level INFO: they repeat; the program gets them as events; or
they come for hundreds of partitions when masters move, of which `Moves` tells in one line."""


class SessionOwner(Protocol):
    """What a session needs from its supervisor."""

    name: str
    options: ConsumerOptions
    metrics: ConsumerMetrics

    def take_batch(self, session: ConsumerSession, batch: Batch) -> None:
        """Queue a batch that a session received."""

    def map_wanted(self, session: ConsumerSession) -> None:
        """The node refuses for long: ask another one for a newer map."""

    def take_config(self, session: ConsumerSession, config: bytes) -> None:
        """Adopt a cluster configuration that a server pushed."""

    def session_lost(self, session: ConsumerSession, error: DcpdError) -> None:
        """A connection is lost."""

    def session_failed(self, session: ConsumerSession, error: DcpdError) -> None:
        """A stream broke the rules, or the server refused the connection's set-up."""


class ConsumerSession:
    """A consumer's connection to one node, with its timers."""

    def __init__(self, owner: SessionOwner, link: Link, core: ConsumerCore) -> None:
        self.link = link
        self.core = core
        self.queued_bytes = 0
        self.is_paused = False
        self.high_seqnos: dict[int, int] = {}
        """The server's last answer."""
        self._owner = owner
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tick_ns = 0
        """When the core's tick is due, if its timer runs."""
        self._has_heard = True
        self._stalls: dict[int, int] = {}
        self._asking: set[asyncio.Future[None]] = set()
        """Callers that wait for high seqnos. They are also woken if the connection is lost."""

    def begin(self) -> None:
        """Take over the connection and request the partitions that were added."""
        self._owner.metrics.connections += 1
        self.link.write(self.core.begin(time.monotonic_ns()))
        self.link.hand_over(self._on_bytes, self._on_lost)
        if self.link.is_closed:
            return
        self._watch()
        self._arm("stall", self._owner.options.stall_s, self._check_stalls)

    def add(self, partitions: Mapping[int, Wanted]) -> None:
        """Stream more partitions."""
        for vb_id, wanted in partitions.items():
            self.core.add(vb_id, wanted)
        self.flush()

    def flush(self) -> None:
        """Send the core's output, log its notes, and arm the timer of its next tick."""
        if self.core.streams.notes:
            self._tell_notes()
        if self.core.streams.wants_map:
            self.core.streams.wants_map = False
            self._owner.map_wanted(self)
        if self.link.is_closed:
            return
        connection = self.core.streams.connection
        output = connection.requests.take_output()
        if output:
            self.link.write(output)
        due_ns = connection.next_due_ns
        if due_ns is not None and ("tick" not in self._timers or due_ns < self._tick_ns):
            self._tick_ns = due_ns
            self._arm("tick", max(0, due_ns - time.monotonic_ns()) / 1e9, self._on_tick)

    def done_with(self, batch: Batch) -> None:
        """The user processed a batch."""
        self.queued_bytes -= batch.wire_bytes
        if self.link.is_closed:
            return
        self.core.processed(batch)
        if self.is_paused and not self._is_full():
            self.is_paused = False
            self.link.resume_reading()
        self.flush()

    async def ask_high_seqnos(self, timeout_s: float) -> dict[int, int]:
        """Ask for the node's high seqnos by partition; {} if it does not answer in time."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_seqnos(high_seqnos: dict[int, int]) -> None:
            self.high_seqnos = high_seqnos
            if not answer.done():
                answer.set_result(None)

        def on_postponed(_error: StatusError) -> None:
            answer.cancel()

        if not self.link.is_closed:
            self._asking.add(answer)
            try:
                self.core.streams.connection.ask_high_seqnos(on_seqnos, on_postponed)
                self.flush()
                await asyncio.wait([answer], timeout=timeout_s)
            finally:
                self._asking.discard(answer)
        return self.high_seqnos if answer.done() and not answer.cancelled() else {}

    def close(self) -> None:
        """Close the connection for good."""
        self._cancel_timers()
        self.link.close()

    # -- inside --------------------------------------------------------------------------------

    def _arm(self, name: str, delay_s: float, callback: object) -> None:
        assert callable(callback)

        def fire() -> None:
            self._timers.pop(name, None)
            callback()

        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = asyncio.get_running_loop().call_later(delay_s, fire)

    def _cancel_timers(self) -> None:
        timers, self._timers = self._timers, {}
        for timer in timers.values():
            timer.cancel()

    def _tell_notes(self) -> None:
        notes, self.core.streams.notes = self.core.streams.notes, []
        for kind, vb_id, text in notes:
            self._owner.metrics.note(kind)
            level = logging.INFO if kind in _QUIET else logging.WARNING
            word = "stream_end" if kind.startswith("stream_end") else kind
            LOG.log(level, "%s: partition %d: %s: %s", self._owner.name, vb_id, word, text)

    def _give_up(self, why: str) -> None:
        self._owner.metrics.silent_connections += 1
        LOG.warning("%s: %s: %s; reconnecting", self._owner.name, self.link.node, why)
        self.link.close()

    def _watch(self) -> None:
        """Close the connection if the server is silent for two NOOP intervals."""
        interval_s = SILENT_NOOPS * self._owner.options.noop_interval_s
        if not self._has_heard and not self.is_paused:
            self._give_up(f"nothing received for {interval_s:g} s")
            return
        self._has_heard = False
        self._arm("watch", interval_s, self._watch)

    def _check_stalls(self) -> None:
        """Ask for the server's high seqnos, unless received data waits for the user."""
        stall_s = self._owner.options.stall_s
        if not self.queued_bytes and not self.is_paused:
            oldest_ns = self.core.oldest_request_ns
            if oldest_ns is not None and time.monotonic_ns() - oldest_ns > stall_s * 1e9:
                self._give_up(f"a request was not answered within {stall_s:g} s")
                return
            self.core.streams.connection.ask_high_seqnos(
                self._restart_stalled,
                lambda _error: None,  # asked again at the next check
            )
            self.flush()
        self._arm("stall", stall_s, self._check_stalls)

    def _restart_stalled(self, high_seqnos: dict[int, int]) -> None:
        self.high_seqnos = high_seqnos
        if self.queued_bytes:
            return
        stalled = self.core.streams.restart_stalled(high_seqnos)
        for vb_id in stalled:
            self._stalls[vb_id] = self._stalls.get(vb_id, 0) + 1
        if any(count >= STALLS_MAX for count in self._stalls.values()):
            self._give_up(f"{len(stalled)} streams do not move")

    def _is_full(self) -> bool:
        return self.queued_bytes > QUEUE_WINDOWS * max(self._owner.options.buffer_bytes, 65536)

    def _on_tick(self) -> None:
        self.core.tick(time.monotonic_ns())
        self.flush()

    def _on_bytes(self, data: bytes) -> None:
        self._has_heard = True
        closed = self._take(data)
        while closed is not None and self.core.failure is None:
            closed = self._take(b"")
        config, self.core.streams.pushed_config = self.core.streams.pushed_config, b""
        if config:
            self._owner.take_config(self, config)
        failure = self.core.failure
        if failure is not None:
            if isinstance(failure, ProtocolError):
                failure = StreamViolationError(f"the server broke the protocol: {failure}")
            self._owner.session_failed(self, failure)
            return
        if self._is_full() and not self.is_paused:
            self.is_paused = True
            self.link.pause_reading()
        self.flush()

    def _take(self, data: bytes) -> Closed | None:
        """Pass bytes to the core, and queue what it makes of them; return the cut at its end."""
        batch = self.core.receive(data, time.monotonic_ns())
        self.queued_bytes += batch.wire_bytes
        self._owner.metrics.wire_bytes += batch.wire_bytes
        has_news = batch.items or batch.positions or batch.wire_bytes or batch.closed is not None
        if has_news or self.core.streams.homeless:
            self._owner.take_batch(self, batch)
        return batch.closed

    def _on_lost(self, error: DcpdError) -> None:
        self._cancel_timers()
        if self.core.streams.notes:
            self._tell_notes()
        for answer in self._asking:
            answer.cancel()
        self._owner.session_lost(self, error)

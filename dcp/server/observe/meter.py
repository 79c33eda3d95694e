"""What the server counts while it runs: plain numbers, updated once per batch or commit group.

Connections, the commit path, merging and compaction write here; dcp.server.report.metrics reads
on demand. Nothing is counted per operation; a batch costs about 0.3 us.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from dcp.server.config.server_settings import SLOW_AFTER_S
from dcp.server.observe.tracing import Tracing
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

SLOW_KEPT: Final = 50
TEXT_COMMAND: Final = "a command of the text protocol"
_NAMES: Final = {int(opcode): opcode.name for opcode in Opcode}


def command_of(answers: bytes) -> str:
    """Return the command whose answer is the first of these (binary protocol)."""
    return _NAMES.get(answers[1], "a command") if len(answers) > 1 else "a command"


class SlowOperation(NamedTuple):
    """One slow operation."""

    time_s: float
    """When it ended, Unix time."""
    what: str
    seconds: float
    peer: str
    """The client's address; "" if the server itself was slow."""
    user: str


class SlowOperations:
    """The last slow operations: what took long, when, and for whom. The web console shows them.

    Invariant: at most SLOW_KEPT operations are kept; older ones are dropped.
    """

    def __init__(self, slow_s: float) -> None:
        self.slow_s = slow_s
        """Operations at or above this are slow (setting slow_after)."""
        self._kept: deque[SlowOperation] = deque(maxlen=SLOW_KEPT)
        self.count = 0
        """Since the start, including those that are no longer kept."""

    def note(self, operation: SlowOperation) -> None:
        """Keep an operation."""
        self.count += 1
        self._kept.append(operation)

    def newest_first(self) -> list[SlowOperation]:
        """Return what is kept."""
        return list(reversed(self._kept))


NAMES_MAX: Final = 200
"""Twice the consumers that the console lists: some of those that are gone are worth a look."""


class LastRollback(NamedTuple):
    """The newest rollback of a consumer, and how many it had."""

    time_s: float
    """Unix time."""
    vb_id: int
    to_seqno: int
    kind: str
    reason: str
    rollbacks: int


class LastRollbacks:
    """The last rollback of each consumer, by the name of its connection, for the web console.

    A consumer that was rolled back usually rolls back many partitions at once, so its rollbacks are
    counted, too. Invariant: at most NAMES_MAX names are kept; the oldest rollback makes room.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, LastRollback] = {}
        """The oldest rollback first."""

    def note(self, fields: dict[str, object], time_s: float) -> None:
        """Keep a rollback; `fields` are those of the session's note."""
        name, vb_id, to_seqno = fields["name"], fields["vb_id"], fields["to_seqno"]
        assert isinstance(name, str)
        assert isinstance(vb_id, int)
        assert isinstance(to_seqno, int)
        before = self._by_name.pop(name, None)
        count = 1 if before is None else before.rollbacks + 1
        self._by_name[name] = LastRollback(
            time_s, vb_id, to_seqno, str(fields["kind"]), str(fields["reason"]), count
        )
        while len(self._by_name) > NAMES_MAX:
            del self._by_name[next(iter(self._by_name))]

    def of(self, name: str) -> LastRollback | None:
        """Return a consumer's last rollback, None if there was none since the start."""
        return self._by_name.get(name)


REFUSAL_KINDS: Final = ("log_full", "read_only", "enrolling", "store_behind")
"""Reasons for which writes may be refused."""
SECONDS_BOUNDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10,
)  # fmt: skip
"""Upper bounds of the buckets of a latency, in seconds."""


class Histogram:
    """Counts of observations by size. One writer at a time."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS_BOUNDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        """By bucket, not cumulative; the last one is above all bounds."""
        self.total = 0.0
        """Sum of the observations."""

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, observations at or below it), as Prometheus expects."""
        rows: list[tuple[str, float]] = []
        count = 0
        for bound, in_bucket in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            count += in_bucket
            rows.append((bound, count))
        return rows


class SlowHistogram(Histogram):
    """A histogram that also keeps the slow observations, under a name."""

    __slots__ = ("_slow", "_what")

    def __init__(self, what: str, slow: SlowOperations) -> None:
        super().__init__()
        self._what = what
        self._slow = slow

    def observe(self, value: float) -> None:
        """Count one observation, and keep it if it was slow."""
        super().observe(value)
        if value >= self._slow.slow_s:
            self._slow.note(SlowOperation(time.time(), self._what, value, "", ""))


class LinkBytes:
    """What went over the links of this node's copies to one other node."""

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        self.received = self.sent = 0


class ClusterMeter:
    """The numbers of one node of a cluster. Nothing here is counted for a SET."""

    def __init__(self) -> None:
        self.links: defaultdict[str, LinkBytes] = defaultdict(LinkBytes)
        """By name of the node whose partitions are copied here."""
        self.elections: Counter[str] = Counter(clean=0, handover=0, unclean=0)
        """By kind, as this node has written them: as coordinator, or as the master before."""
        self.receipts: Counter[str] = Counter(cut_off=0, unclean_election=0)
        """By kind, as this node has made them."""


class MergeMeter:
    """The merges of one server, and what writers waited for them."""

    def __init__(self) -> None:
        self.failures = 0
        """Attempts that failed, or for which the store had no room."""
        self.seconds = Histogram((0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0))
        self.last_s = 0.0
        """Duration of the last merge in the store process, without the wait for its turn.
        Writers are paced by it."""
        self.paced_s = 0.0
        """How long commit groups were held back while a merge ran (dcp.core.store_schedule)."""

    def merged_in(self, seconds: float) -> None:
        """Count a merge."""
        self.last_s = seconds
        self.seconds.observe(seconds)


class CompactionMeter:
    """The compactions of one server."""

    def __init__(self) -> None:
        self.seconds = Histogram()
        """One slice; merges run between slices."""
        self.dropped_versions = 0
        """Versions dropped, tombstones included."""
        self.dropped_tombstones = 0

    def sliced_in(self, seconds: float, versions: int, tombstones: int) -> None:
        """Count a slice, and what it dropped."""
        self.seconds.observe(seconds)
        self.dropped_versions += versions
        self.dropped_tombstones += tombstones


class Meter:
    """The numbers of one server."""

    def __init__(self, slow_s: float = SLOW_AFTER_S) -> None:
        self.cluster = ClusterMeter()
        self.tracing: Tracing | None = None
        """None: nobody makes spans (setting otel)."""
        self.slow = SlowOperations(slow_s)
        self.last_rollbacks = LastRollbacks()
        self.received_bytes = 0
        self.sent_bytes = 0
        self.answers = 0
        self.answer_seconds = Histogram()
        """From reading a batch of requests to writing its answers; one per batch."""
        self.changes = 0
        """Entries of committed groups."""
        self.change_bytes = 0
        """Their bytes in the log."""
        self.groups = 0
        self.sync_seconds = SlowHistogram("a sync of the log", self.slow)
        self.merges = MergeMeter()
        self.compactions = CompactionMeter()
        self.refusals: Counter[str] = Counter()
        """By status name."""
        self.admin_refusals: Counter[str] = Counter()
        """Refused requests to the admin interface, by HTTP status."""
        self.admin_closed: Counter[str] = Counter(late=0, crowded=0)
        """Connections to the admin interface that the server closed, by reason."""
        self.rollbacks: Counter[str] = Counter()
        """By kind of the reason (failover.rules.rollback)."""
        self.keeps: dict[str, Counter[str]] = {}
        """By consumer that deletions are kept for: partitions of this node by state."""
        self.session_failures = 0
        """Connections that ended because of a bug."""
        self.housekeeping_failures: Counter[str] = Counter()
        """By task."""
        self.faults = 0
        self.failovers = 0

    def noted(self, event: str, fields: dict[str, object]) -> None:
        """Count an event that a session noted."""
        if event == "refused":
            status = fields["status"]
            assert isinstance(status, int)
            self.refusals[Status(status).name] += 1
        elif event == "rollback":
            self.rollbacks[str(fields["kind"])] += 1
            self.last_rollbacks.note(fields, time.time())
        elif event == "fault":
            self.faults += 1

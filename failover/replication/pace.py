"""How fast members are, and what this node makes of that: how fast it fills copies elsewhere, which
members are too slow to stay in sync, and how long it waits for a silent one. Sans-IO.

A copy that is filled for the first time can wait; the writes that go on must not wait for it
(`FillPace`, `FillRate`). A slow disk of one replica delays the answer of every write (`Lateness` of
`LateMembers`). A node that gets little of a processor lives; it is only late (`HeardMasters`), and
it blames nobody else for being late (`allowance_ns`, `is_starved`).

Who calls it: `failover.replication.master` at every tick, `failover.replication.feed` for
what it fills, `failover.replication.replica` for what it hears of masters.

Invariants
- the rate is between FLOOR_BYTES_PER_S (or the setting, if that is lower) and the setting: a fill
  makes progress whatever is slow. It falls once in REST_NS at most: what was sent before is still
  on its way;
- a member is SLOW only if each acknowledgement of a full `lag_max` was late;
- no evidence comes from a time in which this process stood still, or got too little of a processor:
  then it reads acknowledgements late, and the members on its machine give them late, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from failover.coordinator.clock import RanTime
from failover.replication.progress import AckDelays
from failover.rules.isr import NOBODY_LATE, Lateness
from vbucket.engine.resync import Looks

FLOOR_BYTES_PER_S: Final = 1 << 20
"""A gigabyte takes 17 minutes. That is a few percent of a core on each side."""
START_BYTES_PER_S: Final = 4 << 20
"""The first rate of a fill. An idle node reaches 32 MiB/s within a second."""
CEILING_BYTES_PER_S: Final = 1 << 30
"""The rate without a setting: more than a node reads or a network takes."""
STARTING_GROWTH: Final = 1.25
STEP_BYTES_PER_S: Final = 128 << 10
"""What a steady rate grows by at each look: 1.25 MiB/s in a second."""
FALL: Final = 0.5
REST_NS: Final = 300_000_000
"""Time from a fall to the next one."""
RESTART_NS: Final = 10_000_000_000
"""A rate that has not fallen for so long starts again: writers may have gone."""
SLOW_RATIO: Final = 1.5
"""Above this multiple of what is usual, something is slow: the longest of some tens of groups is
compared, and writes wait for other things, too."""
SLOW_MIN_NS: Final = 10_000_000
"""Nothing is slow below this: it is less than the turns of a busy loop differ by."""
LEARNED: Final = 1 / 16
"""The weight of a look in what is usual."""


class _Measure:
    """Something that a fill may make slow."""

    def __init__(self) -> None:
        self._usual_ns = 0.0

    @property
    def slow_ns(self) -> float:
        """From where on it is slow."""
        return max(SLOW_MIN_NS, SLOW_RATIO * self._usual_ns)

    def learn(self, took_ns: int | None) -> None:
        """Take note of what is usual."""
        if took_ns is not None:
            self._usual_ns += LEARNED * (took_ns - self._usual_ns)

    def is_slow(self, took_ns: int | None) -> bool:
        """Whether this is more than usual; None: nothing was measured."""
        return took_ns is not None and took_ns > self.slow_ns


class FillRate:
    """How fast this node may fill new copies, by what that does to writes.

        STARTING   the rate grows by a quarter at each look, until something becomes slow
        STEADY     it grows by small steps, and falls by half when something becomes slow

    Two things are measured: how long replicas take to acknowledge a commit group, and how late this
    node's event loop is. Groups and fill share links, processors and disks, so the acknowledgements
    show what a fill does on both sides. Each is compared with what is usual without a fill: a disk
    that is slow in any case stops no fill. What is usual is learned while no copy is filled, and
    while the rate is the lowest there is. So a node that is slow for another reason gets its rate
    back.

    `most`: the setting, bytes a second; 0: without a limit.
    """

    def __init__(self, most: int) -> None:
        self.bytes_per_s = float(START_BYTES_PER_S)
        self.limit(most)
        self._acknowledgements = _Measure()
        self._loop = _Measure()
        self._is_starting = True
        self._fell_ns: int | None = None
        """When the rate fell last, or a fill began again."""

    def limit(self, most: int) -> None:
        """Set another `most`."""
        self._most = most or CEILING_BYTES_PER_S
        self._least = min(FLOOR_BYTES_PER_S, self._most)
        self.bytes_per_s = min(self.bytes_per_s, float(self._most))

    def look(
        self, now_ns: int, *, acknowledged_ns: int | None, lag_ns: int | None, is_filling: bool
    ) -> None:
        """Take what was measured since the last look: how long the slowest acknowledgement of a
        group took, and how late the event loop was at most. None: there was none.
        """
        measured = ((self._acknowledgements, acknowledged_ns), (self._loop, lag_ns))
        if not is_filling:
            self._is_starting, self._fell_ns = True, None
            self.bytes_per_s = float(min(START_BYTES_PER_S, self._most))
        elif any(measure.is_slow(took_ns) for measure, took_ns in measured):
            self._fall(now_ns)
        else:
            self._grow(now_ns)
        if not is_filling or self.bytes_per_s <= self._least:
            for measure, took_ns in measured:
                measure.learn(took_ns)
        assert self._least <= self.bytes_per_s <= self._most

    def _fall(self, now_ns: int) -> None:
        self._is_starting = False
        if self._fell_ns is None or now_ns - self._fell_ns >= REST_NS:
            self._fell_ns = now_ns
            self.bytes_per_s = max(self._least, FALL * self.bytes_per_s)

    def _grow(self, now_ns: int) -> None:
        if self._fell_ns is not None and now_ns - self._fell_ns >= RESTART_NS:
            self._is_starting = True
        if self._is_starting:
            grown = STARTING_GROWTH * self.bytes_per_s
        else:
            grown = self.bytes_per_s + STEP_BYTES_PER_S
        self.bytes_per_s = min(self._most, grown)


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
    """How fast this node fills copies on other nodes: bytes a second, shared by all links.

    What a full copy has missed comes at full speed: until it has that, the partition has a copy
    less.

    Links that have something to fill share the rate equally. Each has an allowance, which grows
    with time up to BURST_NS of its share, and may be overdrawn by one message. So the rate holds on
    average whatever the size of messages. A link waits for the next acknowledgement or tick, and
    not for a timer.

    Groups wait behind what fills on the same link. So no more of it is on its way than the link may
    send within ON_THE_WAY_NS: a replica that stands still for a merge does not collect more.

    Copies that are full join their in-sync sets together, once in JOIN_NS. Each alone would be a
    transaction of the metadata store, and every node takes each of them over.

    `bytes_per_s` bounds the rate; 0: only what writes bear does.
    """

    def __init__(self, bytes_per_s: int) -> None:
        self.rate = FillRate(bytes_per_s)
        self.looks = Looks()
        """For copies that go on where deletions are purged."""
        self._links: dict[str, _Allowance] = {}
        self._lag_ns: int | None = None
        """How late the event loop was at most since the last look."""
        self.sent_bytes = 0
        """What was sent for copies that are filled."""
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

    def take_join(self, now_ns: int) -> bool:
        """Return whether copies that are full may join now. Call it at every tick."""
        may = self._joined_ns is None or now_ns - self._joined_ns >= JOIN_NS
        if may:
            self._joined_ns = now_ns
        return may

    def renew(self, link: str, now_ns: int, on_the_way: int = 0) -> bool:
        """Renew a link's allowance; return whether it may send something for a copy that is being
        filled. `on_the_way`: bytes of such copies that it has sent, and that are not acknowledged.
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
        self.sent_bytes += size
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

    def __init__(self, pace: FillPace | None, member: str, section_bytes: int) -> None:
        """`section_bytes`: entries in a message of a copy that is not filled."""
        self._pace = pace
        self._member = member
        self._section_bytes = section_bytes
        self._waiting: dict[int, None] = {}
        """Partitions that wait until more may be sent, in turn."""
        self._on_the_way = 0

    def renew(self, now_ns: int) -> bool:
        """Renew the link's allowance; return whether it may send for a copy that is filled."""
        return self._pace is None or self._pace.renew(self._member, now_ns, self._on_the_way)

    def may_look(self, now_ns: int, documents: int) -> bool:
        """Return whether so many documents may be looked through now, for any link."""
        return self._pace is None or self._pace.looks.take(now_ns, documents)

    def wait(self, vb_id: int) -> None:
        """A partition waits until more may be sent."""
        self._waiting[vb_id] = None

    def next_is_due(self, now_ns: int) -> bool:
        """Return whether a partition has waited, and need not wait any more."""
        return bool(self._waiting) and self.renew(now_ns)

    def take_next(self) -> int:
        """Return the partition that has waited longest."""
        vb_id = next(iter(self._waiting))
        del self._waiting[vb_id]
        return vb_id

    def section_bytes(self, *, is_filling: bool) -> int:
        """Return how many bytes of entries from a cursor one message has."""
        small = FILL_SECTION_BYTES if is_filling else self._section_bytes
        return min(self._section_bytes, small)

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


LATE_DIVISOR: Final = 4
"""A member is late above this part of `replica_lag_max`: 250 ms by default. A sync takes some
milliseconds; a disk that is shared and busy, some tens."""
RETURN_LAGS: Final = 5
"""How long a slow member must not be late before it may join again: a disk that is slow every few
seconds would else come and go, and each time delay the answers for `replica_lag_max`."""
STOOD_STILL_NS: Final = 500_000_000
"""Ticks come every 100 ms. After a longer pause this process was late itself."""


class LateMembers:
    """Which members acknowledge so late that they must leave their in-sync sets.

        PROMPT ── late for lag_max, and still late ──> SLOW
        SLOW ──── not late for RETURN_LAGS x lag_max ──> PROMPT

    Each partition alone may not show it: with rare writes a replica has all of them again and
    again. So a link is looked at with all its partitions together. A member is late while a message
    with changes waits for its acknowledgement for longer than a quarter of `replica_lag_max`, or
    had to wait so long.
    """

    def __init__(self, lag_max_ns: int, now_ns: int) -> None:
        self._late_ns = lag_max_ns // LATE_DIVISOR
        self._patience_ns = lag_max_ns - self._late_ns
        self._return_ns = RETURN_LAGS * lag_max_ns
        self._late: dict[str, tuple[int, int]] = {}
        """Member -> since when, and when last, it was late."""
        self._slow: dict[str, int] = {}
        """Member -> when it was late last."""
        self._looked_ns = now_ns

    def look(
        self, now_ns: int, delays: Mapping[str, AckDelays], *, is_starved: bool = False
    ) -> Lateness:
        """Take what the links have seen since the last look. `is_starved`: this process did not run
        for a good part of the time.
        """
        stood_still = is_starved or now_ns - self._looked_ns > STOOD_STILL_NS
        self._looked_ns = now_ns
        if stood_still:
            self._late.clear()
        for member, delay in delays.items():
            acked_ns, waiting_ns = delay.take(now_ns)
            if stood_still:
                continue
            if max(acked_ns or 0, waiting_ns) > self._late_ns:
                self._was_late(member, now_ns)
            elif acked_ns is not None:
                self._late.pop(member, None)
        for member, (_, last_ns) in tuple(self._late.items()):
            if now_ns - last_ns >= self._return_ns:  # nothing was written since
                del self._late[member]
        for member, last_ns in tuple(self._slow.items()):
            if now_ns - last_ns >= self._return_ns:
                del self._slow[member]
        if not self._late and not self._slow:
            return NOBODY_LATE
        return Lateness(frozenset(self._late), frozenset(self._slow))

    def _was_late(self, member: str, now_ns: int) -> None:
        since_ns = self._late.get(member, (now_ns, 0))[0]
        self._late[member] = since_ns, now_ns
        if member in self._slow or now_ns - since_ns >= self._patience_ns:
            self._slow[member] = now_ns


LOST_TIMES: Final = 3
"""Silent members get back what was lost here, and as much again for each way of a question and its
answer."""
STARVED_WINDOW_NS: Final = 5_000_000_000
STARVED_PART: Final = 10
"""A process is starved if it did not run for a tenth of the window."""


def allowance_ns(ran: RanTime, lag_max_ns: int) -> int:
    """Return how much later than usual a silent member leaves its in-sync set."""
    return LOST_TIMES * (ran.stretched(lag_max_ns) - lag_max_ns)


def is_starved(ran: RanTime, now_ns: int) -> bool:
    """Return whether this process gets so little of a processor that it judges nobody's pace."""
    return ran.lost_since(now_ns - STARVED_WINDOW_NS) * STARVED_PART > STARVED_WINDOW_NS


BEATS_BETWEEN: Final = 2
"""A silence of so many heartbeats misses none: the ticks of both nodes lie between."""
GAPS_PATIENCE: Final = 3
"""Patience, in times of the longest silence."""
PATIENCE_MAX: Final = 10
"""The longest patience, in times of that for a node that was never late."""
REMEMBERED_NS: Final = 15_000_000_000
"""A silence counts for this time at least, and for twice as long at most."""


class HeardGaps:
    """How long a master's node is silent between two of its words.

    A node that gets little of a processor sends its heartbeats late, again and again. An election
    of its partitions would only make more work for all. So patience grows with the silences that
    were heard of last: three times the longest one.
    """

    def __init__(self) -> None:
        self._since_ns = 0
        """When the longest silence was looked for anew."""
        self._longest_ns = 0
        self._before_ns = 0
        """The longest silence of the time before that."""
        self.missed_beats = 0
        """Heartbeats that did not come in time."""

    def note(self, now_ns: int, gap_ns: int, beat_ns: int) -> None:
        """The node was heard, after a silence in which this process ran for `gap_ns`. It has
        something to say every `beat_ns`, and both sides look at it half as often.
        """
        self._turn(now_ns)
        self.missed_beats += max(0, gap_ns // beat_ns - BEATS_BETWEEN)
        self._longest_ns = max(self._longest_ns, gap_ns)

    def patience_ns(self, now_ns: int, usual_ns: int) -> int:
        """Return how long to wait for the node; `usual_ns`: for one that was never late."""
        self._turn(now_ns)
        late_ns = GAPS_PATIENCE * max(self._longest_ns, self._before_ns)
        return min(max(usual_ns, late_ns), PATIENCE_MAX * usual_ns)

    def _turn(self, now_ns: int) -> None:
        elapsed_ns = now_ns - self._since_ns
        if elapsed_ns >= REMEMBERED_NS:
            self._before_ns = self._longest_ns if elapsed_ns < 2 * REMEMBERED_NS else 0
            self._longest_ns, self._since_ns = 0, now_ns


class HeardMasters:
    """When the nodes of masters were last heard, and how long this node waits for a silent one.

    Nobody counts as heard before this process began. All answers are as of the time that `at` was
    called with.
    """

    def __init__(
        self, member: str, ran: RanTime, unheard_ns: int, beat_ns: int, now_ns: int
    ) -> None:
        """`member`: this node, which hears no master where it is one itself. `unheard_ns`: a master
        that was silent for so long is unheard. `beat_ns`: time between its heartbeats.
        """
        self._member = member
        self._ran = ran
        self._unheard_ns = unheard_ns
        self._beat_ns = beat_ns
        self._now_ns = self._started_ns = now_ns
        self._heard_ns: dict[str, int] = {}
        self._gaps: dict[str, HeardGaps] = {}
        """How long the nodes are silent between two words."""

    def at(self, now_ns: int) -> None:
        """It is this late; monotonic nanoseconds."""
        self._now_ns = now_ns

    def begin(self, member: str, now_ns: int) -> None:
        """A member becomes a master: it has as much time for its first word as for any other."""
        self._heard_ns[member] = now_ns

    def note(self, member: str, heard_ns: int, *, is_refused: bool) -> None:
        """A master's node was last heard then. One that refuses connections (`is_refused`) has no
        process: nobody waits for a word of it.
        """
        before_ns = self._heard_ns.get(member, 0)
        if heard_ns > before_ns:
            self._note_gap(member, before_ns, heard_ns)
        self._heard_ns[member] = max(before_ns, heard_ns)
        if is_refused:
            since_ns = self._now_ns - self._unheard_ns
            self._heard_ns[member] = min(self._heard_ns[member], since_ns)

    def _note_gap(self, member: str, before_ns: int, heard_ns: int) -> None:
        gaps = self._gaps.setdefault(member, HeardGaps())
        if before_ns:
            gap_ns = heard_ns - before_ns - self._ran.lost_since(before_ns)
            gaps.note(heard_ns, gap_ns, self._beat_ns)

    def missed_beats(self) -> dict[str, int]:
        """Return how many heartbeats of each master's node did not come in time."""
        return {member: gaps.missed_beats for member, gaps in self._gaps.items()}

    def silence_ns(self, member: str, least_ns: int) -> int:
        """Return how long a node may say nothing on its link: `least_ns`, or longer if it is late
        again and again.
        """
        return self._ran.stretched(max(least_ns, self._patience_ns(member)))

    def _patience_ns(self, member: str) -> int:
        gaps = self._gaps.get(member)
        unheard_ns = self._unheard_ns
        return unheard_ns if gaps is None else gaps.patience_ns(self._now_ns, unheard_ns)

    def is_suspect(self, master: str | None, *, has_lease: bool) -> bool:
        """Whether a master that is unheard is to be reported. `has_lease`: the metadata store has
        heard of it. Then it may only be slow, and has the time that it lately took.
        """
        if master is None or master == self._member:
            return True
        silence_ns = self._patience_ns(master) if has_lease else self._unheard_ns
        heard_ns = self._heard_ns.get(master, self._started_ns)
        return self._now_ns - heard_ns >= self._ran.stretched(silence_ns)

    def is_unheard(self, master: str | None) -> bool:
        """Whether this master was not heard for a while, or there is none."""
        if master is None or master == self._member:
            return True
        return self._now_ns - self._heard_ns.get(master, self._started_ns) >= self._unheard_ns

    @property
    def unheard_from_ns(self) -> int:
        """When the first node of a master counts as unheard, unless it is heard before. Only nodes
        that are heard now count.
        """
        unheard_ns = self._unheard_ns
        heard = (at_ns for at_ns in self._heard_ns.values() if self._now_ns - at_ns < unheard_ns)
        return min(heard, default=self._now_ns) + unheard_ns

"""The streams of a consumer's connection: their states, requests, rollbacks and retries. Pure.

    NEW -> ASKED -> OPEN -> DONE      finished, or closed for good
             |        |
             +--------+---> WAITING   requested again at `retry_at_ns`
             +--------+---> GONE      this node does not serve it, or the user paused it
             +------------> HELD      rolled back; the user decides what to do
             +------------> FAILED    refused for good

`clients.streaming` speaks to the server and has the position (its cursor). This module decides what
a consumer does about each outcome. `clients.consumer.core` decodes the changes, checks that items
are inside the open snapshot, in order, and of this partition (`misplaced`, `mixed_up`), and owns
`StreamRequests`.

Invariants
- a rollback lowers the seqno or the number of versions, so the number of rounds is bounded;
- a stream that knows several versions waits for the server's answer to x_version_log. If the server
  accepts the list, its first answer is final;
- a removed stream is removed from every table, and late answers have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Final, NamedTuple, cast

from clients.consumer.extensions import Closed, Extensions
from clients.consumer.options import ConsumerOptions
from clients.errors import TEMPORARY_STATUSES, StatusError, StreamViolationError, error_from_status
from clients.event import (
    Deletion,
    Differences,
    Event,
    Mutation,
    Rollback,
    SeqnoAdvanced,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
    StreamFailed,
    StreamOpened,
    SystemEvent,
)
from clients.position import (
    Filter,
    Position,
    Versions,
    are_forgotten,
    clipped,
    rollback_reason,
)
from clients.streaming.mutations import Mutations, decoded
from clients.streaming.outcome import (
    Ahead,
    Damaged,
    Ended,
    Moved,
    Opened,
    Postponed,
    RollbackAsked,
    StreamOutcome,
    Verdict,
)
from clients.streaming.stream_connection import RetriedStream, Setup, StreamConnection
from dcp.wire.frame import Frame, pack_request
from dcp.wire.message import parse_failover_log
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.ids import SEQNO_MAX

Item = Event | Mutations
"""An event, or consecutive mutations of one partition that are not decoded yet."""
RETRY_FIRST_NS: Final = 50_000_000
RETRY_MAX_NS: Final = 5_000_000_000
"""Pause before a refused stream is requested again. It doubles from the first to the longest."""
PASS_OVER_NS: Final = 100_000_000
"""After this pause, the second, a consumer that reads from replicas tries another copy."""
ALL_DAMAGED: Final = "All of its copies answered so. See dcpctl scrub status on their nodes."
MAP_AFTER_NS: Final = 800_000_000
"""From this pause on, the fifth, a newer cluster map is wanted with each refusal. A node that is
cut off from its cluster refuses for as long as one asks it."""
PATIENCE: Final = 5
"""Checks that a stream may wait for its first message while other streams move."""


class PartitionStreamState(Enum):
    """The states of a partition's stream on one connection; the module's drawing has the ways."""

    NEW = auto()
    ASKED = auto()
    OPEN = auto()
    WAITING = auto()
    HELD = auto()
    DONE = auto()
    GONE = auto()
    FAILED = auto()


FINAL_STATES = frozenset({PartitionStreamState.DONE, PartitionStreamState.FAILED})
"""States after which a partition sends nothing more."""


class Wanted(NamedTuple):
    """The position from which to stream a partition; `position` None means from now.

    `compares`: the user holds something of it, and knows no position: compare it first.
    `ceiling`: with `until_now`, the known end; the stream ends there or lower.
    `now_seqno`: the seqno of "now", if it is known before the position is.
    """

    position: Position | None
    ceiling: int | None = None
    now_seqno: int | None = None
    compares: bool = False
    is_last: bool = True
    """Whether no other copy is left to ask if this one cannot read what it has stored."""


class PartitionStream(RetriedStream):
    """One partition's stream: its state, its cursor and its request. `position` None: from now."""

    __slots__ = (
        "ceiling", "compares", "has_position", "is_last", "now_seqno", "state", "target",
    )  # fmt: skip

    def __init__(self, vb_id: int, position: Position | None) -> None:
        super().__init__(vb_id)
        self.state = PartitionStreamState.NEW
        self.compares = False
        """Whether it is compared with what the user holds before it is requested (`Wanted`)."""
        self.target: int | None = None
        """Seqno at which the stream ends (`until_now`); None: it has no end, or it is unknown."""
        self.ceiling: int | None = None
        """The target before a rollback. The new target is not above it."""
        self.now_seqno: int | None = None
        """The seqno of "now" (`Wanted.now_seqno`)."""
        self.is_last = True
        """See `Wanted.is_last`."""
        self.place(position or Position())
        self.has_position = position is not None

    def place(self, position: Position) -> None:
        """Set the position."""
        super().place(position)
        self.has_position = True

    @property
    def is_over(self) -> bool:
        """Whether it needs nothing more from this node: finished, refused for good, or moved."""
        return self.state in FINAL_STATES or self.state is PartitionStreamState.GONE

    def open(self, versions: Versions) -> None:
        """The server accepted. Its failover log replaces the client's."""
        self.state = PartitionStreamState.OPEN
        self.versions = versions
        self.leave_snapshot()

    def move_over(self, mutations: Mutations) -> None:
        """Advance to the last of consecutive mutations, as `move` to each of them."""
        first, last, count = mutations.first_seqno, mutations.last_seqno, len(mutations)
        if first == self.range_end + 1 and last - first >= count:  # a gap, but not before the first
            seqnos = mutations.seqnos()
            dense = next(n for n, seqno in enumerate(seqnos) if seqno != first + n)
            self.advance(first, first + dense - 1, dense)
            first, count = seqnos[dense], count - dense
        self.advance(first, last, count)


class Batch(NamedTuple):
    """The result of one read: items in order, and the positions of their partitions after them."""

    items: list[Item]
    positions: dict[int, Position]
    wire_bytes: int
    """Its bytes as flow control counts them; `ConsumerCore.processed` acknowledges them."""
    markers: dict[int, tuple[int, int]]
    """Snapshots (start, end) that were open when it began, for `advance`."""
    collections: tuple[int, ...] | None = None
    filter: Filter | None = None
    """Collections and filter of the streams that it opens, for the same function."""
    closed: Closed | None = None
    """The cut that its end is; then there may be more of the same read."""

    @property
    def events(self) -> list[Event]:
        """The items, decoded. Changes of this list change the batch."""
        self.items[:] = decoded(self.items)
        return cast("list[Event]", self.items)


def wanted_of(stream: PartitionStream) -> Wanted:
    """Return what another connection needs to continue a stream."""
    ceiling = stream.ceiling if stream.target is None else stream.target
    if stream.has_position:
        return Wanted(stream.position(), ceiling, compares=stream.compares)
    return Wanted(None, ceiling, stream.now_seqno)


def misplaced(stream: PartitionStream, seqno: int) -> StreamViolationError:
    """Return the error for a change whose seqno is outside the open snapshot or out of order."""
    if not stream.marker_end:
        what = f"a change with seqno {seqno} outside any snapshot"
    else:
        what = (
            f"a change with seqno {seqno} after seqno {stream.seqno} in the snapshot"
            f" {stream.marker_start} to {stream.marker_end}"
        )
    return StreamViolationError(what, vb_id=stream.vb_id)


def mixed_up(stream: PartitionStream, vb_id: int) -> StreamViolationError:
    """Return the error for a message that names another partition than its stream. Positions in
    the middle of a batch go by what changes name.
    """
    return StreamViolationError(
        f"a message of partition {vb_id} in the stream of this one, at seqno {stream.seqno}",
        vb_id=stream.vb_id,
    )


def advance(
    positions: dict[int, Position],
    events: Iterable[Event | Mutations],
    markers: Mapping[int, tuple[int, int]],
    collections: tuple[int, ...] | None,
    filter: Filter | None = None,  # noqa: A002 - the word that positions have for it
) -> None:
    """Advance `positions` by events, as the core does while it receives them.

    This computes positions in the middle of a batch. The positions at its end are in the batch.
    `markers`, `collections` and `filter` come from the batch: the snapshots that were open before
    it, and the selection of its new streams.
    """
    streams: dict[int, PartitionStream] = {}
    for event in events:
        stream = streams.get(event.vb_id)
        if stream is None:
            stream = PartitionStream(event.vb_id, positions.get(event.vb_id, Position()))
            streams[event.vb_id] = stream
            if event.vb_id in markers:
                stream.begin_snapshot(*markers[event.vb_id])
        match event:
            case Mutation() | Deletion() | SystemEvent() | SeqnoAdvanced():
                stream.move(event.seqno)
            case Mutations():
                stream.move_over(event)
            case SnapshotStart():
                stream.begin_snapshot(event.start_seqno, event.end_seqno)
            case SnapshotEnd():
                stream.complete_snapshot()
            case StreamOpened():
                stream.open(event.failover_log)
                stream.collections, stream.filter = collections, filter
            case Rollback():
                stream.place(_back_at(stream.position(), event.to_seqno))
            case Differences():
                stream.place(after_differences(event, collections, filter))
            case _:
                stream.leave_snapshot()
    positions.update({vb_id: stream.position() for vb_id, stream in streams.items()})


def after_differences(
    event: Differences,
    collections: tuple[int, ...] | None,
    filter: Filter | None,  # noqa: A002 - the word that positions have for it
) -> Position:
    """Return the position of a user who has taken over in what a partition differs."""
    seqno = event.to_seqno
    if not seqno:
        return Position()
    # A client that is at the start of a snapshot has nothing of it, so this one starts before.
    start = seqno if event.read_seqno == seqno else seqno - 1
    return Position(
        event.failover_log, seqno, start, event.read_seqno, collections=collections, filter=filter
    )


def _back_at(position: Position, seqno: int) -> Position:
    """Return a position after a rollback to `seqno`."""
    if not seqno:
        return Position()
    versions = tuple(version for version in position.versions if version[1] <= seqno)
    is_below = seqno < position.base_seqno
    complete = ((seqno, seqno),) if is_below else clipped(position.complete, seqno)
    base_seqno = min(position.base_seqno, seqno)
    return position._replace(
        versions=versions, seqno=seqno, snap_start=seqno, snap_end=seqno, complete=complete,
        base_seqno=base_seqno,
    )  # fmt: skip


_NOT_STREAMED: Final = FINAL_STATES | {PartitionStreamState.GONE, PartitionStreamState.HELD}


class Homeless(NamedTuple):
    """A partition that this node does not serve. `config` is the configuration it sent, or b"".
    `is_damaged`: it cannot read its copy.
    """

    vb_id: int
    wanted: Wanted
    config: bytes
    is_damaged: bool = False


class Note(NamedTuple):
    """An unusual event, which is logged, and counted in the metrics by kind."""

    kind: str
    """rollback, versions_lost, stream_end_REASON, stream_failed, ahead, moved, damaged, retry,
    stall."""
    vb_id: int
    text: str


class StreamRequests:
    """Requests the streams of one connection, and decides what follows each outcome.

    `on_message` gets the messages of open streams, except their ends.
    """

    def __init__(
        self,
        setup: Setup,
        extensions: Extensions,
        on_message: Callable[[PartitionStream, Frame], None],
        options: ConsumerOptions,
        node: str | None,
    ) -> None:
        self.node = node
        self.on_message = on_message
        self.connection: StreamConnection[PartitionStream] = StreamConnection(setup, self, node)
        self.notes: list[Note] = []
        """Unusual events. The caller empties the list."""
        self.homeless: list[Homeless] = []
        """Partitions that left this node. The caller moves them and empties the list."""
        self.wants_map = False
        """This node refuses for long. The caller asks another one for a map, and resets it."""
        self.pushed_config = b""
        """The newest cluster configuration that the server pushed. The caller resets it."""
        self._known_unfinished: PartitionStream | None = None
        """A stream that was not finished when somebody asked."""
        self.items: list[Item] = []
        """What the present read has brought so far. The core adds to it, and begins each read."""
        self.touched: dict[PartitionStream, tuple[int, int]] = {}
        """The partitions that it affects: stream -> start and end of the snapshot that was open
        before its first item (0 for none). `advance` needs that in the middle of a batch."""
        self.by_vb: dict[int, PartitionStream] = {}
        """Partition -> stream, finished ones included."""
        self._asks_on_rollback = options.asks_on_rollback
        self._stalls = StallWatch(are_aligned=options.cuts)
        self._extensions = extensions
        self._until_now = options.until_now
        self._to_beginning = options.on_rollback == "restart"
        self._is_begun = False
        self._awaiting_seqnos: list[PartitionStream] = []
        self._awaiting_lists: list[PartitionStream] = []
        """Streams that wait for the server's answers to extensions."""

    # -- called by the core ----------------------------------------------------------------------

    def begin(self) -> None:
        """Open the connection and request the partitions that were added."""
        self._is_begun = True
        self.connection.begin()
        self._ask_for(list(self.by_vb.values()))

    def add(self, vb_id: int, wanted: Wanted) -> None:
        """Stream a partition."""
        assert vb_id not in self.by_vb or self.by_vb[vb_id].state is PartitionStreamState.GONE
        stream = PartitionStream(vb_id, wanted.position)
        stream.ceiling, stream.now_seqno = wanted.ceiling, wanted.now_seqno
        stream.compares = wanted.compares
        stream.is_last = wanted.is_last
        self.by_vb[vb_id] = stream
        if self._is_begun:
            self._ask_for([stream])

    def tick(self, now_ns: int) -> None:
        """Request streams again whose pause is over."""
        self._ask_for(self.connection.due(now_ns))

    def closed(self) -> Closed | None:
        """Return the cut that came just now, once; None: none did."""
        connection = self.connection
        told, connection.closed_time = connection.closed_time, None
        if told is None:
            return None
        reached = [stream.vb_id for stream in connection.open.values()]
        return Closed(*told, reached, is_whole=len(reached) == len(self.followed()))

    def followed(self) -> list[int]:
        """Return the partitions that are not over, those that were rolled back and wait too."""
        return [vb_id for vb_id, stream in self.by_vb.items() if not stream.is_over]

    def is_held(self, vb_id: int) -> bool:
        """Whether a partition was rolled back and waits for `go_on`."""
        stream = self.by_vb.get(vb_id)
        return stream is not None and stream.state is PartitionStreamState.HELD

    def held(self) -> dict[int, Wanted]:
        """Return the partitions that were rolled back and wait for `go_on`."""
        return {
            vb_id: wanted_of(stream)
            for vb_id, stream in self.by_vb.items()
            if stream.state is PartitionStreamState.HELD
        }

    def unfinished(self) -> dict[int, Wanted]:
        """Return the partitions that another connection must continue, and from where."""
        return {
            vb_id: wanted_of(stream)
            for vb_id, stream in self.by_vb.items()
            if stream.state not in _NOT_STREAMED
        }

    @property
    def is_finished(self) -> bool:
        """Whether every partition is finished (with `until_now`), refused for good, or moved."""
        known = self._known_unfinished
        if known is not None and not known.is_over and self.by_vb.get(known.vb_id) is known:
            return False  # this is asked after every read: do not look at all of them each time
        self._known_unfinished = next(
            (stream for stream in self.by_vb.values() if not stream.is_over), None
        )
        return self._known_unfinished is None

    def go_on(self, vb_id: int, position: Position | None) -> None:
        """Request a held partition again, from `position` or from the rollback's position."""
        stream = self.by_vb[vb_id]
        assert stream.state is PartitionStreamState.HELD
        if position is not None:
            stream.place(position)
        stream.compares = False
        self._again(stream)

    def remove(self, vb_id: int) -> Wanted | None:
        """Stop streaming a partition; return its position after all received events.

        None if it is not streamed here, or is finished.
        """
        stream = self.by_vb.pop(vb_id, None)
        if (
            stream is None
            or stream.state in FINAL_STATES
            or stream.state is PartitionStreamState.GONE
        ):
            return None
        wanted = wanted_of(stream)
        self._take_off(stream)
        stream.state = PartitionStreamState.GONE
        return wanted

    def _take_off(self, stream: PartitionStream) -> None:
        """Forget the requests of a stream, and close it at the server."""
        self.connection.forget(stream)
        for waiting in (self._awaiting_seqnos, self._awaiting_lists):
            if stream in waiting:
                waiting.remove(stream)

    def restart_stalled(self, high_seqnos: dict[int, int]) -> list[int]:
        """Close stalled streams and request them again; return their partitions."""
        stalled = self._stalls.check(list(self.connection.open.items()), high_seqnos)
        for stream in stalled:
            high = high_seqnos.get(stream.vb_id)
            text = f"no progress at seqno {stream.seqno}, the server is at {high}: requesting again"
            self.notes.append(Note("stall", stream.vb_id, text))
            self._take_off(stream)
            stream.leave_snapshot()
            self._again(stream)
        return [stream.vb_id for stream in stalled]

    # -- asking for streams --------------------------------------------------------------------

    def _touch(self, stream: PartitionStream) -> None:
        """Note that this read affects a partition."""
        self.touched.setdefault(stream, (stream.marker_start, stream.marker_end))

    def _ask_for(self, streams: list[PartitionStream]) -> None:
        """Request streams. If their high seqnos are needed, ask for those first."""
        unsure = []
        for stream in streams:
            if not stream.has_position or (self._until_now and stream.target is None):
                stream.state = PartitionStreamState.ASKED
                unsure.append(stream)
            else:
                self._request(stream)
        if unsure:
            if not self._awaiting_seqnos:
                self.connection.ask_high_seqnos(self._on_seqnos, self._on_no_seqnos)
            self._awaiting_seqnos += unsure

    def _request(self, stream: PartitionStream) -> None:
        position = stream.position()
        stream.state = PartitionStreamState.ASKED
        if not self._extensions.is_for(position):
            self._begin_anew(stream)
        elif stream.compares:
            self._hold_back(stream, lambda: self._compare_first(stream))
        elif self._extensions.must_wait(position):
            self._awaiting_lists.append(stream)
        else:
            # Who has compared is inside a snapshot, and complete at its end.
            end_seqno = (
                SEQNO_MAX if stream.target is None else max(stream.target, position.snap_end)
            )
            document = self._extensions.request_document()
            self.connection.request(stream, position, end_seqno, document)

    def _begin_anew(self, stream: PartitionStream) -> None:
        """The position belongs to other collections: roll back to 0."""
        held, wanted = (
            ", ".join(map(str, ids or ())) or "all"
            for ids in (stream.collections, self._extensions.collections)
        )
        why = (
            f"the position is for the collections {held}, but {wanted} are followed: they were"
            " created again, or others were chosen"
        )

        self._hold_back(stream, lambda: self._roll_back(stream, RollbackAsked(0, ()), why=why))

    def _compare_first(self, stream: PartitionStream) -> None:
        """The user holds something of the partition and knows no position: let it be compared."""
        self.items.append(Rollback(stream.vb_id, 0, 0, 0, "no position is known", ()))
        stream.state = PartitionStreamState.HELD

    def _hold_back(self, stream: PartitionStream, then: Callable[[], None]) -> None:
        """Do something that makes an event, when a NOOP is answered: events must be in a batch, and
        only a read creates a batch.
        """

        def on_reply(_frame: Frame) -> None:
            if stream.state is PartitionStreamState.ASKED:
                self._touch(stream)
                then()

        self.connection.requests.send(
            lambda opaque: pack_request(Opcode.NOOP, opaque=opaque), on_reply
        )

    def _again(self, stream: PartitionStream) -> None:
        """Request again at once. With `until_now`, ask for the end again: it may have changed."""
        if stream.target is not None:
            stream.ceiling, stream.target = stream.target, None
        self._ask_for([stream])

    def _retry_later(self, stream: PartitionStream) -> None:
        stream.state = PartitionStreamState.WAITING
        self.connection.later(stream, RETRY_FIRST_NS, RETRY_MAX_NS)

    def _postpone(self, stream: PartitionStream, error: StatusError) -> None:
        """The server cannot do it now: ask again later, and after a while for a newer map, too."""
        self.notes.append(Note("retry", stream.vb_id, f"{error.what}: retrying later"))
        if self._extensions.from_replicas and stream.retry_ns >= PASS_OVER_NS:
            self._give_up(stream, b"")
            return
        self._retry_later(stream)
        if stream.retry_ns >= MAP_AFTER_NS:
            self.wants_map = True

    def _give_up(self, stream: PartitionStream, config: bytes) -> None:
        stream.state = PartitionStreamState.GONE
        self.homeless.append(Homeless(stream.vb_id, wanted_of(stream), config))
        text = f"no longer on {self.node or 'this node'}, at seqno {stream.seqno}"
        self.notes.append(Note("moved", stream.vb_id, text))

    def _leave_damaged(self, stream: PartitionStream, why: str) -> None:
        """The node cannot read its copy: another one goes on where the stream is."""
        stream.state = PartitionStreamState.GONE
        self.homeless.append(Homeless(stream.vb_id, wanted_of(stream), b"", is_damaged=True))
        text = f"{why}: asking another copy than {self.node or 'this one'}, at seqno {stream.seqno}"
        self.notes.append(Note("damaged", stream.vb_id, text))

    # -- outcomes of streams ---------------------------------------------------------------------

    def on_outcome(self, stream: PartitionStream, outcome: StreamOutcome) -> None:
        """Process the answer to a stream request, or the end of a stream."""
        self._touch(stream)
        match outcome:
            case Opened():
                self._on_opened(stream, outcome)
            case RollbackAsked():
                self._roll_back(stream, outcome)
            case Moved():
                self._give_up(stream, outcome.config)
            case Postponed():
                self._postpone(stream, outcome.error)
            case Damaged() if not stream.is_last:
                self._leave_damaged(stream, outcome.error.what)
            case Damaged() if self._extensions.from_replicas:
                self._fail(stream, Status.EINTERNAL, str(outcome.error), ALL_DAMAGED)
            case Ahead() if stream.seqno:
                self._on_ahead(stream, outcome.error)
            case Ended():
                self._on_end(stream, outcome)
            case _:
                error = outcome.error
                assert error.status is not None
                self._fail(stream, error.status, str(error), error.hint)

    def _on_opened(self, stream: PartitionStream, outcome: Opened) -> None:
        stream.open(outcome.versions)
        stream.collections = self._extensions.collections
        stream.filter = self._extensions.filter
        self.items.append(
            StreamOpened(stream.vb_id, stream.versions, stream.seqno, stream.snap_start)
        )

    def _on_ahead(self, stream: PartitionStream, error: StatusError) -> None:
        """The position is above the server's high seqno: roll back to a state that both have."""

        def on_seqnos(high_seqnos: dict[int, int]) -> None:
            if stream.state is not PartitionStreamState.ASKED:
                return
            high = high_seqnos.get(stream.vb_id)
            if high is None:
                self._give_up(stream, b"")
                return
            text = f"ERANGE at seqno {stream.seqno}, the server is at {high} ({error.what})"
            self.notes.append(Note("ahead", stream.vb_id, text))
            self._touch(stream)
            asked = RollbackAsked(high if high < stream.seqno else 0, ())
            self._roll_back(stream, asked, why=text)

        def on_postponed(refusal: StatusError) -> None:
            if stream.state is PartitionStreamState.ASKED:
                self._postpone(stream, refusal)

        self.connection.ask_high_seqnos(on_seqnos, on_postponed)

    def _roll_back(self, stream: PartitionStream, asked: RollbackAsked, *, why: str = "") -> None:
        assert stream.seqno, "at seqno 0 there is nothing to go back from"
        is_exact = self._extensions.has_version_lists or bool(why)
        before = stream.roll_back(
            asked, is_exact=is_exact, to_beginning=self._to_beginning, vb_id=stream.vb_id
        )
        if stream.seqno < before.seqno:
            reason = why or rollback_reason(before, asked.seqno, stream.seqno, asked.versions)
            text = f"from seqno {before.seqno} to {stream.seqno}: {reason}"
            self.notes.append(Note("rollback", stream.vb_id, text))
            if not asked.seqno and are_forgotten(before.versions, asked.versions):
                text = f"the server keeps its newest {len(asked.versions)} versions, and none of"
                self.notes.append(Note("versions_lost", stream.vb_id, f"{text} this consumer's"))
            self.items.append(
                Rollback(
                    stream.vb_id, stream.seqno, asked.seqno, before.seqno, reason, asked.versions
                )
            )  # fmt: skip
            if self._asks_on_rollback:
                stream.state = PartitionStreamState.HELD
                return
        self._again(stream)

    def _on_end(self, stream: PartitionStream, ended: Ended) -> None:
        """The server ended a stream. Request it again, unless it is finished or empty.

        If that request is refused for good, there is a StreamFailed.
        """
        stream.leave_snapshot()
        is_whole = ended.verdict is Verdict.DONE and stream.target is not None
        will_resume = not is_whole and ended.verdict is not Verdict.EMPTY
        event = StreamEnded(stream.vb_id, ended.reason, will_resume)
        self.items.append(event)
        if not is_whole:
            then = "requesting again" if will_resume else "for good"
            text = f"{event.reason_text} at seqno {stream.seqno}: {then}"
            self.notes.append(Note(f"stream_end_{ended.reason}", stream.vb_id, text))
        if not will_resume:
            stream.state = PartitionStreamState.DONE
        elif ended.verdict is Verdict.DAMAGED and not stream.is_last:
            self._leave_damaged(stream, event.reason_text)
        elif ended.verdict is Verdict.MOVED:
            self._give_up(stream, b"")
        elif ended.verdict is Verdict.BRANCHED:
            self._again(stream)
        else:
            self._retry_later(stream)

    def _fail(self, stream: PartitionStream, status: int, what: str, hint: str) -> None:
        stream.state = PartitionStreamState.FAILED
        self._touch(stream)
        self.items.append(StreamFailed(stream.vb_id, status, what, hint))
        self.notes.append(
            Note("stream_failed", stream.vb_id, "; ".join(filter(None, (what, hint))))
        )

    # -- other answers -------------------------------------------------------------------------

    def on_control(self, key: bytes, status: int) -> None:
        """Process the server's answer to an extension; request the streams that waited for it."""
        self._extensions.answered(key, status)
        streams, self._awaiting_lists = self._awaiting_lists, []
        for stream in streams:
            self._request(stream)

    def on_config(self, config: bytes) -> None:
        """Keep the cluster configuration that the server pushed."""
        self.pushed_config = config

    def _on_no_seqnos(self, error: StatusError) -> None:
        """The node cannot tell its seqnos now: the streams that need them wait."""
        streams, self._awaiting_seqnos = self._awaiting_seqnos, []
        for stream in streams:
            self._postpone(stream, error)

    def _on_seqnos(self, high: dict[int, int]) -> None:
        streams, self._awaiting_seqnos = self._awaiting_seqnos, []
        for stream in streams:
            seqno = high.get(stream.vb_id)
            if seqno is None:
                self._give_up(stream, b"")
                continue
            if self._until_now:
                stream.target = seqno if stream.ceiling is None else min(stream.ceiling, seqno)
            if stream.has_position:
                self._request(stream)
            else:
                # "now" must not be later than the seqno that an earlier connection learned.
                known = stream.now_seqno
                stream.now_seqno = seqno if known is None else min(known, seqno)
                self._ask_failover_log(stream, stream.now_seqno)

    def _ask_failover_log(self, stream: PartitionStream, seqno: int) -> None:
        def on_log(frame: Frame) -> None:
            if stream.state is not PartitionStreamState.ASKED:
                return
            if frame.status == Status.NOT_MY_VBUCKET:
                self._give_up(stream, frame.value)
                return
            what = "DCP_GET_FAILOVER_LOG"
            if frame.status in TEMPORARY_STATUSES:
                error = error_from_status(frame.status, what, body=frame.value, node=self.node)
                self._postpone(stream, error)
                return
            self.connection.requests.check(frame, what)
            versions = tuple(parse_failover_log(frame.value))
            stream.place(Position(versions, seqno, seqno, seqno, base_seqno=seqno))
            self._touch(stream)
            self._request(stream)

        self.connection.requests.send(
            lambda opaque: pack_request(
                Opcode.DCP_GET_FAILOVER_LOG, vb_id=stream.vb_id, opaque=opaque
            ),
            on_log,
        )


class StallWatch:
    """Finds streams that are behind and do not move. One per connection.

    A connection calls it regularly with the server's high seqnos, but only while no received data
    waits for the user. So a slow user does not look like a stalled stream.

    A stream is stalled if it was behind the server's high seqno at one check, or its end was above
    that, and it has not moved by the next. A server serves long backlogs in turns. So a stream that
    has sent nothing yet gets `PATIENCE` checks while other streams move.
    """

    def __init__(self, *, are_aligned: bool = False) -> None:
        self._are_aligned = are_aligned
        """Whether streams wait for each other at cuts: then one is stalled only if all are."""
        self._seen: dict[int, tuple[int, int, int, bool]] = {}
        """Partition -> (opaque, seqno, checks behind without a move, whether it ever moved)."""

    def check(
        self, streams: Iterable[tuple[int, PartitionStream]], high_seqnos: Mapping[int, int]
    ) -> list[PartitionStream]:
        """Return the stalled streams. `streams`: (opaque, stream) of all open streams."""
        before, self._seen = self._seen, {}
        is_quiet = True
        late: list[tuple[int, PartitionStream]] = []
        for opaque, stream in streams:
            high = high_seqnos.get(stream.vb_id, 0)
            end = high if stream.target is None else min(high, stream.target)
            # Above it: the partition was branched since the end was asked for.
            is_beyond = 0 < high < (stream.target or 0)
            known, seqno, count, has_moved = before.get(
                stream.vb_id, (opaque, stream.seqno, 0, False)
            )
            if known != opaque:
                seqno, count, has_moved = stream.seqno, 0, False
            if stream.seqno > seqno:
                count, has_moved, is_quiet = 0, True, False
            count = count + 1 if is_beyond or stream.seqno < end else 0
            self._seen[stream.vb_id] = (opaque, stream.seqno, count, has_moved)
            if count > 1:
                late.append((opaque, stream))
        stalled = []
        for _, stream in late:
            _, _, count, has_moved = self._seen[stream.vb_id]
            if is_quiet or (not self._are_aligned and (has_moved or count > PATIENCE)):
                stalled.append(stream)
                del self._seen[stream.vb_id]
        return stalled

"""The master's side of a replication link: what one replica's node gets. Sans-IO.

Of each partition that the replica follows there is a `Progress` (`FedStreams`). A commit group goes
as one message if all of its partitions that the replica follows are in state REPLICATE
(`send_group`), and section by section otherwise (`group_synced`). With a group nothing is done for
each partition: acknowledgements and high watermarks come and go by number.

Below the master's history floor versions may be gone. A replica that is there gets what is left up
to the floor as a snapshot: its seqnos have gaps, and it is of use only when it is complete. The
floor may rise meanwhile; then so does the end of the snapshot. Nothing is held back for it. Only
deletions that are purged meanwhile can make a part useless (`Progress.is_overtaken`): then the
stream is ended, and the answer to the next request sends the replica to 0.

Who calls it: the session, the connection, which pumps messages (as of `dcp.stream.producer`), and
the node core, which reports synced groups and answers what the feed asks (`MasterSide`).

Invariants
- what is sent is synced here, or is the group that is being written (`commit`);
- at most `window_bytes` of messages are in flight, and one more section. A partition that does not
  fit into the window goes back to PROBE: it costs a cursor, no memory, no wait;
- what the feed holds is bounded, whatever the replica does: messages count with what is remembered
  of them, and no more than QUESTIONS_MAX heartbeats are waiting for an answer;
- an acknowledgement counts for a partition if its stream was open when the message was made, and
  not for a part of a snapshot. A group counts as such only if no stream of the link was
  opened or closed since it was sent; otherwise each of its partitions counts for itself;
- a replica knows the master's floors before it gets a change that was made after they rose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from dcp.session.replication_port import FeedAnswer, ReplicationError
from dcp.stream.remote_readers import Held
from dcp.wire.frame import Frame, pack_response
from dcp.wire.message import (
    STREAM_REQ_EXTRAS,
    EndReason,
    StreamRequest,
    pack_stream_end,
    parse_stream_request,
)
from dcp.wire.status import Status
from failover.replication.group import Group, StreamChanges
from failover.replication.mastership import SECTION_BYTES, WINDOW_BYTES
from failover.replication.messages import (
    FORMAT,
    GROUP_BYTES_MAX,
    HELD_FORMAT,
    NOT_SEEN,
    NOTHING,
    EntriesSection,
    ReplicaPosition,
    SharedGroup,
    StoreSeen,
    decode,
    pack_entries,
    pack_group,
    pack_rollback,
    unpack_ack,
    unpack_held,
)
from failover.replication.pace import FillPace, LinkFill
from failover.replication.progress import (
    BEAT_NS,
    NEVER,
    QUESTIONS_MAX,
    RECORD_BYTES,
    SILENCE_NS_MAX,
    Announcements,
    Inflight,
    InflightGroup,
    Inflights,
    Match,
    Progress,
    ProgressState,
    Questions,
    check_numbers,
    known_committed,
)
from failover.rules.rollback import Question, decide
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Partition
from vbucket.engine.resync import (
    Deletions,
    Resync,
    deletions_for,
    is_of_now,
    is_small,
    looked_through,
    problem_of,
    remaining,
)
from vbucket.model.control import SnapshotWindow
from vbucket.model.entry import LOG_CONTROL, OPCODE_AT, seqno_of
from vbucket.store.environment import StoreDamagedError

DECIDED_AT_ONCE: Final = 64
"""Requests that wait and are looked at again in one tick."""


class MasterSide(Protocol):
    """What a replica's feed asks and tells the master."""

    def admit(
        self,
        feed: ReplicaFeed,
        vb_id: int,
        asked: StreamRequest,
        position: ReplicaPosition,
        opaque: int,
    ) -> FeedAnswer | None:
        """Decide about a replica's stream request; open the stream if it may continue. None: it is
        decided when the epoch is known here, and its beginning on disk (`decide_waiting`), or
        a little later, because it costs much (`tick`).
        """

    def acknowledged(self, member: str, matches: Sequence[Match]) -> None:
        """A replica has synced these."""

    def groups_acknowledged(self, member: str, groups: Sequence[Group]) -> None:
        """A replica has synced what it got of these groups, all of it on streams that are
        open since.
        """

    def confirmed(self, feed: ReplicaFeed) -> None:
        """A replica has confirmed that this node is the master of what it follows."""

    @property
    def serves_by(self) -> StoreSeen:
        """By which records of the metadata store this node serves all that it masters."""

    def readers_are(self, feed: ReplicaFeed, held: Mapping[int, Held]) -> None:
        """A replica says what the streams that it serves hold now, all of it."""

    def records_were_kept(self) -> None:
        """A replica has more of the metadata store's records on disk: `ReplicaFeed.seen`."""

    def feed_closed(self, feed: ReplicaFeed) -> None:
        """The link is gone."""


class FedStreams:
    """The streams that are open on one link, and what of them goes in groups.

    Invariants
    - what is in state REPLICATE (`replicating`) is open, and so is what has a match in groups;
    - `changes` has every partition whose stream was opened, closed or ended: what was sent before
      is not for its next stream.
    """

    def __init__(self) -> None:
        self.progress: dict[int, Progress] = {}
        self.replicating: set[int] = set()
        self.changes = StreamChanges()
        """Of streams that are opened, closed or ended."""
        self.newest_opaque = 0
        """Of the stream requests that were answered OK."""
        self._all_replicating: frozenset[int] | None = None
        """The partitions that this node masters, if it is known that all are in `replicating`."""
        self._match: dict[int, int] = {}
        """Partition -> what the replica has acknowledged of it in groups."""
        self._begun_revision = 0
        """That of `changes` when the last group was sent that was not synced yet."""

    def open(self, vb_id: int, progress: Progress) -> None:
        """Open a partition's stream; the one before is over."""
        self.drop(vb_id)
        self.progress[vb_id] = progress
        self.newest_opaque = max(self.newest_opaque, progress.opaque)

    def drop(self, vb_id: int) -> Progress | None:
        """Close a partition's stream; return what it was. None: there was none."""
        self.changes.note(vb_id)
        self._stop_replicating(vb_id)
        self._match.pop(vb_id, None)
        return self.progress.pop(vb_id, None)

    def close(self) -> None:
        """The link is gone."""
        for vb_id in self.progress:
            self.changes.note(vb_id)
        self.progress.clear()
        self.replicating.clear()
        self._all_replicating = None
        self._match.clear()

    @property
    def is_filling(self) -> bool:
        """Whether the replica gets a copy for the first time: that delays what it acknowledges."""
        return any(progress.is_filling for progress in self.progress.values())

    # -- state REPLICATE ---------------------------------------------------------------------------

    def replicates_all(self, mastered: frozenset[int]) -> bool:
        """Whether all partitions that this node masters are in state REPLICATE."""
        if self._all_replicating is not mastered and mastered <= self.replicating:
            self._all_replicating = mastered
        return self._all_replicating is mastered

    def become_replicate(self, vb_id: int) -> None:
        """Send a partition in group messages: it has caught up."""
        self.progress[vb_id].become_replicate()
        self.replicating.add(vb_id)

    def _stop_replicating(self, vb_id: int) -> None:
        self.replicating.discard(vb_id)
        self._all_replicating = None

    def fall_behind(self, part: Partition, entries: Sequence[bytes]) -> None:
        """Send these entries of a synced group, and later ones, from the partition's cursor."""
        self._stop_replicating(part.vb_id)
        first = next((entry for entry in entries if entry[OPCODE_AT] != LOG_CONTROL), None)
        next_seqno = part.synced_seqno + 1 if first is None else seqno_of(first)
        self.progress[part.vb_id].become_probe(next_seqno)

    # -- groups ------------------------------------------------------------------------------------

    def begin_group(self, group: Group) -> bool:
        """A group begins, before it is synced here: return whether it may be sent now, since all
        that the replica follows of it is in state REPLICATE.
        """
        self._begun_revision = self.changes.revision
        if self.replicates_all(group.mastered):
            return True
        return group.seqnos.keys() & self.progress.keys() <= self.replicating

    def begun_synced(self) -> set[int] | None:
        """The last group of `begin_group` is synced. It is not for streams that were opened
        since, and those may have read all that was synced before: return those, which read on. All
        of them, as partitions may have been excluded from the group meanwhile. None: no stream was
        opened, closed or ended.
        """
        if self._begun_revision == self.changes.revision:
            return None
        opened = self.changes.since(self._begun_revision) & self.progress.keys()
        for vb_id in opened:
            self._stop_replicating(vb_id)
            progress = self.progress[vb_id]
            progress.become_probe(progress.next)
        return opened

    def acknowledged(self, number: int, sent: InflightGroup) -> dict[int, Match]:
        """Take note that a group is acknowledged, which went in the message of this number; return
        what of it goes one by one.
        """
        if sent.streams_revision == self.changes.revision:
            self._match.update(sent.seqnos)
            return {}
        changed = self.changes.since(sent.streams_revision)
        sent.group.exclude(changed)
        found: dict[int, Match] = {}
        for vb_id, seqno in sent.seqnos.items():
            if vb_id not in changed:
                self._match[vb_id] = seqno
                continue
            progress = self.progress.get(vb_id)
            if progress is not None and progress.opened_number < number:
                found[vb_id] = Match(vb_id, progress.epoch, seqno)
        return found

    def group_match(self, vb_id: int) -> tuple[int, int] | None:
        """Return leader epoch and seqno up to which the replica has acknowledged a partition in
        groups; None: nothing.
        """
        seqno = self._match.get(vb_id)
        return None if seqno is None else (self.progress[vb_id].epoch, seqno)


class Heartbeat:
    """When a master asks a replica without anything else to send, and whether it hears it."""

    def __init__(self, now_ns: int) -> None:
        self.heard_ns = self._next_ns = now_ns
        self.beat_ns = BEAT_NS
        self.silence_ns = SILENCE_NS_MAX
        """A replica that was not heard for so long is disconnected."""

    def take_due(self, now_ns: int) -> bool:
        """Return whether a heartbeat is due; it is sent then."""
        is_due = now_ns >= self._next_ns
        if is_due:
            self._next_ns = now_ns + self.beat_ns
        return is_due

    def is_silent(self, now_ns: int) -> bool:
        """Whether the replica is to be disconnected."""
        return now_ns - self.heard_ns >= self.silence_ns


class ReplicaFeed:
    """See the module. `schedule` rings the connection, which pumps later."""

    def __init__(
        self,
        engine: Engine,
        member: str,
        side: MasterSide,
        schedule: Callable[[], None],
        *,
        now_ns: int,
        window_bytes: int = WINDOW_BYTES,
        section_bytes: int = SECTION_BYTES,
        pace: FillPace | None = None,
    ) -> None:
        self.member = member
        self._fill = LinkFill(pace, member, section_bytes)
        self.is_superseded = False
        """Whether a newer link of the same member has come: the connection closes."""
        self.damages: list[tuple[int, str]] = []
        self.seen = NOT_SEEN
        """What the replica has on disk of the records of the metadata store."""
        self._engine = engine
        self._side = side
        self._schedule = schedule
        self._is_closed = False
        self.window_bytes = window_bytes
        self.streams = FedStreams()
        self._out: list[bytes] = []
        self._waiting: dict[int, Frame] = {}
        """Stream requests that cannot be decided yet, by partition. Each gets one answer, or the
        link ends."""
        self._pending: dict[int, None] = {}
        """Partitions to read from their cursors, in turn."""
        self._unannounced: dict[int, None] = {}
        """Partitions whose high watermark the replica does not know, in the order they rose."""
        self._number = 0
        self.inflights = Inflights()
        self._acknowledged_number = 0
        self._announcements = Announcements()
        self._number_at_call = 0
        """The last message that was made when `take_caught_up` was asked last."""
        self._questions = Questions()
        self._now_ns = now_ns
        self.heartbeat = Heartbeat(now_ns)
        self.format = FORMAT
        """Of the messages on this link."""

    @property
    def asked_ns(self) -> int:
        """When the question was asked that the replica confirmed last; 0: none was."""
        return self._questions.confirmed_ns

    # -- streams -----------------------------------------------------------------------------------

    def stream_request(self, request: Frame) -> FeedAnswer | None:
        """Answer the request for a partition; None: later. Raises ReplicationError."""
        if len(request.extras) != STREAM_REQ_EXTRAS.size:
            raise ReplicationError(
                f"a stream request has {STREAM_REQ_EXTRAS.size} bytes of extras: {request.extras!r}"
            )
        if self._is_closed:
            raise ReplicationError(f"member {self.member} has a newer link")
        asked = parse_stream_request(request.extras)
        position = decode(request.value, ReplicaPosition)
        if request.vb_id >= self._engine.num_vbuckets:
            raise ReplicationError(f"there is no partition {request.vb_id} here")
        if position.resync is not None and (problem := problem_of(position.resync)):
            raise ReplicationError(f"partition {request.vb_id}: {problem}")
        self._refuse_waiting(request.vb_id)
        answer = self._side.admit(self, request.vb_id, asked, position, request.opaque)
        if answer is None:
            self._waiting[request.vb_id] = request
        return answer

    def decide_waiting(self, vb_id: int) -> None:
        """Answer a request that had to wait, as far as it can be decided now."""
        request = self._waiting.pop(vb_id, None)
        if request is not None and (answer := self.stream_request(request)) is not None:
            self._send_answer(request, answer)

    def _refuse_waiting(self, vb_id: int) -> None:
        """Refuse the request that waits: another one has come, or this is no master."""
        request = self._waiting.pop(vb_id, None)
        if request is not None:
            self._send_answer(request, FeedAnswer(Status.X_FENCED, b""))

    def _send_answer(self, request: Frame, answer: FeedAnswer) -> None:
        status, value = answer
        self._out.append(pack_response(request.opcode, status, opaque=request.opaque, value=value))
        self._schedule()

    def open(
        self,
        vb_id: int,
        epoch: int,
        opaque: int,
        seqno: int,
        window: SnapshotWindow | None = None,
        *,
        deletions: Deletions | None = None,
        is_filling: bool = False,
    ) -> None:
        """Feed a partition to the replica, which has everything up to `seqno`, or the part of the
        snapshot `window` up to there, and lacks `deletions`. `is_filling`: at a pace, until it has
        caught up.
        """
        progress = Progress(
            epoch, opaque, seqno, self._questions.confirmations, self._number, window, deletions
        )
        progress.is_filling = is_filling
        self.streams.open(vb_id, progress)
        self._probe(vb_id)
        self._unannounced[vb_id] = None
        self._schedule()

    def resynced(
        self, part: Partition, question: Question, shared_seqno: int, asked: Resync | None
    ) -> Deletions | bytes | None:
        """Decide about a replica that lacks purged deletions: return those that it lacks, if it has
        asked about them, or the value of a ROLLBACK. None: later.
        """
        seqno = question.start_seqno
        history = decide(
            question._replace(ignore_purged=True), part.failover, part.high_seqno, part.purge_seqno
        )
        if history.rollback_seqno is not None:
            return pack_rollback(history.rollback_seqno, shared_seqno)
        try:
            if not is_small(part):
                return pack_rollback(0, shared_seqno)
            if not self._fill.may_look(self._now_ns, looked_through(part, asked)):
                return None
            if asked is not None and is_of_now(part, asked):
                found = deletions_for(self._engine, part, seqno, asked)
                return pack_rollback(0, shared_seqno) if found is None else found
            left = remaining(self._engine, part, seqno)
        except StoreDamagedError:
            left = None  # what can be read of it tells the damage
        return pack_rollback(0, shared_seqno, left)

    def close_stream(self, vb_id: int) -> None:
        """The replica does not follow a partition any more."""
        self._refuse_waiting(vb_id)
        self.streams.drop(vb_id)

    def end(self, vb_id: int) -> None:
        """Tell the replica that this node is not the partition's master any more."""
        self._refuse_waiting(vb_id)
        progress = self.streams.drop(vb_id)
        if progress is not None:
            self._out.append(pack_stream_end(vb_id, progress.opaque, EndReason.STATE_CHANGED))
            self._schedule()

    def is_in_snapshot(self, vb_id: int) -> bool:
        """Whether the replica has only a part of a snapshot of a partition."""
        progress = self.streams.progress.get(vb_id)
        return progress is not None and progress.snapshot_number > self._acknowledged_number

    def confirmed_ns(self, vb_id: int) -> int | None:
        """Return when the question was asked with which the replica last confirmed this master of
        a partition; None: it has not.

        The replica closes a stream before it confirms another master of the partition. So every
        confirmation that arrives while the progress is open is for this master.
        """
        progress = self.streams.progress.get(vb_id)
        if progress is None or progress.active_since == self._questions.confirmations:
            return None
        return self._questions.confirmed_ns

    def take_caught_up(self) -> bool:
        """Return whether the replica has synced all that was sent when this was asked last, but for
        copies that are filled: it is in sync in none of these.
        """
        number, self._number_at_call = self._number_at_call, self._number
        oldest = self.inflights.delays.oldest_new()
        return not self._pending and (oldest is None or oldest.number > number)

    # -- what the node core tells ------------------------------------------------------------------

    def send_begun(self, group: Group) -> bool:
        """Send a group that is about to be written here, if all that the replica follows of it is
        in state REPLICATE, and there is room; return whether it was.
        """
        return self.streams.begin_group(group) and self.send_group(group, is_synced=False)

    def begun_synced(self) -> None:
        """The last group that `send_begun` has sent is synced: streams that were opened since read
        on.
        """
        opened = self.streams.begun_synced()
        if opened is not None:
            for vb_id in opened:
                self._probe(vb_id)
            self._schedule()

    def send_group(self, group: Group, *, is_synced: bool = True) -> bool:
        """Send what is in state REPLICATE of a group as one message; False: the window is full.
        The rest is read from cursors.
        """
        seqnos, shared, streams = group.seqnos, group.shared, self.streams
        if not streams.replicates_all(group.mastered) and not seqnos.keys() <= streams.replicating:
            followed = seqnos.keys() & streams.progress.keys()
            if behind := followed - streams.replicating:
                for vb_id in behind:
                    self._probe(vb_id)
                self._schedule()
            if not (followed := followed & streams.replicating):
                return True
            seqnos, shared = group.only(followed)
        size = len(shared.entries)
        cost = size + RECORD_BYTES * (1 + len(seqnos))
        if self.inflights.cost + cost > self.window_bytes or size > GROUP_BYTES_MAX:
            return False
        group.sent_to[self.member] = seqnos
        sent = InflightGroup(group, seqnos, streams.changes.revision)
        self._post(shared, sent, cost, is_synced=is_synced)
        return True

    def not_replicated(self, group: Group) -> set[int]:
        """Return the partitions for which the replica is in sync, and not in state REPLICATE."""
        replicating = self.streams.replicating
        if self.streams.replicates_all(group.mastered) or group.seqnos.keys() <= replicating:
            return set()
        return group.not_replicated_to(self.member, replicating)

    def _post(
        self,
        shared: SharedGroup,
        sent: InflightGroup | None = None,
        cost: int = 0,
        *,
        is_synced: bool = True,
    ) -> None:
        """Make a message with a group, or with nothing. It announces what is committed."""
        self._number += 1
        self._questions.ask(self._number, self._now_ns)
        head = self._number, self._number, self.streams.newest_opaque, self._announcements.take()
        if sent is not None:
            self._announcements.sent(sent.group.number, self._number)
            self.inflights.add(Inflight(self._number, cost, self._now_ns, group=sent))
        self._out += pack_group(*head, shared, is_synced=is_synced)
        self._schedule()

    def group_committed(self, group: Group, committed: Mapping[int, int]) -> None:
        """Partitions of a group are committed; the next message announces it."""
        seqnos = group.sent_to.get(self.member)
        # Another group may have brought less of the same partitions. Of partitions that the replica
        # does not follow any more, it commits nothing by number.
        is_all = seqnos is committed or (group.is_committed and not group.excluded)
        if not is_all and seqnos is not None:
            followed = seqnos.keys() & self.streams.progress.keys()
            is_all = all(seqnos[vb_id] <= committed.get(vb_id, -1) for vb_id in followed)
        is_open = is_all and self._announcements.is_open(group.number)
        announced = seqnos if seqnos is not None and is_open else {}
        if announced is not committed:  # others came from cursors, maybe before they were committed
            self.hw_rose((group.seqnos.keys() & committed.keys()) - announced.keys())
        if announced:
            self._announcements.committed(group.number)
            self._schedule()

    def group_synced(self, changes: Mapping[int, Sequence[bytes]]) -> None:
        """Send a synced group section by section: partition -> its entries for replicas, floors
        included.
        """
        sections: list[EntriesSection] = []
        matches: list[tuple[Progress, Match]] = []
        room = self.window_bytes - self.inflights.cost
        partitions = self._engine.partitions
        for vb_id, entries in changes.items():
            progress = self.streams.progress.get(vb_id)
            if progress is None:
                continue
            size = sum(map(len, entries)) + RECORD_BYTES
            part = partitions[vb_id]
            if progress.state is ProgressState.REPLICATE and size > room:
                self.streams.fall_behind(part, entries)
            if progress.state is not ProgressState.REPLICATE:
                self._probe(vb_id)
                continue
            sections.append(progress.section(part, entries))
            matches.append((progress, Match(vb_id, progress.epoch, part.synced_seqno)))
            room -= size
        if sections:
            self._send(sections, matches)
        if self._pending or self._fill.next_is_due(self._now_ns):
            self._schedule()

    def _probe(self, vb_id: int) -> None:
        """A partition is to be read from its cursor, in turn."""
        if self.streams.progress[vb_id].is_filling:
            self._fill.wait(vb_id)
        else:
            self._pending[vb_id] = None

    def hw_rose(self, vb_ids: Iterable[int]) -> None:
        """High watermarks have risen; the next message announces them."""
        for vb_id in vb_ids:
            if vb_id in self.streams.progress:
                self._unannounced[vb_id] = None
        if self._unannounced:
            self._schedule()

    def _send(
        self,
        sections: Sequence[EntriesSection],
        matches: Sequence[tuple[Progress, Match]],
        filling: int = 0,
    ) -> None:
        self._number += 1
        question = self._number
        self._questions.ask(question, self._now_ns)
        message = pack_entries(self._number, question, sections, self._side.serves_by)
        self._out.append(message)
        if sections:
            cost = len(message) + RECORD_BYTES * (1 + len(sections))
            self.inflights.add(
                Inflight(self._number, cost, self._now_ns, (*matches,), None, filling)
            )
        self._schedule()

    # -- the connection ----------------------------------------------------------------------------

    @property
    def has_output(self) -> bool:
        """Whether `pump` would return anything now."""
        waits = (
            self._unannounced
            or self._pending
            or self._announcements
            or self._fill.next_is_due(self._now_ns)
        )
        return bool(self._out or (waits and self._has_room))

    @property
    def can_wait(self) -> bool:
        """See ReplicaSender: the next group tells what is committed as well."""
        return not (
            self._out or self._unannounced or self._pending or self._fill.next_is_due(self._now_ns)
        )

    @property
    def _has_room(self) -> bool:
        return self.inflights.cost < self.window_bytes

    def pump(self, bytes_max: int) -> list[bytes]:
        """Return messages to send, about `bytes_max` of them."""
        if self._pending and self._has_room and self._fill.next_is_due(self._now_ns):
            bytes_max -= self._catch_up(self._fill.take_next())  # else it might wait for ever
        while self._has_room and bytes_max > 0:
            if self._pending:
                vb_id = next(iter(self._pending))
                del self._pending[vb_id]
            elif self._fill.next_is_due(self._now_ns):
                vb_id = self._fill.take_next()
            else:
                break
            bytes_max -= self._catch_up(vb_id)
        if self._unannounced and self._has_room:
            self._send_watermarks()
        while self._announcements and self._has_room:
            self._post(NOTHING)
        out, self._out = self._out, []
        return out

    def _catch_up(self, vb_id: int) -> int:
        """Send the next entries of a partition from its cursor; return their bytes."""
        progress = self.streams.progress.get(vb_id)
        if progress is None or progress.state is ProgressState.REPLICATE:
            return 0
        part = self._engine.partitions[vb_id]
        if progress.is_overtaken(part):
            self.end(vb_id)  # the replica asks again, and learns what it can have
            return 0
        try:
            section_bytes = self._fill.section_bytes(is_filling=progress.is_filling)
            entries = progress.next_entries(part, self._engine.versions, section_bytes, self.member)
        except StoreDamagedError as error:
            self._fail(vb_id, str(error))
            return 0
        if entries:
            brought = Match(vb_id, progress.epoch, progress.next - 1)
            section = progress.section(part, entries)
            is_complete = progress.window is None
            filling = sum(map(len, entries)) if progress.is_filling else 0
            self._fill.sent(filling)
            self._send([section], ((progress, brought),) if is_complete else (), filling)
            if not is_complete:
                progress.snapshot_number = NEVER
            elif progress.snapshot_number == NEVER:
                progress.snapshot_number = self._number
        if progress.caught_up(part):
            self.streams.become_replicate(vb_id)
        else:
            self._probe(vb_id)
        return sum(map(len, entries))

    def _fail(self, vb_id: int, why: str) -> None:
        """End a stream that cannot be read here, rather than leave anything out."""
        self.damages.append((vb_id, why))
        progress = self.streams.drop(vb_id)
        assert progress is not None, "it was read from"
        self._out.append(pack_stream_end(vb_id, progress.opaque, EndReason.BACKFILL_FAILED))

    def _send_watermarks(self) -> None:
        """Tell the replica the high watermarks that it does not know. What it acknowledges then is
        what it has, also where nothing was left to send.
        """
        sections: list[EntriesSection] = []
        matches: list[tuple[Progress, Match]] = []
        for vb_id in self._unannounced:
            progress = self.streams.progress.get(vb_id)
            if progress is None or progress.window is not None:
                continue
            part = self._engine.partitions[vb_id]
            if progress.announced_seqno != known_committed(part):
                sections.append(progress.section(part, ()))
                is_replicating = progress.state is ProgressState.REPLICATE
                seqno = part.synced_seqno if is_replicating else progress.next - 1
                matches.append((progress, Match(vb_id, progress.epoch, seqno)))
        self._unannounced.clear()
        if sections:
            self._send(sections, matches)

    def at(self, now_ns: int) -> None:
        """It is this late; monotonic nanoseconds."""
        self._now_ns = now_ns

    def heard(self, now_ns: int) -> None:
        """Bytes have come from the replica; monotonic nanoseconds."""
        self._now_ns = self.heartbeat.heard_ns = now_ns

    def tick(self, now_ns: int) -> bool:
        """Ask whether this node is still the master, when that is due; False: disconnect."""
        self._now_ns = now_ns
        for vb_id in tuple(self._waiting)[:DECIDED_AT_ONCE]:
            if self._fill.may_look(now_ns, 0):
                self.decide_waiting(vb_id)
        if self._fill.next_is_due(now_ns):
            self._schedule()
        is_read = not self._out and len(self._questions) < QUESTIONS_MAX
        if is_read and self.heartbeat.take_due(now_ns):  # else enough questions are on their way
            self._send((), ())
        return not self._is_closed and not self.heartbeat.is_silent(now_ns)

    def take_acknowledgement(self, extras: bytes, held: bytes = b"") -> None:
        """Take an X_REPLICA_ACK, and what the replica's streams hold. Raises ReplicationError."""
        number, question, seen = unpack_ack(extras)
        check_numbers(self.member, number, question, last=self._number)
        if held:
            if self.format < HELD_FORMAT:
                raise ReplicationError(
                    f"an acknowledgement of format {self.format} says nothing of streams"
                )
            self._side.readers_are(self, unpack_held(held, self._engine.num_vbuckets))
        self._acknowledged_number = max(self._acknowledged_number, number)
        newest: dict[int, Match] = {}
        groups: list[Group] = []
        for sent in self.inflights.acknowledged(number, self._now_ns):
            self._fill.acknowledged(sent.filling)
            if sent.group is not None:
                newest |= self.streams.acknowledged(sent.number, sent.group)
                groups.append(sent.group.group)
            for progress, each in sent.matches:
                # A stream that was closed and opened again may have left this message out.
                if self.streams.progress.get(each.vb_id) is progress:
                    newest[each.vb_id] = each
        self._questions.confirmed(question)
        if newest:
            self._side.acknowledged(self.member, tuple(newest.values()))
        if groups:
            self._side.groups_acknowledged(self.member, groups)
        if seen != self.seen:
            self.seen = seen
            self._side.records_were_kept()
        self._side.confirmed(self)
        if self.has_output:
            self._schedule()

    def close(self) -> None:
        """The connection is gone, or a newer link of the member has come."""
        self._is_closed = True
        self.streams.close()
        for sent in self.inflights.sent:
            if sent.group is not None:
                del sent.group.group.sent_to[self.member]
        self.inflights.sent.clear()
        self._waiting.clear()
        self._announcements.clear()
        self._pending.clear()
        self._fill.close()
        self._unannounced.clear()
        self._side.feed_closed(self)

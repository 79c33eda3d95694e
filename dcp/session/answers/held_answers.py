"""The answers of one connection that wait for commits. Sans-IO.

Answers leave in the order of their requests. What one read brought in is answered together: a batch
leaves once everything that it changed or observed is committed, partition by partition. So a
partition that cannot commit holds up only what stands behind it on the same connection.

Who calls it: the connection. `take` gets the answers of a session after `receive` or `resume`;
`release` returns those that may leave after a commit. On a node with replicas the node also calls
`depose` and `expire`, and then `release`; it calls `release` when an in-sync set has grown, too.

Invariants
- answers leave in the order in which they were taken;
- a batch waits for the groups of its own changes and of the versions that it showed, and for no
  others;
- a request gets one answer, or none if it is quiet and successful. `depose` and `expire` replace an
  answer, and add none behind it;
- an answer to a packet that is loaded (`vbucket.engine.loading.loads`) waits for the load, and may
  become another one;
- an answer is replaced only while it waits. An applied change never gets a status that tells the
  client to send it again (`dcp.session.answers.marks`).

The session's state says what its answers wait for:

    wait_group      the newest commit group of all
    awaited         partition -> the group to wait for there, because an answer tells of its changes
    first_change    place of the session's first own change in the open group; -1: no command was
                    taken since the last answers were
    marks           what each single answer waits for; None on a node alone

While no partition lags behind the log, one comparison of group numbers decides. The partitions of a
batch are looked up only if some partition lags.

With `acknowledge=master` a change without a durability frame waits for this node's log only, and so
does a read: a GET may show a change that a failover loses, as may its answer. A change with a
durability frame is committed before its answer, and a stream shows committed changes only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from dcp.session.answers.marks import MARK_BYTES, HeldAnswer, Mark, MarkedAnswers, Wait
from dcp.session.state import SessionState
from failover.rules.write_answer import Durability, is_done
from vbucket.engine.engine import Engine
from vbucket.engine.loading.loads import LoadTicket
from vbucket.model.entry import vb_id_of

COMMIT_TIMEOUT_NS: Final = 10_000_000_000
"""Default of `commit_timeout`. A slow replica leaves the in-sync set after a tenth of it."""

_DEPOSED: Final = "this node is no longer master of the partition"
_OVERDUE: Final = (
    "not committed in time (setting commit_timeout, or the timeout of the durability frame)"
)


class HeldBatch:
    """Answers that leave together."""

    __slots__ = (
        "answers", "awaited", "changes", "group", "loads", "marked", "pieces", "read_ns",
        "size_bytes",
    )  # fmt: skip

    def __init__(
        self,
        answers: list[bytes],
        group: int,
        changes: Sequence[bytes],
        awaited: dict[int, int],
        read_ns: int,
        marked: MarkedAnswers | None = None,
    ) -> None:
        if marked is None:
            self.answers = b"".join(answers)
            self.size_bytes = len(self.answers)
        else:
            self.answers = b""
            self.size_bytes = sum(map(len, answers)) + MARK_BYTES * len(marked.marks)
        self.group = group
        """The newest commit group that the batch waits for."""
        self.changes = changes
        """The entries that the batch put into the open group."""
        self.awaited = awaited
        """Partition -> the group to wait for there."""
        self.read_ns = read_ns
        """When the requests were read, monotonic."""
        self.marked = marked
        """The answers, if some of them have marks."""
        self.loads: Sequence[tuple[int, LoadTicket]] = ()
        """Packets that are loaded, and the places of their answers in `pieces`."""
        self.pieces: list[bytes] = []
        """The answers one by one, if some of them wait for loads."""

    def wait_for(self, loads: Sequence[tuple[int, LoadTicket]], answers: Sequence[bytes]) -> None:
        """Wait for loads, whose answers may change meanwhile."""
        self.loads, self.pieces = loads, list(answers)

    def await_loads(self) -> bool:
        """Take what loads say when all are done; return whether one is not yet."""
        if not all(ticket.is_done for _, ticket in self.loads):
            return True
        if self.loads:
            for index, ticket in self.loads:
                self.pieces[index] = ticket.answer
                self.group = max(self.group, ticket.group)
            self.answers = b"".join(self.pieces)
            self.loads, self.pieces = (), []
        return False


class HeldAnswers:
    """See the module. `commit_timeout_ns` bounds every wait of an answer that has a mark, unless
    its durability frame has a timeout of its own. Both count from when the request was read.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        commit_timeout_ns: int = COMMIT_TIMEOUT_NS,
        acknowledges_as_master: bool = False,
    ) -> None:
        self._keyspace = engine.keyspace
        self._partitions = engine.partitions
        self._commits = engine.commits
        self._commit_timeout_ns = commit_timeout_ns
        self._needs_commit = not acknowledges_as_master
        self.batches: deque[HeldBatch] = deque()
        """What waits, in order."""
        self.held_bytes = 0
        self.next_expiry_ns: int | None = None
        """When to call `expire`, monotonic; None: nothing that waits is bounded. It may be early.
        """

    def take(self, state: SessionState, read_ns: int) -> bytes:
        """Take a session's answers. Return them if they may leave at once, b"" if they wait."""
        is_first = not (self.batches or state.marks or state.loads)
        if is_first and state.wait_group <= self._commits.committed_group:
            answers = b"".join(state.answers)  # those of reads, nearly always
            state.answers.clear()
            state.wait_group, state.first_change, state.awaited = 0, -1, {}
            return answers
        changes = self._keyspace.pending[state.first_change :] if state.first_change >= 0 else ()
        marked = self._marked(state, changes, read_ns) if state.marks else None
        awaited, state.awaited = state.awaited, {}
        batch = HeldBatch(state.answers, state.wait_group, changes, awaited, read_ns, marked)
        if state.loads:
            batch.wait_for(state.loads, state.answers)
            state.loads = []
        state.answers.clear()
        state.wait_group, state.first_change = 0, -1
        if not self.batches and self._advance(batch):
            return batch.answers if marked is None else b"".join(marked.answers)
        self.batches.append(batch)
        self.held_bytes += batch.size_bytes
        if marked is not None:
            self._expire_at(marked.due_ns)
        return b""

    def carry(self, state: SessionState, read_ns: int) -> bool:
        """Let the session's next answers wait for its changes so far, which had none (quiet
        commands): an answer behind them says that they are done.

        Return whether they wait here, because they may get answers after all.
        """
        if state.marks:
            self.take(state, read_ns)
            return bool(self.batches)
        if state.first_change >= 0:
            for entry in self._keyspace.pending[state.first_change :]:
                state.awaited[vb_id_of(entry)] = state.wait_group
            state.first_change = -1
        return False

    def release(self) -> list[HeldBatch]:
        """Return the batches that may leave now, in order. Of a batch with replaced answers, those
        may leave which have none before them that waits.
        """
        ready: list[HeldBatch] = []
        batches = self.batches
        while batches:
            batch = batches[0]
            marked = batch.marked
            if marked is not None and marked.held is not None:
                answers = self._settled(marked.held)
                if any(answers):
                    ready.append(HeldBatch(answers, 0, (), {}, batch.read_ns))
                if marked.held:
                    break
            elif not self._advance(batch):
                break
            elif marked is None:
                ready.append(batch)
            elif marked.answers:
                batch.answers = b"".join(marked.answers)
                ready.append(batch)
            batches.popleft()
            self.held_bytes -= batch.size_bytes
        if not batches:
            self.next_expiry_ns = None
        return ready

    def depose(self, vb_ids: Iterable[int]) -> None:
        """Take note that this node is no longer master of these partitions: replace the answers
        that wait for a commit there. Call it before anything of the partitions is cut off.
        """
        deposed = frozenset(vb_ids)

        def is_lost(held: HeldAnswer) -> bool:
            return any(vb_id in deposed for vb_id, _ in held.changes) or any(
                wait.vb_id in deposed and not self._is_over(wait) for wait in held.waits
            )

        for batch in self.batches:
            if batch.marked is not None and batch.marked.touches(deposed):
                self._replace(batch, is_lost, _DEPOSED)

    def expire(self, now_ns: int) -> None:
        """Replace the answers that have waited longer than they may; monotonic time."""
        if self.next_expiry_ns is None or now_ns < self.next_expiry_ns:
            return
        self.next_expiry_ns = None
        for batch in self.batches:
            marked = batch.marked
            if marked is None or marked.due_ns is None:
                continue
            if marked.due_ns <= now_ns:
                self._replace(batch, lambda held: held.due_ns <= now_ns, _OVERDUE)
                waiting = [held.due_ns for held in marked.one_by_one() if not held.is_settled]
                marked.due_ns = min(waiting, default=None)
            self._expire_at(marked.due_ns)

    def clear(self) -> None:
        """Drop everything: the connection is gone."""
        self.batches.clear()
        self.held_bytes = 0
        self.next_expiry_ns = None

    def _marked(self, state: SessionState, changes: Sequence[bytes], read_ns: int) -> MarkedAnswers:
        """Return the session's answers with their marks, and take these from it."""
        marks = state.marks
        assert marks, "asked for answers with marks only"
        state.marks = []
        for mark in marks:
            mark.first_entry -= state.first_change
        return MarkedAnswers(
            list(state.answers), marks, changes, state.wait_group, read_ns,
            self._commit_timeout_ns, needs_commit=self._needs_commit,
            error_body=state.error_body, json_datatype=state.hello.has_json,
        )  # fmt: skip

    def _expire_at(self, due_ns: int | None) -> None:
        if due_ns is not None and (self.next_expiry_ns is None or due_ns < self.next_expiry_ns):
            self.next_expiry_ns = due_ns

    def _advance(self, batch: HeldBatch) -> bool:
        commits, marked = self._commits, batch.marked
        if batch.loads and batch.await_loads():
            return False
        if marked is not None and marked.durable and not self._are_done(marked, marked.durable):
            return False
        if batch.group <= commits.committed_group:
            return True
        if batch.group > commits.synced_group:
            return False
        if batch.changes:  # all of them are in the newest group that the batch waits for
            if self._needs_commit:
                awaited = dict(batch.awaited)
                awaited.update(dict.fromkeys(map(vb_id_of, batch.changes), batch.group))
                batch.awaited = awaited
            batch.changes = ()
        is_committed = commits.is_committed
        return all(is_committed(vb_id, group) for vb_id, group in batch.awaited.items())

    def _are_done(self, marked: MarkedAnswers, durable: Iterable[Mark]) -> bool:
        """Return whether the changes of these requests, which have durability frames, are done."""
        is_committed, group = self._commits.is_committed, marked.group
        for mark in durable:
            assert mark.durability is not None
            for vb_id, seqno in marked.changes_of(mark):
                if not is_committed(vb_id, group):
                    return False
                if not self._is_done(vb_id, seqno, mark.durability):
                    return False
        return True

    def _is_done(self, vb_id: int, seqno: int, durability: Durability) -> bool:
        guard = self._partitions[vb_id].guard
        return guard is None or is_done(guard.write_state(durability), seqno)

    def _is_over(self, wait: Wait) -> bool:
        """Return whether an answer need not wait for this any more."""
        if wait.is_for_commit:
            return self._commits.is_committed(wait.vb_id, wait.group)
        return wait.group <= self._commits.synced_group

    def _advance_answer(self, held: HeldAnswer) -> bool:
        """Return whether an answer only waits for those before it."""
        if not held.is_settled and all(map(self._is_over, held.waits)):
            durability = held.mark.durability if held.mark is not None else None
            held.is_settled = durability is None or all(
                self._is_done(vb_id, seqno, durability) for vb_id, seqno in held.changes
            )
        return held.is_settled

    def _settled(self, held: list[HeldAnswer]) -> list[bytes]:
        """Remove the first answers, up to one that waits, and return them."""
        count = 0
        while count < len(held) and self._advance_answer(held[count]):
            count += 1
        answers = [item.answer for item in held[:count]]
        del held[:count]
        return answers

    def _replace(self, batch: HeldBatch, is_lost: Callable[[HeldAnswer], bool], why: str) -> None:
        """Replace those answers of a batch that wait and are lost."""
        marked = batch.marked
        assert marked is not None
        for held in marked.one_by_one():
            if not self._advance_answer(held) and is_lost(held):
                marked.replace(held, why)

"""The answers of one connection that wait for commits. Sans-IO.

Answers leave in the order of their requests. What one read brought in is answered together: a batch
leaves once everything that it changed or observed is committed, partition by partition. So a
partition that cannot commit holds up only what stands behind it on the same connection.

Who calls it: the connection. `take` gets the answers of a session after `receive` or `resume`;
`release` returns those that may leave after a commit.

Invariants
- answers leave in the order in which they were taken;
- a batch waits for the groups of its own changes and of the versions that it showed, and for no
  others.

The session's state says what its answers wait for:

    wait_group      the newest commit group of all
    awaited         partition -> the group to wait for there, because an answer tells of its changes
    first_change    place of the session's first own change in the open group; -1: no command was
                    taken since the last answers were

While no partition lags behind the log, one comparison of group numbers decides. The partitions of a
batch are looked up only if some partition lags.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dcp.session.state import SessionState
from vbucket.engine.engine import Engine
from vbucket.model.entry import vb_id_of


class HeldBatch:
    """Answers that leave together."""

    __slots__ = ("answers", "awaited", "changes", "group", "read_ns", "size_bytes")

    def __init__(
        self,
        answers: list[bytes],
        group: int,
        changes: Sequence[bytes],
        awaited: dict[int, int],
        read_ns: int,
    ) -> None:
        self.answers = b"".join(answers)
        self.size_bytes = len(self.answers)
        self.group = group
        """The newest commit group that the batch waits for."""
        self.changes = changes
        """The entries that the batch put into the open group."""
        self.awaited = awaited
        """Partition -> the group to wait for there."""
        self.read_ns = read_ns
        """When the requests were read, monotonic."""


class HeldAnswers:
    """See the module."""

    def __init__(self, engine: Engine) -> None:
        self._keyspace = engine.keyspace
        self._commits = engine.commits
        self._batches: deque[HeldBatch] = deque()
        self.held_bytes = 0

    def __bool__(self) -> bool:
        """Whether answers wait."""
        return bool(self._batches)

    def take(self, state: SessionState, read_ns: int) -> bytes:
        """Take a session's answers. Return them if they may leave at once, b"" if they wait."""
        first = state.first_change
        changes = self._keyspace.pending[first:] if first >= 0 else ()
        batch = HeldBatch(state.answers, state.wait_group, changes, state.awaited, read_ns)
        state.answers.clear()
        state.wait_group, state.first_change = 0, -1
        if batch.awaited:
            state.awaited = {}
        if not self._batches and self._may_leave(batch):
            return batch.answers
        self._batches.append(batch)
        self.held_bytes += batch.size_bytes
        return b""

    def carry(self, state: SessionState) -> None:
        """Let the session's next answers wait for its changes so far, which had none (quiet
        commands): an answer behind them says that they are done.
        """
        if state.first_change >= 0:
            for entry in self._keyspace.pending[state.first_change :]:
                state.awaited[vb_id_of(entry)] = state.wait_group
            state.first_change = -1

    def release(self) -> list[HeldBatch]:
        """Return the batches that may leave now, in order."""
        ready: list[HeldBatch] = []
        batches = self._batches
        while batches and self._may_leave(batches[0]):
            batch = batches.popleft()
            self.held_bytes -= batch.size_bytes
            ready.append(batch)
        return ready

    def clear(self) -> None:
        """Drop everything: the connection is gone."""
        self._batches.clear()
        self.held_bytes = 0

    def _may_leave(self, batch: HeldBatch) -> bool:
        commits = self._commits
        if batch.group <= commits.committed_group:
            return True
        if batch.group > commits.synced_group:
            return False
        if batch.changes:  # all of them are in the newest group that the batch waits for
            awaited = dict(batch.awaited)
            awaited.update(dict.fromkeys(map(vb_id_of, batch.changes), batch.group))
            batch.awaited, batch.changes = awaited, ()
        is_committed = commits.is_committed
        return all(is_committed(vb_id, group) for vb_id, group in batch.awaited.items())

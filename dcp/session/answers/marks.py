"""What single answers wait for, on a node with replicas. Sans-IO.

A node alone commits what it syncs, so its answers only have to wait. With replicas an answer may
have to be taken back: the node is no longer master, or nothing was committed in time. Sessions then
leave a `Mark` for each answer that waits. `dcp.session.answers.held_answers` replaces such answers
with it.

- A change that was applied becomes SYNC_WRITE_AMBIGUOUS. It never becomes ETMPFAIL or
  NOT_MY_VBUCKET: the client would send it again, and a counter count twice.
- A read that waited for an uncommitted version, and a change that was refused because of one,
  become ETMPFAIL. Nothing was applied, so the client may send them again.
- A quiet change that was successful has no answer. It gets one now, at its place in the order.
- In the text protocol, a command with `noreply` stays without an answer.

A run of changes leaves one mark. `MarkedAnswers` makes an object of each answer only when some
answer of a batch has to be replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from dcp.wire.frame import pack_response
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.rules.write_answer import AMBIGUOUS, Durability
from vbucket.model.entry import seqno_of, vb_id_of

TEXT_COMMAND: Final = -1
"""Stands for the opcode of a command of the text protocol."""
RUN: Final = -2
"""Stands for the opcodes of a run of changes: their answers have them."""
NO_PARTITION: Final = -1
"""Stands for the partition of a wait for this node's log alone."""
MARK_BYTES: Final = 400
"""Memory of a mark, about. A client that sends quiet changes only costs nothing else."""

_READS: Final = frozenset(
    {
        Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ, Opcode.GET_META, Opcode.GET_AND_LOCK,
        Opcode.GET_RANDOM_KEY, Opcode.GET_REPLICA, Opcode.SUBDOC_GET, Opcode.SUBDOC_EXISTS,
        Opcode.SUBDOC_GET_COUNT, Opcode.SUBDOC_MULTI_LOOKUP,
    }
)  # fmt: skip
"""Commands that change nothing that the client asked for. A due document may expire."""
_APPLIED: Final = frozenset(
    (
        b"",
        b"\0\0",
        *(each.to_bytes(2, "big") for each in (Status.E2BIG, Status.SUBDOC_SUCCESS_DELETED)),
    )
)
"""Statuses of requests that may have changed something. A SET that is too big may remove."""
_FLUSHES: Final = frozenset({Opcode.FLUSH, Opcode.FLUSHQ})
"""They change documents in several steps, before the one that answers."""


class Wait(NamedTuple):
    """One thing that an answer waits for."""

    vb_id: int
    group: int
    is_for_commit: bool
    """Whether the group must be committed in the partition; else it must be in this node's log."""


class Mark:
    """What the answers of one request, or of a run of changes, wait for. Those of a run have their
    opcode and opaque.
    """

    __slots__ = (
        "answers",
        "durability",
        "entries",
        "first_answer",
        "first_entry",
        "is_read",
        "is_replaced",
        "is_run",
        "observed",
        "opaque",
        "opcode",
        "undo",
    )

    def __init__(
        self,
        opcode: int,
        opaque: int,
        first_answer: int,
        answers: int,
        first_entry: int,
        entries: int,
        *,
        is_read: bool,
        observed: Sequence[Wait] = (),
        durability: Durability | None = None,
        undo: Callable[[], None] | None = None,
    ) -> None:
        self.opcode = opcode
        self.opaque = opaque
        self.first_answer = first_answer
        self.answers = answers
        """Which answers: their index in `SessionState.answers`, and their number."""
        self.first_entry = first_entry
        self.entries = entries
        """Which entries of the open group the request applied."""
        self.is_read = is_read
        """Whether nothing was applied that the client asked for."""
        self.is_run = opcode == RUN
        """Whether each answer tells of one entry, in the same order."""
        self.observed = observed
        """What else the answer tells of."""
        self.durability = durability
        self.undo = undo
        """Takes back what a successful request began, such as a stream."""
        self.is_replaced = False


def is_change(opcode: int, entries: int, answer: bytes) -> bool:
    """Return whether a binary request has changed what the client asked for. `answer` is its first
    answer; b"" if it has none, as a quiet change that was successful.
    """
    is_applied = answer[6:8] in _APPLIED
    return is_applied and (opcode in _FLUSHES or (entries > 0 and opcode not in _READS))


class HeldAnswer:
    """One answer that is held, and what it waits for."""

    __slots__ = ("answer", "changes", "due_ns", "is_settled", "mark", "waits")

    def __init__(
        self,
        answer: bytes,
        mark: Mark | None,
        waits: Sequence[Wait],
        changes: Sequence[tuple[int, int]],
        due_ns: int,
    ) -> None:
        self.answer = answer
        self.mark = mark
        self.waits = waits
        self.changes = changes
        """(partition, seqno) of each change, if the request has a durability frame."""
        self.due_ns = due_ns
        self.is_settled = mark is None
        """Whether the answer stays as it is now, and waits only for those before it."""


class MarkedAnswers:
    """The answers of one batch, with their marks."""

    __slots__ = (
        "_commit_timeout_ns",
        "_entries",
        "_error_body",
        "_json",
        "_needs_commit",
        "answers",
        "due_ns",
        "durable",
        "group",
        "held",
        "marks",
        "read_ns",
    )

    def __init__(
        self,
        answers: list[bytes],
        marks: list[Mark],
        entries: Sequence[bytes],
        group: int,
        read_ns: int,
        commit_timeout_ns: int,
        *,
        needs_commit: bool,
        error_body: Callable[[str, int], bytes],
        json_datatype: int,
    ) -> None:
        self.answers = answers
        self.marks = marks
        self._entries = entries
        """The entries that `Mark.first_entry` counts in."""
        self.group = group
        """The group that the entries are in."""
        self.read_ns = read_ns
        self._commit_timeout_ns = commit_timeout_ns
        self._needs_commit = needs_commit
        """Whether changes without a durability frame must be committed, too."""
        self._error_body = error_body
        """Returns the body of an error response: text and status -> bytes."""
        self._json = json_datatype
        self.durable = tuple(mark for mark in marks if mark.durability is not None)
        self.due_ns: int | None = min(map(self.due_of, marks))
        """When the first answer that waits is overdue; None: none waits any more."""
        self.held: list[HeldAnswer] | None = None
        """The answers one by one, once one of them had to be replaced; those that have left are
        removed."""

    def due_of(self, mark: Mark) -> int:
        """Return when a mark's answers are overdue: by their own timeout, or the node's."""
        durability = mark.durability
        if durability is None or durability.timeout_ms is None:
            return self.read_ns + self._commit_timeout_ns
        return self.read_ns + durability.timeout_ms * 1_000_000

    def changes_of(self, mark: Mark) -> list[tuple[int, int]]:
        """Return (partition, seqno) of each change of a request."""
        entries = self._entries[mark.first_entry : mark.first_entry + mark.entries]
        return [(vb_id_of(entry), seqno_of(entry)) for entry in entries]

    def touches(self, vb_ids: frozenset[int]) -> bool:
        """Return whether some answer tells of one of these partitions."""
        return any(vb_id_of(entry) in vb_ids for entry in self._entries) or any(
            wait.vb_id in vb_ids for mark in self.marks for wait in mark.observed
        )

    def one_by_one(self) -> list[HeldAnswer]:
        """Return the answers one by one, from now on in `held`."""
        if self.held is not None:
            return self.held
        answers, held, at = self.answers, list[HeldAnswer](), 0
        for mark in self.marks:
            if mark.first_answer > at:
                plain = b"".join(answers[at : mark.first_answer])
                held.append(HeldAnswer(plain, None, (), (), 0))
            at = mark.first_answer + mark.answers
            of_mark = answers[mark.first_answer : at]
            entries = self._entries[mark.first_entry : mark.first_entry + mark.entries]
            if mark.is_run:
                assert len(of_mark) == len(entries), "each change of a run has an answer"
                held += (
                    self._held_answer(answer, mark, (entry,))
                    for answer, entry in zip(of_mark, entries, strict=True)
                )
            else:
                held.append(self._held_answer(b"".join(of_mark), mark, entries))
        if at < len(answers):
            held.append(HeldAnswer(b"".join(answers[at:]), None, (), (), 0))
        self.held, self.answers = held, []
        return held

    def _held_answer(self, answer: bytes, mark: Mark, entries: Sequence[bytes]) -> HeldAnswer:
        is_durable = mark.durability is not None
        needs_commit = self._needs_commit or is_durable
        waits = {Wait(vb_id_of(entry), self.group, needs_commit) for entry in entries}
        return HeldAnswer(
            answer,
            mark,
            (*waits, *mark.observed),
            self.changes_of(mark) if is_durable else (),
            self.due_of(mark),
        )

    def replace(self, held: HeldAnswer, why: str) -> None:
        """Replace an answer: ambiguous if its request was applied, else a temporary failure."""
        mark = held.mark
        assert mark is not None, "an answer that waits for nothing stays"
        assert not held.is_settled, "an answer is replaced before it may leave"
        if mark.undo is not None:
            mark.undo()
        mark.is_replaced = held.is_settled = True
        if mark.opcode == TEXT_COMMAND:
            what = "try again" if mark.is_read else "the change was applied, and may be lost"
            held.answer = held.answer and b"SERVER_ERROR %b: %b\r\n" % (what.encode(), why.encode())
            return
        opcode, opaque = mark.opcode, mark.opaque
        if mark.is_run:
            opcode, opaque = held.answer[1], int.from_bytes(held.answer[12:16], "big")
        status = Status.ETMPFAIL if mark.is_read else AMBIGUOUS
        body = self._error_body(why, status)
        datatype = self._json if body else 0
        held.answer = pack_response(opcode, status, opaque=opaque, value=body, datatype=datatype)

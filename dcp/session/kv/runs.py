"""Plain reads and changes that come together: a loop in C for each, without a call for every one.

`runs` returns for each opcode a function that handles the requests from a position on, and returns
where the first other one begins; `dcp.session.kv.documents` handles that one. Where the loops
(vbucket/native) are not built, there are no runs.

Plain changes are SET, ADD, REPLACE, DELETE, counters, APPEND, PREPEND, TOUCH and GAT, also with a
CAS or an expiry, of a document in the default collection without XATTRs that is not due.

Rules: as in `dcp.session.kv.documents` and `updates`. A run answers what the handlers would. It
does not look for locks, and needs a client that may read or write everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dcp.session.kv.documents import refusal_answers
from dcp.session.state import ANSWER_BYTES_MAX, CHANGES_BYTES_MAX, SessionState
from dcp.wire.opcode import Opcode
from dcp.wire.status import MEMCACHED_TEXTS, Status

Run = Callable[[int, int], int]
"""Takes the position of a request and the end of the buffer; returns the position of the first
request that it did not handle."""

_GETS: Final = (Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ)
_CHANGES: Final = (
    Opcode.SET, Opcode.ADD, Opcode.REPLACE, Opcode.DELETE, Opcode.INCREMENT, Opcode.DECREMENT,
    Opcode.SETQ, Opcode.ADDQ, Opcode.REPLACEQ, Opcode.DELETEQ, Opcode.INCREMENTQ,
    Opcode.DECREMENTQ, Opcode.APPEND, Opcode.APPENDQ, Opcode.PREPEND, Opcode.PREPENDQ, Opcode.TOUCH,
    Opcode.GAT, Opcode.GATQ,
)  # fmt: skip

UNPREFIXED: Final = 1
HASHED: Final = 2
TOKENS: Final = 4
UNMARKED: Final = 8
"""The form of a client's requests and answers: see vbucket/native/key_form.h."""
_NO_RUNS: Final[dict[int, Run]] = {}
_MISS_TEXT: Final = MEMCACHED_TEXTS[Status.KEY_ENOENT]
"""For memcached's clients."""


class DocumentRuns:
    """The runs of one session."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        self._engine = state.engine
        self._plain_runs: dict[int, Run] = {}
        if state.engine.get_run is not None:
            self._plain_runs |= dict.fromkeys(map(int, _GETS), self.get_run)
        if state.engine.set_run is not None:
            self._plain_runs |= dict.fromkeys(map(int, _CHANGES), self.change_run)
        self._reading_runs = self._all_runs = self._plain_runs

    def runs(self) -> dict[int, Run]:
        """Return opcode -> a function that handles plain requests of this opcode which come
        together. Which opcodes have one depends on what the client negotiated.
        """
        hello = self._state.hello
        if self._engine.locks.held:
            return _NO_RUNS  # a run does not look for locks
        if not hello.has_collections:
            return self._plain_runs
        return self._all_runs if hello.has_mutation_tokens else self._reading_runs

    def add_runs(self, reading: dict[int, Run], changing: dict[int, Run]) -> None:
        """Add runs of other opcodes. They take keys with their collection; answers of changes carry
        mutation tokens.
        """
        self._reading_runs = self._reading_runs | reading
        self._all_runs = self._all_runs | reading | changing

    def _form(self) -> int:
        hello = self._state.hello
        return (
            (0 if hello.has_collections else UNPREFIXED)
            | (HASHED if hello.hashes_keys else 0)
            | (TOKENS if hello.has_mutation_tokens else 0)
            | (UNMARKED if self._state.marks is None else 0)  # what waits has its own mark
        )

    def change_run(self, position: int, end: int) -> int:
        """Handle plain changes. Return where others begin."""
        state, engine, run = self._state, self._engine, self._engine.set_run
        keyspace, answers, hello = engine.keyspace, state.answers, state.hello
        if run is None:
            return position
        first_answer, first_entry = len(answers), len(keyspace.pending)
        expiring, observed = list[bytes](), list[int]()
        refusals = refusal_answers(hello.has_xerror, hello.hashes_keys, hello.has_json)
        try:
            after, made_bytes = run.apply(
                state.buffer, position, end, answers, keyspace.pending, keyspace.touched,
                keyspace.group, engine.now_ns, hello.has_json,
                state.shared.limits.value_bytes_max, self._form(), engine.now_s, expiring,
                int((1 - state.work) * CHANGES_BYTES_MAX) + 1, observed, *refusals,
            )  # fmt: skip
        finally:  # some may be stored when memory runs out
            for entry in expiring:
                engine.due.add(entry)
        if len(keyspace.pending) > first_entry:
            state.wait_group = keyspace.group
            if state.marks is not None:
                state.mark_run(first_answer)
        for vb_id, group in zip(observed[::2], observed[1::2], strict=True):
            state.observes_group(vb_id, group)
        if made_bytes:
            state.spend(made_bytes / CHANGES_BYTES_MAX)
            state.unread_bytes += sum(map(len, answers[first_answer:]))
            state.is_full |= state.unread_bytes > ANSWER_BYTES_MAX
        return after

    def get_run(self, position: int, end: int) -> int:
        """Answer plain GETs: no extras, default collection, active partition. Return where others
        begin; `end` is the end of the buffer.
        """
        state, engine, run = self._state, self._engine, self._engine.get_run
        if run is None:
            return position
        after, answered, hits, misses, value_bytes = run.answer(
            state.buffer, position, end, state.answers, state.hello.datatypes, engine.now_s,
            engine.commits.committed_group, ANSWER_BYTES_MAX - state.unread_bytes,
            self._form(), _MISS_TEXT if state.hello.hashes_keys else b"",
        )  # fmt: skip
        if answered:
            engine.item_cache.hits += hits
            engine.item_cache.misses += misses
            engine.gets += answered
            state.unread_bytes += value_bytes
            state.is_full |= state.unread_bytes > ANSWER_BYTES_MAX
        return after

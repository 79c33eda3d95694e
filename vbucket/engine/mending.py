"""Bringing a partition's CAS back to the clock. Sans-IO.

A partition's own CAS follows the clock, but never falls: where somebody had set one that was far
ahead (older versions took any), all that came after it are far ahead, too. CAS is taken as time, by
the history window for one; and a CAS so high is refused elsewhere.

    1. The highest CAS is lowered to the highest one that may come from elsewhere: above every CAS
       that is not too far ahead. A control entry in the log says so. From then on changes have a
       CAS that can be believed.
    2. Every key whose newest version still has one that is too far ahead gets a new version with
       the same content: a change like any other, for streams, backups and conflicts.

What was replaced stays in the history as it is, until a compaction drops it. `Mended` says up to
which seqno, so that neither checks nor windows of time stumble over it. Doing it again does what is
left, after a crash in between for instance; a rollback to before brings old versions back as they
were.

Who calls it: the node, for operators.
"""

from __future__ import annotations

from typing import Final

from dcp.wire.status import Status
from vbucket.engine.engine import FLAGS_AT, Engine
from vbucket.engine.key_walk import KeyWalk
from vbucket.engine.keyspace import DELETION, MUTATION
from vbucket.engine.partition import VbState
from vbucket.model.entry import MUTATION_KEY_AT
from vbucket.model.ids import CAS_AHEAD_NS
from vbucket.store.key_record import StoredMeta
from vbucket.store.records import Mended

STEP_KEYS: Final = 150
"""Keys of a step: 1 to 2 ms, if all of them are changed."""


class MendingRefusedError(Exception):
    """The partition takes no changes now; the text says why."""


class Mending:
    """See the module. The counts are right after each step."""

    def __init__(self, engine: Engine, vb_id: int, now_ns: int) -> None:
        """Raises MendingRefusedError."""
        self._engine = engine
        self.vb_id = vb_id
        part = engine.partitions[vb_id]
        self._check()
        engine.begin_batch(now_ns)
        self.before_cas = part.max_cas
        self._cas_max = engine.cas_max + CAS_AHEAD_NS
        self._end_seqno = part.high_seqno
        if part.max_cas > self._cas_max:
            mended = Mended(part.high_seqno, engine.cas_max, now_ns)
            part.lower_cas(mended)
            engine.add_control(part, {"kind": "cas", "mended": list(mended)})
        self._walk = KeyWalk(engine, vb_id, self._end_seqno)
        self.documents = 0
        self.deletions = 0
        """Documents, and deleted ones, that got a new version."""

    def step(self, now_ns: int, keys_max: int = STEP_KEYS) -> bool:
        """Look at some keys; True when none is left. Raises MendingRefusedError,
        StoreDamagedError.
        """
        engine = self._engine
        self._check()
        engine.begin_batch(now_ns)
        keys = self._walk.take(keys_max)
        for key in keys:
            meta = engine.newest_meta(self.vb_id, key)
            if meta is not None and meta.cas > self._cas_max and engine.is_reachable(key):
                self._renew(key, meta)
        return not keys

    def _renew(self, key: bytes, meta: StoredMeta) -> None:
        """Store what a key has once more, with a CAS of the partition."""
        engine, part = self._engine, self._engine.partitions[self.vb_id]
        opcode, body, flags = DELETION, key, 0
        if meta.opcode == MUTATION:
            entry = engine.document_entry(part, key)
            if entry is None:
                return  # its time was over
            opcode, body = MUTATION, entry[MUTATION_KEY_AT:]
            flags = int.from_bytes(entry[FLAGS_AT : FLAGS_AT + 4], "big")
        status, _, _ = engine.put_with_meta(
            opcode, self.vb_id, key, body, flags, meta.expiry, meta.datatype, meta.rev_seqno + 1,
            0, 0, resolves_conflict=False, keeps_cas=False,
        )  # fmt: skip
        assert status == Status.OK, "the partition takes changes"
        if opcode == MUTATION:
            self.documents += 1
        else:
            self.deletions += 1

    def _check(self) -> None:
        part = self._engine.partitions[self.vb_id]
        if part.state != VbState.ACTIVE:
            state = VbState(part.state).name.lower()
            raise MendingRefusedError(f"vb {self.vb_id} is {state}; only active ones are mended")
        if part.is_backed_up:
            why = next(iter(part.holds.values()))
            raise MendingRefusedError(f"vb {self.vb_id} takes no changes now: {why}; try again")

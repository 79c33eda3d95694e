"""Bringing a partition's CAS back to the clock. Sans-IO.

The CAS of a partition follows the clock and never falls. If a client set one far ahead of the clock
(older versions accepted any), all later ones are far ahead, too. That is a problem because a CAS
serves as a time, for example for the history window, and because other nodes refuse such a CAS.

    1. A control entry lowers the highest CAS to the highest one that may come from elsewhere. That
       is above every CAS that is not too far ahead. From then on changes have a sound CAS.
    2. Every key whose newest version still has a CAS too far ahead gets a new version with the same
       content. It is an ordinary change for streams, backups and conflicts.

Replaced versions stay in the history unchanged until a compaction drops them. `Mended` records up
to which seqno there may be some, for checks and time windows. After a crash, calling it again does
the rest. A rollback to before restores the old versions as they were.

Who calls it: the node, for operators.
"""

from __future__ import annotations

from typing import Final

from dcp.wire.status import Status
from vbucket.engine.engine import FLAGS_AT, Engine
from vbucket.engine.keyspace import DELETION, MUTATION
from vbucket.engine.partition import VbState
from vbucket.engine.read_view import KeyWalk
from vbucket.model.entry import MUTATION_KEY_AT, value_of
from vbucket.model.ids import CAS_AHEAD_NS
from vbucket.store.key_record import StoredMeta
from vbucket.store.records import Mended

STEP_KEYS: Final = 150
"""Keys per step: 1 to 2 ms if all of them are changed."""


class MendingRefusedError(Exception):
    """The partition takes no writes now; the text says why."""


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
            engine.keyspace.add_control(part, {"kind": "cas", "mended": list(mended)})
        self._walk = KeyWalk(engine, vb_id, self._end_seqno)
        self.documents = 0
        self.deletions = 0
        """Documents and tombstones that got a new version."""

    def step(self, now_ns: int, keys_max: int = STEP_KEYS) -> bool:
        """Process some keys; return True when none is left. Raises MendingRefusedError,
        StoreDamagedError.
        """
        engine = self._engine
        self._check()
        engine.begin_batch(now_ns)
        keys = self._walk.take(keys_max)
        for key in keys:
            meta = engine.newest_meta(self.vb_id, key)
            if meta is not None and meta.cas > self._cas_max and engine.keyspace.is_reachable(key):
                self._renew(key, meta)
        return not keys

    def _renew(self, key: bytes, meta: StoredMeta) -> None:
        """Store the content of a key again, with a new CAS."""
        engine, part = self._engine, self._engine.partitions[self.vb_id]
        opcode, body, flags = DELETION, key, 0
        if meta.opcode != MUTATION and meta.datatype:
            tombstone = engine.versions.newest_entry(part, key)
            assert tombstone is not None, "its metadata was read"
            body = key + value_of(tombstone)
        if meta.opcode == MUTATION:
            entry = engine.document_entry(part, key)
            if entry is None:
                return  # it has expired
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
            raise MendingRefusedError(
                f"partition {self.vb_id} is {state}; only active ones are mended"
            )
        if part.holds:
            why = next(iter(part.holds.values()))
            raise MendingRefusedError(
                f"partition {self.vb_id} takes no changes now: {why}; try again"
            )

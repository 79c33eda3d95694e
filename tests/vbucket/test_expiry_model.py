"""Expiry against dictionaries: whatever happened, the documents whose time is over are those that
the pager makes go, and the table of due times is what the documents say.

Times are counted in seconds from the start; one step of the clock is a few of them.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.memory_node import MemoryNode
from vbucket.engine.documents.expiry import Pager
from vbucket.engine.documents.read_modify_write import touch
from vbucket.engine.engine import SET
from vbucket.engine.lifecycle import put_state
from vbucket.engine.partition import VbState
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.store.due import read_due
from vbucket.store.key_record import checked_meta
from vbucket.store.lmdb.environment_lmdb import LmdbEnv
from vbucket.store.records import BY_KEY_TABLE, EXPIRY_TABLE, TABLES
from vbucket.store.store import Store

VB_IDS = st.runner().flatmap(lambda machine: st.sampled_from(machine.vbuckets))
KEYS = [b"\0a", b"\0b", b"\0c"]
MUTATION = 0x57

WRITES = st.lists(
    st.tuples(VB_IDS, st.sampled_from(KEYS), st.sampled_from((1, 2, 3, 9, 0))),
    min_size=1,
    max_size=6,
)

Documents = dict[bytes, int]
"""Key -> seconds of its expiry, 0 for never."""


class ExpiryMachine(RuleBasedStateMachine):
    partitions = 8
    vbuckets = (3, 7)

    def __init__(self) -> None:
        super().__init__()
        self.node = MemoryNode(partitions=self.partitions)
        self.prepare()
        self.pager = Pager(self.node.engine, self.node.store)
        self.states: dict[int, list[Documents]] = {vb_id: [{}] for vb_id in self.vbuckets}
        """The documents after each seqno."""
        self.kept = copy.deepcopy(self.states)
        self.merging = False

    def prepare(self) -> None:
        """What another database needs."""

    @property
    def now_s(self) -> int:
        return self.node.now_ns // 1_000_000_000

    def documents(self, vb_id: int) -> Documents:
        return self.states[vb_id][-1]

    def changed(self, vb_id: int, key: bytes, expiry: int | None) -> None:
        """Add the state after a change; None: the document is gone."""
        documents = {other: at for other, at in self.documents(vb_id).items() if other != key}
        if expiry is not None:
            documents[key] = expiry
        self.states[vb_id].append(documents)

    def is_active(self, vb_id: int) -> bool:
        return self.node.engine.partitions[vb_id].state == VbState.ACTIVE

    def access(self, vb_id: int, key: bytes) -> None:
        """What any access does: a document whose time is over goes."""
        if 0 < self.documents(vb_id).get(key, 0) <= self.now_s:
            self.changed(vb_id, key, None)

    @rule(writes=WRITES, is_committed=st.just(True))
    def store_durably(self, writes: list[tuple[int, bytes, int]], *, is_committed: bool) -> None:
        self.store(writes, is_committed=is_committed)

    @rule(writes=WRITES, is_committed=st.booleans())
    def store(self, writes: list[tuple[int, bytes, int]], *, is_committed: bool) -> None:
        for vb_id, key, ttl_s in writes:
            if not self.is_active(vb_id):
                continue
            expiry = self.now_s + ttl_s if ttl_s else 0
            assert self.node.engine.store(SET, vb_id, key, key + b"v", 0, expiry, 0, 0)[0] == 0
            self.changed(vb_id, key, expiry)
        if is_committed:
            self.commit()

    @rule(vb_id=VB_IDS, key=st.sampled_from(KEYS), ttl_s=st.integers(0, 9))
    def touch(self, vb_id: int, key: bytes, ttl_s: int) -> None:
        if not self.is_active(vb_id):
            return
        self.access(vb_id, key)
        expiry = self.now_s + ttl_s if ttl_s else 0
        before = self.documents(vb_id).get(key)
        touch(self.node.engine, vb_id, key, expiry)
        if before is not None and before != expiry:
            self.changed(vb_id, key, expiry)

    @rule(vb_id=VB_IDS, key=st.sampled_from(KEYS))
    def delete(self, vb_id: int, key: bytes) -> None:
        if not self.is_active(vb_id):
            return
        self.access(vb_id, key)
        self.node.engine.delete(vb_id, key, 0)
        if key in self.documents(vb_id):
            self.changed(vb_id, key, None)

    def time_passes(self, seconds: int) -> None:
        self.node.now_ns += seconds * 1_000_000_000
        self.node.engine.begin_batch(self.node.now_ns)

    @rule(seconds=st.integers(0, 5), looks_max=st.integers(1, 4), slices=st.integers(1, 3))
    def page(self, seconds: int, looks_max: int, slices: int) -> None:
        """Some slices, perhaps not enough of them: what they change is due, and each is bounded."""
        self.time_passes(seconds)
        before = {vb_id: part.high_seqno for vb_id, part in self.parts().items()}
        for _ in range(slices):
            self.pager.step(self.node.now_ns, looks_max)
        self.adopt(before, looks_max * slices)

    @rule(seconds=st.integers(0, 5), looks_max=st.integers(1, 50))
    def page_all(self, seconds: int, looks_max: int) -> None:
        """Enough slices: nothing that is due is left."""
        self.time_passes(seconds)
        before = {vb_id: part.high_seqno for vb_id, part in self.parts().items()}
        for _ in range(500):
            if self.pager.step(self.node.now_ns, looks_max):
                break
        else:
            raise AssertionError("the pager looks at the same entries for ever")
        self.adopt(before, 500)
        for vb_id in self.vbuckets:
            due = [key for key, expiry in self.documents(vb_id).items() if 0 < expiry <= self.now_s]
            assert not due or not self.is_active(vb_id)

    def parts(self) -> dict[int, Any]:
        return {vb_id: self.node.engine.partitions[vb_id] for vb_id in self.vbuckets}

    def adopt(self, before: dict[int, int], changes_max: int) -> None:
        """Take over what the pager changed; every change is the expiry of a document in time."""
        assert not self.pager.damages
        changes = 0
        for vb_id, part in self.parts().items():
            found = self.node.engine.versions.keys_in_memory(
                vb_id, before[vb_id] + 1, part.high_seqno, 999
            )
            assert len(found) == part.high_seqno - before[vb_id]
            changes += len(found)
            for _, key in found:
                assert 0 < self.documents(vb_id)[key] <= self.now_s
                assert self.is_active(vb_id)
                self.changed(vb_id, key, None)
        assert changes <= changes_max

    @rule(vb_id=VB_IDS, part=st.floats(0, 1))
    def branch(self, vb_id: int, part: float) -> None:
        states = self.states[vb_id]
        seqno = int((len(states) - 1) * part)
        self.node.engine.keyspace.branch(vb_id, seqno)
        del states[seqno + 1 :]

    @rule(vb_id=VB_IDS)
    def pause(self, vb_id: int) -> None:
        """A partition stops to be active; the pager passes it over."""
        put_state(self.node.engine, vb_id, VbState.REPLICA)
        self.page_all(2, 3)

    @rule()
    def resume(self) -> None:
        for vb_id in self.vbuckets:
            put_state(self.node.engine, vb_id, VbState.ACTIVE)
        self.page_all(0, 3)

    @rule()
    def commit(self) -> None:
        self.node.commit()
        self.kept = copy.deepcopy(self.states)

    @precondition(lambda self: not self.merging)
    @rule()
    def begin_merge(self) -> None:
        self.commit()
        self.node.begin_merge()
        self.merging = True

    @precondition(lambda self: not self.merging)
    @rule()
    def merge(self) -> None:
        self.begin_merge()
        self.end_merge()

    @precondition(lambda self: self.merging)
    @rule()
    def end_merge(self) -> None:
        self.node.end_merge()
        self.merging = False

    @rule(is_committed=st.booleans())
    def crash(self, *, is_committed: bool) -> None:
        if is_committed:
            self.commit()
        self.node.crash()
        self.pager = Pager(self.node.engine, self.node.store)
        self.states = copy.deepcopy(self.kept)
        self.merging = False

    @invariant()
    def documents_are_those_of_the_model(self) -> None:
        for vb_id in self.vbuckets:
            part = self.node.engine.partitions[vb_id]
            assert part.high_seqno == len(self.states[vb_id]) - 1
            assert part.item_count == len(self.documents(vb_id))

    @invariant()
    def the_table_is_what_the_records_say(self) -> None:
        snapshot = self.node.env.snapshot()
        rows = {read_due(row, bytes(value)) for row, value in snapshot.range(EXPIRY_TABLE, b"\0")}
        wanted = set()
        for vb_key, value in snapshot.range(BY_KEY_TABLE, b"\0"):
            meta = checked_meta(vb_key, bytes(value))
            if meta.opcode == MUTATION and meta.expiry:
                wanted.add((meta.expiry, int.from_bytes(vb_key[:2], "big"), vb_key[2:]))
        snapshot.close()
        assert rows == wanted


class LmdbExpiryMachine(ExpiryMachine):
    """The same over LMDB."""

    def prepare(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        memory, node = self.node.env, self.node
        node.env = LmdbEnv(Path(self.folder.name) / "store", TABLES)  # type: ignore[assignment]
        record = Store(memory).node()
        partitions = Store(memory).partitions()
        assert record is not None
        node.store.close()
        engine_version = node.env.engine
        Store.create(node.env, record._replace(engine_version=engine_version), partitions).close()
        node.crash()

    def teardown(self) -> None:
        self.node.store.close()
        self.node.env.close()
        self.folder.cleanup()


class WholeExpiryMachine(ExpiryMachine):
    """The same with as many partitions as the product has."""

    partitions = NUM_VBUCKETS
    vbuckets = (3, 1000)


TestExpiry = ExpiryMachine.TestCase
TestExpiry.settings = settings(max_examples=25, stateful_step_count=50, deadline=None)
TestWholeExpiry = WholeExpiryMachine.TestCase
TestWholeExpiry.settings = settings(max_examples=3, stateful_step_count=50, deadline=None)
TestExpiryInLmdb = LmdbExpiryMachine.TestCase
TestExpiryInLmdb.settings = settings(max_examples=5, stateful_step_count=40, deadline=None)

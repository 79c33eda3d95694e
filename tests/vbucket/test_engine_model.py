"""The engine against dictionaries: sets, deletes, collections, branches, merges, crashes in any
order.

The model keeps, for each partition, every version ever applied on the present branch with its
leader epoch, and what of it was committed; a crash takes back what was not. A system event is a
version without a value. The manifest is the node's: a branch does not take it back, the partition
tells it anew.

Every read goes through the item cache, in all its sizes: none, a few entries, all. What it holds is
compared with the store after every step as well.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeVar, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcp.wire.frame import FrameDecoder
from dcp.wire.message import parse_deletion, parse_mutation
from dcp.wire.opcode import Opcode
from failover.rules.history import Version
from support.memory_node import LmdbNode, MemoryNode
from vbucket.engine.documents.item_cache import ITEM_OVERHEAD_BYTES
from vbucket.engine.engine import SET, StoredDocument
from vbucket.engine.hashes import hashed, listed
from vbucket.engine.leadership import adopt_failover_log, set_leader_epoch
from vbucket.engine.lifecycle import PurgeRefusedError, purge
from vbucket.engine.partition import BranchRefusedError, FloorError
from vbucket.model.entry import PREFIX_BYTES, head_of, is_deleted
from vbucket.model.ids import NUM_VBUCKETS, draw_vb_uuid
from vbucket.model.manifest import SYSTEM_COLLECTION, SYSTEM_KEY
from vbucket.native.key_hashes import KeyHashes, RowForm
from vbucket.store.hashes import counted_hashes

T = TypeVar("T")


def finished(steps: Generator[None, None, T]) -> T:
    """Take all steps; return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast("T", end.value)


VB_IDS = st.runner().flatmap(lambda machine: st.sampled_from(machine.vbuckets))
KEYS = [b"\0a", b"\0b", b"\0c"]
COLLECTION_IDS = (8, 9, 10, 11)
OTHER_KEYS = [bytes([collection_id]) + b"a" for collection_id in COLLECTION_IDS]
OPAQUE = b"\1\2\3\4"


@dataclass
class History:
    """One partition: its versions (key, value or None), seqno = place + 1, and its failover log."""

    versions: list[tuple[bytes, bytes | None]] = field(default_factory=list)
    branches: list[Version] = field(default_factory=list)
    floor: int = 0
    purge: int = 0
    epoch: int = 0
    epochs: list[int] = field(default_factory=list)
    """The leader epoch of each version, as far as they are noted."""

    def note_epochs(self) -> None:
        """Call it before the epoch changes, and before versions are undone."""
        self.epochs += [self.epoch] * (len(self.versions) - len(self.epochs))

    def undo(self, seqno: int) -> None:
        self.note_epochs()
        del self.versions[seqno:], self.epochs[seqno:]
        if not seqno:
            self.floor = self.purge = 0

    def told(self) -> tuple[set[int], set[int]]:
        """Return the collections whose creations and whose drops are among the versions."""
        told: tuple[set[int], set[int]] = (set(), set())
        for key, _ in self.versions:
            if key[0] == SYSTEM_COLLECTION:
                told[key[1]].add(int.from_bytes(key[6:10], "big"))
        return told

    def high_seqno(self, collection_id: int) -> int:
        seqnos = [n for n, (key, _) in enumerate(self.versions, 1) if key[0] == collection_id]
        return max(seqnos, default=0)

    def state(self, seqno: int | None = None) -> dict[bytes, bytes]:
        state: dict[bytes, bytes] = {}
        for key, value in self.versions[:seqno]:
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value
        return state


def of(collection_id: int, state: dict[bytes, bytes]) -> dict[bytes, bytes]:
    return {key: value for key, value in state.items() if key[0] == collection_id}


def event_key(kind: int, collection_id: int, name: str = "") -> bytes:
    return SYSTEM_KEY.pack(SYSTEM_COLLECTION, kind, 0, collection_id) + name.encode()


class EngineMachine(RuleBasedStateMachine):
    partitions = 8
    vbuckets = (3, 7)

    def __init__(self) -> None:
        super().__init__()
        self.node = self.new_node()
        self.node.set_sizes(body_bytes_target=300, step_bytes=500)
        self.live = {
            vb_id: History(branches=list(self.node.engine.partitions[vb_id].failover.entries))
            for vb_id in self.vbuckets
        }
        self.collections: dict[int, str] = {}
        self.durable = copy.deepcopy((self.live, self.collections))
        self.merging = False
        self.count = 0

    def new_node(self) -> MemoryNode:
        return MemoryNode(partitions=self.partitions)

    @initialize(item_cache_bytes=st.sampled_from((0, 700, 2_000, 1 << 20)))
    def begin_with_a_collection(self, item_cache_bytes: int) -> None:
        self.node.item_cache_bytes = item_cache_bytes
        self.node.engine.item_cache.resize(item_cache_bytes)
        self.create_collection()

    @rule(vb_id=VB_IDS, key=st.sampled_from(KEYS + OTHER_KEYS))
    def set(self, vb_id: int, key: bytes) -> None:
        if key[0] and key[0] not in self.collections:
            return  # the session refuses it
        self.count += 1
        value = b"%d" % self.count
        status, cas, seqno = self.node.engine.store(SET, vb_id, key, key + value, 0, 0, 0, 0)
        history = self.live[vb_id]
        history.versions.append((key, value))
        assert (status, seqno) == (0, len(history.versions))
        assert cas

    @rule(vb_id=VB_IDS, key=st.sampled_from(KEYS + OTHER_KEYS))
    def delete(self, vb_id: int, key: bytes) -> None:
        if key[0] and key[0] not in self.collections:
            return
        history = self.live[vb_id]
        status, _, seqno = self.node.engine.delete(vb_id, key, 0)
        if key in history.state():
            history.versions.append((key, None))
            assert (status, seqno) == (0, len(history.versions))
        else:
            assert status == 1

    @precondition(lambda self: self.node.engine.keyspace.manifest.next_collection_id < 12)
    @rule()
    def create_collection(self) -> None:
        collection_id = self.node.engine.keyspace.manifest.next_collection_id
        name = f"c{collection_id}"
        self.node.engine.keyspace.set_manifest(
            self.node.engine.keyspace.manifest.create_collection("_default", name)
        )
        self.collections[collection_id] = name
        for history in self.live.values():
            history.versions.append((event_key(0, collection_id, name), None))

    @precondition(lambda self: self.collections)
    @rule(data=st.data())
    def drop_collection(self, data: st.DataObject) -> None:
        collection_id = data.draw(st.sampled_from(sorted(self.collections)))
        name = self.collections.pop(collection_id)
        self.node.engine.keyspace.set_manifest(
            self.node.engine.keyspace.manifest.drop_collection("_default", name)
        )
        for history in self.live.values():
            history.versions.append((event_key(1, collection_id), None))

    @rule()
    def commit(self) -> None:
        self.node.commit()
        self.durable = copy.deepcopy((self.live, self.collections))

    @rule(part=st.floats(0, 1, exclude_max=True))
    def crash_before_sync(self, part: float) -> None:
        """The process dies between taking a group and the end of its sync; some of it is left."""
        group = self.node.engine.keyspace.take_group()
        if group is not None:
            device = self.node.device
            size_before = device.current_bytes
            self.node.writer.append(group.number, group.payload)
            record = device.read(device.segments()[-1])[size_before:]
            # With the zeros ahead of the log, a record that lacks only zeros at its end is whole.
            torn_bytes_max = len(record.rstrip(b"\0")) - 1
            keep_bytes = min(int(len(record) * part), torn_bytes_max)
            self.crash(keep_bytes)
            assert (self.node.torn is not None) == (keep_bytes > 0)

    @precondition(lambda self: not self.merging)
    @rule()
    def begin_merge(self) -> None:
        self.commit()
        self.node.begin_merge()
        self.merging = True

    @precondition(lambda self: self.merging)
    @rule(slices=st.integers(0, 8))
    def stop_merge(self, slices: int) -> None:
        self.node.stop_merge(slices)

    @precondition(lambda self: self.merging)
    @rule(is_answer_lost=st.booleans())
    def end_merge(self, is_answer_lost: bool) -> None:
        self.node.end_merge(is_answer_lost=is_answer_lost)
        self.merging = False

    @rule(vb_id=VB_IDS, part=st.floats(0, 1), purge=st.floats(0, 1))
    def raise_floor(self, vb_id: int, part: float, purge: float) -> None:
        """Only what is merged may be given up, and nothing above which the store may be wrong."""
        history = self.live[vb_id]
        merged = self.node.engine.partitions[vb_id].merged_seqno
        floor = max(history.floor, int(merged * part))
        may = self.node.raise_floor(vb_id, floor, int(purge * floor))
        assert may.floor == floor
        if floor <= merged:
            assert may.purge == max(history.purge, min(int(purge * floor), floor - 1))
        history.floor, history.purge = may.floor, may.purge

    @rule(vb_id=VB_IDS, part=st.floats(0, 1, exclude_max=True))
    def purge(self, vb_id: int, part: float) -> None:
        """What is merged does not matter to an operator."""
        history = self.live[vb_id]
        seqno = int(len(history.versions) * part)
        if seqno >= self.node.engine.partitions[vb_id].committed_seqno:
            if seqno:
                with pytest.raises(PurgeRefusedError, match="committed up to"):
                    purge(self.node.engine, vb_id, seqno)
        elif seqno > history.purge:
            history.floor, history.purge = seqno + 1, seqno
            assert purge(self.node.engine, vb_id, seqno) == seqno

    @precondition(lambda self: not self.merging)
    @rule(undone=st.lists(st.sampled_from(KEYS), min_size=1), key=st.sampled_from(KEYS))
    def purge_above_what_is_merged(self, undone: list[bytes], key: bytes) -> None:
        """A branch, a purge and a compaction before the merge that takes out of the store what the
        branch undid: all of it together, because chance rarely brings it in this order.
        """
        vb_id = self.vbuckets[0]
        kept = len(self.live[vb_id].versions)
        for undone_key in undone:
            self.set(vb_id, undone_key)
        self.commit()
        self.node.merge()
        self.branch(vb_id, kept / len(self.live[vb_id].versions))
        for _ in undone:
            self.set(vb_id, key)
        self.commit()
        self.purge(vb_id, 0.99)
        self.raise_floor(vb_id, 0.0, 0.0)
        self.commit()
        self.node.compact(self.vbuckets)
        self.node.merge()

    @rule(slices=st.integers(1, 3) | st.none())
    def compact(self, slices: int | None) -> None:
        self.node.compact(self.vbuckets, slices=slices)

    @precondition(lambda self: not self.merging)
    @rule(part=st.floats(0.5, 1), meanwhile=st.lists(st.sampled_from(KEYS)))
    def give_up_history(self, part: float, meanwhile: list[bytes]) -> None:
        """All of it together, because chance rarely brings it in this order. What is set meanwhile
        has previous versions that go.
        """
        self.commit()
        self.node.merge()
        for vb_id in self.vbuckets:
            self.raise_floor(vb_id, part, 1.0)
        self.commit()
        self.node.merge()
        for key in meanwhile:
            self.set(self.vbuckets[0], key)
        self.node.compact(self.vbuckets)

    @precondition(lambda self: not self.merging)
    @rule(vb_id=VB_IDS, key=st.sampled_from(KEYS), others=st.booleans())
    def begin_anew(self, vb_id: int, key: bytes, others: bool) -> None:
        """What was read from the store before is not there any more, and the store is asked again.

        All of it together, as above.
        """
        self.commit()
        self.node.merge()
        self.everything_equals_the_model()
        self.branch(vb_id, 0.0)
        if others:
            self.commit()
            self.node.merge()
        self.set(vb_id, key)
        self.commit()
        self.node.merge()

    @rule(vb_id=VB_IDS, part=st.floats(0, 1, exclude_max=True))
    def branch_below_the_floor(self, vb_id: int, part: float) -> None:
        seqno = int(self.live[vb_id].floor * part)
        if seqno:
            with pytest.raises(FloorError, match="or to 0"):
                self.node.engine.keyspace.branch(vb_id, seqno)

    @rule(vb_id=VB_IDS, part=st.floats(0, 1), epochs=st.sampled_from((0, 0, 1, 3)))
    def branch(self, vb_id: int, part: float, epochs: int = 0) -> None:
        history = self.live[vb_id]
        seqno = int(len(history.versions) * part)
        if seqno < history.floor:
            seqno = 0
        epoch = history.epoch + epochs
        branch = self.node.engine.keyspace.branch(vb_id, seqno, epoch if epochs else None)
        assert branch.undone_seqnos == len(history.versions) - seqno
        undone = {key for key, _ in history.versions[seqno:]}
        live = {key for key in history.state() if key[0] in self.collections.keys() | {0}}
        assert branch.undone_keys == len(undone if seqno else live)
        history.undo(seqno)
        history.epoch = epoch
        kept = [version for version in history.branches if version.seqno <= seqno]
        made = Version(branch.failover.current.vb_uuid, seqno, epoch)
        history.branches = [made, *kept][:200]
        created, dropped = history.told()
        for collection_id in sorted(created - dropped - self.collections.keys()):
            history.versions.append((event_key(1, collection_id), None))
        for collection_id in sorted(self.collections.keys() - created):
            name = self.collections[collection_id]
            history.versions.append((event_key(0, collection_id, name), None))

    @rule(vb_id=VB_IDS, epochs=st.integers(0, 2))
    def hand_over(self, vb_id: int, epochs: int) -> None:
        history = self.live[vb_id]
        history.note_epochs()
        history.epoch += epochs
        set_leader_epoch(self.node.engine, vb_id, history.epoch)

    @rule(
        vb_id=VB_IDS,
        part=st.none() | st.floats(0, 1),
        versions=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=3),
        epochs=st.integers(0, 2),
    )
    def adopt(
        self, vb_id: int, part: float | None, versions: list[tuple[int, int]], epochs: int
    ) -> None:
        """Another node was the master: it has versions that begin at or above this one's end."""
        history = self.live[vb_id]
        seqno = len(history.versions) if part is None else int(len(history.versions) * part)
        if seqno < history.floor:
            seqno = 0
        log = self.node.engine.partitions[vb_id].failover
        if seqno < len(history.versions):
            log = log.cut(seqno)
        at, epoch = max(seqno, log.current.seqno), history.epoch
        for more_seqnos, more_epochs in versions:
            at, epoch = at + more_seqnos, epoch + more_epochs
            log = log.branch(draw_vb_uuid(self.node.draws), at, epoch)
        epoch += epochs
        is_cut = seqno < len(history.versions)
        adopt_failover_log(
            self.node.engine, vb_id, log, epoch, rollback_to=seqno if is_cut else None
        )
        history.undo(seqno) if is_cut else history.note_epochs()
        history.epoch, history.branches = epoch, list(log.entries)

    @rule(vb_id=VB_IDS)
    def read_all_epochs(self, vb_id: int) -> None:
        """Wherever a version is, it is of the epoch in which it was made."""
        engine, history = self.node.engine, self.live[vb_id]
        history.note_epochs()
        part = engine.partitions[vb_id]
        entries = [engine.versions.entry_at(part, seqno + 1) for seqno in range(part.high_seqno)]
        kept = [seqno for seqno, entry in enumerate(entries) if entry is not None]
        assert {*range(max(history.floor - 1, 0), part.high_seqno)} <= {*kept}
        assert [head_of(entry).epoch for entry in entries if entry is not None] == [
            history.epochs[seqno] for seqno in kept
        ]

    @rule(vb_id=VB_IDS)
    def branch_above_the_end(self, vb_id: int) -> None:
        try:
            self.node.engine.keyspace.branch(vb_id, len(self.live[vb_id].versions) + 1)
        except BranchRefusedError as error:
            assert f"partition {vb_id}" in str(error)  # noqa: PT017 - the refusal must name the partition
        else:
            raise AssertionError("a branch began where nothing is")

    @rule(keep_bytes=st.just(0))
    def crash(self, keep_bytes: int) -> None:
        self.node.crash(keep_bytes)
        self.live, self.collections = copy.deepcopy(self.durable)
        self.merging = False

    @rule(vb_id=VB_IDS, part=st.floats(0, 1), bytes_max=st.integers(1, 300))
    def stream(self, vb_id: int, part: float, bytes_max: int) -> None:
        """Whoever holds the state as of any seqno reaches the newest committed one."""
        engine = self.node.engine
        committed = engine.partitions[vb_id].committed_seqno
        history = self.live[vb_id]
        start = int(committed * part)
        if start == committed or 0 < start < history.purge or committed < history.floor:
            return  # it would be told to begin anew, or to wait
        state = history.state(start)
        skip = engine.versions.superseded(vb_id, start + 1, committed)
        frames: list[bytes] = []
        seqno = start + 1
        while seqno <= committed:
            batch = engine.versions.frames(vb_id, seqno, committed, OPAQUE, skip, bytes_max)
            frames += batch.frames
            assert batch.wire_bytes == sum(map(len, batch.frames))
            assert batch.next_seqno > seqno
            seqno = batch.next_seqno
        seqnos, keys = [], []
        for frame in FrameDecoder().feed(b"".join(frames)):
            assert (frame.vb_id, frame.opaque) == (vb_id, int.from_bytes(OPAQUE, "big"))
            keys.append(frame.key)
            if frame.opcode == Opcode.DCP_SYSTEM_EVENT:
                seqnos.append(int.from_bytes(frame.extras[:8], "big"))
            elif frame.opcode == Opcode.DCP_MUTATION:
                state[frame.key] = frame.value
                seqnos.append(parse_mutation(frame).by_seqno)
            else:
                state.pop(frame.key, None)
                seqnos.append(parse_deletion(frame).by_seqno)
        assert seqnos == sorted(set(seqnos))
        assert seqnos[-1] == committed
        assert len(keys) == len(set(keys)), "a snapshot shows a key once"
        known = self.reachable()
        expected = history.state(committed)
        for collection_id in known:
            assert of(collection_id, state) == of(collection_id, expected)

    @rule(
        vb_id=VB_IDS,
        part=st.floats(0, 1),
        bytes_max=st.integers(1, 300),
        wanted=st.sets(st.sampled_from((0, 1, *COLLECTION_IDS))),
    )
    def stream_filtered(self, vb_id: int, part: float, bytes_max: int, wanted: set[int]) -> None:
        """A filter shows the newest versions of its keys, and nothing else."""
        engine = self.node.engine
        committed = engine.partitions[vb_id].committed_seqno
        history = self.live[vb_id]
        start = int(committed * part)
        skip = engine.versions.superseded(vb_id, start + 1, committed)
        frames: list[bytes] = []
        seqno = start + 1
        while seqno <= committed:
            batch = engine.versions.frames(
                vb_id, seqno, committed, OPAQUE, skip, bytes_max, lambda key: key[0] in wanted
            )
            frames += batch.frames
            assert batch.next_seqno > seqno
            seqno = batch.next_seqno
        newest = {key: n for n, (key, _) in enumerate(history.versions[:committed], 1)}
        expected = sorted(n for key, n in newest.items() if n > start and key[0] in wanted)
        found = [int.from_bytes(frame[24:32], "big") for frame in frames]
        assert found == sorted(set(found) & set(expected))
        for seqno in set(expected) - set(found):
            key, value = history.versions[seqno - 1]
            is_purged = value is None and seqno <= history.purge and key[0] != SYSTEM_COLLECTION
            is_dropped = key[0] not in self.reachable() and seqno <= history.floor
            assert is_purged or is_dropped

    @rule(vb_id=VB_IDS, part=st.floats(0, 1))
    def last_change_of_the_default_collection(self, vb_id: int, part: float) -> None:
        history = self.live[vb_id]
        seqno = max(history.floor, int(len(history.versions) * part))
        versions = enumerate(history.versions[:seqno], 1)
        expected = max((n for n, (key, _) in versions if key[0] == 0), default=0)
        assert self.node.engine.keyspace.default_seqno_at(vb_id, seqno) == expected

    def reachable(self) -> set[int]:
        return {0, *self.collections}

    @invariant()
    def what_is_cached_is_in_the_store(self) -> None:
        """Of keys that no layer holds; and what is held is what was counted."""
        engine, store = self.node.engine, self.node.store
        held_bytes = 0
        for part in engine.partitions:
            if not part.recent and not part.older:
                continue
            assert part.recent.keys().isdisjoint(part.older)
            for key, entry in [*part.recent.items(), *part.older.items()]:
                held_bytes += len(key) + len(entry) + ITEM_OVERHEAD_BYTES
                if any(key in layer.newest for layer in part.layers()):
                    continue
                assert part.merged_seqno
                meta = store.meta(part.vb_id, key)
                if not entry or is_deleted(entry):
                    assert meta is None or meta.opcode != Opcode.DCP_MUTATION
                else:
                    assert meta is not None
                    stored = store.entry(part.vb_id, meta.seqno)
                    assert stored is not None
                    assert entry[PREFIX_BYTES:] == stored[PREFIX_BYTES:]
        cache = engine.item_cache
        assert cache.held_bytes == held_bytes <= cache.bytes_max

    @invariant()
    def hashes_are_those_of_the_documents(self) -> None:
        """What merges keep, what is counted, and both with what is in memory folded in."""
        engine, store = self.node.engine, self.node.store
        for vb_id, history in self.live.items():
            part = engine.partitions[vb_id]
            record = store.partition(vb_id)
            assert record is not None
            kept = store.hashes(vb_id, record)
            gone = engine.keyspace.manifest.is_gone
            if kept is not None:
                counted = counted_hashes(store._reader, vb_id)
                assert {c: t for c, t in kept.items() if not gone(c)} == {
                    c: t for c, t in counted.items() if not gone(c)
                }
            for collection_id in (0, *self.collections):
                wanted = KeyHashes()
                keys = []
                for key in sorted(history.state()):
                    if key[0] != collection_id:
                        continue
                    meta = engine.newest_meta(vb_id, key)
                    assert meta is not None
                    keys.append(key)
                    number = meta.cas.to_bytes(8, "big") + meta.rev_seqno.to_bytes(8, "big")
                    wanted.change([], [(key, number)], RowForm(0, key[:1], 0, 8))
                found = finished(hashed(engine.versions, part, collection_id))
                assert found.hashes == wanted
                assert found.seqno == part.high_seqno
                rows = finished(listed(engine.versions, part, collection_id, 0, b"\1")).rows
                assert [key[2:] for key, _ in rows] == keys

    @invariant()
    def everything_equals_the_model(self) -> None:
        engine = self.node.engine
        for vb_id, history in self.live.items():
            known = self.collections.keys() | {0}
            state = {k: value for k, value in history.state().items() if k[0] in known}
            part = engine.partitions[vb_id]
            assert part.high_seqno == len(history.versions)
            assert (part.history_floor, part.purge_seqno) == (history.floor, history.purge)
            for collection_id in self.collections:
                high_seqno, documents = part.tally.collections.get(collection_id, (0, 0))
                assert high_seqno == history.high_seqno(collection_id)
                assert documents == sum(key[0] == collection_id for key in state)
            assert part.tally.collections.keys() <= self.collections.keys()
            assert part.committed_seqno <= part.high_seqno
            assert part.item_count == len(state)
            assert list(part.failover.entries) == history.branches
            assert part.leader_epoch == history.epoch
            for key in KEYS + [key for key in OTHER_KEYS if key[0] in self.collections]:
                found = engine.get(vb_id, key)
                value = found.value if isinstance(found, StoredDocument) else None
                assert value == state.get(key)


EngineMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, print_blob=True
)
TestEngine = EngineMachine.TestCase


class WholeEngineMachine(EngineMachine):
    """The same with as many partitions as the product has."""

    partitions = NUM_VBUCKETS
    vbuckets = (3, 1000)


WholeEngineMachine.TestCase.settings = settings(
    max_examples=4, stateful_step_count=40, deadline=None, print_blob=True
)
TestWholeEngine = WholeEngineMachine.TestCase


class LmdbEngineMachine(EngineMachine):
    """The same over LMDB."""

    def new_node(self) -> MemoryNode:
        return LmdbNode(partitions=self.partitions)

    def teardown(self) -> None:
        super().teardown()
        assert isinstance(self.node, LmdbNode)
        self.node.close()


LmdbEngineMachine.TestCase.settings = settings(
    max_examples=8, stateful_step_count=40, deadline=None, print_blob=True
)
TestEngineOverLmdb = LmdbEngineMachine.TestCase

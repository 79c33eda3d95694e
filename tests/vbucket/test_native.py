"""The loops in C against their twins in Python: the same tables and reports, byte by byte.

The histories are those of a real engine: documents with and without an expiry, collections, expired
and deleted documents, branches, lowered CAS, floors and compactions, in any order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import google_crc32c
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from keyspace_model import ModelPartition, SegmentWriter, create_store

from memory.kv_env import MemoryEnv
from support.memory_node import MemoryNode
from support.stored_bytes import pack_mutation
from vbucket.engine.documents.expiry import Pager
from vbucket.engine.engine import SET
from vbucket.engine.mending import Mending
from vbucket.model.control import pack_control
from vbucket.native import compaction_loops, new_staged
from vbucket.store.block import Block, block_key, build_blocks, repack_blocks
from vbucket.store.environment import KvEnv
from vbucket.store.records import BY_KEY_TABLE, BY_SEQNO_TABLE, TABLES
from vbucket.store.store import StoreView
from vbucket.upkeep.compaction import Compactor, Floors, SliceReport
from vbucket.upkeep.merge import MergeReport, merge

VB_IDS = (0, 1, 5)
KEYS = tuple(bytes([letter]) * length for letter in b"abc" for length in (1, 3, 9, 12, 240))
COLLECTIONS = (b"\0", b"\0", b"\0", b"\x08", b"\x09")
"""Mostly the default one. The others exist or do not."""
VALUES = st.integers(0, 90) | st.just(400)
TARGET = 300
"""Bytes of a block: a few versions."""

needs_loops = pytest.mark.skipif(
    new_staged() is None, reason="the C loops are not built (scripts/compile)"
)
pytestmark = needs_loops


def content(env: KvEnv) -> dict[str, list[tuple[bytes, bytes]]]:
    snapshot = env.snapshot()
    rows = {
        table: [(key, bytes(value)) for key, value in snapshot.range(table, b"\0")]
        for table in TABLES
    }
    snapshot.close()
    return rows


class BothCompactors:
    """Compacts two stores, one with each form."""

    def __init__(self, twin: KvEnv, **sizes: int) -> None:
        self._twin = twin
        self._native = Compactor(**sizes)
        self._plain = Compactor(**sizes, native=False)

    def begin_again(self, vb_id: int) -> None:
        for compactor in (self._native, self._plain):
            compactor.begin_again(vb_id)

    def run(
        self,
        env: KvEnv,
        vb_ids: Iterable[int],
        is_over: Callable[[], bool],
        *,
        floors: Mapping[int, Floors],
    ) -> SliceReport:
        todo = list(vb_ids)
        report = self._native.run(env, todo, is_over, floors=floors)
        assert self._plain.run(self._twin, todo, is_over, floors=floors) == report
        assert content(env) == content(self._twin)
        return report


class TwinNode(MemoryNode):
    """A node whose store has a twin that Python maintains."""

    def _new_env(self, seed: int) -> KvEnv:
        env = super()._new_env(seed)
        assert isinstance(env, MemoryEnv)
        self.twin = MemoryEnv(TABLES)
        self.twin.tables = {name: rows.copy() for name, rows in env.tables.items()}
        self._begin_compactor()
        return env

    def _begin_compactor(self) -> None:
        if hasattr(self, "twin"):
            sizes = {"step_bytes": self.step_bytes, "body_bytes_target": self.body_bytes_target}
            self.compactor: Any = BothCompactors(self.twin, **sizes)

    def merge_segments(self, sealed: list[tuple[int, bytes]]) -> MergeReport:
        report = super().merge_segments(sealed)
        assert merge(self.twin, sealed, body_bytes_target=TARGET, native=False) == report
        assert content(self.env) == content(self.twin)
        return report


class TwinMachine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.node = TwinNode(partitions=8, body_bytes_target=TARGET, step_bytes=600)
        self.pager = Pager(self.node.engine, self.node.store)
        self.has_collections = False

    @initialize(has_collections=st.booleans())
    def begin(self, *, has_collections: bool) -> None:
        self.has_collections = has_collections

    @rule(
        vb_id=st.sampled_from(VB_IDS),
        writes=st.lists(
            st.tuples(
                st.sampled_from(COLLECTIONS), st.sampled_from(KEYS), VALUES,
                st.sampled_from((0, 0, 0, 0, 5, 50)), st.sampled_from((0, 0, 0, 1)),
            ),
            min_size=1, max_size=12,
        ),
        is_default=st.booleans(),
    )  # fmt: skip
    def store(
        self, vb_id: int, writes: list[tuple[bytes, bytes, int, int, int]], *, is_default: bool
    ) -> None:
        engine = self.node.engine
        for collection, key, value_bytes, ttl_s, datatype in writes:
            full = (b"\0" if is_default else collection) + key
            if full[0] and full[0] not in engine.keyspace.manifest.collections:
                continue
            expiry = self.node.now_ns // 1_000_000_000 + ttl_s if ttl_s else 0
            body = full + b"7" * value_bytes
            assert engine.store(SET, vb_id, full, body, 0, expiry, datatype, 0)[0] == 0

    @rule(vb_id=st.sampled_from(VB_IDS), keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def delete(self, vb_id: int, keys: list[bytes]) -> None:
        for key in keys:
            self.node.engine.delete(vb_id, b"\0" + key, 0)

    @rule(seconds=st.integers(1, 60))
    def expire(self, seconds: int) -> None:
        self.node.now_ns += seconds * 1_000_000_000
        self.node.engine.begin_batch(self.node.now_ns)
        for _ in range(20):
            if self.pager.step(self.node.now_ns, 50):
                break

    @rule(vb_id=st.sampled_from(VB_IDS), part=st.floats(0, 1))
    def branch(self, vb_id: int, part: float) -> None:
        found = self.node.engine.partitions[vb_id]
        seqno = int(found.high_seqno * part)
        if seqno >= found.history_floor or not seqno:
            self.node.engine.keyspace.branch(vb_id, seqno)

    @rule(vb_id=st.sampled_from(VB_IDS), seconds=st.integers(0, 90))
    def mend(self, vb_id: int, seconds: int) -> None:
        """Lower the highest CAS; the clock went back."""
        mending = Mending(self.node.engine, vb_id, self.node.now_ns - seconds * 1_000_000_000)
        while not mending.step(self.node.now_ns):
            pass

    @precondition(lambda self: self.has_collections)
    @rule(name=st.sampled_from(("one", "two")))
    def collection(self, name: str) -> None:
        keyspace = self.node.engine.keyspace
        manifest = keyspace.manifest
        known = {found.name for found in manifest.collections.values()}
        change = manifest.drop_collection if name in known else manifest.create_collection
        keyspace.set_manifest(change("_default", name))

    @rule(vb_id=st.sampled_from(VB_IDS), floor=st.floats(0, 1), purge=st.floats(0, 1))
    def raise_floor(self, vb_id: int, floor: float, purge: float) -> None:
        seqno = int(self.node.engine.partitions[vb_id].committed_seqno * floor)
        if seqno:
            self.node.raise_floor(vb_id, seqno, int((seqno - 1) * purge))

    @rule()
    def commit(self) -> None:
        self.node.commit()

    @rule()
    def merge(self) -> None:
        self.node.merge()

    @rule(
        rounds=st.lists(
            st.lists(
                st.tuples(st.sampled_from(COLLECTIONS), st.sampled_from(KEYS), VALUES),
                min_size=1, max_size=9,
            ),
            max_size=4,
        )
    )  # fmt: skip
    def store_and_merge(self, rounds: list[list[tuple[bytes, bytes, int]]]) -> None:
        for writes in rounds:
            self.store(0, [(*write, 0, 0) for write in writes], is_default=False)
            self.node.merge()

    @rule(slices=st.none() | st.integers(1, 3))
    def compact(self, slices: int | None) -> None:
        self.node.merge()
        self.node.compact(VB_IDS, slices=slices)

    def teardown(self) -> None:
        self.node.merge()
        self.node.compact(VB_IDS)


TestBothForms = TwinMachine.TestCase
TestBothForms.settings = settings(
    max_examples=40, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)


VB = 1
NEXT = (VB + 1).to_bytes(2, "big")


def entry(seqno: int, key: bytes = b"\0a", value: bytes = b"v", **more: int) -> bytes:
    fields = {"vb_id": VB, "cas": seqno << 16, "rev_seqno": 1} | more
    return pack_mutation(key=key, value=value, seqno=seqno, **fields)


def staged_with(*entries: bytes) -> Any:
    staged = new_staged()
    assert staged is not None
    assert staged.open(VB)
    payload = b"".join(entries)
    assert staged.add(payload, 0) == len(payload)
    return staged


def test_the_dictionaries_of_this_python_look_as_expected() -> None:
    from vbucket.native import loops

    assert loops.LOADS_DICTS_AHEAD == 1


def test_checksums_are_crc32c_by_either_way() -> None:
    from vbucket.native import loops

    assert loops.CRC32C_WAY in {"sse4.2", "arm", "tables"}
    for size in (*range(70), 1000, 4079, 4080, 4096, 40_000):  # three lanes begin at 4080
        data = os.urandom(size)
        wanted = google_crc32c.value(data)
        assert loops.crc32c(data) == loops.crc32c_by_tables(data) == wanted


def test_changes_of_the_default_collection_are_merged_natively() -> None:
    """Otherwise this file would compare Python with Python."""
    model = ModelPartition(VB)
    staged = staged_with(
        model.write(b"\0b", b"1"), model.write(b"\0a", b"2"), model.write(b"\0b", None),
        entry(9, b"\0e", expiry=77),
    )  # fmt: skip
    assert staged.newest(VB) == [b"\0\1\0b"], "the other keys had no version before"
    merged = staged.merge(VB, [], None, 0, TARGET, 0, 0)
    assert merged is not None
    items, blocks, expiries, more_keys, documents, last_seqno, max_cas, versions, others = merged
    assert [key for key, _ in items] == [b"\0\1\0a", b"\0\1\0b", b"\0\1\0e"]
    assert expiries == [(b"\0\1\0a", 0, 9), (b"\0\1\0e", 0, 77)]
    assert (more_keys, documents, last_seqno, versions) == (3, 2, 9, 4)
    assert max_cas == 9 << 16
    assert b"".join(each.checked_body() for each in (Block(*block) for block in blocks))
    assert staged.entries == 4
    assert others == (0, 0, [])


def test_changes_of_collections_are_counted() -> None:
    long_id = b"\x80\x02"  # 256, unsigned LEB128
    staged = staged_with(
        entry(5, b"\x08b"), entry(6), entry(7, long_id + b"a"), entry(8, b"\x08b"),
        entry(9, b"\x09c")[:13] + b"\x58" + entry(9, b"\x09c")[14:],
    )  # fmt: skip
    assert staged.newest(VB) == []
    merged = staged.merge(VB, [], None, 0, TARGET, 3, 2)
    assert merged is not None
    assert merged[4] == 1, "documents of the default collection"
    assert merged[-1] == (9, 6, [(8, 8, 1), (256, 7, 1), (9, 9, 0)])


def test_too_many_collections_stay_for_python() -> None:
    for count, is_merged in ((64, True), (65, False)):
        staged = staged_with(*(entry(at, bytes([at]) + b"k") for at in range(1, count + 1)))
        assert staged.newest(VB) == []
        assert (staged.merge(VB, [], None, 0, TARGET, 0, 0) is not None) == is_merged


@pytest.mark.parametrize(
    ("name", "entries"),
    {
        "two epochs": [entry(1), entry(2, epoch=1)],
        "no ascent": [entry(2), entry(2)],
        "no key": [entry(1, b"")],
        "a key beyond the entry": [entry(1)[:14] + b"\0\xff" + entry(1)[16:]],
        "extras cut short": [entry(1)[:16] + b"\1" + entry(1)[17:]],
        "a system event": [entry(1)[:13] + b"\x5f" + entry(1)[14:]],
        "nothing": [],
    }.items(),
)
def test_what_else_there_is_stays_for_python(name: str, entries: list[bytes]) -> None:
    assert staged_with(*entries).newest(VB) is None, name


def test_a_payload_is_taken_up_to_what_is_not_plain() -> None:
    staged = staged_with()
    first, control, other = entry(1), pack_control(VB, {"kind": "state"}), entry(2, vb_id=2)
    assert staged.add(first + control + first, 0) == len(first)
    assert staged.add(first + other, 0) == len(first)
    assert staged.add(first + other[:-1], len(first)) == -1
    assert staged.add(first + bytes(35), len(first)) == -1
    assert not staged.open(1024)
    assert staged.close(VB) == [first, first]
    with pytest.raises(ValueError, match="partition 1 is not open"):
        staged.close(VB)
    with pytest.raises(ValueError, match="after newest"):
        staged_with(first).merge(VB, [], None, 0, TARGET, 0, 0)


def merged_twice(
    entries: list[bytes], damage: Callable[[MemoryEnv], None]
) -> tuple[MergeReport, MergeReport]:
    """Merge, damage the store, and merge `entries`, with each form."""
    reports = []
    for native in (True, False):
        env = MemoryEnv(TABLES)
        create_store(env, [VB, 2])
        writer = SegmentWriter()
        writer.add(entry(1), entry(2, b"\0b"), entry(3, b"\0c", vb_id=2))
        writer.seal()
        merge(env, writer.sealed())
        damage(env)
        writer.add(*entries)
        writer.seal()
        reports.append(merge(env, writer.sealed(), native=native))
    return reports[0], reports[1]


@pytest.mark.parametrize("at", [0, 5, 30, 60, 90, 140])
def test_a_damaged_block_is_found_by_both_forms(at: int) -> None:
    def damage(env: MemoryEnv) -> None:
        (key,) = [key for key in env.tables[BY_SEQNO_TABLE] if key < NEXT]
        env.flip(BY_SEQNO_TABLE, key, at)

    native, plain = merged_twice([entry(4, b"\0d"), entry(5, vb_id=2)], damage)
    assert native == plain
    assert list(native.quarantined) == [VB]


def test_a_damaged_record_is_found_by_both_forms() -> None:
    native, plain = merged_twice(
        [entry(4, prev_seqno=1)], lambda env: env.flip(BY_KEY_TABLE, b"\0\1\0a", 7)
    )
    assert native == plain
    assert list(native.quarantined) == [VB]


def test_a_missing_block_is_found_by_both_forms() -> None:
    def damage(env: MemoryEnv) -> None:
        for key in [key for key in env.tables[BY_SEQNO_TABLE] if key < NEXT]:
            del env.tables[BY_SEQNO_TABLE][key]

    native, plain = merged_twice([entry(4)], damage)
    assert native == plain
    assert list(native.quarantined) == [VB]


def blocks_of(sizes: list[int], epochs: list[int], gap: int) -> list[tuple[bytes, bytes]]:
    entries, seqno = [], 0
    for size, epoch in zip(sizes, sorted(epochs), strict=False):
        seqno += gap
        entries.append(entry(seqno, value=bytes(size), epoch=epoch, datatype=size % 3))
    return build_blocks(VB, entries, seqno_before=0, body_bytes_target=TARGET)


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=30),
    st.lists(st.sampled_from((1, 1, 1, 2)), min_size=30, max_size=30),
    st.sampled_from((1, 1, 3)),
    st.data(),
)
def test_blocks_are_repacked_alike(
    sizes: list[int], epochs: list[int], gap: int, data: st.DataObject
) -> None:
    loops = compaction_loops()
    assert loops is not None
    blocks = blocks_of(sizes, epochs, gap)
    masks = [
        data.draw(st.none() | st.binary(min_size=count, max_size=count).map(zeros_and_ones))
        for count in (len(Block(*block).seqnos) for block in blocks)
    ]
    parts = [(key, value, mask) for (key, value), mask in zip(blocks, masks, strict=True)]
    wanted = repack_blocks(
        VB,
        [(Block(key, value), mask) for key, value, mask in parts],
        seqno_before=0,
        body_bytes_target=2 * TARGET,
    )
    assert loops.repack(VB, parts, 0, 2 * TARGET) == wanted
    at = data.draw(st.integers(0, len(parts[-1][1]) - 1))
    flipped = bytearray(parts[-1][1])
    flipped[at] ^= 1
    damaged = (parts[-1][0], bytes(flipped), parts[-1][2])
    assert loops.repack(VB, [*parts[:-1], damaged], 0, TARGET) is None


def zeros_and_ones(data: bytes) -> bytes:
    return bytes(byte & 1 for byte in data)


@given(st.data())
def test_bytes_that_are_no_block_are_refused(data: st.DataObject) -> None:
    loops = compaction_loops()
    assert loops is not None
    key, value = data.draw(st.binary(max_size=12)), data.draw(st.binary(max_size=200))
    assert loops.repack(VB, [(key, value, None)], 0, TARGET) is None
    with pytest.raises(ValueError, match="not a block"):
        loops.superseded().mark(key, value, 9)


def with_first_seqno(block: tuple[bytes, bytes], seqno: int) -> tuple[bytes, bytes]:
    """Let a dense block begin with another seqno. All checksums are right: only its writer is not.

    Its last seqno stays.
    """
    key, value = block_key(VB, seqno), bytearray(block[1])
    assert not value[1] & 1, "it has no column of seqnos"
    value[20:28] = seqno.to_bytes(8, "little")
    value[44:48] = b""
    head = len(value) - int.from_bytes(value[36:40], "little")
    crc = google_crc32c.value(key + value[:head])
    value[44:44] = crc.to_bytes(4, "little")
    return key, bytes(value)


@pytest.mark.parametrize("first", [0, 2, 2**64 - 1])
def test_a_block_whose_seqnos_cannot_be_right_is_damaged(first: int) -> None:
    """Seqno 0 marks a free place in the set of superseded seqnos. Taking it out spoilt the count;
    then adding more looked for a free place for ever.
    """
    loops = compaction_loops()
    assert loops is not None
    (block,) = build_blocks(VB, [entry(1), entry(2), entry(3)], seqno_before=0)
    key, value = with_first_seqno(block, first)
    assert Block(key, value).seqnos[0] == first, "the checksum is right"
    assert loops.repack(VB, [(key, value, None)], 0, TARGET) is None
    with pytest.raises(ValueError, match="not a block"):
        loops.superseded().mark(key, value, 2**64 - 1)


def test_a_compaction_names_a_block_that_the_loops_refuse() -> None:
    """It is damage of this partition. A ValueError would end the compaction of all others."""
    env = MemoryEnv(TABLES)
    create_store(env, [VB, 2])
    writer = SegmentWriter()
    writer.add(entry(1), entry(2, prev_seqno=1), entry(3, vb_id=2), entry(4, vb_id=2, prev_seqno=3))
    writer.seal()
    merge(env, writer.sealed())
    rows = env.tables[BY_SEQNO_TABLE]
    (stored,) = [key for key in rows if key < NEXT]
    key, value = with_first_seqno((stored, bytes(rows.pop(stored))), 0)
    rows[key] = value
    floors = {VB: Floors(2, 0), 2: Floors(4, 0)}
    report = Compactor().run(env, [VB, 2], lambda: False, floors=floors)
    assert report.finished == [VB, 2]
    assert report.versions == 1
    ((vb_id, why),) = report.damages
    assert vb_id == VB
    assert "has lengths or seqnos that do not ascend" in why


def test_a_merge_ends_what_newest_has_found() -> None:
    """`merge` let the lines point into `found`, also if it returned None; entries that are added
    after `newest` were not checked.
    """
    staged = staged_with(entry(4, prev_seqno=1), entry(5, b"\0b", prev_seqno=2))
    asked = staged.newest(VB)
    assert asked == [b"\0\1\0a", b"\0\1\0b"]
    key, fields = asked[0], entry(1)[13:14] + bytes(33)
    record = fields + google_crc32c.value(key + fields).to_bytes(4, "big")
    found = [(key, record), (asked[1], bytes(38))]  # the second one is damaged
    assert staged.merge(VB, found, None, 0, TARGET, 0, 0) is None
    with pytest.raises(ValueError, match="after newest"):
        staged.merge(VB, [], None, 0, TARGET, 0, 0)
    assert staged.newest(VB) == asked
    tiny = entry(6)[:20] + bytes(4) + entry(6)[24:36]
    assert staged.add(tiny, 0) == 36
    with pytest.raises(ValueError, match="after newest"):
        staged.merge(VB, [], None, 0, TARGET, 0, 0)


@pytest.mark.parametrize("key", [b"\x80\0k", b"\x88\x80\0k", b"\xff\xff\xff\xff\x1fk", b"\xff"])
def test_what_is_no_collection_id_stays_for_python(key: bytes) -> None:
    """Padded, above 32 bits, or truncated."""
    staged = staged_with(entry(1, key))
    assert staged.newest(VB) == []
    assert staged.merge(VB, [], None, 0, TARGET, 0, 0) is None


@given(st.data())
def test_entries_of_any_bytes_do_no_harm(data: st.DataObject) -> None:
    """Heads of any content, with a body as long as they say."""
    entries = []
    for _ in range(data.draw(st.integers(1, 6))):
        head = data.draw(st.binary(min_size=36, max_size=36))
        body = data.draw(st.binary(max_size=90))
        opcode = data.draw(st.sampled_from((0x57, 0x58, 0x59, 0x5F)))
        length = len(body).to_bytes(4, "big")
        lengths = data.draw(st.integers(0, 90)).to_bytes(2, "big") + bytes([len(body) // 2])
        entries.append(
            head[:13]
            + bytes([opcode])
            + lengths
            + head[17:18]
            + b"\0\1"
            + length
            + head[24:]
            + body
        )
    staged = staged_with(*entries)
    if staged.newest(VB) is not None:
        staged.merge(VB, [], None, 0, TARGET, 0, 0)
    assert staged.close(VB) == entries


def test_superseded_versions_are_found_over_many_blocks() -> None:
    """More seqnos than a new set has places for, in any order."""
    loops = compaction_loops()
    assert loops is not None
    keys = [b"\0%d" % (n * 7919 % 601) for n in range(3000)]
    newest: dict[bytes, int] = {}
    entries = []
    for seqno, key in enumerate(keys, 1):
        entries.append(entry(seqno, key, prev_seqno=newest.get(key, 0)))
        newest[key] = seqno
    floor = 2900
    superseded = loops.superseded()
    marks: dict[int, int] = {}
    for key, value in reversed(build_blocks(VB, entries, seqno_before=0)):
        block = Block(key, value)
        kept = superseded.mark(key, value, floor) or b"\1" * len(block.seqnos)
        marks |= dict(zip(block.seqnos, kept, strict=True))
    old = {at for at, key in enumerate(keys, 1) if key in keys[at:floor]}
    assert {seqno for seqno, kept in marks.items() if not kept} == old


def test_the_store_reads_what_the_loops_wrote() -> None:
    env = MemoryEnv(TABLES)
    create_store(env, [VB])
    writer, model = SegmentWriter(), ModelPartition(VB)
    for number in range(500):
        writer.add(model.write(b"\0%03d" % (number * 7 % 90), b"v" * (number % 50)))
        if number % 100 == 99:
            writer.seal()
            merge(env, writer.sealed(), body_bytes_target=TARGET)
    snapshot = env.snapshot()
    entries = StoreView(snapshot).entries(VB, 1, 500, 1 << 30)
    assert entries == [version.entry for version in model.versions]

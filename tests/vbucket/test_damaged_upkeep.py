"""Plans, compactions and the pager over a store with one damaged page: who is on it is named, the
others are done.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.memory_node import LmdbNode
from support.stored_bytes import layout_of, overwrite
from vbucket.engine.documents.expiry import Pager
from vbucket.engine.engine import SET, StoredDocument
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.store.records import BY_KEY_TABLE
from vbucket.store.store import StoreView
from vbucket.upkeep.compaction import Compactor, Floors, SliceReport
from vbucket.upkeep.merge import merge
from vbucket.upkeep.retention import Planner, Windows

VBS = range(0, 1000, 5)
KEYS = (b"\0a", b"\0b", b"\0c")
ROUNDS = 4
NOTHING = Windows(0, 0, 0)
"""No history is kept, so that every replaced version may go."""
DUE_S = 60


@pytest.fixture
def node() -> Iterator[LmdbNode]:
    """Every key was written four times in each partition; the last time with an expiry."""
    node = LmdbNode(partitions=NUM_VBUCKETS)
    for round_ in range(1, ROUNDS + 1):
        expiry = node.now_ns // 10**9 + DUE_S if round_ == ROUNDS else 0
        for vb_id in VBS:
            for key in KEYS:
                value = key + b"%d" % round_ * 100
                assert node.engine.store(SET, vb_id, key, value, 0, expiry, 0, 0)[0] == 0
    node.merge()
    yield node
    node.close()


def store_of(node: LmdbNode) -> Path:
    return Path(node._folder.name) / "store"


def damage(node: LmdbNode, table: str) -> set[bytes]:
    """Zero a leaf amid a table; return its rows."""
    leaves = layout_of(store_of(node))[table].leaves
    page = sorted(leaves, key=lambda number: min(leaves[number]))[len(leaves) // 2]
    overwrite(store_of(node), page, "zeros")
    return leaves[page]


def compact(node: LmdbNode) -> SliceReport:
    """Compact all partitions up to their ends, slice by slice."""
    compactor, total = Compactor(), SliceReport([], 0, 0, [])
    todo = {vb_id: Floors(node.engine.partitions[vb_id].high_seqno, 0) for vb_id in VBS}
    for _ in range(2 * len(VBS)):
        if not todo:
            break
        steps = iter([False] * 20)
        report = compactor.run(node.env, todo, lambda s=steps: next(s, True), floors=todo)
        total = total.plus(report)
        for vb_id in report.finished:
            del todo[vb_id]
        node.store.refresh()
    assert not todo, "it comes to its end"
    return total


def test_a_plan_names_who_is_on_the_page_and_goes_on(node: LmdbNode) -> None:
    lost = {int.from_bytes(row[:2], "big") for row in damage(node, "by_seqno")}
    assert 0 < len(lost) < len(VBS) / 2
    steps, damages, planned = Planner().plan(
        StoreView(node.env.snapshot()), VBS, NOTHING, node.now_ns, is_forced=True
    )
    assert planned == len(VBS)
    assert {vb_id for vb_id, _ in damages} == lost
    assert {step.vb_id for step in steps} == set(VBS) - lost


@pytest.mark.parametrize("table", ["by_seqno", "state"])
def test_a_compaction_names_who_is_on_the_page_and_goes_on(node: LmdbNode, table: str) -> None:
    lost = {int.from_bytes(row[:2], "big") for row in damage(node, table)} & set(VBS)
    assert 0 < len(lost) < len(VBS) * 2 / 3
    report = compact(node)
    assert {vb_id for vb_id, _ in report.damages} == lost
    assert all(f"partition {vb_id}: " in text for vb_id, text in report.damages)
    assert report.versions == (len(VBS) - len(lost)) * (ROUNDS - 1) * len(KEYS)
    kept = range((ROUNDS - 1) * len(KEYS) + 1, ROUNDS * len(KEYS) + 1)
    for vb_id in set(VBS) - lost:
        there = [node.store.entry(vb_id, seqno) is not None for seqno in (1, *kept)]
        assert there == [False, True, True, True]


def test_a_write_lost_in_slice_is_named_and_others_are_compacted(node: LmdbNode) -> None:
    """What a dropped collection held goes with its rows of the expiry table, which come last."""
    node.engine.keyspace.set_manifest(
        node.engine.keyspace.manifest.create_collection("_default", "short", 0)
    )
    expiry = node.now_ns // 10**9 + DUE_S
    for vb_id in VBS[85:115]:
        assert node.engine.store(SET, vb_id, b"\x08key", b"\x08key", 0, expiry, 0, 0)[0] == 0
    node.merge()
    node.engine.keyspace.set_manifest(
        node.engine.keyspace.manifest.drop_collection("_default", "short")
    )
    node.merge()
    lost = {int.from_bytes(row[4:6], "big") for row in damage(node, "expiry")}
    expected = lost & set(VBS[85:115])
    assert 0 < len(expected) < 30
    report = compact(node)
    told = {vb_id for vb_id, _ in report.damages}
    assert expected <= told
    assert all("table expiry of the store" in text for _, text in report.damages)
    for vb_id in set(VBS) - told:
        assert node.store.entry(vb_id, 1) is None, "it was compacted"
        assert node.store.meta(vb_id, b"\x08key") is None


def test_documents_on_other_pages_expire(node: LmdbNode) -> None:
    rows = damage(node, "by_key")
    pager = Pager(node.engine, node.store)
    while not pager.step(node.now_ns + DUE_S * 10**9):
        pass
    lost = {row for row in rows if int.from_bytes(row[:2], "big") in VBS}
    assert pager.expired == len(VBS) * len(KEYS) - len(lost)
    assert pager.damages
    assert all("table by_key" in text for text in pager.damages)


@pytest.mark.parametrize("is_native", [True, False])
def test_a_merge_notices_a_page_of_before(
    node: LmdbNode, monkeypatch: pytest.MonkeyPatch, *, is_native: bool
) -> None:
    """The disk lost a write: a leaf of by_key is as it was a merge ago, with right checksums. The
    log says what its changes replace, so partitions on the page go into quarantine.
    """
    if not is_native:
        monkeypatch.setattr(node, "merge_segments", lambda sealed: merge(
            node.env, sealed, native=False
        ))  # fmt: skip
    before = by_key_of(node)
    for vb_id in VBS:
        assert node.engine.store(SET, vb_id, KEYS[0], KEYS[0] + b"newer", 0, 0, 0, 0)[0] == 0
    node.merge()
    stale = {key: record for key, record in before.items() if key[2:] == KEYS[0]}
    victims = set(sorted(stale)[20:40])
    for vb_id in VBS:  # before the page is lost: these change what they know to be the newest
        assert node.engine.store(SET, vb_id, KEYS[0], KEYS[0] + b"newest", 0, 0, 0, 0)[0] == 0
    with node.env.write() as write:
        for key in victims:
            write.put(BY_KEY_TABLE, key, stale[key])
    node.begin_merge()
    node.end_merge()
    quarantined = node.store.quarantine()
    assert set(quarantined) == {int.from_bytes(key[:2], "big") for key in victims}
    assert all("replaces seqno" in item.why for item in quarantined.values())
    others = set(VBS) - set(quarantined)
    assert {value_of(node, vb_id) for vb_id in others} == {b"newest"}


def by_key_of(node: LmdbNode) -> dict[bytes, bytes]:
    snapshot = node.env.snapshot()
    rows = {key: bytes(value) for key, value in snapshot.range(BY_KEY_TABLE, b"")}
    snapshot.close()
    return rows


def value_of(node: LmdbNode, vb_id: int) -> bytes:
    found = node.engine.get(vb_id, KEYS[0])
    assert isinstance(found, StoredDocument)
    return bytes(found.value)

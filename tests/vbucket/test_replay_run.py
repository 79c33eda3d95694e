"""The replay of a log at a start: the loop in C against its twin in Python, over the same log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.memory_node import LmdbNode
from support.stored_bytes import pack_deletion, pack_mutation
from vbucket.engine.engine import SET
from vbucket.engine.recovery import replay
from vbucket.log.record import LogDamagedError, entry_at
from vbucket.model.manifest import manifest_from_json
from vbucket.native import new_staged, replay_run
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import BY_KEY_TABLE
from vbucket.store.store import Store

pytestmark = pytest.mark.skipif(
    new_staged() is None, reason="the loops in C are not built (scripts/compile)"
)

PARTITIONS = 4
KEYS = (b"\0a", b"\0b", b"\0c", b"\0" + b"k" * 250, b"\x08a", b"\x08b")
KINDS = (*["set"] * 6, "delete", "delete", "expiry", "branch", "commit", "merge", "crash", "drop")
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, PARTITIONS - 1), st.sampled_from(KEYS)),
    max_size=80,
)
NUMBERS = (
    "state", "high_seqno", "committed_seqno", "synced_seqno", "merged_seqno", "max_cas",
    "leader_epoch", "vb_uuid", "item_count", "purge_seqno", "history_floor",
)  # fmt: skip


def by_python(patch: pytest.MonkeyPatch) -> None:
    """Let starts replay in Python from here on."""
    patch.setattr(replay, "replay_run", lambda _partitions: None)

    def keys_without_document(store: Store, vb_id: int, keys: list[bytes]) -> list[bytes]:
        documents = store.documents_among(vb_id, keys)
        return [key for key in keys if key not in documents]

    patch.setattr(Store, "keys_without_document", keys_without_document)


def state_of(node: LmdbNode) -> list[Any]:
    keyspace = node.engine.keyspace
    parts = [
        (
            [getattr(part, name) for name in NUMBERS],
            part.tally.to_document(),
            part.active.entries,
            list(part.active.newest.items()),
        )
        for part in node.engine.partitions
    ]
    due = sorted(keyspace.due.active.lists(), key=repr)
    return [parts, keyspace.memtables.active_bytes, keyspace.group, due]


def declare(node: LmdbNode, uid: int, *uids: str) -> None:
    collections = [{"uid": "0", "name": "_default"}, *({"uid": u, "name": f"c{u}"} for u in uids)]
    scope = {"uid": "0", "name": "_default", "collections": collections}
    engine = node.engine
    declared = {"uid": str(uid), "scopes": [scope]}
    engine.keyspace.set_manifest(manifest_from_json(engine.keyspace.manifest, declared))


@pytest.fixture(name="node")
def _node() -> Iterator[LmdbNode]:
    node = LmdbNode(partitions=PARTITIONS)
    yield node
    node.close()


def take(node: LmdbNode, kind: str, vb_id: int, key: bytes, number: int) -> None:
    engine = node.engine
    if kind in {"set", "expiry"}:
        expiry = 2_000_000_000 if kind == "expiry" else 0
        engine.store(SET, vb_id, key, key + b"%d" % number * (number % 5), 0, expiry, 0, 0)
    elif kind == "delete":
        engine.delete(vb_id, key, 0)
    elif kind == "branch":
        part = engine.partitions[vb_id]
        engine.keyspace.branch(vb_id, max(part.history_floor, part.committed_seqno // 2))
    elif kind == "drop":
        declare(node, engine.keyspace.manifest.uid + 1)
    else:
        node.commit()
        if kind == "merge":
            node.merge()
        elif kind == "crash":
            node.crash()


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_the_loop_replays_what_python_replays(steps: list[tuple[str, int, bytes]]) -> None:
    node = LmdbNode(partitions=PARTITIONS)
    try:
        declare(node, 1, "8")
        for number, (kind, vb_id, key) in enumerate(steps):
            take(node, kind, vb_id, key, number)
        node.commit()
        node.crash()
        found = state_of(node)
        with pytest.MonkeyPatch.context() as patch:
            by_python(patch)
            node.crash()
            assert state_of(node) == found
    finally:
        node.close()


def mutation(seqno: int, **parts: Any) -> bytes:
    fields = {"vb_id": 1, "key": b"\0key", "value": b"v", "cas": 9, "rev_seqno": 1} | parts
    return pack_mutation(seqno=seqno, **fields)


PLAIN = mutation(1)
LEFT = {
    "a collection": mutation(2, key=b"\x08key"),
    "an expiry": mutation(2, expiry=5),
    "a seqno again": mutation(1),
    "a later epoch": mutation(2, epoch=1),
    "no key": mutation(2, key=b""),
    "no partition": mutation(2, vb_id=PARTITIONS),
    "a cut entry": mutation(2)[:-1],
    "a cut head": mutation(2)[:20],
}


@pytest.mark.parametrize("entry", LEFT.values(), ids=LEFT.keys())
def test_the_loop_applies_what_is_plain_and_leaves_the_rest(node: LmdbNode, entry: bytes) -> None:
    run = replay_run(node.engine.partitions)
    assert run is not None
    assert run.apply(PLAIN, 0, {}) == len(PLAIN)
    part = node.engine.partitions[1]
    assert part.active.entries == [PLAIN]
    before = state_of(node)
    presumed: dict[int, list[bytes]] = {}
    assert run.apply(entry, 0, presumed) == 0
    assert not presumed
    assert state_of(node) == before
    follower = pack_deletion(vb_id=1, key=b"\0key", cas=10, seqno=2, rev_seqno=2, prev_seqno=1)
    payload = b"before" + follower + entry
    assert run.apply(payload, len(b"before"), presumed) == len(payload) - len(entry)
    assert part.item_count == 0
    assert part.newest == {b"\0key": follower}
    assert (part.high_seqno, part.max_cas) == (2, 10)


def test_keys_are_presumed_once_and_where_store_may_know_them(node: LmdbNode) -> None:
    run = replay_run(node.engine.partitions)
    assert run is not None
    node.engine.partitions[1].merged_seqno = 5
    node.engine.partitions[1].high_seqno = 5
    entries = [mutation(6, prev_seqno=3), mutation(7, prev_seqno=6), mutation(8, key=b"\0new")]
    other = mutation(1, vb_id=2, prev_seqno=3)
    presumed: dict[int, list[bytes]] = {}
    payload = b"".join([*entries, other])
    assert run.apply(payload, 0, presumed) == len(payload)
    assert presumed == {1: [b"\0key"]}
    assert [part.item_count for part in node.engine.partitions[:3]] == [0, 1, 1]
    assert run.apply(mutation(9, key=b"\0more", prev_seqno=4), 0, presumed)
    assert presumed == {1: [b"\0key", b"\0more"]}


def test_start_counts_below_zero_until_presumed_are_looked_up(node: LmdbNode) -> None:
    """The store has the deletion of the only key, which the log then sets and deletes again."""
    for story in (("set", "delete", "merge"), ("set", "delete")):
        for number, kind in enumerate(story):
            take(node, kind, 1, b"\0a", number)
    take(node, "set", 1, b"\0b", 1)
    node.commit()
    node.crash()
    assert node.engine.partitions[1].item_count == 1


def test_removing_a_removed_key_counts_below_zero_until_read(
    node: LmdbNode,
) -> None:
    """As changes with given metadata may make it."""
    key = b"\0key"
    node.engine.store(SET, 1, key, key + b"v", 0, 0, 0, 0)
    assert node.engine.delete(1, key, 0)[0] == 0
    node.merge()
    part = node.engine.partitions[1]
    removal = pack_deletion(
        vb_id=1, key=key, cas=part.max_cas + 1, seqno=3, rev_seqno=3, prev_seqno=2
    )
    payload = removal + mutation(4, key=b"\0new")
    again = replay.Replay(node.engine, node.store)
    again.apply_group(9, removal)
    assert part.item_count == -1
    again.apply_group(10, payload[len(removal) :])
    assert part.item_count == 0
    again.finish()
    assert part.item_count == 1


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    "end",
    [PLAIN[:-1], PLAIN[:20], PLAIN[:20] + b"\xff" * 4 + PLAIN[24:]],
    ids=["a cut body", "a cut head", "a length that lies"],
)
def test_nothing_of_group_is_applied_whose_lengths_do_not_add_up(
    node: LmdbNode, monkeypatch: pytest.MonkeyPatch, end: bytes, *, native: bool
) -> None:
    """Otherwise the node would serve what the log ends before."""
    if not native:
        by_python(monkeypatch)
    before = state_of(node)
    with pytest.raises(LogDamagedError, match=r"after (1|2) entries"):
        replay.Replay(node.engine, node.store).apply_group(1, PLAIN + end)
    assert state_of(node) == before


def test_wrong_arguments_have_errors(node: LmdbNode) -> None:
    run: Any = replay_run(node.engine.partitions)
    with pytest.raises(ValueError, match="not in the payload"):
        run.apply(PLAIN, len(PLAIN) + 1, {})
    with pytest.raises(TypeError):
        run.apply(PLAIN, 0, [])
    node.engine.partitions[1].merged_seqno = 5
    with pytest.raises(TypeError, match="lists"):
        run.apply(mutation(6, prev_seqno=3), 0, {1: ()})
    with pytest.raises(ValueError, match="no partition"):
        replay_run([])
    with pytest.raises(LogDamagedError, match="do not add up"):
        entry_at(PLAIN + PLAIN[:-1], len(PLAIN))


def test_start_leaves_to_python_what_is_no_document_in_store(node: LmdbNode) -> None:
    """More keys than the loop looks up at once; Python sees deletions, and names damage."""
    keys = [b"\0%03d" % number for number in range(150)]
    for key in keys:
        node.engine.store(SET, 1, key, key + b"v", 0, 0, 0, 0)
    assert node.engine.delete(1, keys[70], 0)[0] == 0
    node.merge()
    for key in keys:
        node.engine.store(SET, 1, key, key + b"w", 0, 0, 0, 0)
    node.commit()
    node.crash()
    tree: Any = node.store.key_tree()
    assert tree is not None
    assert tree.unproven((1).to_bytes(2, "big"), [*keys, b"\0absent"]) == [keys[70], b"\0absent"]
    for wrong in (["text"], [bytes(510)]):
        with pytest.raises(ValueError, match="no key"):
            tree.unproven(b"\0\1", wrong)
    assert node.engine.partitions[1].item_count == len(keys)
    with node.env.write() as write:
        full_key = (1).to_bytes(2, "big") + keys[100]
        record = bytearray(bytes(write.get(BY_KEY_TABLE, full_key) or b""))
        record[3] ^= 1
        write.put(BY_KEY_TABLE, full_key, bytes(record))
    with pytest.raises(StoreDamagedError, match=r"partition 1.*100"):
        node.crash()

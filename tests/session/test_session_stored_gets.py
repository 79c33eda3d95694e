"""GETs of documents that only the store has: the loop in C answers as the handler, and a damaged
page, record or frame gives an error or the right answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import LmdbNode, Peer
from support.stored_bytes import PAGE_BYTES, layout_of
from vbucket.native import new_staged
from vbucket.store.records import BY_KEY_TABLE, BY_SEQNO_TABLE

pytestmark = pytest.mark.skipif(
    new_staged() is None, reason="the loops in C are not built (scripts/compile)"
)

VB = 1
COUNT = 3000
REMOVED = frozenset(range(0, COUNT, 50))


def key_of(number: int) -> bytes:
    return b"\0key %05d" % (2 * number)


def value_of(number: int) -> bytes:
    return b"%d " % number * (1 + number % 9) + bytes(60_000 * (number == 77))


def get(key: bytes) -> bytes:
    return pack_request(Opcode.GET, vb_id=VB, key=key)


def connected(node: LmdbNode) -> Peer:
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS, Feature.XERROR)
    return peer


def node_with_documents(*, item_cache_bytes: int = 0) -> LmdbNode:
    """Keys with even numbers, some of them removed, in a tree of several levels; seqnos with
    gaps, because each was written twice and compacted."""
    node = LmdbNode(partitions=4, item_cache_bytes=item_cache_bytes)
    peer = connected(node)
    for turn in range(2):
        for number in range(COUNT):
            value = value_of(number) if turn else b"old"
            peer.ask(Opcode.SET, vb_id=VB, key=key_of(number), value=value, extras=bytes(8))
        node.merge()
    for number in REMOVED:
        peer.delete(VB, key_of(number))
    node.merge()
    node.raise_floor(VB, COUNT // 2, 0)
    node.commit()
    node.compact([VB])
    node.merge()
    part = node.engine.partitions[VB]
    assert not part.newest
    assert part.frozen is None
    return node


@pytest.fixture(scope="module")
def node() -> Iterator[LmdbNode]:
    node = node_with_documents()
    yield node
    node.close()


def asked(node: LmdbNode, keys: list[bytes], *, is_native: bool = True) -> list[Frame]:
    run = node.engine.get_run
    assert run is not None
    if not is_native:
        node.engine.get_run = None
    try:
        peer = connected(node)
    finally:
        node.engine.get_run = run
    return peer.send(b"".join(map(get, keys)))


KEYS = [key_of(number) for number in range(COUNT)]
ABSENT = [b"\0key %05d" % (2 * number + 1) for number in range(COUNT)]


def test_the_loop_answers_as_the_handler(node: LmdbNode) -> None:
    keys = [*KEYS, *ABSENT, b"\0", b"\0\0", b"\0\xff" * 100]
    random.Random(1).shuffle(keys)
    node.engine.item_cache.misses = node.engine.gets = 0
    answers = asked(node, keys)
    assert node.engine.gets >= len(keys) - 1
    assert answers == asked(node, keys, is_native=False)
    found = dict(zip(keys, answers, strict=True))
    for number, key in enumerate(KEYS):
        is_there = number not in REMOVED
        assert found[key].status == (Status.OK if is_there else Status.KEY_ENOENT)
        assert found[key].value == (value_of(number) if is_there else b"")
    assert {found[key].status for key in ABSENT} == {Status.KEY_ENOENT}


def test_all_are_answered_without_python(node: LmdbNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys at the edge of a leaf, too: the checksums of pages show that there are no others."""
    by_python: list[bytes] = []
    entry = type(node.engine).document_entry
    monkeypatch.setattr(
        type(node.engine), "document_entry",
        lambda engine, part, key: by_python.append(key) or entry(engine, part, key),
    )  # fmt: skip
    asked(node, [*KEYS, *ABSENT, b"\0", b"\0\xff"])
    assert by_python == []


def test_what_was_read_is_cached_once() -> None:
    node = node_with_documents(item_cache_bytes=1 << 24)
    cache, part = node.engine.item_cache, node.engine.partitions[VB]
    cache.clear(part)
    keys = [key for number, key in enumerate(KEYS[:60]) if number not in REMOVED]
    cache.hits = cache.misses = 0
    asked(node, [*keys, *keys])  # 64 are looked up together, so some are read twice
    assert set(part.recent) == set(keys)
    assert cache.hits + cache.misses == 2 * len(keys)
    held = sum(len(key) + len(entry) + 140 for key, entry in part.recent.items())
    assert cache.held_bytes == part.recent_bytes == held
    before = cache.misses
    asked(node, keys)
    assert cache.misses == before
    node.close()


def test_values_stop_where_the_answers_are_enough(node: LmdbNode) -> None:
    peer = connected(node)
    peer.session.receive(get(key_of(77)) * 1000, node.now_ns)
    assert peer.state.is_full
    assert len(peer.state.answers) < 1000


@pytest.mark.parametrize("was_read", [False, True])
@pytest.mark.parametrize("table", [BY_KEY_TABLE, BY_SEQNO_TABLE])
def test_damage_gives_an_error_or_the_right_answer(table: str, *, was_read: bool) -> None:
    """Bytes change in pages of all kinds, also after they were compared with their checksums. No
    answer may be wrong.
    """
    node = node_with_documents()
    store = Path(node._folder.name) / "store"
    layout = layout_of(store)[table]
    large = [page + more for page in layout.large for more in range(9)]
    places = [*sorted(layout.branches), *sorted(layout.leaves), *large]
    path = store / "data.mdb"
    good, drawn = path.read_bytes(), random.Random(7)
    keys = [*KEYS, *ABSENT]
    errors = 0
    asked(node, keys)
    for _ in range(60):
        page = drawn.choice(places)
        changes = {
            page * PAGE_BYTES + drawn.choice((drawn.randrange(16), drawn.randrange(PAGE_BYTES))):
            drawn.choice((0, 1, 2, 0x80, 0xFF, drawn.randrange(256)))
            for _ in range(drawn.randrange(1, 5))
        }  # fmt: skip
        with path.open("r+b") as file:
            for at, byte in changes.items():
                file.seek(at)
                file.write(bytes([byte]))
        if not was_read:
            node.store.refresh()
        for key, frame in zip(keys, asked(node, keys), strict=True):
            number = int(key[5:]) // 2
            is_there = key in KEYS[number : number + 1] and number not in REMOVED
            right = (Status.OK, value_of(number)) if is_there else (Status.KEY_ENOENT, b"")
            if frame.status == Status.EINTERNAL:
                errors += 1
            else:
                assert (frame.status, frame.value) == right, (page, changes, key)
        with path.open("r+b") as file:
            for at in changes:
                file.seek(at)
                file.write(good[at : at + 1])
    assert errors, "some of it was damage"
    node.store.refresh()
    node.close()

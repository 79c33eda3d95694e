"""Tallies against a list of changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vbucket.model.collection_counts import CollectionCounts
from vbucket.model.manifest import INITIAL_MANIFEST, Collection, Manifest

KNOWN = INITIAL_MANIFEST._replace(
    collections={0: INITIAL_MANIFEST.collections[0], 8: Collection(8, "old", 0)},
    next_collection_id=10,
)
"""Collection 9 is gone, 200 is not known yet."""
KEYS = (b"\0k", b"\x01event", b"\x08k", b"\xc8\x01k", b"\x09dropped")
IDS = {b"\x08k": 8, b"\xc8\x01k": 200}

Step = tuple[bytes | None, float, int]
steps = st.lists(
    st.tuples(st.sampled_from((*KEYS, None)), st.floats(0, 1), st.integers(1, 3)), max_size=40
)


def run(script: list[Step]) -> tuple[CollectionCounts, list[tuple[int, bytes]]]:
    """Write keys, gaps before them, and roll back (None); return tally and changes left."""
    tally = CollectionCounts()
    changes: list[tuple[int, bytes]] = []
    for key, part, gap in script:
        before = changes[-1][0] if changes else 0
        if key is not None:
            seqno = before + gap
            if key[0]:
                tally.note(key, seqno, before, KNOWN)
            changes.append((seqno, key))
            continue
        cut = int(before * part)
        changes = [change for change in changes if change[0] <= cut]
        tally.roll_back(cut, reversed(changes))
    return tally, changes


@given(steps, st.floats(0, 1))
def test_seqnos_are_those_of_the_changes_that_are_left(script: list[Step], part: float) -> None:
    tally, changes = run(script)
    others = [seqno for seqno, key in changes if key[0]]
    assert tally.other_high_seqno == max(others, default=0)
    for key, collection_id in IDS.items():
        expected = max((seqno for seqno, found in changes if found == key), default=0)
        assert tally.collections.get(collection_id, [0, 0])[0] == expected
    assert tally.collections.keys() <= set(IDS.values())
    high = changes[-1][0] if changes else 0
    asked = int(high * part)
    found = tally.default_seqno_at(asked)
    expected = max((seqno for seqno, key in changes if not key[0] and seqno <= asked), default=0)
    if asked > tally.other_high_seqno:
        assert found == asked, "above the last other change all is the default collection's"
    else:
        assert found in {None, expected}
    if asked == tally.other_high_seqno:
        assert found == expected, "the last run of other changes is known"


@given(steps)
def test_a_document_brings_back_the_same(script: list[Step]) -> None:
    tally, _ = run(script)
    tally.count(8, 2)
    document = tally.to_document()
    again = CollectionCounts(document)
    assert again.to_document() == document
    if document is None:
        assert not tally.other_high_seqno


def test_what_is_forgotten_is_counted_out() -> None:
    tally = CollectionCounts()
    tally.note(b"\x08k", 1, 0, KNOWN)
    tally.count(8, 3)
    tally.count(200, 2)
    assert tally.documents == 5
    assert tally.forget(KNOWN) == 0
    assert tally.forget(KNOWN.drop_collection("_default", "old")) == 3
    assert (tally.documents, list(tally.collections)) == (2, [200])
    assert tally.forget(without(200)) == 2, "it was created and dropped meanwhile"


def without(collection_id: int) -> Manifest:
    """Return a manifest in whose past a collection was dropped."""
    return INITIAL_MANIFEST._replace(next_collection_id=collection_id + 1)


def test_a_copy_of_a_document_is_independent() -> None:
    tally = CollectionCounts()
    tally.note(b"\x08k", 1, 0, KNOWN)
    again = CollectionCounts(tally.to_document())
    again.count(8, 7)
    assert tally.documents == 0

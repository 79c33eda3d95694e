"""Counts of a replica whose store cannot be read for a while."""

from __future__ import annotations

import pytest

from support.replica_pair import VB, ReplicaPair
from vbucket.store.environment import StoreDamagedError


def test_a_copy_counts_right_after_damage_that_outlasts_a_merge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys that it presumed to be documents were deletions; when they can be looked up, the store
    has their next versions.
    """
    pair = ReplicaPair()
    pair.set(b"a", b"b", b"c", b"d")
    pair.delete(b"a")
    pair.delete(b"b")
    pair.follow()
    pair.replica.merge()
    store = pair.replica.node.store

    def unread(vb_id: int, keys: list[bytes]) -> list[bytes]:
        raise StoreDamagedError("a page is not what was written", vb_id)

    with monkeypatch.context() as patch:
        patch.setattr(store, "keys_without_document", unread)
        pair.set(b"a", b"b")
        pair.follow()
        pair.replica.merge()
        pair.set(b"a", b"e")
        pair.delete(b"c")
        pair.follow()
        assert pair.replica.part.item_count != pair.master.part.item_count, "nobody can tell"
    pair.set(b"d")
    pair.follow()
    assert pair.replica.core.take_damages() == [VB]
    pair.replica.core.resolve_counts()
    assert pair.replica.part.item_count == pair.master.part.item_count == 4
    pair.replica.merge()
    assert pair.replica.findings() == []

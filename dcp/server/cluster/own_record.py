"""Keeps this node's own record in the metadata store right: where nodes and clients reach it.

Only a member that is recorded changes its record. One that was removed does not come back by
itself.
"""

from __future__ import annotations

from typing import Final

import msgspec

from failover.coordinator.records import KeyKind, MemberRecord, encode_record
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import MetaStore, Put, StoreResult, Txn, if_unchanged

RETRY_NS: Final = 1_000_000_000
"""Time between attempts to change the record."""


class OwnRecord:
    """See the module."""

    def __init__(self, view: ClusterView, wanted: MemberRecord, meta: MetaStore) -> None:
        self._view = view
        self._wanted = wanted
        self._meta = meta
        self._next_ns = 0

    def tick(self, now_ns: int) -> None:
        """Let time pass: write the record if the view has another one."""
        stored = self._view.members.get(self._wanted.member)
        if stored is None or now_ns < self._next_ns:
            return
        wanted = msgspec.structs.replace(
            self._wanted,
            name=stored.content.name,
            rack=stored.content.rack,
            is_drained=stored.content.is_drained,
        )
        if stored.content == wanted:
            return
        self._next_ns = now_ns + RETRY_NS
        key = self._view.keys.of_member(KeyKind.MEMBER, wanted.member)
        compare = if_unchanged(key, stored.item.mod_revision)
        self._meta.submit(Txn((compare,), (Put(key, encode_record(wanted)),)), _decided)


def _decided(_result: StoreResult) -> None:
    """Do nothing: the view shows whether it was written."""

"""Tells the other members to which nodes this one has no link although they run, and why.

A node that is not let in finds that out alone, and people ask any node. So the reason goes into the
metadata store, under the lease of this process: it is gone when the process is.

Invariants
- a trouble ends with the next link to that node, when the node is down, or when nobody has dialled
  it for FORGET_NS: this node does not follow it any more;
- a trouble is logged once, until it is another one.
"""

from __future__ import annotations

from typing import Final

from dcp.server.access.link_tls import LinkTrouble
from dcp.server.observe.event_log import EventLog
from failover.coordinator.cluster_session import ClusterSession
from failover.coordinator.records import KeyKind, LinksRecord, RefusedLink, encode_record
from failover.metadata.metastore import (
    Compare,
    CompareTarget,
    Delete,
    MetaStore,
    Put,
    StoreResult,
    Txn,
    if_unchanged,
)
from failover.replication.replica import BARRED_REDIAL_NS_MAX

FORGET_NS: Final = 3 * BARRED_REDIAL_NS_MAX
WRITE_NS: Final = 1_000_000_000
"""Time between two attempts to write: reasons may change with every dial."""


class OwnLinks:
    """See the module."""

    def __init__(self, session: ClusterSession, meta: MetaStore, log: EventLog) -> None:
        self._session = session
        self._meta = meta
        self._log = log
        self.troubles: dict[str, LinkTrouble] = {}
        """By member, why there is no link to its node."""
        self._tried_ns: dict[str, int] = {}
        self._next_ns = 0

    def failed(self, now_ns: int, member: str, trouble: LinkTrouble) -> None:
        """A link could not be made, and an operator has to do something."""
        assert member != self._session.membership.member
        self._tried_ns[member] = now_ns
        if self.troubles.get(member) != trouble:
            self.troubles[member] = trouble
            self._log.warning("no link to another node", reason=str(trouble))

    def over(self, member: str) -> None:
        """There is a link, or nobody runs there."""
        if self.troubles.pop(member, None) is not None:
            del self._tried_ns[member]

    def tick(self, now_ns: int) -> None:
        """Let time pass: write what the metadata store does not say yet."""
        for member in [each for each, at in self._tried_ns.items() if now_ns - at >= FORGET_NS]:
            self.over(member)
        membership, view = self._session.membership, self._session.view
        if now_ns < self._next_ns or not membership.is_alive or not view.is_loaded:
            return
        key = view.keys.of_member(KeyKind.LINKS, membership.member)
        refused = {member: RefusedLink(*trouble) for member, trouble in self.troubles.items()}
        value = encode_record(LinksRecord(member=membership.member, refused=refused))
        if value == view.value(key) or not (refused or view.mod_revision(key)):
            return
        self._next_ns = now_ns + WRITE_NS
        alive = view.keys.of_member(KeyKind.ALIVE, membership.member)
        compares = (
            # The lease of the alive key: a newer process of this member has another one.
            Compare(alive, CompareTarget.LEASE, membership.lease_id),
            if_unchanged(key, view.mod_revision(key)),
        )
        change = Put(key, value, membership.lease_id) if refused else Delete(key)
        self._meta.submit(Txn(compares, (change,)), _written)


def _written(_result: StoreResult) -> None:
    """Do nothing: the view says whether it was written."""

"""The partition map that this node tells its clients, made from the view of the metadata store.

The map's revision is the newest mod revision of what it is made of. It is made only when the view
has come that far, so that the same revision is the same map on every node. A node that was read
ahead of the watch, for example after its own write, tells the former map for a few milliseconds.
"""

from __future__ import annotations

from typing import Final

from dcp.cluster.cluster_records import MemberRecord
from dcp.cluster.cluster_view import ClusterView
from dcp.replication.cluster_map import bucket_map
from dcp.server.net.cluster_config import ClusterConfig
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.model.partition_map import MapNode

FIRST_REV: Final = 1
"""Of the map before anything is known: any other is newer."""


class MapShown:
    """See the module."""

    def __init__(
        self, view: ClusterView, config: ClusterConfig, cluster: str, own: MemberRecord
    ) -> None:
        self._view = view
        self._config = config
        self._cluster = cluster
        self._own = own
        self.rev = 0
        """The revision that clients were told last; 0: none."""

    def update(self) -> bool:
        """Tell clients the newest map; return whether it is a newer one."""
        view = self._view
        rev = self._rev()
        if rev == self.rev or (rev > FIRST_REV and view.revision < rev):
            return False
        members = {name: stored.content for name, stored in view.members.items()}
        members.setdefault(self._own.member, self._own)
        life = 1 if view.cluster is None else view.cluster.content.life
        shown = bucket_map(
            view, NUM_VBUCKETS, self._own.member, _nodes(members), rev=rev, rev_epoch=life
        )
        self._config.show(shown, self._cluster)
        self.rev = rev
        return True

    def _rev(self) -> int:
        """Return the newest mod revision of what the map is made of."""
        view = self._view
        revisions = [stored.item.mod_revision for stored in view.partitions.values()]
        revisions += [stored.item.mod_revision for stored in view.members.values()]
        if view.cluster is not None:
            revisions.append(view.cluster.item.mod_revision)
        return max(revisions, default=FIRST_REV)


def _nodes(members: dict[str, MemberRecord]) -> dict[str, MapNode]:
    """Return the nodes with their hosts, on loopback too: clients of the Java world refuse a map in
    which a node other than the one that they asked has none.
    """
    return {
        name: MapNode(
            *host_and_port(record.address), record.admin_port,
            record.kv_tls_port, record.admin_tls_port,
        )
        for name, record in members.items()
    }  # fmt: skip


def tls_address_of(record: MemberRecord) -> str:
    """Return HOST:PORT of a node's key-value port with TLS; "": it has none."""
    host, _, _port = record.address.rpartition(":")
    return f"{host}:{record.kv_tls_port}" if record.kv_tls_port else ""


def host_and_port(address: str) -> tuple[str, int]:
    """Split HOST:PORT, with brackets around an IPv6 address."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)

"""The partition map that this node tells its clients, made from the view of the metadata store.

The map's version is the life of the cluster, and the newest mod revision of what the map is made of
(`failover.coordinator.map_life`). It is made only when the view has come that far, so that the same
version is the same map on every node. A node that was read ahead of the watch, for example after
its own write, tells the former map for a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable

from dcp.server.net.cluster_config import ClusterConfig
from failover.coordinator.map_life import NEVER_TOLD, MapLife
from failover.coordinator.records import MemberRecord
from failover.coordinator.view import ClusterView
from failover.replication.cluster_map import bucket_map
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.model.partition_map import MapNode


class MapShown:
    """See the module. `life` says which versions may be told."""

    def __init__(
        self,
        view: ClusterView,
        life: MapLife,
        config: ClusterConfig,
        cluster: str,
        own: MemberRecord,
    ) -> None:
        self._view = view
        self._life = life
        self._config = config
        self._cluster = cluster
        self._own = own
        self.version = NEVER_TOLD
        """What clients were told last."""
        self._masters: dict[int, str | None] = {}
        self._members: dict[str, MemberRecord] = {}
        """What it said: partition -> its master, and the nodes."""

    def is_urgent(self, vb_ids: Iterable[int]) -> bool:
        """Return whether clients have to know soon of changes of these partitions: one has another
        master than they were told, or a node another address, or all maps begin anew.
        """
        told, partitions = self._masters, self._view.partitions
        for vb_id in vb_ids:
            stored = partitions.get(vb_id)
            if stored is None or stored.content.record.master != told.get(vb_id):
                return True
        is_same_life = self._life.version().life == self.version.life
        return not is_same_life or self._members != self._members_now()

    def _members_now(self) -> dict[str, MemberRecord]:
        members = {name: stored.content for name, stored in self._view.members.items()}
        members.setdefault(self._own.member, self._own)
        return members

    def update(self) -> bool:
        """Tell clients the newest map; return whether it is a newer one."""
        view, version = self._view, self._life.version()
        if version <= self.version or not self._life.may_tell(version):
            return False
        if view.is_loaded and view.revision < version.rev:
            return False
        self._members = self._members_now()
        self._masters = {
            vb_id: stored.content.record.master for vb_id, stored in view.partitions.items()
        }
        shown = bucket_map(
            view, NUM_VBUCKETS, self._own.member, _nodes(self._members),
            rev=version.rev, rev_epoch=version.life,
        )  # fmt: skip
        self._config.show(shown, self._cluster)
        self.version = version
        self._life.note_told(version)
        return True


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

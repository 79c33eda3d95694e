"""The ports of the server, and the cluster configuration that shows them to clients."""

from __future__ import annotations

from vbucket.model.partition_map import NO_NODE, PartitionMap, bucket_config, global_config


class Ports:
    """The ports on which the server listens. The listeners fill them in; 0: none, or not yet."""

    def __init__(self) -> None:
        self.kv = 0
        self.admin = 0
        self.kv_tls = 0
        self.admin_tls = 0


class ClusterConfig:
    """The configuration of the cluster, as Couchbase clients read it.

    A node alone calls `publish` first, when all ports are known. A node of a cluster calls `show`
    with each new map.
    """

    def __init__(self, host: str, node_id: str, bucket: str, num_vbuckets: int) -> None:
        self.bucket = bucket
        """The name of the only bucket."""
        self.num_vbuckets = num_vbuckets
        self._host = host
        self._node_id = node_id
        self._map: PartitionMap
        self._bucket_config: bytes
        self._global_config: bytes

    def publish(self, ports: Ports) -> None:
        """Build the configuration of a node alone with these ports."""
        single = PartitionMap.single_node(
            host=self._host,
            kv_port=ports.kv,
            admin_port=ports.admin,
            kv_tls_port=ports.kv_tls,
            admin_tls_port=ports.admin_tls,
            num_vbuckets=self.num_vbuckets,
        )
        self.show(single, self._node_id)

    def show(self, partition_map: PartitionMap, bucket_uuid: str) -> None:
        """Tell clients this map from now on."""
        self._map = partition_map
        self._bucket_config = bucket_config(
            partition_map, bucket=self.bucket, bucket_uuid=bucket_uuid
        )
        self._global_config = global_config(partition_map)

    def bucket_config(self) -> bytes:
        """Return the bucket's configuration as JSON; "$HOST" stands for our address."""
        return self._bucket_config

    def global_config(self) -> bytes:
        """Return the node's configuration without a bucket, as JSON."""
        return self._global_config

    def address_of(self, vb_id: int) -> str:
        """Return host and port of a partition's master; "": it has none. Nodes without an
        advertised host are on one machine, so they listen on the same address.
        """
        master = self._map.chains[vb_id][0]
        if master == NO_NODE:
            return ""
        node = self._map.nodes[master]
        host = node.host or self._host
        return f"[{host}]:{node.kv_port}" if ":" in host else f"{host}:{node.kv_port}"

    def admin_elsewhere(self, vb_id: int, *, is_tls: bool) -> str:
        """Return host and port of the admin interface of a partition's master; "": it is this
        node, or there is none.
        """
        master = self._map.chains[vb_id][0]
        if master in {NO_NODE, self._map.this_node}:
            return ""
        node = self._map.nodes[master]
        port = node.admin_tls_port if is_tls else node.admin_port
        host = node.host or self._host
        return "" if not port else f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def config_version(self) -> tuple[int, int]:
        """Return (revEpoch, rev)."""
        return self._map.rev_epoch, self._map.rev

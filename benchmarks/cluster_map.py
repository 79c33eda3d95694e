"""The partition map as a client reads it: which port has the master of each partition."""

from __future__ import annotations

import json
import socket
from typing import Final

from benchmarks import workload
from clients.cli.node.answers import AnswerError

OP_GET_CLUSTER_CONFIG: Final = 0xB5


def masters_of(config: bytes) -> list[int]:
    """Return the port of each partition's master; 0 where there is none."""
    placed = json.loads(config)["vBucketServerMap"]
    ports = [int(server.rpartition(":")[2]) for server in placed["serverList"]]
    return [ports[chain[0]] if chain[0] >= 0 else 0 for chain in placed["vBucketMap"]]


def read_masters(connection: socket.socket) -> list[int]:
    """Ask a node, on a connection with a bucket. Raises AnswerError."""
    connection.sendall(workload.frame(OP_GET_CLUSTER_CONFIG))
    with connection.makefile("rb") as stream:
        head = stream.read(24)
        body = stream.read(int.from_bytes(head[8:12], "big"))
    if len(head) < 24 or int.from_bytes(head[6:8], "big"):
        raise AnswerError(f"the node does not tell its map: {head!r}")
    return masters_of(body[head[4] :])

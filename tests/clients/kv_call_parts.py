"""Maps, errors and results for the tests of the routing core."""

from scripted_peer import config_of

from clients.errors import ConnectError, ConnectionLostError, error_from_status
from clients.kv.routing import Router
from clients.link.topology import ClusterNode
from clients.operation import Document, MutationResult, get_operation, store_operation
from dcp.wire.opcode import Opcode

PORTS = [9001, 9002, 9003]
NODES = [ClusterNode("127.0.0.1", port, 8091 + n) for n, port in enumerate(PORTS)]
FOUND = Document(b"v", 1)
STORED = MutationResult(1, 0, 5, 1)


def stored(index):
    return MutationResult(1, 0, 5, index)


GET = get_operation(b"k")
SET = store_operation(Opcode.SET, b"k", b"v")
JITTER = 0.0  # the longest pause


def config(owner, rev=1, partitions=4):
    """Every partition at one node, or a list with the node of each."""
    owners = owner if isinstance(owner, list) else [owner] * partitions
    return config_of(PORTS, owners, rev=rev)


def router_of(owner=0, rev=1):
    router = Router(ClusterNode("127.0.0.1", PORTS[0]))
    router.learn(config(owner, rev), "127.0.0.1")
    return router


def refusal(status, body=b"", node=NODES[0]):
    return error_from_status(status, "set", body=body, vb_id=1, key=b"k", node=node.name)


def lost(node=NODES[0]):
    return ConnectionLostError("the connection was lost", node=node.name)


def unreachable(node=NODES[0]):
    return ConnectError("cannot connect: connection refused", node=node.name)

"""A node's lease in etcd while its event loop does not come round."""

from __future__ import annotations

import time

import grpc
import pytest

from failover.metadata.etcd.lease_thread import ALONE_LEASES
from failover.metadata.etcd_stubs import etcd_api_pb2 as pb
from failover.metadata.metastore import (
    LeaseGrant,
    LeaseKeepAlive,
    LeaseResult,
    LeaseRevoke,
    Put,
    RefusalKind,
    StoreRefused,
    Txn,
)
from support.etcd_members import EtcdMembers, driven

TTL_S = 2


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    etcd = EtcdMembers(tmp_path_factory.mktemp("etcd"), 1)
    yield etcd
    etcd.close()


@pytest.fixture
def node(etcd):
    with driven(etcd) as harness:
        yield harness


@pytest.fixture
def witness(etcd):
    """Ask etcd whether a key is there, without the loop of the node."""
    with grpc.insecure_channel(etcd.endpoints[0]) as channel:
        ask = channel.unary_unary(
            "/etcdserverpb.KV/Range",
            request_serializer=pb.RangeRequest.SerializeToString,
            response_deserializer=pb.RangeResponse.FromString,
        )
        yield lambda key: bool(ask(pb.RangeRequest(key=key), timeout=5.0).kvs)


def leased_key(node, key: bytes) -> int:
    """Write a key under a new lease; return the lease."""
    client = node.client()
    lease = node.result(client, LeaseGrant(TTL_S))
    assert isinstance(lease, LeaseResult)
    node.result(client, Txn(then=(Put(key, b"runs", lease.lease_id),)))
    assert node.result(client, LeaseKeepAlive(lease.lease_id)) == lease
    return lease.lease_id


def test_a_lease_outlives_a_busy_loop_and_ends_with_a_loop_stuck(node, witness):
    lease_id = leased_key(node, b"/busy")
    time.sleep(2 * TTL_S)  # the loop of `node` does nothing meanwhile
    assert witness(b"/busy")
    assert node.result(node.clients[0], LeaseKeepAlive(lease_id)) == LeaseResult(lease_id, TTL_S)
    stuck_s = time.monotonic()
    while witness(b"/busy"):
        time.sleep(0.1)
    assert time.monotonic() - stuck_s > ALONE_LEASES * TTL_S
    gone = node.result(node.clients[0], LeaseKeepAlive(lease_id))
    assert isinstance(gone, StoreRefused)
    assert gone.kind is RefusalKind.LEASE_NOT_FOUND


def test_a_lease_that_was_given_back_is_not_renewed(node, witness):
    lease_id = leased_key(node, b"/left")
    node.result(node.clients[0], LeaseRevoke(lease_id))
    time.sleep(TTL_S / 2)
    assert not witness(b"/left")


def test_the_lease_of_a_client_that_was_closed_ends(node, witness):
    leased_key(node, b"/closed")
    node.run(node.clients.pop().close())
    closed_s = time.monotonic()
    while witness(b"/closed"):
        assert time.monotonic() - closed_s < ALONE_LEASES * TTL_S
        time.sleep(0.1)

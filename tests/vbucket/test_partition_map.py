"""The partition map and the JSON that clients of the field read."""

import json

import pytest

from vbucket.model.ids import NUM_VBUCKETS
from vbucket.model.partition_map import (
    MapNode,
    PartitionMap,
    bucket_config,
    bucket_document,
    global_config,
)


def loopback_map() -> PartitionMap:
    return PartitionMap.single_node(host="127.0.0.1", kv_port=11210, admin_port=8091)


def three_nodes(chain=(0, 1)) -> PartitionMap:
    nodes = tuple(MapNode(f"10.0.0.{i}", 11210, 8091) for i in range(3))
    return PartitionMap(nodes, (chain,) * NUM_VBUCKETS, rev=7, this_node=2)


def test_the_configuration_that_sdks_accept():
    document = json.loads(bucket_config(loopback_map(), bucket_uuid="ab" * 16))
    chains = document["vBucketServerMap"].pop("vBucketMap")
    assert chains == [[0]] * 1024
    assert document == {
        "rev": 1,
        "revEpoch": 1,
        "name": "default",
        "uuid": "ab" * 16,
        "nodeLocator": "vbucket",
        "bucketType": "membase",
        "bucketCapabilitiesVer": "",
        "bucketCapabilities": [
            "collections",
            "dcp",
            "cbhello",
            "cccp",
            "nodesExt",
            "rangeScan",
            "durableWrite",
            "xattr",
            "tombstonedUserXAttrs",
            "subdoc.AccessDeleted",
            "subdoc.DocumentMacroSupport",
            "subdoc.ReplaceBodyWithXattr",
            "subdoc.ReviveDocument",
        ],
        "nodes": [{"hostname": "$HOST:8091", "ports": {"direct": 11210}}],
        "nodesExt": [{"services": {"mgmt": 8091, "kv": 11210}, "thisNode": True}],
        "vBucketServerMap": {
            "hashAlgorithm": "CRC",
            "numReplicas": 0,
            "serverList": ["$HOST:11210"],
        },
    }


def test_the_global_configuration_is_the_nodes_only():
    assert json.loads(global_config(loopback_map())) == {
        "rev": 1,
        "revEpoch": 1,
        "nodesExt": [{"services": {"mgmt": 8091, "kv": 11210}, "thisNode": True}],
    }


def test_nothing_is_promised_that_is_not_there():
    """Clients act on these: what is missing fails late where it is promised."""
    absent = {"couchapi", "touch", "querySystemCollection", "dcp.IgnorePurgedTombstones"}
    assert not absent & set(bucket_document(loopback_map())["bucketCapabilities"])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost", "127.0.0.1", "::1"])
def test_a_host_that_others_cannot_use_is_not_advertised(host):
    node = PartitionMap.single_node(host=host, kv_port=1, admin_port=2).nodes[0]
    assert node.host is None


def test_a_host_own_is_advertised_with_brackets_where_needed():
    named = bucket_document(PartitionMap.single_node(host="db1", kv_port=1, admin_port=2))
    assert named["nodesExt"][0]["hostname"] == "db1"
    assert named["nodes"][0]["hostname"] == "db1:2"
    six = bucket_document(PartitionMap.single_node(host="fd00::1", kv_port=1, admin_port=2))
    assert six["nodesExt"][0]["hostname"] == "fd00::1"
    assert six["vBucketServerMap"]["serverList"] == ["[fd00::1]:1"]


def test_several_nodes_keep_their_order():
    document = bucket_document(three_nodes().checked())
    assert [node["hostname"] for node in document["nodesExt"]] == [
        "10.0.0.0",
        "10.0.0.1",
        "10.0.0.2",
    ]
    assert [node.get("thisNode", False) for node in document["nodesExt"]] == [False, False, True]
    assert document["vBucketServerMap"]["numReplicas"] == 1
    assert document["rev"] == 7


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (three_nodes((1, 1)), "names a node twice"),
        (three_nodes((0, 3)), "not among the 3 nodes"),
        (three_nodes((-2, 1)), "not among the 3 nodes"),
        (three_nodes(()), "the same length"),
        (three_nodes()._replace(chains=((0,),) * 3), "3 chains; .* power of two"),
        (three_nodes()._replace(chains=((0, 1),) * 1023 + ((0,),)), "the same length"),
        (three_nodes()._replace(this_node=3), "out of range"),
        (three_nodes()._replace(rev=0), "out of range"),
        (
            three_nodes()._replace(nodes=(MapNode(None, 1, 2), *three_nodes().nodes[1:])),
            "have no host",
        ),
    ],
)
def test_maps_that_break_the_rules_are_refused(broken, reason):
    with pytest.raises(ValueError, match=reason):
        broken.checked()

import json

import pytest
from scripted_peer import config_of

from clients.address import ServerAddress, is_loopback, parse_address
from clients.errors import TopologyError
from clients.link.topology import ClusterNode, parse_topology, single_node
from vbucket.model.partition_map import PartitionMap, bucket_config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", ServerAddress("host", 11210)),
        ("127.0.0.1:4000", ServerAddress("127.0.0.1", 4000)),
        ("dcpd://ada:p%40ss@db:1", ServerAddress("db", 1, "ada", "p@ss")),
        ("dcpd://ada@db/other", ServerAddress("db", 11210, "ada", "", "other")),
        ("[::1]:5", ServerAddress("::1", 5)),
        ("[::1]", ServerAddress("::1", 11210)),
    ],
)
def test_address_is_read(text, expected):
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no host"),
        (":5", "no host"),
        ("h:x", "not a port"),
        ("h:0", "not a port"),
        ("h:65536", "not a port"),
        ("[::1", "no ]"),
        ("http://h", "scheme"),
    ],
)
def test_bad_address_says_why(text, why):
    with pytest.raises(ValueError, match=why):
        parse_address(text)


def test_ipv6_address_is_written_with_brackets():
    assert ServerAddress("::1", 5).node == "[::1]:5"
    assert ClusterNode("::1", 5).name == "[::1]:5"
    assert is_loopback("::1")
    assert is_loopback("127.9.9.9")
    assert not is_loopback("10.0.0.1")


def test_topology_finds_the_node_of_a_partition():
    owners = [n % 2 for n in range(1024)]
    owners[5] = -1
    topology = parse_topology(config_of([11, 22], owners, rev=7), "10.1.2.3")
    assert topology.revision == (1, 7)
    assert topology.num_vbuckets == 1024
    assert topology.node_of(0) == ClusterNode("10.1.2.3", 11, 8091)
    assert topology.node_of(1) == ClusterNode("10.1.2.3", 22, 8092)
    with pytest.raises(TopologyError, match="no node is active"):
        topology.node_of(5)
    with pytest.raises(TopologyError, match="no partition 1024"):
        topology.node_of(1024)


def test_newer_revision_counts():
    old = parse_topology(config_of([1], rev=3), "h")
    assert parse_topology(config_of([1], rev=4), "h").is_newer_than(old)
    assert not parse_topology(config_of([1], rev=3), "h").is_newer_than(old)
    assert old.is_newer_than(None)
    assert old.is_newer_than(single_node("h", 1))


def test_another_number_of_partitions_is_another_folder():
    """A node alone tells the first revision after each start. One map of no node is no sign."""
    few, many = (parse_topology(config_of([1], [0] * n), "h") for n in (64, 1024))
    assert few.revision == many.revision
    assert few.is_newer_than(many)
    assert many.is_newer_than(few)
    assert not single_node("h", 1).is_newer_than(few)
    assert not single_node("h", 1, 64).is_newer_than(single_node("h", 1))


def test_this_node_and_ports_of_old_servers():
    document = {
        "rev": 1,
        "nodes": [{"hostname": "10.0.0.9:8091", "ports": {"direct": 99}}],
        "nodesExt": [{"thisNode": True, "services": {}}],
        "vBucketServerMap": {"vBucketMap": [[0], []]},
    }
    topology = parse_topology(json.dumps(document).encode(), "10.0.0.1")
    assert topology.nodes == (ClusterNode("10.0.0.1", 99, 0),)
    assert topology.vbucket_map == (0, -1)
    del document["nodesExt"]
    nodes = parse_topology(json.dumps(document).encode(), "10.0.0.1").nodes
    assert nodes == (ClusterNode("10.0.0.9", 99, 0),)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d.pop("nodes"), "nodes"),
        (lambda d: d.pop("rev"), "rev"),
        (lambda d: d["vBucketServerMap"].update(vBucketMap=[]), "no partitions"),
        (lambda d: d["vBucketServerMap"].update(vBucketMap=[[3]]), "not among"),
        (lambda d: d["nodesExt"].clear() or d["nodesExt"].append({}), "nodes, but|cannot be read"),
    ],
)
def test_unusable_configuration_says_what_is_missing(change, why):
    document = json.loads(config_of([1, 2]))
    change(document)
    with pytest.raises(TopologyError, match=why):
        parse_topology(json.dumps(document).encode(), "h")


def test_configuration_that_is_not_json():
    with pytest.raises(TopologyError, match="cannot be read"):
        parse_topology(b"<html>", "h")


# -- TLS -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["dcpds", "couchbases"])
def test_tls_addresses_have_a_port_of_their_own(scheme):
    plain = parse_address("h")
    assert (plain.port, plain.is_tls, plain.tls_ca) == (11210, False, "")
    tls = parse_address(f"{scheme}://ada:pw@h/b?tls_ca=/a%20b/ca.pem&tls_cert=me.pem")
    assert (tls.host, tls.port, tls.user, tls.bucket) == ("h", 11207, "ada", "b")
    assert (tls.is_tls, tls.tls_ca, tls.tls_cert) == (True, "/a b/ca.pem", "me.pem")
    assert tls.at("other", 5).tls_ca == "/a b/ca.pem"
    assert parse_address(f"{scheme}://h:9").port == 9


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dcpds://h?ca=x", "unknown 'ca'; known are tls_ca, tls_cert"),
        ("dcpd://h?tls_ca=x", "tls_ca is for TLS, write dcpds://"),
        ("h?tls_cert=x", "tls_cert is for TLS"),
        ("https://h", "the scheme must be dcpd:// or dcpds://"),
    ],
)
def test_addresses_that_would_not_mean_what_they_say(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_address(text)


def test_clients_with_tls_are_told_the_ports_of_tls():
    ports = {"kv_port": 1, "admin_port": 2, "kv_tls_port": 3, "admin_tls_port": 4}
    raw = bucket_config(PartitionMap.single_node(host="db", **ports))
    assert parse_topology(raw, "h").nodes == (ClusterNode("db", 1, 2),)
    assert parse_topology(raw, "h", is_tls=True).nodes == (ClusterNode("db", 3, 4),)
    raw = bucket_config(PartitionMap.single_node(host="db", kv_port=1, admin_port=2))
    assert b"SSL" not in raw
    with pytest.raises(TopologyError, match="no key-value port with TLS"):
        parse_topology(raw, "h", is_tls=True)

"""A collection's maxTTL that is changed on one of three nodes holds on all of them."""

from __future__ import annotations

import base64
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from clients.testing import DcpServer
from dcp.session.kv.updates import META_EXTRAS
from dcp.wire.feature import Feature
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient
from support.server import ClusterProcesses
from support.waiting import until
from vbucket.model.ids import vbucket_of
from vbucket.model.manifest import encode_leb128

pytestmark = pytest.mark.crash

SCOPES = "/pools/default/buckets/default/scopes"
FIRST_S, NEXT_S = 1_000_000, 50_000


def change(node: DcpServer, method: str, path: str, **form: Any) -> None:
    """Send a form to the admin port."""
    request = urllib.request.Request(
        f"{node.admin_url}{path}", urlencode(form).encode(), method=method,
        headers={"authorization": f"Basic {base64.b64encode(b'guest:guest').decode()}"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


def collection(node: DcpServer) -> dict[str, Any]:
    """Return the collection s.c as a node knows it; {}: it has none."""
    scopes = node.ask("GET", SCOPES)["scopes"]
    found = (each for scope in scopes if scope["name"] == "s" for each in scope["collections"])
    return next((each for each in found if each["name"] == "c"), {})


def expires_in_s(cluster: ClusterProcesses, name: str, uid: int) -> float:
    """Store a document without an expiry at a partition's master; return when it expires."""
    (vb_id, *_) = [row["vb"] for row in cluster.partition_map(name) if row["master"] == name]
    key = next(key for key in (b"k%d" % n for n in range(1 << 20)) if vbucket_of(key) == vb_id)
    wire_key = encode_leb128(uid) + key
    with RawClient(cluster.nodes[name].port) as client:
        features = Feature.COLLECTIONS.to_bytes(2, "big")
        assert client.ask(Opcode.HELLO, value=features).status == Status.OK
        assert client.ask(Opcode.SELECT_BUCKET, key=b"default").status == Status.OK
        stored = client.ask(Opcode.SET, key=wire_key, extras=bytes(8), value=b"v", vb_id=vb_id)
        assert stored.status == Status.OK
        meta = client.ask(Opcode.GET_META, key=wire_key, vb_id=vb_id)
    _, _, expiry, _ = META_EXTRAS.unpack(meta.extras)
    return expiry - time.time() if expiry else 0.0


def test_changed_max_ttl_holds_on_all_nodes_and_after_restart(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, "abc") as cluster:
        nodes = cluster.nodes
        cluster.until_in_sync(3)
        cluster.insist("set", masters_return_s=1.0)
        cluster.until_even()
        change(nodes["a"], "POST", SCOPES, name="s")
        change(nodes["b"], "POST", f"{SCOPES}/s/collections", name="c", maxTTL=FIRST_S)
        for node in nodes.values():
            until(lambda node=node: collection(node).get("maxTTL") == FIRST_S)
        uid = int(collection(nodes["a"])["uid"], 16)
        for name in nodes:
            assert NEXT_S < expires_in_s(cluster, name, uid) <= FIRST_S

        change(nodes["c"], "PATCH", f"{SCOPES}/s/collections/c", maxTTL=NEXT_S)
        for node in nodes.values():
            until(lambda node=node: collection(node).get("maxTTL") == NEXT_S)
        for name in nodes:
            assert 0 < expires_in_s(cluster, name, uid) <= NEXT_S
        manifests = [nodes[name].ask("GET", SCOPES) for name in nodes]
        assert manifests[0] == manifests[1] == manifests[2]

        nodes["b"].kill()
        change(nodes["a"], "PATCH", f"{SCOPES}/s/collections/c", maxTTL=0)  # while b is down
        nodes["b"].start()
        cluster.until_in_sync(3, "b")
        cluster.until_even("b")
        for node in nodes.values():
            until(lambda node=node: collection(node).get("maxTTL", 0) == 0)
        for name in nodes:
            assert expires_in_s(cluster, name, uid) == 0.0

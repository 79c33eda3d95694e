"""What the client of etcd says of an etcd that refuses it, or that it refuses."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from metastore_harness import Watched, run_on

from failover.metadata.etcd.client import EtcdClient
from failover.metadata.etcd.settings import EtcdSettings
from failover.metadata.metastore import (
    LeaseGrant,
    LeaseKeepAlive,
    Put,
    Range,
    RangeResult,
    StoreUnavailable,
    Txn,
)
from support.credentials import TestCa
from support.etcd_members import (
    driven,
    members,
    other_etcd,
    put_one,
    running,
    trouble_of,
    try_until_done,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    with members(tmp_path_factory.mktemp("one")) as etcd:
        yield etcd


@pytest.fixture
def harness(one):
    with driven(one) as harness:
        yield harness


# ---- TLS


@pytest.fixture(scope="module")
def tls_member(tmp_path_factory):
    """A member that asks for client certificates, its CA, and another CA."""
    folder = tmp_path_factory.mktemp("tls")
    ca, other_ca = TestCa(folder), TestCa(folder, "other")
    pem = ca.issue()
    options = (
        "--cert-file", str(pem), "--key-file", str(pem),
        "--client-cert-auth", "--trusted-ca-file", str(ca.path),
    )  # fmt: skip
    with members(folder / "etcd", options=options) as etcd:
        yield etcd, ca, other_ca


@pytest.fixture
def tls(tls_member):
    etcd, *cas = tls_member
    with driven(etcd) as harness:
        yield harness, *cas


def identity(ca, name):
    pem = ca.issue(name).read_bytes()
    return {"certificate": pem, "private_key": pem}


def test_tls_with_a_client_certificate(tls):
    harness, ca, _ = tls
    client = harness.client(ca=ca.path.read_bytes(), **identity(ca, "client"))
    put_one(harness, client, b"/a")


def test_a_wrong_ca_is_told(tls):
    harness, ca, other_ca = tls
    text = trouble_of(harness, ca=other_ca.path.read_bytes(), **identity(ca, "client"))
    assert "not signed by the CA that was given" in text


def test_a_missing_client_certificate_is_told(tls):
    harness, ca, other_ca = tls
    for own in ({}, identity(other_ca, "stranger")):
        assert "client certificate" in trouble_of(harness, ca=ca.path.read_bytes(), **own)


def test_tls_on_one_side_only_is_told(tls, one):
    harness, ca, _ = tls
    assert "If it speaks TLS, give its CA" in trouble_of(harness)
    text = trouble_of(harness, endpoints=one.endpoints, ca=ca.path.read_bytes())
    assert "it speaks no TLS" in text


def test_a_certificate_for_another_name_is_told(tmp_path):
    ca = TestCa(tmp_path)
    pem = tmp_path / "other-name.pem"
    ca._ca.issue_cert("etcd.example").private_key_and_cert_chain_pem.write_to_path(str(pem))
    options = ("--cert-file", str(pem), "--key-file", str(pem))
    with running(tmp_path / "etcd", options=options) as harness:
        assert "for another host name" in trouble_of(harness, ca=ca.path.read_bytes())


# ---- Users


def gateway(etcd, path, **body):
    """Call etcd's HTTP gateway."""
    url = f"http://{etcd.endpoints[0]}/v3/{path}"
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=30) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def member_with_users(tmp_path_factory):
    """A member with the users root and dcpd; dcpd may use /dcpd/ only."""
    with members(tmp_path_factory.mktemp("users")) as etcd:
        for name in ("root", "dcpd"):
            gateway(etcd, "auth/user/add", name=name, password=f"{name}!")
            gateway(etcd, "auth/role/add", name=name)
            gateway(etcd, "auth/user/grant", user=name, role=name)
        permission = {"permType": 2, "key": "L2RjcGQv", "range_end": "L2RjcGQw"}  # /dcpd/
        gateway(etcd, "auth/role/grant", name="dcpd", perm=permission)
        gateway(etcd, "auth/enable")
        yield etcd


@pytest.fixture
def users(member_with_users):
    with driven(member_with_users) as harness:
        yield harness


DCPD = {"user": "dcpd", "password": "dcpd!", "prefix": b"/dcpd/"}


def test_a_user_with_a_password(users):
    client = users.client(**DCPD)
    watched = Watched(client, b"/dcpd/", 1)
    revision = put_one(users, client, b"/dcpd/a")
    lease = run_on(users, client, LeaseGrant(5))
    assert run_on(users, client, LeaseKeepAlive(lease.lease_id)) == lease
    users.wait(lambda: watched.revisions == [revision])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"password": "wrong"}, "the user or the password is wrong"),
        ({"user": "nobody"}, "the user or the password is wrong"),
        ({"user": "", "password": ""}, "it asks for a user"),
        ({"prefix": b"/other/"}, "the user may not read and write there"),
    ],
)
def test_a_user_that_etcd_refuses_is_told(users, change, text):
    assert text in trouble_of(users, **{**DCPD, **change})


def test_a_write_without_the_right_is_told_and_did_not_happen(users):
    client = users.client(**DCPD)
    refused = run_on(users, client, Txn(then=(Put(b"/other/a", b""),)))
    assert isinstance(refused, StoreUnavailable)
    assert "etcdctl role grant-permission" in refused.text
    put_one(users, client, b"/dcpd/b")


def test_a_user_where_etcd_knows_none_is_told(harness):
    assert "etcd knows no users" in trouble_of(harness, **DCPD)


def test_a_login_that_etcd_forgot_is_repeated(users):
    client = users.client(**DCPD, deadline_s=0.8)
    put_one(users, client, b"/dcpd/c")
    users.etcd.kill(0)
    users.etcd.start(0)  # the tokens were in memory
    assert isinstance(try_until_done(users, client, Range(b"/dcpd/c")), RangeResult)


# ---- Old versions


def test_an_etcd_that_is_too_old_is_refused(harness):
    with other_etcd("3.3.27") as endpoint:
        text = trouble_of(harness, endpoints=(endpoint,))
    assert "it is version 3.3.27, and 3.4 or newer is needed" in text


def test_an_etcd_that_tells_its_version_to_root_only_is_used(harness):
    """etcd 3.6 does so."""
    with other_etcd("") as endpoint:
        client = harness.client((endpoint,))
        found = run_on(harness, client, Range(b"k"))
    assert found == RangeResult(5, ())


def test_an_old_version_is_told_once(harness):
    client = harness.client()
    put_one(harness, client, b"/old")
    version = client._link.version
    told = [notice for notice in harness.notices if "known bugs" in notice]
    assert len(told) == (1 if version.startswith("3.4.") else 0)


# ---- The process


def test_a_node_alone_does_not_import_grpc():
    code = (
        "import sys, dcp.server.main, dcp.server.node, failover.metadata.embedded.client,"
        " failover.metadata.embedded.server;"
        " sys.exit('grpc' in sys.modules or 'google.protobuf' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_all_grpc_of_a_process_is_on_one_loop(harness):
    harness.client()

    async def elsewhere():
        EtcdClient(EtcdSettings(("127.0.0.1:1",), b""), print)

    def in_a_thread():
        with pytest.raises(RuntimeError, match="one event loop"):
            asyncio.run(elsewhere())

    harness.run(asyncio.to_thread(in_a_thread))


def test_the_messages_are_what_the_script_generates(tmp_path):
    subprocess.run([ROOT / "scripts/etcd-stubs", tmp_path], check=True, timeout=120)
    name = "etcd_api_pb2.py"
    made = (tmp_path / name).read_text().partition("DESCRIPTOR = ")[2]
    kept = (ROOT / "failover/metadata/etcd_stubs" / name).read_text().partition("DESCRIPTOR = ")[2]
    assert made == kept, "run scripts/etcd-stubs"

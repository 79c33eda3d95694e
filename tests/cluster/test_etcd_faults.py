"""The client of etcd while members die, freeze, forget or refuse it: it goes on, or says why."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from metastore_harness import Watched, run_on

from dcp.cluster.cluster_keys import ClusterKeys, KeyKind
from dcp.cluster.cluster_records import StoredPartition, encode_partition
from dcp.cluster.cluster_view import ClusterView
from dcp.cluster.effects import Answered, Submit, Tick
from dcp.cluster.metastore import (
    Compact,
    Compacted,
    LeaseGrant,
    LeaseKeepAlive,
    LeaseResult,
    Lost,
    OutcomeUnknown,
    Put,
    Range,
    RangeResult,
    RefusalKind,
    StoreUnavailable,
    Txn,
    TxnResult,
)
from dcp.cluster.prefix_owner import owner_read, owner_trouble
from dcp.cluster.record_writer import OutcomeKind, RecordChange, RecordWriter, WriteOutcome
from dcp.metastore.etcd_client import EtcdClient
from dcp.metastore.etcd_settings import EtcdSettings
from dcp.metastore.etcd_stubs import etcd_api_pb2 as pb
from failover.replication_record import create, elect
from support.certificates import TestCa
from support.counting_writer import CountingWriter
from support.etcd_harness import EtcdHarness
from support.etcd_members import EtcdMembers, free_ports

ROOT = Path(__file__).parents[2]
PUT = Txn(then=(Put(b"k", b"v"),))


@contextmanager
def members(folder, count=1, options=()):
    folder.mkdir(exist_ok=True)
    etcd = EtcdMembers(folder, count, options)
    try:
        yield etcd
    finally:
        etcd.close()


@contextmanager
def driven(etcd):
    harness = EtcdHarness(etcd)
    try:
        yield harness
    finally:
        harness.close()


@contextmanager
def running(folder, count=1, options=()):
    with members(folder, count, options) as etcd, driven(etcd) as harness:
        yield harness


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    with members(tmp_path_factory.mktemp("one")) as etcd:
        yield etcd


@pytest.fixture
def harness(one):
    with driven(one) as harness:
        yield harness


def put(harness, client, key, value=b"v"):
    result = run_on(harness, client, Txn(then=(Put(key, value),)))
    assert isinstance(result, TxnResult), result
    return result.revision


def try_until_done(harness, client, request):
    """Repeat a request until it is carried out; return its result."""
    for _ in range(300):
        result = run_on(harness, client, request)
        if not isinstance(result, OutcomeUnknown | StoreUnavailable):
            return result
        harness.pass_time(0.05)
    raise AssertionError(result)


def trouble_of(harness, **settings):
    """Return what a client says that cannot log in."""
    client = harness.client(**settings)
    harness.wait(lambda: client.trouble != "etcd: not connected yet")
    refused = run_on(harness, client, PUT)
    assert isinstance(refused, StoreUnavailable)
    assert client.trouble in harness.notices
    assert "\n" not in client.trouble
    return client.trouble


# ---- Members that die and freeze


def test_what_was_answered_survives_kills_of_the_leader(tmp_path):
    """With writers and a watch; also the member dies that the client is connected to."""
    with running(tmp_path, 3) as harness:
        etcd = harness.etcd
        client = harness.client(deadline_s=0.8)
        watched = Watched(client, b"/", 1)
        writers = [CountingWriter(client, b"/%d" % number) for number in range(3)]
        for victim in (etcd.leader, lambda: etcd.endpoints.index(client.endpoint)):
            wanted = sum(writer.answered for writer in writers) + 100
            harness.wait(lambda wanted=wanted: sum(w.answered for w in writers) >= wanted)
            number = victim()
            etcd.kill(number)
            wanted = sum(writer.answered for writer in writers) + 50
            harness.wait(lambda wanted=wanted: sum(w.answered for w in writers) >= wanted)
            etcd.start(number)
            etcd.wait_until_ready(number)
        for writer in writers:
            writer.is_stopped = True
        found = run_on(harness, client, Range(b"/", is_prefix=True))
        assert isinstance(found, RangeResult)
        harness.wait(lambda: watched.revisions and watched.revisions[-1] >= found.revision)
        assert watched.messages == watched.batches
        assert watched.revisions == list(range(2, watched.revisions[-1] + 1)), "none missing, twice"
        written = {event.item.key: int(event.item.value) for batch in watched.batches
                   for event in batch.events}  # fmt: skip
        assert all(written[writer.key] >= writer.answered for writer in writers)


def test_a_frozen_member_is_left_for_another(tmp_path):
    with running(tmp_path, 3) as harness:
        client = harness.client(deadline_s=0.8)
        harness.wait(lambda: client.endpoint)
        first = client.endpoint
        put(harness, client, b"/a")
        number = harness.etcd.endpoints.index(first)
        harness.etcd.signal(number, signal.SIGSTOP)
        assert isinstance(run_on(harness, client, PUT), OutcomeUnknown | StoreUnavailable)
        harness.wait(lambda: client.endpoint not in {"", first})
        assert isinstance(try_until_done(harness, client, PUT), TxnResult)
        harness.etcd.signal(number, signal.SIGCONT)


def test_a_request_on_a_link_that_was_just_lost_was_not_sent(harness):
    client, results = harness.client(), []
    put(harness, client, b"/lost")
    client.submit(PUT, results.append)
    client._link.lose("it is gone")
    harness.wait(lambda: results)
    assert results == [StoreUnavailable("it is gone")]
    put(harness, client, b"/lost")


def test_endpoints_that_do_not_answer_are_skipped(harness):
    (closed,) = free_ports(1)
    client = harness.client((f"127.0.0.1:{closed}", harness.etcd.endpoints[0]))
    put(harness, client, b"/skip")
    assert client.endpoint == harness.etcd.endpoints[0]
    assert not any("nothing listens" in notice for notice in harness.notices)


def test_etcd_that_is_down_is_told_and_nothing_happened(harness):
    (closed,) = free_ports(1)
    text = trouble_of(harness, endpoints=(f"127.0.0.1:{closed}",))
    assert text == (
        f"etcd at 127.0.0.1:{closed}: nothing listens there. Start etcd, or correct the endpoint"
    )


def test_leases_and_watches_go_on_over_a_restart(tmp_path):
    with running(tmp_path) as harness:
        client = harness.client(deadline_s=0.8)
        lease = run_on(harness, client, LeaseGrant(5))
        assert isinstance(lease, LeaseResult)
        watched = Watched(client, b"/", 1)
        revisions = [put(harness, client, b"/a")]
        harness.etcd.kill(0)
        harness.wait(lambda: client.trouble)
        assert isinstance(run_on(harness, client, PUT), StoreUnavailable)
        harness.etcd.start(0)
        harness.wait(lambda: not client.trouble)
        assert any("etcd answers again" in notice for notice in harness.notices)
        assert run_on(harness, client, LeaseKeepAlive(lease.lease_id)) == lease
        revisions.append(put(harness, client, b"/b"))
        harness.wait(lambda: watched.revisions == revisions)


def test_a_watch_without_a_sign_of_life_goes_on_elsewhere(harness, monkeypatch):
    monkeypatch.setattr("dcp.metastore.etcd_client.ETCD_SILENCE_S", 0.4)
    monkeypatch.setattr("dcp.metastore.etcd_client.PROGRESS_S", 0.1)
    proxy, port = harness.proxy(harness.etcd.ports[0])
    prefix = harness.new_prefix()
    client = harness.client((f"127.0.0.1:{port}", harness.etcd.endpoints[0]))
    before = put(harness, client, prefix + b"a")
    watched = Watched(client, prefix, before)
    harness.wait(lambda: watched.batches)
    harness.pass_time(1)
    assert client.endpoint == f"127.0.0.1:{port}", "an idle watch has its signs of life"
    proxy.swallow_answers = True
    last = put(harness, harness.client(), prefix + b"b")
    harness.wait(lambda: watched.revisions == [before, last])
    assert client.endpoint == harness.etcd.endpoints[0]


def test_a_watch_that_a_compaction_overtook_ends_as_compacted(harness):
    proxy, port = harness.proxy(harness.etcd.ports[0])
    prefix = harness.new_prefix()
    client, other = harness.client((f"127.0.0.1:{port}",)), harness.client()
    watched = Watched(client, prefix, put(harness, other, prefix + b"a"))
    harness.wait(lambda: watched.batches)
    proxy.swallow_answers = True
    put(harness, other, prefix + b"a")
    last = put(harness, other, prefix + b"a")
    run_on(harness, other, Compact(last))
    proxy.swallow_answers = False
    proxy.cut()
    harness.wait(lambda: watched.messages[1:] == [Compacted(last)])


def test_a_revision_that_comes_twice_is_delivered_once(harness):
    """Releases of etcd had this bug."""
    client, prefix = harness.client(), harness.new_prefix()
    watched = Watched(client, prefix, put(harness, client, prefix + b"a"))
    harness.wait(lambda: watched.batches)
    (again,) = watched.batches
    kv = pb.KeyValue(key=prefix + b"a", mod_revision=again.revision, version=1)
    client._deliver(watched.handle, pb.WatchResponse(events=[pb.Event(kv=kv)]))
    last = put(harness, client, prefix + b"b")
    harness.wait(lambda: watched.revisions[-1:] == [last])
    assert watched.revisions == [again.revision, last]


# ---- Outcomes


class WriterDesk:
    """A record writer over a real client."""

    def __init__(self, harness, client, keys):
        self.harness, self.client = harness, client
        self.view = ClusterView(keys)
        self.writer = RecordWriter(self.view, "desk", "owner")
        self.outcomes = []

    def take(self, effects):
        for effect in effects:
            if isinstance(effect, Submit):
                self.client.submit(
                    effect.request,
                    lambda result, tag=effect.tag: self.event(Answered(tag, result)),
                )
            elif isinstance(effect, WriteOutcome):
                self.outcomes.append(effect.kind)

    def now_ns(self):
        return round(self.harness.loop.time() * 1e9)

    def event(self, event):
        self.take(self.writer.on_event(self.now_ns(), event))

    def is_settled(self):
        self.event(Tick())
        return self.outcomes


@pytest.mark.parametrize(
    ("applied", "kind"), [(True, OutcomeKind.WRITTEN), (False, OutcomeKind.NOT_WRITTEN)]
)
def test_an_unknown_outcome_is_settled_by_reading_the_operation_id(harness, applied, kind):
    keys = ClusterKeys(harness.new_prefix())
    record = create("abc")
    key = keys.of_partition(KeyKind.PARTITION, 7)
    put(harness, harness.client(), key, encode_partition(StoredPartition(record, "operator")))
    proxy, port = harness.proxy(harness.etcd.ports[0])
    client = harness.client((f"127.0.0.1:{port}",), deadline_s=0.3)
    read = run_on(harness, client, Range(keys.root, is_prefix=True))
    desk = WriterDesk(harness, client, keys)
    desk.view.replace(read.items, read.revision)
    proxy.swallow_answers, proxy.swallow_requests = applied, not applied
    change = RecordChange(7, elect(record, "b"), desk.view.partitions[7])
    desk.take(desk.writer.write(desk.now_ns(), [change]))
    harness.wait(lambda: client.trouble or not client.endpoint)
    proxy.swallow_answers = proxy.swallow_requests = False
    proxy.cut()
    harness.wait(desk.is_settled)
    assert desk.outcomes == [kind]


def test_a_full_quota_is_told_with_what_to_do(tmp_path):
    options = ("--quota-backend-bytes", str(4 << 20))
    with running(tmp_path, options=options) as harness:
        client = harness.client()
        lease = run_on(harness, client, LeaseGrant(5))
        result = None
        for number in range(200):
            request = Txn(then=(Put(b"/%d" % number, bytes(100_000)),))
            result = run_on(harness, client, request)
            if not isinstance(result, TxnResult):
                break
        assert result.kind is RefusalKind.NO_SPACE
        assert "etcdctl alarm disarm" in result.text
        assert harness.notices.count(result.text) == 1
        assert isinstance(run_on(harness, client, Range(b"/0")), RangeResult)
        assert run_on(harness, client, LeaseKeepAlive(lease.lease_id)) == lease
        harness.notices.clear()
        put_nothing = harness.client()
        harness.wait(lambda: not put_nothing.trouble)
        assert result.text in harness.notices, "a new client is told at its login"


# ---- Another history


@pytest.mark.parametrize("is_copy", [True, False], ids=["an older copy", "another cluster"])
def test_a_history_that_went_back_is_refused_and_told(tmp_path, monkeypatch, is_copy):
    monkeypatch.setattr("dcp.metastore.etcd_client.ETCD_LOST_S", 0.1)
    with running(tmp_path) as harness:
        etcd, data = harness.etcd, tmp_path / "m0"
        client = harness.client(deadline_s=0.8)
        put(harness, client, b"/a")
        etcd.kill(0)
        shutil.copytree(data, tmp_path / "copy")
        etcd.start(0)
        etcd.wait_until_ready(0)
        watched = Watched(client, b"/", 1)
        last = try_until_done(harness, client, Txn(then=(Put(b"/b", b"v"),))).revision
        harness.wait(lambda: watched.revisions[-1:] == [last])
        etcd.kill(0)
        shutil.rmtree(data)
        if is_copy:
            shutil.copytree(tmp_path / "copy", data)
        else:
            etcd.options = (*etcd.options, "--initial-cluster-token", "other")
        etcd.start(0)
        harness.wait(lambda: "its history went back" in client.trouble)
        what = "it is at revision 2" if is_copy else "it is another cluster of etcd"
        assert what in client.trouble
        assert isinstance(watched.messages[-1], Lost)
        refused = run_on(harness, client, PUT)
        assert isinstance(refused, StoreUnavailable)
        assert "restart all nodes" in refused.text
        late = Watched(client, b"/", 1)
        harness.wait(lambda: late.messages)
        assert isinstance(late.messages[0], Lost)
        put(harness, harness.client(), b"/new process")


def test_the_store_of_another_cluster_is_told(harness):
    client, base = harness.client(), harness.new_prefix()
    for cluster, text in (("ours", "and none of any other"), ("ours", "but of cluster theirs")):
        found = run_on(harness, client, owner_read(base, cluster))
        assert text in owner_trouble(found, base, cluster)
        put(harness, client, base + b"theirs/leader")
    put(harness, client, base + b"ours/leader")
    assert not owner_trouble(run_on(harness, client, owner_read(base, "ours")), base, "ours")


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
    put(harness, client, b"/a")


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
    revision = put(users, client, b"/dcpd/a")
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
    put(users, client, b"/dcpd/b")


def test_a_user_where_etcd_knows_none_is_told(harness):
    assert "etcd knows no users" in trouble_of(harness, **DCPD)


def test_a_login_that_etcd_forgot_is_repeated(users):
    client = users.client(**DCPD, deadline_s=0.8)
    put(users, client, b"/dcpd/c")
    users.etcd.kill(0)
    users.etcd.start(0)  # the tokens were in memory
    assert isinstance(try_until_done(users, client, Range(b"/dcpd/c")), RangeResult)


# ---- Old versions


class OldEtcd:
    """Says that it is etcd 3.3, which no package has any more."""

    async def start(self):
        async def status(request, context):
            return pb.StatusResponse(version="3.3.27", header=pb.ResponseHeader(cluster_id=1))

        handler = grpc.unary_unary_rpc_method_handler(
            status,
            request_deserializer=pb.StatusRequest.FromString,
            response_serializer=pb.StatusResponse.SerializeToString,
        )
        self.server = grpc.aio.server()
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("etcdserverpb.Maintenance", {"Status": handler}),)
        )
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return port


def test_an_etcd_that_is_too_old_is_refused(harness):
    old = OldEtcd()
    port = harness.run(old.start())
    try:
        text = trouble_of(harness, endpoints=(f"127.0.0.1:{port}",))
    finally:
        harness.run(old.server.stop(None))
    assert "it is version 3.3.27, and 3.4 or newer is needed" in text


def test_an_old_version_is_told_once(harness):
    client = harness.client()
    put(harness, client, b"/old")
    version = client._link.version
    told = [notice for notice in harness.notices if "known bugs" in notice]
    assert len(told) == (1 if version.startswith("3.4.") else 0)


# ---- The process


def test_a_node_alone_does_not_import_grpc():
    code = (
        "import sys, dcp.server.main, dcp.server.node, dcp.metastore.embedded_client,"
        " dcp.metastore.embedded_server;"
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
    kept = (ROOT / "dcp/metastore/etcd_stubs" / name).read_text().partition("DESCRIPTOR = ")[2]
    assert made == kept, "run scripts/etcd-stubs"

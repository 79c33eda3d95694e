"""The client of etcd while members die, freeze, forget or refuse it: it goes on, or says why."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from metastore_harness import Watched, run_on

from failover.coordinator.effects import Answered, Submit, Tick
from failover.coordinator.record_writer import OutcomeKind, RecordChange, RecordWriter, WriteOutcome
from failover.coordinator.records import (
    ClusterKeys,
    KeyKind,
    StoredPartition,
    encode_partition,
    owner_read,
    owner_trouble,
)
from failover.coordinator.view import ClusterView
from failover.metadata.etcd_stubs import etcd_api_pb2 as pb
from failover.metadata.metastore import (
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
from failover.rules.replication_record import create, elect
from support.etcd_members import (
    PUT,
    driven,
    free_ports,
    members,
    put_one,
    running,
    trouble_of,
    try_until_done,
)
from support.load import CountingWriter

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    with members(tmp_path_factory.mktemp("one")) as etcd:
        yield etcd


@pytest.fixture
def harness(one):
    with driven(one) as harness:
        yield harness


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
        put_one(harness, client, b"/a")
        number = harness.etcd.endpoints.index(first)
        harness.etcd.signal(number, signal.SIGSTOP)
        assert isinstance(run_on(harness, client, PUT), OutcomeUnknown | StoreUnavailable)
        harness.wait(lambda: client.endpoint not in {"", first})
        assert isinstance(try_until_done(harness, client, PUT), TxnResult)
        harness.etcd.signal(number, signal.SIGCONT)


def test_a_request_on_a_link_that_was_just_lost_was_not_sent(harness):
    client, results = harness.client(), []
    put_one(harness, client, b"/lost")
    client.submit(PUT, results.append)
    client._link.lose("it is gone")
    harness.wait(lambda: results)
    assert results == [StoreUnavailable("it is gone")]
    put_one(harness, client, b"/lost")


def test_endpoints_that_do_not_answer_are_skipped(harness):
    (closed,) = free_ports(1)
    client = harness.client((f"127.0.0.1:{closed}", harness.etcd.endpoints[0]))
    put_one(harness, client, b"/skip")
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
        revisions = [put_one(harness, client, b"/a")]
        harness.etcd.kill(0)
        harness.wait(lambda: client.trouble)
        assert isinstance(run_on(harness, client, PUT), StoreUnavailable)
        harness.etcd.start(0)
        harness.wait(lambda: not client.trouble)
        assert any("etcd answers again" in notice for notice in harness.notices)
        assert run_on(harness, client, LeaseKeepAlive(lease.lease_id)) == lease
        revisions.append(put_one(harness, client, b"/b"))
        harness.wait(lambda: watched.revisions == revisions)


def test_a_watch_without_a_sign_of_life_goes_on_elsewhere(harness, monkeypatch):
    monkeypatch.setattr("failover.metadata.etcd.client.ETCD_SILENCE_S", 0.4)
    monkeypatch.setattr("failover.metadata.etcd.client.PROGRESS_S", 0.1)
    proxy, port = harness.proxy(harness.etcd.ports[0])
    prefix = harness.new_prefix()
    client = harness.client((f"127.0.0.1:{port}", harness.etcd.endpoints[0]))
    before = put_one(harness, client, prefix + b"a")
    watched = Watched(client, prefix, before)
    harness.wait(lambda: watched.batches)
    harness.pass_time(1)
    assert client.endpoint == f"127.0.0.1:{port}", "an idle watch has its signs of life"
    proxy.swallow_answers = True
    last = put_one(harness, harness.client(), prefix + b"b")
    harness.wait(lambda: watched.revisions == [before, last])
    assert client.endpoint == harness.etcd.endpoints[0]


def test_a_watch_that_a_compaction_overtook_ends_as_compacted(harness):
    proxy, port = harness.proxy(harness.etcd.ports[0])
    prefix = harness.new_prefix()
    client, other = harness.client((f"127.0.0.1:{port}",)), harness.client()
    watched = Watched(client, prefix, put_one(harness, other, prefix + b"a"))
    harness.wait(lambda: watched.batches)
    proxy.swallow_answers = True
    put_one(harness, other, prefix + b"a")
    last = put_one(harness, other, prefix + b"a")
    run_on(harness, other, Compact(last))
    proxy.swallow_answers = False
    proxy.cut()
    harness.wait(lambda: watched.messages[1:] == [Compacted(last)])


def test_a_revision_that_comes_twice_is_delivered_once(harness):
    """Releases of etcd had this bug."""
    client, prefix = harness.client(), harness.new_prefix()
    watched = Watched(client, prefix, put_one(harness, client, prefix + b"a"))
    harness.wait(lambda: watched.batches)
    (again,) = watched.batches
    kv = pb.KeyValue(key=prefix + b"a", mod_revision=again.revision, version=1)
    client._deliver(watched.handle, pb.WatchResponse(events=[pb.Event(kv=kv)]))
    last = put_one(harness, client, prefix + b"b")
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
def test_unknown_outcome_is_settled_by_reading_operation_id(harness, applied, kind):
    keys = ClusterKeys(harness.new_prefix())
    record = create("abc")
    key = keys.of_partition(KeyKind.PARTITION, 7)
    put_one(harness, harness.client(), key, encode_partition(StoredPartition(record, "operator")))
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
def test_a_history_that_went_back_is_told_and_ends_the_watches(tmp_path, is_copy):
    with running(tmp_path) as harness:
        etcd, data = harness.etcd, tmp_path / "m0"
        client = harness.client(deadline_s=0.8)
        put_one(harness, client, b"/a")
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
        era = client.era
        harness.wait(lambda: client.era > era)
        [notice] = [each for each in harness.notices if "its history went back" in each]
        assert ("it is at revision 2" if is_copy else "it is another cluster of etcd") in notice
        assert "dcpctl cluster meta restore" in notice
        harness.wait(lambda: isinstance(watched.messages[-1], Lost))
        put_one(harness, client, b"/goes on")
        put_one(harness, harness.client(), b"/new process")


def test_the_store_of_another_cluster_is_told(harness):
    client, base = harness.client(), harness.new_prefix()
    for cluster, text in (("ours", "and none of any other"), ("ours", "but of cluster theirs")):
        found = run_on(harness, client, owner_read(base, cluster))
        assert text in owner_trouble(found, base, cluster)
        put_one(harness, client, base + b"theirs/leader")
    put_one(harness, client, base + b"ours/leader")
    assert not owner_trouble(run_on(harness, client, owner_read(base, "ours")), base, "ours")

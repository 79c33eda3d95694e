"""The official `couchbase` package: counters, append, touch, expiry, health checks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.collection import Collection
from couchbase.diagnostics import PingState, ServiceType
from couchbase.exceptions import (
    CasMismatchException,
    DeltaInvalidException,
    DocumentNotFoundException,
)
from couchbase.options import (
    AppendOptions,
    ClusterOptions,
    DecrementOptions,
    DeltaValue,
    GetOptions,
    IncrementOptions,
    PingOptions,
    SignedInt64,
    UpsertOptions,
    WaitUntilReadyOptions,
)
from couchbase.transcoder import RawBinaryTranscoder

from support.server import DcpdProcess

pytestmark = pytest.mark.foreign

BINARY = RawBinaryTranscoder()


@pytest.fixture(scope="module")
def cluster(server: DcpdProcess) -> Iterator[Cluster]:
    options = ClusterOptions(PasswordAuthenticator("guest", "guest"))
    cluster = Cluster(f"couchbase://{server.address}", options)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def collection(cluster: Cluster) -> Collection:
    return cluster.bucket("default").default_collection()


def test_counters_count(collection: Collection) -> None:
    binary = collection.binary()
    five = IncrementOptions(initial=SignedInt64(10), delta=DeltaValue(5))
    assert binary.increment("upd:count", five).content == 10
    second = binary.increment("upd:count", five)
    assert second.content == 15
    assert second.mutation_token().as_dict()["partition_uuid"] != 0
    assert binary.decrement("upd:count", DecrementOptions(delta=DeltaValue(7))).content == 8
    assert binary.decrement("upd:count", DecrementOptions(delta=DeltaValue(100))).content == 0
    assert collection.get("upd:count").cas != 0


def test_a_counter_without_initial_value_is_not_made(collection: Collection) -> None:
    options = IncrementOptions(initial=SignedInt64(-1))
    with pytest.raises(DocumentNotFoundException):
        collection.binary().increment("upd:none", options)
    assert not collection.exists("upd:none").exists


def test_what_is_no_number_cannot_be_counted(collection: Collection) -> None:
    collection.upsert("upd:text", {"a": 1})
    with pytest.raises(DeltaInvalidException):
        collection.binary().increment("upd:text")


def test_append_and_prepend(collection: Collection) -> None:
    first = collection.upsert("upd:bytes", b"b", UpsertOptions(transcoder=BINARY))
    second = collection.binary().append("upd:bytes", b"c", AppendOptions(cas=first.cas))
    collection.binary().prepend("upd:bytes", b"a")
    found = collection.get("upd:bytes", GetOptions(transcoder=BINARY))
    assert found.content_as[bytes] == b"abc"
    assert found.cas > second.cas > first.cas
    with pytest.raises(CasMismatchException):
        collection.binary().append("upd:bytes", b"d", AppendOptions(cas=first.cas))


def test_exists_knows_documents_and_deleted_ones(collection: Collection) -> None:
    assert not collection.exists("upd:exists").exists
    stored = collection.upsert("upd:exists", {})
    found = collection.exists("upd:exists")
    assert (found.exists, found.cas) == (True, stored.cas)
    collection.remove("upd:exists")
    assert not collection.exists("upd:exists").exists


def gone(collection: Collection, key: str) -> bool:
    """Whether a document is no longer there; asked again and again for a while."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not collection.exists(key).exists:
            return True
        time.sleep(0.05)
    return False


def test_a_document_expires(collection: Collection) -> None:
    collection.upsert("upd:short", {}, UpsertOptions(expiry=timedelta(seconds=1)))
    collection.upsert("upd:long", {}, UpsertOptions(expiry=timedelta(seconds=1000)))
    assert gone(collection, "upd:short")
    with pytest.raises(DocumentNotFoundException):
        collection.get("upd:short")
    assert collection.get("upd:long").content_as[dict] == {}


def test_touch_and_get_and_touch_change_the_expiry(collection: Collection) -> None:
    collection.upsert("upd:touch", {"n": 1}, UpsertOptions(expiry=timedelta(seconds=1000)))
    touched = collection.touch("upd:touch", timedelta(seconds=500))
    found = collection.get_and_touch("upd:touch", timedelta(seconds=1))
    assert found.content_as[dict] == {"n": 1}
    assert found.cas > touched.cas
    assert gone(collection, "upd:touch")
    with pytest.raises(DocumentNotFoundException):
        collection.touch("upd:touch", timedelta(seconds=5))


def test_an_upsert_can_preserve_the_expiry(collection: Collection) -> None:
    collection.upsert("upd:preserve", {"n": 1}, UpsertOptions(expiry=timedelta(seconds=2)))
    collection.upsert("upd:preserve", {"n": 2}, UpsertOptions(preserve_expiry=True))
    collection.upsert("upd:forget", {"n": 1}, UpsertOptions(expiry=timedelta(seconds=2)))
    collection.upsert("upd:forget", {"n": 2})
    assert gone(collection, "upd:preserve")
    assert collection.get("upd:forget").content_as[dict] == {"n": 2}


def test_ping_and_diagnostics_see_the_key_value_service(cluster: Cluster) -> None:
    bucket = cluster.bucket("default")
    report = bucket.ping(PingOptions(service_types=[ServiceType.KeyValue]))
    endpoints = report.endpoints[ServiceType.KeyValue]
    assert endpoints
    assert {endpoint.state for endpoint in endpoints} == {PingState.OK}
    assert cluster.diagnostics().endpoints[ServiceType.KeyValue]


def test_wait_until_ready_returns(cluster: Cluster) -> None:
    options = WaitUntilReadyOptions(service_types=[ServiceType.KeyValue])
    cluster.wait_until_ready(timedelta(seconds=10), options)

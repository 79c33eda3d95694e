"""The official `couchbase` package scans keys: ranges, prefixes, samples."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.collection import Collection
from couchbase.exceptions import CouchbaseException
from couchbase.kv_range_scan import PrefixScan, RangeScan, SamplingScan, ScanTerm
from couchbase.mutation_state import MutationState
from couchbase.options import ClusterOptions, ScanOptions

from support.server import DcpdProcess

pytestmark = pytest.mark.foreign

USERS = {f"user:{number:03}": {"n": number} for number in range(200)}
OTHERS = {f"zoo:{number:02}": {"n": number} for number in range(20)}


@pytest.fixture(scope="module")
def collection(server: DcpdProcess) -> Iterator[Collection]:
    options = ClusterOptions(PasswordAuthenticator("guest", "guest"))
    cluster = Cluster(f"couchbase://{server.address}", options)
    collection = cluster.bucket("default").default_collection()
    assert collection.upsert_multi({**USERS, **OTHERS}).all_ok
    yield collection
    cluster.close()


def test_a_prefix_scan_finds_every_document_of_the_prefix(collection: Collection) -> None:
    found = {one.id: one.content_as[dict] for one in collection.scan(PrefixScan("user:"))}
    assert found == USERS


def test_a_scan_shows_cas_and_takes_small_batches(collection: Collection) -> None:
    options = ScanOptions(batch_item_limit=1, concurrency=4)
    found = {one.id: one for one in collection.scan(PrefixScan("zoo:"), options)}
    assert found.keys() == OTHERS.keys()
    assert found["zoo:07"].cas == collection.get("zoo:07").cas


def test_a_range_scan_with_ends_in_and_out(collection: Collection) -> None:
    scan = RangeScan(ScanTerm("user:010"), ScanTerm("user:020", exclusive=True))
    found = collection.scan(scan, ScanOptions(ids_only=True))
    assert sorted(one.id for one in found) == [f"user:{number:03}" for number in range(10, 20)]
    scan = RangeScan(ScanTerm("user:010", exclusive=True), ScanTerm("user:020"))
    found = collection.scan(scan, ScanOptions(ids_only=True))
    assert sorted(one.id for one in found) == [f"user:{number:03}" for number in range(11, 21)]


def test_a_range_without_ends_is_everything(collection: Collection) -> None:
    found = {one.id for one in collection.scan(RangeScan(), ScanOptions(ids_only=True))}
    assert found >= USERS.keys() | OTHERS.keys()


def test_a_sample_is_as_large_as_asked_for(collection: Collection) -> None:
    found = [one.id for one in collection.scan(SamplingScan(10, 7), ScanOptions(ids_only=True))]
    assert len(found) == len(set(found)) == 10


def test_a_scan_that_must_be_consistent_with_changes_shows_them(collection: Collection) -> None:
    stored = collection.upsert("scan:new", {"n": 1})
    state = MutationState(stored)
    found = collection.scan(PrefixScan("scan:"), ScanOptions(consistent_with=state))
    assert [one.id for one in found] == ["scan:new"]


def test_what_no_partition_has_is_nothing(collection: Collection) -> None:
    assert list(collection.scan(PrefixScan("nothing:"))) == []


def test_scans_go_on_while_somebody_writes(collection: Collection) -> None:
    stop = threading.Event()
    failures: list[CouchbaseException] = []

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                collection.upsert(f"user:{number % 200:03}", {"n": number % 200})
                collection.upsert(f"noise:{number}", {})
            except CouchbaseException as error:
                failures.append(error)
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = {one.id: one.content_as[dict] for one in collection.scan(PrefixScan("user:"))}
        assert found == USERS
    finally:
        stop.set()
        writer.join()
    assert not failures

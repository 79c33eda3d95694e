"""The official `couchbase` package: management of buckets, and a bucket of another name."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.diagnostics import ServiceType
from couchbase.exceptions import (
    BucketAlreadyExistsException,
    BucketNotFlushableException,
    BucketNotFoundException,
    CouchbaseException,
)
from couchbase.management.buckets import CreateBucketSettings
from couchbase.options import ClusterOptions, WaitUntilReadyOptions

from support.server import DcpdProcess

pytestmark = pytest.mark.foreign


def connect(server: DcpdProcess) -> Cluster:
    options = ClusterOptions(PasswordAuthenticator("guest", "guest"))
    cluster = Cluster(f"couchbase://{server.address}", options)
    ready = WaitUntilReadyOptions(service_types=[ServiceType.KeyValue])
    cluster.wait_until_ready(timedelta(seconds=10), ready)
    return cluster


@pytest.fixture(scope="module")
def cluster(server: DcpdProcess) -> Iterator[Cluster]:
    cluster = connect(server)
    yield cluster
    cluster.close()


def test_the_bucket_is_described(cluster: Cluster) -> None:
    settings = cluster.buckets().get_bucket("default")
    assert (settings.name, settings.num_replicas, settings.flush_enabled) == ("default", 0, False)
    assert [one.name for one in cluster.buckets().get_all_buckets()] == ["default"]
    with pytest.raises(BucketNotFoundException):
        cluster.buckets().get_bucket("none")


def test_no_bucket_is_made_or_dropped(cluster: Cluster) -> None:
    buckets = cluster.buckets()
    with pytest.raises(BucketAlreadyExistsException):
        buckets.create_bucket(CreateBucketSettings(name="default", ram_quota_mb=100))
    with pytest.raises(CouchbaseException, match="setting bucket"):
        buckets.create_bucket(CreateBucketSettings(name="other", ram_quota_mb=100))
    with pytest.raises(CouchbaseException):
        buckets.drop_bucket("default")
    with pytest.raises(BucketNotFoundException):
        buckets.drop_bucket("none")
    with pytest.raises(BucketNotFlushableException):
        buckets.flush_bucket("default")


def test_the_bucket_may_have_another_name(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data", "--bucket", "travel-sample") as server:
        cluster = connect(server)
        collection = cluster.bucket("travel-sample").default_collection()
        collection.upsert("hotel", {"n": 1})
        assert collection.get("hotel").content_as[dict] == {"n": 1}
        assert cluster.buckets().get_bucket("travel-sample").name == "travel-sample"
        cluster.close()

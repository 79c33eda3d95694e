"""Scopes and collections by the official `couchbase` package: managed over REST, used over KV."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.bucket import Bucket
from couchbase.cluster import Cluster
from couchbase.exceptions import (
    CollectionAlreadyExistsException,
    CollectionNotFoundException,
    DocumentNotFoundException,
    ScopeAlreadyExistsException,
    ScopeNotFoundException,
)
from couchbase.management.collections import CreateCollectionSettings
from couchbase.options import ClusterOptions

from support.server import DcpdProcess

pytestmark = pytest.mark.foreign


@pytest.fixture(scope="module")
def bucket(server: DcpdProcess) -> Iterator[Bucket]:
    options = ClusterOptions(PasswordAuthenticator("guest", "guest"))
    cluster = Cluster(f"couchbase://{server.address}", options)
    yield cluster.bucket("default")
    cluster.close()


def test_default_and_named_collections_in_one_bucket(bucket: Bucket) -> None:
    manager = bucket.collections()
    manager.create_scope("inventory")
    manager.create_collection("inventory", "hotel")
    hotels = bucket.scope("inventory").collection("hotel")
    hotels.upsert("same-key", {"of": "hotel"})
    bucket.default_collection().upsert("same-key", {"of": "default"})
    assert hotels.get("same-key").content_as[dict] == {"of": "hotel"}
    assert bucket.default_collection().get("same-key").content_as[dict] == {"of": "default"}
    hotels.remove("same-key")
    with pytest.raises(DocumentNotFoundException):
        hotels.get("same-key")
    assert bucket.default_collection().exists("same-key").exists


def test_scopes_are_listed(bucket: Bucket) -> None:
    manager = bucket.collections()
    manager.create_scope("listed")
    settings = CreateCollectionSettings(max_expiry=timedelta(hours=1))
    manager.create_collection("listed", "short-lived", settings)
    scopes = {scope.name: scope.collections for scope in manager.get_all_scopes()}
    assert [item.name for item in scopes["_default"]] == ["_default"]
    assert [(item.name, item.max_expiry) for item in scopes["listed"]] == [
        ("short-lived", timedelta(hours=1))
    ]


def test_what_exists_and_what_does_not_is_told_apart(bucket: Bucket) -> None:
    manager = bucket.collections()
    manager.create_scope("s")
    manager.create_collection("s", "c")
    with pytest.raises(ScopeAlreadyExistsException):
        manager.create_scope("s")
    with pytest.raises(CollectionAlreadyExistsException):
        manager.create_collection("s", "c")
    with pytest.raises(ScopeNotFoundException):
        manager.create_collection("nowhere", "c")
    with pytest.raises(ScopeNotFoundException):
        manager.drop_scope("nowhere")
    with pytest.raises(CollectionNotFoundException):
        manager.drop_collection("s", "d")


def test_a_collection_made_again_is_empty(bucket: Bucket) -> None:
    manager = bucket.collections()
    manager.create_collection("_default", "again")
    documents = bucket.scope("_default").collection("again")
    documents.upsert("k", {"n": 1})
    manager.drop_collection("_default", "again")
    manager.create_collection("_default", "again")
    assert not documents.exists("k").exists
    documents.upsert("k", {"n": 2})
    assert documents.get("k").content_as[dict] == {"n": 2}

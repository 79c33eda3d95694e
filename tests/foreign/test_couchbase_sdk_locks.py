"""The official `couchbase` package: locks, durability, reads from replicas."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.collection import Collection
from couchbase.durability import Durability, ServerDurability
from couchbase.exceptions import (
    AmbiguousTimeoutException,
    CasMismatchException,
    DocumentLockedException,
    DocumentNotFoundException,
    DocumentUnretrievableException,
    DurabilityImpossibleException,
    UnAmbiguousTimeoutException,
)
from couchbase.options import (
    ClusterOptions,
    IncrementOptions,
    RemoveOptions,
    ReplaceOptions,
    UpsertOptions,
)

from support.server import DcpdProcess

pytestmark = pytest.mark.foreign

SHORT = timedelta(seconds=1)
LEVELS = [
    Durability.MAJORITY,
    Durability.MAJORITY_AND_PERSIST_TO_ACTIVE,
    Durability.PERSIST_TO_MAJORITY,
]


def connect(address: str) -> Cluster:
    options = ClusterOptions(PasswordAuthenticator("guest", "guest"))
    return Cluster(f"couchbase://{address}", options)


@pytest.fixture(scope="module")
def collection(server: DcpdProcess) -> Iterator[Collection]:
    cluster = connect(server.address)
    yield cluster.bucket("default").default_collection()
    cluster.close()


def test_a_locked_document_is_changed_with_its_cas_only(collection: Collection) -> None:
    stored = collection.upsert("lock:1", {"n": 1})
    locked = collection.get_and_lock("lock:1", timedelta(seconds=20))
    assert locked.content_as[dict] == {"n": 1}
    assert locked.cas > stored.cas
    # The SDK tries again until its timeout.
    with pytest.raises((DocumentLockedException, AmbiguousTimeoutException)):
        collection.replace("lock:1", {"n": 2}, ReplaceOptions(timeout=SHORT))
    with pytest.raises((DocumentLockedException, UnAmbiguousTimeoutException)):
        collection.get_and_lock("lock:1", timedelta(seconds=5), timeout=SHORT)
    assert collection.get("lock:1").content_as[dict] == {"n": 1}
    collection.replace("lock:1", {"n": 3}, ReplaceOptions(cas=locked.cas))
    collection.upsert("lock:1", {"n": 4})
    with pytest.raises(CasMismatchException):
        collection.replace("lock:1", {}, ReplaceOptions(cas=locked.cas))


def test_unlock_lets_others_in(collection: Collection) -> None:
    collection.upsert("lock:2", {"n": 1})
    locked = collection.get_and_lock("lock:2", timedelta(seconds=20))
    collection.unlock("lock:2", locked.cas)
    collection.upsert("lock:2", {"n": 2})
    with pytest.raises(DocumentNotFoundException):
        collection.get_and_lock("lock:none", timedelta(seconds=5))


def test_a_lock_ends_by_itself(collection: Collection) -> None:
    collection.upsert("lock:3", {"n": 1})
    collection.get_and_lock("lock:3", SHORT)
    # The SDK tries again until the lock is over.
    collection.upsert("lock:3", {"n": 2}, UpsertOptions(timeout=timedelta(seconds=20)))
    assert collection.get("lock:3").content_as[dict] == {"n": 2}


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_of_durability_is_granted(collection: Collection, level: Durability) -> None:
    durable = ServerDurability(level=level)
    key = f"durable:{level.value}"
    stored = collection.upsert(key, {"n": 1}, UpsertOptions(durability=durable))
    replaced = collection.replace(key, {"n": 2}, ReplaceOptions(durability=durable, cas=stored.cas))
    assert replaced.mutation_token().as_dict()["sequence_number"] > 0
    counted = collection.binary().increment(f"{key}:n", IncrementOptions(durability=durable))
    assert counted.content == 0, "the default of the SDK's initial number"
    collection.remove(key, RemoveOptions(durability=durable))
    assert not collection.exists(key).exists


def test_a_server_that_answers_before_the_disk_grants_none(tmp_path: Path) -> None:
    with DcpdProcess(tmp_path / "data", "--durability", "interval") as server:
        cluster = connect(server.address)
        collection = cluster.bucket("default").default_collection()
        for level in LEVELS:
            options = UpsertOptions(durability=ServerDurability(level=level))
            with pytest.raises(DurabilityImpossibleException):
                collection.upsert("durable:none", {}, options)
        assert not collection.exists("durable:none").exists
        collection.upsert("durable:none", {})
        cluster.close()


def test_any_replica_is_the_only_copy(collection: Collection) -> None:
    collection.upsert("replica:1", {"n": 1})
    found = collection.get_any_replica("replica:1")
    assert (found.content_as[dict], found.is_replica) == ({"n": 1}, False)
    assert [one.is_replica for one in collection.get_all_replicas("replica:1")] == [False]
    with pytest.raises(DocumentUnretrievableException):
        collection.get_any_replica("replica:none")

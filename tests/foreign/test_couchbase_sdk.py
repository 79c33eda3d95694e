"""The official `couchbase` package against a live server, as its users would use it."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.collection import Collection
from couchbase.exceptions import (
    AuthenticationException,
    CasMismatchException,
    DocumentExistsException,
    DocumentNotFoundException,
    UnAmbiguousTimeoutException,
)
from couchbase.options import ClusterOptions, GetOptions, ReplaceOptions, UpsertOptions
from couchbase.transcoder import RawBinaryTranscoder

from support.server import DcpdProcess

pytestmark = pytest.mark.foreign


@pytest.fixture(scope="module")
def cluster(server: DcpdProcess) -> Iterator[Cluster]:
    options = ClusterOptions(PasswordAuthenticator("guest", "guest"))
    cluster = Cluster(f"couchbase://{server.address}", options)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def collection(cluster: Cluster) -> Collection:
    return cluster.bucket("default").default_collection()


def test_upsert_and_get_return_the_document(collection: Collection) -> None:
    stored = collection.upsert("sdk:1", {"name": "one", "n": [1, 2, 3]})
    found = collection.get("sdk:1")
    assert found.content_as[dict] == {"name": "one", "n": [1, 2, 3]}
    assert found.cas == stored.cas != 0


def test_insert_refuses_an_existing_document(collection: Collection) -> None:
    collection.insert("sdk:insert", {"a": 1})
    with pytest.raises(DocumentExistsException):
        collection.insert("sdk:insert", {"a": 2})
    assert collection.get("sdk:insert").content_as[dict] == {"a": 1}


def test_replace_needs_a_document_and_honours_cas(collection: Collection) -> None:
    with pytest.raises(DocumentNotFoundException):
        collection.replace("sdk:nothing", {})
    first = collection.upsert("sdk:cas", {"v": 1})
    second = collection.replace("sdk:cas", {"v": 2}, ReplaceOptions(cas=first.cas))
    with pytest.raises(CasMismatchException):
        collection.replace("sdk:cas", {"v": 3}, ReplaceOptions(cas=first.cas))
    found = collection.get("sdk:cas")
    assert (found.content_as[dict], found.cas) == ({"v": 2}, second.cas)


def test_remove_makes_a_document_unknown(collection: Collection) -> None:
    collection.upsert("sdk:gone", {})
    collection.remove("sdk:gone")
    with pytest.raises(DocumentNotFoundException):
        collection.get("sdk:gone")
    with pytest.raises(DocumentNotFoundException):
        collection.remove("sdk:gone")


def test_mutation_tokens_name_partition_version_and_seqno(collection: Collection) -> None:
    tokens = [
        collection.upsert("sdk:token", {"n": number}).mutation_token().as_dict()
        for number in range(3)
    ]
    assert {token["partition_id"] for token in tokens} == {tokens[0]["partition_id"]}
    assert len({token["partition_uuid"] for token in tokens}) == 1
    assert tokens[0]["partition_uuid"] != 0
    seqnos = [token["sequence_number"] for token in tokens]
    assert seqnos == [seqnos[0], seqnos[0] + 1, seqnos[0] + 2]


def test_binary_values_and_large_values_come_back(collection: Collection) -> None:
    value = struct.pack(">I", 7) * 500_000
    collection.upsert("sdk:large", value, UpsertOptions(transcoder=RawBinaryTranscoder()))
    found = collection.get("sdk:large", GetOptions(transcoder=RawBinaryTranscoder()))
    assert found.content_as[bytes] == value


def test_two_thousand_documents_in_one_operation(collection: Collection) -> None:
    documents = {f"sdk:multi:{number}": {"number": number} for number in range(2000)}
    assert collection.upsert_multi(documents).all_ok
    found = collection.get_multi(list(documents))
    assert found.all_ok
    assert {key: one.content_as[dict] for key, one in found.results.items()} == documents


def test_wrong_password_is_refused(server: DcpdProcess) -> None:
    with pytest.raises((AuthenticationException, UnAmbiguousTimeoutException)):
        Cluster(
            f"couchbase://{server.address}",
            ClusterOptions(PasswordAuthenticator("guest", "wrong")),
        )

"""The official `couchbase` package: sub-documents, XATTRs, projections, expiry with a get."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import couchbase.subdocument as sd
import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.collection import Collection
from couchbase.exceptions import (
    CasMismatchException,
    DocumentExistsException,
    DocumentNotFoundException,
    InvalidValueException,
    NumberTooBigException,
    PathExistsException,
    PathMismatchException,
    PathNotFoundException,
)
from couchbase.options import (
    ClusterOptions,
    GetOptions,
    MutateInOptions,
    UpsertOptions,
)

from support.server import DcpdProcess

pytestmark = pytest.mark.foreign

UPSERT = MutateInOptions(store_semantics=sd.StoreSemantics.UPSERT)
INSERT = MutateInOptions(store_semantics=sd.StoreSemantics.INSERT)


@pytest.fixture(scope="module")
def collection(server: DcpdProcess) -> Iterator[Collection]:
    options = ClusterOptions(PasswordAuthenticator("guest", "guest"))
    cluster = Cluster(f"couchbase://{server.address}", options)
    yield cluster.bucket("default").default_collection()
    cluster.close()


def put(collection: Collection, key: str) -> None:
    collection.upsert(key, {"a": 1, "b": {"c": [1, 2, 3]}, "s": "text", "n": 2**62})


def test_look_ups(collection: Collection) -> None:
    put(collection, "sd:look")
    found = collection.lookup_in(
        "sd:look",
        [
            sd.get("a"), sd.exists("b.c"), sd.get("b.c[-1]"), sd.count("b.c"), sd.exists("zz"),
            sd.get("zz"), sd.get_full(),
        ],
    )  # fmt: skip
    assert found.content_as[int](0) == 1
    assert [found.exists(index) for index in (1, 4, 5)] == [True, False, False]
    assert (found.content_as[int](2), found.content_as[int](3)) == (3, 3)
    with pytest.raises(PathNotFoundException):
        found.content_as[int](5)
    assert found.content_as[dict](6)["s"] == "text"
    assert found.cas == collection.get("sd:look").cas
    with pytest.raises(DocumentNotFoundException):
        collection.lookup_in("sd:none", [sd.get("a")])


def test_changes(collection: Collection) -> None:
    put(collection, "sd:change")
    result = collection.mutate_in(
        "sd:change",
        [
            sd.upsert("x.y", [], create_parents=True), sd.array_append("x.y", 1, 2),
            sd.array_prepend("x.y", 0), sd.array_insert("x.y[1]", "in"),
            sd.array_addunique("x.y", 5), sd.increment("a", 5), sd.decrement("count", 2),
            sd.replace("s", "new"), sd.remove("b"), sd.insert("once", None),
        ],
    )  # fmt: skip
    assert result.content_as[int](5) == 6
    assert result.content_as[int](6) == -2
    token = result.mutation_token()
    assert token is not None
    assert token.as_dict()["sequence_number"] == 2
    stored = collection.get("sd:change")
    assert stored.cas == result.cas
    assert stored.content_as[dict] == {
        "a": 6, "s": "new", "n": 2**62, "x": {"y": [0, "in", 1, 2, 5]}, "count": -2, "once": None,
    }  # fmt: skip


FAILURES = {
    "path exists": (sd.insert("a", 1), PathExistsException),
    "path missing": (sd.replace("zz", 1), PathNotFoundException),
    "no parents": (sd.upsert("x.y", 1), PathNotFoundException),
    "mismatch": (sd.array_append("a", 1), PathMismatchException),
    "not unique": (sd.array_addunique("b.c", 1), PathExistsException),
    "overflow": (sd.increment("n", 2**63 - 1), InvalidValueException),
    "not a number": (sd.increment("s", 1), PathMismatchException),
}


@pytest.mark.parametrize(("spec", "error"), FAILURES.values(), ids=FAILURES)
def test_what_fails_has_its_exception(
    collection: Collection, spec: object, error: type[Exception]
) -> None:
    put(collection, "sd:fail")
    before = collection.get("sd:fail")
    with pytest.raises(error):
        collection.mutate_in("sd:fail", [sd.upsert("other", 1), spec])
    assert collection.get("sd:fail").cas == before.cas, "nothing of it is stored"


def test_a_number_that_is_too_large(collection: Collection) -> None:
    collection.upsert("sd:big", {"n": 2**70})
    with pytest.raises(NumberTooBigException):
        collection.mutate_in("sd:big", [sd.increment("n", 1)])
    assert collection.get("sd:big").content_as[dict] == {"n": 2**70}


def test_documents_are_created_and_guarded(collection: Collection) -> None:
    with pytest.raises(DocumentNotFoundException):
        collection.mutate_in("sd:new", [sd.upsert("a", 1)])
    collection.mutate_in("sd:new", [sd.upsert("a.b", 1)], INSERT)
    with pytest.raises(DocumentExistsException):
        collection.mutate_in("sd:new", [sd.upsert("a", 1)], INSERT)
    collection.mutate_in("sd:new", [sd.upsert("a.c", 2)], UPSERT)
    assert collection.get("sd:new").content_as[dict] == {"a": {"b": 1, "c": 2}}
    with pytest.raises(CasMismatchException):
        collection.mutate_in("sd:new", [sd.upsert("a", 1)], MutateInOptions(cas=7))


def test_get_with_projection_and_expiry(collection: Collection) -> None:
    collection.upsert("sd:get", {"a": 1, "b": {"c": 2}}, UpsertOptions(expiry=timedelta(hours=1)))
    projected = collection.get("sd:get", GetOptions(project=["b.c"]))
    assert projected.content_as[dict] == {"b": {"c": 2}}
    assert collection.get("sd:get", GetOptions(with_expiry=True)).expiry_time is not None
    kept = MutateInOptions(preserve_expiry=True)
    collection.mutate_in("sd:get", [sd.upsert("a", 2)], kept)
    assert collection.get("sd:get", GetOptions(with_expiry=True)).expiry_time is not None
    collection.mutate_in("sd:get", [sd.upsert("a", 2)])
    assert collection.get("sd:get", GetOptions(with_expiry=True)).expiry_time is None


def test_xattrs_and_macros(collection: Collection) -> None:
    put(collection, "sd:x")
    result = collection.mutate_in(
        "sd:x",
        [
            sd.upsert("meta.cas", sd.MutationMacro.cas(), xattr=True, create_parents=True),
            sd.upsert("meta.seqno", sd.MutationMacro.seq_no(), xattr=True),
            sd.upsert("_sys", {"v": 1.5}, xattr=True),
            sd.upsert("a", 2),
        ],
    )  # fmt: skip
    collection.upsert("sd:x", {"new": True})
    found = collection.lookup_in(
        "sd:x", [sd.get("meta", xattr=True), sd.get("_sys.v", xattr=True), sd.get("new")]
    )
    assert sd.convert_macro_cas_to_cas(found.content_as[dict](0)["cas"]) == result.cas
    assert found.content_as[float](1) == 1.5
    assert found.content_as[bool](2) is True
    virtual = collection.lookup_in("sd:x", [sd.get("$document", xattr=True)])
    assert virtual.content_as[dict](0)["deleted"] is False

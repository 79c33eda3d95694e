"""What requests for documents tell, and how much they cost: searches, histories, a full disk."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from dcp.server.admin.bodies import PutDocument
from dcp.server.node import Node
from dcp.server.operate import document_desk
from dcp.server.operate.document_desk import StoredVersion
from dcp.session.access.rights import FULL_RIGHTS, Rights, Role, Scope
from dcp.session.kv.documents import RELATIVE_EXPIRY_MAX_S
from dcp.wire.xattrs import DATATYPE_XATTR, pack_xattrs
from support.cluster_here import node_here
from support.raw_client import ask, login
from vbucket.engine.engine import SET
from vbucket.engine.partition import Hold, Partition
from vbucket.model.entry import seqno_of
from vbucket.model.ids import vbucket_of

JSON = "content-type: application/json"
VB = vbucket_of(b"first")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    """One node for all tests of this module, which use keys of their own."""
    async with node_here(tmp_path_factory.mktemp("console-documents"), {}) as running:
        yield running


def keys_in(vb_id: int, prefix: str, count: int) -> list[str]:
    """Return keys of one partition, in their order."""
    names = (f"{prefix}{number:06}" for number in itertools.count())
    fitting = (name for name in names if vbucket_of(name.encode()) == vb_id)
    return list(itertools.islice(fitting, count))


async def put(node: Node, key: str, value: str, **fields: Any) -> Any:
    body = json.dumps({"key": key, "value": value, **fields}).encode()
    return await ask(node.ports.admin, "PUT", "/api/v1/documents", login(), JSON, body=body)


async def get(node: Node, path: str, *headers: str) -> Any:
    return await ask(node.ports.admin, "GET", path, *(headers or (login(),)))


async def turns_during(work: Awaitable[object]) -> int:
    """Return how often other tasks had a turn while something was done."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    try:
        await work
    finally:
        counting.cancel()
    return turns


# -- changes -----------------------------------------------------------------------------------


async def test_small_expiry_counts_from_now_and_description_says_so(node: Node) -> None:
    before_s = int(time.time())
    for expiry, is_relative in ((RELATIVE_EXPIRY_MAX_S, True), (before_s + 1000, False)):
        assert (await put(node, "expires", "x", expiry=expiry)).status == 200
        stored = (await get(node, "/api/v1/documents?key=expires")).body["versions"][0]["expiry"]
        assert stored >= before_s + expiry if is_relative else stored == expiry
    (expiry_type,) = (
        field.type for field in msgspec.structs.fields(PutDocument) if field.name == "expiry"
    )
    schema = msgspec.json.schema(expiry_type)
    assert f"1 to {RELATIVE_EXPIRY_MAX_S} (30 days): seconds from now" in schema["description"]


# -- searches ----------------------------------------------------------------------------------


def add_limited_user(node: Node, name: str, prefix: str) -> str:
    """Add a user who may read the keys with a prefix, and return the header of the login."""
    rights = Rights({Role.READ: (Scope(prefix.encode()),)})
    node.access.users.add(name, "a-long-password", rights)
    return login(name, "a-long-password")


def make_searches_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a search end as soon as it may, as with many keys or on a slow machine."""
    monkeypatch.setattr(document_desk, "SCAN_STEP_WORK", 1)
    monkeypatch.setattr(document_desk, "SCAN_TIME_S", -1.0)


async def test_a_search_tells_no_key_that_the_user_may_not_read(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, shown = keys_in(VB, "hidden:", 5), keys_in(VB, "shown:", 2)
    behind = keys_in(VB, "zz-hidden:", 5)
    for key in (*hidden, *shown, *behind):
        await put(node, key, "x")
    limited = add_limited_user(node, "limited", "shown:")
    make_searches_end_early(monkeypatch)
    position, found = f"{VB}.", []
    while position != f"{VB + 1}.":
        path = f"/api/v1/documents/keys?position={position}"
        answer = (await get(node, path, limited)).body
        found += [row["key"] for row in answer["keys"]]
        position = answer["next"]
        last = bytes.fromhex(position.partition(".")[2])
        assert last in (b"", *(b"\0" + key.encode() for key in shown)), "a key of others"
    assert found == shown


async def test_a_search_lets_others_run_also_while_it_finds_documents(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in keys_in(VB, "many:", 30):
        await put(node, key, "x")
    monkeypatch.setattr(document_desk, "SCAN_STEP_WORK", 5)
    documents = node.serving.listeners._admin_parts.console.documents

    async def turns(limit: int) -> int:
        return await turns_during(
            documents.keys(b"many:", "", FULL_RIGHTS, position=f"{VB}.", limit=limit)
        )

    assert await turns(26) - await turns(1) >= 25 // 5


async def test_search_looks_at_time_also_while_it_finds_documents(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = keys_in(VB, "slow:", 30)
    for key in names:
        await put(node, key, "x")
    monkeypatch.setattr(document_desk, "SCAN_STEP_WORK", 5)
    monkeypatch.setattr(document_desk, "SCAN_TIME_S", -1.0)
    answer = (await get(node, f"/api/v1/documents/keys?prefix=slow:&position={VB}.")).body
    assert 0 < len(answer["keys"]) < len(names)
    assert answer["next"].startswith(f"{VB}.")


# -- histories ---------------------------------------------------------------------------------


async def put_versions(node: Node, key: str, count: int) -> list[int]:
    """Store versions of a document; return their seqnos, newest first."""
    return [(await put(node, key, "x")).body["seqno"] for _ in range(count)][::-1]


def seqnos_of(answer: Any) -> list[int]:
    return [version["seqno"] for version in answer.body["versions"]]


async def test_older_versions_are_found_without_a_look_at_newer_ones(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    seqnos = await put_versions(node, "deep", 30)
    asked, decoded = [], []
    entry_at, version_of = node.engine.versions.entry_at, document_desk.version_of

    def count_entries(part: Partition, seqno: int) -> bytes | None:
        asked.append(seqno)
        return entry_at(part, seqno)

    def count_decoded(entry: bytes, *, shows_system: bool) -> StoredVersion:
        decoded.append(seqno_of(entry))
        return version_of(entry, shows_system=shows_system)

    monkeypatch.setattr(node.engine.versions, "entry_at", count_entries)
    monkeypatch.setattr(document_desk, "version_of", count_decoded)
    path = "/api/v1/documents?key=deep&versions=2&older_than="
    answer = await get(node, path + str(seqnos[-4]))
    assert (seqnos_of(answer), answer.body["older_than"]) == (seqnos[-3:-1], seqnos[-2])
    assert asked == seqnos[-4:]
    assert decoded == seqnos[-3:-1]


async def test_a_search_for_old_versions_ends_and_can_go_on(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`older_than` is the seqno of another key, so the versions above it are looked at."""
    key, other = keys_in(VB, "interleaved:", 2)
    old = await put_versions(node, key, 2)
    (between,) = await put_versions(node, other, 1)
    new = await put_versions(node, key, 12)
    path = f"/api/v1/documents?key={key}&older_than="
    assert seqnos_of(await get(node, path + str(between))) == old
    monkeypatch.setattr(document_desk, "HISTORY_WORK", 5)
    answer = await get(node, path + str(between))
    assert (seqnos_of(answer), answer.body["older_than"]) == ([], new[4])
    assert answer.body["end"] == ""
    found = []
    for _ in range(len(old + new)):
        if answer.body["older_than"] is None:
            break
        answer = await get(node, path + str(answer.body["older_than"]))
        found += seqnos_of(answer)
    assert found == new[5:] + old


async def test_a_long_history_lets_others_run(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    seqnos = await put_versions(node, "long-history", 30)
    monkeypatch.setattr(document_desk, "SCAN_STEP_WORK", 5)
    documents = node.serving.listeners._admin_parts.console.documents
    reading = documents.history(
        b"long-history", "", FULL_RIGHTS, older_than=seqnos[-1] + 10**6, versions_max=50
    )
    assert await turns_during(reading) >= 30 // 5 - 1


async def test_a_branch_meanwhile_ends_the_reading_of_a_history(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_versions(node, "branched", 10)
    part = node.engine.partitions[vbucket_of(b"branched")]
    monkeypatch.setattr(document_desk, "SCAN_STEP_WORK", 5)
    documents = node.serving.listeners._admin_parts.console.documents
    reading = asyncio.create_task(
        documents.history(b"branched", "", FULL_RIGHTS, older_than=0, versions_max=50)
    )
    await asyncio.sleep(0)
    node.engine.keyspace.branch(part.vb_id, part.high_seqno)
    with pytest.raises(document_desk.DocumentRefusedError, match="new version of its history"):
        await reading


async def test_xattrs_count_as_bytes_of_a_history(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    vb_id, stored_key = vbucket_of(b"xattrs"), b"\0xattrs"
    section = pack_xattrs([(b"note", b'"' + b"n" * 500 + b'"')])
    node.engine.begin_batch(time.time_ns())
    body = stored_key + section + b"{}"
    node.engine.store(SET, vb_id, stored_key, body, 0, 0, DATATYPE_XATTR, 0)
    for _ in range(2):  # these keep the XATTRs
        node.engine.store(SET, vb_id, stored_key, stored_key + b"{}", 0, 0, 0, 0)
    monkeypatch.setattr(document_desk, "HISTORY_BYTES", 400)
    answer = (await get(node, "/api/v1/documents?key=xattrs")).body
    (version,) = answer["versions"]
    assert (version["value"], len(version["xattrs"]["note"])) == ("{}", 502)
    assert answer["older_than"] == answer["versions"][0]["seqno"]


async def test_documents_of_all_partitions_as_of_a_moment(node: Node) -> None:
    async def listed(at_s: float | None) -> Any:
        query = "" if at_s is None else f"&at={at_s:.6f}"
        return (await get(node, f"/api/v1/documents/sorted?prefix=then:{query}")).body

    await put(node, "then:a", "1")
    await put(node, "then:c", "gone soon")
    await put(node, "then:d", "expires", expiry=100)
    moment_s = time.time()
    await put(node, "then:a", "2")
    await put(node, "then:b", "new")
    removed = json.dumps({"key": "then:c"}).encode()
    await ask(node.ports.admin, "DELETE", "/api/v1/documents", login(), JSON, body=removed)
    assert [row["key"] for row in (await listed(None))["documents"]] == [
        "then:a", "then:b", "then:d",
    ]  # fmt: skip
    then = await listed(moment_s)
    assert [(row["key"], row["value"]) for row in then["documents"]] == [
        ("then:a", "1"), ("then:c", "gone soon"), ("then:d", "expires"),
    ]  # fmt: skip
    assert (then["too_new"], then["kept_since_s"]) == ([], None)
    assert (await listed(1.0))["documents"] == []
    later = await listed(time.time() + 50)
    assert "then:b" in [row["key"] for row in later["documents"]]
    refused = await get(node, "/api/v1/documents/sorted?at=soon")
    assert (refused.status, refused.body["error"]["why"]) == (
        400, "\"at\" is a Unix time, not 'soon'",
    )  # fmt: skip


async def test_a_moment_before_the_history_says_since_when_it_is_kept(node: Node) -> None:
    vb_id = vbucket_of(b"kept:a")
    moment_s = time.time()
    await put(node, "kept:a", "1")
    (seqno,) = await put_versions(node, "kept:a", 1)
    part = node.engine.partitions[vb_id]
    floor, part.history_floor = part.history_floor, seqno
    try:
        found = (await get(node, f"/api/v1/documents/sorted?prefix=kept:&at={moment_s:.6f}")).body
    finally:
        part.history_floor = floor
    assert (found["documents"], found["too_new"]) == ([], [vb_id])
    assert moment_s < found["kept_since_s"] <= time.time()


# -- a full disk -------------------------------------------------------------------------------


async def test_reads_do_not_wait_for_a_commit_that_does_not_come(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(node, "waits", "committed")
    vb_id = vbucket_of(b"waits")
    monkeypatch.setattr(document_desk, "COMMIT_WAIT_S", 0.0)
    node.engine.partitions[vb_id].has_copies = True  # its replicas do not answer
    stored_key = b"\0waits"
    node.engine.begin_batch(time.time_ns())
    node.engine.store(SET, vb_id, stored_key, stored_key + b"not committed", 0, 0, 0, 0)
    node.engine.refuse_writes("the disk is full", Hold.LOG_FULL)
    try:
        for path in (f"/api/v1/vbuckets/{vb_id}", "/api/v1/documents?key=waits"):
            refused = await get(node, path)
            assert refused.status == 503, path
            assert "not committed yet: the disk is full" in refused.body["error"]["why"]
        found = await get(node, "/api/v1/documents/keys?prefix=waits")
        assert [row["key"] for row in found.body["keys"]] == ["waits"]
        refused = await put(node, "waits", "x")
        assert refused.status == 503
        assert refused.body["error"]["why"] == "the disk is full"
    finally:
        node.engine.refuse_writes("", Hold.LOG_FULL)
        node.engine.partitions[vb_id].has_copies = False

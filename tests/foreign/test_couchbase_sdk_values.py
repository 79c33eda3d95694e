"""The official `couchbase` package compresses large values; everybody else gets them plain."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.collection import Collection
from couchbase.options import ClusterOptions

from clients import KvClient
from dcp.wire.opcode import Opcode
from support.raw_client import RawClient
from support.server import DcpdProcess
from vbucket.model.ids import vbucket_of

pytestmark = pytest.mark.foreign

DOCUMENT = {"lines": ["the same line again"] * 200}


@pytest.fixture(scope="module")
def collection(server: DcpdProcess) -> Iterator[Collection]:
    options = ClusterOptions(PasswordAuthenticator("guest", "guest"))
    cluster = Cluster(f"couchbase://{server.address}", options)
    yield cluster.bucket("default").default_collection()
    cluster.close()


async def test_a_large_document_is_compressed_and_plain_for_others(
    server: DcpdProcess, collection: Collection
) -> None:
    collection.upsert("large:1", DOCUMENT)
    assert collection.get("large:1").content_as[dict] == DOCUMENT
    async with KvClient.connect(server.address) as client:
        found = await client.get("large:1")
        assert json.loads(found.value) == DOCUMENT
    with RawClient(server.port) as raw:
        raw.ask(Opcode.HELLO, key=b"test", value=b"\0\x0a\0\x0b\0\x08")
        raw.ask(Opcode.SELECT_BUCKET, key=b"default")
        stored = raw.ask(Opcode.GET, key=b"large:1", vb_id=vbucket_of(b"large:1", 1024))
        assert stored.datatype & 2, "the SDK sent it compressed"
        assert len(stored.value) < len(found.value) / 4

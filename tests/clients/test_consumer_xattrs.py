"""The consumer's option `xattrs`, against a live server, and values that lie."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clients.address import parse_address
from clients.consumer.consumer import Consumer
from clients.event import Deletion, Mutation
from clients.link.blocking_link import SyncLink
from clients.spark.columns import OPS, record_batch
from clients.spark.fetch import fetch
from clients.spark.offset import entries_of, offset_of
from clients.spark.options import parse_options
from clients.spark.plan import next_entries, steps_between
from clients.spark.survey import Survey
from dcp.wire.frame import RemoteProtocolError
from dcp.wire.opcode import Opcode
from dcp.wire.xattrs import split_xattrs
from support.server import DcpdProcess
from support.subdoc_client import XATTR, mutation_value
from vbucket.model.ids import vbucket_of

UPSERT = Opcode.SUBDOC_DICT_UPSERT
SPECS = mutation_value((UPSERT, XATTR, b"user", b'{"n":1.0}'), (UPSERT, XATTR, b"_sys", b"2"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DcpdProcess]:
    with DcpdProcess(tmp_path_factory.mktemp("xattrs") / "data") as process:
        with process.connect() as kv, SyncLink(parse_address(process.address)) as link:
            for key in (b"full", b"gone", b"plain"):
                kv.set(key, b'{"v":1}')
                if key != b"plain":
                    frame = link.request(
                        Opcode.SUBDOC_MULTI_MUTATION, vb_id=vbucket_of(key), key=b"\0" + key,
                        value=SPECS,
                    )  # fmt: skip
                    assert frame.status == 0
            kv.delete(b"gone")
        yield process


async def changes(server: DcpdProcess, **options: bool) -> dict[bytes, Mutation | Deletion]:
    async with Consumer(server.address, until_now=True, **options) as consumer:  # type: ignore[arg-type]
        return {each.key: each async for each in consumer if isinstance(each, Mutation | Deletion)}


async def test_events_have_them_if_they_are_asked_for(written: DcpdProcess) -> None:
    found = await changes(written, xattrs=True)
    full, gone = found[b"full"], found[b"gone"]
    assert isinstance(full, Mutation)
    assert (full.value, full.datatype) == (b'{"v":1}', 1)
    assert full.xattrs == {"user": b'{"n":1.0}', "_sys": b"2"}
    assert isinstance(gone, Deletion)
    assert gone.xattrs == {"_sys": b"2"}
    assert found[b"plain"].xattrs is None


async def test_other_consumers_do_not_see_them(written: DcpdProcess) -> None:
    found = await changes(written)
    assert [each.xattrs for each in found.values()] == [None] * 3
    full = found[b"full"]
    assert isinstance(full, Mutation)
    assert full.value == b'{"v":1}'


async def test_with_previous_values(written: DcpdProcess) -> None:
    found = await changes(written, xattrs=True, previous_values=True, history=True)
    full = found[b"full"]
    assert isinstance(full, Mutation)
    assert full.previous_value == b'{"v":1}'
    assert full.xattrs is not None


def rows(server: DcpdProcess, **options: str) -> list[dict[str, object]]:
    """What the Spark source makes of everything that the server has."""
    pa = pytest.importorskip("pyarrow")
    settings = parse_options({"servers": server.address, **options})
    survey = Survey(settings.servers, range(1024))
    try:
        ends, _ = next_entries(entries_of({}), survey.facts(), history=False)
    finally:
        survey.close()
    schema = pa.schema(
        [("op", pa.string()), ("key", pa.binary()), ("value", pa.binary())]
        + [("xattrs", pa.string())] * settings.xattrs
    )
    found: list[dict[str, object]] = []
    for arrived in fetch(
        settings.servers, steps_between({}, offset_of(ends)), history=False, xattrs=settings.xattrs
    ):
        if arrived.changes is not None:
            batch = record_batch(arrived.changes, schema, lambda values: values, None)
            found += batch.to_pylist()
    assert {row["op"] for row in found} == {OPS[0], OPS[1]}
    return found


def test_the_spark_source_has_a_column_of_them(written: DcpdProcess) -> None:
    found = {row["key"]: row for row in rows(written, xattrs="true")}
    assert found[b"full"]["xattrs"] == '{"user":{"n":1.0},"_sys":2}'
    assert found[b"full"]["value"] == found[b"plain"]["value"] == b'{"v":1}'
    assert (found[b"gone"]["xattrs"], found[b"gone"]["value"]) == ('{"_sys":2}', None)
    assert found[b"plain"]["xattrs"] is None
    assert {row["key"]: row["value"] for row in rows(written)}[b"full"] == b'{"v":1}'
    assert parse_options({"servers": "a:1", "xattrs": "true"}).schema.endswith("xattrs STRING")
    assert "xattrs" not in parse_options({"servers": "a:1"}).schema


@pytest.mark.parametrize("value", [b"", b"\0\0\0\x09", b"\0\0\0\x04\0\0\0\0"])
def test_a_server_that_lies_is_noticed(value: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        split_xattrs(value)

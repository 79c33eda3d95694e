"""Keys and values that cannot be sent are refused before anything is sent, with what to do."""

from __future__ import annotations

import pytest

from clients import KvClient, TooBigError, vbucket_of
from clients.operation import key_bytes, store_operation
from clients.testing import DcpServer
from dcp.wire.frame import MAX_VALUE_BYTES
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DcpServer(tmp_path_factory.mktemp("operation") / "data") as process:
        yield process


def test_a_value_over_the_limit_is_refused_before_it_is_sent():
    with pytest.raises(TooBigError, match="20971521 bytes, and the limit is 20971520") as caught:
        store_operation(Opcode.SET, "k", bytes(MAX_VALUE_BYTES + 1))
    assert caught.value.status == Status.E2BIG
    assert caught.value.key == b"k"
    assert "nothing was sent" in str(caught.value)
    assert "Split the document" in caught.value.hint
    assert store_operation(Opcode.SET, "k", bytes(MAX_VALUE_BYTES))


@pytest.mark.parametrize("value", ["text", 7, None, {"a": 1}])
def test_a_value_that_is_not_bytes_says_what_it_is(value):
    with pytest.raises(TypeError, match=f"a value is bytes, not {type(value).__name__}") as caught:
        store_operation(Opcode.ADD, b"k", value)
    assert ("use value.encode()" in str(caught.value)) is isinstance(value, str)


@pytest.mark.parametrize("value", [b"v", bytearray(b"v"), memoryview(b"v")])
def test_every_kind_of_bytes_is_a_value(value):
    assert store_operation(Opcode.SET, "k", value)[3] == b"v"


def test_a_key_is_text_or_bytes():
    assert key_bytes("é") == "é".encode() == key_bytes("é".encode())
    assert vbucket_of("hello") == vbucket_of(b"hello") == 528
    with pytest.raises(TypeError, match="a key is str or bytes, not int"):
        key_bytes(7)


def test_the_blocking_client_takes_text_as_key(server):
    with server.connect() as kv:
        kv.set("text", b"1")
        assert kv.get("text").value == kv.get(b"text").value == b"1"
        with pytest.raises(TypeError, match=r"use value.encode\(\)"):
            kv.set("text", "2")
        kv.delete("text")


async def test_a_client_goes_on_after_a_value_that_it_refused(server):
    async with KvClient.connect(server.address) as kv:
        with pytest.raises(TypeError, match=r"use value.encode\(\)"):
            await kv.set("k", "text")
        with pytest.raises(TooBigError):
            await kv.set("k", bytes(MAX_VALUE_BYTES + 1))
        for value, error in (("text", TypeError), (bytes(MAX_VALUE_BYTES + 1), TooBigError)):
            with pytest.raises(error):
                await kv.set_many({"other": b"1", "k": value})
        assert await kv.get_many(["k", "other"]) == {}, "a batch is refused as a whole"
        await kv.set("k", b"1")
        assert (await kv.get("k")).value == b"1"

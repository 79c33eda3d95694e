"""Memcached clients against a live server: they know no partitions, so the server hashes keys."""

from __future__ import annotations

from collections.abc import Iterator

import bmemcached
import pylibmc
import pytest

from support.server import DcpdProcess

pytestmark = pytest.mark.foreign


@pytest.fixture
def binary_memcached(server: DcpdProcess) -> Iterator[bmemcached.Client]:
    client = bmemcached.Client((server.address,), "guest", "guest")
    yield client
    client.disconnect_all()


@pytest.fixture
def libmemcached(server: DcpdProcess) -> Iterator[pylibmc.Client]:
    client = pylibmc.Client([server.address], binary=True)
    yield client
    client.disconnect_all()


def test_binary_memcached_sets_gets_and_deletes(binary_memcached: bmemcached.Client) -> None:
    assert binary_memcached.set("bm:1", "one")
    assert binary_memcached.get("bm:1") == "one"
    assert binary_memcached.delete("bm:1")
    assert binary_memcached.get("bm:1") is None


def test_binary_memcached_cas_add_replace(binary_memcached: bmemcached.Client) -> None:
    assert binary_memcached.add("bm:2", "a")
    assert not binary_memcached.add("bm:2", "b")
    assert binary_memcached.replace("bm:2", "c")
    value, cas = binary_memcached.gets("bm:2")
    assert value == "c"
    assert binary_memcached.cas("bm:2", "d", cas)
    assert not binary_memcached.cas("bm:2", "e", cas)
    assert binary_memcached.get("bm:2") == "d"


def test_binary_memcached_many_at_once(binary_memcached: bmemcached.Client) -> None:
    values = {f"bm:m:{number}": str(number) for number in range(500)}
    assert binary_memcached.set_multi(values) == []
    assert binary_memcached.get_multi([*values, "bm:none"]) == values


def test_libmemcached_without_login(libmemcached: pylibmc.Client) -> None:
    assert libmemcached.set("lm:1", "one")
    assert libmemcached.get("lm:1") == "one"
    assert libmemcached.add("lm:1", "two") is False
    assert libmemcached.replace("lm:1", "three")
    assert libmemcached.get("lm:1") == "three"
    assert libmemcached.delete("lm:1")
    assert libmemcached.get("lm:1") is None


def test_libmemcached_many_at_once(libmemcached: pylibmc.Client) -> None:
    values = {f"lm:m:{number}": number for number in range(500)}
    assert libmemcached.set_multi(values) == []
    assert libmemcached.get_multi(list(values)) == values


def test_both_see_the_same_documents(
    binary_memcached: bmemcached.Client, libmemcached: pylibmc.Client
) -> None:
    binary_memcached.set("both", "from bmemcached")
    assert libmemcached.get("both") == b"from bmemcached"


@pytest.fixture
def text_libmemcached(server: DcpdProcess) -> Iterator[pylibmc.Client]:
    client = pylibmc.Client([server.address], behaviors={"cas": True})
    yield client
    client.disconnect_all()


def test_libmemcached_over_the_text_protocol(
    text_libmemcached: pylibmc.Client, libmemcached: pylibmc.Client
) -> None:
    client = text_libmemcached
    assert client.set("tx:1", "one")
    assert libmemcached.get("tx:1") == "one"
    assert client.append("tx:1", "!")
    value, cas = client.gets("tx:1")
    assert value == "one!"
    assert client.cas("tx:1", "two", cas)
    assert not client.cas("tx:1", "three", cas)
    assert client.add("tx:n", 5)
    assert client.incr("tx:n", 3) == 8
    assert client.decr("tx:n", 10) == 0
    values = {f"tx:m:{number}": bytes([number % 256]) * number for number in range(300)}
    assert client.set_multi(values) == []
    assert client.get_multi([*values, "tx:none"]) == values
    assert client.delete("tx:1")
    assert client.get("tx:1") is None

"""--collection on get, set, del, keys, import and watch; keys; import from a pipe."""

from __future__ import annotations

import asyncio
import json

import pytest

from clients import SystemEvent
from clients.address import parse_address
from clients.cli.changes.watch_lines import CollectionNames
from clients.cli.dcpctl import run
from clients.cli.documents import keys_command
from clients.kv import key_listing
from clients.operation import vbucket_of

SHOP = ("--collection", "shop.orders")


@pytest.fixture(autouse=True, scope="module")
def collections(server):
    for path in ("shop.orders", "shop.carts"):
        assert run(["--server", server.address, "collection", "create", path]) == 0


def test_documents_of_a_collection(ctl):
    assert ctl("set", "1001", "order", *SHOP)[0] == 0
    assert ctl("set", "1001", "plain")[0] == 0
    assert ctl("get", "1001", *SHOP)[1] == b"order"
    assert ctl("get", "1001")[1] == b"plain"
    assert ctl("get", "1001", "--collection", "shop.carts")[0] == 3
    assert ctl("del", "1001", *SHOP)[0] == 0
    assert ctl("get", "1001", *SHOP)[0] == 3
    assert ctl("get", "1001")[1] == b"plain"


@pytest.mark.parametrize(
    "command",
    [["get", "k"], ["set", "k", "v"], ["del", "k"], ["keys"], ["watch", "--until-now"],
     ["import", "-", "--key", "id"]],
)  # fmt: skip
def test_a_collection_that_is_not_there_is_an_error(ctl, command):
    code, out, err = ctl(*command, "--collection", "shop.nothing", stdin=b'{"id":1}\n')
    assert (code, out) == (1, b"")
    assert "shop.nothing" in err
    assert "0x88" in err


def test_watch_follows_collections(ctl, rows):
    ctl("set", "w1", "1", *SHOP)
    ctl("set", "w1", "2", "--collection", "shop.carts")
    ctl("set", "w1", "3")
    watch = ("watch", "--until-now", "--prefix", "w1")
    assert [(row["value"], "collection" in row) for row in rows(*watch)] == [("3", False)]
    shop = [row for row in rows(*watch, *SHOP) if row["event"] == "mutation"]
    assert [(row["collection"], row["value"]) for row in shop] == [("shop.orders", "1")]
    both = rows(*watch, *SHOP, "--collection", "shop.carts")
    everything = rows(*watch, "--collection", "all")
    for found, wanted in ((both, "12"), (everything, "123")):
        changes = [row for row in found if row["event"] == "mutation"]
        assert sorted(row["value"] for row in changes) == list(wanted)
    names = {row["collection"] for row in everything if row["event"] == "mutation"}
    assert names == {"_default._default", "shop.orders", "shop.carts"}


def test_names_are_learned_from_the_stream(ctl, rows):
    ctl("collection", "create", "late.one")
    ctl("set", "late", "1", "--collection", "late.one")
    found = rows("watch", "--until-now", "--prefix", "late", "--collection", "all")
    assert [row["collection"] for row in found if row["event"] == "mutation"] == ["late.one"]
    names = CollectionNames(b'{"scopes": []}')
    for row in rows("watch", "--until-now", "--collection", "all", "--all"):
        if row["event"] == "system_event" and row["kind"].startswith("create"):
            kind = 0 if row["kind"] == "create_collection" else 3
            ids = int(row["scope"], 16), int(row["collection"], 16)
            names.learn(SystemEvent(0, row["seqno"], kind, 1, *ids, row["name"]))
    assert {"shop.orders", "shop.carts", "late.one"} <= set(names.values())


def test_keys_by_prefix(ctl, rows):
    wanted = [f"list:{n:03}" for n in range(300)]
    lines = "".join(json.dumps({"id": key}) + "\n" for key in wanted)
    assert ctl("import", "-", "--key", "id", stdin=lines.encode())[0] == 0
    assert [row["key"] for row in rows("keys", "list:")] == wanted
    assert ctl("keys", "list:00")[1].decode().splitlines() == wanted[:10]
    assert ctl("keys", "list:", "--limit", "3")[1].decode().splitlines() == wanted[:3]
    assert sorted(ctl("keys", "list:", "--unsorted")[1].decode().splitlines()) == wanted
    assert ctl("keys", "list:", "-o", "table")[1].decode().splitlines() == wanted
    assert set(wanted) < {row["key"] for row in rows("keys")}
    assert ctl("keys", "nothing-begins-so") == (0, b"", "")
    ctl("set", "list:000", "of the shop", *SHOP)
    assert ctl("keys", "list:", *SHOP)[1] == b"list:000\n"
    assert ctl("keys", "--unsorted", "--limit", "3")[0] == 2


def test_keys_are_any_bytes(ctl, rows, server):
    raw = b"\xff\xfe\n"
    with server.connect() as kv:
        kv.set(raw, b"1")
        kv.set(b"\xff" * 250, b"1")
    found = rows("keys", raw[:1].decode(errors="surrogateescape"))
    assert [row["key_encoding"] for row in found] == ["base64", "base64"]
    assert ctl("keys", "\udcff\udcfe", "-o", "raw")[1] == raw + b"\n"


def test_more_keys_than_can_be_sorted(ctl, monkeypatch):
    monkeypatch.setattr(keys_command, "SORTED_MAX", 100)
    code, out, err = ctl("keys", "list:")
    assert (code, out) == (1, b"")
    assert "more than 100 keys" in err
    assert "--unsorted" in err
    assert len(ctl("keys", "list:", "--unsorted")[1].splitlines()) == 300
    assert len(ctl("keys", "list:", "--limit", "5")[1].splitlines()) == 5


@pytest.mark.parametrize("opcode", ["RANGE_SCAN_CREATE", "RANGE_SCAN_CONTINUE"])
@pytest.mark.parametrize("status", ["ETMPFAIL", "NOT_MY_VBUCKET"])
def test_a_listing_goes_on_where_a_partition_moves(ctl, server, opcode, status):
    wanted = [f"moving:{n:03}" for n in range(300)]
    lines = "".join(json.dumps({"id": key}) + "\n" for key in wanted)
    assert ctl("import", "-", "--key", "id", stdin=lines.encode())[0] == 0
    server.fault(opcode=opcode, status=status, count=40)
    try:
        assert ctl("keys", "moving:")[1].decode().splitlines() == wanted
        assert server.faults() == [], "all of them were met"
    finally:
        server.clear_faults()


def test_a_scan_that_is_dropped_goes_on_behind_its_last_key(ctl, server, monkeypatch):
    """Its keys come in several answers, and the second one is a refusal."""
    monkeypatch.setattr(key_listing, "KEYS_AT_ONCE", 10)
    vb = 7
    keys = [key for n in range(100_000) if vbucket_of(key := b"dropped:%d" % n) == vb]
    assert len(keys) > 50
    with server.connect() as kv:
        for key in keys:
            kv.set(key, b"")
    found: list[bytes] = []

    async def read() -> None:
        has_fault = False
        async for chunk in key_listing.list_keys(parse_address(server.address), b"dropped:"):
            found.extend(chunk)
            if chunk and not has_fault:
                has_fault = True
                server.fault(opcode="RANGE_SCAN_CONTINUE", vb=vb, status="KEY_ENOENT", count=1)

    try:
        asyncio.run(read())
        assert server.faults() == [], "it was met"
    finally:
        server.clear_faults()
    assert sorted(found) == sorted(keys)


def test_a_listing_with_a_partition_that_nobody_serves_fails(ctl, server):
    server.set_state(5, "dead")
    try:
        code, out, err = ctl("--timeout", "0.5", "keys")
        assert (code, out) == (1, b"")
        assert "partition 5" in err
    finally:
        server.set_state(5, "active")
    assert key_listing.PARTITIONS_AT_ONCE < 256


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ('{"id": "p1"}\n{"id": "p2"}\n', []),
        ('  {"id": "p1"}\n{"id": "p2"}', []),
        ("id,name\np1,Ada\np2,Grace\n", []),
        ("\ufeffid\np1\np2\n", []),
        ('\n{"id": "p1"}\n{"id": "p2"}\n', ["--format", "jsonl"]),
    ],
)
def test_import_from_a_pipe(ctl, rows, text, more):
    ctl("del", "p1", "p2")
    call = ("import", "-", "--key", "id", *more)
    code, out, err = ctl(*call, stdin=text.encode())
    assert (code, out, err) == (0, b"stored 2 rows of standard input\n", "")
    assert [row["key"] for row in rows("keys", "p")] == ["p1", "p2"]


def test_import_into_a_collection(ctl, tmp_path):
    (tmp_path / "orders.data").write_text("id\nc1\n")
    call = ("import", tmp_path / "orders.data", "--key", "id", *SHOP)
    code, _, err = ctl(*call)
    assert code == 2
    assert "Add --format" in err
    assert ctl(*call, "--format", "csv")[0] == 0
    assert ctl("get", "c1", *SHOP)[1] == b'{"id":"c1"}'
    assert ctl("get", "c1")[0] == 3


def test_errors_in_a_pipe_name_the_line(ctl):
    code, _, err = ctl("import", "-", "--key", "id", stdin=b'{"id":1}\n{"id"\n')
    assert code == 1
    assert "standard input, line 2" in err

"""Backups keep XATTRs, also those of deletions, and exports show them."""

from __future__ import annotations

import json

import pytest

from clients.address import parse_address
from clients.kv.sync_client import SyncKv
from clients.link.blocking_link import SyncLink
from dcp.wire.opcode import Opcode
from support.backup_pair import backup, lines, restore
from support.subdoc_client import ACCESS_DELETED, XATTR, lookup_value, mutation_value, results
from vbucket.model.ids import vbucket_of

UPSERT, GET = Opcode.SUBDOC_DICT_UPSERT, Opcode.SUBDOC_GET


def change(server, key, *specs, doc_flags=b""):
    with SyncLink(parse_address(server.address)) as link:
        frame = link.request(
            Opcode.SUBDOC_MULTI_MUTATION, vb_id=vbucket_of(key), key=b"\0" + key,
            extras=doc_flags, value=mutation_value(*specs),
        )  # fmt: skip
    assert frame.status == (0xCD if doc_flags else 0)
    return frame.cas


def of_deletion(server, key, path):
    with SyncLink(parse_address(server.address)) as link:
        frame = link.request(
            Opcode.SUBDOC_MULTI_LOOKUP, vb_id=vbucket_of(key), key=b"\0" + key,
            extras=bytes([ACCESS_DELETED]), value=lookup_value((GET, XATTR, path)),
        )  # fmt: skip
    return results(frame.value)


@pytest.fixture
def written(server):
    with server.connect() as kv:
        for key in (b"full", b"gone", b"plain"):
            kv.set(key, b'{"v":1.50}')
    for key in (b"full", b"gone"):
        change(
            server, key, (UPSERT, XATTR, b"user", b'{"n":1.0}'), (UPSERT, XATTR, b"_sys", b"2.50")
        )
    with server.connect() as kv:
        kv.delete(b"gone")
    deleted = bytes([ACCESS_DELETED])
    change(server, b"gone", (UPSERT, XATTR, b"staged", b"1.0"), doc_flags=deleted)


@pytest.mark.parametrize("conflict", [(), ("--force",)])
def test_they_come_back(ctl, server, other, archive, written, conflict):
    backup(ctl, server, archive)
    restore(ctl, other, archive, *conflict)
    with SyncKv(parse_address(other.address)) as kv:
        document, xattrs = kv.get_with_xattrs(b"full")
        assert document.value == b'{"v":1.50}'
        assert xattrs == {"user": b'{"n":1.0}', "_sys": b"2.50"}
        assert kv.get_with_xattrs(b"plain")[1] == {}
    assert of_deletion(other, b"gone", b"_sys") == [(0, b"2.50")]
    assert of_deletion(other, b"gone", b"staged") == [(0, b"1.0")]
    code, out, err = ctl(other, "get", "full", "--xattrs")
    assert code == 0, err
    found = json.loads(out)
    assert (found["value"], found["xattrs"]) == ({"v": 1.5}, {"user": {"n": 1.0}, "_sys": 2.5})


def test_exports_show_them(ctl, server, archive, written, tmp_path):
    backup(ctl, server, archive)
    code, out, err = ctl(
        server, "backup", "export", "--archive", archive, "--to", "-", "--format", "jsonl"
    )
    assert code == 0, err
    assert b'"xattrs":{"user":{"n":1.0},"_sys":2.50}' in out
    rows = {row["key"]: row for row in lines(out)}
    assert rows["full"]["value"] == '{"v":1.50}'
    assert "xattrs" not in rows["plain"]
    from pyarrow import parquet

    target = tmp_path / "documents.parquet"
    code, _, err = ctl(
        server, "backup", "export", "--archive", archive, "--to", str(target), "--format", "parquet"
    )
    assert code == 0, err
    table = {row["key"]: row for row in parquet.read_table(target).to_pylist()}
    assert table[b"full"]["xattrs"] == '{"user":{"n":1.0},"_sys":2.50}'
    assert table[b"full"]["value"] == b'{"v":1.50}'
    assert table[b"full"]["datatype"] == table[b"plain"]["datatype"]
    assert table[b"plain"]["xattrs"] is None


def test_a_dump_shows_them(ctl, server, written):
    code, out, err = ctl(server, "vb", "dump", str(vbucket_of(b"full")))
    assert code == 0, err
    row = next(row for row in lines(out) if row.get("key") == "full")
    assert row["value"] == '{"v":1.50}'
    assert row["xattrs"] == {"user": '{"n":1.0}', "_sys": "2.50"}


def test_more_than_one_request_holds(server):
    """dcpctl reads up to 16 XATTRs at once; this document has more."""
    with server.connect() as kv:
        kv.set(b"many", b"{}")
    for first in range(0, 40, 10):
        change(
            server,
            b"many",
            *[(UPSERT, XATTR, b"x%d" % n, b"%d" % n) for n in range(first, first + 10)],
        )
    with SyncKv(parse_address(server.address)) as kv:
        assert kv.get_with_xattrs(b"many")[1] == {f"x{n}": b"%d" % n for n in range(40)}

"""dcpctl backup against live servers: what is saved comes back, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import cycle, permutations

from cramjam import snappy

from clients.address import parse_address
from clients.backup.archives.archive import create_archive
from clients.backup.run import Backup
from clients.cli.restore_commands import bar
from clients.kv.sync_client import SyncKv
from clients.link.pipelined_link import Link
from clients.link.topology import ClusterNode, Topology
from clients.sync import SyncConsumer
from dcp.wire.opcode import Opcode
from support.backup_pair import (
    Keys,
    backup,
    ends_of,
    export,
    fill,
    high_seqno,
    high_seqnos,
    lines,
    restore,
    seconds,
)
from support.raw_client import RawClient
from support.server import DcpdProcess
from vbucket.model.ids import NUM_VBUCKETS, vbucket_of


def test_documents_come_back_with_all_that_is_beside_them(ctl, server, other, archive):
    expiry = int(time.time()) + 5000
    with Keys(server) as keys:
        first = keys.set(b"meta:a", b"1", flags=0xCAFE, expiry=expiry)
        second = keys.set(b"meta:b", b"1")
        third = keys.set(b"meta:b", b"2")
        keys.set(b"meta:c", b"gone")
        keys.delete(b"meta:c")
        metas = {key: keys.meta(key) for key in (b"meta:a", b"meta:b", b"meta:c")}
    assert first < second < third
    report = backup(ctl, server, archive)
    assert report["run"] == 1
    assert report["history"] is True
    done = restore(ctl, other, archive, "--prefix", "meta:")
    assert (done["result"], done["documents"], done["deletions"]) == ("restored", 2, 1)
    with Keys(other) as keys:
        for key, meta in metas.items():
            assert keys.meta(key) == meta, key
        assert (keys.get(b"meta:a"), keys.get(b"meta:b"), keys.get(b"meta:c")) == (b"1", b"2", None)
        changed = keys.set(b"meta:b", b"3")
        assert changed > third, "the clock of the partition went along"
    again = restore(ctl, other, archive, "--prefix", "meta:", code=8)
    assert (again["written"], again["kept_newer"]) == (0, 3)
    with Keys(other) as keys:
        assert keys.get(b"meta:b") == b"3", "the higher revision won"
    forced = restore(ctl, other, archive, "--prefix", "meta:", "--force")
    assert forced["written"] == 3
    with Keys(other) as keys:
        assert (keys.get(b"meta:b"), keys.meta(b"meta:b")) == (b"2", metas[b"meta:b"])


def test_compressed_values_are_saved_and_restored_plain(ctl, server, other, archive):
    value, key = b"again and " * 100, b"packed:a"
    with RawClient(server.port) as client:
        client.ask(Opcode.HELLO, value=b"\0\x0a\0\x0b")
        client.ask(Opcode.SELECT_BUCKET, key=b"default")
        stored = client.ask(
            Opcode.SET, vb_id=vbucket_of(key), key=key, extras=bytes(8), datatype=3,
            value=bytes(snappy.compress_raw(value)),
        )  # fmt: skip
        assert stored.status == 0
    backup(ctl, server, archive)
    assert export(ctl, server, archive)[key.decode()]["value"] == value.decode()
    restore(ctl, other, archive, "--prefix", "packed:")
    with Keys(other) as keys:
        assert keys.get(key) == value


def test_as_of_run_time_and_seqno(ctl, server, archive):
    key, vb_id = b"when", vbucket_of(b"when")
    with Keys(server) as keys:
        cas = [keys.set(key, b"1"), keys.set(key, b"2")]
        backup(ctl, server, archive)
        cas.append(keys.set(key, b"3"))
        backup(ctl, server, archive)
        keys.delete(key)
    backup(ctl, server, archive)

    def value(*options):
        return export(ctl, server, archive, *options).get("when", {}).get("value")

    assert [value("--run", run) for run in (1, 2, 3)] == ["2", "3", None]
    seqno = next(
        row["seqno"]
        for row in lines(ctl(server, "backup", "info", "--archive", archive, "--run", 3, "-o",
                             "json")[1])
        if row["vb"] == vb_id
    )  # fmt: skip
    at = [value("--seqnos", json.dumps({vb_id: seqno - back})) for back in range(4)]
    assert at == [None, "3", "2", "1"]
    for number, change in enumerate(cas, 1):
        time_ns = change & ~0xFFFF  # a change's time is its CAS
        found = value("--time", seconds(time_ns - 1)), value("--time", seconds(time_ns))
        assert found == (str(number - 1) if number > 1 else None, str(number))
    code, _, err = ctl(server, "backup", "export", "--archive", archive, "--to", "-", "--format",
                       "jsonl", "--time", "2100-01-01")  # fmt: skip
    assert code == 1
    assert "2100-01-01T00:00:00.000Z is not in the archive" in err


def test_a_branch_between_runs(ctl, server, other, archive):
    key, vb_id = b"branched", vbucket_of(b"branched")
    with Keys(server) as keys:
        for number in range(6):
            keys.set(key, b"%d" % number)
        backup(ctl, server, archive)
        high = high_seqno(server, vb_id)
        server.branch(vb_id, high - 2)
        assert keys.get(key) == b"3"
        keys.set(key, b"other")
    report = backup(ctl, server, archive)
    assert report["rollbacks"] == {str(vb_id): [[high, high - 2]]}
    assert report["changes"] == 1
    assert export(ctl, server, archive, "--run", 1)["branched"]["value"] == "5"
    assert export(ctl, server, archive)["branched"]["value"] == "other"
    vector = json.dumps({vb_id: high - 2})
    assert export(ctl, server, archive, "--seqnos", vector)["branched"]["value"] == "3"


def test_collections_are_made_mapped_and_chosen(ctl, server, other, archive):
    assert ctl(server, "collection", "create", "shop.orders", "--max-ttl", 90_000)[0] == 0
    assert ctl(server, "collection", "create", "shop.carts")[0] == 0
    manifest = collection_ids(ctl, server)
    for name, at in (("orders", 3), ("carts", 4)):
        prefix = bytes([manifest[f"shop.{name}"]])
        with Keys(server) as keys:
            frame = keys.link.request(
                Opcode.SET, vb_id=at, key=prefix + b"k", value=name.encode(), extras=bytes(8)
            )
            assert frame.status == 0
    backup(ctl, server, archive)
    code, _, err = ctl(other, "backup", "restore", "--archive", archive)
    assert code == 1
    assert "no collection shop.carts, shop.orders" in err
    assert "--create-collections" in err
    done = restore(ctl, other, archive, "--collection", "shop.orders", "--map",
                   "shop.orders=new.place", "--create-collections")  # fmt: skip
    assert done["created"] == ["new.place"]
    assert done["collections"] == {"new.place": 1}
    done = restore(ctl, other, archive, "--create-collections")
    assert done["created"] == ["shop.carts", "shop.orders"]
    found = collection_ids(ctl, other)
    with Keys(other) as keys:
        for path, at, value in (("new.place", 3, b"orders"), ("shop.orders", 3, b"orders"),
                                ("shop.carts", 4, b"carts")):  # fmt: skip
            key = bytes([found[path]]) + b"k"
            assert keys.link.request(Opcode.GET, vb_id=at, key=key).value == value
    code, _, err = ctl(other, "backup", "restore", "--archive", archive, "--collection", "a.b")
    assert code == 1
    assert "no collection 'a.b'" in err
    for path in ("shop",):
        assert ctl(server, "collection", "drop", path)[0] == 0
    assert backup(ctl, server, archive)["run"] == 2
    assert {row["collection"] for row in export(ctl, server, archive).values()} == {
        "_default._default"
    }
    assert "shop.carts" in {row["collection"] for row in export(ctl, server, archive, "--run", 1)
                            .values()}  # fmt: skip


def collection_ids(ctl, server):
    return {
        row["collection"]: int(row["id"], 16)
        for row in lines(ctl(server, "collection", "list", "-o", "json")[1])
    }


def test_a_collection_that_was_dropped_and_made_again(ctl, server, archive):
    """It has another id then: what the first one held comes back into it, as of then only."""
    path, ids = "again.orders", []
    with Keys(server) as keys:
        for documents in ({b"k": b"1"}, {b"k": b"2", b"new": b"2"}):
            assert ctl(server, "collection", "create", path)[0] == 0
            ids.append(collection_ids(ctl, server)[path])
            for key, value in documents.items():
                frame = keys.link.request(
                    Opcode.SET, vb_id=3, key=bytes([ids[-1]]) + key, value=value, extras=bytes(8)
                )
                assert frame.status == 0
            backup(ctl, server, archive)
            if len(ids) == 1:
                assert ctl(server, "collection", "drop", "again")[0] == 0
        assert ids[0] != ids[1]
        chosen = ("--collection", path)
        held = [export(ctl, server, archive, *chosen, "--run", run) for run in (1, 2)]
        assert [{key: row["value"] for key, row in rows.items()} for rows in held] == [
            {"k": "1"}, {"k": "2", "new": "2"}
        ]  # fmt: skip
        done = restore(ctl, server, archive, *chosen, "--run", 1, "--force")
        assert (done["written"], done["collections"]) == (1, {path: 1})
        prefix = bytes([ids[1]])
        found = [
            keys.link.request(Opcode.GET, vb_id=3, key=prefix + key).value for key in (b"k", b"new")
        ]
        assert found == [b"1", b"2"]
        assert ctl(server, "collection", "drop", "again")[0] == 0


def test_dry_run_asks_no_server(ctl, server, archive):
    fill(server, b"dry", 10)
    backup(ctl, server, archive)

    class Nowhere:
        address = "127.0.0.1:1"

    plan = restore(ctl, Nowhere, archive, "--prefix", "dry", "--dry-run")
    assert (plan["result"], plan["documents"]) == ("planned", 10)
    code, out, _ = ctl(Nowhere, "backup", "restore", "--archive", archive, "--prefix", "dry",
                       "--dry-run")  # fmt: skip
    assert code == 0
    assert b"would restore 10 documents" in out
    assert ctl(Nowhere, "backup", "restore", "--archive", archive)[0] == 6


def test_any_number_of_nodes(server, other, archive, monkeypatch):
    """Half of the partitions are on each of two servers; nothing is twice, nothing is missing."""
    fill(server, b"half", 2000)
    fill(other, b"half", 2000)
    half = NUM_VBUCKETS // 2
    nodes = tuple(ClusterNode("127.0.0.1", process.port) for process in (server, other))
    topology = Topology((1, 1), nodes, (0,) * half + (1,) * half)
    monkeypatch.setattr(Link, "topology", lambda *_, **__: topology)
    for vb_id in (half + 1, half + 2):
        server.set_state(vb_id, "dead")  # asked there, they would be refused
    try:
        made = create_archive(str(archive), 1)
        report = asyncio.run(Backup(made, parse_address(server.address)).run())
    finally:
        for vb_id in (half + 1, half + 2):
            server.set_state(vb_id, "active")
    record = report.record
    wanted = {vb_id: seqno for vb_id, seqno in high_seqnos(server).items() if vb_id < half}
    wanted |= {vb_id: seqno for vb_id, seqno in high_seqnos(other).items() if vb_id >= half}
    assert ends_of(record) == {vb_id: seqno for vb_id, seqno in wanted.items() if seqno}


def test_a_terminal_shows_rate_and_time_left(server, archive):
    """On stderr; what machines read on stdout stays clean."""
    fill(server, b"bar", 2000)
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "clients.cli", "--server", server.address, "backup", "run"]
    shown = ""
    with os.fdopen(ours, "rb", buffering=0) as screen, subprocess.Popen(
        [*command, "--archive", str(archive), "-o", "json"], stdout=subprocess.PIPE,
        stderr=theirs, env=environment,
    ) as process:  # fmt: skip
        os.close(theirs)
        with suppress(OSError):  # EIO: nobody writes to it any more
            while part := screen.read(1 << 16):
                shown += part.decode(errors="replace")
        said = process.stdout.read()
    assert process.returncode == 0
    assert json.loads(said)["result"] == "backed up"
    assert re.search(r"backup .*100%.* changes/s .*iB.*\d:\d\d:\d\d", shown), shown


def test_a_bar_that_saw_one_step_shows_the_average_rate():
    """What ends within one refresh gives rich no speed."""
    with bar("backup", "changes") as (progress, task):
        progress.update(task, completed=0, total=500)
        progress.update(task, completed=500, total=500)
        (shown,) = progress.tasks
        assert shown.speed is None
        rates = [str(column(shown)) for column in progress.columns]
    assert sum(bool(re.fullmatch(r"[\d,]+ changes/s", text)) for text in rates) == 1, rates


def test_times_without_a_state_are_refused(ctl, tmp_path, archive):
    """Before the first whole state, or folded away: nothing would be restored."""
    with DcpdProcess(tmp_path / "data") as server:
        with Keys(server) as keys:
            time_text = seconds(keys.set(b"early", b"1") & ~0xFFFF)
            keys.set(b"early", b"2")
        for _ in range(2):
            backup(ctl, server, archive, "--newest-only")
        exported = tmp_path / "x.jsonl"
        for command in (["restore"], ["restore", "--dry-run"], ["export", "--to", exported]):
            code, _, err = ctl(server, "backup", *command, "--archive", archive, "--time",
                               time_text)  # fmt: skip
            assert (code, "no complete state of any" in err) == (1, True), err
            assert "Name a later point" in err
        assert not exported.exists(), "no half of an export"
        assert ctl(server, "backup", "prune", "--archive", archive, "--keep", 1)[0] == 0
        code, _, err = ctl(server, "backup", "restore", "--archive", archive, "--time", time_text)
        assert (code, "are folded into run 2" in err) == (1, True), err
        assert "--run 2" in err
        assert restore(ctl, server, archive, "--run", "2")["documents"] == 1


def test_a_replica_of_a_node_alone_is_backed_up(ctl, archive, tmp_path):
    """Its map names no other node that could have it."""
    with DcpdProcess(tmp_path / "alone") as server:
        with Keys(server) as keys:
            for number in range(50):
                keys.set(b"r%d" % number, b"v")
        server.set_state(vbucket_of(b"r7"), "replica")
        assert backup(ctl, server, archive)["changes"] == 50


def test_the_server_is_told_of_runs_and_checks(ctl, server, other, archive, tmp_path):
    def told(at):
        code, out, err = ctl(at, "backup", "list", "-o", "json")
        assert code == 0, err
        rows = [json.loads(line) for line in out.splitlines()]
        return [row for row in rows if row["archive"] == str(archive)]

    with Keys(server) as keys:
        keys.set(b"told", b"1")
    ran = backup(ctl, server, archive)
    ((run),) = told(server)
    assert (run["kind"], run["result"], run["run"]) == ("run", "done", 1)
    assert (run["changes"], run["stored_bytes"]) == (ran["changes"], ran["stored_bytes"])
    assert run["partitions"] > 0
    assert (run["user"], run["ended"] >= run["started"]) == ("guest", True)
    assert ctl(server, "backup", "verify", "--archive", archive)[0] == 0
    assert [row["result"] for row in told(server)] == ["done", "done"]
    (segment,) = archive.glob("runs/000001/*.seg*")
    segment.write_bytes(segment.read_bytes()[:-1])
    assert ctl(server, "backup", "verify", "--archive", archive)[0] == 1
    newest = told(server)[0]
    assert (newest["kind"], newest["result"], newest["why"][:6]) == ("verify", "damaged", "places")
    # Another server, and none at all: the check is done, and nothing is said of it.
    assert ctl(other, "backup", "verify", "--archive", archive)[2] == ""
    assert told(other) == []
    table = ctl(server, "backup", "list", "-o", "table")[1].decode().splitlines()
    assert table[0].split() == [
        "started",
        "(UTC)",
        "what",
        "result",
        "changes",
        "stored",
        "archive",
    ]
    assert all(len(line) <= 80 or str(archive) in line for line in table)


def test_a_run_ends_at_one_moment_of_the_server(ctl, server, archive):
    """Money is moved in batches, and pairs are written in order, while runs are made: each has a
    state of the whole store. So has what a consumer gets up to now.
    """
    accounts = [f"cut:{n}" for n in range(12)]
    stop = threading.Event()

    def move():
        with SyncKv(server.address) as kv:
            held = dict.fromkeys(accounts, 100)
            for count, (first, second) in enumerate(cycle(permutations(accounts, 2)), 2):
                held[first], held[second] = held[first] - 1, held[second] + 1
                with kv.batch() as batch:
                    for key in (first, second):
                        batch.set(key, b"%d" % held[key])
                kv.set("cut:first", b"%d" % count)
                kv.set("cut:second", b"%d" % count)
                if stop.is_set():
                    return

    def check(documents):
        assert sum(map(int, (documents[key] for key in accounts))) == 100 * len(accounts)
        assert int(documents["cut:first"]) >= int(documents["cut:second"]) > 0
        return documents["cut:first"]

    with SyncKv(server.address) as kv:
        for key in accounts:
            kv.set(key, b"100")
        for key in ("cut:first", "cut:second"):  # a run may come before the mover
            kv.set(key, b"1")
    mover = threading.Thread(target=move)
    mover.start()
    try:
        seen = set()
        for run in (1, 2, 3):
            backup(ctl, server, archive)
            rows = export(ctl, server, archive, "--run", run)
            seen.add(check({key: str(row["value"]) for key, row in rows.items()}))
        assert len(seen) == 3
        for _ in range(5):
            with SyncConsumer(server.address, until_now=True, key_prefixes="cut:") as consumer:
                check({change.key.decode(): change.value for change in consumer.changes()})
    finally:
        stop.set()
        mover.join()

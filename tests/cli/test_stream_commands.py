"""dcpctl stream list: consumers with their totals, and limits that last."""

from __future__ import annotations

import pytest

from clients import SyncConsumer, vbucket_of
from clients.cli.changes.stream_commands import consumers_of
from support.waiting import until


def stream(name, peer, vb, state, lag, unacked=0):
    return {
        "name": name, "peer": peer, "vb": vb, "state": state, "lag_items": lag,
        "unacked_bytes": unacked, "age_s": float(vb),
    }  # fmt: skip


def test_totals_by_consumer():
    found = consumers_of(
        [
            stream("slow", "a:1", 1, "backlog", 5, unacked=70),
            stream("slow", "a:1", 2, "live", 0, unacked=70),
            stream("slow", "a:1", 3, "live", 7, unacked=70),
            stream("fast", "b:2", 1, "live", 0),
        ]
    )
    assert [row["name"] for row in found] == ["slow", "fast"]
    assert found[0] == {
        "name": "slow", "peer": "a:1", "streams": 3, "states": {"backlog": 1, "live": 2},
        "behind": 2, "lag_items": 12, "unacked_bytes": 70, "age_s": 3.0,
    }  # fmt: skip


@pytest.fixture
def two_consumers(server):
    with (
        SyncConsumer(server.address, name="one", vbuckets=range(8)),
        SyncConsumer(server.address, name="two", vbuckets=range(4)),
    ):
        yield


def test_list_by_consumer_and_by_partition(ctl, rows, two_consumers):
    found = rows("stream", "list")
    assert {row["name"]: row["streams"] for row in found} == {"one": 8, "two": 4}
    by_partition = rows("stream", "list", "--vbuckets")
    assert len(by_partition) == 12
    assert {row["vb"] for row in by_partition if row["name"] == "two"} == set(range(4))
    (one,) = rows("stream", "list", "--name", "two")
    assert sum(one["states"].values()) == 4
    table = ctl("stream", "list", "-o", "table")[1].decode().splitlines()
    assert len(table) == 4
    assert table[-1].split()[:2] == ["total", "12"]
    plain = ctl("stream", "list", "-o", "plain")[1].decode().splitlines()
    assert sorted(line.split("\t")[0] for line in plain) == ["name", "one", "two"]


def test_the_lag_of_a_consumer_in_one_command(ctl, rows, server):
    vb_id = vbucket_of("lag:0")
    try:
        with SyncConsumer(server.address, name="lags", vbuckets=[vb_id]), server.connect() as kv:
            assert ctl("stream", "stall", "--name", "lags")[0] == 0
            before = rows("stream", "list", "--name", "lags")[0]["lag_items"]
            for n in range(3):
                kv.set("lag:0", b"%d" % n)
            (row,) = rows("stream", "list", "--name", "lags")
            assert (row["lag_items"], row["behind"]) == (before + 3, 1)
            assert row["states"] == {"stalled": 1}
    finally:
        assert ctl("stream", "stall", "--resume")[0] == 0


def test_a_limit_is_shown_until_it_is_removed(ctl):
    assert ctl("stream", "slow", "1000", "--name", "later", "--vb", "7")[0] == 0
    _, _, err = ctl("stream", "list")
    assert "streams of 'later', partition 7: at most 1000 bytes/s" in err
    assert ctl("stream", "stall", "--resume", "--name", "later")[0] == 0
    assert "later" not in ctl("stream", "list")[2]


def test_a_stream_shows_the_version_that_it_asked_with(ctl, rows, server):
    vb_id = vbucket_of("version:0")
    with server.connect() as kv:
        seqno = kv.set("version:0", b"1").seqno

    def row():
        (found,) = rows("stream", "list", "--vbuckets", "--name", "versions")
        return found

    with SyncConsumer(server.address, name="versions", vbuckets=[vb_id]) as consumer:
        next(iter(consumer.changes()))
        first = row()
        assert (first["asked_vb_uuid"], first["asked_seqno"], first["seqno"]) == ("0", 0, seqno)
        assert ctl("vb", "branch", "--vb", vb_id, "--at", seqno)[0] == 0
        until(lambda: row()["asked_vb_uuid"] != "0")
        second = row()
    assert (second["asked_vb_uuid"], second["asked_seqno"]) == (first["vb_uuid"], seqno)
    assert second["vb_uuid"] != first["vb_uuid"]


def test_a_consumer_acknowledges_far_less_than_its_window(rows, server):
    vb_id = vbucket_of("acknowledged:0")
    with server.connect() as kv:
        kv.set("acknowledged:0", b"1")
    with SyncConsumer(server.address, name="acks", vbuckets=[vb_id]) as consumer:
        changes = consumer.changes()  # also of what other tests have written there
        assert any(each.value == b"1" for each in changes if each.key == b"acknowledged:0")
        with server.connect() as kv:
            kv.set("acknowledged:0", b"2")
        next(changes)  # what came before is processed now
        until(lambda: rows("stream", "list", "--name", "acks")[0]["unacked_bytes"] < 200)

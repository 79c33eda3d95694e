"""dcpctl watch --from, --last, --prefix, --collection: where it starts and what it shows."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients import Consumer, Deletion, Mutation, vbucket_of
from clients.cli.changes import watch_command
from clients.cli.changes.watch_start import Newest, parse_start

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


def start(text, *vb_ids):
    return parse_start(text, vb_ids, lambda: NOW)


def test_words_times_and_ages(tmp_path):
    assert start("beginning") == "beginning"
    assert start("now") == "now"
    assert start("2026-04-30T10:00:00Z") == datetime(2026, 4, 30, 10, tzinfo=UTC)
    assert start("2026-04-30") == datetime(2026, 4, 30, tzinfo=UTC)
    assert start("2026-04-30T10:00:00+02:00") == datetime(2026, 4, 30, 8, tzinfo=UTC)
    assert start("90s") == NOW - timedelta(seconds=90)
    assert start("2h") == NOW - timedelta(hours=2)
    assert start("1d") == NOW - timedelta(days=1)


def test_seqnos(tmp_path):
    assert start("17", 3) == {3: 17}
    assert start('{"3": 17, "4": 0}') == {3: 17, 4: 0}
    (tmp_path / "one").write_text('{\n "3": 17\n}\n')
    assert start(str(tmp_path / "one")) == {3: 17}
    (tmp_path / "rows").write_text(
        '{"v": 1, "vb": 3, "high_seqno": 17}\n{"v": 1, "vb": 4, "high_seqno": 9}\n'
    )
    assert start(str(tmp_path / "rows")) == {3: 17, 4: 9}


@pytest.mark.parametrize("age", ["999999999d", "739737d", "999999999h"])
def test_an_age_before_the_year_1_is_the_beginning(age):
    assert start(age) == "beginning"


def test_json_that_is_nested_too_deeply_is_refused(tmp_path):
    deep = '{"3": ' * 100_000
    (tmp_path / "deep").write_text("[" * 100_000)
    for text in (deep, str(tmp_path / "deep")):
        with pytest.raises(click.UsageError, match="nested too deeply: use beginning"):
            start(text)


def test_a_number_of_many_digits_is_not_repeated():
    with pytest.raises(click.UsageError, match="has 5000 digits and is no seqno") as caught:
        start("1" * 5000, 4)
    assert len(str(caught.value)) < 200
    assert start("0" * 18 + "17", 4) == {4: 17}


@pytest.mark.parametrize(
    ("text", "vb_ids", "why"),
    [
        ("17", (), "every partition has its own: add one --vb"),
        ("17", (1, 2), "add one --vb"),
        ("yesterday", (), "is no file and no time"),
        ("{", (), "not JSON"),
        ('{"1024": 5}', (), "there are 0 to 1023"),
        ('{"4": -1}', (), "partition 4: -1 is no seqno"),
        ('{"4": true}', (), "is no seqno"),
        (str(2**64), (4,), "the largest is"),
    ],
)
def test_what_is_no_start_says_what_is(text, vb_ids, why):
    with pytest.raises(click.UsageError) as caught:
        start(text, *vb_ids)
    assert why in str(caught.value)


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans())), st.integers(1, 8))
def test_the_newest_are_those_of_a_sort(changes, size):
    events = [
        Deletion(0, b"k", seqno, 1, cas)
        if is_deletion
        else Mutation(0, b"k", b"", seqno, 1, cas, 0, 0)
        for seqno, (cas, is_deletion) in enumerate(changes)
    ]
    newest = Newest(size)
    newest.take(events)
    kept = newest.in_order()
    assert [event.cas for event in kept] == sorted(event.cas for event in events)[-size:]


# -- against a server ------------------------------------------------------------------------------

PREFIX = "start:"
KEYS = [f"{PREFIX}{n}" for n in range(8)]


@pytest.fixture
def seen(rows, server):
    """Write eight documents; return a function that watches them, and their seqnos."""
    stored = {}
    for n, key in enumerate(KEYS):
        with server.connect() as kv:
            stored[key] = kv.set(key, b"%d" % n)

    def watch(*arguments):
        found = rows("watch", "--until-now", "--prefix", PREFIX, *arguments)
        return [row["key"] for row in found if row["event"] == "mutation"]

    watch.stored = stored
    return watch


def test_from_a_time_shows_what_came_after_it(seen):
    assert sorted(seen()) == KEYS
    cas = seen.stored[KEYS[5]].cas
    moment = datetime.fromtimestamp((cas & ~0xFFFF) // 1000 / 1_000_000, UTC)
    shown = seen("--from", moment.isoformat())
    assert set(KEYS[6:]) <= set(shown)
    assert not set(KEYS[:5]) & set(shown)
    assert seen("--from", "2100-01-01") == []
    assert sorted(seen("--from", "1h")) == KEYS


def test_from_seqnos_shows_what_came_after_them(seen, ctl, rows, tmp_path):
    vb_id, seqno = vbucket_of(KEYS[3]), seen.stored[KEYS[3]].seqno
    assert KEYS[3] not in seen("--vb", vb_id, "--from", seqno)
    assert KEYS[3] in seen("--vb", vb_id, "--from", seqno - 1)
    assert KEYS[3] not in seen("--from", json.dumps({vb_id: seqno}))
    (tmp_path / "then").write_bytes(ctl("seqnos", "-o", "json")[1])
    assert seen("--from", str(tmp_path / "then")) == []
    rows("set", KEYS[2], "again")
    assert seen("--from", str(tmp_path / "then")) == [KEYS[2]]


def test_last_shows_the_newest_in_the_order_of_time(seen, ctl, rows):
    assert seen("--last", "3") == KEYS[5:]
    newest = [row["key"] for row in rows("watch", "--until-now", "--last", "3")]
    assert newest == KEYS[5:], "without a filter, too"
    assert seen("--last", "100000")[-8:] == KEYS
    assert seen("--last", "3", "--count", "2") == KEYS[5:7]
    for more in (["--from", "now"], ["--state", "file"]):
        code, _, err = ctl("watch", "--last", "3", *more)
        assert code == 2
        assert "--last cannot be used with --from or --state" in err


def test_after_the_newest_watch_goes_on_without_a_gap(seen, rows, server, monkeypatch):
    """Nothing that is written between the two passes is lost or shown twice."""
    opened = []

    def consumer(*arguments, **options):
        opened.append(options)
        if len(opened) == 2:
            with server.connect() as kv:
                kv.set(f"{PREFIX}between", b"1")
        return Consumer(*arguments, **options)

    monkeypatch.setattr(watch_command, "Consumer", consumer)
    shown = [row["key"] for row in rows("watch", "--last", "2", "--prefix", PREFIX, "--count", "3")]
    assert shown == [*KEYS[6:], f"{PREFIX}between"]
    assert len(opened) == 2
    rows("del", f"{PREFIX}between")


def test_the_server_filters_by_prefix(rows, server, monkeypatch):
    vb_id = vbucket_of("wanted")
    with server.connect() as kv:
        kv.set("wanted", b"1")
        other = next(k for n in range(10**6) if vbucket_of(k := f"other{n}") == vb_id)
        kv.set(other, bytes(300_000))
    made = []

    def consumer(*arguments, **options):
        made.append(Consumer(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(watch_command, "Consumer", consumer)
    watch = ("watch", "--until-now", "--vb", vb_id)
    assert [row["key"] for row in rows(*watch, "--prefix", "wanted")] == ["wanted"]
    assert made[0].metrics.wire_bytes < 10_000
    assert {row["key"] for row in rows(*watch)} == {"wanted", other}
    assert made[1].metrics.wire_bytes > 300_000

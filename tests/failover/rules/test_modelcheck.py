"""The model checker: the right rules hold in every state, and each wrong rule is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from modelcheck.__main__ import main
from modelcheck.broken import BROKEN, BrokenRule
from modelcheck.rules import RIGHT
from modelcheck.search import Search
from modelcheck.values import NAMES, Bounds
from tests.soak import check

ROOT = Path(__file__).parents[3]
LOST = "a committed record is lost"
ON_FEW_DISKS = "a record is committed on too few disks"
DIFFER = "two replicas differ within version"

FOUND = {
    "cut-to-hw": (ON_FEW_DISKS, "cuts its log back to 0"),
    "kip-101": (DIFFER, "reconciles with"),
    "kip-279": (DIFFER, "receives seqno 1"),
    "early-join": (LOST, "asks the store for an in-sync set with"),
    "version-join": (LOST, "hands over to"),
    "no-version": (DIFFER, "the store elects"),
    "branch-not-finished": ("a record that a branch undid is back", "starts a branch"),
    "received": (LOST, "power cut of"),
    "early-shrink": (LOST, "asks the store for an in-sync set without"),
    "late-expand": (LOST, "asks the store for an in-sync set with "),
    "send-early": (DIFFER, "power cut of"),
    "unsynced-sender": (ON_FEW_DISKS, "receives seqno 1"),
    "old-sender": (ON_FEW_DISKS, "cuts its log back to 0"),
    "old-copy": (LOST, "empties it"),
    "stale-isr": (LOST, "the store goes back to the copy"),
    "unseen-shrink": (LOST, "the store goes back to the copy"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_rule_is_found(name):
    rule, (words, step) = BROKEN[name], FOUND[name]
    broken = Search(rule.bounds, rule.rules).run()
    assert broken is not None
    assert broken.words.startswith(words)
    assert any(step in each for each in broken.steps), broken.steps
    page = (ROOT / "docs" / "replication.md").read_text()
    assert f"`{name}`, {len(broken.steps)} steps" in page or f"(`{name}`)" in page


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(3, 1, 3, 0),
        Bounds(2, 2, 3, 2),
        Bounds(2, 1, 4, 1, branches=1),
        Bounds(3, 1, 2, 1, min_in_sync=1),
        Bounds(3, 1, 2, 1, min_in_sync=3),
        Bounds(4, 1, 2, 0),
        Bounds(3, 1, 2, 0, moves=2),
        Bounds(2, 1, 2, 1, min_in_sync=1, moves=3),
        Bounds(2, 1, 2, 1, min_in_sync=1, restores=1, changes=2),
    ],
    ids=str,
)
def test_the_right_rules_hold_in_every_state(bounds):
    search = Search(bounds)
    assert search.run() is None
    assert search.is_done


def test_a_wrong_rule_that_is_not_found_ends_the_soak(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("modelcheck.__main__.ALL", {"right": BrokenRule(RIGHT, Bounds(2), "")})
    monkeypatch.setattr(check, "ALL", ("right",))
    assert check.soak(tmp_path, minutes=None, states_max=10**6) == 1
    assert "NOT FOUND" in capsys.readouterr().out


def test_two_masters_in_one_epoch_are_found():
    """What the store prevents, if members believed that everybody is meant."""
    rules = replace(RIGHT, is_master=lambda record, member, first_seen: record.epoch > first_seen)
    broken = Search(Bounds(2, 1, 2, 0), rules).run()
    assert broken is not None
    assert broken.words == "epoch 2 has two masters"


def test_two_records_committed_with_one_seqno_are_found():
    rules = replace(RIGHT, effective_isr=lambda confirmed, asked: frozenset())
    rules = replace(rules, high_watermark=lambda *_: 1)
    broken = Search(Bounds(2, 2, 2, 0, min_in_sync=1), rules).run()
    assert broken is not None
    assert "lost" in broken.words or "two different records" in broken.words


@pytest.mark.parametrize("bounds", [Bounds(2, 2, 2, 1), Bounds(3, 1, 2, 0)], ids=str)
def test_states_that_count_as_one_differ_in_names_only(bounds):
    """Without renaming the same states are found, under all names."""
    renamed = Search(bounds)
    renamed.run()
    plain = Search(bounds)
    canonical = plain.model.canonical
    plain.model.canonical = lambda state: state
    assert plain.run() is None
    assert plain.states > renamed.states
    assert len({canonical(state) for state in plain.origin}) == renamed.states


def test_a_saved_search_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("modelcheck.search.CHUNK_STATES", 100)
    bounds, path = Bounds(2, 2, 2, 1), tmp_path / "search"
    whole = Search(bounds)
    assert whole.run() is None
    search = Search(bounds)
    rounds = 0
    while not search.is_done:
        assert search.advance() is None
        search.save(path)
        search = Search.load(path)
        rounds += 1
    assert rounds > whole.depth
    assert (search.states, search.depth) == (whole.states, whole.depth)


def test_the_soak_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "LADDER", (Bounds(2, 1, 2, 1), Bounds(2, 2, 2, 1)))
    monkeypatch.setattr(check, "ALL", ("early-shrink",))
    assert check.soak(tmp_path, minutes=0, states_max=10**6) == 0
    out = capsys.readouterr().out
    assert "goes on" in out
    assert "early-shrink" in out
    assert check.soak(tmp_path, minutes=None, states_max=10**6) == 0
    first = capsys.readouterr().out
    assert first.count(", all, ") == 2
    assert check.soak(tmp_path, minutes=None, states_max=10**6) == 0
    again = capsys.readouterr().out
    assert [line for line in again.splitlines() if ", all, " in line] == [
        line.rpartition("\r")[2] for line in first.splitlines() if ", all, " in line
    ]


def test_the_command_prints_what_it_found(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["modelcheck", "--broken", "early-shrink"])
    assert main() == 0
    out = capsys.readouterr().out
    assert f"  {LOST}" in out
    assert "  1. a" in out
    monkeypatch.setattr("sys.argv", ["modelcheck", "--replicas", "2", "--epochs", "2"])
    assert main() == 0
    assert "all states found" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["modelcheck", "--replicas", "2", "--states", "5"])
    assert main() == 1
    assert "stopped before" in capsys.readouterr().out


def test_names_suffice_for_every_bound():
    assert all(bounds.replicas <= len(NAMES) for bounds in check.LADDER)

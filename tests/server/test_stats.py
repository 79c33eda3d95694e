"""STAT: what a group's name and argument may be."""

from __future__ import annotations

from typing import Any

import pytest

from dcp.server.report.stats import Rows, Stats
from support.memory_node import START_NS, MemoryNode
from vbucket.engine.leadership import set_leader_epoch
from vbucket.engine.partition import VbState
from vbucket.model.ids import NUM_VBUCKETS

OTHER_PARTS = ("about", "ports", "hub", "connections", "merging", "scrubbing", "health", "prefixes")


def ask(request: bytes, *, fenced: int | None = None) -> Rows | None:
    not_asked: Any = None
    engine = MemoryNode(partitions=NUM_VBUCKETS).engine
    if fenced is not None:
        engine.partitions[fenced].state = VbState.FENCED
    stats = Stats(engine=engine, **dict.fromkeys(OTHER_PARTS, not_asked))
    return stats.rows(request)


@pytest.mark.parametrize("argument", [b"1024", b"-1", b"\xc2\xb2", b"1 2", b"9" * 5000, b" 1"])
@pytest.mark.parametrize("group", [b"vbucket-seqno", b"failovers"])
def test_an_argument_that_is_no_partition_has_no_statistics(group: bytes, argument: bytes) -> None:
    assert ask(group + b" " + argument) is None


@pytest.mark.parametrize(
    "argument", [b"", b"1", b"1024 1", b"1 -1", b"1 %d" % 2**64, b"1 " + b"9" * 5000, b"1 1 1"]
)
def test_an_argument_that_is_no_moment_has_no_statistics(argument: bytes) -> None:
    assert ask(b"seqno-at " + argument) is None


def test_version_log_of_one_partition_has_all_versions() -> None:
    not_asked: Any = None
    engine = MemoryNode().engine
    for _ in range(30):
        engine.keyspace.branch(3, 0)
    set_leader_epoch(engine, 3, 7)
    engine.keyspace.branch(3, 0)
    set_leader_epoch(engine, 3, 9)
    log = engine.partitions[3].failover.entries
    stats = Stats(engine=engine, **dict.fromkeys(OTHER_PARTS, not_asked))
    rows = dict(stats.rows(b"version-log 3") or ())
    assert (rows["vb_3:leader_epoch"], rows["vb_3:num_entries"]) == ("9", "32")
    found = [
        tuple(int(rows[f"vb_3:{index}:{what}"]) for what in ("id", "seq", "epoch"))
        for index in range(32)
    ]
    assert found == list(log)
    assert found[0][2] == 7
    shown = dict(stats.rows(b"failovers 3") or ())
    assert shown["vb_3:num_entries"] == "25"
    assert len(shown) == 1 + 2 * 25
    for argument in (b"", b" 1024", b" x", b" 1 1"):
        assert stats.rows(b"version-log" + argument) is None


def test_a_partition_and_a_moment_have() -> None:
    assert len(ask(b"vbucket-seqno 1023") or ()) == 11
    assert len(ask(b"vbucket-seqno") or ()) == 11 * 1024
    assert ask(b"seqno-at 1023 %d" % START_NS) is not None


def test_clients_know_a_fenced_partition_as_active() -> None:
    states = dict(ask(b"vbucket", fenced=7) or ())
    assert set(states.values()) == {"active"}
    assert len(states) == NUM_VBUCKETS


@pytest.mark.parametrize("argument", [b"", b"1024", b"-1", b"x 1"])
def test_takeover_statistics_are_of_one_partition(argument: bytes) -> None:
    assert ask(b"dcp-vbtakeover " + argument) is None

"""Clusters that move copies mend in time what a copy can prove."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dcp.core import scrub_turns
from sim import last_damage
from sim.facts import Damaged
from sim.node import SingleNode
from sim.run import Options, replay_command, run_seed
from support.stored_bytes import pack_mutation
from vbucket.store.records import BY_SEQNO_TABLE

OF_FOUR = Options(nodes=4)
DAMAGED_AGAIN, MET_BY_A_MERGE = 20079, 20035
"""A block that a copy has mended some seconds before; one that a merge meets first."""


@pytest.mark.parametrize("is_new", [True, False])
def test_a_block_that_is_damaged_again_is_mended_in_time(
    monkeypatch: pytest.MonkeyPatch, *, is_new: bool
) -> None:
    if not is_new:  # then it waits until copies may be asked again for the damage before
        monkeypatch.setattr(scrub_turns, "_since", lambda row: row.name)
    report = run_seed(DAMAGED_AGAIN, OF_FOUR)
    assert report.checks == (() if is_new else ("damages",)), replay_command(DAMAGED_AGAIN, OF_FOUR)


def test_a_copy_that_was_filled_later_proves_nothing() -> None:
    def versions(*links: int) -> list[bytes]:
        return [
            pack_mutation(vb_id=0, key=b"\0k", value=b"", cas=1, seqno=9, rev_seqno=1, epoch=1,
                          prev_seqno=link)
            for link in links
        ]  # fmt: skip

    assert last_damage.prove(versions(3, 4, 5), versions(0, 0, 5))
    assert last_damage.prove(versions(0, 4), versions(0, 4))
    assert not last_damage.prove(versions(0, 4), versions(3, 4))
    assert not last_damage.prove(versions(3, 4, 5), versions(3, 0, 5))
    assert not last_damage.prove(versions(3), versions(3, 4))


def test_what_a_merge_meets_first_is_named() -> None:
    assert run_seed(MET_BY_A_MERGE, OF_FOUR).violations == []


def test_only_copies_that_can_prove_it_all_the_time_count(monkeypatch: pytest.MonkeyPatch) -> None:
    node = SingleNode.__new__(SingleNode)
    stage: Any = SimpleNamespace(machines=[SimpleNamespace(name="n1", node=node)])
    page = Damaged(0, "n1", BY_SEQNO_TABLE, b"\0\0" + bytes(8), "zeros")
    page.must_mend, page.provers = True, frozenset({"n2", "n3"})
    for now, must_mend in (({"n3", "n4"}, True), ({"n4"}, False), ({"n3"}, False)):
        monkeypatch.setattr(last_damage, "_provers", lambda *_, now=now: frozenset(now))
        last_damage.look_at(stage, page)
        assert page.must_mend is must_mend
    page.provers, page.must_mend = None, True
    last_damage.look_at(stage, page)
    assert page.must_mend, "the node itself can"

"""Clusters that move copies mend in time what a copy can prove."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dcp.core import scrub_turns
from sim import last_damage
from sim.facts import Damaged
from sim.node import SingleNode
from sim.node_scrubber import NodeScrubber
from sim.run import Options, replay_command, run_seed
from support.stored_bytes import pack_mutation
from vbucket.check.finding import Kind
from vbucket.check.scrub import AREAS, Damage, ScrubReport
from vbucket.store.records import BY_KEY_TABLE, BY_SEQNO_TABLE

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


def test_a_page_damaged_again_is_named_while_it_is_listed() -> None:
    """Its record was written anew, and the damage before is still listed: nothing new is told."""
    key = b"\0\0\x09x0"
    pages = [Damaged(0, "n1", BY_KEY_TABLE, key, "zeros") for _ in range(3)]
    pages[2].key = b"\0\0\x08x0"
    scrubber = NodeScrubber.__new__(NodeScrubber)
    scrub_turns.ScrubTurns.__init__(scrubber, 0.0)
    world: Any = SimpleNamespace(tell=lambda *_: None)
    host = SimpleNamespace(world=world, after=lambda *_: None)
    node: Any = SimpleNamespace(name="n1", host=host)
    env: Any = SimpleNamespace(current=lambda: pages[:1])
    scrubber._node, scrubber._env = node, env
    damage = Damage(str(Kind.PAGES), "data", "partition 0", "why", 0, None, ["x0", "x0"],
                    BY_KEY_TABLE, key)  # fmt: skip
    found = ScrubReport([len(AREAS), b""], 0, [list(damage)], 0.0, 0)
    nothing = found._replace(damages=[])
    for now_s, report, named in ((1.0, found, [True, False]), (2.0, nothing, [True, False]),
                                 (3.0, found, [True, True])):  # fmt: skip
        scrubber.read(report, [], 0, now_s, now_s)
        env.current = lambda: pages[1:]
        assert [bool(page.named) for page in pages] == [*named, False]

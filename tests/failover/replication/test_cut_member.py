"""What a node does when a leader asks it to draw a cut, and whom a leader asks."""

from __future__ import annotations

import pytest

from dcp.session.nodes.cut_command import CutAnswer
from dcp.stream.producer import Producer
from failover.replication.cuts.cut_leader import (
    IDLE_NS,
    SILENT_NS,
    CutEffect,
    CutLeader,
    Due,
    HangUp,
    LedCuts,
    Say,
)
from failover.replication.cuts.cut_member import LED_NS, CutMember
from failover.replication.effects import Dial
from failover.rules.cut import DRAW_NS_MAX, HOLD_NS_MAX, Ask
from support.copies import Copies, CopyNode, put
from vbucket.engine.cut import UNCOVERED, Cut

S = 1_000_000_000
T = 1 << 40 | 0xFFFF


def committed(node: CopyNode, vb_id: int) -> int:
    return node.engine.partitions[vb_id].committed_seqno


def drawn(monkeypatch: pytest.MonkeyPatch) -> tuple[Copies, CutMember, list[Cut]]:
    """Return three copies of which the master has drawn a cut, after one change."""
    copies = Copies("abc")
    copies.rest()
    cuts, told = copies.a.core.master.cuts, list[Cut]()
    put(copies, 0)
    follower = Producer(b"follower", copies.a.engine, cuts._hub, lambda: None)
    monkeypatch.setattr(follower, "begin_cut", told.append)
    cuts._hub.cutting[follower] = None
    ask = Ask("m1", 7, T, 40 * S)
    assert "its clock is" in cuts.draw(ask._replace(time=T * 2), 41 * S)
    assert cuts.asked_time == 0, "a node whose clock is off reserves nothing"
    assert "disk does not say" in cuts.draw(ask, 40 * S)
    assert cuts.asked_time == T
    cuts._engine.closed_max = 1 << 62
    assert cuts.draw(ask, 40 * S) == ""
    put(copies, 1)
    copies.a.commit()
    copies.move()
    for member in "bc":
        copies.nodes[member].commit()
    copies.move()
    return copies, cuts, told


def test_nothing_is_committed_until_all_have_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, cuts, told = drawn(monkeypatch)
    assert [committed(copies.a, vb_id) for vb_id in (0, 1)] == [0, 0]
    assert not cuts.complete(7, T + 1)
    assert cuts.complete(7, T)
    assert [committed(copies.a, vb_id) for vb_id in (0, 1)] == [1, 1]
    assert [(cut.time, cut.round, cut.seqnos[:2]) for cut in told] == [(T, 7, [1, 0])]
    assert cuts._engine.first_open_ns == T + 1
    assert not cuts.complete(7, T)


def test_a_leader_that_says_no_more_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, cuts, told = drawn(monkeypatch)
    cuts.tick(1)
    cuts.tick(HOLD_NS_MAX)
    assert committed(copies.a, 0) == 0
    cuts.tick(1 + HOLD_NS_MAX)
    assert committed(copies.a, 0) == 1
    assert not cuts.complete(7, T)
    assert told == []
    cuts.tick(1 + LED_NS)
    assert cuts.led_by == ""


def test_a_member_knows_whether_its_clock_kept_it_from_a_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, cuts, _ = drawn(monkeypatch)
    late = Ask("m1", 8, T + 1, 40 * S)
    assert cuts.draw(late, 40 * S)
    assert cuts.clock_fault == "", "something else did"
    assert cuts.draw(late, 43 * S) == cuts.clock_fault
    assert "3.0 s ahead" in cuts.clock_fault


def test_what_has_another_master_meanwhile_is_not_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, cuts, told = drawn(monkeypatch)
    copies.a.core.master.step_down(0, "epoch 2 has begun")
    assert cuts.complete(7, T)
    assert told[0].seqnos[:2] == [UNCOVERED, 0]


def answer(leader: CutLeader, member: str, now_ns: int, number: int = 0, **given: int) -> None:
    facts = {"offset_ns": 0, "first_open": 0, **given}
    leader.answered(member, number or leader.number, now_ns, has_drawn=True, **facts)


def test_a_leader_asks_again_who_has_answered() -> None:
    leader = CutLeader("m1", 7)
    assert leader.begin(["m2", "m3"], 0, 40 * S, 0)[1] == []
    assert leader.probes(0) == ["m2", "m3"], "their clocks are not known"
    for member in ("m2", "m3"):
        answer(leader, member, 1, offset_ns=9 * S, first_open=50 * S)
    assert leader.finish() == []
    ask, asked = leader.begin(["m2", "m3"], 2, 40 * S, 0)
    assert (ask.clock_ns, ask.time, asked) == (49 * S, 50 * S | 0xFFFF, ["m2", "m3"])
    answer(leader, "m2", 3, number=leader.number - 1)
    assert not leader.is_decided
    answer(leader, "m2", 3)
    assert leader.finish() == ["m2"], "the other one is not waited for"
    assert leader.begin(["m2", "m3"], 4, 40 * S, 0)[1] == ["m2"]
    answer(leader, "m3", 2 + DRAW_NS_MAX, number=leader.number - 1)
    leader.finish()
    assert "m3" in leader.begin(["m2", "m3"], 3 + DRAW_NS_MAX, 40 * S, 0)[1]
    leader.lost("m3")
    assert leader.finish() == []


def test_all_go_on_from_what_a_right_clock_has_closed() -> None:
    """Most clocks were ahead, and are right again. Whose clock is still ahead does not count."""
    leader = CutLeader("m1", 7)
    leader.begin(["m2", "m3"], 0, 40 * S, 0)
    leader.probes(0)
    answer(leader, "m2", 1, first_open=900 * S)
    answer(leader, "m3", 1, offset_ns=9 * S, first_open=990 * S)
    leader.finish()
    ask, _ = leader.begin(["m2", "m3"], 2, 40 * S, 0)
    assert (ask.clock_ns, ask.time) == (40 * S, 900 * S | 0xFFFF)


def named(effects: list[CutEffect]) -> list[tuple[str, str]]:
    """Return what a shell has to do, without the bytes."""
    found = []
    for effect in effects:
        name = type(effect).__name__
        if isinstance(effect, Say):
            name = f"say {effect.data[24]}"
        found.append((name, "" if isinstance(effect, Due) else effect.member))
    return found


def test_a_leader_keeps_connections_while_it_is_asked_for_cuts() -> None:
    """It dials all, asks for clocks first, ends who is silent, and all when nobody asks."""
    copies = Copies("a")
    copies.rest()
    core, hub = copies.a.core, copies.a.core.master.cuts._hub
    led = LedCuts(core, copies.a.engine, hub, "m1", 7)
    members, at_ns = {"m1", "m2", "m3"}, copies.now_ns
    assert led.draw(at_ns, at_ns, members) == [], "nobody asks"
    hub.cutting[Producer(b"follower", copies.a.engine, hub, lambda: None)] = None
    first = led.draw(at_ns, at_ns, members)
    assert named(first) == [("Dial", "m2"), ("Dial", "m3"), ("Due", "")]
    led.connected("m2")
    assert led.lost(at_ns, "m3") == []
    assert named(led.draw(at_ns, at_ns, members)) == [("say 0", "m2"), ("Due", "")]
    led.answered(at_ns, at_ns, "m2", CutAnswer(led._leader.number, at_ns, 0, ""))
    drawn = led.draw(at_ns, at_ns, members)
    assert named(drawn) == [("say 1", "m2"), ("Due", "")]
    assert led.draw(at_ns, at_ns, members) == [], "one after the other"
    done = led.answered(at_ns, at_ns, "m2", CutAnswer(led._leader.number, at_ns, 0, ""))
    assert named(done) == [("say 2", "m2")]
    led.draw(at_ns, at_ns, members)
    due = next(each for each in drawn if isinstance(each, Due))
    assert led.late(at_ns, due.ask) == [], "it is an earlier one"
    late_ns = at_ns + SILENT_NS
    assert led._leader.ask is not None
    led.late(late_ns, led._leader.ask)
    later = named(led.draw(late_ns, late_ns, members))
    assert later[:3] == [("HangUp", "m2"), ("Dial", "m2"), ("Dial", "m3")]
    hub.cutting.clear()
    assert led.draw(late_ns, late_ns, members) == []
    idle_ns = late_ns + IDLE_NS
    assert led.draw(idle_ns, idle_ns, members) == [HangUp("m2"), HangUp("m3")]
    assert Dial("m2") not in led.draw(idle_ns, idle_ns, members)

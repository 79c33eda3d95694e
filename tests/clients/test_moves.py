"""Waves of moved partitions: when one ends, and what is said of it."""

from __future__ import annotations

from clients.consumer import placement
from clients.consumer.placement import Moves, moves_text
from support.waiting import until_so

A, B = ("a", 1), ("b", 2)


def test_the_node_that_got_most_comes_first():
    assert moves_text({1: A}) == "1 partition moved to a:1"
    assert moves_text({1: A, 2: B, 3: B}) == "2 partitions moved to b:2, 1 to a:1"


async def test_a_first_place_is_no_move_and_a_wave_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(placement, "QUIET_S", 0.01)
    moves = Moves()
    moves.placed(range(8), A)
    moves.finish()
    assert caplog.messages == []
    for vb_id in range(8):  # one after the other, in less time than a wave needs to end
        moves.placed([vb_id], B)
    await until_so(lambda: bool(caplog.messages))
    assert caplog.messages == ["8 partitions moved to b:2"]
    moves.placed([3], A)
    moves.placed([3], B)
    moves.finish()
    assert caplog.messages[1:] == ["1 partition moved to b:2"]


async def test_a_wave_without_an_end_is_told_after_a_while(monkeypatch, caplog):
    monkeypatch.setattr(placement, "QUIET_S", 60.0)
    monkeypatch.setattr(placement, "WAVE_S_MAX", 0.0)
    moves = Moves()
    moves.placed([1], A)
    moves.placed([1], B)
    await until_so(lambda: bool(caplog.messages))
    assert caplog.messages == ["1 partition moved to b:2"]

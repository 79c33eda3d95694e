"""The time line of a cluster: what a node sees happen, in lines that people can read."""

from __future__ import annotations

import pytest

from dcp.server.cluster.timeline import EVENTS_KEPT, GOES_ON_S, Timeline
from support.cluster_model import ModelCluster


class Looked:
    """A cluster of three, and the time line of its first node."""

    def __init__(self) -> None:
        self.cluster = ModelCluster("abc", partitions=4).start()
        self.cluster.run(3.0)
        self.timeline = Timeline(self.cluster.nodes["a"].session.view)
        self.look()

    def look(self, now_s: float | None = None) -> None:
        self.timeline.look(self.cluster.time.now_ns / 1e9 if now_s is None else now_s)

    def run(self, seconds: float) -> None:
        """Let time pass, with a look every half second."""
        for _ in range(round(seconds * 2)):
            self.cluster.run(0.5)
            self.look()

    def kinds(self) -> list[str]:
        return [event.kind for event in self.timeline.events()]

    def what(self, kind: str) -> list[str]:
        return [event.what for event in self.timeline.events() if event.kind == kind]


@pytest.fixture
def looked() -> Looked:
    return Looked()


def test_nothing_happens_in_a_cluster_at_rest(looked: Looked) -> None:
    looked.run(5)
    assert looked.kinds() == []


def test_a_death_is_told_with_its_elections_and_the_return(looked: Looked) -> None:
    looked.cluster.nodes["c"].kill()
    looked.run(20)
    assert looked.what("down") == ["node c is down"]
    assert any("node c left the in-sync sets of" in what for what in looked.what("left"))
    elected = looked.what("elected")
    assert elected
    assert all("; before it was c" in what for what in elected)
    assert looked.what("unclean") == looked.what("moved") == []
    looked.cluster.nodes["c"].start()
    looked.run(20)
    assert looked.what("up") == ["node c is up"]
    assert any("node c joined the in-sync sets of" in what for what in looked.what("joined"))


def test_what_goes_on_is_one_event_and_the_newest_are_kept(looked: Looked) -> None:
    view = looked.cluster.nodes["a"].session.view
    alive = dict(view.alive)

    def flap(now_s: float) -> None:
        view.alive = {} if view.alive else alive
        view.revision += 1
        looked.look(now_s)

    flap(1000.0)
    down = [event.at for event in looked.timeline.events() if event.kind == "down"]
    assert down == [1000.0] * 3
    flap(1001.0)
    flap(1000.0 + GOES_ON_S)
    assert len(looked.what("down")) == 3  # the same three, a moment later
    for turn in range(EVENTS_KEPT):
        flap(2000.0 + 100 * turn)
    assert len(looked.timeline.events()) == EVENTS_KEPT

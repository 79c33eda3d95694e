"""Why writes are refused, and who is told."""

from __future__ import annotations

from typing import Any

from dcp.server.observe.meter import REFUSAL_KINDS
from dcp.server.storage.health import LOG_FULL_TEXT, READ_ONLY_TEXT, Health, Pressure
from support.memory_node import MemoryNode
from vbucket.engine.partition import Hold


class Told:
    """A health, what it logged, and how often waiting writers were woken."""

    def __init__(self) -> None:
        self.engine = MemoryNode().engine
        self.said: list[str] = []
        self.woken = 0
        log: Any = self
        self.health = Health(self.engine, log, let_writers_go_on=self.wake)

    def say(self, event: str, **_: object) -> None:
        self.said.append(event)

    error = info = say

    def wake(self) -> None:
        self.woken += 1

    def refusals(self) -> tuple[str, str, str]:
        return self.health.refusal_kind, self.health.write_refusal, self.engine.write_refusal


def test_a_full_log_is_told_until_it_has_room() -> None:
    told = Told()
    assert told.refusals() == ("", "", "")
    told.health.log_full("no space left")
    assert told.refusals() == ("log_full", "no space left", LOG_FULL_TEXT)
    told.health.log_full("")
    assert told.refusals() == ("", "", "")
    assert told.said == ["log full", "log has room again"]


def test_node_beside_an_older_metadata_store_is_not_ready() -> None:
    health = Told().health
    health.store_is_older(3, 50.0, serves=True)
    assert health.older_store == (3, 50.0, True)
    assert health.unready_kind == "", "what it masters is answered here"
    health.store_is_older(2, 60.0, serves=False)
    assert health.older_store.since_s == 50.0, "since it knew first"
    assert (health.unready_kind, health.refusal_kind) == ("metadata_store_older", "")
    health.store_is_older(0, 70.0, serves=False)
    assert health.unready_kind == ""
    health.store_is_older(1, 80.0, serves=False)
    assert health.older_store.since_s == 80.0


def test_a_read_only_start_is_said_once() -> None:
    told = Told()
    told.health.read_only("")
    for _ in range(3):
        told.health.read_only("no space left")
    assert told.refusals() == ("read_only", "no space left", READ_ONLY_TEXT)
    told.health.read_only("")
    assert told.refusals() == ("", "", "")
    assert told.said == ["started read-only", "the disk has room again, writes are taken"]


def test_waiting_writers_go_on_with_room_or_without_hope_of_it() -> None:
    told = Told()
    told.health.pressure_changed(Pressure.WAITING, "")
    told.health.pressure_changed(Pressure.ROOM, "")
    assert (told.woken, told.said) == (1, [])
    told.engine.refuse_writes("the store is behind", Hold.STORE_BEHIND)
    told.health.pressure_changed(Pressure.REFUSED, "the store is behind")
    assert told.refusals()[:2] == ("store_behind", "the store is behind")
    told.engine.refuse_writes("", Hold.STORE_BEHIND)
    told.health.pressure_changed(Pressure.ROOM, "")
    assert (told.woken, told.said) == (3, ["writes refused", "writes are taken again"])
    told.health.pressure_changed(Pressure.WAITING, "")
    told.health.pressure_changed(Pressure.ROOM, "")
    assert told.said == ["writes refused", "writes are taken again"], "nothing was refused again"


def test_every_kind_of_refusal_has_a_metric() -> None:
    told = Told()
    found = set()
    for change in (told.health.enrolling, told.health.log_full, told.health.read_only):
        change("why")
        found.add(told.health.refusal_kind)
    assert found | {"store_behind"} == set(REFUSAL_KINDS)

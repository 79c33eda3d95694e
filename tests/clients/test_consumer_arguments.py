"""Every argument of a Consumer is checked when it is given: no connection, no attempt, is made."""

from __future__ import annotations

import dataclasses
import re
from datetime import datetime
from typing import Any

import pytest

from clients.consumer.consumer import Consumer
from clients.consumer.extensions import KEY_PREFIX, KEY_PREFIXES_MAX, Extensions
from clients.consumer.group import Group
from clients.consumer.options import ConsumerArguments, ConsumerOptions, FollowArguments
from clients.event import Mutation
from clients.kv.client import KvClient
from clients.position import Position
from dcp.session import controls
from support.server import DcpdProcess


@pytest.fixture
def server(tmp_path):
    with DcpdProcess(tmp_path / "data") as process:
        yield process


SERVER = "127.0.0.1:1"
NAN, INF = float("nan"), float("inf")
BAD: dict[str, list[tuple[Any, str]]] = {
    "server": [(7, "HOST:PORT"), (b"host:1", "HOST:PORT"), ("host:0", "port")],
    "name": [("", "1 to 200 bytes"), ("x" * 201, "1 to 200 bytes"), (b"name", "text")],
    "vbuckets": [
        ([], "empty"),
        ([-1], "no partition -1"),
        ([1024], "no partition 1024"),
        (["1"], "'1'"),
        ([True], "True"),
        ([1.0], "1.0"),
    ],
    "group": [(Group(2, 2), "no member 2"), (3, "Group(member, size)")],
    "start": [
        ({67: 2**64}, "seqno from 0 to"),
        ({67: 2**64 - 1}, "seqno from 0 to"),
        ({67: -1}, "seqno from 0 to"),
        ({1024: 5}, "no partition 1024"),
        ({-1: 5}, "no partition -1"),
        ({"67": 5}, "no partition '67'"),
        ({67: True}, "True"),
        ({67: 1.5}, "1.5"),
        ({67: None}, "None"),
        ("tomorrow", "tomorrow"),
        (0, "start 0"),
        (datetime(2026, 1, 1), "time zone"),  # noqa: DTZ001 - that is what is wrong with it
        ({67: Position(seqno=2**64)}, "this Position cannot be"),
        ({67: Position(seqno=-1)}, "this Position cannot be"),
        ({67: Position(seqno=5, snap_start=6, snap_end=7)}, "this Position cannot be"),
        ({67: Position(versions=((-1, 0),))}, "this Position cannot be"),
    ],
    "store": [("checkpoint", "load and save")],
    "save_every_s": [(0, "above 0"), (-1, "above 0"), (NAN, "number"), ("5", "number")],
    "until_now": [("no", "True or False"), (1, "True or False")],
    "held": [("rows", "must be an object of a class of yours")],
    "on_rollback": [("sometimes", "sometimes"), (None, "None")],
    "collections": [
        ([], "empty"),
        ([-1], "-1"),
        ([2**32], "no collection"),
        ([b"a.b"], "no collection"),
        (["a.b", None], "None"),
        ([""], "no collection"),
    ],
    "key_prefixes": [
        ("", "empty prefix"),
        ([b"a", b""], "empty prefix"),
        (b"x" * 251, "251 bytes"),
        ("\u00e9" * 126, "252 bytes"),
        ([7], "neither text nor bytes"),
    ],
    "history": [("yes", "True or False")],
    "previous_values": [(None, "True or False")],
    "xattrs": [(0, "True or False")],
    "from_replicas": [("near", "True or False")],
    "cuts": [("yes", "True or False")],
    "rack": [("r1", "goes with from_replicas"), (7, "a text")],
    "events_per_s": [(0, "above 0"), (-1, "above 0"), (NAN, "above 0"), ("9", "above 0")],
    "buffer_bytes": [(0, "1 to"), (-5, "1 to"), (2**32, "1 to"), (1.5, "1 to")],
    "noop_interval_s": [(0, "at least 0.1"), (86_400, "at most 86399"), (INF, "number")],
    "validate": [("true", "True or False")],
    "connect_timeout_s": [(0, "above 0"), (-1, "above 0"), (None, "number")],
    "give_up_after_s": [(-1, "at least 0"), (NAN, "number")],
    "stall_s": [(0, "above 0"), ("60", "number")],
}


OPTIONS = {field.name: field for field in dataclasses.fields(ConsumerOptions)}


def test_every_option_has_a_case_and_is_a_typed_keyword_argument() -> None:
    assert set(BAD) == {"server", *OPTIONS}
    assert {name: field.type for name, field in OPTIONS.items()} == {
        name: annotation.__forward_arg__
        for owner in (FollowArguments, ConsumerArguments)
        for name, annotation in owner.__annotations__.items()
    }


def test_options_are_given_together_or_one_by_one() -> None:
    options = ConsumerOptions(name="n", key_prefixes="a", collections=iter(["s.c"]))
    consumer = Consumer(SERVER, options, until_now=True)
    assert consumer.options == ConsumerOptions(
        name="n", key_prefixes=[b"a"], collections="s.c", until_now=True
    )
    assert not options.until_now, "options that were given stay as they are"
    assert hash(options) == hash(ConsumerOptions(name="n", key_prefixes="a", collections=["s.c"]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.until_now = True  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword argument 'until'"):
        Consumer(SERVER, until=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value", "why"), [(name, *case) for name, cases in BAD.items() for case in cases]
)
def test_a_bad_argument_is_a_value_error_at_once(name: str, value: object, why: str) -> None:
    arguments: dict[str, Any] = {"server": SERVER, name: value}
    if name == "save_every_s":
        arguments["store"] = Store()
    with pytest.raises(ValueError, match=re.escape(why)):
        Consumer(**arguments)
    if name != "server":
        del arguments["server"]
        with pytest.raises(ValueError, match=re.escape(why)):
            ConsumerOptions(**arguments)


class Store:
    def load(self) -> None:
        return None

    def save(self, _checkpoint: object) -> None:
        pass


def test_good_arguments_at_their_limits_are_taken() -> None:
    consumer = Consumer(
        SERVER, name="x" * 200, vbuckets=[0, 1023, 0], start={0: 0, 1023: 2**64 - 2},
        key_prefixes=[b"x" * 250], collections=[0, 2**32 - 1, "a.b"], events_per_s=0.5,
        buffer_bytes=2**32 - 1, noop_interval_s=0.1, give_up_after_s=0, stall_s=0.1,
    )  # fmt: skip
    assert consumer.name == "x" * 200


# -- more key prefixes than a request may list -----------------------------------------------------


def test_the_limit_is_that_of_the_server() -> None:
    assert KEY_PREFIXES_MAX == controls.KEY_PREFIXES_MAX


@pytest.mark.parametrize(("count", "is_asked"), [(1, True), (64, True), (65, False), (500, False)])
def test_too_many_prefixes_are_filtered_in_the_client(count: int, is_asked: bool) -> None:
    prefixes = tuple(b"%d:" % n for n in range(count))
    extensions = Extensions(ConsumerOptions(key_prefixes=prefixes), has_collections=True)
    assert (KEY_PREFIX in extensions.controls()) == is_asked
    for key in extensions.controls():
        extensions.answered(key, 0)
    assert not extensions.must_wait(Position())
    assert ("key_prefixes" in extensions.request_document()) == is_asked
    assert extensions.leaves_out_here != is_asked


async def test_65_prefixes_give_the_same_documents_as_the_server_would(server) -> None:
    wanted = [f"{n:03d}:k" for n in range(65)]
    async with KvClient.connect(server.address) as kv:
        await kv.set_many((key, b"v") for key in (*wanted, *(f"other-{n}" for n in range(200))))
    prefixes = [f"{n:03d}:" for n in range(65)]
    async with Consumer(server.address, key_prefixes=prefixes, until_now=True) as consumer:
        found = [event.key.decode() async for event in consumer if isinstance(event, Mutation)]
    assert sorted(found) == wanted


async def test_a_start_above_all_is_rolled_back_and_does_not_reconnect(server) -> None:
    start = {67: 2**64 - 2}
    async with Consumer(server.address, vbuckets=[67], start=start, until_now=True) as consumer:
        events = [event async for event in consumer]
    assert not [event for event in events if isinstance(event, Mutation)]
    assert consumer.metrics.connections_lost == 0

"""Official clients of other projects while nodes of a cluster are killed, join and are moved to.

The Python and Node.js SDKs write with and without durability levels, and java-dcp-client follows
with rollback mitigation on. All see the same story.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.collection import Collection
from couchbase.durability import Durability, ServerDurability
from couchbase.exceptions import CouchbaseException, ExceptionMap
from couchbase.options import (
    ClusterOptions,
    ClusterTimeoutOptions,
    DeltaValue,
    IncrementOptions,
    SignedInt64,
    UpsertOptions,
)

from clients.address import parse_address
from clients.errors import NotFoundError
from clients.kv.sync_client import SyncKv
from support.server import ClusterProcesses
from support.waiting import until

PATIENCE: Final = timedelta(seconds=8)
"""What the SDK waits for an answer: a failover takes less, on a busy machine too."""
COUNTERS: Final = 4
"""Counters of each writer."""


class Outcome(Enum):
    """What an SDK says of a write."""

    ANSWERED = auto()
    AMBIGUOUS = auto()
    NOT_DONE = auto()


_OUTCOMES: Final = {
    ExceptionMap.AmbiguousTimeoutException.value: Outcome.AMBIGUOUS,
    ExceptionMap.RequestCanceledException.value: Outcome.AMBIGUOUS,
    ExceptionMap.DurabilitySyncWriteAmbiguousException.value: Outcome.AMBIGUOUS,
    ExceptionMap.UnAmbiguousTimeoutException.value: Outcome.NOT_DONE,
}
"""The code of an error counts, not its class: if the SDK has retried an operation after a temporary
failure, it raises TemporaryFailException for ambiguous errors, too."""


class SdkTold(msgspec.Struct):
    """What became of the writes. Turns are numbers from 0 on that the documents have as values."""

    answered: dict[str, int] = msgspec.field(default_factory=dict)
    """Document -> the last turn that was answered."""
    tried: dict[str, int] = msgspec.field(default_factory=dict)
    """Document -> the last turn."""
    not_done: list[tuple[str, int]] = msgspec.field(default_factory=list)
    """What the SDK says that it has not sent (key and turn)."""
    ambiguous: list[tuple[str, int]] = msgspec.field(default_factory=list)
    """What may have happened."""
    unexpected: list[str] = msgspec.field(default_factory=list)
    """All other errors."""
    counted: dict[str, int] = msgspec.field(default_factory=dict)
    """Counter -> how often counting was answered."""
    maybe_counted: dict[str, int] = msgspec.field(default_factory=dict)
    """Counter -> how often counting may have happened."""
    durable: int = 0
    """Answered writes with a durability level."""
    plain: int = 0
    """Answered writes without."""
    read_from_replicas: tuple[str, list[Any], Any] = ("", [], None)
    """A document, what all its copies have, and what any replica has. Only the Node.js SDK fills it
    in: the test reads with the Python SDK itself."""

    def wrong(self, found: dict[str, Any]) -> list[str]:
        """Return what is lost, was done twice, or is there although it was not sent.

        `found`: the values in the cluster, documents as objects and counters as numbers.
        """
        wrong = list(self.unexpected)
        not_done, ambiguous = set(self.not_done), set(self.ambiguous)
        for key, turn in self.answered.items():
            there = found.get(key, {"turn": -1})["turn"]
            if (key, there) in not_done:
                wrong.append(f"{key}: turn {there} is there, which was not sent")
            elif there != turn and not (there > turn and (key, there) in ambiguous):
                wrong.append(f"{key}: turn {turn} was answered, {there} is there")
        for key, count in self.counted.items():
            there, most = found.get(key, 0), count + self.maybe_counted.get(key, 0)
            if not count <= there <= most:
                wrong.append(f"{key}: {there}, and {count} to {most} were counted")
        return wrong

    def count_answered(self, counter: str, value: int) -> None:
        """Note an answer to counting: the counter's value."""
        count = self.counted.get(counter, 0) + 1
        self.counted[counter] = count
        if not count <= value <= count + self.maybe_counted.get(counter, 0):
            self.unexpected.append(f"{counter}: {value} after {count} answers")

    def keys(self) -> set[str]:
        """Return the keys of documents and counters that may be there."""
        return self.tried.keys() | self.counted.keys() | self.maybe_counted.keys()


def connected(address: str) -> Cluster:
    """Return the SDK's connection to a cluster that one node's address leads to."""
    timeouts = ClusterTimeoutOptions(kv_timeout=PATIENCE, kv_durable_timeout=PATIENCE)
    login = PasswordAuthenticator("guest", "guest")
    cluster = Cluster(f"couchbase://{address}", ClusterOptions(login, timeout_options=timeouts))
    cluster.wait_until_ready(PATIENCE)
    return cluster


class SdkLoad:
    """Writers, half of them with a durability level, until `stop`."""

    def __init__(self, collection: Collection, writers: int, documents: int) -> None:
        """`documents`: how many each writer has; it writes them in turn."""
        self.told = SdkTold()
        self._collection = collection
        self._documents = documents
        self._is_over = False
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._write, args=(number,)) for number in range(writers)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> SdkTold:
        """End the writers; return what they were told."""
        self._is_over = True
        for thread in self._threads:
            thread.join()
        return self.told

    def _write(self, number: int) -> None:
        level = ServerDurability(Durability.MAJORITY) if number % 2 else None
        durable = {} if level is None else {"durability": level}
        upserting = UpsertOptions(**durable)
        counting = IncrementOptions(delta=DeltaValue(1), initial=SignedInt64(1), **durable)
        upsert, increment = self._collection.upsert, self._collection.binary().increment
        told, turn = self.told, 0
        while not self._is_over:
            key = f"python-{number}-{turn % self._documents}"
            counter = f"python-count-{number}-{turn % COUNTERS}"
            told.tried[key] = turn
            stored = partial(upsert, key, {"turn": turn}, upserting)
            if self._outcome(stored, key, turn)[0] is Outcome.ANSWERED:
                told.answered[key] = turn
                self._tally(durable)
            outcome, result = self._outcome(partial(increment, counter, counting), counter, turn)
            if outcome is Outcome.ANSWERED:
                told.count_answered(counter, result.content)
                self._tally(durable)
            elif outcome is Outcome.AMBIGUOUS:
                told.maybe_counted[counter] = told.maybe_counted.get(counter, 0) + 1
            turn += 1

    def _tally(self, durable: dict[str, Any]) -> None:
        with self._lock:
            self.told.durable += bool(durable)
            self.told.plain += not durable

    def _outcome(self, operation: Callable[[], Any], key: str, turn: int) -> tuple[Outcome, Any]:
        """Return what became of an operation, and its result; an error is told."""
        told = self.told
        try:
            return Outcome.ANSWERED, operation()
        except CouchbaseException as error:
            outcome = _OUTCOMES.get(error.error_code, Outcome.NOT_DONE)
            if outcome is Outcome.AMBIGUOUS:
                told.ambiguous.append((key, turn))
            elif error.error_code in _OUTCOMES:
                told.not_done.append((key, turn))  # the SDK kept it, and did not send it
            else:
                told.unexpected.append(f"{key}: {error!r}")
            return outcome, None


pytestmark = [pytest.mark.foreign, pytest.mark.crash]

WRITERS: Final = 6
"""Of each SDK; half of them use a durability level."""
DOCUMENTS: Final = 250
"""Of each writer."""
WRITES: Final = 2_000
"""Writes of each kind, with and without a durability level, that the Python SDK has got an answer
to at the end, at least. The test waits for them."""
NODE_WRITES: Final = 1_000
"""The same of the Node.js SDK, which nobody waits for: it writes about as many meanwhile."""
KILLED: Final = "bcd"
COPIES: Final = 3
OPEN_MAX: Final = WRITERS * len(KILLED)
"""Writes of an SDK that may be ambiguous, and as many that may not have been sent: each writer has
one under way when a node dies. It is about two in all."""
END_S: Final = 60
FOREIGN: Final = Path(__file__).parents[1] / "foreign"
VENV: Final = Path(__file__).parents[2] / ".venv"


class Peer:
    """A program of another language. It ends when its input does."""

    def __init__(self, command: list[str], **environment: str) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | environment,
        )  # fmt: skip

    def end(self) -> str:
        """End the input; return what it printed."""
        output, _ = self.process.communicate(timeout=END_S)
        assert self.process.returncode == 0
        return output

    def ask(self) -> list[str]:
        """Send a line; return the lines of the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        lines = []
        while (line := self.process.stdout.readline()) != ".\n":
            assert line, "the program has ended"
            lines.append(line.rstrip("\n"))
        return lines

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.communicate()


def node_writers(address: str) -> Peer | None:
    """Start writers with the Node.js SDK; None: it is not installed."""
    node = shutil.which("node")
    packages = VENV / "npm" / "node_modules"
    if node is None or not (packages / "couchbase").is_dir():
        return None
    script = str(FOREIGN / "npm" / "couchbase_load.cjs")
    return Peer([node, script, address, str(WRITERS), str(DOCUMENTS)], NODE_PATH=str(packages))


def java_follower(address: str) -> Peer | None:
    """Start java-dcp-client; None: it is not installed."""
    java, jars = shutil.which("java"), VENV / "java"
    if java is None or shutil.which("javac") is None or not list(jars.glob("*.jar")):
        return None
    source = str(FOREIGN / "java" / "DcpFollower.java")
    return Peer([java, "-Xmx256m", "-cp", f"{jars}/*", source, address])


class Story(NamedTuple):
    """What became of it."""

    python: SdkTold
    node: SdkTold | None
    """None: the Node.js SDK is not installed."""
    found: dict[str, Any]
    """What is in the cluster at the end."""
    followed: list[str] | None
    """What java-dcp-client has at the end; None: it is not installed."""
    replicas: list[Any]
    any_replica: Any


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with ExitStack() as stack:
        nodes = stack.enter_context(ClusterProcesses(tmp_path_factory.mktemp("nodes")))
        nodes.until_in_sync(COPIES)
        nodes.until_even()
        address = nodes.nodes["a"].address
        node, java = node_writers(address), java_follower(address)
        for peer in (node, java):
            if peer is not None:
                stack.callback(peer.kill)
        if java is not None:
            java.ask()  # it has opened its streams
        cluster = connected(address)
        stack.callback(cluster.close)
        collection = cluster.bucket("default").default_collection()
        load = SdkLoad(collection, WRITERS, DOCUMENTS)
        stack.callback(load.stop)

        kill_and_start(nodes, KILLED[0], load.told)
        nodes.join("d")
        nodes.rebalance()
        for name in KILLED[1:]:
            kill_and_start(nodes, name, load.told)
        until(lambda: min(load.told.durable, load.told.plain) > WRITES)

        python = load.stop()
        by_node = None if node is None else msgspec.json.decode(node.end(), type=SdkTold)
        found = documents_of(address, python.keys() | (by_node.keys() if by_node else set()))
        key = next(iter(python.answered))
        has_java = None if java is None else followed(java, found)
        # Seconds after a node's start the SDK dials it again, and then reads its copies, too.
        until(lambda: len(list(collection.get_all_replicas(key))) == COPIES)
        yield Story(
            python, by_node, found, has_java,
            [one.content_as[dict] for one in collection.get_all_replicas(key)],
            collection.get_any_replica(key).content_as[dict],
        )  # fmt: skip


def kill_and_start(nodes: ClusterProcesses, name: str, told: SdkTold) -> None:
    """SIGKILL a node under load, go on without it, and start it again."""
    nodes.nodes[name].kill()
    nodes.until_no_master(name)
    before = told.durable + told.plain
    until(lambda: told.durable + told.plain > before + 200)
    nodes.nodes[name].start()
    nodes.until_in_sync(COPIES)


def documents_of(address: str, keys: set[str]) -> dict[str, Any]:
    """Return the values of those keys that are in the cluster."""
    found = {}
    with SyncKv(parse_address(address)) as kv:
        for key in keys:
            with contextlib.suppress(NotFoundError):
                found[key] = msgspec.json.decode(kv.get(key).value)
    return found


def followed(java: Peer, found: dict[str, Any]) -> list[str]:
    """Return what java-dcp-client has, once it has everything."""
    lines: list[str] = []

    def has_all() -> bool:
        lines[:] = java.ask()
        documents = [line.split("\t") for line in lines if not line.startswith("failed ")]
        return {key: msgspec.json.decode(value) for key, value in documents} == found

    try:
        until(has_all)
    except AssertionError:
        has = dict(line.split("\t") for line in lines if not line.startswith("failed "))
        differing = [
            key
            for key in has.keys() | found.keys()
            if key not in has or key not in found or msgspec.json.decode(has[key]) != found[key]
        ]
        told = [f"{key}: {has.get(key)}, not {found.get(key)}" for key in sorted(differing)[:5]]
        failures = [line for line in lines if line.startswith("failed ")]
        return [*failures, f"failed {len(differing)} of {len(found)} documents differ: {told}"]
    finally:
        java.end()
    return lines


def test_the_python_sdk_loses_nothing_and_does_nothing_twice(story: Story) -> None:
    assert story.python.wrong(story.found) == []
    assert min(story.python.durable, story.python.plain) > WRITES
    assert len(story.python.ambiguous) <= OPEN_MAX
    assert len(story.python.not_done) <= OPEN_MAX


def test_replicas_are_read(story: Story) -> None:
    assert story.replicas == [story.any_replica] * COPIES


def test_the_node_sdk_loses_nothing_and_does_nothing_twice(story: Story) -> None:
    if story.node is None:
        pytest.skip("the npm package couchbase is not installed; scripts/test does it with npm")
    assert story.node.wrong(story.found) == []
    assert min(story.node.durable, story.node.plain) > NODE_WRITES
    assert len(story.node.ambiguous) <= OPEN_MAX
    assert len(story.node.not_done) <= OPEN_MAX


def test_the_node_sdk_reads_replicas(story: Story) -> None:
    if story.node is None:
        pytest.skip("the npm package couchbase is not installed; scripts/test does it with npm")
    key, all_replicas, any_replica = story.node.read_from_replicas
    assert all_replicas == [story.found[key]] * COPIES
    assert any_replica == story.found[key]


def test_java_dcp_client_has_what_was_written(story: Story) -> None:
    if story.followed is None:
        pytest.skip("java-dcp-client is not installed; scripts/test does it with Maven")
    assert [line for line in story.followed if line.startswith("failed ")] == []

"""Processor time of replication: microseconds per SET on a master and on a replica.

    python -m benchmarks.replication
    python -m benchmarks.replication --profile master

It runs in one process without sockets: whole nodes on an in-memory log, real sessions, and the real
bytes of the links between them. It counts the processor time of each node apart, so the figures
hold on a busy machine. All partitions have one master. The output is one JSON document.

- alone            a SET on a node without replication, its answer included. Two other nodes work in
                   turn with it, because replicas push a master out of the processor's caches, too
- master_N         the same on the master of N replicas, until the answer has left
- more_N           master_N less alone
- replica_N        what one of N replicas spends on a SET, until it has acknowledged it
- rest_master, rest_replica   one second at rest with two replicas, in ms
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from benchmarks import workload
from benchmarks.cpu import NOW_NS, CoreNode, OpenDoor
from dcp.core.groups import GroupCycle, WriteGroup
from dcp.server.storage.memory_share import GC_THRESHOLDS
from dcp.session.access.rights import FULL_RIGHTS, Role
from dcp.session.answers.held_answers import HeldAnswers
from dcp.session.node_facts import Limits
from dcp.session.session import Session
from dcp.session.state import ClientLogin, SessionParts, SessionState
from failover.coordinator.cluster_session import ClusterSession, SessionEffect
from failover.coordinator.partition_choices import CoordinatorSettings
from failover.coordinator.records import (
    AliveRecord,
    ClusterKeys,
    KeyKind,
    MemberRecord,
    StoredPartition,
    encode_partition,
    encode_record,
)
from failover.metadata.metastore import KeyValue
from failover.replication.effects import Dial
from failover.replication.mastership import ReplicationSettings
from failover.replication.node import ReplicationCore
from failover.rules.replication_record import ReplicationRecord
from vbucket.engine.partition import VbState
from vbucket.model.ids import NUM_VBUCKETS

ROOT: Final = b"/benchmark/"
CONNECTIONS: Final = 8
PUMP_BYTES: Final = 1 << 20
TICK_NS: Final = 50_000_000
STARTED_NS: Final = 10_000_000_000
"""The monotonic clock at the start. It moves by ticks only."""


class Client:
    """One client's connection, as `dcp.server.net.connection` holds it."""

    def __init__(self, node: ReplicaNode) -> None:
        self._node = node
        self.state = SessionState(
            SessionParts.of(
                node.engine,
                node.hub,
                node,
                Limits(),
                replication=None if node.core is None else node.core.master,
            ),
            ClientLogin(OpenDoor(), peer_is_loopback=True),
        )
        self.session = Session(self.state)
        self._held = HeldAnswers(node.engine)
        self.answered_bytes = 0

    def receive(self, data: bytes) -> None:
        """Take what one read brought."""
        if self._node.core is not None:
            self._node.core.check_fence(self._node.now_ns)
        self.session.receive(data, NOW_NS)
        if self.state.login.question is not None:
            self.session.ask_logins(NOW_NS)
        if self.state.answers:
            self.answered_bytes += len(self._held.take(self.state, self._node.now_ns))

    def release(self) -> None:
        """Let the answers leave that may."""
        for batch in self._held.release():
            self.answered_bytes += len(batch.answers)
        self.state.is_full = False

    @property
    def is_waiting(self) -> bool:
        """Whether answers wait."""
        return bool(self._held.batches)


class ReplicaNode(CoreNode):
    """A node with the replication core; without one if `members` has this node only."""

    def __init__(self, folder: Path, member: str, members: list[str]) -> None:
        folder.mkdir(parents=True)
        super().__init__(folder)
        self.now_ns = STARTED_NS
        self.member = member
        self.seconds = 0.0
        self.profile: cProfile.Profile | None = None
        self.groups = GroupCycle(self.engine, self.hub, syncs_groups=True)
        self.clients: list[Client] = []
        self.core: ReplicationCore | None = None
        self._records = 0
        if len(members) > 1:
            session = ClusterSession(ROOT, member, 1, CoordinatorSettings())
            self.core = ReplicationCore(
                self.engine, self.store, self.groups, session, ReplicationSettings(),
                _MasterStays(), cluster="benchmark", now_ns=self.now_ns,
            )  # fmt: skip
            self._session = session

    def take_records(self, members: list[str], epoch: int) -> None:
        """Read records from the metadata store, as its watch brings them."""
        assert self.core is not None
        keys, self._records = ClusterKeys(ROOT), self._records + 1
        values: dict[bytes, bytes] = {}
        for name in members:
            alive = AliveRecord(member=name, incarnation=1)
            values[keys.of_member(KeyKind.ALIVE, name)] = encode_record(alive)
            known = MemberRecord(member=name, address=name)
            values[keys.of_member(KeyKind.MEMBER, name)] = encode_record(known)
        master = members[0] if epoch > 1 else None
        record = ReplicationRecord(tuple(members), frozenset(members), epoch, master)
        value = encode_partition(StoredPartition(record, "benchmark"))
        for vb_id in range(NUM_VBUCKETS):
            values[keys.of_partition(KeyKind.PARTITION, vb_id)] = value
        revision = self._records
        items = [KeyValue(key, value, 1, revision, revision) for key, value in values.items()]
        self.core.records_changed(self.now_ns, self._session.view.replace(items, revision))

    def connect(self) -> Client:
        """Open a connection that has no session yet."""
        client = Client(self)
        self.clients.append(client)
        return client

    def timed(self, step: Callable[[], Any]) -> Any:
        """Take a step; its processor time is this node's."""
        profile, began = self.profile, time.process_time()
        if profile is not None:
            profile.enable()
        result = step()
        if profile is not None:
            profile.disable()
        self.seconds += time.process_time() - began
        return result

    def write_groups(self) -> None:
        """Write and publish everything that is pending."""
        while (job := self.groups.next_job()) is not None:
            if isinstance(job, WriteGroup):
                if self.core is not None:
                    self.core.group_begun(self.now_ns, job.group)
                self.writer.append(job.group.number, job.group.payload)
                self.writer.sync()
            published = self.groups.done(job)
            if self.core is not None and published.group is not None:
                self.core.group_synced(self.now_ns, published.group)
        if self.core is None:
            self.release()

    def release(self) -> None:
        """Let the answers leave that may."""
        for client in self.clients:
            client.release()

    def forget_log(self) -> None:
        """Drop the log's bytes, which the benchmark does not read."""
        self.writer.rotate()
        device = self.writer.device
        for number in device.segments()[:-1]:
            device.delete(number)


class Link:
    """Bytes between a replica's link and the session of the master's node."""

    def __init__(self, master: ReplicaNode, replica: ReplicaNode) -> None:
        self.master, self.replica = master, replica
        self.served = Client(master)
        self.served.state.login.rights = FULL_RIGHTS.granted(Role.REPLICATE)
        assert replica.core is not None
        self.link = replica.core.replica.links[master.member]

    def up(self) -> bool:
        """Carry what the replica has to say."""
        data = self.replica.timed(self.link.bytes_to_send)
        if data:
            self.master.timed(lambda: self._heard(data))
        return bool(data)

    def _heard(self, data: bytes) -> None:
        feed = self.served.state.feed
        if feed is not None:
            feed.heard(self.master.now_ns)
        assert self.master.core is not None
        self.master.core.check_fence(self.master.now_ns)
        self.served.session.receive(data, NOW_NS)

    def down(self) -> bool:
        """Carry what the master has to say."""
        data = self.master.timed(self._pumped)
        if data:
            self.replica.timed(lambda: self.link.receive(data, self.replica.now_ns))
        return bool(data)

    def _pumped(self) -> bytes:
        state = self.served.state
        pieces: list[Any] = []
        if state.answers:
            pieces += state.answers
            state.answers.clear()
            state.wait_group, state.first_change = 0, -1
            if state.marks:
                state.marks.clear()
        if state.feed is not None and state.feed.has_output:
            pieces += state.feed.pump(PUMP_BYTES)
        return b"".join(pieces)


class Trio:
    """A master and its replicas."""

    def __init__(self, folder: Path, replicas: int) -> None:
        members = [f"n{number}" for number in range(replicas + 1 if replicas else 3)]
        self.nodes = [
            ReplicaNode(folder / name, name, members if replicas else [name]) for name in members
        ]
        self.master = self.nodes[0]
        self.links: list[Link] = []
        if replicas:
            for epoch in (1, 2):
                for node in self.nodes:
                    node.take_records(members, epoch)
                self.settle()
            self.rest(20)
        states = {part.state for part in self.master.engine.partitions}
        assert states == {VbState.ACTIVE}, f"the master serves: {states}"
        for node in self.nodes if not replicas else self.nodes[:1]:
            for _ in range(CONNECTIONS):
                client = node.connect()
                for frame in workload.session_frames():
                    client.receive(frame)

    def settle(self) -> None:
        """Carry bytes and groups until nothing moves."""
        is_moving = True
        while is_moving:
            for node in self.nodes:
                node.timed(node.write_groups)
            is_moving = sum(link.down() for link in self.links) > 0
            for node in self.nodes[1:]:
                node.timed(node.write_groups)
            is_moving = sum(link.up() for link in self.links) > 0 or is_moving
            for node in self.nodes:
                self._carry_out(node)

    def _carry_out(self, node: ReplicaNode) -> None:
        """Carry out the effects of a node; commits let answers leave."""
        core = node.core
        if core is None:
            return
        effects = node.timed(core.take_effects)
        if any(isinstance(effect, Dial) for effect in effects):
            self.links.append(Link(self.master, node))
        elif effects:
            node.timed(node.release)

    def rest(self, ticks: int) -> None:
        """Let time pass, 50 ms at a time."""
        for _ in range(ticks):
            for node in self.nodes:
                node.now_ns += TICK_NS
                if node.core is not None:
                    node.timed(lambda node=node: node.core.tick(node.now_ns))  # type: ignore[misc]
            for link in self.links:
                feed = link.served.state.feed
                if feed is not None:
                    self.master.timed(lambda feed=feed: feed.tick(self.master.now_ns))  # type: ignore[misc]
            self.settle()

    def write(self, batches: Iterable[bytes], per_group: int) -> None:
        """Pass batches of SETs to the connections in turn, one commit group for `per_group`."""
        master = self.master
        pending: list[bytes] = []

        def receive(node: ReplicaNode) -> None:
            for place, each in enumerate(pending):
                node.clients[place % CONNECTIONS].receive(each)

        for place, batch in enumerate(batches):
            pending.append(batch)
            if (place + 1) % per_group == 0:
                for node in self.nodes:
                    if node.clients:
                        node.timed(lambda node=node: receive(node))  # type: ignore[misc]
                pending.clear()
                self.settle()
        assert not pending, "whole groups"
        assert not any(client.is_waiting for client in master.clients), "all are answered"

    def start_counting(self) -> None:
        """Set the counted time of all nodes back."""
        for node in self.nodes:
            node.seconds = 0.0


class _MasterStays:
    """The shell of `ReplicationCore`: nothing is written, and nobody is deposed."""

    def now_ns(self) -> int:
        return STARTED_NS

    def take(self, effect: SessionEffect) -> None:
        raise AssertionError(f"nothing is to be done: {effect}")

    def guarded(self, step: Callable[[], None]) -> None:
        step()

    def ask_store(self, effects: Iterable[SessionEffect]) -> None:
        assert not list(effects), "all copies are in sync: no record changes"

    def depose(self, _vb_ids: tuple[int, ...], _why: str) -> None:
        raise AssertionError("the master stays master")


class Load:
    """SETs of random keys."""

    def __init__(self, keys: int, group: int, value_bytes: int) -> None:
        self._rng = random.Random(1)
        self._keys = keys
        self.group = group
        self.batch = min(group // CONNECTIONS, 64)
        self._pool = workload.values(1, value_bytes)

    def batches(self, count: int) -> list[bytes]:
        wanted = [self._rng.randrange(self._keys) for _ in range(count // self.group * self.group)]
        return list(workload.batches("binary", wanted, self.batch, self._pool))


def measure(
    folder: Path, replicas_of: list[int], group: int, options: argparse.Namespace
) -> dict[str, float]:
    """Measure every cluster with groups of this size, in turn; the least of the rounds."""
    clusters = {count: Trio(folder / f"{group}-{count}", count) for count in replicas_of}
    gc.collect()
    gc.freeze()
    spent: dict[str, list[float]] = {}
    for round_number in range(options.rounds + 1):
        for count, cluster in clusters.items():
            load = Load(options.keys, group, options.value_bytes)
            batches = load.batches(options.operations)
            done = len(batches) * load.batch
            cluster.start_counting()
            cluster.write(batches, group // load.batch)
            for node in cluster.nodes:
                node.forget_log()
            if round_number:  # the first one makes the documents
                name = f"master_{count}" if count else "alone"
                spent.setdefault(name, []).append(1e6 * cluster.master.seconds / done)
                for node in cluster.nodes[1:] if count else ():
                    spent.setdefault(f"replica_{count}", []).append(1e6 * node.seconds / done)
    figures = {name: round(min(each), 3) for name, each in spent.items()}
    for count in replicas_of:
        if count:
            figures[f"more_{count}"] = round(figures[f"master_{count}"] - figures["alone"], 3)
    return figures


def measure_rest(folder: Path) -> dict[str, float]:
    """Return the milliseconds of a second at rest."""
    cluster = Trio(folder / "rest", 2)
    cluster.start_counting()
    cluster.rest(40)
    return {
        "rest_master": round(1e3 * cluster.nodes[0].seconds / 2, 2),
        "rest_replica": round(1e3 * cluster.nodes[1].seconds / 2, 2),
    }


def print_profile(folder: Path, who: str, options: argparse.Namespace) -> None:
    """Print where the time of a node goes, with two replicas."""
    is_rest = who.startswith("rest_")
    cluster = Trio(folder / "profile", 2)
    load = Load(options.keys, 512, options.value_bytes)
    per_group = 512 // load.batch
    cluster.write(load.batches(options.operations), per_group)
    node = cluster.nodes[0 if who.endswith("master") else 1]
    node.profile = cProfile.Profile(builtins=False)
    if is_rest:
        cluster.rest(40)
    else:
        cluster.write(load.batches(options.operations), per_group)
    pstats.Stats(node.profile).sort_stats("tottime").print_stats(35)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.replication")
    parser.add_argument("--keys", type=int, default=50_000)
    parser.add_argument("--operations", type=int, default=40_960, help="per round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--value-bytes", type=int, default=128)
    parser.add_argument("--groups", default="64,512,4096", help="SETs per commit group")
    parser.add_argument("--profile", choices=("master", "replica", "rest_master", "rest_replica"))
    options = parser.parse_args()
    gc.set_threshold(*GC_THRESHOLDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.profile:
            print_profile(folder, options.profile, options)
            return 0
        figures: dict[str, object] = {
            f"groups_of_{group}": measure(folder, [0, 1, 2], int(group), options)
            for group in options.groups.split(",")
        }
        figures |= measure_rest(folder)
    print(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

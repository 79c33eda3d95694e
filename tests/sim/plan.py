"""What a seed decides before anything happens: sizes, speeds, workload and kinds of faults.

Each seed leaves out some kinds of operations and faults at random. So some seeds have few faults
that nothing hides, and others have many at once.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

from failover.coordinator.membership import LEASE_TTL_S
from failover.replication.messages import FORMAT, FORMAT_OLDEST
from sim.facts import Kind
from sim.world import MS, SECOND
from vbucket.model.consumer_documents import checkpoint_key, keep_key
from vbucket.model.ids import vbucket_of
from vbucket.model.manifest import encode_leb128

NODE_FAULTS = (
    "kill", "stop", "power_cut", "power_cut_all", "pause", "disk_full", "sync_fails", "clock_jump",
    "branch",
)  # fmt: skip
NETWORK_FAULTS = (
    "break_connection", "cut_one_way", "partition", "slow_link", "long_delays", "refuse_connects",
)  # fmt: skip
WIDE_FAULTS = ("disk_stalls", "crash_inside", "power_cut_inside", "bit_rot")
"""Faults that one seed in two may have in addition (`widened`)."""
DISK_FAULTS = ("newest_rot", "store_forgets_commits", "store_rot")
"""Faults that plans with probers may have in addition (`probed`)."""
MEDIA_FAULTS = ("cold_damage",)
"""Faults of plans in which stores are damaged while processes run (`damaged`)."""
CONSUMER_FAULTS = ("consumer_crash", "consumer_pause")
CLUSTER_FAULTS = (
    "lost_folder", "handover", "left_behind", "unclean_election", "store_away", "store_slow",
    "store_forgets", "store_compacts", "handovers", "isolate", "lonely_consumer", "strike",
    "one_store_away", "one_store_forgets", "store_goes_back", "store_restarts",
)  # fmt: skip
"""Faults that need several nodes."""
MOVE_FAULTS = ("rebalance", "move", "drain", "set_copies", "cancel", "fail_over")
"""What operators ask for in clusters with more nodes than copies."""
KEPT_CONSUMER = "kept"
"""The consumer for which partitions keep deletions."""
MOVE_NODES = 4
"""Clusters with so many nodes have a record, and operators that move copies."""
ABOUT_ELECTIONS = (
    "kill", "power_cut", "pause", "handover", "lonely_consumer", "cut_one_way", "long_delays",
    "one_store_away", "one_store_forgets", "store_slow", "slow_link", "consumer_crash",
    "store_restarts",
)  # fmt: skip
"""Faults of plans that are about elections."""
ACTS = (
    "deposed", "blink", "two_deaths", "master_and_replica", "all_die", "to_and_fro",
    "moved_under_load", "late_acks", "behind", "came_back", "forgotten",
    "unanswered", "gone_back",
)  # fmt: skip
RARE = ("blink", "behind", "came_back", "forgotten", "unanswered", "gone_back")
"""Acts for what random faults hardly ever bring about: most plans have one of them."""
MOVE_ACTS = ("moving", "moving_away")
"""Acts that take operators."""
LONG_ACTS = ("snapshot_dies", "last_in_sync")
"""Asked acts that take long: a lease has to end, or a master to compact."""
ASKED_ACTS = ("collections", "starved", "all_starved", *LONG_ACTS)
"""Acts that only `--act` brings, so that recorded seeds stay what they are."""
FAILOVER_ACTS = ("full_master",)
"""Acts that take an operator who fails a master over."""
FAILOVER_NS, LONG_NS = 3 * SECOND, 6 * SECOND
"""What such acts, and long ones, take beside the time that the others get."""
OF_PATIENCE = frozenset({"unanswered"})
"""Acts that show nothing to clients who give up before the next election."""
OF_THREE = frozenset({"blink", "behind", "came_back", "unanswered", "gone_back", *LONG_ACTS})
"""Acts that take three copies of a partition."""
ACT_FAULTS = (
    "cut_off", "slow_from", "one_store_deaf", "one_store_forgets_write", "store_late", "starve",
)  # fmt: skip
"""Faults that only acts have."""
COUNTING = (Kind.GET, Kind.INCREMENT, Kind.APPEND, Kind.ADD, Kind.DELETE)
"""Operations that differ if they are done twice."""
WEIGHTS: dict[Kind, float] = {
    Kind.GET: 3, Kind.SET: 4, Kind.ADD: 1, Kind.REPLACE: 1, Kind.DELETE: 1, Kind.INCREMENT: 1.5,
    Kind.APPEND: 1,
}  # fmt: skip


_FIXED = frozenset({"nodes", "kinds", "kind_weights", "waits_for_masters", "unclean"})
"""Fields that `changed` leaves alone: other options say the first, and these belong together."""
CLUSTER_GRACE_MS = 4500
"""With an in-sync set of two, an election waits until a dead node's lease is over."""


class Plan(NamedTuple):
    """See the module. Times are in nanoseconds."""

    partitions: int
    nodes: int
    copies: int
    min_in_sync: int
    acknowledge: str
    """`committed` or `master`."""
    unclean: bool
    """Whether unclean elections are allowed."""
    durability_share: float
    """Share of writes with a durability frame."""
    clients: int
    consumers: int
    keys: tuple[bytes, ...]
    kinds: tuple[Kind, ...]
    kind_weights: tuple[float, ...]
    pipeline: int
    """Operations of a client under way at once."""
    think_ns: int
    """Mean pause of a client between two operations."""
    timeout_ns: int
    value_bytes: int
    cas_share: float
    faults: tuple[str, ...]
    acts: tuple[str, ...]
    """Sequences of faults about elections (`sim.acts`)."""
    fault_every_ns: int
    """Mean time between two faults."""
    waits_for_masters: bool
    """Whether load and faults begin when all partitions have their first masters. That takes a new
    cluster one or two seconds, in which nothing can be lost."""
    load_ns: int
    """How long faults and load last."""
    grace_ns: int
    """After the faults, everything works again within this time."""
    calm_ns: int
    """Then there is load for this time, and every operation is answered."""
    rest_ns: int
    """After the load, everything is at rest within this time."""
    delay_min_ns: int
    delay_max_ns: int
    sync_min_ns: int
    sync_max_ns: int
    drift_ppm: int
    memtable_bytes: int
    item_cache_bytes: int
    compact_share: float
    """Share of merges after which a partition is compacted."""
    window_bytes: int
    """Entries on their way to one replica."""
    section_bytes: int
    """Entries in one message to a replica that is behind."""
    pump_bytes: int
    """Messages of streams and to replicas that a connection sends in one turn."""
    save_every_ns: int
    """How often consumers save a checkpoint."""
    wide_clients: int = 0
    """Clients that do what `sim.wide_workload` draws."""
    wide_keys: tuple[bytes, ...] = ()
    """Their keys in the default collection."""
    collection_keys: tuple[bytes, ...] = ()
    """Their keys in each other collection."""
    from_replicas: int = 0
    """1:  consumers read from copies that are not masters, where they can."""
    late_consumers: int = 0
    """Consumers that begin at 0 when load and faults are over."""
    probers: int = 0
    """Clients that scan, read hashes, and change documents in batches (`sim.prober`)."""
    cut_consumers: int = 0
    """Consumers that ask for consistent cuts."""
    cut_late_ns: int = 0
    """What a leader says about cuts leaves so much later at most, to each node another time: else
    all draw a cut at nearly the same moment."""
    beat_ns: int = 100 * MS
    """Time between heartbeats."""
    lag_ns: int = 1000 * MS
    """`replica_lag_max`."""
    unheard_ns: int = 600 * MS
    """After so long without news of a master's node, it is reported."""
    commit_timeout_ns: int = 2000 * MS
    lease_s: int = LEASE_TTL_S
    """Of a node's membership in the metadata store."""
    founded_ns: int = 0
    """How long nodes run before the records of partitions are created
    (`dcp.server.cluster.joining.founding`); 0: they are there before."""
    scrub_ns: int = 0
    """In what time scrubbers read everything that is stored; 0: stores are not damaged while
    processes run, and nobody looks for it."""
    branches: int = 3
    """So many branches at most. With more of them, some are at 0 and most near the end."""
    lock_clients: int = 0
    """Clients that do what `sim.lock_workload` draws."""
    lock_keys: tuple[bytes, ...] = ()
    """Their keys in the default collection."""
    max_ttl_s: int = 0
    """The maxTTL of all collections but the default one; 0: they have none."""
    has_keeps: int = 0
    """1: partitions keep deletions for a consumer that is away (`sim.keep_workload`)."""
    older_formats: int = 0
    """0: all nodes speak the newest format of replication's messages. Any other number says which
    nodes speak the oldest one, from each start of their processes on (`format_at`)."""

    def format_at(self, machine: str, start: int) -> int:
        """Return the newest format that a node speaks after its so manieth start: a node may be
        upgraded or set back each time.
        """
        if not self.older_formats:
            return FORMAT
        draw = random.Random(f"{self.older_formats} {machine} {start}")
        return draw.choice((FORMAT_OLDEST, FORMAT))

    def vb_of(self, key: bytes) -> int:
        """Return the partition of a key."""
        return vbucket_of(key, self.partitions)

    @property
    def default_keys(self) -> tuple[bytes, ...]:
        """The keys of all clients in the default collection."""
        return (*self.keys, *self.wide_keys, *self.lock_keys, *self.keep_keys)

    @property
    def keep_keys(self) -> tuple[bytes, ...]:
        """The keys of what partitions keep for a consumer, and of its positions."""
        vb_ids = range(self.partitions if self.has_keeps else 0)
        return (*map(keep_key, vb_ids), *(checkpoint_key(KEPT_CONSUMER, each) for each in vb_ids))

    def keys_of(self, vb_id: int) -> list[bytes]:
        """Return the keys of a partition."""
        return [key for key in self.keys if vbucket_of(key, self.partitions) == vb_id]

    @property
    def has_expiries(self) -> bool:
        """Whether documents may expire while it runs."""
        return bool(self.wide_clients or self.max_ttl_s)

    def expiring(self, collections: Iterable[int]) -> list[tuple[bytes, bytes]]:
        """Return the keys of documents that may expire, as they are stored and as clients have
        them. `collections` have a maxTTL.
        """
        limited = ((each, key) for each in collections for key in self.collection_keys)
        keys = (*((0, key) for key in self.wide_keys), *limited)
        return [(encode_leb128(collection) + key, key) for collection, key in keys]

    @property
    def needs_every_copy(self) -> bool:
        """Whether some writes are refused while a copy is missing: a majority of two is both."""
        return self.min_in_sync == self.copies or (self.durability_share > 0 and self.copies == 2)

    def stored_keys_of(self, vb_id: int, collections: Iterable[int]) -> list[bytes]:
        """Return the keys that a partition may hold, as they are stored."""
        return [
            encode_leb128(collection) + key
            for collection in (0, *collections)
            for key in (self.collection_keys if collection else self.default_keys)
            if vbucket_of(key, self.partitions) == vb_id
        ]


def drawn(draw: random.Random, *, nodes: int = 1, seconds: float | None = None) -> Plan:
    """Draw the plan of a seed. Most clusters have a plan that is about elections."""
    plan = _drawn(draw, nodes=nodes, seconds=seconds)
    if nodes == 1 or draw.random() < 0.3:
        return plan
    return about_elections(plan, draw, nodes=nodes, seconds=seconds)


def widened(plan: Plan, draw: random.Random) -> Plan:
    """Return the plan with more of the product, of the settings and of the world. One seed in two
    stays as it is. `draw` is a source of its own: what it gives changes nothing else.
    """
    if draw.random() < 0.5:
        return plan
    keys = tuple(b"%b%d" % (use, number) for use in (b"t", b"t", b"j", b"m") for number in range(3))
    has_collections = draw.random() < 0.6
    faults = [name for name in WIDE_FAULTS if draw.random() < 0.4]
    if has_collections:
        faults.append("collections")
    if plan.acts and draw.random() < 0.7:
        faults = [name for name in faults if name == "collections"]  # others spoil most acts
    return plan._replace(
        wide_clients=draw.choice((1, 2)),
        wide_keys=tuple(dict.fromkeys(keys)),
        collection_keys=tuple(b"x%d" % number for number in range(4)) if has_collections else (),
        late_consumers=draw.choice((0, 1)),
        faults=(*plan.faults, *faults),
        load_ns=max(plan.load_ns, 2000 * MS) if plan.nodes == 1 else plan.load_ns,
        lag_ns=draw.choice((700, 1000, 1000, 1600)) * MS,
        unheard_ns=draw.choice((450, 600, 600, 900)) * MS,
        commit_timeout_ns=draw.choice((1000, 2000, 2000, 4000)) * MS,
        lease_s=(lease_s := draw.choice((2, 3, 3, 4))),
        grace_ns=plan.grace_ns + (plan.nodes > 1) * max(0, lease_s - LEASE_TTL_S) * SECOND,
    )


def probed(plan: Plan, draw: random.Random) -> Plan:
    """Return the plan with somebody who looks at many documents at once, and with other heartbeats.
    Two seeds in three stay as they are. `draw` is a source of its own.
    """
    if draw.random() < 0.65:
        return plan
    probers = draw.choice((1, 1, 2))
    faults = [name for name in DISK_FAULTS if draw.random() < 0.4]
    if plan.acts and draw.random() < 0.7:
        faults = []  # they spoil most acts
    # What a master answers alone may be committed later, or never: then nobody looks.
    is_committed = plan.nodes == 1 or plan.acknowledge == "committed"
    return plan._replace(
        faults=(*plan.faults, *faults),
        probers=probers if plan.acknowledge == "committed" else 0,
        cut_consumers=draw.choice((1, 1, 2)) if is_committed else 0,
        cut_late_ns=draw.choice((0, 30, 80)) * MS if plan.nodes > 1 else 0,
        beat_ns=draw.choice((50, 100, 100, plan.unheard_ns // MS // 4)) * MS,
    )


def mixed(plan: Plan, draw: random.Random) -> Plan:
    """Return the plan with nodes of two versions. Two clusters in three stay as they are. `draw` is
    a source of its own.
    """
    if plan.nodes == 1 or draw.random() < 0.65:
        return plan
    older_formats = draw.getrandbits(31) | 1
    # What the formats differ in is about copies that consumers read from.
    reads_copies = not (plan.acts or plan.cut_consumers) and draw.random() < 0.45
    return plan._replace(older_formats=older_formats, from_replicas=int(reads_copies))


def reverted(plan: Plan, draw: random.Random) -> Plan:
    """Return the plan of a node alone with many branches, between merges, compactions and starts.
    Five seeds in six stay as they are. `draw` is a source of its own.
    """
    if plan.nodes > 1 or draw.random() >= 1 / 6:
        return plan
    faults = [name for name in plan.faults if draw.random() < 0.3 or name == "collections"]
    return plan._replace(
        partitions=draw.choice((2, 4)),
        faults=(*faults, *("branch",) * (2 + 2 * len(faults)), "kill", "consumer_crash"),
        branches=20,
        fault_every_ns=draw.choice((40, 80, 150)) * MS,
        load_ns=max(plan.load_ns, draw.choice((1500, 2500)) * MS),
        memtable_bytes=2 << 10,
        item_cache_bytes=16 << 10,
        compact_share=draw.choice((0.0, 1.0)),
        save_every_ns=draw.choice((50, 200, 1000)) * MS,
    )


def locked(plan: Plan, draw: random.Random) -> Plan:
    """Return the plan with clients that lock documents and observe partitions, some with
    collections that have a maxTTL, and some with a consumer for which deletions are kept. Four
    seeds in five stay as they are. `draw` is a source of its own.
    """
    if draw.random() >= 0.2:
        return plan
    # Where clocks jump, nobody knows when a lock or a document is over.
    may_jump = draw.random() < 0.3
    faults = [name for name in plan.faults if may_jump or name != "clock_jump"]
    has_ttl = draw.random() < 0.65
    has_keeps = draw.random() < 0.5
    return plan._replace(
        has_keeps=int(has_keeps),
        compact_share=1.0 if has_keeps else plan.compact_share,
        memtable_bytes=2 << 10 if has_keeps else plan.memtable_bytes,
        lock_clients=draw.choice((1, 2, 2)),
        lock_keys=tuple(b"l%d" % number for number in range(draw.choice((2, 3)))),
        max_ttl_s=draw.choice((1, 1, 2)) if has_ttl else 0,
        collection_keys=tuple(b"x%d" % number for number in range(4))
        if has_ttl or plan.collection_keys
        else (),
        faults=(*faults, *("collections",) * (2 * has_ttl)),
        load_ns=max(plan.load_ns, 2500 * MS) if plan.nodes == 1 else plan.load_ns,
    )


def damaged(plan: Plan, draw: random.Random) -> Plan:
    """Return the plan with stores whose pages are damaged while processes run. Three seeds in four
    stay as they are. `draw` is a source of its own.
    """
    if draw.random() >= 0.25:
        return plan
    faults = [name for name in plan.faults if draw.random() < 0.5]
    return plan._replace(
        faults=(*faults, *MEDIA_FAULTS * (1 + len(faults))),
        fault_every_ns=draw.choice((60, 150, 300)) * MS,
        load_ns=max(plan.load_ns, draw.choice((2000, 3000)) * MS),
        memtable_bytes=2 << 10,
        item_cache_bytes=draw.choice((0, 0, 16 << 10)),
        late_consumers=1,
        scrub_ns=(scrub_ns := draw.choice((200, 400, 800)) * MS),
        grace_ns=plan.grace_ns + 3 * scrub_ns,  # a pass, a rest, and another pass
    )


def about_elections(
    plan: Plan, draw: random.Random, *, nodes: int, seconds: float | None = None, act: str = ""
) -> Plan:
    """Return a plan with few keys and partitions, several copies, and faults near elections.
    `act`: the one sequence of faults that it has.
    """
    copies = draw.choice((2, 3, 3)) if nodes > 2 else 2
    kinds = draw.choice((plan.kinds, COUNTING))
    share = draw.choice((0.0, 0.2))  # other faults spoil most acts
    faults = tuple(name for name in ABOUT_ELECTIONS if draw.random() < share)
    if nodes >= MOVE_NODES:
        faults += tuple(name for name in MOVE_FAULTS if draw.random() < 0.5)
    acts = (act,) if act else _acts(draw, nodes)
    is_patient = not OF_PATIENCE.isdisjoint(acts)
    if is_patient:
        kinds = COUNTING
    longer_ns = 0 if set(FAILOVER_ACTS).isdisjoint(acts) else FAILOVER_NS
    longer_ns += 0 if set(LONG_ACTS).isdisjoint(acts) else LONG_NS
    is_of_three = not OF_THREE.isdisjoint(acts)
    if is_of_three:
        copies = 3
    return plan._replace(
        partitions=draw.choice((2, 4)),
        copies=copies,
        min_in_sync=draw.choice((1, 1, 2)),
        acknowledge="committed" if is_patient else plan.acknowledge,
        clients=draw.randint(3 if is_of_three else 2, 4),
        keys=tuple(b"k%d" % number for number in range(draw.choice((3, 6)))),
        kinds=kinds,
        kind_weights=tuple(WEIGHTS[kind] for kind in kinds),
        pipeline=8 if is_patient else 3 if is_of_three else draw.choice((1, 3)),
        think_ns=draw.choice((8, 16)) * MS,
        timeout_ns=draw.choice((1500, 3000) if is_patient else (150, 400, 1500, 3000)) * MS,
        faults=faults,
        acts=acts,
        fault_every_ns=draw.choice((500, 1500)) * MS,
        waits_for_masters=True,
        load_ns=int((seconds or draw.choice((3.0, 4.0))) * SECOND) + longer_ns,
        window_bytes=draw.choice((500, 64 << 10)),
        section_bytes=1 if is_of_three else draw.choice((1, 1, 4 << 10)),
    )


def changed(plan: Plan, changes: Iterable[tuple[str, str]]) -> Plan:
    """Return a plan in which fields have other values, as a command line gives them: a number, a
    word, or words with commas. Raises ValueError that says what is wrong.
    """
    for name, value in changes:
        before = plan._asdict().get(name)
        try:
            if name == "keys":
                after: object = plan.keys[: int(value)]
            elif before is None or name in _FIXED:
                raise ValueError(f"a plan has no {name} that can be set")
            elif isinstance(before, tuple):
                after = tuple(word for word in value.split(",") if word)
            else:
                after = type(before)(value)
        except ValueError as error:
            raise ValueError(f"--set {name}={value}: {error}") from None
        plan = plan._replace(**{name: after})
    return plan


def _acts(draw: random.Random, nodes: int) -> tuple[str, ...]:
    """Draw one to three acts."""
    possible = [name for name in ACTS if nodes > 2 or name not in OF_THREE]
    if nodes >= MOVE_NODES:
        possible += MOVE_ACTS
        share = draw.random()
        if share < 0.5:
            return MOVE_ACTS if share >= 0.1 else (*MOVE_ACTS, *FAILOVER_ACTS)
    first = draw.choice([name for name in RARE if name in possible])
    acts = draw.sample(possible, draw.choice((1, 2, 3)))
    return tuple(dict.fromkeys([first, *acts[1:]])) if draw.random() < 0.6 else tuple(acts)


def _drawn(draw: random.Random, *, nodes: int, seconds: float | None) -> Plan:
    partitions = draw.choice((4, 8, 16))
    copies = draw.randint(1, min(4, nodes) if nodes < MOVE_NODES else nodes - 1)
    kinds = tuple(kind for kind in WEIGHTS if kind is Kind.GET or draw.random() < 0.8)
    weights = tuple(WEIGHTS[kind] * draw.choice((1, 1, 3)) for kind in kinds)
    possible = [
        *NODE_FAULTS,
        *NETWORK_FAULTS,
        *CONSUMER_FAULTS,
        *(CLUSTER_FAULTS if nodes > 1 else ()),
        *(MOVE_FAULTS if nodes >= MOVE_NODES else ()),
    ]
    faults = tuple(name for name in possible if draw.random() < 0.4)
    load_s = seconds or draw.choice((0.8, 1.5, 2.5))
    min_in_sync, keys = draw.randint(1, copies), draw.choice((4, 12, 40))
    if "left_behind" in faults:
        # The others must go on alone for long enough, and leave something for a snapshot.
        copies = max(2, copies)
        min_in_sync = min(min_in_sync, copies - 1)
        partitions, keys = 4, 40
        load_s = max(load_s, seconds or 4.5)
    slow_disk = draw.random() < 0.2
    far = draw.random() < 0.2
    return Plan(
        partitions=partitions,
        nodes=nodes,
        copies=copies,
        min_in_sync=min_in_sync,
        acknowledge="committed" if draw.random() < 0.8 else "master",
        unclean=draw.random() < 0.2,
        durability_share=draw.choice((0.0, 0.1, 0.5)),
        clients=draw.randint(2, 5),
        consumers=draw.randint(1, 2),
        keys=tuple(b"k%d" % number for number in range(keys)),
        kinds=kinds,
        kind_weights=weights,
        pipeline=draw.choice((1, 1, 3, 8)),
        think_ns=draw.choice((4, 8, 16)) * MS,
        timeout_ns=draw.choice((150, 400, 1500)) * MS,
        value_bytes=draw.choice((0, 0, 40, 2000)),
        cas_share=draw.choice((0.0, 0.2, 0.6)),
        faults=faults,
        acts=(),
        fault_every_ns=draw.choice((60, 150, 400, 1200)) * MS,
        waits_for_masters=False,
        load_ns=int(load_s * SECOND),
        grace_ns=(1500 if nodes == 1 else CLUSTER_GRACE_MS) * MS,
        calm_ns=150 * MS,
        rest_ns=20 * SECOND,
        delay_min_ns=(5 * MS if far else MS // 10),
        delay_max_ns=draw.choice((1, 5, 30)) * MS + (5 * MS if far else 0),
        sync_min_ns=(2 * MS if slow_disk else MS // 10),
        sync_max_ns=draw.choice((1, 3, 20)) * MS + (2 * MS if slow_disk else 0),
        drift_ppm=draw.choice((0, 50, 500, 20_000)),
        memtable_bytes=draw.choice((2 << 10, 8 << 10, 64 << 10)),
        item_cache_bytes=draw.choice((0, 16 << 10)),
        compact_share=draw.choice((0.0, 0.5, 1.0)),
        window_bytes=8 << 20,
        section_bytes=draw.choice((1, 1, 256 << 10)),
        pump_bytes=draw.choice((1, 4 << 10, 64 << 10)),
        save_every_ns=draw.choice((50, 200, 1000)) * MS,
    )

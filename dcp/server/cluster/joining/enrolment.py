"""How a node becomes a member of a cluster: the first one of a new cluster, or one more.

    init    writes the cluster, this member and a record for each partition, then the folder's file
    join    checks that the folder holds no document, writes this member, then the folder's file

The node runs alone meanwhile. It restarts afterwards, and then serves what the map gives it.

Invariants
- the folder's file is written last: a node that is interrupted before is still alone, and what it
  wrote in the store is under a cluster id that nobody uses;
- a folder with documents never joins: its partitions would be cut back to those of the cluster.

**What a node is to its cluster**, from its first start to its end:

    ALONE ──── a command to become a member ────> BECOMING
    BECOMING ─ it failed ───────────────────────> ALONE
    BECOMING ─ cluster.json is on disk ─────────> JOINED      the node restarts in its process
    (a start with cluster.json) ────────────────> MEMBER
    MEMBER ─── another process is the member ───> REPLACED
    any but REPLACED ── the node stops ─────────> LEAVING

TRANSITIONS is the whole table: what is not in it cannot happen, and raises AssertionError.

Invariants
- changes are taken in ALONE, and in MEMBER by the records of the cluster. In no other state: what
  is answered there would be lost;
- nothing leads from JOINED back to ALONE: who starts next on the folder is a member;
- LEAVING and REPLACED are final. A node that stops is not started again, whatever happens to a
  command that is still under way.

**Changes are refused** while a node becomes a member, so that no acknowledged change is lost.
Enrolment copies or checks what the node has, and then waits for the metadata store and for the
restart. A change in between would be acknowledged and then be missing: a node that joins gives its
documents up, and the cluster has the users and collections that the first node had when it wrote
them.

Invariants
- a node has one enrolment at a time;
- the refusal begins before anything is checked, and what was applied before is in the log then;
- a failed enrolment ends the refusal. After a successful one it lasts until the restart: the
  engine is a new one then, and the users are those of the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from enum import Enum, auto
from http import HTTPStatus
from types import TracebackType
from typing import Final, NamedTuple

from dcp.server.access.users import Users
from dcp.server.cluster.cluster_file import ClusterRefusedError
from dcp.server.cluster.joining.process_facts import fit_reads, unfit
from dcp.server.storage.health import Health
from dcp.server.storage.waiters import CommitWaiters
from failover.coordinator.map_life import FIRST_LIFE
from failover.coordinator.records import (
    MEMBER_ID,
    AliveRecord,
    ClusterKeys,
    ClusterRecord,
    KeyKind,
    ManifestRecord,
    MemberRecord,
    RecordUnreadableError,
    RemovedRecord,
    StoredPartition,
    UsersRecord,
    decode_partition,
    decode_record,
    encode_partition,
    encode_record,
)
from failover.metadata.metastore import (
    TXN_OPERATIONS_MAX,
    Delete,
    MetaStore,
    OutcomeUnknown,
    Put,
    Range,
    RangeResult,
    StoreRefused,
    StoreRequest,
    StoreResult,
    StoreUnavailable,
    Txn,
    TxnResult,
    if_absent,
    if_unchanged,
)
from failover.rules.replication_record import ReplicationRecord
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Partition

ANSWER_S: Final = 5.0
"""How long the metadata store may take for one request."""
AGAIN_S: Final = 0.2
COPIES_MAX: Final = 4
"""A master and three replicas: clients know no more."""


class EnrolmentError(ClusterRefusedError):
    """The node does not become a member."""


class StoreAwayError(EnrolmentError):
    """The metadata store does not answer now: the same command may succeed later."""

    def __init__(self, why: str, try_this: str = "") -> None:
        super().__init__(why, try_this, status=HTTPStatus.SERVICE_UNAVAILABLE)


JOIN_ADVICE: Final = "Get a new token with `dcpctl cluster token` on a member"


class NewCluster(NamedTuple):
    """What an operator decides about a new cluster."""

    copies: int
    min_in_sync: int | None
    nodes: int = 1
    """How many have to take part before its partitions have records: `founding`."""


async def ask(meta: MetaStore, request: StoreRequest) -> StoreResult:
    """Send a request to the store and return its result. Raises EnrolmentError."""
    answered: asyncio.Future[StoreResult] = asyncio.get_running_loop().create_future()

    def done(result: StoreResult) -> None:
        if not answered.done():
            answered.set_result(result)

    meta.submit(request, done)
    try:
        async with asyncio.timeout(ANSWER_S):
            return await answered
    except TimeoutError:
        raise StoreAwayError(
            f"the metadata store did not answer within {ANSWER_S:g} s", "Check that it runs"
        ) from None


async def ask_again(meta: MetaStore, request: StoreRequest) -> StoreResult:
    """Send a request that may happen twice until it has a result, ANSWER_S at most. Raises
    EnrolmentError.
    """
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + ANSWER_S
    while True:
        result = await ask(meta, request)
        if isinstance(result, StoreRefused):
            raise EnrolmentError(
                f"the metadata store refuses this: {result.text}", "Then try again"
            )
        if not isinstance(result, OutcomeUnknown | StoreUnavailable):
            return result
        if isinstance(result, StoreUnavailable) and result.is_unfit:
            raise EnrolmentError(
                f"this metadata store cannot be used: {result.text}",
                "Do that, or name another etcd with --meta; then try again",
            )
        if isinstance(result, StoreUnavailable) and result.is_denied:
            raise EnrolmentError(
                f"the metadata store does not let this node in: {result.text}",
                "Correct the token, or the URL of --meta; then try again",
            )
        if loop.time() >= give_up_s:
            raise StoreAwayError(
                f"the metadata store does not answer: {result.text}",
                "Check that it runs, and that this machine reaches it; then try again",
            )
        await asyncio.sleep(AGAIN_S)


def check_new(wanted: NewCluster) -> None:
    """Raises EnrolmentError if a cluster cannot have these numbers."""
    if not 1 <= wanted.copies <= COPIES_MAX:
        raise EnrolmentError(
            f"{wanted.copies} copies are not possible: a partition has a master and at most "
            f"{COPIES_MAX - 1} replicas",
            f"Use --copies 1 to {COPIES_MAX}",
        )
    if wanted.min_in_sync is not None and not 1 <= wanted.min_in_sync <= wanted.copies:
        raise EnrolmentError(
            f"min in-sync {wanted.min_in_sync} is not possible with {wanted.copies} copies: no "
            "write could be answered",
            f"Use --min-in-sync 1 to {wanted.copies}, or leave it out for a majority",
        )


def check_name(name: str) -> None:
    """Raises EnrolmentError if a node cannot have this name."""
    if not MEMBER_ID.fullmatch(name):
        raise EnrolmentError(
            f"the name {name[:80]!r} is not valid",
            "Use 1 to 64 letters, digits, dots, dashes or underscores",
        )


async def check_store(meta: MetaStore, root: bytes) -> None:
    """Raises EnrolmentError if the store of a new cluster does not answer."""
    await ask_again(meta, Range(ClusterKeys(root).cluster))


async def found_cluster(
    meta: MetaStore,
    root: bytes,
    engine: Engine,
    member: MemberRecord,
    wanted: NewCluster,
    users: bytes,
    *,
    proof: str = "",
    life: int = FIRST_LIFE,
) -> None:
    """Write the records of a new cluster whose only member is this node. It has none of partitions
    yet if it waits for more nodes. Raises EnrolmentError.

    `life`: above that of any cluster that clients may know at these addresses.
    """
    keys = ClusterKeys(root)
    cluster = ClusterRecord(
        copies=wanted.copies, min_in_sync=wanted.min_in_sync, partitions=engine.num_vbuckets,
        life=life, secret_proof=proof,
    )  # fmt: skip
    manifest = engine.keyspace.manifest
    puts = [
        Put(keys.cluster, encode_record(cluster)),
        Put(keys.manifest, encode_record(ManifestRecord.of(manifest))),
        Put(keys.users, encode_record(UsersRecord(text=users.decode()))),
        *_member_puts(keys, member),
    ]
    if wanted.nodes == 1:
        puts += [_partition_put(keys, member.member, part) for part in engine.partitions]
    for first in range(0, len(puts), TXN_OPERATIONS_MAX):
        await _put_new(meta, puts[first : first + TXN_OPERATIONS_MAX])


async def join_cluster(
    meta: MetaStore, root: bytes, engine: Engine, member: MemberRecord, *, proof: str = ""
) -> ClusterRecord:
    """Write this node as one more member; return what holds for the cluster. Raises
    EnrolmentError.

    `proof`: `ClusterFile.secret_proof` of this node. etcd lets in whoever has its own password.
    """
    cluster = await check_join(meta, root, engine, member, proof=proof)
    await _put_member(meta, ClusterKeys(root), member)
    return cluster


async def check_join(
    meta: MetaStore, root: bytes, engine: Engine, member: MemberRecord, *, proof: str = ""
) -> ClusterRecord:
    """Return what holds for the cluster, if this node may join it; write nothing. Raises
    EnrolmentError. As for `join_cluster`, which finds a name that is taken when it writes it.
    """
    documents = sum(part.item_count for part in engine.partitions)
    if documents:
        held = "1 document" if documents == 1 else f"{documents} documents"
        raise EnrolmentError(
            f"this node holds {held}, and joining would remove what it holds",
            "Start it with an empty --data folder. To keep the documents, make this node the first "
            "one with `dcpctl cluster init`, or load them into the cluster from a backup",
        )
    if engine.keyspace.manifest.uid:
        raise EnrolmentError(
            "this node has collections of its own, and the cluster has others",
            "Start it with an empty --data folder",
        )
    keys = ClusterKeys(root)
    found = await ask_again(meta, Range(keys.cluster))
    if not isinstance(found, RangeResult):
        raise EnrolmentError(f"the metadata store does not answer: {found}")
    if not found.items:
        raise EnrolmentError(
            "the metadata store has no such cluster: the token is of another store, or of a "
            "cluster that is gone",
            JOIN_ADVICE,
        )
    try:
        cluster = decode_record(found.items[0], ClusterRecord)
    except RecordUnreadableError as error:
        raise EnrolmentError(str(error)) from None
    if cluster.secret_proof not in {"", proof}:
        raise EnrolmentError("the secret in the token is not that of this cluster", JOIN_ADVICE)
    if cluster.partitions != engine.num_vbuckets:
        raise EnrolmentError(
            f"this node has {engine.num_vbuckets} partitions, and those of the cluster have "
            f"{cluster.partitions}",
            f"Start it with an empty --data folder and --partitions {cluster.partitions}",
        )
    members = await _members(meta, keys)
    if any(each.name == member.name and each.member != member.member for each in members):
        raise _taken(keys.of_name(member.name))
    _check_rack(members, member)
    await _check_fits(meta, keys, member)
    if not is_pristine(engine):
        await _check_has_partitions(meta, keys)
    return cluster


def is_pristine(engine: Engine) -> bool:
    """Whether a folder has no change, no collection and no former master of any partition."""
    return not engine.keyspace.manifest.uid and not any(
        part.high_seqno or part.leader_epoch > 1 for part in engine.partitions
    )


async def _check_has_partitions(meta: MetaStore, keys: ClusterKeys) -> None:
    """Raises EnrolmentError if the cluster has yet to make its partitions, whose first copies must
    all be empty.
    """
    found = await ask_again(
        meta, Range(keys.of_partitions(KeyKind.PARTITION), is_prefix=True, limit=1)
    )
    if isinstance(found, RangeResult) and not found.items:
        raise EnrolmentError(
            "this node has changes of deleted documents, and the cluster waits for empty nodes to "
            "make its partitions",
            "Start it with an empty --data folder, or join when the cluster serves",
        )


async def _put_member(meta: MetaStore, keys: ClusterKeys, member: MemberRecord) -> None:
    """Write a member that no node is. One that an earlier attempt of this folder has left is
    replaced. Raises EnrolmentError.
    """
    key = keys.of_member(KeyKind.MEMBER, member.member)
    result = await ask_again(
        meta,
        Txn((), (
            Range(key), Range(keys.of_member(KeyKind.ALIVE, member.member)),
            Range(keys.of_partitions(KeyKind.PARTITION), is_prefix=True),
        )),
    )  # fmt: skip
    if not isinstance(result, TxnResult):
        raise EnrolmentError(f"the metadata store does not answer: {result}")
    found, alive, partitions = (read.items for read in result.ranges)
    if found:
        try:
            left = decode_record(found[0], MemberRecord)
            copies = [decode_partition(item).record.copies for item in partitions]
        except RecordUnreadableError as error:
            raise EnrolmentError(str(error)) from None
        if alive or any(member.member in each for each in copies):
            raise _taken(key)
        await _delete(meta, keys, left, found[0].mod_revision)
    await _put_new(meta, _member_puts(keys, member))


async def withdraw(meta: MetaStore, root: bytes, member: MemberRecord) -> None:
    """Remove a member that did not become one. Raises EnrolmentError."""
    keys = ClusterKeys(root)
    found = await ask_again(meta, Range(keys.of_member(KeyKind.MEMBER, member.member)))
    if isinstance(found, RangeResult) and found.items:
        await _delete(meta, keys, member, found.items[0].mod_revision)


async def _delete(meta: MetaStore, keys: ClusterKeys, left: MemberRecord, revision: int) -> None:
    """Delete a member's record and its name, unless the record has changed."""
    key = keys.of_member(KeyKind.MEMBER, left.member)
    removed = Put(keys.removed, encode_record(RemovedRecord()))
    operations = (removed, Delete(key), Delete(keys.of_name(left.name)))
    await ask_again(meta, Txn((if_unchanged(key, revision),), operations))


async def _check_fits(meta: MetaStore, keys: ClusterKeys, newcomer: MemberRecord) -> None:
    """Raises EnrolmentError if a node that runs has an address of the newcomer, or another version
    of dcpd.
    """
    result = await ask_again(meta, fit_reads(keys, newcomer))
    if not isinstance(result, TxnResult):
        raise EnrolmentError(f"the metadata store does not answer: {result}")
    why, advice = unfit(result, newcomer)
    if why:
        raise EnrolmentError(why, advice)


async def _members(meta: MetaStore, keys: ClusterKeys) -> list[MemberRecord]:
    """Return the members of a cluster. Raises EnrolmentError."""
    found = await ask_again(meta, Range(keys.of_members(KeyKind.MEMBER), is_prefix=True))
    if not isinstance(found, RangeResult):
        raise EnrolmentError(f"the metadata store does not answer: {found}")
    try:
        return [decode_record(item, MemberRecord) for item in found.items]
    except RecordUnreadableError as error:
        raise EnrolmentError(str(error)) from None


async def running_members(meta: MetaStore, root: bytes, own: str) -> list[MemberRecord]:
    """Return the members whose nodes run, but for this one. Raises EnrolmentError."""
    keys = ClusterKeys(root)
    found = await ask_again(meta, Range(keys.of_members(KeyKind.ALIVE), is_prefix=True))
    if not isinstance(found, RangeResult):
        raise EnrolmentError(f"the metadata store does not answer: {found}")
    try:
        alive = {decode_record(item, AliveRecord).member for item in found.items} - {own}
    except RecordUnreadableError as error:
        raise EnrolmentError(str(error)) from None
    return [member for member in await _members(meta, keys) if member.member in alive]


def _check_rack(members: list[MemberRecord], newcomer: MemberRecord) -> None:
    """Raises EnrolmentError if only some nodes would name a rack: then no rack counts, and copies
    of a partition could end up in one rack without a word.
    """
    others = [member for member in members if member.member != newcomer.member]
    strange = next((each for each in others if bool(each.rack) != bool(newcomer.rack)), None)
    if strange is None:
        return
    if newcomer.rack:
        raise EnrolmentError(
            f"this node names rack {newcomer.rack!r}, and node {strange.name} names none: racks "
            "count only if every node names one",
            "Leave --rack out. To use racks, give one to every node from `dcpctl cluster init` on",
        )
    raise EnrolmentError(
        f"this node names no rack, and node {strange.name} names {strange.rack!r}: racks count "
        "only if every node names one",
        "Name its rack with --rack",
    )


def _member_puts(keys: ClusterKeys, member: MemberRecord) -> list[Put]:
    """Return the member, and its name, which no other member may have."""
    return [
        Put(keys.of_name(member.name), member.member.encode()),
        Put(keys.of_member(KeyKind.MEMBER, member.member), encode_record(member)),
    ]


def _partition_put(keys: ClusterKeys, member: str, part: Partition) -> Put:
    """Return the record of a partition whose only copy is here, with a master to be elected.

    So this member becomes master under an epoch above all that the partition has seen.
    """
    record = ReplicationRecord((member,), frozenset((member,)), max(1, part.leader_epoch))
    stored = StoredPartition(record, f"{member}.init")
    return Put(keys.of_partition(KeyKind.PARTITION, part.vb_id), encode_partition(stored))


async def _put_new(meta: MetaStore, puts: Iterable[Put]) -> None:
    """Write keys that do not exist yet. An attempt without an answer may have happened: then the
    keys are found, as wanted. Raises EnrolmentError.
    """
    puts = tuple(puts)
    compares = tuple(if_absent(put.key) for put in puts)
    result = await ask_again(meta, Txn(compares, puts, tuple(Range(put.key) for put in puts)))
    if not isinstance(result, TxnResult):
        raise EnrolmentError(f"the metadata store does not answer: {result}")
    if result.succeeded:
        return
    for put, read in zip(puts, result.ranges, strict=True):
        if read.items and read.items[0].value != put.value:
            raise _taken(put.key)


def _taken(key: bytes) -> EnrolmentError:
    """Return the refusal of a node whose key another one has."""
    kind, _, name = key.decode("utf-8", "replace").rpartition("/")
    if kind.endswith("/name"):
        return EnrolmentError(
            f"another member has the name {name}",
            "Choose another one with --name (`dcpctl cluster status` shows those in use). If that "
            f"node is lost for good, `dcpctl cluster remove {name}` makes the name free",
        )
    return EnrolmentError(
        "a member with the id of this data folder is there already: the folder is a copy of a "
        "member's, or was a member before",
        "Start this node with an empty --data folder",
    )


class EnrolmentState(Enum):
    """See the module."""

    ALONE = auto()
    BECOMING = auto()
    JOINED = auto()
    MEMBER = auto()
    REPLACED = auto()
    LEAVING = auto()


class EnrolmentEvent(Enum):
    """What happens to a node."""

    BEGUN = auto()
    """A command to become a member has begun."""
    FAILED = auto()
    """It has failed; cluster.json is not there."""
    FILED = auto()
    """cluster.json is on disk."""
    REPLACED = auto()
    """Another process is the member."""
    STOPPED = auto()
    """The node stops: by a signal, or to start again."""


TRANSITIONS: Final[dict[tuple[EnrolmentState, EnrolmentEvent], EnrolmentState]] = {
    (EnrolmentState.ALONE, EnrolmentEvent.BEGUN): EnrolmentState.BECOMING,
    (EnrolmentState.ALONE, EnrolmentEvent.STOPPED): EnrolmentState.LEAVING,
    (EnrolmentState.BECOMING, EnrolmentEvent.FAILED): EnrolmentState.ALONE,
    (EnrolmentState.BECOMING, EnrolmentEvent.FILED): EnrolmentState.JOINED,
    (EnrolmentState.BECOMING, EnrolmentEvent.STOPPED): EnrolmentState.LEAVING,
    (EnrolmentState.JOINED, EnrolmentEvent.STOPPED): EnrolmentState.LEAVING,
    (EnrolmentState.MEMBER, EnrolmentEvent.REPLACED): EnrolmentState.REPLACED,
    (EnrolmentState.MEMBER, EnrolmentEvent.STOPPED): EnrolmentState.LEAVING,
    (EnrolmentState.REPLACED, EnrolmentEvent.STOPPED): EnrolmentState.REPLACED,
    # A command that was under way when the node began to stop.
    (EnrolmentState.LEAVING, EnrolmentEvent.FAILED): EnrolmentState.LEAVING,
    (EnrolmentState.LEAVING, EnrolmentEvent.FILED): EnrolmentState.LEAVING,
    (EnrolmentState.LEAVING, EnrolmentEvent.STOPPED): EnrolmentState.LEAVING,
}

WHY_NOT: Final[dict[EnrolmentState, tuple[str, str]]] = {
    EnrolmentState.BECOMING: (
        "this node is becoming a member already, by another command",
        "Wait for that one, and then look at `dcpctl cluster status`",
    ),
    EnrolmentState.JOINED: (
        "this node has just become a member, and restarts",
        "Look at `dcpctl cluster status`",
    ),
    EnrolmentState.LEAVING: ("this node stops", "Start it again, then try again"),
}
"""Why a node cannot begin to become a member, and what to try."""


class Enrolment:
    """The state of one node; see the module."""

    def __init__(self, state: EnrolmentState = EnrolmentState.ALONE) -> None:
        self.state = state

    def handle(self, what: EnrolmentEvent) -> None:
        """Take note of what happened."""
        after = TRANSITIONS.get((self.state, what))
        assert after is not None, f"a node that is {self.state.name}: {what.name}"
        self.state = after

    @property
    def takes_changes_alone(self) -> bool:
        """Whether the node takes changes without a cluster."""
        return self.state is EnrolmentState.ALONE

    @property
    def restarts(self) -> bool:
        """Whether the node has to start again in its process."""
        return self.state is EnrolmentState.JOINED


SETTLE_S: Final = 5.0
"""How long changes that were applied before may take until they are in the log."""
REFUSAL: Final = (
    "this node is becoming a member of a cluster and takes no changes until it has restarted; "
    "try again in a few seconds"
)


class EnrolmentGate:
    """See the module. `async with gate` encloses an enrolment; it lives as long as the node."""

    def __init__(
        self, engine: Engine, health: Health, users: Users, commits: CommitWaiters
    ) -> None:
        self._engine = engine
        self._health = health
        self._users = users
        self._commits = commits
        self.enrolment = Enrolment()

    async def __aenter__(self) -> None:
        """Refuse changes, and return when those before are in the log. Raises EnrolmentError."""
        enrolment = self.enrolment
        if not enrolment.takes_changes_alone:
            raise EnrolmentError(*WHY_NOT[enrolment.state])
        if self._engine.loads.has_work:  # none begins from the next line on
            raise EnrolmentError(
                "documents of a restore are being loaded into this node",
                "Let the restore end, or stop it, then try again",
            )
        enrolment.handle(EnrolmentEvent.BEGUN)
        try:
            self._health.enrolling(REFUSAL)
            self._users.refuse_changes(REFUSAL)
            await self._settle()
        except BaseException:
            self._failed()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take changes again if the enrolment failed. Otherwise cluster.json is on disk."""
        if error is not None:
            self._failed()
        else:
            self.enrolment.handle(EnrolmentEvent.FILED)

    def stopped(self) -> None:
        """The node stops: whatever a command under way does, it is not started again."""
        self.enrolment.handle(EnrolmentEvent.STOPPED)

    async def _settle(self) -> None:
        keyspace = self._engine.keyspace
        last = max(part.last_group for part in self._engine.partitions)
        try:
            async with asyncio.timeout(SETTLE_S):
                await asyncio.to_thread(self._users.until_unchanging)
                await self._commits.until_synced(max(last, keyspace.manifest_group))
        except TimeoutError:
            raise EnrolmentError(
                f"earlier changes are not on disk within {SETTLE_S:g} s",
                "Check that the disk of the data folder has room and answers, then try again",
            ) from None

    def _failed(self) -> None:
        self.enrolment.handle(EnrolmentEvent.FAILED)
        if self.enrolment.takes_changes_alone:
            self._users.refuse_changes("")
            self._health.enrolling("")

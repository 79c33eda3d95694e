"""How a node becomes a member: the first one of a new cluster, or one more.

    init    writes the cluster, this member and a record for each partition, then the folder's file
    join    checks that the folder holds no document, writes this member, then the folder's file

The node runs alone meanwhile. It restarts afterwards, and then serves what the map gives it.

Invariants
- the folder's file is written last: a node that is interrupted before is still alone, and what it
  wrote in the store is under a cluster id that nobody uses;
- a folder with documents never joins: its partitions would be cut back to those of the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final, NamedTuple

from dcp.server.cluster.cluster_refusal import ClusterRefusedError
from dcp.server.cluster.process_facts import fit_reads, unfit
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
    """Write the records of a new cluster whose only member is this node. Raises EnrolmentError.

    `life`: above that of any cluster that clients may know at these addresses.
    """
    keys = ClusterKeys(root)
    cluster = ClusterRecord(
        copies=wanted.copies, min_in_sync=wanted.min_in_sync, life=life, secret_proof=proof
    )
    manifest = engine.keyspace.manifest
    puts = [
        Put(keys.cluster, encode_record(cluster)),
        Put(keys.manifest, encode_record(ManifestRecord.of(manifest))),
        Put(keys.users, encode_record(UsersRecord(text=users.decode()))),
        *_member_puts(keys, member),
        *(_partition_put(keys, member.member, part) for part in engine.partitions),
    ]
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
    members = await _members(meta, keys)
    if any(each.name == member.name and each.member != member.member for each in members):
        raise _taken(keys.of_name(member.name))
    _check_rack(members, member)
    await _check_fits(meta, keys, member)
    return cluster


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

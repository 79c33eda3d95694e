"""The keys and the records of a cluster in the metadata store. Pure.

    <root>cluster                what holds for all of the cluster
    <root>manifest               scopes and collections
    <root>users                  users and their rights
    <root>plan                   the move of copies and masters that is under way
    <root>leader                 the coordinator          under its member's lease
    <root>alive/<member>         a running process        under its member's lease
    <root>address/<host:port>    the process reached there   the same
    <root>clock/<member>         its wall clock, at times  the same
    <root>links/<member>         nodes that run, and do not let it follow them   the same
    <root>figures/<member>       what it measured of itself, for people   the same
    <root>collections/<member>   the collections whose events it has written   the same
    <root>member/<member>        a member of the cluster
    <root>name/<name>            the member that has a name
    <root>removed                written whenever a member is removed: the map's revision rises
    <root>partition/<vb>         one partition's record
    <root>suspect/<member>       a member's report        under its member's lease
    <root>command/<vb>           an operator's command for one partition

A member is a data folder: its id comes from the folder, so a node with an empty disk is another
member. <vb> has five digits, so keys sort by partition.

Every value is {"format": 1, ...}. It is JSON, because an operator reads it with etcd's own tools. A
record of another format, with an unknown field or with a field of a wrong kind raises
RecordUnreadableError, and the caller leaves what the record is about as it is.

A partition's record is {"format", "operation", "partition"}: the operation id of the write that
made it, and `ReplicationRecord.to_document`. A writer whose transaction got no answer reads the
operation id back.

A store can be the wrong one: a URL of another installation, or one that was made anew. So a node
asks at its start whose records are there (`owner_read`, `owner_trouble`).
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from failover.metadata.metastore import KeyValue, Range, Txn, TxnResult
from failover.rules.replication_record import Rank, ReplicationRecord
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.model.manifest import Manifest

MEMBER_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""What a member id may look like: it is part of keys and log lines."""
_VB_DIGITS: Final = 5


class KeyKind(StrEnum):
    """The kinds of keys below the root."""

    CLUSTER = "cluster"
    MANIFEST = "manifest"
    USERS = "users"
    PLAN = "plan"
    LEADER = "leader"
    ALIVE = "alive"
    CLOCK = "clock"
    LINKS = "links"
    FIGURES = "figures"
    COLLECTIONS = "collections"
    MEMBER = "member"
    REMOVED = "removed"
    PARTITION = "partition"
    SUSPECT = "suspect"
    COMMAND = "command"


_KINDS: Final = {str(kind): kind for kind in KeyKind}
_SINGLE: Final = frozenset(
    {
        KeyKind.CLUSTER,
        KeyKind.MANIFEST,
        KeyKind.USERS,
        KeyKind.PLAN,
        KeyKind.LEADER,
        KeyKind.REMOVED,
    }
)
_OF_PARTITIONS: Final = frozenset({KeyKind.PARTITION, KeyKind.COMMAND})


class ParsedKey(NamedTuple):
    """What a key names. Of member and partition only one is set, and none for the single keys."""

    kind: KeyKind
    member: str = ""
    vb_id: int = -1


class ClusterKeys:
    """The keys below one root, for example b"/dcpd/orders/"."""

    def __init__(self, root: bytes) -> None:
        if not root.endswith(b"/"):
            raise ValueError(f"cluster keys: the root {root!r} must end with a slash")
        self.root: Final = root
        self.leader: Final = root + b"leader"
        self.removed: Final = root + b"removed"
        self.cluster: Final = root + b"cluster"
        self.manifest: Final = root + b"manifest"
        self.users: Final = root + b"users"
        self.plan: Final = root + b"plan"

    def of_member(self, kind: KeyKind, member: str) -> bytes:
        """Return the key of this kind for a member."""
        if not MEMBER_ID.fullmatch(member):
            raise ValueError(
                f"member id {member!r}: 1 to 64 letters, digits, dots, dashes or underscores wanted"
            )
        return self.root + f"{kind}/{member}".encode()

    def of_members(self, kind: KeyKind) -> bytes:
        """Return the prefix of the keys of this kind for all members."""
        return self.root + f"{kind}/".encode()

    def of_name(self, name: str) -> bytes:
        """Return the key that says which member has a name. Views do not have it."""
        return self.root + b"name/" + name.encode()

    def of_address(self, address: str) -> bytes:
        """Return the key that says which process has an address. Views do not have it."""
        return self.root + b"address/" + address.encode()

    def of_partition(self, kind: KeyKind, vb_id: int) -> bytes:
        """Return the key of this kind for a partition."""
        assert kind in _OF_PARTITIONS
        return self.root + f"{kind}/{vb_id:0{_VB_DIGITS}}".encode()

    def of_partitions(self, kind: KeyKind) -> bytes:
        """Return the prefix of the keys of this kind for all partitions."""
        assert kind in _OF_PARTITIONS
        return self.root + f"{kind}/".encode()

    def parse(self, key: bytes) -> ParsedKey | None:
        """Return what a key names; None if this version knows no such key."""
        if not key.startswith(self.root):
            return None
        kind_name, _, name = key[len(self.root) :].decode("utf-8", "replace").partition("/")
        kind = _KINDS.get(kind_name)
        if kind is None:
            return None
        if kind in _SINGLE:
            return ParsedKey(kind) if key == self.root + kind.encode() else None
        if kind in _OF_PARTITIONS:
            is_number = len(name) == _VB_DIGITS and name.isascii() and name.isdigit()
            return ParsedKey(kind, vb_id=int(name)) if is_number else None
        return ParsedKey(kind, member=name) if MEMBER_ID.fullmatch(name) else None


FORMAT: Final = 1
"""The version of all records here. A higher one is written by a newer dcpd."""
MASTERS_RETURN_S: Final = 60.0
"""Default of `ClusterRecord.masters_return_s`: a node that fails again soon after its start has no
masters by then."""


class RecordUnreadableError(Exception):
    """A record in the metadata store cannot be read; the text says which, and why."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all records have."""

    format: int = FORMAT


class ClusterRecord(_Record, frozen=True, kw_only=True):
    """What holds for all of the cluster."""

    copies: int
    """Copies of each partition, if there are so many members."""
    min_in_sync: int | None = None
    """Members that must be in sync for a write; None: a majority of the copies."""
    partitions: int = NUM_VBUCKETS
    """How many there are. It never changes: the data folders of all members have that number."""
    masters_return_s: float = MASTERS_RETURN_S
    """How long the first copy of a partition must be in sync before it becomes master again; 0:
    masters stay where they are."""
    life: int = 1
    """Grows when the metadata store was set back, whose revisions begin again lower then. Clients
    compare (life, revision): `failover.coordinator.map_life`."""
    secret_proof: str = ""
    """`ClusterFile.secret_proof`: a node with another secret does not become a member. Empty:
    anyone does."""


class ManifestRecord(_Record, frozen=True, kw_only=True):
    """Scopes and collections, as `Manifest.to_document` has them."""

    uid: int
    scopes: dict[int, str]
    collections: list[Any]
    next: list[int]

    @classmethod
    def of(cls, manifest: Manifest) -> ManifestRecord:
        """Return the record of a manifest."""
        return msgspec.convert(manifest.to_document(), cls)

    def manifest(self) -> Manifest:
        """Return the manifest. Raises RecordUnreadableError."""
        try:
            return Manifest.from_document(msgspec.structs.asdict(self))
        except (TypeError, ValueError, KeyError) as error:
            raise RecordUnreadableError(f"the collections cannot be read: {error}") from None


class UsersRecord(_Record, frozen=True, kw_only=True):
    """Users and their rights."""

    text: str
    """The file users.json. Passwords are not in it, only SCRAM keys."""


class LeaderRecord(_Record, frozen=True, kw_only=True):
    """The coordinator. Its term is the create revision of the key."""

    member: str


class AliveRecord(_Record, frozen=True, kw_only=True):
    """A running process of a member: under the member's key, and under each of its addresses."""

    member: str
    incarnation: int
    """Grows with each start of the member's process."""
    is_leaving: bool = False
    """Whether the process is about to stop: it gets no partition any more."""
    name: str = ""
    """The node's name."""
    address: str = ""
    """HOST:PORT of its key-value port."""
    place: str = ""
    """Its data folder on its machine (`membership.ProcessFacts`)."""
    protocol: int = 1
    """The newest version of the replication messages that it speaks."""
    oldest_protocol: int = 1
    """The oldest one."""
    link: int = 0
    """Names the process's connection to this store (`ClusterSession.link`): what it tells others of
    the store's revisions under this number is about this store."""


class ClockRecord(_Record, frozen=True, kw_only=True):
    """The wall clock of a member when it wrote this."""

    member: str
    unix_ms: int


class RefusedLink(NamedTuple):
    """Why a member has no link to another one that runs, and what to try: sentences for people."""

    what: str
    try_this: str


class LinksRecord(_Record, frozen=True, kw_only=True):
    """Members that a member cannot follow although they run. It is absent if there are none."""

    member: str
    refused: dict[str, RefusedLink]


class FiguresRecord(_Record, frozen=True, kw_only=True):
    """What a member measured of itself lately, so that any node can show the whole cluster. No
    rule uses it.
    """

    member: str
    sets_per_s: float
    events_per_s: float
    disk_used_bytes: int
    """In use on the disk of its data folder, by all; 0 with `disk_size_bytes` 0: not measured."""
    disk_size_bytes: int
    unwritable: int
    """Partitions of which it is master and that take no writes now."""
    behind: dict[str, int]
    """Member -> changes that its copies lack of the partitions of this master."""
    lags: dict[int, int]
    """Partition of this master -> changes that the copy furthest behind lacks, if there are any."""


class CollectionsRecord(_Record, frozen=True, kw_only=True):
    """Says that the events of the collections up to `uid` are committed in all partitions that a
    member serves.
    """

    member: str
    uid: int


class MemberRecord(_Record, frozen=True, kw_only=True):
    """A member of the cluster and where nodes and clients reach it."""

    member: str
    address: str
    """HOST:PORT of the key-value port."""
    rack: str = ""
    name: str = ""
    """As the operator calls it."""
    admin_port: int = 0
    kv_tls_port: int = 0
    """0: none."""
    admin_tls_port: int = 0
    owns_store: bool = False
    """Whether the embedded metadata store is in its folder."""
    is_drained: bool = False
    """Whether the operator wants no copy and no master there."""


class RemovedRecord(_Record, frozen=True, kw_only=True):
    """Says by its revision only when a member was removed last. The member's own record, which may
    have been the newest one of the partition map, is gone.
    """


class PlanKind(StrEnum):
    """Why copies and masters move."""

    GROW = "grow"
    """The coordinator adds missing copies by itself. Any operator's plan replaces such a plan."""
    REBALANCE = "rebalance"
    MOVE = "move"
    DRAIN = "drain"
    REMOVE = "remove"
    """When the plan is done, the member `about` is removed from the cluster."""
    SET = "set"
    FAILOVER = "failover"
    CANCEL = "cancel"


class PlanRecord(_Record, frozen=True, kw_only=True):
    """The copies that partitions are to have. There is one plan at a time; the coordinator carries
    it out and deletes it when all partitions are as it says.
    """

    operation: str
    """Names the request, so that a caller whose request got no answer finds it."""
    kind: PlanKind
    asked_at_ms: int = 0
    """Wall clock of the node that was asked, for people; 0: the coordinator made the plan."""
    about: str = ""
    """The member that a drain, a removal or a failover is about."""
    copies_before: int = 0
    """Of a SET: the cluster's number of copies before, which a cancellation restores."""
    members: tuple[str, ...]
    """The members that `chains` names by index."""
    chains: dict[int, tuple[int, ...]]
    """Partition -> its wanted copies, the preferred master first."""

    def wanted(self) -> dict[int, tuple[str, ...]]:
        """Return partition -> its wanted copies."""
        return {
            vb_id: tuple(self.members[number] for number in chain)
            for vb_id, chain in self.chains.items()
        }

    def problem(self) -> str:
        """Return what is wrong with the chains, in words; "" if nothing is."""
        count = len(self.members)
        for vb_id, chain in self.chains.items():
            is_chain = chain and len(set(chain)) == len(chain)
            if not is_chain or not all(0 <= number < count for number in chain):
                return f"partition {vb_id} cannot have the copies {list(chain)} of {count} members"
        return ""


class ReportedPartition(NamedTuple):
    """One partition of a report. See `failover.rules.election.SuspectReport`."""

    vb_id: int
    epoch: int
    vb_uuid: int
    """The member's newest version."""
    version_epoch: int
    end_seqno: int
    is_electable: bool = True
    seen_epoch: int = 0
    seen_partition_epoch: int = 0
    """The rank of the newest record that the member's folder has seen."""
    is_sure: bool = False

    @property
    def is_witness(self) -> bool:
        """Whether the member misses the master. If not, it only says what it has seen."""
        return self.epoch > 0

    @property
    def seen(self) -> Rank:
        """The rank of the newest record that the member's folder has seen."""
        return Rank(self.seen_epoch, self.seen_partition_epoch)


class MemberReport(_Record, frozen=True, kw_only=True):
    """The partitions whose master a member does not hear.

    A member that restarts reports those whose master it was itself.
    """

    member: str
    partitions: tuple[ReportedPartition, ...]


class OperatorCommand(_Record, frozen=True, kw_only=True):
    """An operator's command for one partition: elect uncleanly if there is no other way."""

    elect_uncleanly_in_epoch: int
    """The epoch that the operator saw. Under a later one the command is void."""


class StoredPartition(NamedTuple):
    """A partition's record, and the operation that wrote it."""

    record: ReplicationRecord
    operation: str


class _PartitionEnvelope(_Record, frozen=True, kw_only=True):
    operation: str
    partition: Any


_Kind = TypeVar("_Kind")


def encode_record(record: _Record) -> bytes:
    """Return the value of a record's key. Equal records give equal bytes."""
    return msgspec.json.encode(record)


def decode_record(item: KeyValue, kind: type[_Kind]) -> _Kind:
    """Return the record of a key. Raises RecordUnreadableError."""
    try:
        stored_format = msgspec.json.decode(item.value, type=_FormatOnly).format
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(item, f"it is no record of a cluster: {error}") from None
    if stored_format != FORMAT:
        raise unreadable(item, f"it has format {stored_format}, this dcpd reads format {FORMAT}")
    try:
        return msgspec.json.decode(item.value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(item, str(error)) from None


def encode_partition(stored: StoredPartition) -> bytes:
    """Return the value of a partition's key."""
    envelope = _PartitionEnvelope(operation=stored.operation, partition=stored.record.to_document())
    return encode_record(envelope)


def decode_partition(item: KeyValue) -> StoredPartition:
    """Return a partition's record. Raises RecordUnreadableError."""
    envelope = decode_record(item, _PartitionEnvelope)
    try:
        record = ReplicationRecord.from_document(envelope.partition)
    except ValueError as error:
        raise unreadable(item, str(error)) from None
    return StoredPartition(record, envelope.operation)


class _FormatOnly(msgspec.Struct, frozen=True):
    """The field that every format keeps."""

    format: int


def unreadable(item: KeyValue, why: str) -> RecordUnreadableError:
    """Return the error for a record that cannot be used."""
    return RecordUnreadableError(
        f"key {item.key.decode('utf-8', 'replace')}, revision {item.mod_revision}: {why}. Nothing"
        " is changed by it; restore the record, or run a version of dcpd that can read it"
    )


def owner_read(base: bytes, cluster: str) -> Txn:
    """Return the transaction whose result `owner_trouble` judges."""
    return Txn(
        then=(
            Range(_root(base, cluster), is_prefix=True, limit=1),
            Range(base, is_prefix=True, limit=1),
        )
    )


def owner_trouble(result: TxnResult, base: bytes, cluster: str) -> str:
    """Say in one line that the store is not this cluster's; empty if it is."""
    ours, any_cluster = result.ranges
    if ours.items:
        return ""
    place = f"the metadata store has no records of cluster {cluster} below {_text(base)}"
    advice = "Correct the address of the store, or join that cluster with an empty data folder"
    if not any_cluster.items:
        return f"{place}, and none of any other: it is another store, or was emptied. {advice}"
    other = any_cluster.items[0].key.removeprefix(base).partition(b"/")[0]
    return f"{place}, but of cluster {_text(other)}: it is the store of another cluster. {advice}"


def _root(base: bytes, cluster: str) -> bytes:
    assert base.endswith(b"/")
    return base + cluster.encode() + b"/"


def _text(key: bytes) -> str:
    return key.decode("utf-8", "replace")

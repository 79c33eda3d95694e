"""What happened in a simulation, as data. Checkers read nothing else.

Times are those of the world, in nanoseconds. Whoever implements a node feeds the same facts, so the
checkers work for every implementation.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from dcp.wire.hash_reads import KeyVersion, SentDocument
from sim.ledger import Ledger, Log
from vbucket.model.receipt import CutOff, ElectionLoss


class Kind(Enum):
    """What a client asked for."""

    GET = auto()
    SET = auto()
    ADD = auto()
    REPLACE = auto()
    DELETE = auto()
    INCREMENT = auto()
    APPEND = auto()
    TOUCH = auto()
    GET_AND_TOUCH = auto()
    PUSH = auto()
    """SUBDOC_ARRAY_PUSH_LAST into a document that is a list; it makes one where there is none."""
    SET_WITH_META = auto()
    GET_REPLICA = auto()
    OBSERVE = auto()
    """OBSERVE_SEQNO: a version of a partition, and up to where it is persisted."""
    GET_AND_LOCK = auto()
    UNLOCK = auto()
    EXPIRE = auto()
    """No client asks for it: it is what an expiry may do, for the checkers."""

    __hash__ = object.__hash__  # that of an Enum hashes its name, each time


class Outcome(Enum):
    """What a client knows about its operation.

    OK, ABSENT, EXISTS, NOT_STORED and NOT_A_NUMBER are answers of the document. REFUSED: nothing
    was done. NO_COLLECTION: the same, and the collection does not exist. LOCKED and NOT_LOCKED: the
    same, because of a lock, or because there is none. AMBIGUOUS: it may have happened, or may
    happen later. UNKNOWN: a read without answer.
    """

    OK = auto()
    ABSENT = auto()
    EXISTS = auto()
    NOT_STORED = auto()
    NOT_A_NUMBER = auto()
    REFUSED = auto()
    NO_COLLECTION = auto()
    LOCKED = auto()
    NOT_LOCKED = auto()
    AMBIGUOUS = auto()
    UNKNOWN = auto()

    __hash__ = object.__hash__


DEFINITE = frozenset(
    {Outcome.OK, Outcome.ABSENT, Outcome.EXISTS, Outcome.NOT_STORED, Outcome.NOT_A_NUMBER}
)
"""Outcomes that tell something about the document."""
LASTS_S = 864_000
"""Ten days, to which a few minutes are added: such documents outlive the run, whatever clocks do.
"""
NOTHING_DONE = frozenset(
    {Outcome.REFUSED, Outcome.NO_COLLECTION, Outcome.LOCKED, Outcome.NOT_LOCKED}
)


class Observed(NamedTuple):
    """What an OBSERVE_SEQNO was answered. `ended_seqno`: where the version that was asked for
    ended; None: it is the newest one.
    """

    asked_uuid: int
    vb_uuid: int
    persisted_seqno: int
    seqno: int
    ended_seqno: int | None


class Operation:
    """One operation of a client. `ended_ns` is None while it is under way."""

    __slots__ = (
        "argument", "cas", "cas_asked", "client", "collection", "ended_ns", "expiry_s", "flags",
        "initial", "invoked_ns", "is_locked", "kept_seqno", "key", "kind", "lasts_s", "level",
        "lock_cas", "lock_s", "locked_value", "max_ttl_s", "name", "node", "observed", "outcome",
        "rev_seqno", "seqno", "tries", "value", "vb_id", "vb_uuid", "why",
    )  # fmt: skip

    def __init__(
        self,
        client: str,
        number: int,
        kind: Kind,
        vb_id: int,
        key: bytes,
        argument: bytes = b"",
        *,
        cas_asked: int = 0,
        initial: int | None = None,
        level: int = 0,
        collection: int = 0,
        expiry_s: int = 0,
        invoked_ns: int = 0,
        ended_ns: int | None = None,
        outcome: Outcome | None = None,
        value: bytes | None = None,
        cas: int = 0,
    ) -> None:
        self.client = client
        self.name = f"{client}:{number}"
        self.kind = kind
        self.vb_id = vb_id
        self.key = key
        self.argument = argument
        """The value of SET, ADD, REPLACE and APPEND; the decimal delta of INCREMENT."""
        self.cas_asked = cas_asked
        self.initial = initial
        """Of INCREMENT: the number that it stores where there is none."""
        self.level = level
        """Level of the durability frame; 0: without one."""
        self.collection = collection
        self.expiry_s = expiry_s
        """Seconds from the request on, 0: never."""
        self.flags = self.lasts_s = 0
        """What it stores beside the value, or was answered; an expiry that outlives the run."""
        self.rev_seqno = 0
        """Of SET_WITH_META: the revision that it asks for."""
        self.invoked_ns = invoked_ns
        self.ended_ns = ended_ns
        self.outcome = outcome
        self.value = value
        """The value that a GET or INCREMENT returned."""
        self.cas = cas
        self.vb_uuid = self.seqno = 0
        """The mutation token of the answer."""
        self.lock_s = self.lock_cas = 0
        """Of GET_AND_LOCK: how long the lock lasts, and the CAS that opens it. Of what sends such a
        CAS: that CAS."""
        self.locked_value: bytes | None = None
        """Of a change with the CAS of a lock: the value that is locked."""
        self.is_locked = False
        """Whether a read showed the CAS of a locked document."""
        self.max_ttl_s = 0
        """How long what it stores may last at most, because of its collection; 0: no limit."""
        self.kept_seqno: int | None = None
        """Of what a partition keeps for a consumer, and of its positions: from where on."""
        self.observed: Observed | None = None
        self.node = ""
        """Who answered, in a cluster."""
        self.why = ""
        self.tries: list[str] = []
        """Answers after which it was sent again, for stories."""

    @property
    def life_s(self) -> int:
        """Seconds after which what it stores is due, 0: never, or long after the run."""
        if self.max_ttl_s:
            return min(self.expiry_s or self.lasts_s or self.max_ttl_s, self.max_ttl_s)
        return self.expiry_s

    def __str__(self) -> str:
        text = f"{self.name} {self.kind.name} {self.key!r}"
        if self.collection:
            text += f" of collection {self.collection:x}"
        if self.expiry_s or self.max_ttl_s or self.lock_s:
            text += f" for {self.life_s or self.lock_s} s"
        if self.argument:
            text += f" {self.argument[:60]!r}"
        if self.cas_asked:
            text += f" if CAS {self.cas_asked:x}"
        text += f" at {self.invoked_ns / 1e6:.3f}"
        if self.outcome is None:
            return f"{text}, under way"
        ended = "never" if self.ended_ns is None else f"{self.ended_ns / 1e6:.3f}"
        text += f" until {ended} ms: {self.outcome.name}"
        if self.value is not None:
            text += f" {self.value[:60]!r}"
        if self.cas:
            text += f" CAS {self.cas:x}"
        if self.is_locked:
            text += " CAS of a locked document"
        if self.kind is Kind.GET_AND_LOCK and self.lock_cas:
            text += f" lock {self.lock_cas:x}"
        if self.observed is not None:
            return f"{text} {self.observed}"
        if self.seqno:
            text += f" vb {self.vb_id} version {self.vb_uuid:x} seqno {self.seqno}"
        return text


class Batch:
    """Changes that are made together, or not at all. `outcome` is None while it is under way."""

    __slots__ = ("name", "operations", "outcome")

    def __init__(self, name: str, operations: list[Operation]) -> None:
        self.name = name
        self.operations = operations
        self.outcome: Outcome | None = None


class Scanned(NamedTuple):
    """A scan of the default collection in a partition, made between two times."""

    began_ns: int
    created_ns: int
    client: str
    vb_id: int
    documents: dict[bytes, tuple[int, int, int, bytes]]
    """Key -> expiry, seqno, CAS, value."""


class HashesRead(NamedTuple):
    """An answer to X_READ_HASHES: one sum over all documents, or all keys."""

    began_ns: int
    ended_ns: int
    client: str
    vb_id: int
    vb_uuid: int
    seqno: int
    documents: int
    sums: bytes
    versions: list[KeyVersion] | None
    """None: it was about the sum."""


class CutHeld(NamedTuple):
    """A consumer was told that it holds a cut."""

    at_ns: int
    consumer: str
    connection: str
    time: int
    positions: dict[int, tuple[Log, int]]
    """Partition -> failover log of its stream, seqno."""
    documents: dict[int, dict[bytes, bytes]]
    """Of the partitions whose position has changed since the cut before."""


class Repair(NamedTuple):
    """A copy may take versions of another one. Seqno -> key, CAS."""

    at_ns: int
    node: str
    source: str
    vb_id: int
    own: dict[int, tuple[bytes, int]]
    taken: dict[int, tuple[bytes, int]]
    put: bool | None = None
    """Whether a block of the store that lacked one of them was what it had been once they were put
    in place; None: they were not, because the block has none of them, or they prove nothing."""


class Damaged:
    """A page of a node's store that is not what was written. `ended`: how that came to its end."""

    __slots__ = (
        "at_ns", "ended", "head_bytes", "is_put_wrong", "key", "kind", "known",
        "must_mend", "named", "node", "now", "provers", "row", "table", "told_mended", "vb_id",
    )  # fmt: skip

    def __init__(self, at_ns: int, node: str, table: str, key: bytes, kind: str) -> None:
        self.at_ns = at_ns
        self.node = node
        self.table = table
        self.key = key
        self.vb_id = int.from_bytes(key[:2], "big")
        self.kind = kind
        self.row = b""
        """What was written."""
        self.now: bytes | None = None
        """What the disk has; None: it cannot be read."""
        self.head_bytes = self.known = 0
        """What the page's checksum covers, and the checksum."""
        self.named = ""
        """What the node said of it; "": nothing."""
        self.is_put_wrong = False
        """Whether something else was put in its place, as if it was mended."""
        self.must_mend = False
        """Whether the node, or another copy, can prove what was there."""
        self.provers: frozenset[str] | None = None
        """The nodes that can; None: the node itself can."""
        self.told_mended = ""
        """How it was mended, as the node says, and was not."""
        self.ended = ""

    def __str__(self) -> str:
        where = f"{self.node}, vb {self.vb_id}: {self.table} {self.key[2:].hex()}"
        return f"{where} ({self.kind} at {self.at_ns / 1e6:.3f} ms)"


class AfterCut(NamedTuple):
    """A consumer received a change that comes after a cut, though its CAS does not."""

    at_ns: int
    consumer: str
    vb_id: int
    key: bytes
    seqno: int
    cas: int
    time: int


class Committed(NamedTuple):
    """A master published a partition's changes up to a seqno: answers and streams show them."""

    at_ns: int
    node: str
    vb_id: int
    vb_uuid: int
    seqno: int


class Streamed(NamedTuple):
    """A consumer received changes of a partition up to a seqno, on a stream of a version."""

    at_ns: int
    consumer: str
    vb_id: int
    vb_uuid: int
    seqno: int


class Begun(NamedTuple):
    """A consumer began, at first or after a crash: it knows what it had saved, or nothing."""

    at_ns: int
    consumer: str


class RolledBack(NamedTuple):
    """A consumer was told to roll back."""

    at_ns: int
    consumer: str
    vb_id: int
    from_seqno: int
    to_seqno: int
    snap_end: int = 0
    """The end of the snapshot of which it had a part; 0: of none."""


class Excuse(NamedTuple):
    """From `at_ns` on, changes of a partition above a seqno may be gone: a branch, an unclean
    election, a lost folder without copies. A purge excuses a rollback to 0 only.

    It takes effect before `until_ns`, or never; None: it may still happen.
    """

    at_ns: int
    vb_id: int
    to_seqno: int
    kind: str
    until_ns: int | None = None


class Mastership(NamedTuple):
    """A node began to serve a partition as its master."""

    at_ns: int
    node: str
    incarnation: int
    vb_id: int
    epoch: int
    vb_uuid: int
    since_seqno: int = 0
    """The seqno at which its version began. A later loss may take the version itself away."""


class Lacking(NamedTuple):
    """A member of an in-sync set did not have on its disk what was called committed."""

    at_ns: int
    node: str
    vb_id: int
    synced_seqno: int
    committed_by: str
    vb_uuid: int
    seqno: int


class Overlap(NamedTuple):
    """Two nodes would have answered requests for a partition at the same time."""

    at_ns: int
    vb_id: int
    nodes: tuple[str, ...]


class Kept(NamedTuple):
    """A node had a stream open while another one was the partition's master in a later epoch."""

    at_ns: int
    node: str
    vb_id: int
    connection: str
    master: str
    since_ns: int


class History(NamedTuple):
    """What one node holds of a partition at some moment."""

    at_ns: int
    node: str
    vb_id: int
    versions: tuple[tuple[int, int], ...]
    """(vb_uuid, seqno at which it began), newest first."""
    high_seqno: int
    entries: dict[int, int]
    """Seqno -> `fingerprint` of the change. Seqnos may be missing where history was compacted."""
    tail: dict[int, int] = {}  # noqa: RUF012 - nobody changes it
    """Seqno -> CAS of changes that were not committed, if only these were looked at."""

    def end_of(self, vb_uuid: int) -> int | None:
        """Return the seqno at which a version ended; None: it is not in this history."""
        end = self.high_seqno
        for uuid, began in self.versions:
            if uuid == vb_uuid:
                return end
            end = began
        return None


class CutOffFact(NamedTuple):
    """A replica wrote a quarantine file."""

    at_ns: int
    node: str
    cut: CutOff
    dropped_in: int | None = None
    """The epoch of a copy that was dropped, which is emptied without asking the master; None: the
    master of `cut.epoch` has sent the replica back."""


class LostFact(NamedTuple):
    """A master told the loss of an unclean election."""

    at_ns: int
    node: str
    lost: ElectionLoss


class LostFolder(NamedTuple):
    """A machine lost its folder."""

    at_ns: int
    node: str


def fingerprint(cas: int, checksum: int) -> int:
    """Return what stands for a change: its CAS, and a 32-bit checksum of all of it."""
    return cas << 32 | checksum


def cas_of(change: int) -> int:
    """Return the CAS in a fingerprint."""
    return change >> 32


Place = tuple[int, int, int]
"""Partition, seqno and CAS of a change."""


class Told(NamedTuple):
    """What a consumer was told of a document."""

    consumer: str
    key: bytes
    rev_seqno: int
    flags: int
    expiry_s: int


class Map(NamedTuple):
    """The documents of a master or a consumer, at rest."""

    holder: str
    documents: dict[bytes, bytes]


class Facts:
    """Everything that was recorded in a run."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.committed: list[Committed] = []
        self.streamed: list[Streamed] = []
        self.rolled_back: list[RolledBack] = []
        self.followed: list[Streamed | RolledBack | Begun] = []
        """What consumers received, in that order."""
        self.replica_reads: list[Operation] = []
        """Answered by GET_REPLICA. They are no operations of a register: they may be old."""
        self.told: dict[Place, Told] = {}
        """What consumers were told of documents of the default collection."""
        self.collections: dict[str, int] = {}
        """The newest id of each name that exists."""
        self.max_ttls: dict[int, int] = {}
        """Of each collection that has one, the maxTTL in seconds."""
        self.excuses: list[Excuse] = []
        self.masterships: list[Mastership] = []
        self.lacking: list[Lacking] = []
        self.durable: list[Operation] = []
        """Writes that were answered as durable, until the disks are looked at."""
        self.on_few_disks: list[str] = []
        self.kept: list[Kept] = []
        self.handed: dict[tuple[int, int], int] = {}
        """Partition and epoch of each handover -> the version that was handed over."""
        self.overlaps: list[Overlap] = []
        self.histories: list[History] = []
        """Of all nodes, at the ends of their processes and at rest."""
        self.final: list[History] = []
        """Of the masters, at rest."""
        self.master_map: Map | None = None
        self.copy_maps: list[tuple[Map, list[Map]]] = []
        """Of each partition at rest: what its master has, and its copies in sync."""
        self.consumer_maps: list[Map] = []
        self.cut_off: list[CutOffFact] = []
        self.lost: list[LostFact] = []
        self.lost_folders: list[LostFolder] = []
        self.snapshots: set[tuple[str, int, int]] = set()
        """Node, partition and end of the snapshots of which a replica had a part."""
        self.ledger = Ledger()
        """Of runs with probers, or consumers that ask for cuts."""
        self.scans: list[Scanned] = []
        self.hashes: list[HashesRead] = []
        self.read_by_seqno: list[tuple[int, int, SentDocument]] = []
        """Partition, version, and what was answered for a seqno."""
        self.batches: list[Batch] = []
        self.repairs: list[Repair] = []
        self.damaged: list[Damaged] = []
        """Pages of stores that were damaged while processes ran."""
        self.met_damage = 0
        """How often a request, a stream or replication met them."""
        self.left_copies = 0
        """How often a consumer that reads from copies left one that met them."""
        self.cuts: list[CutHeld] = []
        self.after_cuts: list[AfterCut] = []
        self.works_ns = 0
        """From here on, every operation must be answered."""
        self.refused: list[str] = []
        """What nodes sent each other that the other one could not take."""
        self.problems: list[str] = []
        """What went wrong on the way, in words: each is a violation."""

    def receives(self, fact: Streamed | RolledBack | Begun) -> None:
        """Note what a consumer received."""
        self.followed.append(fact)
        if isinstance(fact, Streamed):
            self.streamed.append(fact)
        elif isinstance(fact, RolledBack):
            self.rolled_back.append(fact)

    def excuse(self, at_ns: int, vb_id: int, to_seqno: int, kind: str) -> None:
        """History may be cut back from now on."""
        self.excuses.append(Excuse(at_ns, vb_id, to_seqno, kind))

    def settle(self, now_ns: int, vb_id: int) -> None:
        """What could cut back a partition's history has happened, or never will."""
        self.excuses = [
            item._replace(until_ns=now_ns)
            if item.vb_id == vb_id and item.until_ns is None
            else item
            for item in self.excuses
        ]

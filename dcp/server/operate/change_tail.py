"""A live tail of the changes, for people: what is committed while they look on.

A tail keeps one position in each partition, and each step reads what is committed beyond. It holds
no stream and delays nobody: what is more than a person can read is counted and left out. On a
node of a cluster it also shows partitions of which the node has a copy only.

Invariants
- one step reads at most LOOKS_MAX versions, and returns at most ROWS_MAX of them;
- a change is shown only if it is committed, and only to a user who may read its key;
- a new version of a partition is told before the changes that follow it.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from dcp.server.operate.document_desk import KINDS, ValueRow, key_row, value_row
from dcp.server.operate.reports import Cas, Count, Seqno, UnixTime, VbId, VbUuid
from dcp.session.access.rights import Rights
from dcp.wire.opcode import Opcode
from vbucket.engine.engine import Engine
from vbucket.engine.partition import VbState
from vbucket.model.entry import META, OPCODE_AT, key_of, value_of
from vbucket.model.manifest import collection_of, decode_leb128
from vbucket.store.environment import StoreDamagedError

STEP_S: Final = 0.5
"""Time between two steps of a tail."""
LOOKS_MAX: Final = 1000
"""A step takes 10 ms at most."""
ROWS_MAX: Final = 100
"""More in half a second is nothing that a person reads."""
NEW_VERSIONS_MAX: Final = 50
_BYTES_AT_ONCE: Final = 1 << 20
_SHOWN: Final = frozenset({VbState.ACTIVE, VbState.REPLICA})


class TailFilter(NamedTuple):
    """What a tail shows."""

    collection_id: int | None = None
    """None: all collections."""
    prefix: bytes = b""
    kinds: frozenset[str] = frozenset(KINDS.values())


class TailRow(ValueRow):
    """One change."""

    kind: Annotated[str, Meta(extra_json_schema={"enum": sorted(KINDS.values())})]
    collection: str
    cas: Cas
    rev: Annotated[str, Meta(description="Its revision, as decimal text.")]


class NewVersion(msgspec.Struct):
    """A partition has a new version: its master is another one, or changes were undone."""

    vb: VbId
    vb_uuid: VbUuid
    seqno: Annotated[Seqno, Meta(description="It begins after this seqno.")]
    undone: Annotated[
        Count, Meta(description="Changes that the tail has passed and that are gone: a rollback.")
    ]
    time_s: UnixTime


class TailStep(msgspec.Struct):
    """What happened since the step before."""

    changes: Annotated[list[TailRow], Meta(description="Oldest first in each partition.")]
    versions: list[NewVersion]
    more_versions: Annotated[Count, Meta(description="New versions beyond those listed.")]
    passed: Annotated[Count, Meta(description="Changes of all kinds, shown or not.")]
    left_out: Annotated[Count, Meta(description="Changes that were not even looked at.")]
    seconds: Annotated[float, Meta(description="Time since the step before.")]


class ChangeTail:
    """See the module."""

    def __init__(self, engine: Engine, rights: Rights, wanted: TailFilter, now_s: float) -> None:
        """It begins with what is committed now; `now_s` is Unix time."""
        self._engine = engine
        self._rights = rights
        self._wanted = wanted
        self._last_s = now_s
        self._turn = 0
        """The partition that the next step begins with, so that each gets its share."""
        self._places = [(part.vb_uuid, part.committed_seqno) for part in engine.partitions]
        """(Version, position) of each partition."""

    def step(self, now_s: float) -> TailStep:
        """Return what happened since the last step. What is damaged on disk is left out."""
        out = TailStep([], [], 0, 0, 0, round(now_s - self._last_s, 3))
        self._last_s = now_s
        partitions = self._engine.partitions
        looks_left = LOOKS_MAX
        for number in range(len(partitions)):
            vb_id = (self._turn + number) % len(partitions)
            part, (vb_uuid, position) = partitions[vb_id], self._places[vb_id]
            if part.vb_uuid == vb_uuid and part.committed_seqno == position:
                continue
            if part.vb_uuid != vb_uuid:
                position = self._branched(out, vb_id, position, now_s)
            end = part.committed_seqno
            self._places[vb_id] = part.vb_uuid, end
            if end > position and part.state in _SHOWN:
                out.passed += end - position
                looks_left -= self._read(out, vb_id, position, end, looks_left)
        self._turn = (self._turn + 1) % len(partitions)
        return out

    def _branched(self, out: TailStep, vb_id: int, position: int, now_s: float) -> int:
        """Tell that a partition has a new version; return where the tail goes on."""
        current = self._engine.partitions[vb_id].failover.current
        undone = max(0, position - current.seqno)
        if len(out.versions) < NEW_VERSIONS_MAX or undone:
            version = NewVersion(vb_id, str(current.vb_uuid), current.seqno, undone, now_s)
            out.versions.append(version)
        else:
            out.more_versions += 1
        return min(position, current.seqno)

    def _read(self, out: TailStep, vb_id: int, position: int, end: int, looks_max: int) -> int:
        """Add the changes of one partition; return how many were looked at."""
        room = min(looks_max, ROWS_MAX - len(out.changes))
        if room <= 0:
            out.left_out += end - position
            return 0
        first = max(position + 1, end - room + 1)
        out.left_out += first - position - 1
        part = self._engine.partitions[vb_id]
        try:
            entries = self._engine.versions.entries(part, first, end, _BYTES_AT_ONCE)
            rows = [self._row(vb_id, entry) for entry in entries]
        except StoreDamagedError:
            out.left_out += end - first + 1
            return end - first + 1
        out.changes.extend(row for row in rows if row is not None)
        return end - first + 1

    def _row(self, vb_id: int, entry: bytes) -> TailRow | None:
        kind = KINDS.get(entry[OPCODE_AT])
        if kind is None or kind not in self._wanted.kinds:
            return None
        stored_key, keyspace = key_of(entry), self._engine.keyspace
        collection_id = collection_of(stored_key)
        if self._wanted.collection_id not in (None, collection_id):
            return None
        decoded = decode_leb128(stored_key)
        assert decoded is not None, "stored keys begin with a collection's id"
        key = stored_key[decoded[1] :]
        if not key.startswith(self._wanted.prefix) or not keyspace.is_reachable(stored_key):
            return None
        path = keyspace.manifest.path_of(collection_id)
        if self._rights.denial(Opcode.GET, path, key) is not None:
            return None
        _, _, datatype, _, cas, seqno, rev_seqno = META.unpack_from(entry)
        row = TailRow(
            **key_row(vb_id, key, seqno, cas), kind=kind, collection=path, cas=str(cas),
            rev=str(rev_seqno),
        )  # fmt: skip
        if kind == "set":
            value_row(row, datatype, value_of(entry))
        return row

"""Compares partitions of a task with the table that their query keeps, on an executor.

A partition that must begin at 0 is not read then: its hashes are compared with those of the table's
documents, and the task has the documents that differ, the keys that are gone, and a row that says
so. What was changed while the comparison went on is read from a stream, so the partition is at one
seqno. `clients.spark.plan` says why that is safe, `clients.spark.sink.rules` what becomes of it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

import pyarrow as pa

from clients.address import ServerAddress
from clients.errors import DcpdError
from clients.kv.held import ROW, Held, HeldDocument
from clients.kv.resync import Found, Resync
from clients.spark.columns import Changes, Chunk, changes_of, heads_of
from clients.spark.plan import PlanStep
from clients.spark.sink.table_copy import DEFAULT_COLLECTION, versions_in
from clients.sync import LoopThread
from dcp.wire.frame import pack_request
from dcp.wire.hash_reads import SentDocument
from dcp.wire.message import MUTATION_EXTRAS
from dcp.wire.opcode import Opcode
from vbucket.model.manifest import encode_leb128
from vbucket.native.key_hashes import Row

TIMEOUT_S: Final = 10.0
"""How long an answer may take before the partition is read from 0."""
_U64_MASK: Final = 2**64 - 1
_PLACE: Final = Struct("=q")
_LOG: Final = logging.getLogger("dcpd.spark")


class Differing(NamedTuple):
    """What a comparison found in a partition."""

    step: PlanStep
    seqno: int
    """All of it is as of this one."""
    changes: Changes | None
    gone: list[tuple[int, bytes]]
    """Collection id and key."""
    rest: PlanStep | None
    """What a stream has to bring yet, up to `seqno`."""


class TableHeld(Held):
    """The documents of some partitions of a table."""

    def __init__(self, path: str, vb_ids: Sequence[int], ids: Mapping[str, int]) -> None:
        """`ids`: those of the collections that are followed, by name. Raises DcpdError."""
        rows = versions_in(path, vb_ids=vb_ids).sort_by("vb")
        self._table, self._vbs = rows, rows["vb"].to_numpy()
        self._ids = {DEFAULT_COLLECTION: 0, **ids}
        self._has_collections = "collection" in rows.column_names

    def documents(self, vb_id: int) -> Iterator[HeldDocument]:
        """See Held. A collection that is not followed any more has a number that none has."""
        for collection_id, rows in self._rows(vb_id).items():
            for key, version in rows:
                cas, revision = ROW.unpack(version)
                yield HeldDocument(key, cas, revision, collection_id)

    def _rows(self, vb_id: int) -> dict[int, list[Row]]:
        first, stop = (self._vbs.searchsorted(vb_id, side) for side in ("left", "right"))
        some: Any = self._table.slice(first, stop - first)
        keys = some["key"].cast(pa.binary()).to_pylist()
        names = some["collection"].to_pylist() if self._has_collections else ()
        ids = [self._ids.get(name, -1) for name in names] or [0] * len(keys)
        found: dict[int, list[Row]] = defaultdict(list)
        versions = zip(some["cas"].to_pylist(), some["revision"].to_pylist(), strict=True)
        for key, (cas, revision), number in zip(keys, versions, ids, strict=True):
            found[number].append((key, ROW.pack(cas & _U64_MASK, revision & _U64_MASK)))
        return found


def compare(
    servers: Sequence[ServerAddress],
    steps: Sequence[PlanStep],
    path: str,
    collections: Mapping[str, int],
    left: list[PlanStep],
) -> Iterator[Differing]:
    """Yield in what partitions differ from a table. Those that have to be read from 0, because the
    table has nothing of them or they cannot be compared, are added to `left`.
    """
    if not steps:
        return
    vb_ids = [step.vb_id for step in steps]
    first, *others = (place for server in servers for place in server.places)
    address = servers[0].at(*first)._replace(others=tuple(others))
    thread = LoopThread("dcpd-spark-compare")
    resync: Resync | None = None
    done = 0
    try:
        held = TableHeld(path, vb_ids, collections)
        resync = Resync(address, held, tuple(collections.values()), TIMEOUT_S)
        for done, step in enumerate(steps):
            found = thread.call(resync.partition(step.vb_id, vb_ids[done:]))
            if found is None or not found.seqno:
                left.append(_from_0(step))
            else:
                yield _differing(step, found)
    except DcpdError as error:
        _LOG.warning("%d partitions are read from 0: %s", len(steps) - done, error)
        left += map(_from_0, steps[done:])
    finally:
        if resync is not None:
            thread.call(resync.close())
        thread.stop()


def _from_0(step: PlanStep) -> PlanStep:
    return step._replace(compares=False)


def _differing(step: PlanStep, found: Found) -> Differing:
    """Return what a task hands out. Documents above the seqno of the hashes come in a stream."""
    sent = [each for each in found.changed if each[1].version.seqno <= found.seqno]
    later = [each for each in found.changed if each[1].version.seqno > found.seqno]
    rest = None
    if found.read_seqno > found.seqno:
        rest = PlanStep(
            step.vb_id, found.seqno, found.versions, found.read_seqno, found.versions
        )  # fmt: skip
    # What is above is not in the table afterwards, until the stream has brought it.
    gone = [*found.gone, *((number, each.version.key) for number, each in later)]
    return Differing(step, found.read_seqno, changes_from(step.vb_id, sent, found), gone, rest)


def changes_from(
    vb_id: int, sent: Sequence[tuple[int, SentDocument]], found: Found
) -> Changes | None:
    """Return documents as columns, as those of a stream's changes."""
    if not sent:
        return None
    packets = [
        pack_request(
            Opcode.DCP_MUTATION, vb_id=vb_id, opaque=vb_id, cas=each.version.cas,
            datatype=each.datatype, key=encode_leb128(collection_id) + each.version.key,
            value=each.value, extras=MUTATION_EXTRAS.pack(
                each.version.seqno, each.version.rev_seqno, each.flags, each.expiry_s, 0, 0, 0
            ),
        )
        for collection_id, each in sent
    ]  # fmt: skip
    places, at = [], 0
    for packet in packets:
        places.append(_PLACE.pack(at))
        at += len(packet)
    chunk = Chunk(b"".join(packets), b"".join(places))
    return changes_of(chunk.data, heads_of(chunk), {vb_id: found.versions}, has_prefix=True)

"""Turns the option `start` into positions, for partitions without a checkpoint.

    "beginning"             from seqno 0
    "now"                   changes after the request (the core finds the position)
    {vb: seqno}             changes after that seqno in the partition's current history
    {vb: Position}          changes after a position that you stored
    datetime (with a zone)  changes at or after that time

The time of a change is in its CAS, which rises with the seqnos of a partition. The server returns
the seqno before the first change at or after the time (STAT group `seqno-at`). If a server does not
have that group, the partition is streamed from 0, and the client drops older changes.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Final, NamedTuple

from clients.consumer.extensions import DEFAULT_ONLY
from clients.consumer.node_session import LOG
from clients.consumer.options import Chosen, Start, time_ns_of
from clients.consumer.placement import Placement
from clients.errors import UnsupportedError, error_from_status
from clients.kv.hash_reads import positions_at
from clients.link.pipelined_link import Link
from clients.operation import collection_id_of
from clients.position import Position
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

QUESTIONS_AT_ONCE: Final = 64
"""Concurrent look-ups on one connection. Each costs the server about twenty reads."""
_UNKNOWN: Final = frozenset({Status.KEY_ENOENT, Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED})


class Starts(NamedTuple):
    """The starting positions of partitions; None means now."""

    positions: dict[int, Position | None]
    older_than: dict[int, int]
    """Partition -> CAS. The client drops changes with a lower CAS."""


async def find_starts(placement: Placement, start: Start, vb_ids: list[int]) -> Starts:
    """Return the starting positions of partitions without a checkpoint. Asks nodes if necessary."""
    positions: dict[int, Position | None] = dict.fromkeys(vb_ids, Position())
    older_than: dict[int, int] = {}
    if start == "now":
        positions = dict.fromkeys(vb_ids)
    if isinstance(start, str) or not vb_ids:
        return Starts(positions, older_than)
    for link, members in await placement.links_of(vb_ids):
        seqnos: dict[int, int] | None
        if isinstance(start, datetime):
            time_ns = time_ns_of(start)
            seqnos = await seqnos_at(link, members, time_ns)
            if seqnos is None:
                LOG.warning("%s cannot look up seqnos by time: streaming from 0", link.node)
                older_than.update(dict.fromkeys(members, time_ns))
                continue
        else:
            given = {vb_id: start.get(vb_id, 0) for vb_id in members}
            positions.update({k: v for k, v in given.items() if isinstance(v, Position)})
            seqnos = {k: v for k, v in given.items() if not isinstance(v, Position)}
        positions.update(await positions_at(link, seqnos))
    return Starts(positions, older_than)


async def find_collections(link: Link, wanted: Chosen) -> tuple[int, ...]:
    """Return the ids of the chosen collections. Raises UnknownCollectionError, UnsupportedError."""
    if wanted is None:
        return DEFAULT_ONLY
    if not link.has_collections:
        raise UnsupportedError("the server has no collections", node=link.node)
    ids = []
    for item in () if wanted == "all" else wanted:
        if isinstance(item, int):
            ids.append(item)
            continue
        frame = await link.request(Opcode.GET_COLLECTION_ID, key=item.encode())
        ids.append(collection_id_of(frame, item, link.node))
    return tuple(ids)


async def seqnos_at(link: Link, vb_ids: list[int], time_ns: int) -> dict[int, int] | None:
    """Return the seqno of each partition before a time.

    None if the server does not support the STAT group. Raises StatusError.
    """
    found: dict[int, int] = {}
    for at in range(0, len(vb_ids), QUESTIONS_AT_ONCE):
        some = vb_ids[at : at + QUESTIONS_AT_ONCE]
        answers = await asyncio.gather(
            *(link.request_stat(b"seqno-at %d %d" % (vb_id, max(0, time_ns))) for vb_id in some)
        )
        for vb_id, frames in zip(some, answers, strict=True):
            if not frames or frames[-1].status in _UNKNOWN:
                return None
            if frames[-1].status:
                raise error_from_status(
                    frames[-1].status, "stat seqno-at", body=frames[-1].value,
                    vb_id=vb_id, node=link.node,
                )  # fmt: skip
            values = {frame.key: frame.value for frame in frames}
            if b"vb_%d:seqno_at" % vb_id not in values:
                return None
            found[vb_id] = int(values[b"vb_%d:seqno_at" % vb_id])
    return found

"""Why a restore changed nothing: is the server's version the same as the archive's, or newer?

A restore that is run again writes nothing, which is right. A restore of documents that were changed
or deleted since the backup writes nothing either, and that is seldom what its user wants. GET_META
tells the two apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from clients.backup.restore_load import Load, frames_of_load
from clients.link.dials import Dials
from clients.link.topology import Place
from dcp.wire.frame import HEADER_BYTES, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

COMPARED_MAX: Final = 10_000
"""Most documents that are compared: they are kept in memory while the restore runs."""
_HEAD: Final = Struct(">xBHB11xQQQ")
"""Of a stored frame: opcode, key length, extras length, CAS, seqno, revision."""
_META: Final = Struct(">IIIQ")
"""Of an answer to GET_META: whether it is deleted, flags, expiry, revision."""
_BATCH: Final = 500


class Kept(NamedTuple):
    """A version in the archive; `key` is a stored key, with its collection's id."""

    vb_id: int
    key: bytes
    rev_seqno: int
    cas: int


class NewerOnServer(NamedTuple):
    """How many of the compared documents are newer on the server, and how many of these are
    deleted there.
    """

    compared: int
    newer: int
    deleted: int


class KeptSample:
    """The first documents that a restore sends."""

    def __init__(self) -> None:
        self.kept: list[Kept] = []

    def take(self, load: Load) -> None:
        """Take the documents of a load, up to COMPARED_MAX in all."""
        if len(self.kept) >= COMPARED_MAX:
            return
        for frame in frames_of_load(load)[: COMPARED_MAX - len(self.kept)]:
            _, key_len, extras_len, cas, _, rev_seqno = _HEAD.unpack_from(frame)
            key_at = HEADER_BYTES + extras_len
            key = frame[key_at : key_at + key_len]
            self.kept.append(Kept(load.vb_id, key, rev_seqno, cas))


async def newer_on_server(dials: Dials, kept: Sequence[Kept]) -> NewerOnServer:
    """Compare versions with those of a server. What it does not tell, for example because the user
    may not read, counts as not compared. Raises ConnectError and other DcpdErrors.
    """
    topology = dials.cluster.topology
    assert topology is not None
    by_place: dict[Place, list[Kept]] = defaultdict(list)
    for one in kept:
        place = topology.place_of(one.vb_id)
        if place is not None:
            by_place[place].append(one)
    compared = newer = deleted = 0
    for place, items in by_place.items():
        link = await dials.connect(place)
        try:
            for at in range(0, len(items), _BATCH):
                batch = items[at : at + _BATCH]
                opaque = link.take_opaques(len(batch))
                packets = b"".join(
                    pack_request(Opcode.GET_META, vb_id=one.vb_id, key=one.key, opaque=opaque + n)
                    for n, one in enumerate(batch)
                )
                for one, frame in zip(
                    batch, await link.send_batch(packets, opaque, len(batch)), strict=True
                ):
                    if frame.status != Status.OK or len(frame.extras) < _META.size:
                        continue
                    is_deleted, _, _, rev_seqno = _META.unpack_from(frame.extras)
                    compared += 1
                    if (rev_seqno, frame.cas) > (one.rev_seqno, one.cas):
                        newer += 1
                        deleted += bool(is_deleted)
        finally:
            link.close()
    return NewerOnServer(compared, newer, deleted)

"""A restore with asyncio: from an archive, as of a point, into a server.

    Reader -> newest versions, in seqno order -> Loader -> X_PUT_FRAMES -> Link

Documents keep flags, expiry, datatype, revision and CAS, and are sent in the order of their
changes. The server replaces a CAS that is too far ahead of its clock; these are counted.
What the server has already, by hashes, is not sent (`clients.backup.present`), except with `force`.
The server resolves conflicts: its own document or deletion wins if its revision is higher, or equal
with a CAS that is not lower. With `force` the archive always wins. Documents that are not in the
archive stay. So a restore can be run again.

If a whole section is selected and its collections have the same ids in the target, its frames are
sent unchanged. Otherwise each frame is checked and, if necessary, rewritten.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import compress, count
from struct import Struct
from typing import Final, NamedTuple

from clients.address import ServerAddress
from clients.backup.archives.archive import Archive
from clients.backup.archives.archive_errors import BackupError
from clients.backup.archives.archive_manifest import RunRecord
from clients.backup.archives.point import Point
from clients.backup.present import HEAD_BYTES, Present
from clients.backup.reading import Damage, Findings, PointReader, View
from clients.backup.restore_link import RESTORE_FEATURES, RETRY_PAUSE_S, RestoreWriter
from clients.backup.restore_load import (
    SKIP_CONFLICT_RESOLUTION,
    Load,
    Loader,
    by_key,
    frames_of_load,
    loads_of,
)
from clients.backup.run import collections_of
from clients.backup.selection import Routes, Selection, split_key
from clients.backup.strip import Stretch
from clients.kv.hash_reads import HashReader
from clients.link.dials import Dials
from clients.link.pipelined_link import Link
from clients.link.topology import Place
from dcp.wire.frame import HEADER_BYTES, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.entry import key_in_frame
from vbucket.native.key_hashes import Row

_KIND: Final = Struct(">xBHB")
"""Opcode, key length, extras length."""
_MUTATION: Final = int(Opcode.DCP_MUTATION)
HASHES_S: Final = 5.0
"""How long a server may refuse, or take, to tell what it has. Then everything is sent."""
COMPARED_MAX: Final = 10_000
"""Most documents that are compared: they are kept in memory while the restore runs."""
_HEAD: Final = Struct(">xBHB11xQQQ")
"""Of a stored frame: opcode, key length, extras length, CAS, seqno, revision."""
_META: Final = Struct(">IIIQ")
"""Of an answer to GET_META: whether it is deleted, flags, expiry, revision."""
_BATCH: Final = 500


class RestorePlan(NamedTuple):
    """The documents that a restore sends, or has sent."""

    runs: tuple[int, ...]
    partitions: int
    """Partitions with at least one document or deletion."""
    documents: int
    deletions: int
    value_bytes: int
    by_collection: dict[str, int]
    """Documents by target collection."""
    earlier: dict[int, tuple[int, int]]
    """Partition -> (requested seqno, seqno of the complete state before it that is used)."""
    damages: list[Damage]
    broken: dict[str, str]
    """Manifests of runs that could not be used (`salvage`), and why."""


class RestoreReport(NamedTuple):
    """The result of a restore."""

    plan: RestorePlan
    written: int
    kept_newer: int
    """Documents and deletions for which the server's version won."""
    replaced_cas: int
    """Documents and deletions that got a new CAS, because theirs was too far ahead of the server's
    clock."""
    refused: dict[int, tuple[int, str]]
    """Status -> (number of permanent refusals, text of the first error)."""
    created: tuple[str, ...]
    """Collections that were created."""
    seconds: float
    newer: NewerOnServer | None = None
    """If nothing was written: how many documents are newer on the server."""
    equal: int = 0
    """Of `kept_newer`: those that were not sent, because the server has them by its hashes."""

    @property
    def is_whole(self) -> bool:
        """Whether the server has now what the archive has, or a version that was merged with it.

        It has not if everything was kept and some of that is newer than in the archive.
        """
        return not self.refused and (self.newer is None or not self.newer.newer)


class _Counts:
    """Counters of a restore."""

    def __init__(self) -> None:
        self.deletions = self.value_bytes = self.partitions = 0
        self.equal = 0
        """Documents and deletions that were not sent, because the server has them."""
        self.by_source: Counter[bytes] = Counter()
        """Documents by their collection id in the archive."""
        self.findings = Findings()

    def view(self, view: View) -> None:
        """Count a partition."""
        self.partitions += bool(view.parts if view.winners is None else view.winners)
        self.findings.take(view)

    def plan(
        self, runs: Sequence[RunRecord], names: Mapping[bytes, str], broken: dict[str, str]
    ) -> RestorePlan:
        """Return the counts. `names`: collection id -> target collection."""
        by_collection: Counter[str] = Counter()
        for source, documents in self.by_source.items():
            by_collection[names[source]] += documents
        return RestorePlan(
            tuple(record.run for record in runs), self.partitions, self.by_source.total(),
            self.deletions, self.value_bytes, dict(by_collection),
            self.findings.earlier, self.findings.damages, broken,
        )  # fmt: skip


class Restore:
    """One restore. `create(scope.collection, max_ttl_s)` creates a collection on the server.
    Without it a missing collection is an error.
    """

    def __init__(
        self,
        archive: Archive,
        point: Point,
        selection: Selection,
        *,
        force: bool = False,
        salvage: bool = False,
        create: Callable[[str, int], None] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        features: tuple[int, ...] = RESTORE_FEATURES,
        retry_pause_s: float = RETRY_PAUSE_S,
    ) -> None:
        """Raises BackupErrors if the archive lacks the point or the selection."""
        self.runs, self._broken = archive.runs_and_losses_of(point, salvage=salvage)
        self._url = archive.url
        self._num_vbuckets = archive.record.partitions
        self._point = point
        self._selection = selection
        self._routes = Routes(selection, self.runs)
        self._reader = PointReader(archive, self.runs, salvage=salvage)
        self._options = SKIP_CONFLICT_RESOLUTION if force else 0
        self._prefix = selection.prefix
        self._create = create
        self._features = features
        self._retry_pause_s = retry_pause_s
        self._on_progress = on_progress or (lambda _done, _total: None)
        self._vb_ids = sorted({vb_id for record in self.runs for vb_id in record.legs})
        point.check_partitions(self._vb_ids)
        self._counts = _Counts()
        self._prefixes: dict[bytes, bytes] = {}
        self._names: dict[bytes, str] = {}

    def plan(self) -> RestorePlan:
        """Return what a restore would do, without a server."""
        paths, targets = self._routes.paths, self._targets()
        names = {path: key for key, path in paths.items() if path in targets}
        self._use(names | dict(zip(sorted(targets - names.keys()), count(max(paths) + 1))))
        for view in self._views():
            for _ in self._loads(view):
                pass
        return self._counts.plan(self.runs, self._names, self._broken)

    async def run(self, address: ServerAddress) -> RestoreReport:
        """Restore into a server. Raises DcpdErrors. A failed restore can be run again."""
        began_s = time.monotonic()
        dials = Dials(address, asyncio.Event(), features=self._features)
        link = await dials.refreshed_link()
        try:
            created = await self._prepare_collections(link)
        finally:
            link.close()
        assert dials.cluster.topology is not None
        num_vbuckets = dials.cluster.topology.num_vbuckets
        is_same_number = num_vbuckets == self._num_vbuckets
        writer = RestoreWriter(dials, self._options, retry_pause_s=self._retry_pause_s)
        sample = KeptSample()
        present = await self._present(address) if is_same_number else None
        try:
            for view in self._views():
                loads = self._loads(view)
                if present is not None and await present.ask(view.vb_id):
                    lacking = present.lacking(view.vb_id, self._rows(view))
                    loads = loads_of(view.vb_id, self._frames(view, lacking))
                for load in loads:
                    for placed in (load,) if is_same_number else by_key(load, num_vbuckets):
                        sample.take(placed)
                        await writer.send(placed)
            await writer.finish()
        finally:
            await writer.close()
            if present is not None:
                await present.close()
        refused = {
            status: (count, writer.examples[status]) for status, count in writer.refused.items()
        }
        plan = self._counts.plan(self.runs, self._names, self._broken)
        kept = writer.kept_newer + self._counts.equal
        written = plan.documents + plan.deletions - kept
        written -= sum(writer.refused.values())
        newer = None
        if kept and not written:
            newer = await newer_on_server(dials, sample.kept)
        return RestoreReport(
            plan, written, kept, writer.replaced_cas,
            refused, created, time.monotonic() - began_s, newer, self._counts.equal,
        )  # fmt: skip

    # -- inside --------------------------------------------------------------------------------

    def _targets(self) -> set[str]:
        routes = self._routes
        return {path for key in routes.paths if (path := routes.target(key)) is not None}

    def _use(self, ids: dict[str, int]) -> None:
        """Set the collection ids of the target."""
        self._prefixes = self._routes.key_prefixes(ids)
        by_id = {key: self._routes.target(split_key(key + b"k")[0]) or "" for key in self._prefixes}
        self._names = by_id

    async def _prepare_collections(self, link: Link) -> tuple[str, ...]:
        found = await collections_of(link)
        ids = {path: key for key, (path, _) in found.items()}
        missing = sorted(self._targets() - ids.keys())
        # Only the collections of the newest run are required: others may have been dropped.
        current = {path for path, _ in self.runs[-1].collections.values()}
        mapping = self._selection.mapping
        wanted = [path for path in missing if path in {mapping.get(item, item) for item in current}]
        if wanted and self._create is None:
            raise BackupError(
                f"the server has no collection {', '.join(wanted)}", node=link.node,
                hint="Use --create-collections to create them, --map to restore into others, or"
                " --collection to select.",
            )  # fmt: skip
        for path in wanted:
            assert self._create is not None
            source = next((a for a, b in mapping.items() if b == path), path)
            await asyncio.to_thread(self._create, path, self._routes.max_ttl_s.get(source, 0))
        if wanted:
            found = await collections_of(link)
            ids = {path: key for key, (path, _) in found.items()}
        self._use(ids)
        return tuple(wanted)

    def _views(self) -> Iterator[View]:
        for index, vb_id in enumerate(self._vb_ids):
            view = self._reader.view(vb_id, self._point)
            self._counts.view(view)
            yield view
            self._on_progress(index + 1, len(self._vb_ids))
        self._counts.findings.check(self._url)

    async def _present(self, address: ServerAddress) -> Present | None:
        """Return what tells what the server has; None if that says nothing about what is selected:
        the values count, too, or a collection gets only a part of what it may have.
        """
        targets = set(self._prefixes.values())
        if self._options or self._prefix or len(targets) != len(self._prefixes):
            return None
        return Present(await HashReader.open(address, HASHES_S), targets, self._vb_ids)

    def _rows(self, view: View) -> Iterator[tuple[bytes, Row]]:
        """Yield the selected changes of a partition, as `Present.lacking` takes them."""
        for data, start, _ in self._reader.frames(view):
            found = self._place_of(data, start)
            if found is not None:
                _, target, name_at, key_end = found
                row = target + data[name_at:key_end], data[start : start + HEAD_BYTES]
                yield target, row

    def _frames(self, view: View, wanted: Collection[bytes]) -> Iterator[bytes]:
        """Yield the frames of these keys, as the target gets them; count all."""
        for data, start, stop in self._reader.frames(view):
            frame = self._frame(data, start, stop)
            if frame is None:
                continue
            if key_in_frame(frame) in wanted:
                yield frame
            else:
                self._counts.equal += 1

    def _loads(self, view: View) -> Iterator[Load]:
        loader = Loader(view.vb_id)
        for stretch in self._reader.stretches(view):
            self._take(stretch, loader)
            yield from loader.take(is_last=False)
        yield from loader.take(is_last=True)

    def _take(self, stretch: Stretch, loader: Loader) -> None:
        """Add a stretch of frames to the loader, rewritten for the target if necessary."""
        kinds = set(stretch.first_bytes)
        if self._prefix or not all(map(self._is_same, kinds)):
            for start, stop in zip(stretch.starts, stretch.ends, strict=True):
                frame = self._frame(stretch.data, start, stop)
                if frame is not None:
                    loader.add(frame)
            return
        data, starts, ends, opcodes, key_sizes, extras_sizes, firsts, body_sizes = stretch
        documents = opcodes.count(_MUTATION)
        counts = self._counts
        if documents < len(opcodes):
            firsts = bytes(compress(firsts, (opcode == _MUTATION for opcode in opcodes)))
        for first in kinds:
            counts.by_source[bytes((first,))] += firsts.count(first)
        counts.deletions += len(opcodes) - documents
        counts.value_bytes += sum(ends) - sum(starts) - len(starts) * HEADER_BYTES
        counts.value_bytes -= sum(key_sizes) + sum(extras_sizes)
        if body_sizes is not None:
            loader.add_run(data, starts, ends, body_sizes)
        else:
            for start, stop in zip(starts, ends, strict=True):
                loader.add(data[start:stop])

    def _is_same(self, first: int) -> bool:
        """Whether keys that begin with this byte have the same collection id in the target."""
        prefix = bytes((first,))
        return self._prefixes.get(prefix) == prefix

    def _frame(self, data: bytes, start: int, stop: int) -> bytes | None:
        """Return a stored frame with the target's collection id; None if it is not selected."""
        found = self._place_of(data, start)
        if found is None:
            return None
        source, target, name_at, key_end = found
        opcode, counts = data[start + 1], self._counts
        if opcode == _MUTATION:
            counts.by_source[source] += 1
            counts.value_bytes += stop - key_end
        else:
            counts.deletions += 1
        if target == source:
            return data[start:stop]
        more, key_at = len(target) - len(source), name_at - len(source)
        sizes = (key_end - key_at + more).to_bytes(2, "big"), stop - start - HEADER_BYTES + more
        return b"".join((
            data[start : start + 2], sizes[0], data[start + 4 : start + 8],
            sizes[1].to_bytes(4, "big"), data[start + 12 : key_at], target, data[name_at:stop],
        ))  # fmt: skip

    def _place_of(self, data: bytes, start: int) -> tuple[bytes, bytes, int, int] | None:
        """Return the collection's id in a stored frame and in the target, where the name begins,
        and where the key ends; None: it is not selected.
        """
        _, key_len, extras_len = _KIND.unpack_from(data, start)
        key_at = start + HEADER_BYTES + extras_len
        source = _collection_id_of(data, key_at)
        target, name_at = self._prefixes.get(source), key_at + len(source)
        if target is None or not data.startswith(self._prefix, name_at):
            return None
        return source, target, name_at, key_at + key_len


def _collection_id_of(data: bytes, key_at: int) -> bytes:
    """Return the encoded collection id at the beginning of a key."""
    end = key_at + 1
    while data[end - 1] & 0x80:
        end += 1
    return data[key_at:end]


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
    """Say why a restore changed nothing: compare versions with those of the server.

    A restore that is run again writes nothing, which is right. A restore of documents that were
    changed or deleted since the backup writes nothing either, and that is seldom what its user
    wants. What the server does not tell, for example because the user may not read, counts as not
    compared. Raises ConnectError and other DcpdErrors.
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

"""Loads: which packets of a restore go straight into the store, and what that changes. Sans-IO.

    takes(vb_id), add(...)   a session asks, and hands over a packet
    ahead(room_bytes)        packets that may travel to the store process before their load
    begin() -> requests      the shell sends them to the store process (`store_load`)
    done(reports)            the store has them: the partitions show their new documents
    apply_next()             applies a packet that cannot be loaded after all

Such a packet is applied in the ordinary way, by the function that came with it: the store says that
a key exists, for example, or the disk is full.

Invariants
- a partition that has packets here takes no other writes (`Hold.LOADING`), so its seqnos after the
  load are known before;
- while a request is under way, the log has nothing of its partition that the store lacks and that
  does not commute with the load: no changes of documents, no branch, no collections. What is there
  (floors, states) may come before or after. `Keyspace.loading` has these partitions; operators get
  an error instead of a branch or another manifest, and loads pause for them;
- packets of a partition are loaded or applied in the order in which they came;
- a node with replicas loads nothing: these get changes from the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count as count_from
from typing import Final

from vbucket.engine.keyspace import Keyspace
from vbucket.engine.loading.store_load import LoadReport, LoadRequest, Packet
from vbucket.engine.partition import Hold, Partition, VbState
from vbucket.model.collection_counts import CollectionCounts

LOAD_BYTES_MAX: Final = 8 << 20
"""Bytes of packets in one transaction of the store. It takes some 60 ms, other work of the store
process waits that long, and passing them on takes the loop some 5 ms. With fewer, each transaction
has less to share its syncs."""
AHEAD_BYTES_MAX: Final = 2 * LOAD_BYTES_MAX
"""Bytes of packets that the store process keeps: those of the load under way, and of the next."""
WAITING_BYTES_MAX: Final = 32 << 20
"""Bytes of packets that are kept. Sessions wait with more. One restore has half as much under
way."""
PAUSE_NS: Final = 3_000_000_000
"""How long packets are applied in the ordinary way after an operator's request was refused because
of a load. A request that is repeated meanwhile finds no load."""
_HELD: Final = "documents of a restore are being loaded into the partition; try again"
_BUSY: Final = "documents of a restore are being loaded; try again in a second"

Apply = Callable[[], tuple[bytes, int]]
"""Applies a packet in the ordinary way; returns its answer and the commit group it waits for."""


class LoadTicket:
    """A packet that is loaded, until its answer may leave."""

    __slots__ = ("answer", "apply", "count", "group", "is_done", "number", "packet")

    def __init__(self, count: int, packet: bytes, answer: bytes, apply: Apply) -> None:
        self.count = count
        self.packet = packet
        self.answer = answer
        self.apply = apply
        self.number = 0
        """Its number among all packets."""
        self.group = 0
        """The commit group that the answer waits for, if the packet was applied."""
        self.is_done = False

    def finish(self) -> None:
        """The packet is in the store. Its bytes are not needed any more."""
        self.is_done, self.packet = True, b""

    def apply_now(self) -> None:
        """Apply the packet in the ordinary way."""
        self.answer, self.group = self.apply()
        self.finish()


class Loads:
    """See the module."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._partitions = keyspace.partitions
        self.on_work: Callable[[], None] | None = None
        """Called with the first packet that waits. None: nothing is loaded here."""
        self.on_packet: Callable[[], None] = _nobody_asks
        """Called with each packet: `ahead` may have it."""
        self._numbers = count_from(1)
        self._unsent: dict[int, LoadTicket] = {}
        """Packets that are not sent ahead, by number."""
        self._waiting: dict[int, list[LoadTicket]] = {}
        self._under_way: dict[int, list[LoadTicket]] = {}
        self._ordinary: dict[int, list[LoadTicket]] = {}
        """Packets to apply in the ordinary way, before anything else of their partition."""
        self._waiting_bytes = 0
        self._has_merged = False
        """Whether everything is merged that the log had at the start."""
        self._is_draining = False
        """Somebody waits until nothing is loaded: no packet is taken before."""
        self._now_ns = self._paused_until_ns = 0
        self.documents = 0
        """Documents and deletions that were loaded."""

    @property
    def is_full(self) -> bool:
        """Whether sessions must wait with more packets."""
        return self._waiting_bytes >= WAITING_BYTES_MAX or self._is_draining

    @property
    def has_work(self) -> bool:
        """Whether packets wait, or are being loaded."""
        return bool(self._waiting or self._under_way or self._ordinary)

    def _has(self, vb_id: int) -> bool:
        return vb_id in self._waiting or vb_id in self._under_way or vb_id in self._ordinary

    def takes(self, vb_id: int, now_ns: int) -> bool:
        """Whether a packet of a partition may be loaded; `now_ns` is Unix time."""
        self._now_ns = now_ns
        if self.on_work is None:
            return False
        if self._has(vb_id):
            return True
        part = self._partitions[vb_id]
        return (
            part.state == VbState.ACTIVE
            and not part.holds
            and not part.has_copies
            and part.mended is None
            # What is not merged yet can be merged first, but not for each packet of a partition
            # that others write to.
            and (not part.item_count or self._is_merged(part))
            and not self._paused_until_ns - PAUSE_NS <= now_ns < self._paused_until_ns
        )

    def add(self, vb_id: int, ticket: LoadTicket) -> None:
        """Take a packet. `takes` has just said that it may be loaded."""
        self._partitions[vb_id].hold_writes(Hold.LOADING, _HELD)
        begins = not self.has_work
        ticket.number = next(self._numbers)
        self._unsent[ticket.number] = ticket
        self._waiting.setdefault(vb_id, []).append(ticket)
        self._waiting_bytes += len(ticket.packet)
        if begins and self.on_work is not None:
            self.on_work()
        self.on_packet()

    def why_busy(self, vb_id: int | None = None) -> str:
        """Return why a partition (None: any) cannot get another history or manifest now, "" if it
        can. Loads pause then, so that somebody who tries again succeeds: sessions wait until those
        that were taken are done.
        """
        is_busy = bool(self._under_way) if vb_id is None else self._has(vb_id)
        if is_busy:
            self._paused_until_ns = self._now_ns + PAUSE_NS
            self._is_draining = True
        return _BUSY if is_busy else ""

    # -- called by the shell ---------------------------------------------------------------------

    @property
    def wants_merge(self) -> bool:
        """Whether something of the waiting partitions must be merged before they are loaded."""
        return not self._has_merged or any(
            not self._is_merged(self._partitions[vb_id]) for vb_id in self._waiting
        )

    def note_merged(self) -> None:
        """Take note that everything was merged that was there when the shell began to ask."""
        self._has_merged = True

    def ahead(self, room_bytes: int) -> list[Packet]:
        """Return packets for which the store process has room, each once, in order."""
        found: list[Packet] = []
        for ticket in self._unsent.values():
            room_bytes -= len(ticket.packet)
            if room_bytes < 0:
                break
            found.append(_packet_of(ticket))
        for packet in found:
            del self._unsent[packet.number]
        return found

    def begin(self) -> list[LoadRequest]:
        """Return what to load next, perhaps nothing. Packets of partitions that cannot be loaded
        are left to `apply_next`.
        """
        assert not self._under_way, "one load is under way at a time"
        assert not self._ordinary, "what is not loaded comes first"
        requests: list[LoadRequest] = []
        size = 0
        for vb_id in list(self._waiting):
            part = self._partitions[vb_id]
            if part.state != VbState.ACTIVE or not (self._has_merged and self._is_merged(part)):
                self._ordinary[vb_id] = self._waiting.pop(vb_id)
                continue
            tickets = self._waiting[vb_id]
            chosen: list[LoadTicket] = []
            while tickets and (size < LOAD_BYTES_MAX or not (chosen or requests)):
                chosen.append(tickets.pop(0))
                size += len(chosen[-1].packet)
            if not tickets:
                del self._waiting[vb_id]
            if not chosen:
                break
            self._under_way[vb_id] = chosen
            packets = [_packet_of(ticket) for ticket in chosen]
            for packet in packets:
                self._unsent.pop(packet.number, None)
            requests.append(
                LoadRequest(vb_id, part.high_seqno, part.vb_uuid, part.leader_epoch, packets)
            )
        self._keyspace.loading.update(self._under_way)
        return requests

    def done(self, reports: Sequence[LoadReport]) -> list[int]:
        """Take note of what the store has loaded; the caller has refreshed its view of it. Return
        the partitions that have new documents, for their streams.
        """
        assert [report.vb_id for report in reports] == list(self._under_way), "one for each"
        under_way, self._under_way = self._under_way, {}
        self._keyspace.loading.clear()
        loaded = [report for report in reports if not report.refusal]
        for report in loaded:
            tickets = under_way.pop(report.vb_id)
            frames = sum(ticket.count for ticket in tickets)
            self._show(self._partitions[report.vb_id], report, frames)
            self._settle(report.vb_id, tickets)
        self._ordinary.update(under_way)
        if loaded:
            self._keyspace.due.generation += 1  # the store has other rows of due documents
        self._is_draining = self._is_draining and self.has_work
        return [report.vb_id for report in loaded]

    def refuse_all(self) -> None:
        """Leave everything to `apply_next`: nothing can be loaded now."""
        for chosen in (self._under_way, self._waiting):
            for vb_id, tickets in chosen.items():
                self._ordinary.setdefault(vb_id, []).extend(tickets)
            chosen.clear()
        self._keyspace.loading.clear()

    def apply_next(self) -> int:
        """Apply one packet in the ordinary way, which takes up to 2 ms. Return its number; 0: there
        is none.
        """
        if not self._ordinary:
            return 0
        vb_id, tickets = next(iter(self._ordinary.items()))
        part, ticket = self._partitions[vb_id], tickets.pop(0)
        if not tickets:
            del self._ordinary[vb_id]
        self._unsent.pop(ticket.number, None)
        self._waiting_bytes -= len(ticket.packet)
        part.release_writes(Hold.LOADING)
        ticket.apply_now()
        if self._has(vb_id):
            part.hold_writes(Hold.LOADING, _HELD)
        self._is_draining = self._is_draining and self.has_work
        return ticket.number

    # -- inside ----------------------------------------------------------------------------------

    def _is_merged(self, part: Partition) -> bool:
        """Whether the store has all of a partition that a load must come after."""
        keyspace = self._keyspace
        last_group = max(part.branch_group, part.undo_group, keyspace.manifest_group)
        return (
            part.frozen is None
            and not (part.active.entries or part.active.newest)
            and part.merged_seqno == part.high_seqno == part.committed_seqno == part.synced_seqno
            and part.incomplete_snapshot is None
            and last_group <= keyspace.memtables.merged_group
        )

    def _show(self, part: Partition, report: LoadReport, frames: int) -> None:
        """Let a partition have what was loaded into it."""
        assert report.high_seqno == part.high_seqno + frames, "nobody else wrote to it"
        assert self._is_merged(part) or part.state != VbState.ACTIVE, "it is as it was"
        part.high_seqno = part.committed_seqno = part.synced_seqno = report.high_seqno
        part.merged_seqno = report.high_seqno
        self._keyspace.commits.loaded(part.vb_id, report.high_seqno)
        self._keyspace.item_cache.clear(part)  # it may say of a loaded key that there is none
        part.max_cas = max(part.max_cas, report.max_cas)
        part.item_count = report.item_count
        part.tally = CollectionCounts(report.tally)
        self.documents += frames

    def _settle(self, vb_id: int, tickets: Sequence[LoadTicket]) -> None:
        self._waiting_bytes -= sum(len(ticket.packet) for ticket in tickets)
        for ticket in tickets:
            ticket.finish()
        if not self._has(vb_id):
            self._partitions[vb_id].release_writes(Hold.LOADING)


def _packet_of(ticket: LoadTicket) -> Packet:
    return Packet(ticket.count, ticket.packet, ticket.number)


def _nobody_asks() -> None:
    """Do nothing: there is no store process."""

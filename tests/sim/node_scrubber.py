"""The scrubber of a simulated node, and its repairs from other copies, in virtual time.

What is read next, what is told, and whom to ask is the product's (`dcp.core.scrub_turns`,
`vbucket.check.scrub_pieces`); a piece is an event, and so is each step of a repair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from dcp.core.scrub_turns import AGAIN_S, BlockRepair, CopyRepairs, DamageRow, ScrubTurns
from dcp.core.store_schedule import scrub_rest_s
from dcp.session.nodes.version_reads import RANGE, read_answer
from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from failover.coordinator.view import ClusterView
from sim.clock import Clock
from sim.kv_link import KvLink, Request
from sim.network import Network
from sim.twin_pages import TwinEnv, TwinPieces
from sim.world import MS, SECOND, Host, Timer
from vbucket.check.scrub import ScrubReport
from vbucket.engine.engine import Engine
from vbucket.store.store import Store

if TYPE_CHECKING:
    from sim.facts import Damaged

TURN_MAX_NS: Final = 5 * MS
"""How long other work of the store process may take first."""
BUSY_S: Final = 0.0005
"""Processor time of a piece."""
ANSWER_NS: Final = SECOND
"""How long another node may take for its answer."""


class Scrubbed(Protocol):
    """What a scrubber needs from its node."""

    name: str
    host: Host
    clock: Clock
    engine: Engine
    store: Store


class NodeScrubber(ScrubTurns):
    """See the module."""

    def __init__(self, node: Scrubbed, env: TwinEnv, network: Network, period_ns: int) -> None:
        """`period_ns`: in what time everything is read."""
        super().__init__(node.clock.wall_ns() / SECOND)
        self.pieces = TwinPieces(env)
        self.merges = 0
        """How many merges have ended."""
        self.view: ClusterView | None = None
        self.member = ""
        self._node = node
        self._env = env
        self._network = network
        self._period_s = period_ns / SECOND
        self._timer: Timer | None = None
        self._repairs = CopyRepairs()
        self._is_repairing = False
        self._links: dict[str, KvLink] = {}
        self._rest(0.0)

    @property
    def may_be_damaged(self) -> bool:
        """Whether a page is wrong, or was: what met it is told a moment later."""
        return self._env.pages.were_ever_wrong

    # -- a pass ------------------------------------------------------------------------------------

    def wake(self) -> None:
        """See ScrubTurns."""
        self._rest(0.0)

    def merged(self) -> None:
        """A merge has ended: it may have met and mended something."""
        self.merges += 1
        self._rest(0.0)

    def _rest(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        turn_ns = 1 + self._node.host.world.below(TURN_MAX_NS)
        self._timer = self._node.host.after(turn_ns + int(seconds * SECOND), self._turn)

    def _turn(self) -> None:
        self._timer = None
        status, wall_s = self.status, self._node.clock.wall_ns() / SECOND
        if not status.is_running:
            due_s = self.due_in_s(wall_s, self._period_s)
            assert due_s is not None
            if due_s > 0 and not self.is_asked_to_look(self.merges):
                self._rest(due_s)
                return
            if due_s <= 0:
                self.begin_pass(wall_s, is_hurried=False)
        now_s, merges = self._node.clock.monotonic_ns() / SECOND, self.merges
        place, suspects = self.next_piece(now_s)
        piece = self.pieces.next(place, suspects, lambda: False)
        size_bytes = self._env.used_bytes()
        report = ScrubReport(
            list(piece.place), piece.read_bytes, [list(each) for each in piece.damages], BUSY_S,
            size_bytes,
        )  # fmt: skip
        self.read(report, suspects, merges, now_s, wall_s)
        rest_s = scrub_rest_s(
            BUSY_S, piece.read_bytes, size_bytes, self._period_s, is_hurried=status.is_hurried
        )
        self._rest(rest_s if status.is_running and not self.is_asked_to_look(self.merges) else 0.0)

    # -- what is told ------------------------------------------------------------------------------

    def read(
        self, report: ScrubReport, suspects: Sequence[int], merges: int, now_s: float, wall_s: float
    ) -> None:
        """See ScrubTurns. Whoever asks for the damages is told of what was found now. A page that
        is damaged again, while the damage before at its place is still listed, is not told anew.
        """
        super().read(report, suspects, merges, now_s, wall_s)
        for row in self.status.damages:
            if row.last_s == wall_s:
                for page in self._pages_of(row):
                    page.named = page.named or row.what

    def tell_found(self, row: DamageRow) -> None:
        """See ScrubTurns."""
        self._node.host.world.tell("damage", self._node.name, f"{row.where}: {row.what}", row.vb)
        self._repair_soon()

    def tell_mended(self, row: DamageRow, how: str) -> None:
        """See ScrubTurns."""
        self._node.host.world.tell("mended", self._node.name, f"{row.where}: {how}", row.vb)
        self._node.store.refresh()

    def forget(self) -> None:
        """All that was damaged is put right."""
        self.status.damages = []
        self._repairs = CopyRepairs()

    def _pages_of(self, row: DamageRow) -> list[Damaged]:
        return [
            page for page in self._env.current()
            if page.table == row.table and page.key.hex() == row.key
        ]  # fmt: skip

    # -- repairs -----------------------------------------------------------------------------------

    def _repair_soon(self) -> None:
        self._node.host.after(1, self._repair)

    def _repair(self) -> None:
        """Ask for what is due, one damage after the other."""
        if self._is_repairing or self.view is None:
            return
        now_s = self._node.clock.monotonic_ns() / SECOND
        due = self._repairs.due(self.blocks_lacking(), now_s)
        self._is_repairing = True
        self._next([self._begun(row) for row in due])

    def _begun(self, row: DamageRow) -> BlockRepair:
        assert self.view is not None
        stored = self.view.partitions.get(row.vb or 0)
        return BlockRepair(row, None if stored is None else stored.content.record, self.member)

    def _next(self, repairs: list[BlockRepair]) -> None:
        if not repairs:
            self._is_repairing = False
            if self.blocks_lacking():
                self._node.host.after(int(AGAIN_S * SECOND), self._repair)
            return
        repair = repairs[0]
        member = repair.next_source()
        assert self.view is not None
        known = None if member is None else self.view.members.get(member)
        if member is None:
            self._next(repairs[1:])
        elif known is None:
            self._next(repairs)
        else:
            self._ask(known.content.address, repairs)

    def _ask(self, name: str, repairs: list[BlockRepair]) -> None:
        repair = repairs[0]
        extras = RANGE.pack(repair.first_seqno, repair.last_seqno)

        def on_reply(_request: Request, frame: Frame | None, why: str) -> None:
            if frame is None or frame.status != Status.OK:
                repair.why = f"node {name}: {why or frame}"
                self._next(repairs)
                return
            part = self._node.engine.partitions[repair.vb_id]
            entries = repair.take(part, name, read_answer(frame))
            if entries is None:
                self._next(repairs)
            else:
                turn_ns = 1 + self._node.host.world.below(TURN_MAX_NS)
                self._node.host.after(turn_ns, self._put, name, entries, repairs)

        self._link(name).ask(
            Request(
                "repair",
                lambda opaque, _: pack_request(
                    Opcode.X_READ_VERSIONS, vb_id=repair.vb_id, opaque=opaque, extras=extras
                ),
                on_reply,
            )
        )

    def _put(self, name: str, entries: list[bytes], repairs: list[BlockRepair]) -> None:
        row = repairs[0].row
        how = self.pieces.put_versions(bytes.fromhex(row.key), entries)
        if how:
            for page in self._pages_of(row):
                page.told_mended = how
            self.mended(row, f"{how} (node {name})")
            self._next(repairs[1:])
        else:
            self._next(repairs)

    def _link(self, name: str) -> KvLink:
        link = self._links.get(name)
        if link is None:
            link = self._links[name] = KvLink(
                self._network, self._node.host, name, ANSWER_NS, _lost, keeps_dialing=False
            )
        return link


def _lost(_node: str) -> None:
    """Do nothing: the request hears of it."""

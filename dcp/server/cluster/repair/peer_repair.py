"""Takes versions that this copy cannot read from another copy, and puts them in their place.

    the scrubber names a damaged block ──> X_READ_VERSIONS to the other copies, the master's first
        ──> the rule (failover.rules.repair) ──> the store process puts them back, if their
        checksums prove that they are what was there

`dcp.core.scrub_turns` has the order: which damage is due, whom to ask next, what may be taken.

Reads of them get the error that they get without this meanwhile; writes go on, and nobody's
mastership changes.

Invariants
- one block at a time, and one connection, which ends with the answer;
- a block that no copy has is asked for again after AGAIN_S;
- a node that answers with what is no answer is left out until then, and named in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from dcp.core.scrub_turns import AGAIN_S, BlockRepair, CopyRepairs, DamageRow
from dcp.server.access.link_tls import LinkTls
from dcp.server.cluster.joining.link_try import fault_of
from dcp.server.cluster.node_map import tls_address_of
from dcp.server.cluster.repair.version_request import VersionsRequest
from dcp.server.cluster.replicated_node import ReplicatedNode
from dcp.server.observe.event_log import EventLog
from dcp.server.storage.process.scrubbing import Scrubbing
from dcp.server.storage.process.store_queue import FAILURES
from dcp.session.nodes.version_reads import VersionsRead
from failover.coordinator.records import MemberRecord
from vbucket.engine.engine import Engine

ANSWER_S: Final = 5.0
"""How long another node may take for its login and its answer."""


class PeerRepair:
    """See the module. `run` is the background task."""

    def __init__(
        self,
        engine: Engine,
        replicated: ReplicatedNode,
        tls: LinkTls | None,
        scrubbing: Scrubbing,
        log: EventLog,
    ) -> None:
        self._engine = engine
        self._view = replicated.session.view
        self._member = replicated.member
        self._access = replicated.access
        self._tls = tls
        self._scrubbing = scrubbing
        self._log = log
        self._repairs = CopyRepairs()

    async def run(self) -> None:
        """Mend what can be, until cancelled."""
        while True:
            rows = self._scrubbing.blocks_lacking()
            for row in self._repairs.due(rows, time.monotonic()):
                await self._repair(row)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S if self._scrubbing.blocks_lacking() else None):
                    await self._scrubbing.found.wait()
            self._scrubbing.found.clear()

    async def _repair(self, row: DamageRow) -> None:
        assert row.vb is not None, "it is known"
        stored = self._view.partitions.get(row.vb)
        record = None if stored is None else stored.content.record
        repair = BlockRepair(row, record, self._member)
        while (member := repair.next_source()) is not None:
            known = self._view.members.get(member)
            if known is None:
                continue
            name = known.content.name or member
            answer = await self._ask(known.content, name, repair)
            if answer is None:
                continue
            entries = repair.take(self._engine.partitions[row.vb], name, answer)
            if entries is None:
                continue
            try:
                if await self._scrubbing.put_versions(row, entries, f"node {name}"):
                    return
            except FAILURES as error:
                repair.why = str(error)
        self._log.warning(
            "damage not mended from other copies", vb_id=row.vb, seqnos=row.seqnos,
            reason=repair.why,
        )  # fmt: skip

    async def _ask(
        self, record: MemberRecord, name: str, repair: BlockRepair
    ) -> VersionsRead | None:
        """Ask a node for the versions of a damage. None: it does not answer with them; `repair`
        has why.
        """
        request = VersionsRequest(
            self._access.login(self._tls), repair.vb_id, repair.first_seqno, repair.last_seqno
        )
        address = record.address if self._tls is None else tls_address_of(record)
        fault = await fault_of(address, f"node {name}", request, self._tls, ANSWER_S)
        if fault is not None or request.answer is None:
            repair.why = str(fault.trouble) if fault is not None else "it does not answer"
            return None
        return request.answer

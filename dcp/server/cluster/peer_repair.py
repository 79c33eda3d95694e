"""Takes versions that this copy cannot read from another copy, and puts them in their place.

    the scrubber names a damaged block ──> X_READ_VERSIONS to the other copies, the master's first
        ──> the rule (failover.rules.repair) ──> the store process puts them back, if their
        checksums prove that they are what was there

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
from collections.abc import Iterator
from typing import Final

from dcp.server.access.link_tls import LinkTls
from dcp.server.cluster.joining.link_try import fault_of
from dcp.server.cluster.node_map import tls_address_of
from dcp.server.cluster.replicated_node import ReplicatedNode
from dcp.server.cluster.version_request import VersionsRequest
from dcp.server.observe.event_log import EventLog
from dcp.server.storage.process.scrubbing import DamageRow, Scrubbing
from dcp.server.storage.process.store_queue import FAILURES
from dcp.session.nodes.version_reads import VersionsRead
from failover.coordinator.records import MemberRecord
from failover.rules.repair import why_not_taken
from vbucket.engine.engine import Engine
from vbucket.log.record import LogDamagedError, split_entries

AGAIN_S: Final = 10.0
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
        self._tried_s: dict[tuple[object, ...], float] = {}
        """By damage: when the other copies were asked last."""

    async def run(self) -> None:
        """Mend what can be, until cancelled."""
        while True:
            now_s = time.monotonic()
            rows = self._scrubbing.blocks_lacking()
            tried = {row.name: self._tried_s.get(row.name, now_s - AGAIN_S) for row in rows}
            self._tried_s = tried
            for row in rows:
                if now_s - tried[row.name] >= AGAIN_S:
                    tried[row.name] = now_s
                    await self._repair(row)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGAIN_S if self._scrubbing.blocks_lacking() else None):
                    await self._scrubbing.found.wait()
            self._scrubbing.found.clear()

    async def _repair(self, row: DamageRow) -> None:
        why = "there is no other copy"
        for record in self._others(row):
            name = record.name or record.member
            answer, why = await self._ask(record, name, row)
            if answer is None:
                continue
            try:
                entries = split_entries(answer.entries)
                if await self._scrubbing.put_versions(row, entries, f"node {name}"):
                    return
                why = f"the versions of node {name} are not what was here, or not all"
            except LogDamagedError as error:
                why = f"the answer of node {name} is not one of versions: {error}"
            except FAILURES as error:
                why = str(error)
        self._log.warning(
            "damage not mended from other copies", vb_id=row.vb, seqnos=row.seqnos, reason=why
        )

    def _others(self, row: DamageRow) -> Iterator[MemberRecord]:
        """Yield the other copies of a partition, the master's first, then those in sync."""
        assert row.vb is not None, "it is known"
        stored = self._view.partitions.get(row.vb)
        if stored is None:
            return
        record = stored.content.record
        order = dict.fromkeys((record.master, *record.isr, *record.copies))
        for member in order:
            known = None if member is None else self._view.members.get(member)
            if known is not None and member != self._member:
                yield known.content

    async def _ask(
        self, record: MemberRecord, name: str, row: DamageRow
    ) -> tuple[VersionsRead | None, str]:
        """Ask a node for the versions of a damage. None: they may not be taken; and why."""
        assert row.seqnos is not None
        assert row.vb is not None
        first, last = row.seqnos
        request = VersionsRequest(self._access.login(self._tls), row.vb, first, last)
        address = record.address if self._tls is None else tls_address_of(record)
        fault = await fault_of(address, f"node {name}", request, self._tls, ANSWER_S)
        if fault is not None or request.answer is None:
            return None, str(fault.trouble) if fault is not None else "it does not answer"
        part = self._engine.partitions[row.vb]
        why = why_not_taken(
            part.failover, request.answer.failover, last,
            own_committed=part.committed_seqno, committed=request.answer.committed_seqno,
        )  # fmt: skip
        return (None, f"node {name}: {why}") if why else (request.answer, "")

"""Branches of partitions that have copies, for operators and for tests of consumers.

The partition's replication record says first that it branches; then every copy in sync rolls back;
then the operator is answered (docs/replication.md). So a branch is made on all copies or on none,
whoever dies meanwhile.

Invariants
- each branch that was asked for here is answered once: when it is decided, or as not known after
  BRANCH_WAIT_S; one that is not in the record by then is withdrawn.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from dcp.server.operate.reports import BranchReport
from vbucket.engine.partition import BranchRefusedError, VbState
from vbucket.model.ids import draw_vb_uuid

if TYPE_CHECKING:
    from failover.replication.effects import BranchEnded
    from failover.replication.master import Master
    from vbucket.engine.engine import Engine

BRANCH_WAIT_S: Final = 15.0
"""A branch takes two changes in the metadata store, and a round to the replicas: some 0.2 s. A copy
in sync that is dead leaves the in-sync set within seconds."""


SERVED_POLL_S: Final = 0.01


class BranchUnknownError(Exception):
    """Nobody knows yet whether a branch is made; the text says how to find out."""


class ReplicatedBranches:
    """See the module. Lives on the event loop."""

    def __init__(self, engine: Engine, master: Master) -> None:
        self._engine = engine
        self._master = master
        self._asked: dict[int, asyncio.Future[BranchEnded]] = {}
        """By the version that was asked for."""

    async def branch(self, vb_id: int, at_seqno: int) -> BranchReport:
        """Branch a partition that this node is master of.

        Raises BranchRefusedError if nothing was changed, BranchUnknownError.
        """
        vb_uuid = draw_vb_uuid(self._engine.keyspace.draws)
        self._master.want_branch(vb_id, at_seqno, vb_uuid)
        decided = asyncio.get_running_loop().create_future()
        self._asked[vb_uuid] = decided
        try:
            async with asyncio.timeout(BRANCH_WAIT_S):
                ended = await decided
        except TimeoutError:
            self._give_up(vb_id, vb_uuid)
        finally:
            del self._asked[vb_uuid]
        if ended.why_not:
            raise BranchRefusedError(ended.why_not)
        await self._until_served(vb_id)
        return BranchReport(
            vb=vb_id, vb_uuid=str(vb_uuid), seqno=at_seqno,
            undone_seqnos=ended.undone.seqnos, undone_keys=ended.undone.keys,
        )  # fmt: skip

    def ended(self, ended: BranchEnded) -> None:
        """A branch is decided."""
        asked = self._asked.get(ended.vb_uuid)
        if asked is not None and not asked.done():
            asked.set_result(ended)

    async def _until_served(self, vb_id: int) -> None:
        """Return when clients can go on with a partition, here or at another master."""
        part = self._engine.partitions[vb_id]
        for _ in range(int(BRANCH_WAIT_S / SERVED_POLL_S)):
            if part.state != VbState.FENCED or vb_id not in self._master.masterships:
                return
            await asyncio.sleep(SERVED_POLL_S)

    def _give_up(self, vb_id: int, vb_uuid: int) -> None:
        if self._master.withdraw_branch(vb_id, vb_uuid):
            raise BranchRefusedError(
                f"partition {vb_id}: the metadata store has not taken the branch within "
                f"{BRANCH_WAIT_S:.0f} s. Nothing was changed; look at `dcpctl cluster status`"
            )
        raise BranchUnknownError(
            f"partition {vb_id}: not all copies in sync have rolled back in {BRANCH_WAIT_S:.0f} s."
            f" The branch goes on. It is made once the failover log has version {vb_uuid}"
        )

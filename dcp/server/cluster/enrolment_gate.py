"""Refuses changes on a node while it becomes a member, so that no acknowledged change is lost.

Enrolment copies or checks what the node has, and then waits for the metadata store and for the
restart. A change in between would be acknowledged and then be missing: a node that joins gives its
documents up, and the cluster has the users and collections that the first node had when it wrote
them.

`dcp.server.cluster.enrolment_state` has the states of a node.

Invariants
- a node has one enrolment at a time;
- the refusal begins before anything is checked, and what was applied before is in the log then;
- a failed enrolment ends the refusal. After a successful one it lasts until the restart: the
  engine is a new one then, and the users are those of the cluster.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final

from dcp.server.access.users import Users
from dcp.server.cluster.enrolment import EnrolmentError
from dcp.server.cluster.enrolment_state import WHY_NOT, Enrolment, Happening
from dcp.server.storage.health import Health
from dcp.server.storage.waiters import CommitWaiters
from vbucket.engine.engine import Engine

SETTLE_S: Final = 5.0
"""How long changes that were applied before may take until they are in the log."""
REFUSAL: Final = (
    "this node is becoming a member of a cluster and takes no changes until it has restarted; "
    "try again in a few seconds"
)


class EnrolmentGate:
    """See the module. `async with gate` encloses an enrolment; it lives as long as the node."""

    def __init__(
        self, engine: Engine, health: Health, users: Users, commits: CommitWaiters
    ) -> None:
        self._engine = engine
        self._health = health
        self._users = users
        self._commits = commits
        self.enrolment = Enrolment()

    async def __aenter__(self) -> None:
        """Refuse changes, and return when those before are in the log. Raises EnrolmentError."""
        enrolment = self.enrolment
        if not enrolment.takes_changes_alone:
            raise EnrolmentError(*WHY_NOT[enrolment.standing])
        if self._engine.loads.has_work:  # none begins from the next line on
            raise EnrolmentError(
                "documents of a restore are being loaded into this node",
                "Let the restore end, or stop it, then try again",
            )
        enrolment.happened(Happening.BEGUN)
        try:
            self._health.enrolling(REFUSAL)
            self._users.refuse_changes(REFUSAL)
            await self._settle()
        except BaseException:
            self._failed()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take changes again if the enrolment failed. Otherwise cluster.json is on disk."""
        if error is not None:
            self._failed()
        else:
            self.enrolment.happened(Happening.FILED)

    def stopped(self) -> None:
        """The node stops: whatever a command under way does, it is not started again."""
        self.enrolment.happened(Happening.STOPPED)

    async def _settle(self) -> None:
        keyspace = self._engine.keyspace
        last = max(part.last_group for part in self._engine.partitions)
        try:
            async with asyncio.timeout(SETTLE_S):
                await asyncio.to_thread(self._users.until_unchanging)
                await self._commits.until_synced(max(last, keyspace.manifest_group))
        except TimeoutError:
            raise EnrolmentError(
                f"earlier changes are not on disk within {SETTLE_S:g} s",
                "Check that the disk of the data folder has room and answers, then try again",
            ) from None

    def _failed(self) -> None:
        self.enrolment.happened(Happening.FAILED)
        if self.enrolment.takes_changes_alone:
            self._users.refuse_changes("")
            self._health.enrolling("")

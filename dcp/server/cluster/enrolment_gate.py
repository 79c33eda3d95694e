"""Refuses changes on a node while it becomes a member, so that no acknowledged change is lost.

Enrolment copies or checks what the node has, and then waits for the metadata store and for the
restart. A change in between would be acknowledged and then be missing: a node that joins gives its
documents up, and the cluster has the users and collections that the first node had when it wrote
them.

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
        self._is_closed = False

    async def __aenter__(self) -> None:
        """Refuse changes, and return when those before are in the log. Raises EnrolmentError."""
        if self._is_closed:
            raise EnrolmentError(
                "this node is becoming a member already, by another command",
                "Wait for that one, and then look at `dcpctl cluster status`",
            )
        self._is_closed = True
        try:
            self._health.enrolling(REFUSAL)
            self._users.refuse_changes(REFUSAL)
            await self._settle()
        except BaseException:
            self._open()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take changes again if the enrolment failed."""
        if error is not None:
            self._open()

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

    def _open(self) -> None:
        self._is_closed = False
        self._users.refuse_changes("")
        self._health.enrolling("")

"""The users of a cluster: one table in the metadata store, kept in each node's folder.

A change on any node is written to the store first, compared with the table that it was made from.
Each node writes a newer table into its own users.json, so logins work while the store is away.

Invariant: a node changes no user by itself.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Final

from dcp.server.access.users import Users
from dcp.server.access.users_file import UsersFileError
from dcp.server.cluster.enrolment import ANSWER_S
from dcp.server.cluster.meta_access import MetaAccess
from dcp.server.cluster.shared_record import (
    MayBeReplacedError,
    NotReplacedError,
    replace_record,
)
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.tasks import Tasks
from failover.coordinator.records import UsersRecord, encode_record
from failover.coordinator.view import ClusterView

TABLE_BYTES_MAX: Final = 1 << 20
"""Below the longest request of a metadata store: about a thousand users."""
_LIST: Final = "List the users to see whether it happened"


class SharedUsers:
    """See the module. Make it on the event loop; `share` is called in threads."""

    def __init__(
        self, view: ClusterView, users: Users, access: MetaAccess, tasks: Tasks, log: EventLog
    ) -> None:
        self._view = view
        self._users = users
        self._access = access
        self._tasks = tasks
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._seen_revision = 0
        users.share_changes(self.share)

    def adopt(self) -> None:
        """Take over the table of the view, if it has another one."""
        stored = self._view.users
        if stored is not None and stored.item.mod_revision > self._seen_revision:
            self._seen_revision = stored.item.mod_revision
            self._tasks.begin(self._keep(stored.content.text.encode()))

    async def _keep(self, text: bytes) -> None:
        async with self._turn:
            try:
                await asyncio.to_thread(self._users.adopt, text)
            except UsersFileError as error:
                self._log.error("users of the cluster not taken over", reason=str(error))
                self._seen_revision = 0  # the next `adopt` tries again

    def share(self, before: bytes, after: bytes) -> None:
        """Write a table to the store, in place of the one before. Raises UsersFileError."""
        writing = asyncio.run_coroutine_threadsafe(self._write(before, after), self._loop)
        try:
            writing.result(2 * ANSWER_S)
        except FutureTimeoutError:
            writing.cancel()
            raise UsersFileError(f"the metadata store did not answer. {_LIST}") from None

    async def _write(self, before: bytes, after: bytes) -> None:
        if len(after) > TABLE_BYTES_MAX:
            raise UsersFileError(
                f"the users of a cluster take {len(after)} bytes; at most {TABLE_BYTES_MAX} fit "
                "into the metadata store. Remove users"
            )
        stored, key = self._view.users, self._view.keys.users
        if not self._view.is_loaded:
            raise UsersFileError("this node has not read the metadata store yet; try again")
        if stored is not None and stored.content.text.encode() != before:
            raise UsersFileError(
                "the users of this node are not those of the cluster now; try again in a moment"
            )
        if trouble := self._access.trouble:
            raise UsersFileError(
                f"the metadata store does not answer: {trouble}. Users cannot change before it does"
            )
        value = encode_record(UsersRecord(text=after.decode()))
        item = None if stored is None else stored.item
        try:
            is_replaced = await replace_record(self._access.meta, key, value, item)
        except NotReplacedError as error:
            raise UsersFileError(str(error)) from error
        except MayBeReplacedError as error:
            raise UsersFileError(f"the metadata store did not answer ({error}). {_LIST}") from error
        if not is_replaced:
            raise UsersFileError("another node changed the users at the same time; try again")

"""Collections and users of a whole cluster.

Each is a record of the metadata store that any node changes.

Invariants
- a change compares the record that it was made from, so it happens once at most
- a change whose answer is lost is asked for again: the same compare fails if it has happened, and
  the record that is found then tells whose it is. Who else wrote the same did what was asked for
- a change that may have happened, or may still happen, is not reported as refused

**Scopes and collections** are one list in the metadata store, in force on each node. A change is
written to the store first, compared with the list that it was made from. Each node adopts the list
when its view has it, and the masters tell their partitions' streams.

Invariants
- a node never goes back to an older list
- a list is made from the newest one that any member has said to have: an id is given once
- whoever changed the list is answered when all nodes that run have said in the store that the
  events are committed in the partitions that they serve, or after EVERYWHERE_S: the change is in
  force anyhow, and a node that stands still is dead soon

**Users** are one table in the metadata store, kept in each node's folder. A change on any node is
written to the store first, compared with the table that it was made from. Each node writes a newer
table into its own users.json, so logins work while the store is away.

Invariant: a node changes no user by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Final, NamedTuple

from dcp.server.access.users import Users
from dcp.server.access.users_file import UsersFileError
from dcp.server.cluster.joining.enrolment import AGAIN_S, ANSWER_S, EnrolmentError, ask
from dcp.server.cluster.meta_access import MetaAccess
from dcp.server.cluster.own_records import of_this_process
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.housekeeping import Tasks
from failover.coordinator.cluster_session import ClusterSession
from failover.coordinator.plans.request_answers import name_of
from failover.coordinator.records import (
    CollectionsRecord,
    KeyKind,
    ManifestRecord,
    UsersRecord,
    encode_record,
)
from failover.coordinator.seen_records import (
    META_RESTORE,
    knows_newer_collections,
    older_collections_text,
)
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import (
    KeyValue,
    MetaStore,
    OutcomeUnknown,
    Put,
    Range,
    StoreRefused,
    StoreResult,
    Txn,
    TxnResult,
    if_unchanged,
)
from failover.replication.node import ReplicationCore
from vbucket.engine.engine import Engine
from vbucket.engine.partition import VbState
from vbucket.model.manifest import Manifest

TRIES_MAX: Final = 3
"""Attempts of a change whose answers are lost, before the outcome is told as unknown. The client
of a store gives each of them 0.8 s."""


class NotReplacedError(Exception):
    """The record was not replaced; the text says why."""


class MayBeReplacedError(Exception):
    """Nobody knows whether the record was replaced, or will be; the text says why."""


async def replace_record(
    meta: MetaStore, key: bytes, value: bytes, before: KeyValue | None
) -> bool:
    """Replace a record that was `before` (None: absent). False: another node has changed it, and it
    was not replaced. Raises NotReplacedError, MayBeReplacedError.
    """
    revision, version = (0, 0) if before is None else (before.mod_revision, before.version)
    txn = Txn((if_unchanged(key, revision),), (Put(key, value),), (Range(key),))
    unknown = ""
    for tries_left in reversed(range(TRIES_MAX)):
        result = await _asked(meta, txn)
        if isinstance(result, TxnResult):
            if result.succeeded:
                return True
            found = result.ranges[0].items
            if not unknown or not found:
                return False
            if found[0].value == value:
                return True
            if found[0].version == version + 1:
                return False  # the one change since then is another's
            raise MayBeReplacedError(f"{unknown}; others have changed it since then")
        if isinstance(result, OutcomeUnknown):
            unknown = result.text
        elif not unknown:
            raise NotReplacedError(_refusal(result))
        if tries_left:
            await asyncio.sleep(AGAIN_S)
    raise MayBeReplacedError(unknown)


async def _asked(meta: MetaStore, txn: Txn) -> StoreResult:
    try:
        return await ask(meta, txn)
    except EnrolmentError as error:
        return OutcomeUnknown(error.why)


def _refusal(result: StoreResult) -> str:
    told = "refuses this" if isinstance(result, StoreRefused) else "does not answer"
    return f"the metadata store {told}: {getattr(result, 'text', result)}"


TRIES: Final = 5
"""Attempts of a change, when other nodes change the list at the same time."""
SEEN_S: Final = 5.0
"""How long this node may take to see what was written."""


class ManifestNotChangedError(Exception):
    """The change may not have happened; the text says why."""


class ChangedManifest(NamedTuple):
    """A list that is in force, and the names of nodes that have not written its events yet."""

    manifest: Manifest
    behind: list[str]


EVERYWHERE_S: Final = 5.0
"""A node that stands still has lost its lease by then, and other masters its partitions."""
WRITE_NS: Final = 1_000_000_000
"""Time between two attempts to say the same."""


class SharedManifest:
    """See the module. The core corrects its counts before the engine's list changes."""

    def __init__(
        self, session: ClusterSession, engine: Engine, access: MetaAccess,
        core: ReplicationCore,
    ) -> None:  # fmt: skip
        self._session = session
        self._view = session.view
        self._engine = engine
        self._access = access
        self._core = core
        self._changed = asyncio.Event()
        self._uncommitted: dict[int, int] = {}
        """Partition -> the seqno of its last event that may not be committed."""
        self._written_uid = -1
        """What this process tried to write last, and when it may try again."""
        self._next_ns = 0

    def view_changed(self) -> None:
        """Take the list of the view, if it is newer than the engine's."""
        stored = self._view.manifest
        keyspace = self._engine.keyspace
        if stored is not None and stored.content.uid > keyspace.manifest.uid:
            self._core.resolve_counts()
            keyspace.set_manifest(stored.content.manifest())
            self._uncommitted = {
                part.vb_id: part.high_seqno
                for part in self._engine.partitions
                if part.state == VbState.ACTIVE
            }
        self._changed.set()
        self._changed = asyncio.Event()

    def look(self, now_ns: int) -> None:
        """Say in the store that the events are committed here, if they are and it does not."""
        session, view = self._session, self._view
        membership, uid = session.membership, self._engine.keyspace.manifest.uid
        stored = view.collections.get(membership.member)
        if stored is not None and stored.content.uid == uid:
            return
        if not membership.is_alive or not view.is_loaded:
            return
        self._forget_committed()
        if self._uncommitted:
            return
        if uid == self._written_uid and now_ns < self._next_ns:
            return
        self._written_uid, self._next_ns = uid, now_ns + WRITE_NS
        key = view.keys.of_member(KeyKind.COLLECTIONS, membership.member)
        record = CollectionsRecord(member=membership.member, uid=uid)
        txn = of_this_process(session, key, encode_record(record))
        self._access.meta.submit(txn, _written)

    def _forget_committed(self) -> None:
        parts = self._engine.partitions
        self._uncommitted = {
            vb_id: seqno
            for vb_id, seqno in self._uncommitted.items()
            if parts[vb_id].state == VbState.ACTIVE and parts[vb_id].committed_seqno < seqno
        }

    async def change(self, change: Callable[[Manifest], Manifest]) -> ChangedManifest:
        """Change the list of the cluster; return it when the nodes have it. Raises
        ManifestNotChangedError, and what `change` raises.
        """
        for _ in range(TRIES):
            stored = self._view.manifest
            if stored is None:
                raise ManifestNotChangedError("this node has not read the metadata store yet")
            if why := self._why_list_is_old(stored.content.uid):
                raise ManifestNotChangedError(why)
            after = change(stored.content.manifest())
            if trouble := self._access.trouble:
                raise ManifestNotChangedError(
                    f"the metadata store does not answer: {trouble}. Collections cannot change "
                    "before it does"
                )
            key, value = self._view.keys.manifest, encode_record(ManifestRecord.of(after))
            changed = self._changed
            try:
                is_replaced = await replace_record(self._access.meta, key, value, stored.item)
            except NotReplacedError as error:
                raise ManifestNotChangedError(str(error)) from error
            except MayBeReplacedError as error:
                raise ManifestNotChangedError(
                    f"the metadata store did not answer ({error}). List the collections to see "
                    "whether it happened"
                ) from error
            if is_replaced:
                await self._until_seen(after.uid)
                await self._until_everywhere(after.uid)
                return ChangedManifest(after, self._behind(after.uid))
            await self._wait(changed)
        raise ManifestNotChangedError("others change the collections all the time; try again")

    def _why_list_is_old(self, uid: int) -> str:
        """Say who knows a newer list than the store has; "": nobody. A list that is made from the
        older one would give ids a second time.
        """
        knowing = knows_newer_collections(self._view)
        if self._engine.keyspace.manifest.uid > uid:
            knowing |= {self._session.membership.member}
        if not knowing:
            return ""
        return (
            f"{older_collections_text(self._view, knowing)}. `{META_RESTORE}` records the newest "
            "list again; collections can change after that"
        )

    async def _until_seen(self, uid: int) -> None:
        while self._engine.keyspace.manifest.uid < uid:
            await self._wait(self._changed)

    async def _until_everywhere(self, uid: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVERYWHERE_S):
                while self._behind(uid):
                    await self._changed.wait()

    def _behind(self, uid: int) -> list[str]:
        """Return the nodes that run and have not written the events. One without a record has an
        older version, or has just started and waits for the list before it serves.
        """
        return [
            name_of(self._view, member)
            for member, stored in self._view.collections.items()
            if stored.content.uid < uid and member in self._view.alive
        ]

    async def _wait(self, changed: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(SEEN_S):
                await changed.wait()
        except TimeoutError:
            raise ManifestNotChangedError(
                f"this node has not seen the change within {SEEN_S:g} s"
            ) from None


def _written(_result: StoreResult) -> None:
    """Do nothing: the view says whether it was written."""


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

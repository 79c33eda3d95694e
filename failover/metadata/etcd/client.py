"""A client of etcd: see `MetaStore`. Needs the extra `cluster`; a node alone does not import it.

Who calls it: the nodes of a cluster whose metadata is in etcd. One task keeps a link to one of the
members, and moves on to the next one when that fails. All of it runs on one event loop.

- Every request ends within `deadline_s`. StoreUnavailable: it was not sent, or etcd refused it
  before it did anything. OutcomeUnknown: anything else without an answer.
- Leases are renewed by a thread, also while the loop is busy (`etcd_lease_thread`).
- A watch goes on over new links, from the last delivered revision + 1. It asks etcd for its
  progress every second; without any sign of life for SILENCE_S the link is given up.
- If etcd's history went back, or another etcd is there, the client says so and goes on with it.
  `era` tells its callers that they must read again, and they know their records by rank.

Invariants
- `done` is called once for each request, and not from inside `submit`
- a watch gets rising revisions, and nothing after `cancel`
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import grpc

from failover.metadata.etcd.codec import (
    NO_SPACE_TEXT,
    batches_of,
    message_of,
    range_ends,
    refusal_of,
    result_of,
)
from failover.metadata.etcd.lease_thread import LeaseStreamEndedError, LeaseThread
from failover.metadata.etcd.link import (
    LOGIN_S,
    EtcdLink,
    EtcdUnfitError,
    LinkLostError,
    RpcError,
    claim_loop,
)
from failover.metadata.etcd.settings import EtcdSettings
from failover.metadata.etcd.trouble import (
    history_trouble,
    is_denial,
    trouble_of,
    version_warning,
)
from failover.metadata.etcd_stubs import etcd_api_pb2 as pb
from failover.metadata.metastore import (
    Compacted,
    LeaseGrant,
    LeaseKeepAlive,
    LeaseResult,
    LeaseRevoke,
    Lost,
    OutcomeUnknown,
    RangeResult,
    RefusalKind,
    StoreRefused,
    StoreRequest,
    StoreResult,
    StoreUnavailable,
    StoreWatch,
    TxnResult,
    WatchMessage,
    request_refusal,
)

ETCD_DEADLINE_S: Final = 0.8
"""Below ANSWER_NS_MAX of the cores, which would else ask again while this client still waits."""
PROGRESS_S: Final = 1.0
"""How often a watch asks for a sign of life."""
ETCD_SILENCE_S: Final = 3.0
"""Three of them."""
ETCD_RETRY_S: Final = 0.1
ETCD_RETRY_S_MAX: Final = 1.0
LOOP_LATE_S: Final = 0.2
"""A deadline that this loop notices so late says more of the loop than of etcd."""
ETCD_CALLS_MAX: Final = 256
"""Requests under way; a node has a few. More are refused."""
ETCD_WATCHES_MAX: Final = 64
"""A node has one."""
ETCD_LOST_S: Final = 3.0
"""When a watch is lost that cannot begin: callers begin lost watches again at once."""
TROUBLES_MAX: Final = 16
"""Reasons that are told while etcd is away."""
_SET_BACK: Final = "etcd's history went back"
_STATUS = grpc.StatusCode
_HAPPENED_NOT: Final = frozenset(
    {
        _STATUS.UNAUTHENTICATED,
        _STATUS.PERMISSION_DENIED,
        _STATUS.INVALID_ARGUMENT,
        _STATUS.UNIMPLEMENTED,
    }
)
_HAPPENED_NOT_TEXTS: Final = (
    "failed to connect",  # gRPC found no connection to send it on
    "etcdserver: no leader",  # checked before anything else, because of `hasleader`
    "etcdserver: too many requests",
    "grpc: received message larger than max",  # etcd's words; our own begin otherwise
)
_LOGIN_AGAIN: Final = ("invalid auth token", "revision of auth store is old", "user name is empty")


class _EtcdWatch(StoreWatch):
    client: EtcdClient

    def cancel(self) -> None:
        """See StoreWatch."""
        super().cancel()
        self.client.end_watch(self)


class EtcdClient:
    """See the module. Make it in a running event loop, and `close` it."""

    def __init__(
        self,
        settings: EtcdSettings,
        notice: Callable[[str], None],
        deadline_s: float = ETCD_DEADLINE_S,
    ) -> None:
        settings.check()
        claim_loop()
        self.trouble = "etcd: not connected yet"
        """Why etcd does not answer; empty while it does."""
        self.endpoint = ""
        """The member that is asked; empty: none."""
        self.era = 0
        """See `MetaStore`."""
        self._settings = settings
        self._notice = notice
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._link: EtcdLink | None = None
        self._leases = LeaseThread(settings, deadline_s)
        self._waiters: set[asyncio.Future[EtcdLink | None]] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._watches: dict[StoreWatch, asyncio.Task[None]] = {}
        self._cluster_id = 0
        self._revision = 0
        """The highest one that etcd told in an answer that a majority confirmed."""
        self._is_denied = False
        """Whether the last endpoint that was tried does not let this client in."""
        self._is_unfit = False
        """Whether it is too old."""
        self._told: set[str] = set()
        self._told_away: set[str] = set()
        """Why etcd does not answer, as far as told since it last did."""
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Disconnect. Requests under way end; watches deliver nothing more."""
        for watch in tuple(self._watches):
            watch.cancel()
        self._task.cancel()
        await asyncio.wait([self._task])
        self._leases.close()
        self._answer_waiters(None)
        if self._calls:
            await asyncio.wait(self._calls)

    # ---- MetaStore

    def submit(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        """Send a request; `done` gets its result later."""
        refusal: StoreResult | None = request_refusal(request)
        if refusal is None and len(self._calls) >= ETCD_CALLS_MAX:
            refusal = StoreUnavailable(f"etcd: {ETCD_CALLS_MAX} requests are under way")
        if refusal is not None:
            self._loop.call_soon(done, refusal)
            return
        task = self._loop.create_task(self._answer(request, done))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def watch(
        self, prefix: bytes, from_revision: int, deliver: Callable[[WatchMessage], None]
    ) -> StoreWatch:
        """Deliver all changes of a prefix from `from_revision` on (at least 1)."""
        watch = _EtcdWatch(prefix, from_revision, deliver)
        watch.client = self
        if len(self._watches) >= ETCD_WATCHES_MAX:
            text = "too many watches are running"
            self._loop.call_later(ETCD_LOST_S, watch.hand_over, Lost(text))
            return watch
        self._watches[watch] = self._loop.create_task(self._keep_watching(watch))
        return watch

    def end_watch(self, watch: StoreWatch) -> None:
        """A watch was cancelled."""
        task = self._watches.pop(watch, None)
        if task is not None:
            task.cancel()

    # ---- Requests

    async def _answer(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        result = await self._result(request, self._loop.time() + self._deadline_s)
        self._loop.call_soon(done, result)

    async def _result(self, request: StoreRequest, until_s: float) -> StoreResult:
        try:
            message = message_of(request)
        except ValueError as error:
            return StoreRefused(RefusalKind.TOO_BIG, f"a number has more than 64 bits: {error}")
        link = self._link or await self._next_link(until_s)
        begun_s = self._loop.time()
        if link is None or begun_s >= until_s:
            text = self.trouble or "etcd: no member answered in time"
            return StoreUnavailable(text, self._is_denied, self._is_unfit)
        try:
            response = await self._call(link, request, message, until_s - begun_s)
        except LinkLostError as error:
            return StoreUnavailable(str(error))
        except RpcError as error:
            return self._failed(link, error, begun_s)
        except (asyncio.CancelledError, LeaseStreamEndedError) as error:
            # The link was closed under it. Nobody cancels this task itself.
            return OutcomeUnknown(f"etcd at {link.endpoint}: the connection ended: {error}")
        result = result_of(response)
        if isinstance(result, RangeResult | TxnResult):
            self._revision = max(self._revision, result.revision)
        is_new_lease = isinstance(request, LeaseGrant) and not link.lost.done()
        if is_new_lease and isinstance(result, LeaseResult):
            self._leases.keep(link.lease_place(), result.lease_id, result.ttl_s)
        return result

    async def _call(
        self, link: EtcdLink, request: StoreRequest, message: Any, timeout_s: float
    ) -> Any:
        """Send a request; return etcd's response. Raises LinkLostError, RpcError."""
        if isinstance(request, LeaseRevoke):
            self._leases.forget(request.lease_id)
        elif isinstance(request, LeaseKeepAlive):
            answer = await self._leases.renew(link.lease_place(), request.lease_id)
            link.hear()
            return answer
        return await link.call(request, message, timeout_s)

    def _failed(self, link: EtcdLink, error: RpcError, begun_s: float) -> StoreResult:
        """Return what an error means for the request, and give up a link that is of no use."""
        code, details = error.code(), error.details() or ""
        refusal = refusal_of(details)
        if refusal is not None:
            if refusal.kind is RefusalKind.NO_SPACE:
                self._tell_once(NO_SPACE_TEXT)
            return refusal
        text = trouble_of(link.endpoint, details)
        late_s = self._loop.time() - begun_s - self._deadline_s
        is_silent = (
            code is _STATUS.DEADLINE_EXCEEDED and link.heard_s < begun_s and late_s < LOOP_LATE_S
        )
        is_logged_out = any(part in details for part in _LOGIN_AGAIN)
        if code is _STATUS.UNAVAILABLE or is_silent or is_logged_out:
            link.lose(text)
        elif code is _STATUS.PERMISSION_DENIED:
            self._tell_once(text)
        is_not_done = any(part in details for part in _HAPPENED_NOT_TEXTS)
        if code in _HAPPENED_NOT or is_not_done:
            return StoreUnavailable(text, code is _STATUS.PERMISSION_DENIED)
        return OutcomeUnknown(text)

    async def _next_link(self, until_s: float) -> EtcdLink | None:
        """Wait for a link; None if there is none at that time, or all endpoints have failed."""
        waiter: asyncio.Future[EtcdLink | None] = self._loop.create_future()
        self._waiters.add(waiter)
        timer = self._loop.call_at(until_s, _set_none, waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)

    def _answer_waiters(self, link: EtcdLink | None) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(link)

    # ---- The link

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._away(f"etcd: unexpected: {task.exception()!r}")

    async def _run(self) -> None:
        """Try the endpoints in turn; keep the first one that can be used until it is lost."""
        pause_s = ETCD_RETRY_S
        at, failures = 0, 0
        while True:
            endpoint = self._settings.endpoints[at % len(self._settings.endpoints)]
            at += 1
            text = await self._use(endpoint)
            if text is not None:
                failures += 1
                if failures % len(self._settings.endpoints):
                    continue
                self._away(text)
                pause_s = min(2 * pause_s, ETCD_RETRY_S_MAX)
            else:
                failures, pause_s = 0, ETCD_RETRY_S
            await asyncio.sleep(pause_s)

    async def _use(self, endpoint: str) -> str | None:
        """Use an endpoint for as long as it can be used; return why it cannot, or None."""
        link = EtcdLink(endpoint, self._settings)
        self._is_denied = self._is_unfit = False
        try:
            async with asyncio.timeout(LOGIN_S):
                await link.log_in()
            self._look_at_history(link)
            self._linked(link)
            self.trouble = await link.lost
        except RpcError as error:
            self._is_denied = is_denial(error.details() or "")
            return trouble_of(endpoint, error.details() or "")
        except EtcdUnfitError as error:
            self._is_unfit = True
            return str(error)
        except TimeoutError:
            return trouble_of(endpoint, "Deadline Exceeded")
        finally:
            self._link, self.endpoint = None, ""
            await link.close()
        return None

    def _linked(self, link: EtcdLink) -> None:
        if self._told_away:
            self._notice(f"etcd answers again, at {link.endpoint}")
            self._told_away.clear()
        self.trouble = ""
        self.era += 1
        self._cluster_id = link.cluster_id
        self._revision = max(self._revision, link.revision)
        if link.version:
            self._tell_once(version_warning(link.version))
        if link.is_full:
            self._tell_once(NO_SPACE_TEXT)
        self._link, self.endpoint = link, link.endpoint
        self._answer_waiters(link)

    def _look_at_history(self, link: EtcdLink) -> None:
        """Say so if this is not the history that this process knew, and go on with it."""
        is_another = self._cluster_id not in {0, link.cluster_id}
        if not is_another and link.revision >= self._revision:
            return
        self._leases.forget()
        for watch in tuple(self._watches):
            self.end_watch(watch)
            self._loop.call_soon(watch.hand_over, Lost(_SET_BACK))
        self._notice(
            history_trouble(
                link.endpoint, is_another=is_another, revision=link.revision, seen=self._revision
            )
        )
        self._revision = link.revision

    def _away(self, text: str) -> None:
        self.trouble = text
        if text not in self._told_away and len(self._told_away) < TROUBLES_MAX:
            self._told_away.add(text)
            self._notice(text)
        self._answer_waiters(None)

    def _tell_once(self, text: str) -> None:
        if text and text not in self._told:
            self._told.add(text)
            self._notice(text)

    # ---- Watches

    async def _keep_watching(self, watch: StoreWatch) -> None:
        while not watch.is_over:
            link = self._link or await self._next_link(self._loop.time() + ETCD_SILENCE_S)
            if link is not None and not link.lost.done():
                text = await self._follow(watch, link)
                if watch not in self._watches:
                    return
                link.lose(text)
            await asyncio.sleep(ETCD_RETRY_S)

    async def _follow(self, watch: StoreWatch, link: EtcdLink) -> str:
        """Deliver what a stream brings until it ends; return why it ended."""
        stream = link.watch_stream()
        key, range_end = range_ends(watch.prefix, is_prefix=True)
        create = pb.WatchCreateRequest(
            key=key, range_end=range_end, start_revision=watch.next_revision, progress_notify=True
        )
        heard_s = [self._loop.time()]
        asking = self._loop.create_task(self._ask_for_progress(stream, heard_s))
        try:
            await stream.write(pb.WatchRequest(create_request=create))
            async for response in stream:
                heard_s[0] = self._loop.time()
                if response.canceled:
                    return self._cancelled(watch, link, response)
                self._deliver(watch, response)
            return f"etcd at {link.endpoint}: it ended the watch"
        except RpcError as error:
            return trouble_of(link.endpoint, error.details() or "")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return f"etcd at {link.endpoint}: the watch got no sign of life"
        finally:
            asking.cancel()
            stream.cancel()

    async def _ask_for_progress(self, stream: Any, heard_s: list[float]) -> None:
        """Ask for a sign of life from time to time; end the stream if none comes.

        `heard_s` has one entry: when something came on this stream. Other calls say nothing of it.
        """
        request = pb.WatchRequest(progress_request=pb.WatchProgressRequest())
        while self._loop.time() - heard_s[0] < ETCD_SILENCE_S:
            await asyncio.sleep(PROGRESS_S)
            try:
                await stream.write(request)
            except (RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
                break  # the stream has ended
        stream.cancel()

    def _deliver(self, watch: StoreWatch, response: Any) -> None:
        for batch in batches_of(response):
            if batch.revision >= watch.next_revision:  # else it was delivered before
                watch.next_revision = batch.revision + 1
                self._loop.call_soon(watch.hand_over, batch)

    def _cancelled(self, watch: StoreWatch, link: EtcdLink, response: Any) -> str:
        if response.compact_revision:
            del self._watches[watch]
            self._loop.call_soon(watch.hand_over, Compacted(response.compact_revision))
            return ""
        text = trouble_of(link.endpoint, response.cancel_reason)
        self._tell_once(text)
        return text


def _set_none(waiter: asyncio.Future[EtcdLink | None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

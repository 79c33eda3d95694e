"""The stage of a scenario: a real server, the proxy before it, the consumer, and who compares them.

    def deletions(stage):
        stage.write(10)
        stage.until_same()
        stage.delete("key 3")
        stage.until_same()

What the server holds is read from the server; a scenario does not say it a second time.
"""

from __future__ import annotations

import shutil
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from struct import Struct
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from clients.conformance import packet as p
from clients.conformance.consumers.asked import Evidence, Exchange, told
from clients.conformance.consumers.documents import Difference, difference
from clients.conformance.consumers.process import ConsumerProcess
from clients.conformance.consumers.proxy import Noted, Passing, Proxy
from clients.conformance.wire import Exchange as Recorded
from clients.conformance.wire import connect
from clients.errors import AmbiguousWriteError, NotFoundError
from clients.kv.sync_client import SyncKv
from clients.operation import vbucket_of
from clients.testing.cluster import DcpCluster
from clients.testing.process import DcpServer

VB: Final = 92
"""The partition that most scenarios write to."""
POLL_S: Final = 0.03
SETTLE_S: Final = 0.25
"""How long documents have to stay equal."""
NOOP_ANSWER_S: Final = 5.0
WRITE_S: Final = 30.0
"""How long an operation may take while another master is elected."""
_INJECTED: Final = 0x6E6F6F70
"""Opaque of our own NOOPs."""
_XATTR, _SELECT = 6, 8
"""Features of HELLO."""
_PATH: Final = Struct(">HB")
_ON_XATTR: Final = 0x04
_XATTR_PATH: Final = b"noted"


class JudgedError(Exception):
    """The consumer fails the scenario. `lines` is the report."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


class NotPlayedError(Exception):
    """The scenario cannot be played for this consumer. The text says why."""


class Stage:
    """See the module. A context manager; `with` starts the server and the consumer.

    `cluster` is a running cluster to play on instead of an own server. There is no proxy before it.
    `keys` has what was written there by others, and gets what is written.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        timeout_s: float,
        cluster: DcpCluster | None = None,
        keys: dict[str, None] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.cluster = cluster
        self.server = DcpServer(folder / "server", "--test-mode", "on")
        self._folder = folder
        self._command = command
        self._keys: dict[str, None] = {} if keys is None else keys
        self._deleted: set[str] = set()
        self._undone: set[str] = set()
        self._unanswered = 0
        self._written = 0
        self._key_lists: dict[int, list[str]] = {}
        self.vb_id = VB
        self.kv: SyncKv
        self.proxy: Proxy
        self.consumer: ConsumerProcess
        self._undo: ExitStack

    def __enter__(self) -> Self:
        """Start. If a part fails, those before it are stopped. Raises OSError, DcpdError."""
        with ExitStack() as undo:
            if self.cluster is None:
                undo.callback(self._stop_server)
                self.server.start()
            self.proxy = undo.enter_context(Proxy(self.server))
            self.kv = self._connect()
            undo.callback(self._close_kv)
            self.consumer = ConsumerProcess(self._command, self._folder, self._environment())
            undo.callback(self.consumer.close)
            self._undo = undo.pop_all()
        return self

    def _environment(self) -> dict[str, str]:
        port, admin_port = self.proxy.port, self.proxy.admin_port
        if self.cluster is not None:
            node = next(each for each in self.cluster.nodes.values() if each.runs)
            port, admin_port = node.port, node.admin_port
        return {
            "HOST": "127.0.0.1", "PORT": str(port), "ADMIN_PORT": str(admin_port),
            "USERNAME": "guest", "PASSWORD": "guest", "BUCKET": "default",
        }  # fmt: skip

    def _connect(self) -> SyncKv:
        return self.server.connect() if self.cluster is None else self.cluster.connect()

    def _close_kv(self) -> None:
        self.kv.close()  # a restart of the server makes a new one

    def _stop_server(self) -> None:
        if self.server.runs:
            self.server.kill()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop all of it, whatever of it fails."""
        self._undo.close()

    # -- documents ---------------------------------------------------------------------------------

    def key(self, number: int, vb_id: int | None = None) -> str:
        """Return the key with a number in a partition (None: the one of the scenario)."""
        vb_id = self.vb_id if vb_id is None else vb_id
        keys = self._key_lists.setdefault(vb_id, [])
        found = int(keys[-1].rpartition("-")[2]) if keys else 0
        while len(keys) <= number:
            found += 1
            if vbucket_of(f"key-{found}") == vb_id:
                keys.append(f"key-{found}")
        return keys[number]

    def set(self, key: str, value: str | None = None, **options: Any) -> int:
        """Write a document; return the seqno."""
        self._written += 1
        value = f"value {self._written}" if value is None else value
        self._keys[key] = None
        self._deleted.discard(key)
        self._undone.discard(key)
        while True:
            try:
                return self.kv.set(key, value.encode(), timeout_s=WRITE_S, **options).seqno
            except AmbiguousWriteError:  # a node has just died; the same SET again is no harm
                continue

    def write(self, count: int, *, first: int = 0, vb_id: int | None = None) -> int:
        """Write documents with numbers from `first` on to one partition; return the last seqno."""
        return [self.set(self.key(number, vb_id)) for number in range(first, first + count)][-1]

    def begin(self, count: int) -> None:
        """Start the consumer, write documents, and return when it has them. Raises JudgedError."""
        self.consumer.start()
        self.write(count)
        self.until_same()

    def delete(self, key: str) -> int:
        """Delete a document; return the seqno."""
        self._deleted.add(key)
        return self.kv.delete(key, timeout_s=WRITE_S).seqno

    def will_be_gone(self, key: str) -> None:
        """A document will expire."""
        self._deleted.add(key)

    def write_elsewhere(self, collection: str, count: int) -> None:
        """Write documents of another collection, which are not judged."""
        with SyncKv(self.server.address, collection=collection) as kv:
            for number in range(count):
                self._written += 1
                kv.set(self.key(number), f"elsewhere {self._written}".encode())

    def set_with_xattr(self, key: str, value: str) -> None:
        """Write a document, and give it an XATTR of a user."""
        self.set(key, value)
        wire = connect("127.0.0.1", self.server.port, self.timeout_s, Recorded())
        try:
            wire.hello([_XATTR, _SELECT])
            wire.ask(p.SASL_AUTH, key=b"PLAIN", value=b"\0guest\0guest")
            wire.ask(p.SELECT_BUCKET, key=b"default")
            answer = wire.ask(
                p.SUBDOC_DICT_UPSERT, vbucket_of(key), key=key.encode(),
                extras=_PATH.pack(len(_XATTR_PATH), _ON_XATTR), value=_XATTR_PATH + b'"noted"',
            )  # fmt: skip
            assert answer.field == p.OK, answer
        finally:
            wire.close()

    def collection(self, method: str, name: str) -> None:
        """Make ("POST") or drop ("DELETE") a collection of the default scope."""
        path = "/pools/default/buckets/default/scopes/_default/collections"
        is_new = method == "POST"
        request = Request(  # noqa: S310 - our own server
            self.server.admin_url + path + ("" if is_new else f"/{name}"),
            urlencode({"name": name}).encode() if is_new else None,
            {"authorization": "Basic " + b64encode(b"guest:guest").decode()}, method=method,
        )  # fmt: skip
        with urlopen(request, timeout=self.timeout_s):  # noqa: S310
            pass

    def branch(self, at: int, *, vb_id: int | None = None) -> None:
        """Undo the changes of a partition above a seqno."""
        before = self.wanted()
        (self.cluster or self.server).branch(self.vb_id if vb_id is None else vb_id, at)
        self.note_undone(before)

    def note_undone(self, before: dict[str, str]) -> None:
        """Compare with what there was, and note what is gone."""
        after = self.wanted()
        self._undone |= {key for key, value in before.items() if after.get(key) != value}

    def wanted(self) -> dict[str, str]:
        """Return what the server holds."""
        wanted: dict[str, str] = {}
        for key in self._keys:
            try:
                wanted[key] = self.kv.get(key, timeout_s=WRITE_S).value.decode()
            except NotFoundError:
                continue
        return wanted

    # -- the server --------------------------------------------------------------------------------

    def replace_server(self, folder: Path | None) -> None:
        """Kill the server and start another one on its port: with a copy of a folder, or empty."""
        if self.server.runs:
            self.server.kill()
        shutil.rmtree(self.server.data)
        if folder is not None:
            shutil.copytree(folder, self.server.data)
        self.restart_server()

    def copy_of_server(self) -> Path:
        """Stop the server, copy its folder, start it again; return the copy."""
        copy = self._folder / "copy"
        self.server.stop()
        shutil.copytree(self.server.data, copy)
        self.restart_server()
        return copy

    def restart_server(self) -> None:
        """Kill the server if it runs, and start it again."""
        self.server.restart()
        self.kv.close()
        self.kv = self._connect()

    # -- judging -----------------------------------------------------------------------------------

    def until_same(self, timeout_s: float | None = None) -> None:
        """Return when the consumer has what the server has. Raises JudgedError."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        wanted = self.wanted()
        until_s = time.monotonic() + timeout_s
        same_since_s = 0.0
        found = self._difference(wanted)
        while time.monotonic() < until_s:
            if ended := self.consumer.ended():
                self._fail(found, ended)
            found = self._difference(wanted)
            now_s = time.monotonic()
            if not found.is_none:
                same_since_s = 0.0
            elif not same_since_s:
                same_since_s = now_s
            elif now_s > same_since_s + SETTLE_S:
                return
            time.sleep(POLL_S)
        self._fail(found, "", f"not the same within {timeout_s:.0f} s")

    def _difference(self, wanted: dict[str, str]) -> Difference:
        return difference(self.consumer.documents.held(), wanted)

    def until(self, what: str, look: Callable[[], object], timeout_s: float | None = None) -> None:
        """Return when something has happened. Raises JudgedError."""
        until_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while not look():
            if ended := self.consumer.ended():
                self._fail(self._difference(self.wanted()), ended)
            if time.monotonic() > until_s:
                self._fail(self._difference(self.wanted()), "", f"this did not happen: {what}")
            time.sleep(POLL_S)

    def ask_noop(self) -> None:
        """Send the consumer a NOOP on each connection where it streams, and wait for the answer.

        Raises JudgedError.
        """
        open_on = {each.connection for each in self.exchange().asked if each.status == p.OK}
        links = [link for link in self.proxy.links() if link.number in open_on]
        if not links:
            raise NotPlayedError("it has no connection with a stream")
        answered: set[int] = set()

        def take(passing: Passing) -> bytes | None:
            packet = passing.packet
            is_ours = packet.opaque == _INJECTED and packet.opcode == p.DCP_NOOP
            if passing.is_from_server or not is_ours:
                return None
            answered.add(passing.link.number)
            return b""

        self.proxy.add(take)
        noop = p.pack(p.Packet(p.REQUEST, p.DCP_NOOP, 0, _INJECTED))
        for link in links:
            link.send(noop, to_consumer=True)
        self._unanswered = len(links)
        wanted = {link.number for link in links}
        self.until("a NOOP is answered", lambda: wanted <= answered, NOOP_ANSWER_S)
        self._unanswered = 0

    def exchange(self) -> Exchange:
        """Return what was said so far."""
        return Exchange(tuple[Noted, ...](self.proxy.noted))

    def _fail(self, found: Difference, ended: str, why: str = "") -> None:
        seqnos: dict[str, tuple[int, int]] = {}
        for key in found.lacking + found.stale:
            with suppress(NotFoundError):  # it has expired meanwhile
                meta = self.kv.metadata(key)
                seqnos[key] = vbucket_of(key), int(str(meta["seqno"]), 0)
        evidence = Evidence(
            self.exchange(), found, seqnos, ended, self._unanswered,
            frozenset(self._deleted), frozenset(self._undone),
        )  # fmt: skip
        raise JudgedError(told(evidence, self.vb_id, why))

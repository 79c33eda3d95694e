"""`SyncKv`: a blocking key-value client for dcpctl and small scripts.

    with SyncKv("127.0.0.1:11210") as kv:
        kv.set(b"user:1", b"Ada")
        kv.set_json("user:2", {"name": "Grace"})

Its methods are those of `KvClient`, run to their end (`clients.kv.commands`). The first operation
goes to the named server. If another node serves the partition, or a node is gone or refuses for a
while, the operation is repeated until its timeout is over, with growing pauses and newer maps of
the cluster. `clients.kv.call` has the rules. A write that may have been applied is not repeated: it
raises AmbiguousWriteError.

While it waits for an answer for long, threads ask other nodes for a newer map
(`clients.link.blocking_link`). If that moves the partition, a read goes to the new master.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from clients.address import ServerAddress, parse_address
from clients.kv.batch import AtomicBatch
from clients.kv.blocking_exchange import BlockingExchange
from clients.kv.commands import KvCommands
from clients.kv.routing import Router
from clients.link.topology import ClusterNode

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _blocking(
    method: Callable[Concatenate[KvCommands, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[SyncKv, _P], _T]:
    """Return a method of KvCommands as one that returns when it is done."""

    def run(self: SyncKv, /, *arguments: _P.args, **named: _P.kwargs) -> _T:
        work = method(self._commands, *arguments, **named)
        try:
            work.send(None)
        except StopIteration as end:
            result: _T = end.value
            return result
        raise AssertionError("a blocking transport waits where it is called")

    update_wrapper(run, method)
    return run


class SyncKv:
    """A blocking key-value client; a context manager.

    Each operation goes to the node that serves its partition, and is retried until the timeout. One
    thread at a time may use a client.
    """

    def __init__(
        self,
        server: str | ServerAddress,
        *,
        timeout_s: float = 10.0,
        collection: str | None = None,
    ) -> None:
        """`server`: as for `KvClient.connect`. It is connected when it is first used.

        `timeout_s` bounds every call that has no timeout of its own. `collection`: scope.collection
        of the documents; None: the default one.
        """
        address = parse_address(server) if isinstance(server, str) else server
        seed, *others = (ClusterNode(*place) for place in address.places)
        self.address = address
        self._exchange = BlockingExchange(address, Router(seed, others, is_tls=address.is_tls))
        self._commands = KvCommands(address, timeout_s, collection, self._exchange)

    def __enter__(self) -> SyncKv:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all connections."""
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._exchange.close()

    @contextmanager
    def batch(self, *, timeout_s: float | None = None) -> Iterator[AtomicBatch]:
        """Collect changes, and make them together, or not at all. Raises what `KvClient.batch`
        does.
        """
        batch = AtomicBatch()
        yield batch
        batch.results = self.apply_batch(batch.changes, timeout_s=timeout_s)

    apply_batch = _blocking(KvCommands.apply_batch)
    get = _blocking(KvCommands.get)
    get_json = _blocking(KvCommands.get_json)
    get_with_xattrs = _blocking(KvCommands.get_with_xattrs)
    set = _blocking(KvCommands.set)
    set_json = _blocking(KvCommands.set_json)
    add = _blocking(KvCommands.add)
    replace = _blocking(KvCommands.replace)
    store = _blocking(KvCommands.store)
    delete = _blocking(KvCommands.delete)
    increment = _blocking(KvCommands.increment)
    decrement = _blocking(KvCommands.decrement)
    touch = _blocking(KvCommands.touch)
    metadata = _blocking(KvCommands.metadata)
    failover_log = _blocking(KvCommands.failover_log)
    version_log = _blocking(KvCommands.version_log)
    get_all_vb_seqnos = _blocking(KvCommands.get_all_vb_seqnos)
    stats = _blocking(KvCommands.stats)
    collections_manifest = _blocking(KvCommands.collections_manifest)
    named_node = _blocking(KvCommands.named_node)
    topology = _blocking(KvCommands.cluster_map)

"""Opens the metadata store that a cluster's URL names.

    embedded://127.0.0.1:PORT        one node owns the store, in its data folder; the others connect
    etcd://HOST:PORT,HOST:PORT...    etcd; `failover.metadata.etcd.settings` has all of the URL

The owner of an embedded store serves it in its own process, and connects to it like the others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from dcp.server.access.link_tls import LinkTls
from dcp.server.cluster.cluster_file import KEYS_PREFIX, ClusterFile, ClusterRefusedError
from dcp.server.cluster.member_link import NodeLogin
from dcp.server.net.fixed_port import PORT_MAX, PORT_MIN, TRIES, free_port
from dcp.server.observe.elapsed import elapsed_ns
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.meter import Histogram
from failover.metadata.embedded.client import EmbeddedClient
from failover.metadata.embedded.server import (
    EmbeddedServer,
    EmbeddedStoreError,
    StorePortTakenError,
)
from failover.metadata.etcd.settings import ETCD_SCHEME, EtcdSettings, settings_of_url
from failover.metadata.keyring import Keyring, KeyringError
from failover.metadata.metastore import (
    MetaStore,
    StoreRequest,
    StoreResult,
    StoreUnavailable,
    StoreWatch,
    WatchMessage,
)

if TYPE_CHECKING:
    from failover.metadata.etcd.client import EtcdClient

EMBEDDED: Final = "embedded"
STORE_FOLDER: Final = "metastore"
_LOOPBACK: Final = "127.0.0.1"
_URLS: Final = (
    f"Use {EMBEDDED} (in this node, for nodes of this machine), or "
    f"{ETCD_SCHEME}://HOST:PORT,HOST:PORT"
)


class MetaUrlError(ClusterRefusedError):
    """The URL names no metadata store."""


class MetaAccessError(ClusterRefusedError):
    """The metadata store cannot be opened."""


class MetaPortError(MetaAccessError):
    """Another process has the port of this node's metadata store."""


class StorePlace(NamedTuple):
    """Where a metadata store is."""

    host: str
    port: int


def new_store_url(draw: random.Random) -> str:
    """Return a URL for a new embedded store, with a port that it can keep. Raises
    MetaAccessError.
    """
    port = free_port(_LOOPBACK, draw)
    if port is None:
        raise MetaAccessError(
            f"no free port was found for the metadata store: {TRIES} between {PORT_MIN} and "
            f"{PORT_MAX} are in use",
            "Stop what listens there (`ss -ltnp` shows it), or use etcd",
        )
    return f"{EMBEDDED}://{_LOOPBACK}:{port}"


def place_of(url: str) -> StorePlace:
    """Return where the store of a URL is. Raises MetaUrlError."""
    try:
        parts = urlsplit(url)
        port = parts.port or 0
    except ValueError as error:
        raise MetaUrlError(f"the metadata store {url!r} is not possible: {error}", _URLS) from None
    if parts.scheme != EMBEDDED or not parts.hostname or not port:
        raise MetaUrlError(f"the metadata store {url!r} is not possible: no such kind", _URLS)
    return StorePlace(parts.hostname, port)


class TimedStore:
    """A metadata store whose answers are timed."""

    def __init__(self, store: MetaStore) -> None:
        self._store = store
        self.seconds = Histogram()
        """From a request to its answer; requests that the store never got are left out."""

    @property
    def era(self) -> int:
        """See MetaStore."""
        return self._store.era

    def submit(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        """See MetaStore."""
        asked_ns = elapsed_ns()

        def answered(result: StoreResult) -> None:
            if not isinstance(result, StoreUnavailable):
                self.seconds.observe((elapsed_ns() - asked_ns) / 1e9)
            done(result)

        self._store.submit(request, answered)

    def watch(
        self, prefix: bytes, from_revision: int, deliver: Callable[[WatchMessage], None]
    ) -> StoreWatch:
        """See MetaStore."""
        return self._store.watch(prefix, from_revision, deliver)


class MetaAccess:
    """An open store, made by `open`: a client, and the store itself in its owner. `keyring` has
    the secrets with which this node, of this name, logs in there, and at other nodes.
    """

    def __init__(self, meta: MetaStore, url: str, keyring: Keyring, name: str) -> None:
        self.meta = TimedStore(meta)
        self.url = url
        self.keyring = keyring
        self._name = name
        self._client: EmbeddedClient | EtcdClient | None = None
        self._server: EmbeddedServer | None = None

    @classmethod
    async def open(cls, identity: ClusterFile, data_dir: Path, log: EventLog) -> MetaAccess:
        """Open the store of a cluster. Raises MetaAccessError, MetaUrlError."""
        keyring = _keyring_of(identity)
        if identity.meta.startswith(f"{ETCD_SCHEME}:"):
            return cls._of(_etcd_client(identity.meta, log), identity.meta, keyring, identity.name)
        place = place_of(identity.meta)
        server, port = None, place.port
        if identity.owns_store:
            server = EmbeddedServer(data_dir / STORE_FOLDER, keyring, log.warning)
            try:
                port = await server.start(place.host, place.port)
            except StorePortTakenError as error:
                raise MetaPortError(str(error)) from error
            except EmbeddedStoreError as error:
                raise MetaAccessError(str(error)) from error
        client = EmbeddedClient(place.host, port, keyring, log.info)
        url = f"{EMBEDDED}://{place.host}:{port}"
        return cls._of(client, url, keyring, identity.name, server)

    @classmethod
    def _of(
        cls,
        client: EmbeddedClient | EtcdClient,
        url: str,
        keyring: Keyring,
        name: str,
        server: EmbeddedServer | None = None,
    ) -> MetaAccess:
        access = cls(client, url, keyring, name)
        access._client, access._server = client, server
        return access

    def login(self, tls: LinkTls | None) -> NodeLogin:
        """Return a login of this node at another one, on a connection of this kind."""
        shows = tls is not None and tls.shows_certificate
        return NodeLogin(self.keyring.in_use, self._name, uses_certificate=shows)

    @property
    def trouble(self) -> str:
        """Why the store does not answer; "" while it does, or where that is not known."""
        return "" if self._client is None else self._client.trouble

    @property
    def failed(self) -> asyncio.Future[str] | None:
        """Gets the reason when this node's store cannot go on; None: the node owns none."""
        return None if self._server is None else self._server.failed

    async def close(self) -> None:
        """Disconnect, and end the store of its owner."""
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.close()


def check_access(identity: ClusterFile) -> None:
    """Check what a folder says of its store as `MetaAccess.open` does, without opening it. Files
    that the URL names are not read. Raises MetaAccessError, MetaUrlError.
    """
    _keyring_of(identity)
    if identity.meta.startswith(f"{ETCD_SCHEME}:"):
        _etcd_settings(identity.meta, lambda _: b"-")
    else:
        place_of(identity.meta)


def _keyring_of(identity: ClusterFile) -> Keyring:
    try:
        return Keyring(identity.secrets)
    except KeyringError as error:
        raise MetaAccessError(
            str(error), "Use the whole token, as `dcpctl cluster token` prints it"
        ) from error


def _etcd_settings(url: str, read: Callable[[str], bytes]) -> EtcdSettings:
    try:
        return settings_of_url(url, KEYS_PREFIX, read)
    except ValueError as error:
        raise MetaUrlError(str(error), _URLS) from None


def _etcd_client(url: str, log: EventLog) -> EtcdClient:
    """Return a client of etcd. Raises MetaAccessError, MetaUrlError."""
    try:
        settings = _etcd_settings(url, lambda path: Path(path).read_bytes())
    except OSError as error:
        raise MetaAccessError(
            f"{error.filename}: cannot be read: {error.strerror}",
            "Correct the file's name in the URL of the metadata store, or its permissions",
        ) from error
    try:
        from failover.metadata.etcd.client import EtcdClient
    except ImportError as error:
        raise MetaAccessError(
            f"etcd needs a package that is not installed ({error.name})",
            "Install the extra: pip install '.[cluster]'",
        ) from error
    return EtcdClient(settings, log.info)

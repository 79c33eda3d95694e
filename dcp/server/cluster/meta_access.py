"""Opens the metadata store that a cluster's URL names.

    embedded://127.0.0.1:PORT    one node owns the store, in its data folder; the others connect

The owner serves the store in its own process, and connects to it like the others.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from dcp.cluster.metastore import MetaStore
from dcp.metastore.embedded_client import EmbeddedClient
from dcp.metastore.embedded_server import EmbeddedServer, EmbeddedStoreError
from dcp.server.cluster.cluster_file import ClusterFile
from dcp.server.observe.event_log import EventLog

EMBEDDED: Final = "embedded"
STORE_FOLDER: Final = "metastore"
_LOOPBACK: Final = "127.0.0.1"


class MetaUrlError(Exception):
    """The URL names no metadata store; the text says why."""


class MetaAccessError(Exception):
    """The metadata store cannot be opened; the text says why."""


class StorePlace(NamedTuple):
    """Where a metadata store is."""

    host: str
    port: int


def place_of(url: str) -> StorePlace:
    """Return where the store of a URL is; port 0: not known yet. Raises MetaUrlError."""
    if url == EMBEDDED:
        return StorePlace(_LOOPBACK, 0)
    try:
        parts = urlsplit(url)
        port = parts.port or 0
    except ValueError as error:
        raise MetaUrlError(f"the metadata store {url!r} is not possible: {error}") from None
    if parts.scheme != EMBEDDED or not parts.hostname:
        raise MetaUrlError(
            f"the metadata store {url!r} is not possible. {EMBEDDED} is: this node owns the store, "
            "and other nodes of this machine use it"
        )
    return StorePlace(parts.hostname, port)


class MetaAccess:
    """An open store, made by `open`: a client, and the store itself in its owner."""

    def __init__(self, meta: MetaStore, url: str) -> None:
        self.meta = meta
        self.url = url
        """With the port that the owner listens on."""
        self._client: EmbeddedClient | None = None
        self._server: EmbeddedServer | None = None

    @classmethod
    async def open(cls, identity: ClusterFile, data_dir: Path, log: EventLog) -> MetaAccess:
        """Open the store of a cluster. Raises MetaAccessError, MetaUrlError."""
        place = place_of(identity.meta)
        secret = identity.secret.encode()
        server, port = None, place.port
        if identity.owns_store:
            server = EmbeddedServer(data_dir / STORE_FOLDER, secret, log.warning)
            try:
                port = await server.start(place.host, place.port)
            except EmbeddedStoreError as error:
                raise MetaAccessError(str(error)) from error
        client = EmbeddedClient(place.host, port, secret, log.info)
        access = cls(client, f"{EMBEDDED}://{place.host}:{port}")
        access._client, access._server = client, server
        return access

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

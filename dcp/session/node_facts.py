"""What a session is given by its node: facts to tell clients, its limits, and news
of the cluster's map. Sans-IO.

Who uses it: `dcp.session.state` and the shells that make sessions.

**What one client is told of the cluster's map**, and when: pushes and NOT_MY_VBUCKET.

Who calls it: the session's state, and GET_CLUSTER_CONFIG.

Invariants
- a version is pushed once, and later versions only;
- a client that asked for it (HELLO 0x1e) gets the map of one version once on a connection: in the
  answer to GET_CLUSTER_CONFIG, in a whole push or with NOT_MY_VBUCKET, whichever is first. A brief
  push has no map, so it does not count.
"""

from __future__ import annotations

from collections.abc import Container
from struct import Struct
from typing import Final, NamedTuple, Protocol

from dcp.stream.producer import BACKLOGS_MAX
from dcp.wire.feature import MAP_PUSHES, Feature
from dcp.wire.frame import MAX_VALUE_BYTES

BODY_BYTES_MAX_BEFORE_LOGIN: Final = 64 * 1024
"""Largest body before the login, which needs far less. Anybody can send so much."""


class NodeFacts(Protocol):
    """What sessions tell about their node."""

    version: str
    bucket: str
    """The name of the only bucket."""

    def bucket_config(self) -> bytes:
        """Return the bucket's cluster configuration as JSON."""

    def global_config(self) -> bytes:
        """Return the node's cluster configuration without a bucket, as JSON."""

    def config_version(self) -> tuple[int, int]:
        """Return (revEpoch, rev) of the cluster configuration."""

    def address_of(self, vb_id: int) -> str:
        """Return host and port of a partition's master, as the map has it; "": it has none now."""

    def stats(self, group: bytes) -> list[tuple[str, str]] | None:
        """Return the statistics of a group; None: it is unknown."""


class Limits(NamedTuple):
    """Limits of one session."""

    value_bytes_max: int = MAX_VALUE_BYTES
    streams_max: int = 1024
    backlogs_max: int = BACKLOGS_MAX
    login_body_bytes_max: int = BODY_BYTES_MAX_BEFORE_LOGIN
    login_failures_max: int = 5
    """Failed logins after which a connection is closed."""
    syncs_writes: bool = True
    """Whether a change is on disk before its answer (setting durability)."""
    allows_faults: bool = False
    """Whether a client with the role admin may hold commits (setting test_mode, or loopback)."""
    oversized_set_removes: bool = False
    """Whether a SET that is refused because of its size removes the document."""


CONFIG_VERSION: Final = Struct(">qq")
"""revEpoch and rev of a configuration."""
_NONE: Final = (0, 0)
"""Below the version of any configuration."""


class MapPush(NamedTuple):
    """A message about a newer map."""

    version: bytes
    body: bytes
    """The map; b"": the client wants to know the version only."""


class MapNews:
    """See the module."""

    __slots__ = ("_dedupes", "_facts", "_has", "_push", "_pushed", "bucket", "is_owed")

    def __init__(self, facts: NodeFacts) -> None:
        self._facts = facts
        self.bucket: str | None = None
        """The bucket that the client has selected."""
        self._push: Feature | None = None
        """How the client wants to be told newer maps: whole or brief; None: it asks itself."""
        self._dedupes = False
        """Whether the client keeps the map that it was sent, and wants no second copy."""
        self._has = self._pushed = _NONE
        """The version that the client has, and the last one that was pushed."""
        self.is_owed = False
        """Whether a push waits until the client reads."""

    def hello(self, granted: Container[int]) -> None:
        """Take what HELLO granted."""
        pushes = [code for code in Feature if code in MAP_PUSHES and code in granted]
        self._push = pushes[0] if pushes else None
        self._dedupes = Feature.DEDUPE_NOT_MY_VBUCKET in granted

    def take_known(self, version: tuple[int, int]) -> bool:
        """The client says that it has this version: return whether that is the newest one. With a
        bucket it says so of the bucket's map, which has the partitions.
        """
        if version < self._facts.config_version():
            return False
        if self.bucket is not None:
            self._has = version
        return True

    def config(self) -> bytes:
        """Return the bucket's map, or the node's configuration if no bucket is selected."""
        return self._facts.global_config() if self.bucket is None else self.whole()

    def whole(self) -> bytes:
        """Return the bucket's map, which the client has then."""
        self._has = self._facts.config_version()
        return self._facts.bucket_config()

    def with_refusal(self) -> bytes:
        """Return the body of NOT_MY_VBUCKET; b"": the client has the map already."""
        if self._dedupes and self._has >= self._facts.config_version():
            return b""
        return self.whole()

    def push(self) -> MapPush | None:
        """Return what to push now; the client has been told then. None: nothing."""
        assert self.bucket is not None, "without one it knows no partitions"
        version = self._facts.config_version()
        known = max(self._pushed, self._has) if self._dedupes else self._pushed
        if self._push is None or known >= version:
            return None
        self._pushed = version
        is_whole = self._push is Feature.CLUSTERMAP_CHANGE_NOTIFICATION
        return MapPush(CONFIG_VERSION.pack(*version), self.whole() if is_whole else b"")

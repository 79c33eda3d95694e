"""What a session is given by its node: facts to tell clients, and its limits.

Who uses it: `dcp.session.state` and the shells that make sessions.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from dcp.stream.producer import BACKLOGS_MAX
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

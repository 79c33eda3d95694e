"""What a data folder knows of its cluster: the file cluster.json. Also the token for new members.

The file is written when the node becomes a member, and at each start, before the node speaks to
anybody: each process of a member has a higher incarnation than all before it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

import msgspec

from dcp.server.files import TWIN_SUFFIX
from dcp.server.files.kept_twice import (
    NEWEST_SUFFIX,
    FileDamagedError,
    read_kept,
    write_kept,
)
from dcp.server.storage.folder import CLUSTER_FILE, FolderError

FORMAT: Final = 1
KEYS_PREFIX: Final = b"/dcpd/"
"""Below this all clusters have their keys in the metadata store."""
SECRET_BYTES: Final = 32
NEWEST_FILE: Final = CLUSTER_FILE + NEWEST_SUFFIX
"""Earlier versions keep the cluster and its newest incarnation there."""
_TAKE_IT: Final = f"to go on with this one, delete {NEWEST_FILE}"
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
TOKEN_PREFIX: Final = "dcpd-cluster-"  # noqa: S105 - marks tokens, and is none


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    format: int = FORMAT
    cluster: str
    """The cluster's id."""
    meta: str
    """URL of the metadata store."""
    owns_store: bool = False
    """Whether the embedded metadata store is in this folder."""
    secret: str
    """What nodes of this cluster log in with at each other."""
    name: str
    """The node's name."""
    rack: str = ""
    min_in_sync: int | None = None
    incarnation: int = 0
    accepts: str | msgspec.UnsetType = msgspec.UNSET
    """Another secret with which nodes are let in, while the cluster changes it."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """What a keyring has: the secret in use is the first."""
        return (self.secret, self.accepts) if self.accepts else (self.secret,)

    def with_secrets(self, secrets: Sequence[str]) -> ClusterFile:
        """Return the content with the secrets of a keyring."""
        first, *others = secrets
        accepts = others[0] if others else msgspec.UNSET
        return msgspec.structs.replace(self, secret=first, accepts=accepts)

    @property
    def root(self) -> bytes:
        """The prefix of the cluster's keys in the metadata store."""
        return KEYS_PREFIX + f"{self.cluster}/".encode()

    @property
    def secret_proof(self) -> str:
        """What shows that this node has the cluster's secret."""
        return proof_of(self.cluster, self.secret)


def proof_of(cluster: str, secret: str) -> str:
    """Return what shows that a node has a cluster's secret. The secret is random, so nobody can
    guess it from that.
    """
    return hashlib.sha256(f"{cluster} {secret}".encode()).hexdigest()


class ClusterRefusedError(Exception):
    """A command is refused, and changes nothing. `str(error)` is one line with both parts."""

    def __init__(
        self, why: str, try_this: str = "", *, status: HTTPStatus = HTTPStatus.CONFLICT
    ) -> None:
        """`why` is a clause without a full stop, `try_this` a sentence without one."""
        super().__init__(f"{why}. {try_this}" if try_this else why)
        self.why = why
        self.try_this = try_this
        self.status = status
        """The status of the HTTP answer."""


class ClusterTokenError(ClusterRefusedError):
    """A token cannot be used."""


class ClusterToken(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a new member needs to know. Whoever has it can become a member."""

    format: int = FORMAT
    cluster: str
    meta: str
    secret: str

    def to_text(self) -> str:
        """Return the token as one word."""
        return TOKEN_PREFIX + urlsafe_b64encode(msgspec.json.encode(self)).decode().rstrip("=")

    @classmethod
    def from_text(cls, text: str) -> ClusterToken:
        """Read a token. Raises ClusterTokenError."""
        word = text.strip()
        try:
            if not word.startswith(TOKEN_PREFIX):
                raise ValueError(f"it does not begin with {TOKEN_PREFIX}")
            encoded = word.removeprefix(TOKEN_PREFIX)
            raw = urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
            token = msgspec.json.decode(raw, type=cls)
        except (ValueError, Base64Error, msgspec.DecodeError) as error:
            raise ClusterTokenError(
                f"this is no token of a cluster: {error}",
                "Copy the whole line that `dcpctl cluster token` prints on a member",
            ) from None
        if token.format != FORMAT:
            raise ClusterTokenError(
                f"the token has format {token.format}, this dcpd reads format {FORMAT}",
                "Use the version of dcpd that the cluster runs",
            )
        return token


def read_cluster_file(data_dir: Path) -> ClusterFile | None:
    """Return what a folder knows of its cluster; None: it belongs to none. Raises FolderError."""
    path = data_dir / CLUSTER_FILE
    try:
        kept = read_kept(path)
        found = msgspec.json.decode(kept.content, type=ClusterFile)
    except FileNotFoundError:
        return None
    except (FileDamagedError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FolderError(
            f"{path}: cannot be read: {error}. Without it the folder must not be served, because "
            f"it may be one of several copies. Restore the file, and delete {path.name}"
            f"{TWIN_SUFFIX}; or restore the folder from a backup"
        ) from error
    except OSError as error:
        raise FolderError(f"{path}: cannot be read: {error.strerror}") from error
    if found.format != FORMAT:
        raise FolderError(
            f"{path}: it has format {found.format}, this dcpd reads format {FORMAT}; use the "
            "version of dcpd that wrote it"
        )
    if not kept.is_sealed:
        _check_newest(data_dir, found)
    return found


def _check_newest(data_dir: Path, found: ClusterFile) -> None:
    """Raise FolderError if the folder was a newer process's than its file says."""
    newest = data_dir / NEWEST_FILE
    try:
        cluster, incarnation = newest.read_text("ascii").split()
        is_older = cluster == found.cluster and found.incarnation < int(incarnation)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise FolderError(f"{newest}: cannot be read: {error}; {_TAKE_IT}") from error
    if is_older:
        raise FolderError(
            f"{data_dir / CLUSTER_FILE}: is an older copy: it is of incarnation "
            f"{found.incarnation}, and this folder has begun {incarnation}. Put the newest one "
            f"back; {_TAKE_IT}"
        )


def write_cluster_file(data_dir: Path, content: ClusterFile) -> None:
    """Make a folder the one of a member. Durable when it returns. Raises OSError."""
    raw = msgspec.json.format(msgspec.json.encode(content), indent=2)
    write_kept(data_dir / CLUSTER_FILE, raw + b"\n")
    with contextlib.suppress(OSError):  # it counts for a file without a seal only
        (data_dir / NEWEST_FILE).unlink(missing_ok=True)


def begin_incarnation(data_dir: Path, content: ClusterFile) -> ClusterFile:
    """Return the content with the incarnation of this process, which is on disk then, unless the
    disk is full. Raises FolderError.
    """
    # The time keeps two copies of a folder apart: the one that starts later has the higher number.
    incarnation = max(content.incarnation + 1, time.time_ns() // 1_000_000)
    begun = msgspec.structs.replace(content, incarnation=incarnation)
    try:
        write_cluster_file(data_dir, begun)
    except OSError as error:
        if error.errno in _NO_ROOM:  # the time alone keeps it above the next one
            return begun
        raise FolderError(
            f"{data_dir / CLUSTER_FILE}: cannot be written: {error.strerror}"
        ) from error
    return begun

"""The start of a node of a cluster: its folder's file, or the settings, and the metadata store.

The settings `cluster` and `cluster_token_file` make a node a member before it listens, so that it
never takes a write of its own. Once the folder has cluster.json, they say nothing new: only a token
file that is missing is written again, because nodes that join may wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dcp.server.access.users_file import replace_file
from dcp.server.cluster.becoming_member import NewMember, init_cluster, join_by_token, token_of
from dcp.server.cluster.cluster_file import ClusterFile
from dcp.server.cluster.enrolment import EnrolmentError, NewCluster
from dcp.server.cluster.membership_of_node import begun_identity
from dcp.server.cluster.meta_access import (
    MetaAccess,
    MetaAccessError,
    MetaPortError,
    MetaUrlError,
)
from dcp.server.config.settings import Settings
from dcp.server.net.fixed_port import PortTakenError
from dcp.server.storage.folder import CLUSTER_FILE, FolderError


async def entered(
    newcomer: NewMember, open_meta: Callable[[ClusterFile], MetaAccess] | None = None
) -> tuple[ClusterFile, MetaAccess]:
    """Return what the folder knows of its cluster, and the open metadata store. Raises
    FolderError, PortTakenError.
    """
    if not (newcomer.data_dir / CLUSTER_FILE).exists():
        try:
            await _enrol(newcomer, newcomer.settings)
        except EnrolmentError as error:
            raise FolderError(f"this node does not become a member: {error}") from error
    identity = begun_identity(newcomer.data_dir, newcomer.settings)
    _write_missing_token(newcomer, identity)
    if open_meta is not None:
        return identity, open_meta(identity)
    try:
        return identity, await MetaAccess.open(identity, newcomer.data_dir, newcomer.log)
    except MetaPortError as error:
        raise PortTakenError(str(error)) from error
    except (MetaAccessError, MetaUrlError) as error:
        raise FolderError(str(error)) from error


async def _enrol(newcomer: NewMember, settings: Settings) -> None:
    if settings.cluster == "init":
        wanted = NewCluster(settings.cluster_copies, None)
        token = await init_cluster(newcomer, wanted, meta=settings.cluster_meta)
        if settings.cluster_token_file is not None:
            _write_token(settings.cluster_token_file, token.to_text())
        return
    path = settings.cluster_token_file
    if path is None:
        raise EnrolmentError("--cluster join needs --cluster-token-file, the token of a member")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EnrolmentError(f"the token file {path} cannot be read: {error}") from error
    await join_by_token(newcomer, text)


def _write_missing_token(newcomer: NewMember, identity: ClusterFile) -> None:
    """Write the token file of `--cluster init` if it is missing: the start that made the cluster
    could not write it. A member that cannot write it either runs all the same.
    """
    path = newcomer.settings.cluster_token_file
    if newcomer.settings.cluster != "init" or path is None:
        return
    try:
        if not path.exists():
            _write_token(path, token_of(identity).to_text())
    except (EnrolmentError, OSError) as error:
        newcomer.log.error(
            "nodes that join may wait for the token file",
            reason=f"{error}. `dcpctl cluster token` prints the token",
        )


def _write_token(path: Path, text: str) -> None:
    try:
        replace_file(path, text.encode() + b"\n")
    except OSError as error:
        why = f"the token file {path} cannot be written: {error.strerror}"
        raise EnrolmentError(why) from error

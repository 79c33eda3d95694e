"""The token file of `--cluster init`: nodes that join wait for it, so no failure may lose it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from dcp.server.cluster.cluster_file import ClusterFile, ClusterToken, read_cluster_file
from dcp.server.cluster.joining import becoming_member
from dcp.server.cluster.joining.becoming_member import NewMember, entered
from dcp.server.cluster.meta_access import MetaAccess
from dcp.server.node import Node
from dcp.server.storage.folder import FolderError
from failover.metadata.keyring import Keyring
from failover.metadata.metastore import StoreRequest
from memory.meta_store import MemoryMetaStore
from support.cluster_here import node_here, until


class Store(MemoryMetaStore):
    """Answers at once."""

    def submit(self, request: StoreRequest, done) -> None:  # type: ignore[no-untyped-def]
        super().submit(request, done)
        self.advance(0)


@pytest.fixture
def access(monkeypatch: pytest.MonkeyPatch) -> MetaAccess:
    store = MetaAccess(Store(), "memory", Keyring(["s" * 43]), "")

    async def opened(*_: object) -> MetaAccess:
        return store

    monkeypatch.setattr(becoming_member.MetaAccess, "open", opened)
    return store


def newcomer(node: Node, token_file: Path) -> NewMember:
    """Return what a start with `--cluster init` begins with, on the folder of a node."""
    found = node._newcomer()
    wanted = {"cluster": "init", "cluster_token_file": token_file}
    return found._replace(settings=msgspec.structs.replace(found.settings, **wanted))


async def start(node: Node, token_file: Path, access: MetaAccess) -> ClusterFile:
    identity, _ = await entered(newcomer(node, token_file), lambda _file: access)
    return identity


async def test_token_file_that_failed_is_written_by_a_later_start(
    tmp_path: Path, access: MetaAccess
) -> None:
    in_the_way = tmp_path / "secrets"
    in_the_way.write_text("a file, and no folder")
    token_file = in_the_way / "token"
    async with node_here(tmp_path, {}) as node:
        with pytest.raises(FolderError, match=r"the token file .* cannot be written"):
            await start(node, token_file, access)
        made = read_cluster_file(node.about.data_dir)
        assert made is not None, "it is a member already"
        in_the_way.unlink()
        identity = await start(node, token_file, access)
    token = ClusterToken.from_text(token_file.read_text())
    assert identity.cluster == made.cluster
    assert (token.cluster, token.secret) == (made.cluster, made.secret)


async def test_a_node_waits_for_its_token_file_and_says_so(
    tmp_path: Path, access: MetaAccess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    token_file = tmp_path / "token"
    async with node_here(tmp_path / "a", {}) as founder, node_here(tmp_path / "b", {}) as node:
        joins = newcomer(node, token_file)
        settings = msgspec.structs.replace(joins.settings, cluster="join", node_name="b")
        joining = asyncio.create_task(
            entered(joins._replace(settings=settings), lambda _file: access)
        )
        await until(lambda: "waiting for the token file" in caplog.text)
        made = await start(founder, token_file, access)
        identity, _ = await joining
    assert identity.cluster == made.cluster


async def test_a_member_starts_without_its_token_file_and_says_so(
    tmp_path: Path, access: MetaAccess, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "secrets"
    token_file = folder / "token"
    async with node_here(tmp_path, {}) as node:
        await start(node, token_file, access)
        written = token_file.read_text()
        token_file.write_text(f"{written}# of the operator\n")
        await start(node, token_file, access)
        assert "of the operator" in token_file.read_text(), "one that is there stays as it is"
        token_file.unlink()
        folder.rmdir()
        folder.write_text("a file, and no folder")
        with caplog.at_level(logging.ERROR):
            await start(node, token_file, access)
    (record,) = caplog.records
    assert "wait for the token file" in str(record.__dict__)
    assert "dcpctl cluster token" in str(record.__dict__)

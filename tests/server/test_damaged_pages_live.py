"""A real server over a store in which one page is damaged, or which is cut short.

What is on the page is refused by name, again and again, unless the folder can mend it; every other
document and stream is served in between.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dcp.server.main import ExitCode
from dcp.server.storage.folder import open_folder
from dcp.server.storage.process.store_process import StoreProcess
from dcp.wire.frame import Frame, pack_request
from dcp.wire.message import (
    OPEN_EXTRAS,
    EndReason,
    OpenFlag,
    StreamFlag,
    StreamRequest,
    pack_stream_request,
    parse_stream_end,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient, context_of
from support.server import DcpdProcess
from support.stored_bytes import Table, layout_of, overwrite
from vbucket.model.ids import NUM_VBUCKETS, SEQNO_MAX, vbucket_of
from vbucket.store.environment import StoreDamagedError

KEYS = 3_200


class Written(NamedTuple):
    """A folder, and what is in it."""

    folder: Path
    documents: dict[bytes, bytes]


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Long keys, so that the tree of keys has three levels; some values have pages of their own."""
    folder = tmp_path_factory.mktemp("pages") / "data"
    draw = random.Random(7)
    documents = {
        b"key %04d " % number + b"x" * 180: draw.randbytes(6_000 if number % 40 == 0 else 100)
        for number in range(KEYS)
    }
    with DcpdProcess(folder) as server:
        with RawClient(server.port) as client:
            client.send(
                b"".join(
                    pack_request(
                        Opcode.SETQ, key=key, value=value, extras=bytes(8), vb_id=vbucket_of(key)
                    )
                    for key, value in documents.items()
                )
            )
            assert client.ask(Opcode.NOOP).status == Status.OK
        assert run("clients.cli", "--server", server.address, "compact").returncode == 0
        assert server.stop() == 0
    return Written(folder, documents)


@pytest.fixture
def copy(written: Written, tmp_path: Path) -> Written:
    folder = tmp_path / "data"
    shutil.copytree(written.folder, folder)
    return written._replace(folder=folder)


def gets(client: RawClient, keys: list[bytes]) -> Iterator[Frame]:
    """Ask for all keys at once, and yield the answers in their order."""
    requests = [pack_request(Opcode.GET, key=key, vb_id=vbucket_of(key)) for key in keys]
    for first in range(0, len(requests), 100):
        some = requests[first : first + 100]
        client.send(b"".join(some))
        for _ in some:
            frame = client.receive()
            assert frame is not None, "the server has closed"
            yield frame


def streamed(client: RawClient) -> tuple[dict[bytes, bytes], set[int]]:
    """Follow all partitions up to now; return the documents, and who ended for damage."""
    extras = OPEN_EXTRAS.pack(0, OpenFlag.PRODUCER)
    assert client.ask(Opcode.DCP_OPEN, key=b"all", extras=extras).status == Status.OK
    asked = StreamRequest(StreamFlag.TO_LATEST, 0, SEQNO_MAX, 0, 0, 0)
    client.send(b"".join(pack_stream_request(vb, asked, vb) for vb in range(NUM_VBUCKETS)))
    documents: dict[bytes, bytes] = {}
    ends: dict[int, EndReason] = {}
    while len(ends) < NUM_VBUCKETS:
        frame = client.receive()
        assert frame is not None, "the server has closed"
        if frame.opcode == Opcode.DCP_MUTATION:
            documents[frame.key] = frame.value
        elif frame.opcode == Opcode.DCP_STREAM_END:
            ends[frame.vb_id] = EndReason(parse_stream_end(frame))
    refused = {vb_id for vb_id, reason in ends.items() if reason == EndReason.BACKFILL_FAILED}
    assert set(ends.values()) <= {EndReason.OK, EndReason.BACKFILL_FAILED}
    return documents, refused


def victim(table: Table, kind: str) -> tuple[int, set[bytes]]:
    """Return a page of a kind amid a table, and the keys that need it."""
    if kind == "large value":
        page = sorted(table.large, key=table.large.__getitem__)[len(table.large) // 2]
        return page, {table.large[page]}
    pages = table.leaves if kind == "leaf" else table.branches
    root = max(table.branches, key=lambda number: len(table.branches[number]))
    inner = sorted((page for page in pages if page != root), key=lambda number: min(pages[number]))
    return inner[len(inner) // 2], pages[inner[len(inner) // 2]]


def until_all_are_answered(server: DcpdProcess, written: Written) -> None:
    while True:
        with RawClient(server.port) as client:
            if not any(answer.status for answer in gets(client, list(written.documents))):
                return


@pytest.mark.parametrize("what", ["zeros", "other"])
@pytest.mark.parametrize("kind", ["leaf", "branch"])
def test_keys_on_a_damaged_page_are_refused_and_no_others(
    copy: Written, kind: str, what: str
) -> None:
    page, lost_rows = victim(layout_of(copy.folder / "store")["by_key"], kind)
    lost = {row[3:] for row in lost_rows}
    overwrite(copy.folder / "store", page, what)
    assert 0 < len(lost) < KEYS / 2
    with DcpdProcess(copy.folder) as server:
        for _ in range(2):
            with RawClient(server.port) as client:
                keys = list(copy.documents)
                for key, answer in zip(keys, gets(client, keys), strict=True):
                    is_right = answer.value == copy.documents[key] and not answer.status
                    assert is_right != (answer.status == Status.EINTERNAL), key
                    if not is_right:
                        assert key in lost, key
                        assert f"partition {vbucket_of(key)}: table by_key" in context_of(answer)
            with RawClient(server.port) as client:
                assert streamed(client) == (copy.documents, set()), "streams need no keys"
        until_all_are_answered(server, copy)  # it is rebuilt soon after it was met
        assert server.stop() == 0


@pytest.mark.parametrize("what", ["zeros", "other"])
def test_a_branch_above_versions_is_mended_when_it_was_met(copy: Written, what: str) -> None:
    page, _ = victim(layout_of(copy.folder / "store")["by_seqno"], "branch")
    overwrite(copy.folder / "store", page, what)
    with DcpdProcess(copy.folder) as server:
        until_all_are_answered(server, copy)
        with RawClient(server.port) as client:
            assert streamed(client) == (copy.documents, set())
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("kind", "what"),
    [("leaf", "zeros"), ("leaf", "other"), ("large value", "zeros"), ("large value", "other")],
)
def test_versions_on_a_damaged_page_are_refused_and_no_others(
    copy: Written, kind: str, what: str
) -> None:
    table = layout_of(copy.folder / "store")["by_seqno"]
    page, lost_rows = victim(table, kind)
    lost = {int.from_bytes(row[:2], "big") for row in lost_rows}
    overwrite(copy.folder / "store", page, what)
    assert 0 < len(lost) < NUM_VBUCKETS * 2 / 3
    with DcpdProcess(copy.folder) as server:
        for _ in range(2):
            with RawClient(server.port) as client:
                keys = list(copy.documents)
                for key, answer in zip(keys, gets(client, keys), strict=True):
                    vb_id = vbucket_of(key)
                    if vb_id not in lost:
                        assert answer.value == copy.documents[key], key
                        continue
                    assert answer.status == Status.EINTERNAL
                    assert f"partition {vb_id}: " in context_of(answer)
            with RawClient(server.port) as client:
                documents, refused = streamed(client)
                assert refused == lost
                assert documents == {
                    key: value
                    for key, value in copy.documents.items()
                    if vbucket_of(key) not in lost
                }
        assert server.stop() == 0


@pytest.mark.parametrize("size", [1, 4096, 8192, 12_288, 0.5, 0.9])
def test_a_store_that_is_cut_short_is_refused_by_name(copy: Written, size: float) -> None:
    """Before LMDB maps it: it would end the process where the file ends."""
    path = copy.folder / "store" / "data.mdb"
    whole = path.stat().st_size
    left = int(whole * size if size < 1 else size)
    with path.open("r+b") as file:
        file.truncate(left)
    before = path.read_bytes()
    refused = run("dcp.server.main", "--data", str(copy.folder), "--port", "0")
    assert refused.returncode == ExitCode.DAMAGED
    assert "the data is damaged" in refused.stderr
    assert f"it is cut short: it has {left} bytes" in refused.stderr
    assert path.read_bytes() == before
    found = run("clients.cli", "verify", str(copy.folder))
    assert found.returncode == 1
    assert f"it is cut short: it has {left} bytes" in found.stdout


async def test_the_store_process_tells_that_the_store_was_cut_short(copy: Written) -> None:
    """While the server ran: every request is refused by name, and no process dies of it."""
    folder = open_folder(copy.folder)
    path = folder.store_path / "data.mdb"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    process = await StoreProcess.start(folder.path, folder.lock_fd)
    for _ in range(2):
        with pytest.raises(StoreDamagedError, match="cut short"):
            await process.merge([])
    await process.stop()
    folder.close()

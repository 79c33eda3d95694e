"""A real server over a store in which the disk has lost a write: a page holds what it held some
merges ago, and is sound in itself. No wrong answer comes of it.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from struct import unpack_from
from typing import NamedTuple

import pytest

from dcp.server.main import ExitCode
from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient, context_of
from support.server import DcpdProcess
from support.stored_bytes import PAGE_BYTES, keys_on, layout_of
from vbucket.model.ids import vbucket_of

KEYS = [b"key %05d " % number + b"x" * 150 for number in range(3_000)]
ABSENT = [key + b" absent" for key in KEYS[::5]]
ROUNDS = 8
STALE_MAX = 12
"""So many pages are outdated at once."""


class Aged(NamedTuple):
    """A folder that has gone on, what its data file was before, and what it holds now."""

    folder: Path
    older: list[bytes]
    documents: dict[bytes, bytes]


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def asked(client: RawClient, requests: list[bytes]) -> Iterator[Frame]:
    for first in range(0, len(requests), 100):
        some = requests[first : first + 100]
        client.send(b"".join(some))
        for _ in some:
            frame = client.receive()
            assert frame is not None, "the server has closed"
            yield frame


def packet(opcode: int, key: bytes, value: bytes = b"") -> bytes:
    extras = bytes(8) if opcode == Opcode.SET else b""
    return pack_request(opcode, key=key, value=value, extras=extras, vb_id=vbucket_of(key))


@pytest.fixture(scope="module")
def aged(tmp_path_factory: pytest.TempPathFactory) -> Aged:
    folder = tmp_path_factory.mktemp("stale") / "data"
    draw = random.Random(12)
    documents: dict[bytes, bytes] = {}
    older = []
    for number in range(ROUNDS):
        with DcpdProcess(folder) as server:
            with RawClient(server.port) as client:
                some = KEYS if not number else draw.sample(KEYS, 700)
                gone = [key for key in draw.sample(KEYS, 100) if key in documents]
                new = {key: b"%d of round %d" % (draw.randrange(10**6), number) for key in some}
                requests = [packet(Opcode.SET, key, value) for key, value in new.items()]
                requests += [packet(Opcode.DELETE, key) for key in gone]
                assert {frame.status for frame in asked(client, requests)} == {Status.OK}
            documents = {k: v for k, v in (documents | new).items() if k not in gone}
            assert run("clients.cli", "--server", server.address, "compact").returncode == 0
            assert server.stop() == 0
        older.append((folder / "store" / "data.mdb").read_bytes())
    return Aged(folder, older[:-1], documents)


@pytest.fixture
def copy(aged: Aged, tmp_path: Path) -> Aged:
    folder = tmp_path / "data"
    shutil.copytree(aged.folder, folder)
    return aged._replace(folder=folder)


def put_back(aged: Aged, table: str, kind: str) -> dict[int, set[bytes]]:
    """Give some pages the content that they had; return them, each with the keys that need it."""
    path = aged.folder / "store" / "data.mdb"
    data = bytearray(path.read_bytes())
    layout = layout_of(aged.folder / "store")[table]
    pages = {
        "leaf": layout.leaves,
        "branch": layout.branches,
        "large value": {page: {key} for page, key in layout.large.items()},
    }[kind]
    stale: dict[int, set[bytes]] = {}
    for page, keys in pages.items():
        start = page * PAGE_BYTES
        now = bytes(data[start : start + PAGE_BYTES])
        for older in reversed(aged.older):
            then = older[start : start + PAGE_BYTES]
            is_like = len(then) == PAGE_BYTES and then[:12] == now[:12] and then != now
            if is_like and kind == "leaf":  # of the same range of keys: nothing else tells
                is_like = min(keys) <= min(keys_on(older, page)) <= max(keys_on(older, page))
                is_like = is_like and max(keys_on(older, page)) <= max(keys)
            if is_like and len(stale) < STALE_MAX:
                pages_of = unpack_from("=I", now, 12)[0] if kind == "large value" else 1
                data[start : start + pages_of * PAGE_BYTES] = older[
                    start : start + pages_of * PAGE_BYTES
                ]
                stale[page] = keys
                break
    path.write_bytes(data)
    return stale


def check_answers(server: DcpdProcess, documents: dict[bytes, bytes]) -> set[bytes]:
    """Ask for every key; answers are right or refusals with a reason. Return what is refused."""
    keys = [*KEYS, *ABSENT]
    refused = set()
    with RawClient(server.port) as client:
        requests = [packet(Opcode.GET, key) for key in keys]
        for key, answer in zip(keys, asked(client, requests), strict=True):
            if answer.status == Status.EINTERNAL:
                assert "of the store" in context_of(answer)
                refused.add(key)
            elif key in documents:
                assert (answer.status, answer.value) == (Status.OK, documents[key]), key
            else:
                assert answer.status == Status.KEY_ENOENT, key
    return refused


@pytest.mark.parametrize(
    ("table", "kind"),
    [("by_key", "leaf"), ("by_key", "branch"), ("by_seqno", "leaf"), ("by_seqno", "branch"),
     ("state", "leaf")],
)  # fmt: skip
def test_no_answer_comes_from_an_outdated_page(copy: Aged, table: str, kind: str) -> None:
    stale = put_back(copy, table, kind)
    assert stale, "no page of before is like one of now: the test tests nothing"
    found = run("clients.cli", "verify", str(copy.folder))
    assert found.returncode == 1
    assert "is not the one that was written last" in found.stdout
    if table == "state":  # a start makes it again, of a copy of its rows
        (copy.folder / "store" / "rows.copy").unlink()
        started = run("dcp.server.main", "--data", str(copy.folder), "--port", "0")
        assert started.returncode == ExitCode.DAMAGED
        assert "is not the one that was written last" in started.stderr
        return
    documents = dict(copy.documents)
    with DcpdProcess(copy.folder) as server:
        refused = check_answers(server, documents)
        assert refused, "nothing needs these pages"
        if table == "by_key":  # some of it may be mended meanwhile
            lost = {row[3:] for keys in stale.values() for row in keys} & set(documents)
            assert lost & refused
        more = random.Random(5).sample(KEYS, 300)
        with RawClient(server.port) as client:
            requests = [packet(Opcode.APPEND, key, b" and more") for key in more]
            for key, answer in zip(more, asked(client, requests), strict=True):
                if answer.status == Status.OK:
                    documents[key] += b" and more"
                elif key in documents:
                    assert answer.status in (Status.EINTERNAL, Status.ETMPFAIL), key
            others = [key for key in KEYS if key not in more][:300]
            requests = [packet(Opcode.SET, key, b"set anew") for key in others]
            for key, answer in zip(others, asked(client, requests), strict=True):
                if answer.status == Status.OK:
                    documents[key] = b"set anew"
        while (table, kind) == ("by_key", "leaf") and check_answers(server, documents):
            time.sleep(0.05)
        run("clients.cli", "--server", server.address, "compact")
        check_answers(server, documents)
        server.stop()
    with DcpdProcess(copy.folder) as server:
        check_answers(server, documents)

"""One file, or folder, of a data folder is put back to what it was before the folder went on.

docs/operations.md has the table of what is noticed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from dcp.server.main import ExitCode
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient
from support.server import DcpdProcess
from vbucket.log.segment_files import segments_in
from vbucket.model.ids import vbucket_of

KEYS = [b"key %03d" % number for number in range(300)]
MERGED = KEYS[:200]
LOGGED = KEYS[100:]
DATA, SUMS, MARK = "store/data.mdb", "store/pages.sums", "log/end.mark"


class Grown(NamedTuple):
    """A folder after its last run, copies of it after the runs before, and its documents."""

    folder: Path
    older: list[Path]
    documents: dict[bytes, bytes]


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write(server: DcpdProcess, keys: list[bytes], value: bytes) -> None:
    with RawClient(server.port) as client:
        for key in keys:
            answer = client.ask(
                Opcode.SET, key=key, value=value, extras=bytes(8), vb_id=vbucket_of(key)
            )
            assert answer.status == Status.OK


@pytest.fixture(scope="module", params=["stopped", "killed"])
def grown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Grown:
    folder = tmp_path_factory.mktemp("older") / "data"
    older = []
    documents: dict[bytes, bytes] = {}
    for number in range(4):
        with DcpdProcess(folder) as server:
            write(server, MERGED, b"merged in run %d" % number)
            assert run("clients.cli", "--server", server.address, "compact").returncode == 0
            write(server, LOGGED, b"of run %d" % number)
            if number == 3 and request.param == "killed":
                server.kill()
            else:
                assert server.stop() == 0
        documents = dict.fromkeys(MERGED, b"merged in run %d" % number)
        documents |= dict.fromkeys(LOGGED, b"of run %d" % number)
        copy = folder.parent / f"copy-{number}"
        shutil.copytree(folder, copy)
        older.append(copy)
    return Grown(older[-1], older[:-1], documents)


def put_back(grown: Grown, older: Path, name: str, into: Path) -> Path:
    folder = Path(shutil.copytree(grown.folder, into / "data"))
    if (older / name).is_dir():
        shutil.rmtree(folder / name)
        shutil.copytree(older / name, folder / name)
    else:
        shutil.copy(older / name, folder / name)
    return folder


def check_documents(folder: Path, documents: dict[bytes, bytes]) -> None:
    with DcpdProcess(folder) as server:
        with RawClient(server.port) as client:
            for key, value in documents.items():
                client.send(pack_request(Opcode.GET, key=key, vb_id=vbucket_of(key)))
                answer = client.receive()
                assert answer is not None
                assert (answer.status, answer.value) == (Status.OK, value), key
        assert server.stop() == 0


@pytest.mark.parametrize("age", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "words"),
    [(DATA, f"{DATA} is older than"), (SUMS, "written last|pages.sums is older than"),
     ("store", "segment"), ("log", "log")],
)  # fmt: skip
def test_what_makes_answers_wrong_is_refused(
    grown: Grown, tmp_path: Path, name: str, words: str, age: int
) -> None:
    folder = put_back(grown, grown.older[-age], name, tmp_path)
    if (folder / SUMS).read_bytes() == (grown.folder / SUMS).read_bytes() and name == SUMS:
        pytest.fail("the checksums have not changed between the runs")
    found = run("clients.cli", "verify", str(folder))
    started = run("dcp.server.main", "--data", str(folder), "--port", "0")
    assert started.returncode == ExitCode.DAMAGED
    assert re.search(words, started.stderr)
    if name != "log":
        assert found.returncode == 1
        assert re.search(words, found.stdout)


@pytest.mark.parametrize("age", [1, 2, 3])
def test_an_older_end_mark_and_merged_segments_are_harmless(
    grown: Grown, tmp_path: Path, age: int
) -> None:
    """The mark then names an end that was reached long ago, and segments that are merged are left
    over.
    """
    older = grown.older[-age]
    folder = put_back(grown, older, MARK, tmp_path)
    merged = segments_in(older / "log")
    assert merged
    for path in (older / "log").glob("*.log"):
        shutil.copy(path, folder / "log" / path.name)
    assert "leftover" in run("clients.cli", "verify", str(folder)).stdout
    check_documents(folder, grown.documents)

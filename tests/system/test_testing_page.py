"""Every command of docs/testing-consumers.md is run, and does what the page says."""

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from clients.address import parse_address
from clients.link.blocking_link import SyncLink
from clients.testing import DcpServer
from dcp.session.faults import Fault
from dcp.stream.producer import Producer
from dcp.wire.message import StreamRequest, pack_stream_request
from dcp.wire.opcode import Opcode

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing-consumers.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SHELL = [text for language, text in BLOCKS if language == "sh"]
TABLE_ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with DcpServer(tmp_path_factory.mktemp("page") / "data") as process:
        yield process


def run(server: DcpServer, script: str) -> str:
    """Run a block as a reader would, with the ports of this server."""
    script = script.replace("http://127.0.0.1:8091", server.admin_url)
    environment = os.environ | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "DCPCTL_SERVER": server.address,
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_the_shell_blocks(server):
    start, default, alias, rollbacks, many, explain, streams, faults = SHELL
    assert default == "dcpd --data demo &\n", "its place takes the server of this test"
    assert start.startswith("dcpd --port 0 --admin-port 0 --data"), "tried by every DcpServer"
    written = run(server, alias + rollbacks).splitlines()
    assert "partition 92 branched at seqno 3, 2 changes undone" in written[5]
    assert json.loads(written[6])["undone_seqnos"] == 1
    assert run(server, many) == "1024 partitions branched, 1 change undone\n"
    explained = run(server, alias + explain)
    assert explained.startswith("ROLLBACK to seqno 0\n")
    assert '"answer":"ROLLBACK","rollback_seqno":0' in explained
    assert run(server, alias + streams) == '{"streams":[],"limits":[]}'
    told = run(server, alias + faults)
    assert told.startswith("added fault 1\nadded fault 2\n")
    assert re.search(r"\b1\tDCP_STREAM_REQ\t92\tETMPFAIL\t0\tFalse\t3\t1.0\t0$", told, re.MULTILINE)
    assert "removed 3 faults" in told
    assert told.endswith('{"cleared":0}')


def test_the_pytest_examples(tmp_path):
    examples = [text for language, text in BLOCKS if language == "python"]
    for number, example in enumerate(examples):
        (tmp_path / f"test_example{number}.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert f"{len(examples)} passed" in done.stdout
    assert len(examples) == 2, "one node, and a cluster"


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


ACTIONS = [cells(row) for row in TABLE_ROWS if len(cells(row)) == 4 and "`" in row]


@pytest.mark.parametrize("row", ACTIONS, ids=lambda row: row[1].strip("`"))
def test_each_row_of_the_tables_three_times(row):
    """With a consumer on the partition: dcpctl, HTTP and Python do the same."""
    _, command, http, python = (cell.strip("`") for cell in row)
    action, _, body = http.partition(" ")
    is_stream = command.startswith("stream")
    path = f"/api/v1/streams/{action}" if is_stream else f"/api/v1/vbuckets/92/{action}"
    with DcpServer() as server, ExitStack() as connections:

        def prepare() -> None:
            if is_stream and not server.streams():
                connections.enter_context(follow(server))
            if not is_stream and action != "state":
                with server.connect() as kv:
                    for _ in range(6):
                        kv.set(b"key1", b"")

        prepare()
        assert run(server, f"dcpctl {command}")
        prepare()
        assert server.ask("POST", path, json.loads(body))
        prepare()
        assert eval(f"server.{python}", {"server": server})


def follow(server: DcpServer) -> SyncLink:
    """Open a stream of partition 92; it is there until the link is closed."""
    link = SyncLink(parse_address(server.address))
    link.request(Opcode.DCP_OPEN, key=b"consumer", extras=b"\0\0\0\0\0\0\0\1")
    link.request(Opcode.DCP_CONTROL, key=b"enable_noop", value=b"true")
    asked = StreamRequest(0, 0, 2**64 - 1, 0, 0, 0)
    link._write(pack_stream_request(92, asked, opaque=99))
    assert link._reply(99).status == 0
    assert len(server.streams(vb=92)) == 1
    return link


def test_the_page_names_every_member_of_a_fault_and_every_phase():
    members = {"opcode", "vb", "status", "delay_ms", "disconnect", "count", "probability", "seed"}
    for member in members | {"rollback_seqno"}:
        assert f"`{member}`" in PAGE
    assert Fault.__slots__
    for phase in ("backlog", "live", "waiting", "stalled"):
        assert f"`{phase}`" in PAGE
        assert phase in (Producer.phase_of.__code__.co_consts)

"""A node with another number of partitions than 1,024: what it tells, takes and refuses.

Tests of the cluster, the backup, the consumers and Spark with such nodes stand beside theirs.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from clients import Consumer, Mirror, Mutation
from clients.cli.dcpctl import run
from clients.errors import TopologyError
from clients.testing import ServerRefusedError, ServerStartError
from dcp.server.main import ExitCode
from dcp.wire.frame import pack_request
from dcp.wire.message import StreamRequest, pack_open, pack_stream_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient
from support.server import DcpdProcess
from vbucket.model.ids import SEQNO_MAX

COUNT = 64
LAST = COUNT - 1
KEYS = [f"key-{number}" for number in range(300)]


def place_of(key: str, count: int) -> int:
    """The hash of Couchbase's clients: the length of the map is a power of two."""
    return (crc32(key.encode()) >> 16) & 0x7FFF & (count - 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DcpdProcess]:
    data = tmp_path_factory.mktemp("numbers") / "data"
    with DcpdProcess(data, "--partitions", str(COUNT), "--memtable-bytes", "1MiB") as running:
        with running.connect() as client:
            for key in KEYS:
                client.set(key, key.encode())
        yield running


def verified(data: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clients.cli", "verify", str(data)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def map_in(config: bytes) -> list[list[int]]:
    chains: list[list[int]] = json.loads(config)["vBucketServerMap"]["vBucketMap"]
    return chains


def test_the_map_has_that_many_chains(server: DcpdProcess) -> None:
    with RawClient(server.port, "guest", "guest") as client:
        assert map_in(client.ask(Opcode.GET_CLUSTER_CONFIG).value) == [[0]] * COUNT
    bucket = server.ask("GET", "/pools/default/buckets/default")
    assert bucket["numVBuckets"] == len(bucket["vBucketServerMap"]["vBucketMap"]) == COUNT
    assert server.ask("GET", "/api/v1/cluster/status")["partitions"] == COUNT


def test_a_key_lies_where_the_clients_hash_says(server: DcpdProcess) -> None:
    with RawClient(server.port) as client:
        for key in KEYS[:100]:
            found = client.ask(Opcode.GET, key=key.encode(), vb_id=place_of(key, COUNT))
            assert (found.status, found.value) == (Status.OK, key.encode())
    for key in KEYS[:3]:
        history = server.ask("GET", f"/api/v1/documents?key={key}")
        assert history["vb"] == place_of(key, COUNT), key


@pytest.mark.parametrize("opcode", [Opcode.GET, Opcode.SET, Opcode.GET_META, Opcode.DELETE])
def test_a_partition_beyond_is_not_here(server: DcpdProcess, opcode: Opcode) -> None:
    """Also in a run of requests, which the loops in C read, and with the map of this node."""
    extras = bytes(8) if opcode == Opcode.SET else b""
    with RawClient(server.port) as client:
        for vb_id in (COUNT, 1023):
            answer = client.ask(opcode, key=b"key-1", vb_id=vb_id, extras=extras)
            assert answer.status == Status.NOT_MY_VBUCKET
            assert len(map_in(answer.value)) == COUNT


def test_a_stream_of_a_partition_beyond_is_refused(server: DcpdProcess) -> None:
    asked = StreamRequest(0, 0, SEQNO_MAX, 0, 0, 0)
    with RawClient(server.port) as client:
        client.send(pack_open(b"beyond", 1))
        assert client.receive().status == Status.OK  # type: ignore[union-attr]
        for vb_id in (COUNT, 1023):
            client.send(pack_stream_request(vb_id, asked, 7))
            answer = client.receive()
            assert answer is not None
            assert answer.status == Status.NOT_MY_VBUCKET
        client.send(pack_stream_request(LAST, asked, 8))
        answer = client.receive()
        assert answer is not None
        assert answer.status == Status.OK


def test_the_text_protocol_finds_the_keys(server: DcpdProcess) -> None:
    """One key after the other, and many in one read."""
    with socket.create_connection(("127.0.0.1", server.port), 20) as sock:
        sock.sendall(b"".join(f"get {key}\r\n".encode() for key in KEYS[:50]))
        wanted = "".join(f"VALUE {key} 0 {len(key)}\r\n{key}\r\nEND\r\n" for key in KEYS[:50])
        with sock.makefile("rb") as answers:
            assert answers.read(len(wanted)).decode() == wanted


def test_the_admin_api_knows_the_number(server: DcpdProcess) -> None:
    assert server.status()["vbuckets"]["active"] == COUNT
    assert server.metrics()['dcpd_vbuckets{state="active"}'] == COUNT
    calls = [
        lambda: server.branch(COUNT, 0),
        lambda: server.compact([COUNT]),
        lambda: server.fault(vb=COUNT, opcode="GET", status="EBUSY"),
        lambda: server.streams(vb=COUNT),
        lambda: server.close_streams(vb=COUNT),
        lambda: server.ask("POST", "/api/v1/vbuckets/branch", {"vbs": [COUNT], "at": 0}),
    ]
    for call in calls:
        with pytest.raises(ServerRefusedError, match=f"{COUNT}|0 to {LAST}"):
            call()


def test_statistics_are_of_the_partitions_that_exist(server: DcpdProcess) -> None:
    with server.connect() as client:
        rows = client.stats("vbucket-seqno")
    assert {name.partition(":")[0] for name in rows} == {f"vb_{vb}" for vb in range(COUNT)}


def test_searches_and_compaction_go_over_all(server: DcpdProcess) -> None:
    assert server.compact(history="0s")["bytes_after"] > 0
    found, position = list[str](), ""
    while position is not None:
        query = f"prefix=key-&limit=100&position={position}"
        page = server.ask("GET", f"/api/v1/documents/keys?{query}")
        found += [row["key"] for row in page["keys"]]
        position, searched = page["next"], page["searched"]
    assert (sorted(found), searched) == (sorted(KEYS), COUNT)
    page = server.ask("GET", "/api/v1/documents/sorted?limit=5")
    assert [row["key"] for row in page["documents"]] == sorted(KEYS)[:5]
    with pytest.raises(ServerRefusedError, match="no position"):
        server.ask("GET", f"/api/v1/documents/keys?position={COUNT}.")


def test_the_folder_keeps_its_number(tmp_path: Path) -> None:
    """Without the setting it starts as it is; with another one it does not, and says why."""
    data = tmp_path / "data"
    with DcpdProcess(data, "--partitions", "128") as server:
        with server.connect() as client:
            client.set("key", b"value")
        server.stop()
        server.start()
    with DcpdProcess(data) as server:
        assert server.status()["vbuckets"]["active"] == 128
        with server.connect() as client:
            assert client.get("key").value == b"value"
        server.stop()
        assert verified(data).returncode == 0
    assert "128 partitions" in verified(data).stdout
    for other in ("64", "1024"):
        refused = DcpdProcess(data, "--partitions", other)
        with pytest.raises(ServerStartError, match=f"has 128 partitions, not {other}. A folder"):
            refused.start()
        assert refused.exit_code == ExitCode.FOLDER


def test_the_number_is_one_of_five(tmp_path: Path) -> None:
    for wrong in ("0", "100", "2048", "true", "64.0"):
        refused = DcpdProcess(tmp_path / "data", "--partitions", wrong)
        with pytest.raises(ServerStartError, match="must be one of 64, 128, 256, 512, 1024, or"):
            refused.start()


def test_a_partition_beyond_within_a_run(server: DcpdProcess) -> None:
    """Many requests in one read, which the loops in C take together."""
    packets, expected = [], []
    for number, key in enumerate(KEYS[:60]):
        is_beyond = number % 5 == 0
        vb_id = place_of(key, 1024) | COUNT if is_beyond else place_of(key, COUNT)
        packets.append(pack_request(Opcode.GET, key=key.encode(), vb_id=vb_id, opaque=number))
        expected.append((Status.NOT_MY_VBUCKET if is_beyond else Status.OK, number))
    with RawClient(server.port) as client:
        client.send(b"".join(packets))
        answers = [client.receive() for _ in packets]
    assert [(a.status, a.opaque) for a in answers if a is not None] == expected


async def test_consumers_and_mirrors_take_the_number_from_the_map(server: DcpdProcess) -> None:
    async with Consumer(server.address, until_now=True) as consumer:
        found = {event.key: event.vb_id async for event in consumer if isinstance(event, Mutation)}
    assert found == {key.encode(): place_of(key, COUNT) for key in KEYS}
    with pytest.raises(TopologyError, match=f"no partition {COUNT}; the server has 0 to {LAST}"):
        async with Consumer(server.address, vbuckets=[COUNT]):
            pass
    async with Mirror(server.address) as mirror:
        assert {key: mirror.get(key) for key in KEYS} == {key: key.encode() for key in KEYS}


WORDS = [
    ("watch", "--until-now"), ("vb", "branch", "--at", "0"), ("vb", "dump"), ("vb", "purge"),
    ("vb", "state", "dead"), ("vb", "failover"), ("vb", "mend-cas"), ("compact",),
    ("explain", "partition"), ("explain", "rollback", "--uuid", "1", "--seqno", "1"),
    ("fault", "set", "--status", "EBUSY"), ("seqnos",), ("stream", "close"), ("failover-log",),
]  # fmt: skip


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_dcpctl_names_the_partitions_that_there_are(
    server: DcpdProcess, words: tuple[str, ...], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    code = run(["--server", server.address, *words, "--vb", str(COUNT)])
    out, err = capfdbinary.readouterr()
    assert code, out
    assert re.search(rb"no partition 64|0 to 63", err), err


def test_deletions_are_kept_in_all_partitions_that_there_are(server: DcpdProcess) -> None:
    to = ("--server", server.address)
    assert run([*to, "consumer", "keep", "away", "--for", "7d", "--bytes", "1GiB"]) == 0
    assert run([*to, "consumer", "forget", "away", "--yes"]) == 0

"""clients.testing against a real server: every call has the effect that it promises."""

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from clients.address import parse_address
from clients.consumer.consumer import Consumer
from clients.errors import ConnectionLostError, NotMyVbucketError, TemporaryError
from clients.event import Mutation, Rollback, StreamEnded
from clients.kv.sync_client import SyncKv
from clients.link.blocking_link import SyncLink
from clients.testing import DcpServer, ServerRefusedError, ServerStartError, dcp_server, process
from dcp.server.net.fixed_port import PORT_MAX, PORT_MIN, free_port
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.ids import vbucket_of

KEY = b"key"
VB = vbucket_of(KEY)

__all__ = ["dcp_server"]


def write(server: DcpServer, count: int) -> None:
    with server.connect() as kv:
        for number in range(count):
            kv.set(KEY, b"%d" % number)


def status_of(server: DcpServer, opcode: Opcode = Opcode.GET) -> int:
    with SyncLink(parse_address(server.address)) as link:
        return link.request(opcode, vb_id=VB, key=b"\0" + KEY).status


def dcpctl(server: DcpServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("dcpctl"), "--server", server.address, *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_it_starts_in_less_than_a_second_or_says_so(dcp_server, record_property):
    """The limit is generous: what is measured is told, not judged, on a busy machine."""
    began = monotonic()
    dcp_server.restart()
    record_property("start_s", monotonic() - began)
    assert dcp_server.status()["items"] == 0
    assert dcp_server.output.startswith("dcpd 0.")
    assert '"level": "info"' not in dcp_server.log_path.read_text(), "that it is ready comes first"


def test_a_restart_keeps_data_and_address(dcp_server):
    write(dcp_server, 3)
    address, pid = dcp_server.address, dcp_server.pid
    dcp_server.restart()
    assert (dcp_server.address, dcp_server.pid != pid) == (address, True)
    with dcp_server.connect() as kv:
        assert kv.get(KEY).value == b"2"


def test_without_a_folder_nothing_is_left():
    with DcpServer() as server:
        folder = server.data.parent
        assert server.data.is_dir()
        assert server.stop() == 0
    assert not folder.exists()


def test_a_server_that_cannot_start_says_why(tmp_path):
    server = DcpServer(tmp_path / "data", "--durability", "sometimes")
    with pytest.raises(ServerStartError, match="durability"):
        server.start()


def test_ports_are_drawn_where_no_connection_gets_one(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        drawn = [other.getsockname()[1]]
        monkeypatch.setattr(
            process, "free_port", lambda *args: drawn.pop() if drawn else free_port(*args)
        )
        with DcpServer() as server:
            ports = [server.port, server.admin_port]
            assert not drawn
            assert all(PORT_MIN <= port <= PORT_MAX for port in ports)
            server.restart()
            assert [server.port, server.admin_port] == ports


def test_a_server_whose_port_is_taken_meanwhile_says_so(dcp_server):
    dcp_server.stop()
    with (
        socket.create_server(("127.0.0.1", dcp_server.port)),
        pytest.raises(ServerStartError, match="is in use"),
    ):
        dcp_server.start()


def test_pytest_is_needed_for_the_fixture_only():
    code = "import sys, clients.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_refused_call_raises_with_the_servers_words(dcp_server):
    with pytest.raises(ServerRefusedError, match="ends at seqno 0") as caught:
        dcp_server.branch(VB, 5)
    assert caught.value.status == 409


# -- partitions --------------------------------------------------------------------------------


async def ends_of(server: DcpServer, act) -> list[object]:
    """Follow the partition to its end, act, and return what the consumer sees after that."""
    seen: list[object] = []
    async with Consumer(server.address, vbuckets=[VB], name="watcher", validate=True) as consumer:
        acted = None
        async for event in consumer:
            if acted is not None:
                seen.append(event)
                if isinstance(event, Mutation) and event.value == b"after":
                    break
            elif isinstance(event, Mutation) and event.seqno == 5:
                acted = asyncio.create_task(asyncio.to_thread(act))
        await acted
    return seen


def after(server: DcpServer) -> None:
    with server.connect() as kv:
        kv.set(KEY, b"after")


async def test_a_failover_ends_streams_and_loses_what_it_is_told_to(dcp_server):
    await asyncio.to_thread(write, dcp_server, 5)

    def act():
        answer = dcp_server.failover(VB, lose=2)
        assert (answer["seqno"], answer["undone_seqnos"]) == (3, 2)
        after(dcp_server)

    seen = await ends_of(dcp_server, act)
    assert any(isinstance(event, Rollback) for event in seen)
    ended = [event.reason for event in seen if isinstance(event, StreamEnded)]
    assert ended == [2]
    assert dcp_server.metrics()["dcpd_failovers_total"] == 1


async def test_a_failover_that_loses_nothing_is_no_rollback(dcp_server):
    await asyncio.to_thread(write, dcp_server, 5)

    def act():
        dcp_server.failover(VB)
        after(dcp_server)

    seen = await ends_of(dcp_server, act)
    assert not any(isinstance(event, Rollback) for event in seen)
    assert [event.reason for event in seen if isinstance(event, StreamEnded)] == [2]


def test_a_dead_partition_takes_nothing_until_it_is_active(dcp_server):
    write(dcp_server, 1)
    assert dcp_server.set_state(VB, "dead")["before"] == "active"
    assert status_of(dcp_server) == Status.NOT_MY_VBUCKET
    dcp_server.restart()
    assert status_of(dcp_server) == Status.NOT_MY_VBUCKET, "it is durable"
    dcp_server.set_state(VB, "active")
    assert status_of(dcp_server) == Status.OK
    log = dcp_server.explain_rollback(VB, 1, 1)["failover_log"]
    assert len(log) == 2, "becoming active made a version"


def test_a_purge_sends_who_stands_below_to_the_beginning(dcp_server):
    write(dcp_server, 5)
    uuid = int(dcp_server.explain_rollback(VB, 1, 0)["failover_log"][0]["vb_uuid"])
    assert dcp_server.explain_rollback(VB, uuid, 3)["answer"] == "OK"
    assert dcp_server.purge(VB)["purge_seqno"] == 4
    dcp_server.restart()
    told = dcp_server.explain_rollback(VB, uuid, 3)
    assert (told["answer"], told["rollback_seqno"]) == ("ROLLBACK", 0)
    assert "purged" in told["reason"]
    assert dcp_server.explain_rollback(VB, uuid, 4)["answer"] == "OK"


# -- streams -----------------------------------------------------------------------------------


async def test_streams_are_listed_stalled_slowed_ended_and_cut(dcp_server):
    await asyncio.to_thread(write, dcp_server, 5)
    steps: list[str] = []

    def act():
        (row,) = dcp_server.streams(name="watcher")
        assert (row["vb"], row["state"], row["seqno"], row["lag_items"]) == (VB, "live", 5, 0)
        assert row["age_s"] >= 0
        assert dcp_server.streams(name="nobody") == dcp_server.streams(vb=VB + 1) == []
        assert dcp_server.stall_streams(vb=VB) == 1
        write(dcp_server, 3)
        (row,) = dcp_server.streams()
        assert (row["state"], row["seqno"], row["lag_items"]) == ("stalled", 5, 3)
        assert dcp_server.metrics()['dcpd_stream_lag_items{consumer="watcher"}'] == 3
        assert dcp_server.resume_streams() == 1
        assert dcp_server.slow_streams(100_000, name="watcher") == 1
        assert dcp_server.streams()[0]["bytes_per_s"] == 100_000
        assert dcp_server.close_streams(vb=VB, reason="too_slow") == 1
        steps.append("closed")
        while not dcp_server.streams():
            pass  # the consumer asks again
        assert dcp_server.drop_connections(name="watcher") == 1
        after(dcp_server)

    seen = await ends_of(dcp_server, act)
    assert steps == ["closed"]
    reasons = [event.reason for event in seen if isinstance(event, StreamEnded)]
    assert reasons[0] == 4
    assert not any(isinstance(event, Rollback) for event in seen)


# -- faults ------------------------------------------------------------------------------------


def test_faults_answer_delay_and_disconnect(dcp_server):
    write(dcp_server, 1)
    fault = dcp_server.fault(opcode="GET", vb=VB, status="ETMPFAIL", count=2)
    assert [status_of(dcp_server) for _ in range(3)] == [Status.ETMPFAIL, Status.ETMPFAIL, 0]
    assert dcp_server.faults() == []
    with pytest.raises(ServerRefusedError, match="there is no fault"):
        dcp_server.clear_faults(fault["id"])

    dcp_server.fault(opcode=0, delay_ms=200)
    began = monotonic()
    assert status_of(dcp_server) == Status.OK
    assert monotonic() - began >= 0.2
    dcp_server.clear_faults()

    dcp_server.fault(opcode="GET", disconnect=True)
    with pytest.raises(ConnectionLostError):
        status_of(dcp_server)
    assert dcp_server.faults()[0]["met"] == 1
    dcp_server.clear_faults()
    assert status_of(dcp_server) == Status.OK
    assert dcp_server.metrics()["dcpd_faults_met_total"] == 4


def test_a_client_retries_what_a_fault_says_is_temporary(dcp_server):
    dcp_server.fault(opcode="SET", status="EBUSY", count=2)
    write(dcp_server, 1)
    dcp_server.fault(opcode="SET", status="EBUSY")
    with SyncKv(parse_address(dcp_server.address), timeout_s=0.5) as kv:
        with pytest.raises(TemporaryError, match=r"attempts in 0\.5 s; nothing was changed"):
            kv.set(KEY, b"1")
        dcp_server.clear_faults()
        dcp_server.fault(opcode="GET", status="NOT_MY_VBUCKET")
        with pytest.raises(NotMyVbucketError, match=r"attempts in 0\.5 s"):
            kv.get(KEY)


def test_a_delayed_connection_holds_up_no_other(dcp_server):
    write(dcp_server, 1)
    dcp_server.fault(opcode="GET", delay_ms=60_000, count=1)
    address = parse_address(dcp_server.address)
    with SyncLink(address) as slow, SyncLink(address) as quick:
        slow._write(pack_request(Opcode.GET, vb_id=VB, key=b"\0" + KEY))
        while dcp_server.faults():
            pass  # until the request has met it
        assert quick.request(Opcode.GET, vb_id=VB, key=b"\0" + KEY).status == 0
    assert dcp_server.stop() == 0, "it holds up the end of the server neither"


# -- dcpctl ------------------------------------------------------------------------------------


def test_dcpctl_says_what_was_done(dcp_server):
    write(dcp_server, 5)
    vb = str(VB)
    done = dcpctl(dcp_server, "vb", "failover", vb, "--lose", "1")
    assert done.stdout.startswith(f"partition {vb} failed over at seqno 4, 1 change undone; new")
    assert dcpctl(dcp_server, "vb", "purge", vb).stdout == f"partition {vb} purged up to seqno 3\n"
    assert "it was active" in dcpctl(dcp_server, "vb", "state", vb, "dead").stdout
    assert "it was dead" in dcpctl(dcp_server, "vb", "state", vb, "active").stdout
    refused = dcpctl(dcp_server, "vb", "purge", vb, "--upto", "4")
    assert (refused.returncode, "never purged" in refused.stderr) == (4, True)
    set_ = dcpctl(dcp_server, "fault", "set", "--opcode", "get", "--status", "ebusy")
    assert set_.stdout == "added fault 1\n"
    listed = json.loads(dcpctl(dcp_server, "fault", "list", "-o", "json").stdout)
    assert (listed["v"], listed["opcode"], listed["status"]) == (1, "GET", "EBUSY")
    assert dcpctl(dcp_server, "fault", "remove", "1").stdout == "removed 1 fault\n"
    assert dcpctl(dcp_server, "stream", "list").stdout == ""
    assert dcpctl(dcp_server, "stream", "slow", "5").stdout == "slowed 0 streams\n"
    assert dcpctl(dcp_server, "stream", "stall", "--resume").returncode == 0
    assert dcpctl(dcp_server, "stream", "stall").returncode == 3
    assert dcpctl(dcp_server, "stream", "close").returncode == 3


def test_dcpctl_explains_as_the_server_does(dcp_server):
    write(dcp_server, 5)
    uuid = dcp_server.explain_rollback(VB, 1, 0)["failover_log"][0]["vb_uuid"]
    dcp_server.branch(VB, 2)
    for arguments, question in (
        (("--uuid", uuid, "--seqno", "4"), (int(uuid), 4, {})),
        (
            ("--uuid", uuid, "--seqno", "4", "--snap-start", "1", "--snap-end", "9"),
            (int(uuid), 4, {"snap_start": 1, "snap_end": 9}),
        ),
        (("--uuid", "7", "--seqno", "1"), (7, 1, {})),
        (("--uuid", uuid, "--seqno", "4", "--snap-start", "5"), (int(uuid), 4, {"snap_start": 5})),
        (
            ("--seqno", "4", "--version", "9:3", "--version", f"{uuid}:0"),
            (9, 4, {"versions": [["9", 3], [uuid, 0]]}),
        ),
    ):
        done = dcpctl(dcp_server, "explain", "rollback", str(VB), *arguments, "-o", "json")
        told = json.loads(done.stdout)
        assert told.pop("v") == 1
        vb_uuid, seqno, more = question
        assert told == dcp_server.explain_rollback(VB, vb_uuid, seqno, **more), arguments
    lines = dcpctl(dcp_server, "explain", "rollback", str(VB), "--uuid", uuid, "--seqno", "4")
    assert lines.stdout.splitlines()[0] == "ROLLBACK to seqno 2"
    assert lines.stdout.splitlines()[-1].split("\t") == [uuid, "0", "2", "yes"]
    wrong = dcpctl(dcp_server, "explain", "rollback", "1", "--seqno", "1", "--version", "x")
    assert wrong.returncode == 2


# -- the log -----------------------------------------------------------------------------------


def test_refusals_are_logged_with_their_reason_and_never_flood(dcp_server):
    with SyncLink(parse_address(dcp_server.address)) as link:
        for _ in range(200):
            assert link.request(Opcode.GET, vb_id=1, extras=b"x", key=b"k").status == 4
    metrics = dcp_server.metrics()
    dcp_server.stop()
    lines = dcp_server.log_path.read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    refused = [event for event in events if event["event"] == "refused"]
    assert 1 <= len(refused) <= 20
    assert refused[0]["reason"] == "a get takes a key and nothing else"
    assert refused[0]["peer"].startswith("127.0.0.1:")
    assert metrics['dcpd_refusals_total{status="EINVAL"}'] == 200
    assert metrics["dcpd_log_lines_left_out_total"] == 200 - len(refused)


# -- a server that is gone, and streams that are not there yet -------------------------------------


def test_restart_after_kill_and_stop(dcp_server):
    write(dcp_server, 2)
    port = dcp_server.port
    dcp_server.kill()
    dcp_server.restart()
    assert dcp_server.port == port
    dcp_server.stop()
    dcp_server.restart()
    with dcp_server.connect() as kv:
        assert kv.get_all_vb_seqnos()[VB] == 2


async def test_limits_apply_to_streams_that_are_opened_later(dcp_server):
    assert await asyncio.to_thread(dcp_server.slow_streams, 5000, name="later") == 0
    assert await asyncio.to_thread(dcp_server.slow_streams, 7000, vb=VB) == 0
    async with (
        Consumer(dcp_server.address, name="later", vbuckets=[VB, VB + 1]),
        Consumer(dcp_server.address, name="other", vbuckets=[VB, VB + 1]),
    ):
        streams = await asyncio.to_thread(dcp_server.streams)
        rates = {(row["name"], row["vb"]): row["bytes_per_s"] for row in streams}
        assert rates == {
            ("later", VB): 7000, ("later", VB + 1): 5000,
            ("other", VB): 7000, ("other", VB + 1): None,
        }  # fmt: skip
        assert await asyncio.to_thread(dcp_server.resume_streams) == 4
    async with Consumer(dcp_server.address, name="later", vbuckets=[VB]):
        (row,) = await asyncio.to_thread(dcp_server.streams)
        assert row["bytes_per_s"] is None

"""KvClient and its link against a scripted peer on loopback."""

import asyncio
import gc
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_peer import ScriptedPeer, config_of, push, reply

from clients import Consumer
from clients.address import parse_address
from clients.errors import (
    AmbiguousWriteError,
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    NotFoundError,
    NotJsonError,
    NotMyVbucketError,
    OperationTimeoutError,
    TemporaryError,
)
from clients.kv.client import BATCH_OPERATIONS_MAX, KvClient
from clients.kv.commands import KvCommands
from clients.kv.sync_client import SyncKv
from clients.operation import Document, MutationResult
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.ids import vbucket_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def peer():
    async with ScriptedPeer() as peer:
        yield peer


async def test_documents_go_there_and_back(peer):
    async with KvClient.connect(peer.address) as kv:
        result = await kv.set("a", b"1", flags=3, expiry_s=9)
        assert result == MutationResult(8, vbucket_of(b"a"), 5, 1)
        sent = peer.requests[-1]
        assert (sent.key, sent.vb_id) == (b"\0a", vbucket_of(b"a"))
        assert sent.extras == (3).to_bytes(4, "big") + (9).to_bytes(4, "big")
        assert await kv.get("a") == Document(b"1", 7, 0)
        await kv.delete("a")
        with pytest.raises(NotFoundError) as caught:
            await kv.get(b"a")
        assert caught.value.key == b"a"
        assert caught.value.node == peer.address
        assert await kv.stats() == {"uptime": "3", "version": "9.9.9"}


async def test_batch_is_written_at_once_and_reports_each_operation(peer):
    count = BATCH_OPERATIONS_MAX * 5 + 3
    async with KvClient.connect(peer.address) as kv:
        outcomes = await kv.set_many((f"k{n}", b"%d" % n) for n in range(count))
        assert [outcome.seqno for outcome in outcomes] == list(range(1, count + 1))
        async with kv.pipeline() as batch:
            batch.get("k7")
            batch.get("none")
            batch.delete("k7")
            batch.delete("k7")
        found, missing, deleted, gone = batch.results
        assert found.value == b"7"
        assert isinstance(missing, NotFoundError)
        assert isinstance(deleted, MutationResult)
        assert isinstance(gone, NotFoundError)
        assert (await kv.get_many(["k1", "none", b"k2"])).keys() == {b"k1", b"k2"}
        assert await kv.set_many({}) == []


@pytest.mark.parametrize("key", ["", b"", b"x" * 251])
async def test_key_that_the_wire_has_no_room_for(peer, key):
    async with KvClient.connect(peer.address) as kv:
        with pytest.raises(ValueError, match="1 to 250 bytes"):
            await kv.get(key)


async def test_partition_that_moved_is_followed(peer):
    async with ScriptedPeer() as other:
        moved = config_of([peer.port, other.port], [1] * 1024, rev=2)
        peer.handlers[Opcode.SET] = lambda f: reply(f, Status.NOT_MY_VBUCKET, value=moved)
        async with KvClient.connect(peer.address) as kv:
            outcomes = await kv.set_many((f"k{n}", b"v") for n in range(50))
            assert all(isinstance(outcome, MutationResult) for outcome in outcomes)
            assert len(other.documents) == 50
            assert kv.topology.revision == (1, 2)


async def test_refusal_without_configuration_asks_for_it(peer):
    async with ScriptedPeer() as other:
        peer.handlers[Opcode.SET] = lambda f: reply(f, Status.NOT_MY_VBUCKET)
        async with KvClient.connect(peer.address) as kv:
            peer.config = config_of([peer.port, other.port], [1] * 1024, rev=2)
            await kv.set("a", b"1")
            assert other.documents == {b"a": b"1"}


async def test_a_node_that_is_gone_is_left_for_the_one_that_took_over(peer, unused_tcp_port):
    ports = [peer.port, unused_tcp_port]
    peer.config = config_of(ports, [1] * 1024, rev=1)
    async with KvClient.connect(peer.address) as kv:
        peer.config = config_of(ports, [0] * 1024, rev=2)
        await kv.set("a", b"1")
        assert peer.documents == {b"a": b"1"}


@pytest.mark.parametrize(
    ("opcode", "answer"),
    [
        (Opcode.GET_CLUSTER_CONFIG, lambda frame: reply(frame, value=b"{")),
        (Opcode.SASL_AUTH, lambda frame: reply(frame, Status.AUTH_ERROR)),
    ],
)
async def test_node_that_cannot_tell_the_way_costs_no_outcome(
    peer, unused_tcp_port, opcode, answer
):
    """One of three nodes is gone, another cannot say where its partitions are: the third can."""
    async with ScriptedPeer() as other:
        ports = [other.port, unused_tcp_port, peer.port]
        peer.config = config_of(ports, [1 + vb_id % 2 for vb_id in range(1024)], rev=1)
        async with KvClient.connect(peer.address) as kv:
            other.handlers[opcode] = answer
            peer.config = config_of(ports, [2] * 1024, rev=2)
            outcomes = await kv.set_many((f"k{n}", b"v") for n in range(20))
    assert all(isinstance(outcome, MutationResult) for outcome in outcomes)
    assert len(peer.documents) == 20


async def test_configuration_is_awaited_no_longer_than_operation_has(peer):
    async with KvClient.connect(peer.address, timeout_s=0.2) as kv:

        def refuse(frame):
            kv.timeout_s = 3600  # of what is asked from now on
            return reply(frame, Status.NOT_MY_VBUCKET)

        peer.handlers |= {Opcode.SET: refuse, Opcode.GET_CLUSTER_CONFIG: lambda _: b""}
        async with asyncio.timeout(20):
            with pytest.raises(NotMyVbucketError):
                await kv.set("a", b"1")


async def test_partition_that_nobody_holds_is_given_up_with_timeout(peer):
    peer.handlers[Opcode.SET] = lambda f: reply(f, Status.NOT_MY_VBUCKET)
    async with KvClient.connect(peer.address, timeout_s=0.3) as kv:
        with pytest.raises(NotMyVbucketError, match=r"attempts in 0\.3 s; nothing was changed"):
            await kv.set("a", b"1")
        assert peer.opcodes().count(Opcode.SET) > 2


async def test_temporary_refusal_is_repeated(peer):
    refusals = [Status.ETMPFAIL, Status.EBUSY]

    def busy(frame):
        return reply(frame, refusals.pop()) if refusals else peer.answer(frame)

    peer.handlers[Opcode.SET] = busy
    async with KvClient.connect(peer.address) as kv:
        await kv.set("a", b"1")
        assert peer.opcodes().count(Opcode.SET) == 3
        peer.handlers[Opcode.SET] = lambda f: reply(f, Status.ENOMEM)
        kv.timeout_s = 0.3
        with pytest.raises(TemporaryError, match="nothing was changed") as caught:
            await kv.set("a", b"1")
        assert not caught.value.may_have_applied


async def test_reads_are_repeated_after_a_lost_connection_writes_not(peer):
    peer.documents[b"a"] = b"1"
    lose = [True]

    def lose_once(frame):
        return None if lose and lose.pop() else peer.answer(frame)

    async with KvClient.connect(peer.address) as kv:
        peer.handlers[Opcode.GET] = lose_once
        assert (await kv.get("a")).value == b"1"
        assert peer.connections == 2
        lose.append(True)
        peer.handlers[Opcode.SET] = lose_once
        with pytest.raises(AmbiguousWriteError, match="may have been applied") as caught:
            await kv.set("a", b"2")
        assert caught.value.may_have_applied
        assert caught.value.key == b"a"
        await kv.set("a", b"3")
        assert peer.connections == 3
        assert peer.documents == {b"a": b"3"}


async def test_write_after_connection_broke_was_not_sent_and_repeated(peer):
    """The transport knows it before the link is told; it drops what it gets meanwhile."""
    async with KvClient.connect(peer.address) as kv:
        await kv.set("a", b"1")
        (link,) = kv._connections._links.values()
        link._transport.abort()
        assert not link.is_closed
        assert (await kv.set("b", b"2")).seqno
        assert [frame.key for frame in peer.requests if frame.opcode == Opcode.SET] == [
            b"\0a", b"\0b",
        ]  # fmt: skip


@pytest.mark.parametrize("ends", ["silent", "refused late"])
async def test_connection_that_nobody_waits_for_any_more_fails_quietly(peer, ends):
    """asyncio would report an exception that nobody has looked at."""
    told: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))

    async def accept(_reader, writer):
        held.append(writer)

    held: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with KvClient.connect(peer.address, timeout_s=0.3) as kv:
        connections = kv._connections
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await connections.link(("127.0.0.1", port))
        dial = connections._dials["127.0.0.1", port]
        if ends == "refused late":
            held[0].transport.abort()
        await asyncio.wait([dial])
        del dial
    for writer in held:
        writer.transport.abort()
    server.close()
    await server.wait_closed()
    await asyncio.sleep(0)
    gc.collect()
    assert told == []


async def test_lost_connection_in_batch_is_reported_for_what_was_sent(peer):
    def lose_at(frame):
        return None if frame.key == b"\0k3" else peer.answer(frame)

    peer.handlers[Opcode.SET] = lose_at
    async with KvClient.connect(peer.address) as kv:
        outcomes = await kv.set_many((f"k{n}", b"v") for n in range(6))
        assert isinstance(outcomes[3], AmbiguousWriteError)
        assert all(isinstance(o, MutationResult | AmbiguousWriteError) for o in outcomes)


async def test_no_answer_in_time(peer):
    async with KvClient.connect(peer.address, timeout_s=0.05) as kv:
        peer.held.clear()
        with pytest.raises(AmbiguousWriteError, match=r"0\.05 s") as caught:
            await kv.set("a", b"1")
        assert isinstance(caught.value.cause, OperationTimeoutError)
        with pytest.raises(TimeoutError):
            await kv.stats()
        peer.held.set()


async def test_late_answers_do_not_meet_the_wrong_request(peer):
    peer.documents.update({b"a": b"1", b"b": b"2"})
    async with KvClient.connect(peer.address, timeout_s=0.05) as kv:
        peer.held.clear()
        with pytest.raises(OperationTimeoutError):
            await kv.get("a")
        peer.held.set()
        kv.timeout_s = 10
        assert (await kv.get("b")).value == b"2"
        assert peer.connections == 1


async def test_many_tasks_share_a_connection(peer):
    async with KvClient.connect(peer.address) as kv:
        await asyncio.gather(*(kv.set(f"k{n}", b"%d" % n) for n in range(100)))
        found = await asyncio.gather(*(kv.get(f"k{n}") for n in range(100)))
        assert [document.value for document in found] == [b"%d" % n for n in range(100)]
        assert peer.connections == 1


async def test_push_of_the_server_is_skipped(peer):
    peer.handlers[Opcode.GET] = lambda f: push(f) + reply(f, value=b"x", extras=bytes(4))
    async with KvClient.connect(peer.address) as kv:
        assert (await kv.get("a")).value == b"x"


@pytest.mark.parametrize(
    "answer",
    [
        lambda f: reply(f._replace(opaque=f.opaque + 1)),
        lambda f: reply(f) + reply(f),
        lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
async def test_peer_that_breaks_the_protocol_is_left(peer, answer):
    peer.handlers[Opcode.SET] = answer
    async with KvClient.connect(peer.address) as kv:
        first = await kv.set_many([("a", b"1"), ("b", b"2")])
        assert isinstance(first[1], AmbiguousWriteError)


async def test_answers_that_are_cut_short_are_errors_of_ours(peer):
    """None of them is taken for an answer: collection 0 would be the default one."""
    cut = {
        Opcode.GET_ALL_VB_SEQNOS: lambda kv: kv.get_all_vb_seqnos(),
        Opcode.GET_FAILOVER_LOG: lambda kv: kv.failover_log(1),
        Opcode.GET_COLLECTION_ID: lambda kv: kv.collection("a.b").set("k", b"v"),
    }
    for opcode in cut:
        peer.handlers[opcode] = lambda frame: reply(frame, value=b"cut", extras=b"cut")
    async with KvClient.connect(peer.address, timeout_s=0.5) as kv:
        for opcode, ask in cut.items():
            with pytest.raises(ConnectError, match=r"cannot be read|extras of 3 bytes"):
                await ask(kv)
            assert opcode in peer.opcodes()
    for ask in (SyncKv.get_all_vb_seqnos, lambda kv: kv.failover_log(1)):
        with pytest.raises(ConnectError, match="cannot be read"):
            await in_thread(peer, ask)
    for options in ({"start": {1: 5}}, {"collections": ["a.b"]}):
        with pytest.raises(ConnectError, match=r"cannot be read|extras of 3 bytes"):
            await Consumer(peer.address, vbuckets=[1], **options).open()
    assert peer.documents == {}


async def test_server_without_a_configuration_holds_everything():
    peer = ScriptedPeer()
    peer.config = None
    async with peer, KvClient.connect(peer.address) as kv:
        await kv.set("a", b"1")
        assert kv.topology.num_vbuckets == 1024


async def test_cannot_connect(unused_tcp_port):
    with pytest.raises(ConnectError, match="cannot connect") as caught:
        await KvClient.open(f"127.0.0.1:{unused_tcp_port}")
    assert "dcpd" in caught.value.hint


async def test_refused_user(peer):
    peer.handlers[Opcode.SASL_AUTH] = lambda f: reply(f, Status.AUTH_ERROR)
    with pytest.raises(AuthenticationError, match="'eve' was refused"):
        await KvClient.open(f"dcpd://eve:x@{peer.address}")


async def test_peer_that_closes_in_the_handshake(peer):
    peer.handlers[Opcode.HELLO] = lambda _: None
    with pytest.raises(ConnectError, match="no session"):
        await KvClient.open(peer.address)


# -- the blocking twin -----------------------------------------------------------------------------


async def in_thread(peer, work, timeout_s=5):
    def run():
        with SyncKv(parse_address(peer.address), timeout_s=timeout_s) as kv:
            return work(kv)

    return await asyncio.to_thread(run)


async def test_blocking_client(peer):
    assert (await in_thread(peer, lambda kv: kv.set(b"a", b"1"))).seqno == 1
    assert (await in_thread(peer, lambda kv: kv.get(b"a"))).value == b"1"
    assert (await in_thread(peer, lambda kv: kv.stats()))["uptime"] == "3"
    await in_thread(peer, lambda kv: kv.delete(b"a"))
    with pytest.raises(NotFoundError):
        await in_thread(peer, lambda kv: kv.get(b"a"))


async def test_blocking_client_follows_a_partition(peer):
    async with ScriptedPeer() as other:
        moved = config_of([peer.port, other.port], [1] * 1024, rev=2)
        peer.handlers[Opcode.SET] = lambda f: reply(f, Status.NOT_MY_VBUCKET, value=moved)
        await in_thread(peer, lambda kv: kv.set(b"a", b"1"))
        assert other.documents == {b"a": b"1"}


async def test_blocking_client_repeats_what_was_refused_for_now(peer):
    refusals = [Status.ETMPFAIL]
    peer.handlers[Opcode.GET] = lambda f: (
        reply(f, refusals.pop()) if refusals else reply(f, value=b"x", extras=bytes(4))
    )
    assert (await in_thread(peer, lambda kv: kv.get(b"a"))).value == b"x"


async def test_blocking_client_connects_again_after_an_error(peer):
    """Also where an answer was late: it must not meet the next request."""
    peer.handlers[Opcode.SET] = lambda _: None

    def work(kv):
        with pytest.raises(AmbiguousWriteError, match="may have been applied"):
            kv.set(b"a", b"1")
        assert kv.stats()["uptime"] == "3"
        peer.handlers[Opcode.STAT] = lambda _: b""
        with pytest.raises(OperationTimeoutError):
            kv.stats()
        del peer.handlers[Opcode.STAT]
        assert kv.stats()["uptime"] == "3"

    await in_thread(peer, work, timeout_s=0.5)
    assert peer.connections == 3


async def test_blocking_client_asks_anew_where_a_node_is_gone(peer, unused_tcp_port):
    ports = [peer.port, unused_tcp_port]
    moved = config_of(ports, [1] * 1024, rev=2)
    peer.handlers[Opcode.SET] = lambda f: reply(f, Status.NOT_MY_VBUCKET, value=moved)

    def work(kv):
        with pytest.raises(ConnectError, match="nothing was changed") as caught:
            kv.set(b"a", b"1")
        assert caught.value.node == f"127.0.0.1:{unused_tcp_port}"
        del peer.handlers[Opcode.SET]  # the other's partitions came here
        peer.config = config_of(ports, [0] * 1024, rev=3)
        kv.set(b"a", b"2")

    await in_thread(peer, work, timeout_s=1)
    assert peer.documents == {b"a": b"2"}


async def test_blocking_client_says_what_went_wrong(peer):
    peer.handlers[Opcode.GET] = lambda _: None
    with pytest.raises(ConnectionLostError, match=r"attempts in 0\.3 s"):
        await in_thread(peer, lambda kv: kv.get(b"a"), timeout_s=0.3)
    peer.handlers[Opcode.GET] = lambda f: reply(f._replace(opaque=f.opaque + 1))
    with pytest.raises(ConnectionLostError, match="opaque"):
        await in_thread(peer, lambda kv: kv.get(b"a"), timeout_s=0.3)
    peer.handlers[Opcode.HELLO] = lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n"
    with pytest.raises(ConnectError, match="answers with HTTP"):
        await in_thread(peer, lambda kv: kv.get(b"a"))
    peer.handlers[Opcode.HELLO] = lambda _: b"-ERR unknown command, of another protocol\r\n"
    with pytest.raises(ConnectError, match="does not speak the protocol"):
        await in_thread(peer, lambda kv: kv.get(b"a"))


# -- both forms ------------------------------------------------------------------------------------

VALUE = {"name": "Ådne", "tags": ["a", 1, 2.5, None, True], "at": {"x": -1}}


async def test_json_is_stored_and_read_by_both_clients():
    async with ScriptedPeer() as peer, KvClient.connect(peer.address) as kv:
        await kv.set_json("a", VALUE)
        stored = await kv.get("a")
        assert json.loads(stored.value) == VALUE
        assert (await kv.get_json("a")).value == VALUE
        assert await in_thread(peer, lambda sync: sync.get_json("a")) == await kv.get_json("a")
        await in_thread(peer, lambda sync: sync.set_json("b", VALUE))
        assert (await kv.get_json("b")).value == VALUE
        await kv.set("c", b"{")
        with pytest.raises(NotJsonError, match=r"not JSON.*key 'c'"):
            await kv.get_json("c")
        for wrong, error in ((b"x", TypeError), (float("nan"), ValueError)):
            with pytest.raises(error):
                await kv.set_json("c", {"x": wrong})
        assert (await kv.get("c")).value == b"{", "nothing was sent"


async def test_blocking_client_has_every_command_typed_and_documented():
    """It has no rules of its own: its methods are those of KvClient, run to their end."""
    renamed = {"cluster_map": "topology"}
    for name, command in inspect.getmembers(KvCommands, inspect.iscoroutinefunction):
        if name.startswith("_"):
            continue
        method = getattr(SyncKv, renamed.get(name, name))
        assert method.__doc__ == command.__doc__
        assert inspect.signature(method) == inspect.signature(command)
        assert not inspect.iscoroutinefunction(method)
    own = {name for name in vars(SyncKv) if not name.startswith("_")}
    own_forms = {"batch", "close", "topology"}  # a context manager is not a coroutine
    assert {name for name in own if not hasattr(KvCommands, name)} == own_forms


async def test_arguments_are_checked_alike_in_both_forms():
    async with ScriptedPeer() as peer:

        def work(kv):
            token = kv.set("a", b"3")
            with pytest.raises(ValueError, match="timeout_s 0"):
                kv.get("a", timeout_s=0)
            with pytest.raises(ValueError, match="at_least goes with"):
                kv.get("a", at_least=token)
            return kv.get("a").value

        assert await in_thread(peer, work) == b"3"


def test_a_type_checker_finds_a_value_that_is_no_bytes(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from clients import SyncKv\n"
        'with SyncKv("127.0.0.1:1") as kv:\n'
        '    kv.set_json("k", {"a": [1, None, {"b": 2.0}]})\n'
        '    cas: int = kv.set("k", b"1").cas\n'
        '    kv.set("k", {"a": 1})\n'
        '    kv.get("k", tiemout_s=1)\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(program)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [line.split(":")[1] for line in done.stdout.splitlines() if ": error:" in line]
    assert found == ["5", "6"], done.stdout
    assert 'incompatible type "dict[str, int]"; expected "bytes"' in done.stdout

"""The embedded store passes the conformance suite over loopback; its clients and limits."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest
from metastore_harness import Watched, run_on
from metastore_suite import MetaStoreSuite

from failover.metadata.embedded.client import WATCHES_MAX
from failover.metadata.embedded.server import (
    STRANGERS_MAX,
    EmbeddedServer,
    EmbeddedStoreError,
)
from failover.metadata.embedded.wire import (
    LENGTH,
    LOGIN_FRAME_BYTES_MAX,
    StoreRefusal,
    WireError,
    read_to_client,
    read_to_server,
)
from failover.metadata.keyring import Keyring
from failover.metadata.metastore import (
    Compact,
    Compacted,
    Done,
    LeaseGrant,
    LeaseKeepAlive,
    Lost,
    OutcomeUnknown,
    Put,
    Range,
    RefusalKind,
    StoreRefused,
    StoreUnavailable,
    Txn,
    TxnResult,
    if_absent,
)
from failover.metadata.store_codec import CodecError, decode_image, decode_request, decode_result
from support.embedded_store import KEYRING, EmbeddedHarness

PUT = Txn(then=(Put(b"k", b"v"),))


@pytest.fixture
def embedded(tmp_path):
    harness = EmbeddedHarness(tmp_path / "metastore")
    yield harness
    harness.close()


class TestEmbeddedStore(MetaStoreSuite):
    @pytest.fixture
    def harness(self, embedded):
        return embedded


def put(embedded, client, key=b"k", value=b"v", lease_id=0):
    result = run_on(embedded, client, Txn(then=(Put(key, value, lease_id),)))
    assert isinstance(result, TxnResult)
    return result.revision


def values(embedded, client, prefix=b""):
    return [item.value for item in run_on(embedded, client, Range(prefix, is_prefix=True)).items]


# ---- Syncs


def test_each_change_is_answered_after_a_sync_of_its_own(embedded, monkeypatch):
    """Also of changes that come together; reads and refused changes take none."""
    client = embedded.client()
    put(embedded, client)
    syncs, at_answers = [], []
    disk = embedded.server._disk
    sync_data = disk.sync_data
    monkeypatch.setattr(disk, "sync_data", lambda fd: (sync_data(fd), syncs.append(fd)))

    async def together():
        for number in range(5):
            txn = Txn(then=(Put(b"a%d" % number, b"v"), Put(b"b%d" % number, b"v")))
            client.submit(txn, lambda _: at_answers.append(len(syncs)))

    embedded.run(together())
    embedded.wait(lambda: len(at_answers) == 5)
    assert len(syncs) == 5
    assert all(count > number for number, count in enumerate(at_answers))
    values(embedded, client)
    refused = Txn((if_absent(b"k"),), (Put(b"k", b"other"),))
    assert not run_on(embedded, client, refused).succeeded
    assert len(syncs) == 5


# ---- Start


def test_it_says_at_start_that_it_gives_no_high_availability(embedded):
    (notice,) = embedded.notices
    assert "no high availability" in notice
    assert str(embedded.port) in notice


def test_a_second_owner_is_refused_while_the_first_lives(embedded):
    async def second():
        await EmbeddedServer(embedded.folder, KEYRING, print).start()

    with pytest.raises(EmbeddedStoreError, match="in use by another process"):
        embedded.run(second())


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "localhost"])
def test_it_listens_on_loopback_only(embedded, tmp_path, host):
    async def elsewhere():
        await EmbeddedServer(tmp_path / "other", KEYRING, print).start(host)

    with pytest.raises(EmbeddedStoreError, match="use etcd for a cluster of several machines"):
        embedded.run(elsewhere())


def test_a_folder_that_cannot_be_used_is_told(embedded, tmp_path):
    (tmp_path / "file").touch()

    async def in_a_file():
        await EmbeddedServer(tmp_path / "file" / "metastore", KEYRING, print).start()

    with pytest.raises(EmbeddedStoreError, match=r"cannot use .*: Not a directory"):
        embedded.run(in_a_file())


def test_port_that_is_taken_is_told_and_folder_is_free_again(embedded, tmp_path):
    async def same_port(port):
        server = EmbeddedServer(tmp_path / "other", KEYRING, lambda _: None)
        await server.start(port=port)
        return server

    with pytest.raises(
        EmbeddedStoreError, match=rf"cannot use 127.0.0.1:{embedded.port}: another process uses it"
    ):
        embedded.run(same_port(embedded.port))
    server = embedded.run(same_port(0))
    embedded.run(server.close())


def test_a_short_secret_is_refused(embedded):
    with pytest.raises(ValueError, match="at least 16 are needed"):
        embedded.client(keyring=Keyring(["short"]))


# ---- Restarts


def test_a_restart_keeps_keys_history_and_leases(embedded):
    client = embedded.client()
    lease = run_on(embedded, client, LeaseGrant(10))
    first = put(embedded, client, b"a", b"1", lease.lease_id)
    put(embedded, client, b"a", b"2", lease.lease_id)
    before = run_on(embedded, client, Range(b"", is_prefix=True))
    embedded.pass_time(9)
    embedded.stop()
    embedded.start()
    assert run_on(embedded, client, Range(b"", is_prefix=True)) == before
    old = run_on(embedded, client, Range(b"", is_prefix=True, revision=first))
    assert [item.value for item in old.items] == [b"1"]
    embedded.pass_time(9)  # the lease has its whole time again
    assert values(embedded, client) == [b"2"]
    embedded.pass_time(2)
    watched = Watched(client, b"", before.revision + 1)
    embedded.wait(lambda: watched.batches)
    assert watched.batches[0].events[0].is_delete


def test_a_lease_id_is_not_used_again(embedded):
    """The former owner would keep it alive."""
    client = embedded.client()
    first = run_on(embedded, client, LeaseGrant(2))
    embedded.pass_time(3)
    embedded.wait(lambda: not embedded.server.store.leases())
    embedded.run(embedded.server._rewrite())  # a snapshot does not know former leases
    embedded.stop()
    embedded.start()
    second = run_on(embedded, client, LeaseGrant(2))
    assert second.lease_id != first.lease_id
    gone = run_on(embedded, client, LeaseKeepAlive(first.lease_id))
    assert gone.kind is RefusalKind.LEASE_NOT_FOUND


def test_leases_get_back_the_time_in_which_the_store_stood_still(embedded):
    client = embedded.client()
    lease = run_on(embedded, client, LeaseGrant(3))
    put(embedded, client, b"a", b"1", lease.lease_id)
    embedded.ahead_ns += 60_000_000_000  # nothing ran meanwhile, so no keep-alive was heard
    embedded.server.tick()
    assert run_on(embedded, client, LeaseKeepAlive(lease.lease_id)) == lease


def test_watches_go_on_over_restarts_behind_what_they_delivered(embedded):
    client, other = embedded.client(), embedded.client()
    watched = Watched(client, b"", 1)
    revisions = []
    for number in range(4):
        revisions.append(put(embedded, other, b"%d" % number))
        if number % 2:
            embedded.wait(lambda: watched.revisions == revisions)
        embedded.stop()
        embedded.start()
    embedded.wait(lambda: watched.revisions == revisions)
    assert watched.messages == watched.batches


def test_watch_overtaken_by_compaction_ends_as_compacted(embedded):
    proxy, port = embedded.proxy(embedded.port)
    client, other = embedded.client(port), embedded.client()
    watched = Watched(client, b"", 1)
    put(embedded, other)
    embedded.wait(lambda: watched.batches)
    proxy.swallow_answers = True
    put(embedded, other)
    last = put(embedded, other)
    assert run_on(embedded, other, Compact(last)) == Done(last)
    proxy.swallow_answers = False
    proxy.cut()
    embedded.wait(lambda: len(watched.messages) > 1)
    assert watched.messages[1:] == [Compacted(last)]


def test_a_long_history_reaches_a_watch_in_parts(embedded):
    client = embedded.client()
    for number in range(150):
        put(embedded, client, b"k", b"%d" % number)
    watched = Watched(client, b"k", 1)
    embedded.wait(lambda: len(watched.batches) == 150)
    assert watched.revisions == list(range(2, 152))


# ---- A store that is away


def test_without_store_nothing_happened_and_reason_is_told_once(embedded):
    client = embedded.client()
    put(embedded, client)
    embedded.stop()
    for _ in range(2):
        result = run_on(embedded, client, PUT)
        assert isinstance(result, StoreUnavailable | OutcomeUnknown)
    result = run_on(embedded, client, PUT)
    assert isinstance(result, StoreUnavailable)
    assert "Does its owner run?" in result.text
    assert len([notice for notice in embedded.notices if "is away: " in notice]) == 1
    embedded.start()
    embedded.wait(lambda: not client.trouble)
    assert put(embedded, client) == 3
    assert "answers again" in embedded.notices[-1]


def test_an_answer_after_the_deadline_is_ignored(embedded):
    proxy, port = embedded.proxy(embedded.port)
    client = embedded.client(port, deadline_s=0.2)
    embedded.wait(lambda: not client.trouble)
    proxy.swallow_answers = True
    assert isinstance(run_on(embedded, client, PUT), OutcomeUnknown)
    proxy.swallow_answers = False
    assert put(embedded, client) == 3, "the first one happened"


def test_store_that_sends_nothing_is_given_up_and_connected_anew(embedded, monkeypatch):
    monkeypatch.setattr("failover.metadata.embedded.client.SILENCE_S", 0.2)
    monkeypatch.setattr("failover.metadata.embedded.connection.BEAT_S", 0.05)
    proxy, port = embedded.proxy(embedded.port)
    client = embedded.client(port)
    watched = Watched(client, b"", 1)
    put(embedded, client)
    embedded.wait(lambda: watched.batches)
    proxy.swallow_answers = True
    embedded.wait(lambda: client.trouble)
    assert "nothing came" in client.trouble
    proxy.swallow_answers = False
    embedded.wait(lambda: not client.trouble)
    put(embedded, client)
    embedded.wait(lambda: len(watched.batches) == 2)


def test_a_history_that_went_back_is_told_and_ends_the_watches(embedded):
    """An older copy of the file was put back: its revisions will name other changes."""
    client = embedded.client()
    put(embedded, client)
    embedded.stop()
    copy = {path.name: path.read_bytes() for path in embedded.folder.glob("meta-*")}
    embedded.start()
    watched = Watched(client, b"", 1)
    put(embedded, client, b"later")
    embedded.wait(lambda: len(watched.batches) == 2)
    embedded.stop()
    for name, data in copy.items():
        (embedded.folder / name).write_bytes(data)
    embedded.start()
    embedded.wait(lambda: isinstance(watched.messages[-1], Lost))
    embedded.wait(lambda: any("its history went back" in each for each in embedded.notices))
    assert values(embedded, client) == [b"v"], "it goes on with what is there"


def test_another_file_is_another_history(embedded):
    client = embedded.client()
    put(embedded, client)
    embedded.stop()
    for path in embedded.folder.glob("meta-*"):
        path.unlink()
    embedded.start()
    for _ in range(3):
        put(embedded, embedded.client())
    embedded.wait(lambda: any("another file" in each for each in embedded.notices))
    assert client.era > 1


# ---- Strangers


def test_another_secret_is_refused_in_words_on_both_sides(embedded):
    stranger = embedded.client(keyring=Keyring(["another secret of 32 bytes......"]))
    embedded.wait(lambda: "another secret" in stranger.trouble)
    assert "dcpctl cluster token" in stranger.trouble
    assert isinstance(run_on(embedded, stranger, PUT), StoreUnavailable)
    assert values(embedded, embedded.client()) == []


def connected(embedded):
    connection = socket.create_connection(("127.0.0.1", embedded.port), timeout=30)
    connection.setblocking(False)
    return connection


def read_until_closed(embedded, connection) -> bytes:
    async def read():
        data = b""
        loop = asyncio.get_running_loop()
        try:
            while part := await loop.sock_recv(connection, 65536):
                data += part
        except OSError:
            pass
        return data

    return embedded.run(read())


@pytest.mark.parametrize(
    "data",
    [
        LENGTH.pack(LOGIN_FRAME_BYTES_MAX + 1),
        LENGTH.pack(3) + b"abc",
        b"GET / HTTP/1.1\r\n\r\n",
        LENGTH.pack(3) + bytes([0x92, 0xA0, 0x01]),
        LENGTH.pack(1024) + b"\x93\xa4call\x01" + b"\x91" * 1017,
    ],
)
def test_what_is_no_login_is_disconnected(embedded, data):
    with connected(embedded) as stranger:
        stranger.send(data)
        assert b"refusal" in read_until_closed(embedded, stranger)
    assert put(embedded, embedded.client()) == 2


def test_strangers_do_not_keep_others_out(embedded):
    strangers = [connected(embedded) for _ in range(STRANGERS_MAX + 5)]
    embedded.wait(lambda: len(embedded.server._connections) == STRANGERS_MAX)
    assert put(embedded, embedded.client()) == 2
    for stranger in strangers:
        stranger.close()


def test_a_login_that_does_not_come_ends(embedded, monkeypatch):
    monkeypatch.setattr("failover.metadata.embedded.connection.LOGIN_S", 0.05)
    with connected(embedded) as stranger:
        assert b"challenge" in read_until_closed(embedded, stranger)
    embedded.wait(lambda: not embedded.server._connections)


def test_a_server_without_the_secret_is_refused(embedded):
    """It answers the challenge with a proof that it cannot make."""
    other = EmbeddedHarness(embedded.folder.parent / "other")
    other.stop()

    async def with_another_secret():
        server = EmbeddedServer(
            embedded.folder.parent / "third",
            Keyring(["another secret of 32 bytes......"]),
            lambda _: None,
        )
        return server, await server.start()

    server, port = embedded.run(with_another_secret())
    client = embedded.client(port)
    embedded.wait(lambda: "another secret" in client.trouble)
    embedded.run(server.close())
    other.start()
    other.close()


def test_the_store_lets_in_with_both_secrets_while_they_change(embedded):
    old, new = KEYRING.in_use, "1." + "n" * 43
    with KEYRING.step([new, old]):
        pass
    try:
        for secret in (old, new):
            client = embedded.client(keyring=Keyring([secret]))
            embedded.wait(lambda client=client: not client.trouble)
        stranger = embedded.client(keyring=Keyring(["x" * 32]))
        embedded.wait(lambda: "another secret" in stranger.trouble)
    finally:
        KEYRING.secrets = (old,)


# ---- Limits


def test_request_big_for_message_is_refused_before_it_is_sent(embedded):
    client = embedded.client()
    refused = run_on(embedded, client, Txn(then=(Put(b"k", bytes(3 << 20)),)))
    assert refused.kind is RefusalKind.TOO_BIG
    assert put(embedded, client) == 2


def test_a_number_above_64_bits_is_refused(embedded):
    refused = run_on(embedded, embedded.client(), LeaseGrant(2**70))
    assert isinstance(refused, StoreRefused)


def test_too_many_watches_are_refused(embedded, monkeypatch):
    monkeypatch.setattr("failover.metadata.embedded.client.LOST_S", 0.1)
    client = embedded.client()
    watches = [Watched(client, b"", 1) for _ in range(WATCHES_MAX + 1)]
    put(embedded, client)
    embedded.wait(lambda: all(watched.messages for watched in watches))
    assert isinstance(watches[-1].messages[0], Lost)
    assert all(watched.revisions == [2] for watched in watches[:-1])


def test_a_store_above_its_quota_takes_no_keys_but_deletes_them(embedded, monkeypatch):
    monkeypatch.setattr("failover.metadata.embedded.server.STORE_BYTES_MAX", 1000)
    monkeypatch.setattr("failover.metadata.embedded.server.LOG_BYTES_MIN", 4000)
    monkeypatch.setattr("failover.metadata.embedded.core.HISTORY_BYTES_MAX", 0)
    client = embedded.client()
    put(embedded, client, b"k", bytes(5000))
    embedded.wait(lambda: embedded.server._file.generation == 2)
    refused = run_on(embedded, client, PUT)
    assert refused.kind is RefusalKind.NO_SPACE
    assert values(embedded, client) == [bytes(5000)]


# -- rubbish on the port ---------------------------------------------------------------------------

RUBBISH = (
    b"\x00\x00\x00\x06\x92\xa2\xff\xfe\x01\xc0",
    b"\x00\x00\x00\x06\x95\xa5\xff\xff\xff\xff",
    b"\x00\x00\x00\x06\xc1\xc1\xc1\xc1\xc1\xc1",
    b"\x00\x00\x00\x06\xdd\xff\xff\xff\xff\x01",
    b"\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    b"GET / HTTP",
)


async def test_rubbish_gets_a_refusal_and_no_traceback(tmp_path, caplog):
    server = EmbeddedServer(tmp_path / "store", KEYRING, lambda _text: None)
    port = await server.start()
    draw = random.Random(7)
    frames = [LENGTH.pack(6) + draw.randbytes(6) for _ in range(200)]
    try:
        for data in (*RUBBISH, *frames):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writer.write_eof()
            told = await asyncio.wait_for(reader.read(), 20)
            writer.close()
            (challenge_bytes,) = LENGTH.unpack_from(told)
            assert isinstance(
                read_to_client(told[LENGTH.size * 2 + challenge_bytes :]), StoreRefusal
            )
    finally:
        await server.close()
    assert not caplog.records, "asyncio logs what a connection did not handle"


@pytest.mark.parametrize("decode", [read_to_server, read_to_client])
def test_text_that_is_no_utf_8_is_no_message(decode):
    with pytest.raises(WireError, match="utf-8"):
        decode(b"\x92\xa2\xff\xfe\x01")


@pytest.mark.parametrize("decode", [decode_request, decode_result, decode_image])
def test_text_no_utf_8_is_neither_request_nor_result_nor_image(decode):
    with pytest.raises(CodecError):
        decode(b"\x92\xa2\xff\xfe\x01")

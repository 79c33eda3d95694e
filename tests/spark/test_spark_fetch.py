"""Reading steps from a real server: branches between plan and read, cut streams, purges, moves."""

from __future__ import annotations

import threading
import time

import pytest

from clients.address import parse_address
from clients.consumer.consumer import Consumer
from clients.errors import DcpdError
from clients.event import Deletion, Mutation
from clients.link.blocking_link import SyncLink, refresh_map
from clients.spark import fetch as fetch_module
from clients.spark.columns import OPS
from clients.spark.fetch import fetch, map_of
from clients.spark.offset import entry_at, offset_of
from clients.spark.options import OptionError
from clients.spark.plan import next_entries, steps_between
from clients.spark.survey import Survey
from clients.testing import DcpServer
from dcp.wire.opcode import Opcode

KEY = b"key1"
VB = 92
"""The partition of KEY."""


class Reader:
    """Plans and reads as Spark makes the source do it, one batch after the other."""

    def __init__(self, server, *, history: bool = True) -> None:
        self.servers = (parse_address(server.address),)
        self.survey = Survey(self.servers, range(1024))
        self.history = history
        self.offset: dict[str, str] = {}

    def plan(self, **more) -> list:
        from clients.spark.offset import entries_of

        ends, _ = next_entries(
            entries_of(self.offset), self.survey.facts(), history=self.history, **more
        )
        start, self.offset = self.offset, offset_of(ends)
        return steps_between(start, self.offset)

    def read(self, steps, **options) -> list[tuple]:
        """Return ("rollback", vb, seqno) and (op, vb, seqno, value)."""
        rows: list[tuple] = []
        for arrived in fetch(self.servers, steps, history=self.history, **options):
            rows += [("rollback", vb, seqno) for vb, seqno, _ in arrived.rollbacks]
            changes = arrived.changes
            if changes is not None:
                rows += [
                    (OPS[op], int(vb), int(seqno), value)
                    for op, vb, seqno, value in zip(
                        changes.ops, changes.heads.vb_ids, changes.heads.seqnos,
                        changes.values.to_pylist(), strict=True,
                    )
                ]  # fmt: skip
        return rows

    def batch(self) -> list[tuple]:
        return self.read(self.plan())


@pytest.fixture
def reader(dcpd):
    made = Reader(dcpd)
    yield made
    made.survey.close()


def write(server, *values: bytes) -> None:
    with server.connect() as kv:
        for value in values:
            kv.set(KEY, value)


async def test_columns_are_what_the_consumer_tells(dcpd):
    """Keys, values, numbers and times of all kinds of changes, against the plain consumer."""
    from clients.kv.client import KvClient

    async with KvClient.connect(dcpd.address) as kv:
        await kv.set_many([(f"k{number}", b"v" * (number % 97)) for number in range(3000)])
        await kv.set("ü" * 60, b"\x00\xff", flags=0xFFFF_FFFF, expiry_s=2_000_000_000)
        for number in range(0, 3000, 7):
            await kv.delete(f"k{number}")
    wanted = {}
    async with Consumer(dcpd.address, until_now=True, history=True) as consumer:
        async for event in consumer:
            if isinstance(event, Mutation):
                wanted[event.vb_id, event.seqno] = (
                    "set", event.key, event.value, event.cas, event.rev_seqno, event.flags,
                    event.expiry_s,
                )  # fmt: skip
            elif isinstance(event, Deletion):
                wanted[event.vb_id, event.seqno] = (
                    "delete", event.key, None, event.cas, event.rev_seqno, 0, 0,
                )  # fmt: skip
    reader, found = Reader(dcpd), {}
    for arrived in fetch(reader.servers, reader.plan()):
        changes = arrived.changes
        assert changes is not None
        heads = changes.heads
        for row in zip(
            heads.vb_ids.tolist(), heads.seqnos.tolist(), changes.ops.tolist(),
            changes.keys.to_pylist(), changes.values.to_pylist(), heads.cas.tolist(),
            heads.revisions.tolist(), changes.flags.tolist(), changes.expiry_s.tolist(),
            strict=True,
        ):  # fmt: skip
            found[row[0], row[1]] = (OPS[row[2]], *row[3:])
    reader.survey.close()
    assert found == wanted


def test_a_repeated_batch_gives_the_same_rows(dcpd, reader):
    write(dcpd, b"1", b"2", b"3")
    steps = reader.plan()
    first = reader.read(steps)
    assert first == [("set", VB, seqno, b"%d" % seqno) for seqno in (1, 2, 3)]
    write(dcpd, b"4")
    assert reader.read(steps) == first


def test_only_common_part_is_read_and_next_batch_goes_back(dcpd, reader):
    write(dcpd, b"1", b"2", b"3", b"4")
    steps = reader.plan()
    dcpd.branch(VB, at=2)
    write(dcpd, b"new 3", b"new 4", b"new 5")
    assert reader.read(steps) == [("set", VB, 1, b"1"), ("set", VB, 2, b"2")]
    assert reader.batch() == [
        ("rollback", VB, 2), *(("set", VB, seqno, b"new %d" % seqno) for seqno in (3, 4, 5)),
    ]  # fmt: skip
    assert reader.plan() == []


def test_without_history_the_common_part_is_a_whole_state(dcpd):
    """The planned end's snapshot leaves out what it supersedes: the smaller one is asked for."""
    reader = Reader(dcpd, history=False)
    write(dcpd, b"1", b"2", b"3", b"4")
    steps = reader.plan()
    dcpd.branch(VB, at=2)
    write(dcpd, b"new 3", b"new 4")
    assert reader.read(steps) == [("set", VB, 2, b"2")]
    assert reader.batch() == [("rollback", VB, 0), ("set", VB, 4, b"new 4")]
    reader.survey.close()


def test_branch_below_start_leaves_nothing_of_planned_batch(dcpd, reader):
    write(dcpd, b"1", b"2", b"3")
    reader.batch()
    write(dcpd, b"4")
    steps = reader.plan()
    dcpd.branch(VB, at=1)
    assert reader.read(steps) == []
    assert reader.batch() == [("rollback", VB, 1)]


def test_several_branches_between_two_batches(dcpd, reader):
    write(dcpd, b"1", b"2", b"3", b"4", b"5")
    reader.batch()
    for at in (4, 3, 3):
        dcpd.branch(VB, at=at)
        write(dcpd, b"again")
    assert reader.batch() == [("rollback", VB, 3), ("set", VB, 4, b"again")]


def test_planned_rollback_is_told_again_when_batch_is_repeated(dcpd, reader):
    write(dcpd, b"1", b"2", b"3")
    reader.batch()
    dcpd.branch(VB, at=2)
    write(dcpd, b"new")
    steps = reader.plan()
    wanted = [("rollback", VB, 2), ("set", VB, 3, b"new")]
    assert reader.read(steps) == wanted
    dcpd.branch(VB, at=1)
    assert reader.read(steps) == wanted[:1], "nothing above it is left; going back stays right"
    assert reader.batch() == [("rollback", VB, 1)]


def test_a_purge_between_plan_and_read_begins_the_partition_anew(dcpd, reader):
    write(dcpd, b"1", b"2")
    reader.batch()
    with dcpd.connect() as kv:
        kv.delete(KEY)
        kv.set(KEY, b"4")
    steps = reader.plan()
    dcpd.purge(VB)
    rows = reader.read(steps)
    assert rows[0] == ("rollback", VB, 0)
    assert rows[-1] == ("set", VB, 4, b"4")
    assert reader.plan() == []


def test_floor_above_planned_end_shows_state_at_floor(dcpd, reader):
    """The next batch brings what lies above the planned end again, which sinks do not mind."""
    write(dcpd, b"1", b"2")
    reader.batch()
    write(dcpd, b"3")
    steps = reader.plan()
    write(dcpd, b"4", b"5", b"6")
    dcpd.purge(VB)
    rows = reader.read(steps)
    assert dcpd_floor(reader) > 3
    assert rows[-1] == ("set", VB, 6, b"6")
    assert reader.batch()[-1] == ("set", VB, 6, b"6")


def dcpd_floor(reader) -> int:
    return {fact.vb_id: fact for fact in reader.survey.facts()}[VB].history_floor


def test_answers_that_are_cut_short_are_asked_for_again(dcpd, reader, monkeypatch):
    write(dcpd, b"1")
    request, cut = SyncLink.request, set()
    torn = {Opcode.GET_ALL_VB_SEQNOS, Opcode.GET_FAILOVER_LOG}

    def request_and_cut(self, opcode, **more):
        frame = request(self, opcode, **more)
        if opcode in torn - cut:
            cut.add(opcode)
            return frame._replace(value=frame.value[:-1])
        return frame

    monkeypatch.setattr(SyncLink, "request", request_and_cut)
    survey = Survey(reader.servers, [VB])
    (fact,) = survey.facts()
    survey.close()
    assert (fact.vb_id, fact.high_seqno) == (VB, 1)
    assert cut == torn


def test_streams_that_break_go_on_where_they_were(dcpd, reader):
    values = [b"%d" % number * 200 for number in range(400)]
    write(dcpd, *values)
    steps = reader.plan()
    dcpd.fault(opcode="DCP_STREAM_REQ", status="ETMPFAIL", count=1)
    seen: list[bytes] = []
    cut = False
    for arrived in fetch(reader.servers, steps):
        seen += arrived.changes.values.to_pylist()
        if not cut:
            cut = True
            dcpd.restart()
    assert seen == values


def test_a_server_that_comes_back_is_waited_for(dcpd, reader):
    write(dcpd, b"1")
    steps = reader.plan()
    dcpd.kill()
    back = threading.Timer(0.5, dcpd.start)
    back.start()
    assert reader.read(steps) == [("set", VB, 1, b"1")]
    back.join()


def test_a_partition_that_stays_away_is_an_error_that_names_it(dcpd, reader):
    write(dcpd, b"1")
    other = store_elsewhere(dcpd)
    steps = reader.plan()
    dcpd.set_state(VB, "dead")
    arriving = fetch(reader.servers, steps, patience_s=0.3)
    first = next(arriving)
    assert first.changes is not None
    assert first.changes.heads.vb_ids.tolist() == [other], "the others are read meanwhile"
    with pytest.raises(DcpdError, match=r"no progress .* at seqno 0 of 1.*partition 92") as caught:
        next(arriving)
    assert "dcpctl seqnos" in caught.value.hint


def store_elsewhere(server) -> int:
    with server.connect() as kv:
        vb_id: int = kv.set(b"another", b"1").vb_id
    assert vb_id != VB
    return vb_id


def test_partition_without_node_is_awaited_while_others_are_read(dcpd, reader, monkeypatch):
    write(dcpd, b"1")
    other = store_elsewhere(dcpd)
    steps = reader.plan()
    real = refresh_map(map_of(reader.servers), reader.servers[0])
    homeless = real._replace(
        vbucket_map=tuple(-1 if vb == VB else node for vb, node in enumerate(real.vbucket_map))
    )
    told = iter([homeless, homeless])
    monkeypatch.setattr(fetch_module, "refresh_map", lambda *_: next(told, real))
    rows = reader.read(steps)
    assert [row[1] for row in rows] == [other, VB]
    monkeypatch.setattr(fetch_module, "refresh_map", lambda *_: homeless)
    with pytest.raises(DcpdError, match=r"no node is active.*partition 92"):
        reader.read(steps, patience_s=0.3)


def test_a_server_that_puts_off_for_ever_is_told_with_its_reason(dcpd, reader):
    write(dcpd, b"1")
    steps = reader.plan()
    dcpd.fault(opcode="DCP_STREAM_REQ", status="ETMPFAIL", count=1_000_000)
    with pytest.raises(DcpdError, match=r"of 1: .*ETMPFAIL.*partition 92"):
        reader.read(steps, patience_s=0.5)


def test_a_node_that_takes_no_connection_now_is_asked_again(dcpd, reader):
    write(dcpd, b"1")
    steps = reader.plan()
    dcpd.fault(opcode="DCP_OPEN", status="ETMPFAIL", count=2)
    assert reader.read(steps) == [("set", VB, 1, b"1")]


def test_the_time_that_spark_takes_for_rows_is_no_waiting(dcpd, reader, monkeypatch):
    """A connection that is lost while Spark is busy with what came is made again."""
    write(dcpd, *[b"%d" % number * 50_000 for number in range(10, 60)])
    steps = reader.plan()
    clock = FakeClock()
    monkeypatch.setattr(fetch_module, "time", clock)
    seen = []
    for arrived in fetch(reader.servers, steps):
        if not seen:
            dcpd.restart()
        clock.now_s += 10 * fetch_module.PATIENCE_S  # each time: some is in buffers still
        seen += arrived.changes.heads.seqnos.tolist()
    assert seen == list(range(1, 51))


class FakeClock:
    """A clock that goes on when the test says so."""

    now_s = 0.0
    sleep = staticmethod(time.sleep)

    def monotonic(self) -> float:
        return self.now_s


def test_a_very_large_value(dcpd, reader):
    """The largest value comes in many reads, and with it what is before and behind it."""
    values = [b"first", bytes(20 * 1024 * 1024), b"last"]
    write(dcpd, *values)
    assert [row[3] for row in reader.batch()] == values


def test_rows_belong_to_the_version_that_wrote_them(dcpd, reader):
    write(dcpd, b"1", b"2")
    dcpd.failover(VB)
    write(dcpd, b"3")
    with dcpd.connect() as kv:
        (newer, began), (older, _) = kv.failover_log(VB)
    assert began == 2
    told = [
        (int(seqno), int(vb_uuid))
        for arrived in fetch(reader.servers, reader.plan())
        for seqno, vb_uuid in zip(
            arrived.changes.heads.seqnos, arrived.changes.vb_uuids, strict=True
        )
    ]
    assert told == [(1, older), (2, older), (3, newer)]


def test_moments_and_sizes(dcpd, reader):
    write(dcpd, b"x" * 1000, b"y" * 1000)
    facts = reader.survey.facts()
    steps = reader.plan()
    size = reader.survey.row_bytes(steps, history=True, collection_ids=(0,))
    assert 1000 < size < 1200
    assert reader.survey.seqnos_at(0)[VB] == 0
    assert reader.survey.seqnos_at(2**62)[VB] == 2
    assert {fact.vb_id for fact in facts} == set(range(1024))
    assert entry_at(2, facts[VB].versions).seqno == 2


@pytest.mark.parametrize("partitions", [[VB], range(1024)])
def test_a_survey_knows_more_versions_than_plain_dcp_shows(dcpd, partitions):
    write(dcpd, b"1")
    for _ in range(40):
        dcpd.failover(VB)
    with dcpd.connect() as kv:
        log = tuple(kv.version_log(VB))
    assert len(log) == 41
    survey = Survey((parse_address(dcpd.address),), partitions)
    facts = {fact.vb_id: fact for fact in survey.facts()}
    survey.close()
    assert facts[VB].versions == log


def test_a_server_with_64_partitions():
    """The map says how many there are; one beyond is refused with the option's name."""
    keys = {f"key-{number}".encode() for number in range(300)}
    with DcpServer(None, "--partitions", "64") as server:
        with server.connect() as kv:
            for key in keys:
                kv.set(key, key)
        reader = Reader(server)
        reader.survey = Survey(reader.servers, None)
        facts = reader.survey.facts(all_of_them=True)
        assert [fact.vb_id for fact in facts] == list(range(64))
        assert {value for *_, value in reader.batch()} == keys
        reader.survey.close()
        with pytest.raises(OptionError, match=r"option partitions: 64 is not one of .* 0 to 63"):
            Survey(reader.servers, (3, 64)).facts()

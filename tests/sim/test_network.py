"""Connections: order, cuts, stops, ends of processes."""

from __future__ import annotations

import pytest

from sim.network import SEND_BUFFER_BYTES, Network, Side
from sim.world import MS, SECOND, Host, World


class Log:
    """Keeps what a connection's owner hears."""

    def __init__(self) -> None:
        self.data = b""
        self.closed: list[str] = []
        self.writable = 0

    def on_bytes(self, data: bytes) -> None:
        self.data += data

    def on_closed(self, why: str) -> None:
        self.closed.append(why)

    def on_writable(self) -> None:
        self.writable += 1


class Pair:
    """A client and a server with one connection."""

    def __init__(self, seed: int = 0) -> None:
        self.world = World(seed)
        self.network = Network(self.world, MS, 3 * MS)
        self.client, self.server = Host(self.world, "c"), Host(self.world, "s")
        for host in (self.client, self.server):
            self.network.add(host)
        self.near_log, self.far_log = Log(), Log()
        self.failed: list[str] = []
        self.near: Side | None = None
        self.far: Side | None = None
        self.network.listen(self.server, self._accept)

    def _accept(self, side: Side) -> None:
        self.far = side
        side.handler = self.far_log

    def _connected(self, side: Side) -> None:
        self.near = side
        side.handler = self.near_log

    def dial(self) -> None:
        self.network.connect(self.client, "s", self._connected, self.failed.append)

    def run(self, delay_ns: int = 100 * MS) -> None:
        self.world.run_until(self.world.now_ns + delay_ns)


@pytest.fixture
def pair() -> Pair:
    found = Pair()
    found.dial()
    found.run()
    return found


@pytest.mark.parametrize("seed", range(20))
def test_bytes_arrive_in_order_whatever_the_delays(seed: int) -> None:
    pair = Pair(seed)
    pair.dial()
    pair.run()
    for number in range(200):
        pair.near.write(b"%d," % number)
    pair.run()
    assert pair.far_log.data == b"".join(b"%d," % number for number in range(200))


@pytest.mark.parametrize("seed", range(20))
def test_connection_that_breaks_delivers_prefix_and_tells_both(seed: int) -> None:
    pair = Pair(seed)
    pair.dial()
    pair.run()
    sent = b"".join(b"message %d " % number for number in range(20))
    for at in range(0, len(sent), 7):
        pair.near.write(sent[at : at + 7])
    pair.network.break_connection(pair.near, 20 * MS)
    pair.near.write(b"too late")
    pair.run()
    assert sent.startswith(pair.far_log.data)
    assert len(pair.near_log.closed) == len(pair.far_log.closed) == 1


def test_some_breaks_cut_a_message_in_the_middle() -> None:
    lengths = set()
    for seed in range(40):
        pair = Pair(seed)
        pair.dial()
        pair.run()
        for _ in range(4):
            pair.near.write(b"x" * 100)
        pair.network.break_connection(pair.near, 0)
        pair.run()
        lengths.add(len(pair.far_log.data) % 100)
    assert len(lengths) > 5


def test_a_cut_in_one_direction_holds_bytes_until_it_is_mended(pair: Pair) -> None:
    pair.network.cut("c", "s")
    pair.near.write(b"there")
    pair.far.write(b"back")
    pair.run()
    assert (pair.far_log.data, pair.near_log.data) == (b"", b"back")
    pair.network.mend("c", "s")
    pair.run()
    assert pair.far_log.data == b"there"


def test_an_orderly_end_comes_after_the_bytes_and_through_a_cut(pair: Pair) -> None:
    pair.near.write(b"last words")
    pair.network.cut("c", "s")
    pair.near.write(b", really")
    pair.near.close()
    pair.run()
    assert (pair.far_log.data, pair.far_log.closed) == (b"last words", [])
    pair.network.mend("c", "s")
    pair.run()
    assert (pair.far_log.data, len(pair.far_log.closed)) == (b"last words, really", 1)
    assert pair.near_log.closed == [], "who closes is not told"


def test_a_partition_cuts_groups_both_ways(pair: Pair) -> None:
    cut = pair.network.partition(["s"])
    assert set(cut) == {("s", "c"), ("c", "s")}
    pair.near.write(b"x")
    pair.far.write(b"y")
    pair.run()
    assert (pair.far_log.data, pair.near_log.data) == (b"", b"")


def test_a_killed_process_tells_its_peers(pair: Pair) -> None:
    pair.server.die()
    pair.network.process_died(pair.server, has_power=True)
    pair.run()
    assert len(pair.near_log.closed) == 1
    pair.dial()
    pair.run()
    assert pair.failed == ["connection refused"]


def test_a_machine_without_power_tells_nobody_until_it_is_back(pair: Pair) -> None:
    pair.server.die()
    pair.server.has_power = False
    pair.network.process_died(pair.server, has_power=False)
    pair.near.write(b"anybody there?")
    pair.dial()
    pair.run(3 * SECOND)
    assert pair.near_log.closed == []
    assert pair.failed == ["no answer"]
    pair.server.rise()
    pair.network.machine_is_back(pair.server)
    pair.run()
    assert len(pair.near_log.closed) == 1
    assert pair.far_log.data == b""


def test_a_stopped_process_gets_its_input_later(pair: Pair) -> None:
    pair.server.pause()
    pair.near.write(b"a")
    pair.run()
    pair.near.write(b"b")
    pair.near.close()
    pair.run()
    assert pair.far_log.data == b""
    pair.server.resume()
    assert (pair.far_log.data, len(pair.far_log.closed)) == (b"ab", 1)


def test_a_writer_hears_when_there_is_room_again(pair: Pair) -> None:
    pair.far.pause_reading()
    pair.near.write(b"x" * SEND_BUFFER_BYTES)
    assert not pair.near.can_write
    pair.run()
    assert (pair.far_log.data, pair.near_log.writable) == (b"", 0)
    pair.far.resume_reading()
    pair.run()
    assert len(pair.far_log.data) == SEND_BUFFER_BYTES
    assert (pair.near.can_write, pair.near_log.writable) == (True, 1)


def test_a_slow_link_takes_its_time(pair: Pair) -> None:
    pair.network.link("c", "s").ns_per_byte = SECOND // 1000
    pair.near.write(b"x" * 500)
    pair.run(400 * MS)
    got = len(pair.far_log.data)
    assert got < 500
    pair.run(200 * MS)
    assert len(pair.far_log.data) == 500


def test_a_connect_waits_out_a_short_cut() -> None:
    pair = Pair()
    pair.network.cut("s", "c")
    pair.dial()
    pair.run(400 * MS)
    assert pair.near is None
    pair.network.mend("s", "c")
    pair.run(SECOND)
    assert pair.near is not None
    assert pair.failed == []


def test_refused_connects() -> None:
    pair = Pair()
    pair.network.refused_share = 1.0
    pair.dial()
    pair.run()
    assert pair.failed == ["connection refused"]


def test_a_link_that_is_wide_again_has_no_late_bytes(pair: Pair) -> None:
    pair.dial()
    pair.run()
    assert pair.near is not None
    widen = pair.network.narrow("c", "s", 100)
    for number in range(4):
        pair.near.write(b"%d" % number * 100)
    pair.run(1500 * MS)
    assert pair.far_log.data == b"0" * 100, "a second for each"
    widen()
    pair.near.write(b"end")
    pair.near.close()
    pair.run(20 * MS)
    assert pair.far_log.data == b"0" * 100 + b"1" * 100 + b"2" * 100 + b"3" * 100 + b"end"
    assert pair.far_log.closed == ["the peer closed the connection"]

"""The proxy between parties: what is held, late and broken, one way and both."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest

from support.waiting import until
from tests.soak.cluster.flows import OPEN, Flow, FlowTable
from tests.soak.cluster.links import ADVERTISED, BEHIND
from tests.soak.cluster.network import Network, NetworkError


class Echo(threading.Thread):
    """A party: it sends back what it gets, and notes it."""

    def __init__(self):
        super().__init__(daemon=True)
        self.listener = socket.create_server((BEHIND, 0))
        self.port = self.listener.getsockname()[1]
        self.got = b""
        self.connections = 0

    def run(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection):
        with connection:
            try:
                while data := connection.recv(100):
                    self.got += data
                    connection.sendall(data)
            except OSError:
                return


@pytest.fixture
def echo():
    echo = Echo()
    echo.start()
    yield echo
    echo.listener.close()


@pytest.fixture
def network(echo):
    with Network() as network:
        network.serve("b", echo.port)
        yield network


def dial(echo):
    return socket.create_connection((ADVERTISED, echo.port), 20)


def is_broken(client):
    """Whether the other side has ended the connection, one way or another."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_bytes_pass_both_ways(network, echo):
    with dial(echo) as client:
        client.sendall(b"hello")
        assert client.recv(5) == b"hello"


def test_a_held_flow_keeps_what_it_gets_until_it_is_healed(network, echo):
    with dial(echo) as client:
        client.sendall(b"1")
        assert client.recv(1) == b"1"
        network.hold("client", "b")
        client.sendall(b"2")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        assert echo.got == b"1"
        network.heal()
        client.settimeout(20)
        assert client.recv(1) == b"2"


def test_a_flow_is_cut_one_way_only(network, echo):
    with dial(echo) as client:
        client.sendall(b"1")
        assert client.recv(1) == b"1"
        network.hold("b", "client")
        client.sendall(b"2")
        until(lambda: echo.got == b"12")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        network.heal()
        client.settimeout(20)
        assert client.recv(1) == b"2"


def test_nobody_is_reached_through_a_cut_link(network, echo):
    network.cut("client", "b")
    with dial(echo) as client:
        client.sendall(b"1")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        assert not echo.connections
        network.heal()
        client.settimeout(20)
        assert client.recv(1) == b"1"


def test_a_flow_is_late(network, echo):
    network.delay("client", "b", 0.2)
    with dial(echo) as client:
        begun = time.monotonic()
        client.sendall(b"1")
        assert client.recv(1) == b"1"
        assert time.monotonic() - begun >= 0.2


def test_connections_are_broken_and_new_ones_pass(network, echo):
    with dial(echo) as client:
        client.sendall(b"1")
        assert client.recv(1) == b"1"
        assert network.reset("b", "client") == 1
        assert is_broken(client)
    with dial(echo) as client:
        client.sendall(b"2")
        assert client.recv(1) == b"2"


PARTY = """
import socket, sys
client = socket.create_connection(("{host}", {port}), 20)
client.sendall(b"x")
print(client.recv(1), flush=True)
sys.stdin.readline()
client.sendall(b"y")
print(client.recv(1), flush=True)
"""


def test_who_dials_is_known_by_its_process(network, echo):
    """A node's connections are told from a client's: only its flow is held here."""
    program = PARTY.format(host=ADVERTISED, port=echo.port)
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.readline()\n" + program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as node:  # fmt: skip
        network.runs("a", node.pid)
        node.stdin.write("\n")
        node.stdin.flush()
        assert node.stdout.readline() == "b'x'\n"
        network.hold("a", "b")
        node.stdin.write("\n")
        node.stdin.flush()
        with dial(echo) as client:
            client.sendall(b"z")
            assert client.recv(1) == b"z"
        assert echo.got == b"xz"
        network.heal()
        assert node.stdout.readline() == "b'y'\n"


def test_a_party_with_a_port_of_its_own_for_each_source(echo):
    with Network() as network:
        port = network.serve("m0", 0, source="a", to_port=echo.port)
        network.hold("b", "m0")
        with socket.create_connection((BEHIND, port), 20) as client:
            client.sendall(b"1")
            assert client.recv(1) == b"1"
            network.hold("a", "m0")
            client.sendall(b"2")
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(1)


def test_a_node_that_is_down_is_refused(network, echo):
    echo.listener.shutdown(socket.SHUT_RDWR)  # the thread that accepts holds it open otherwise
    echo.listener.close()
    with dial(echo) as client:
        assert is_broken(client)


def test_orders_that_make_no_sense_are_refused(network):
    with pytest.raises(NetworkError, match="two ends"):
        network.hold("a", "a")
    with pytest.raises(NetworkError, match="0 to 5 s"):
        network.delay("a", "b", 6.0)


def test_the_proxy_ends_with_who_started_it(network):
    network._process.stdin.close()
    assert network._process.wait(20) == 0


def test_a_proxy_that_is_gone_is_told(network):
    network._process.kill()
    network._process.wait()
    with pytest.raises(NetworkError, match="the proxy"):
        network.heal()


def test_the_table_forgets_open_flows():
    flows = FlowTable()
    flows.set("a", "b", Flow(is_held=True))
    assert flows.flow("a", "b").is_held
    assert flows.flow("b", "a") == OPEN
    flows.set("a", "b", OPEN)
    assert not flows._flows

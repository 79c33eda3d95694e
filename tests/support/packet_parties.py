"""Two parties of `tests.soak.cluster.packets`, and what passes between all while flows are held.

    unshare --user --map-root-user --net --mount python -m support.packet_parties

Prints a line for each flow that was held: what did not arrive, and what did.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
import sys

from tests.soak.cluster.links import CLIENT
from tests.soak.cluster.packets import PORT, PacketNetwork, address_of

QUIET_S = 0.4
"""How long nothing arrives until it counts as held. TCP repeats a packet after 0.2 s."""
ECHO = f"""
import socket, sys
listener = socket.create_server((sys.argv[1], {PORT}))
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    while data := connection.recv(100):
        print(data.decode(), flush=True)
        connection.sendall(data)
"""
DIAL = f"""
import socket, sys
with socket.create_connection((sys.argv[1], {PORT}), 20) as peer:
    print("connected", flush=True)
    for line in sys.stdin:
        peer.sendall(line.strip().encode())
        print(peer.recv(100).decode(), flush=True)
"""


class Lines:
    """The lines that a process prints."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())

    def read(self) -> str:
        """Return the next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def is_quiet(self) -> bool:
        """Whether nothing comes for a while."""
        return not select.select([self.process.stdout], [], [], QUIET_S)[0]


def held(network: PacketNetwork, source: str, target: str, peer: Lines, echo: Lines) -> None:
    """Hold a flow between a peer that has dialled and the echo; see what arrives, then heal."""
    is_request = target == "b"
    network.hold(source, target)
    peer.say("x")
    arrived = "" if is_request else echo.read()
    is_quiet = peer.is_quiet() and echo.is_quiet()
    network.heal()
    if is_request:
        arrived = echo.read()
    print(f"{source} to {target}: {'held' if is_quiet else 'passes'}, {arrived}{peer.read()}")


def main() -> None:
    with PacketNetwork() as network, contextlib.ExitStack() as stack:

        def started(*command: str) -> Lines:
            lines = Lines(*command)
            stack.callback(lines.process.communicate)
            stack.callback(lines.process.kill)
            return lines

        for party in "ab":
            network.make(party)
        address = address_of("b")
        python = (sys.executable, "-u", "-c")
        for party, inside in (("a", network.inside("a")), (CLIENT, [])):
            echo = started(*network.inside("b"), *python, ECHO, address)
            assert echo.read() == "ready"
            peer = started(*inside, *python, DIAL, address)
            assert peer.read() == "connected"
            held(network, party, "b", peer, echo)
            held(network, "b", party, peer, echo)
            echo.process.kill()
            echo.process.wait()


if __name__ == "__main__":
    main()

"""The same cluster with packets instead of a proxy: each node and etcd in a network namespace.

    a 10.77.1.2 ──┐
    b 10.77.2.2 ──┤
    c 10.77.3.2 ──┼── this process, which forwards packets, or drops those of a flow that is held
    e 10.77.9.2 ──┘

Nobody is told that a packet was dropped, and TCP sends it again: as with a real cable. Clients are
in this process. Between them and a node, packets of its key-value port are dropped where they
arrive; the admin port stays open for whoever runs this.

It runs in a namespace of its own, which root may make, and other users where the kernel lets them:

    unshare --user --map-root-user --net --mount \
        python -m tests.soak.cluster.packets FOLDER SEED [FAULT ...]
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from clients.testing import ServerRefusedError, ServerStartError
from support.server import DcpdProcess
from support.waiting import until
from tests.soak.cluster.links import CLIENT
from tests.soak.cluster.nodes import FaultyCluster

USER: Final = "admin"
PASSWORD: Final = "no-secret"
PORT: Final = 11210
ADMIN_PORT: Final = 8091
ETCD: Final = "m0"
NUMBERS: Final = {"a": 1, "b": 2, "c": 3, "d": 4, ETCD: 9}
HELD_PREFERENCE: Final = 50
"""Of the rules that drop packets: before those that forward or take them."""
LOCAL_PREFERENCE: Final = 100
"""Of the rule that takes packets for this machine. It is 0 at first: before all others."""
IN_USER_NAMESPACE: Final = ("unshare", "--user", "--map-root-user", "--net", "--mount")
FAULTS: Final = (
    "cut pair", "cut one way", "cut from nodes", "deaf node", "cut from etcd", "no etcd",
    "cut from clients", "cut from all", "kill node", "freeze node",
)  # fmt: skip


def why_not() -> str:
    """Return why this machine lets us make no network namespaces; "" if it does."""
    try:
        done = subprocess.run(
            [*IN_USER_NAMESPACE, "ip", "link", "add", "v0", "type", "veth"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        return f"the command {error.filename} is missing"
    return done.stderr.strip() and f"network namespaces are not permitted: {done.stderr.strip()}"


def run(*words: str) -> None:
    """Run a command. Raises CalledProcessError."""
    subprocess.run(words, check=True, capture_output=True, text=True)


def address_of(party: str) -> str:
    """Return the IP address of a party."""
    return f"10.77.{NUMBERS[party]}.2"


def client_address(party: str) -> str:
    """Return the IP address from which clients reach a party."""
    return f"10.77.{NUMBERS[party]}.1"


class PacketNetwork:
    """What `Network` does, with packets."""

    def __init__(self) -> None:
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        """Party -> a process that keeps its namespace."""
        self._held: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> PacketNetwork:
        run("ip", "link", "set", "lo", "up")
        run("sysctl", "-w", "net.ipv4.ip_forward=1")
        _may_drop_local()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait()

    def make(self, party: str) -> None:
        """Make the namespace of a party, and its cable to here."""
        number, here = NUMBERS[party], client_address(party)
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._holders[party] = holder
        own = Path("/proc/self/ns/net").readlink()
        until(lambda: Path(f"/proc/{holder.pid}/ns/net").readlink() != own)
        inner = [*self.inside(party), "ip"]
        name = f"veth{number}"
        run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns",
            str(holder.pid))  # fmt: skip
        run("ip", "addr", "add", f"{here}/24", "dev", name)
        run("ip", "link", "set", name, "up")
        run(*inner, "link", "set", "lo", "up")
        run(*inner, "addr", "add", f"{address_of(party)}/24", "dev", "eth0")
        run(*inner, "link", "set", "eth0", "up")
        run(*inner, "route", "add", "default", "via", here)
        _may_drop_local(*self.inside(party))

    def inside(self, party: str) -> list[str]:
        """Return the words before a command that runs in a party's namespace."""
        return ["nsenter", "--target", str(self._holders[party].pid), "--net"]

    def runs(self, node: str, pid: int) -> None:
        """Do nothing: addresses say who is who."""

    def hold(self, source: str, target: str) -> None:
        """Drop what one party sends to the other."""
        with self._lock:
            if (source, target) not in self._held:
                self._held.add((source, target))
                self._rule("add", source, target)

    def cut(self, one: str, other: str) -> None:
        """Drop everything between two parties."""
        self.hold(one, other)
        self.hold(other, one)

    def heal(self) -> None:
        """Drop nothing any more."""
        with self._lock:
            while self._held:
                self._rule("del", *self._held.pop())

    def _rule(self, what: str, source: str, target: str) -> None:
        where: list[str] = []
        if source == CLIENT:
            where = self.inside(target)
            ends = [client_address(target), address_of(target), "dport"]
        elif target == CLIENT:
            ends = [address_of(source), client_address(source), "sport"]
        else:
            ends = [address_of(source), address_of(target)]
        begin, end, *port = ends
        of_port = ["ipproto", "tcp", *port, str(PORT)] if port else []
        run(*where, "ip", "rule", what, "from", begin, "to", end, *of_port,
            "pref", str(HELD_PREFERENCE), "blackhole")  # fmt: skip


def _may_drop_local(*inside: str) -> None:
    """Let rules drop packets for a namespace itself, too."""
    rule = ("lookup", "local", "pref")
    run(*inside, "ip", "rule", "add", *rule, str(LOCAL_PREFERENCE))
    run(*inside, "ip", "rule", "del", *rule, "0")


class PacketEtcd:
    """One member of etcd in its namespace."""

    def __init__(self, folder: Path, network: PacketNetwork) -> None:
        url = f"http://{address_of(ETCD)}:2379"
        with (folder / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *network.inside(ETCD), "etcd", "--data-dir", str(folder / "etcd"),
                    "--listen-client-urls", url, "--advertise-client-urls", url,
                    "--unsafe-no-fsync", "--heartbeat-interval", "10", "--election-timeout", "100",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        until(lambda: _answers(f"{url}/health"))

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return b"true" in answer.read()
    except OSError:
        return False


class PacketNode(DcpdProcess):
    """A node in its namespace."""

    def __init__(self, data: Path, inside: list[str], host: str, *arguments: str) -> None:
        super().__init__(data, *arguments)
        self.host, self._inside = host, inside

    @property
    def address(self) -> str:
        """Where clients reach it, with the login."""
        return f"dcpd://{USER}:{PASSWORD}@{self.host}:{PORT}"

    def start(self) -> None:
        """Start, and return when it is ready."""
        with self.log_path.open("a") as log:
            self._process = subprocess.Popen(
                [
                    *self._inside, sys.executable, "-m", "dcp.server.main", "--host", self.host,
                    "--port", str(PORT), "--admin-port", str(ADMIN_PORT), "--data", str(self.data),
                    "--print", "json", *self._arguments,
                ],
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            self.kill()
            raise ServerStartError(self.log_path.read_text()[-4000:])

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask the admin API."""
        login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        request = urllib.request.Request(
            f"http://{self.host}:{ADMIN_PORT}{path}", method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Basic {login}", "content-type": "application/json"},
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise ServerRefusedError(error.read().decode(), status=error.code) from error
        except HTTPException as error:
            raise ConnectionError(str(error)) from error


class PacketCluster(FaultyCluster):
    """`FaultyCluster` with packets."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {}, members=1)
        self.network: Any = PacketNetwork()

    def _start_etcd(self) -> Any:
        self.network.make(ETCD)
        return PacketEtcd(self.folder, self.network)

    def _meta_url(self, name: str) -> str:
        return f"etcd://{address_of(ETCD)}:2379"

    def _new_node(self, name: str, arguments: list[str]) -> DcpdProcess:
        self.network.make(name)
        path = self.folder / "password"
        path.touch(mode=0o600)
        path.write_text(PASSWORD)
        return PacketNode(
            self.folder / name, self.network.inside(name), address_of(name),
            "--admin-password-file", str(path), *arguments,
        )  # fmt: skip

    def address(self, name: str) -> str:
        """Return where clients reach a node."""
        return self.nodes[name].address

    def everywhere(self) -> str:
        """Return the address of all nodes that there are now, for clients."""
        hosts = ",".join(f"{address_of(name)}:{PORT}" for name in self.nodes)
        return f"dcpd://{USER}:{PASSWORD}@{hosts}"


async def main(folder: Path, seed: int, names: Sequence[str]) -> None:
    """Run a round with these faults, or with all that this network has."""
    from tests.soak.cluster.run import run_on

    cluster = PacketCluster(folder)
    print((await run_on(cluster, seed, names or FAULTS)).words())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.getLogger("dcpd.consumer").setLevel(logging.ERROR)
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))

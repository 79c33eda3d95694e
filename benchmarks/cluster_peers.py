"""Clusters of three servers that dcpd's is compared with, on this machine.

- NATS JetStream, a bucket with three replicas. No server syncs before the answer: its default.
- etcd, three members. Each syncs before the answer.
- Redis, appendfsync always, with two replicas. A batch is SET and XADD for each operation, and one
  WAIT 2 at its end, so the answer comes when both replicas have the changes. They do not wait for
  their own disks: WAITAOF came with Redis 7.2.

Clients are connected to the leader of the bucket, of etcd and of Redis, as the drivers of NATS and
etcd do not do by themselves: it is the shortest way.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks import etcd, nats, workload
from benchmarks.peers import READY_SECONDS, PeerError, free_ports
from clients.cli.node.answers import AnswerError

NAMES: Final = "abc"
POLL_SECONDS: Final = 0.05
_NATS: Final = """\
server_name: {name}
listen: "127.0.0.1:{port}"
ping_interval: "1h"
jetstream {{ store_dir: {folder}, max_mem: 1G, max_file: 40G }}
cluster {{ name: benchmark, listen: "127.0.0.1:{peer}", routes: [{routes}] }}
"""


class PeerCluster:
    """Three processes. A context manager: `with` starts them, and kills them at the end. `port` is
    that of the leader.
    """

    protocol = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self.ports = free_ports(2 * len(NAMES))
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> PeerCluster:
        try:
            for number, name in enumerate(NAMES):
                folder = self.folder / name
                folder.mkdir(parents=True)
                with (self.folder / f"{name}.out").open("wb") as output:
                    self._processes.append(
                        subprocess.Popen(
                            self.command(number, folder), stdout=output, stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )  # fmt: skip
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _wait(self) -> None:
        reason: object = None
        until = time.monotonic() + READY_SECONDS
        while time.monotonic() < until:
            try:
                self.port = self.leader()
            except (OSError, AnswerError, ValueError, KeyError) as error:
                reason = error
            if self.port:
                return
            time.sleep(POLL_SECONDS)
        outputs = self.folder.glob("*.out")
        said = "".join(path.read_text(errors="replace")[-500:] for path in outputs)
        raise PeerError(f"three servers had no leader in {READY_SECONDS:.0f} s ({reason}): {said}")

    def command(self, number: int, folder: Path) -> list[str]:
        """The command line of a server."""
        raise NotImplementedError

    def leader(self) -> int:
        """The port of the leader, once all three take part; 0: not yet."""
        raise NotImplementedError


class NatsCluster(PeerCluster):
    """See the module."""

    protocol = "nats"

    def command(self, number: int, folder: Path) -> list[str]:
        path = folder / "nats.conf"
        peers = self.ports[len(NAMES) :]
        content = _NATS.format(
            name=NAMES[number], port=self.ports[number], peer=peers[number],
            folder=json.dumps(str(folder / "jetstream")),
            routes=", ".join(f'"nats://127.0.0.1:{port}"' for port in peers),
        )  # fmt: skip
        path.write_text(content)
        return ["nats-server", "--config", str(path)]

    def leader(self) -> int:
        info = nats.request(self.ports[0], f"$JS.API.STREAM.INFO.{nats.STREAM}", {})
        if "error" in info:
            nats.create_bucket(self.ports[0], replicas=len(NAMES))
            return 0
        cluster = info["cluster"]
        others = cluster.get("replicas", [])
        if not cluster.get("leader") or not all(each["current"] for each in others):
            return 0
        return self.ports[NAMES.index(cluster["leader"])]


class EtcdCluster(PeerCluster):
    """See the module."""

    protocol = "etcd"

    def command(self, number: int, folder: Path) -> list[str]:
        peers = dict(zip(NAMES, self.ports[len(NAMES) :], strict=True))
        return etcd.command(folder, self.ports[number], peers, NAMES[number])

    def leader(self) -> int:
        found = [etcd.status(port) for port in self.ports[: len(NAMES)]]
        leaders = [each["leader"] for each in found]
        if len(set(leaders)) > 1 or leaders[0] == "0":
            return 0
        members = [each["header"]["member_id"] for each in found]
        return self.ports[members.index(leaders[0])]


class RedisReplicas(PeerCluster):
    """See the module."""

    protocol = "resp-wait"

    def command(self, number: int, folder: Path) -> list[str]:
        follows = ("--replicaof", "127.0.0.1", str(self.ports[0])) if number else ()
        return [
            "redis-server", "--bind", "127.0.0.1", "--port", str(self.ports[number]),
            "--appendonly", "yes", "--appendfsync", "always", "--save", "",
            "--daemonize", "no", "--dir", str(folder), "--repl-diskless-sync-delay", "0", *follows,
        ]  # fmt: skip

    def leader(self) -> int:
        with socket.create_connection(("127.0.0.1", self.ports[0]), timeout=10) as connection:
            connection.sendall(workload.resp_command(b"INFO", b"replication"))
            text = connection.recv(65_536)
        return self.ports[0] if text.count(b"state=online") == len(NAMES) - 1 else 0


PEER_CLUSTERS: Final[dict[str, Callable[[Path], PeerCluster]]] = {
    "nats": NatsCluster,
    "etcd": EtcdCluster,
    "redis": RedisReplicas,
}

"""One member of etcd on loopback, as the metadata store of a demo.

    DIR/etcd          its data
    DIR/etcd.log      its log
    DIR/etcd.ports    client and peer port: nodes of the demo know the former

It keeps its files between demos, and syncs nothing: a demo survives no power cut.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Final

from clients.errors import ConnectError

PORTS_FILE: Final = "etcd.ports"
START_S: Final = 20.0
POLL_S: Final = 0.1
STOP_S: Final = 5.0
_HOST: Final = "127.0.0.1"


class DemoEtcd:
    """One member of etcd on loopback, and its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        """The URL of the metadata store, once it was started."""

    def start(self) -> None:
        """Start it, and wait until it answers. Raises ConnectError."""
        program = shutil.which("etcd")
        if program is None:
            raise ConnectError(
                "--meta etcd needs the program etcd, which is not installed",
                hint="Install it (sudo apt-get install etcd-server), or leave --meta out.",
            )
        port, peer_port = self._ports()
        client, peer = f"http://{_HOST}:{port}", f"http://{_HOST}:{peer_port}"
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - the program that was asked for
                [
                    program, "--name", "demo", "--data-dir", str(self._folder / "etcd"),
                    "--listen-client-urls", client, "--advertise-client-urls", client,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", f"demo={peer}", "--unsafe-no-fsync", "--logger", "zap",
                ],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._wait(client)
        self.url = f"etcd://{_HOST}:{port}"

    def stop(self) -> None:
        """End it."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _ports(self) -> tuple[int, int]:
        """Return the ports of this demo's etcd; the first start chooses free ones."""
        path = self._folder / PORTS_FILE
        with contextlib.suppress(FileNotFoundError):
            port, peer_port = json.loads(path.read_text())
            return int(port), int(peer_port)
        with socket.create_server((_HOST, 0)) as one, socket.create_server((_HOST, 0)) as other:
            ports: tuple[int, int] = one.getsockname()[1], other.getsockname()[1]
        path.write_text(json.dumps(ports))
        return ports

    def _wait(self, client: str) -> None:
        assert self._process is not None
        give_up_s = time.monotonic() + START_S
        while time.monotonic() < give_up_s and self._process.poll() is None:
            with contextlib.suppress(OSError):
                address = f"{client}/health"
                with urllib.request.urlopen(address, timeout=2) as answer:  # noqa: S310 - loopback
                    if b"true" in answer.read():
                        return
            time.sleep(POLL_S)
        raise ConnectError("etcd does not start", hint=f"See {self._folder / 'etcd.log'}.")

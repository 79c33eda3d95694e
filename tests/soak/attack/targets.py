"""A server that several cases share, with documents that no attack may change.

It has TLS ports, small limits, and three users: `root` may do everything; `noisy` may read and
write keys with prefixes that no document has; `prober`, the probe's user, may read and stream.
"""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import Any, Final

from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from support.raw_client import RawClient
from support.server import TlsDcpd
from tests.soak.attack.case import AttackedServer, AttackError, Case, Fault
from tests.soak.attack.probe import Watched
from tests.soak.attack.truth import History, get_all, judge, keys_in, value_of, with_tokens
from vbucket.model.ids import NUM_VBUCKETS, vbucket_of

MIB: Final = 1 << 20
VALUE_BYTES_MAX: Final = MIB
RECEIVE_BYTES_MAX: Final = 8 * MIB
SEND_BYTES_MAX: Final = 8 * MIB
CONNECTIONS_MAX: Final = 200
ADMIN_CONNECTIONS_MAX: Final = 48
PASSWORDS: Final = {"root": "correct-horse", "noisy": "battery-staple", "prober": "red-herring-1"}
NOISY_PREFIXES: Final = ("a", "b", "longer", "noise")
ROLES: Final[dict[str, dict[str, Any]]] = {
    "root": {role: [{}] for role in ("read", "write", "stream", "admin")},
    "noisy": {
        "read": [{"prefix": prefix} for prefix in NOISY_PREFIXES],
        "write": [{"prefix": prefix} for prefix in NOISY_PREFIXES],
    },
    "prober": {"read": [{}], "stream": [{}]},
}
SETTLE_S: Final = 25.0
"""Time for a server to release everything after an attack."""
FAILURES: Final = ("dcpd_session_failures_total", "dcpd_housekeeping_failures_total")
"""Counters of unexpected exceptions."""


class AttackedTls(TlsDcpd, AttackedServer):
    """A server with TLS ports whose log is searched for tracebacks."""

    @property
    def admin_tls_port(self) -> int:
        found = re.search(r"https://127\.0\.0\.1:(\d+)", self.output)
        assert found, self.output
        return int(found[1])


class Target:
    """See the module."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.needs_login = draw.random() < 0.5
        self.server = AttackedTls(
            folder,
            "--value-bytes-max", str(VALUE_BYTES_MAX), "--connections-max", str(CONNECTIONS_MAX),
            "--receive-buffers-bytes-max", str(RECEIVE_BYTES_MAX),
            "--send-buffers-bytes-max", str(SEND_BYTES_MAX),
            "--admin-connections-max", str(ADMIN_CONNECTIONS_MAX), "--handshake-timeout", "3s",
            "--memtable-bytes", "4MiB", "--anonymous", "off" if self.needs_login else "on",
        )  # fmt: skip
        self.server.start()
        try:
            for name, roles in ROLES.items():
                body = {"name": name, "password": PASSWORDS[name], "roles": roles}
                self.server.ask("POST", "/api/v1/users", body)
            self.history = History(draw.sample(range(NUM_VBUCKETS), 8))
            keys = keys_in(self.history.changes, 60)
            self.large = keys[:3]
            with self.client("root") as client:
                large = [(key, bytes(900_000), 0) for key in self.large]
                small = [(key, value_of(key, 1), 0) for key in keys[3:]]
                self.history.write(with_tokens(client), large + small)
                self._warm_up(client)
        except BaseException:
            self.server.close()
            raise
        self.rss_bytes = resident_bytes(self.server.pid)

    def close(self) -> None:
        self.server.close()

    def client(self, name: str, from_host: str = "127.0.0.1") -> RawClient:
        return RawClient(self.server.port, name, PASSWORDS[name], from_host)

    def watch(self, case: Case) -> None:
        key = self.history.keys[10]
        watched = Watched(
            self.server.port, self.server.admin_port, key.decode(), None, "prober",
            PASSWORDS["prober"],
        )  # fmt: skip
        case.watch(watched)

    def check(self, case: Case) -> None:
        """Require that it runs, has released what it held for clients, and has its documents."""
        case.rest()
        self.server.check(case)
        self.settle(case)
        with self.client("root") as client:
            judge(get_all(client, self.history.keys), self.history.known()).check()
        names = sorted(self.server.ask("GET", "/api/v1/users")["users"])
        case.demand(names == sorted(ROLES), Fault.WRONG, f"the users are {names}")

    def settle(self, case: Case) -> None:
        """Wait until no memory and no connection is held for a client."""
        give_up_at_s = time.monotonic() + SETTLE_S
        while True:
            metrics = self.server.metrics()
            held = {
                name: metrics[name]
                for name in ("dcpd_receive_buffer_bytes", "dcpd_send_buffer_bytes")
                if metrics[name]
            }
            if metrics["dcpd_connections"] > 0:
                held["dcpd_connections"] = metrics["dcpd_connections"]
            if metrics["dcpd_admin_connections"] > 1:
                held["dcpd_admin_connections"] = metrics["dcpd_admin_connections"]
            if not held:
                break
            late = time.monotonic() > give_up_at_s
            case.demand(not late, Fault.BROKEN, f"not released after {SETTLE_S:g} s: {held}")
            time.sleep(0.1)
        for name, value in metrics.items():
            if name.partition("{")[0] in FAILURES and value:
                case.find(Fault.BROKEN, f"{name} is {value:g}: {self.server.log_path}")

    def _warm_up(self, client: RawClient) -> None:
        """Read large values, so that memory is measured after the process has grown for them."""
        for _ in range(20):
            for key in self.large:
                client.send(pack_request(Opcode.GET, key=key, vb_id=vbucket_of(key)))
                if client.receive() is None:
                    raise AttackError(Fault.BROKEN, "the server closed")


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0

"""`DcpServer`: a dcpd process on free ports, with methods that cause failovers, faults and more.

It starts in 0.2 s. A call returns when it has taken effect; changes of a partition are durable
then. A refused call raises ServerRefusedError with the server's message.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from base64 import b64encode
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from urllib.parse import urlencode

from clients.address import parse_address
from clients.errors import DcpdError
from clients.kv.sync_client import SyncKv
from dcp.server.net.fixed_port import free_port

START_TIMEOUT_S: Final = 20.0
STOP_TIMEOUT_S: Final = 120.0
"""More than a node of a cluster takes at most to hand its partitions over before it stops."""
REQUEST_TIMEOUT_S: Final = 20.0
PORT_DRAWS: Final = 3
"""A port that is free when it is drawn may be taken when the server begins to listen."""
_TAKEN: Final = "is in use"
_KEY_VALUE: Final = re.compile(r"key-value\s+127\.0\.0\.1:(\d+)")
_ADMIN: Final = re.compile(r"admin\s+http://127\.0\.0\.1:(\d+)")
_LAST_LINE: Final = "  try "
"""Beginning of the last line that a starting server prints: a command to try."""
_GUEST: Final = "Basic " + b64encode(b"guest:guest").decode()


def _kept_port(port: int) -> str:
    """Return the port that a server has, or one for its first start."""
    return str(port or free_port("127.0.0.1", random.SystemRandom()) or 0)


class ServerStartError(DcpdError):
    """The server did not start. The text contains the end of its log."""


class ServerRefusedError(DcpdError):
    """The server refused a call. `status` is the HTTP status, the text says why."""


class DcpServer:
    """A dcpd process on free ports, with methods that cause failovers, faults and more.

    A context manager: `with` starts the server, and kills it at the end. A call returns when it has
    taken effect. A refused call raises ServerRefusedError.

    `data` is the data folder; the default is a temporary folder that is deleted at the end.
    `arguments` are passed to dcpd, for example "--durability", "interval".
    """

    start_timeout_s = START_TIMEOUT_S
    """A start that takes longer fails."""

    def __init__(self, data: str | Path | None = None, *arguments: str) -> None:
        self._own_folder = Path(tempfile.mkdtemp(prefix="dcpd-")) if data is None else None
        self.data = (self._own_folder or Path()) / "dcpd-data" if data is None else Path(data)
        self.log_path = self.data.with_name(f"{self.data.name}.log")
        """The server's log. All starts append to the same file."""
        self.output = ""
        """The server's output at start."""
        self.port = 0
        """The port for key-value and DCP. A restart keeps it. It is drawn below the range from
        which the kernel takes ports of outgoing connections, so none has it meanwhile."""
        self.admin_port = 0
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> DcpServer:
        """Start."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill the server; remove the folder if it is a temporary one."""
        if self._process is not None:
            self.kill()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder)

    # -- the process -----------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """HOST:PORT for key-value and DCP clients."""
        return f"127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        """URL of the admin API; user guest, password guest."""
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def runs(self) -> bool:
        """Whether there is a process."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    def start(self) -> None:
        """Start, and return when the server is ready. Raises ServerStartError."""
        assert self._process is None, "the server runs already"
        for _ in range(1 if self.port else PORT_DRAWS):
            arguments = [
                "--port", _kept_port(self.port), "--admin-port", _kept_port(self.admin_port),
                "--data", str(self.data), *self._arguments,
            ]  # fmt: skip
            self._process = process = self._launch(arguments)
            self.output = self._read_output(process)
            key_value, admin = _KEY_VALUE.search(self.output), _ADMIN.search(self.output)
            if key_value is not None and admin is not None:
                self.port, self.admin_port = int(key_value[1]), int(admin[1])
                return
            self.kill()
            why = self.log_path.read_text()[-4000:]
            if _TAKEN not in why:
                break
        raise ServerStartError(f"the server did not start: {why}")

    def _launch(self, arguments: list[str]) -> subprocess.Popen[str]:
        """Start the process. Its stderr goes to the log."""
        with self.log_path.open("a") as log:
            return subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-m", "dcp.server.main", *arguments],
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def _read_output(self, process: subprocess.Popen[str]) -> str:
        output = ""
        watchdog = threading.Timer(self.start_timeout_s, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                output += line
                if line.startswith(_LAST_LINE):
                    break
        finally:
            watchdog.cancel()
        return output

    def kill(self) -> int:
        """Kill the server (SIGKILL)."""
        return self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Stop the server cleanly (SIGTERM); return its exit code."""
        return self._end(signal.SIGTERM)

    def restart(self) -> None:
        """Kill the server if it runs, and start it again on the same folder and ports."""
        if self._process is not None:
            self.kill()
        self.start()

    def _end(self, number: signal.Signals) -> int:
        process = self._process
        assert process is not None, "the server does not run"
        process.send_signal(number)
        code = process.wait(STOP_TIMEOUT_S)
        assert process.stdout is not None
        process.stdout.close()
        self._process = None
        return code

    # -- clients ---------------------------------------------------------------------------------

    def connect(self) -> SyncKv:
        """Return a key-value client; a context manager."""
        return SyncKv(parse_address(self.address))

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request to the admin API; return the answer as JSON, or as text if it is not JSON.

        Members of `body` that are None are left out. Raises ServerRefusedError.
        """
        connection = HTTPConnection("127.0.0.1", self.admin_port, timeout=REQUEST_TIMEOUT_S)
        headers = {"authorization": _GUEST, "content-type": "application/json"}
        given = {name: value for name, value in (body or {}).items() if value is not None}
        try:
            connection.request(
                method, path, json.dumps(given) if method == "POST" else None, headers
            )
            response = connection.getresponse()
            text = response.read().decode()
            is_json = response.headers.get_content_type().endswith("json")
        finally:
            connection.close()
        answer: Any = json.loads(text) if is_json else text
        if response.status >= 400:
            error = answer["error"]
            raise ServerRefusedError(
                f"{error['what']}: {error['why']}", status=response.status, hint=error["try"]
            )
        return answer

    def status(self) -> dict[str, Any]:
        """Return the server's version, state and content."""
        answer: dict[str, Any] = self.ask("GET", "/api/v1/status")
        return answer

    def metrics(self) -> dict[str, float]:
        """Return the metrics: name, with labels as Prometheus writes them, to value."""
        lines: str = self.ask("GET", "/metrics")
        rows = (line.rpartition(" ") for line in lines.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in rows}

    # -- partitions ------------------------------------------------------------------------------

    def branch(self, vb: int, at: int, *, or_zero: bool = False) -> dict[str, Any]:
        """Undo a partition's changes above seqno `at`, and start a new version there.

        Streams end with reason 6 (rollback). A consumer that saw more gets a ROLLBACK on its next
        request. `or_zero`: go to 0 if history does not reach back to `at`; "reason" says why.
        """
        return self._of_partition(vb, "branch", at=at, or_zero=or_zero or None)

    def compact(
        self,
        vbs: list[int] | None = None,
        *,
        history: str | None = None,
        purge_age: str | None = None,
    ) -> dict[str, Any]:
        """Compact partitions now (None: all). With `history="0s"` no old versions are kept.

        Return the report: numbers of dropped versions and deletions, sizes.
        """
        body = {"vbs": vbs, "history": history, "purge_age": purge_age}
        answer: dict[str, Any] = self.ask("POST", "/api/v1/compact", body)
        return answer

    def failover(self, vb: int, *, lose: int = 0) -> dict[str, Any]:
        """Simulate a failover: start a new version, end streams with reason 2 (state changed).

        `lose`: the promoted replica was this many changes behind.
        """
        return self._of_partition(vb, "failover", lose=lose)

    def set_state(self, vb: int, state: str) -> dict[str, Any]:
        """Make a partition active, replica, pending or dead."""
        return self._of_partition(vb, "state", state=state)

    def purge(self, vb: int, upto: int | None = None) -> dict[str, Any]:
        """Purge deletions up to a seqno (None: as far as possible). History ends there too."""
        return self._of_partition(vb, "purge", upto=upto)

    def explain_rollback(self, vb: int, uuid: int, seqno: int, **more: Any) -> dict[str, Any]:
        """Return how a stream request would be answered, and why.

        `more`: snap_start, snap_end, versions ([[uuid, seqno], ...]), strict, ignore_purged,
        client_purge_seqno.
        """
        return self._of_partition(vb, "explain-rollback", uuid=str(uuid), seqno=seqno, **more)

    def _of_partition(self, vb: int, action: str, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask("POST", f"/api/v1/vbuckets/{vb}/{action}", body)
        return answer

    # -- streams ---------------------------------------------------------------------------------

    def streams(self, *, name: str | None = None, vb: int | None = None) -> list[dict[str, Any]]:
        """Return the open streams: name, peer, vb, state, seqno, lag_items and more."""
        chosen = {key: value for key, value in (("name", name), ("vb", vb)) if value is not None}
        query = f"?{urlencode(chosen)}" if chosen else ""
        streams: list[dict[str, Any]] = self.ask("GET", f"/api/v1/streams{query}")["streams"]
        return streams

    def close_streams(
        self, *, reason: str = "closed", name: str | None = None, vb: int | None = None
    ) -> int:
        """End streams with STREAM_END; return how many. Reasons: ok, closed, state_changed,
        disconnected, too_slow, backfill_failed, rollback, filter_empty, lost_privileges.
        """
        return self._of_streams("close", name=name, vb=vb, reason=reason)

    def slow_streams(
        self, bytes_per_s: int, *, name: str | None = None, vb: int | None = None
    ) -> int:
        """Limit the bytes per second of each stream, open or opened later, until `resume_streams`.

        Return how many are open.
        """
        return self._of_streams("slow", name=name, vb=vb, bytes_per_s=bytes_per_s)

    def stall_streams(self, *, name: str | None = None, vb: int | None = None) -> int:
        """Stop the open streams silently until `resume_streams`; return how many. A stream that is
        opened later is not stopped.
        """
        return self._of_streams("stall", name=name, vb=vb)

    def resume_streams(self, *, name: str | None = None, vb: int | None = None) -> int:
        """Resume slowed or stalled streams, and remove their limits for streams to come."""
        return self._of_streams("resume", name=name, vb=vb)

    def drop_connections(self, *, name: str | None = None, vb: int | None = None) -> int:
        """Cut the connections that have a matching stream, without a STREAM_END."""
        return self._of_streams("drop", name=name, vb=vb)

    def _of_streams(self, action: str, **body: Any) -> int:
        counts: dict[str, int] = self.ask("POST", f"/api/v1/streams/{action}", body)
        return next(iter(counts.values()))

    # -- faults ----------------------------------------------------------------------------------

    def fault(
        self,
        *,
        opcode: str | int | None = None,
        vb: int | None = None,
        status: str | int | None = None,
        delay_ms: int | None = None,
        disconnect: bool | None = None,
        count: int | None = None,
        probability: float | None = None,
        seed: int | None = None,
        rollback_seqno: int | None = None,
    ) -> dict[str, Any]:
        """Add a fault rule: which requests it matches (opcode, vb, count, probability), and what
        happens to them (status, delay_ms, disconnect). Return the rule; pass its "id" to
        `clear_faults`.
        """
        body = {
            "opcode": opcode, "vb": vb, "status": status, "delay_ms": delay_ms,
            "disconnect": disconnect, "count": count, "probability": probability, "seed": seed,
            "rollback_seqno": rollback_seqno,
        }  # fmt: skip
        rule: dict[str, Any] = self.ask("POST", "/api/v1/faults", body)
        return rule

    def faults(self) -> list[dict[str, Any]]:
        """Return the active rules; "met" is the number of requests that a rule matched."""
        rules: list[dict[str, Any]] = self.ask("GET", "/api/v1/faults")["faults"]
        return rules

    def clear_faults(self, fault_id: int | None = None) -> None:
        """Remove one rule, or all."""
        self.ask("DELETE", "/api/v1/faults" + ("" if fault_id is None else f"/{fault_id}"))

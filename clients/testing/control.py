"""The acts of a DcpCluster over HTTP, for tests in other languages. On loopback only.

    POST /ACT      an act of ACTS; its arguments are the members of a JSON object
    GET  /state    the nodes, and the master of each partition

An answer comes when the act has taken effect: 200 with {"result": ...}. Otherwise it is
{"error": {"what", "why", "try"}}: 400 and 404 for a request that names something wrong, 409 if the
cluster refuses it or its effect does not come. Acts happen one after the other.

Web pages cannot act: a request names this machine in `host`, and its body is application/json.
"""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from inspect import Parameter, signature
from typing import Any, Final

from clients.errors import DcpdError
from clients.testing.cluster import DcpCluster, WrongArgumentError

ACTS: Final = (
    "kill", "pause", "resume", "restart", "cut", "heal", "failover", "lose", "branch", "purge",
    "move",
)  # fmt: skip
"""Names of methods of DcpCluster, whose arguments are those of the act."""
BODY_BYTES_MAX: Final = 1 << 16
_KINDS: Final = {"str": (str,), "int": (int,), "int | None": (int, type(None))}


class ControlRefusedError(DcpdError):
    """A request cannot be carried out as it is."""

    def __init__(self, status: HTTPStatus, why: str, hint: str) -> None:
        super().__init__(why, hint=hint)
        self.http_status = status


class ControlServer(ThreadingHTTPServer):
    """See the module. `port` 0: a free one. `serve_forever` serves until `shutdown`."""

    daemon_threads = True

    def __init__(self, cluster: DcpCluster, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._cluster = cluster
        self._turn = threading.Lock()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def state(self) -> dict[str, Any]:
        """Return the answer of /state."""
        return self._cluster.state()

    def act(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry out an act. Raises DcpdError."""
        if name not in ACTS:
            why = f"there is no act {name!r}"
            raise ControlRefusedError(HTTPStatus.NOT_FOUND, why, f"There are {', '.join(ACTS)}.")
        act = getattr(self._cluster, name)
        wanted = signature(act).parameters
        for key in arguments.keys() - wanted.keys():
            self._refuse(name, wanted, f"it takes no {key!r}")
        for key, parameter in wanted.items():
            if key not in arguments:
                if parameter.default is Parameter.empty:
                    self._refuse(name, wanted, f"it needs {key!r}")
            elif type(arguments[key]) not in _KINDS[parameter.annotation]:
                self._refuse(name, wanted, f"{key!r} must be {parameter.annotation}")
        with self._turn:
            return {"result": act(**arguments)}

    def _refuse(self, name: str, wanted: Any, why: str) -> None:
        hint = f"{name} takes {', '.join(map(str, wanted.values())) or 'nothing'}."
        raise ControlRefusedError(HTTPStatus.BAD_REQUEST, why, hint)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: ControlServer

    def do_GET(self) -> None:
        """Answer the state."""
        self._answer("GET")

    def do_POST(self) -> None:
        """Carry out an act."""
        self._answer("POST")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the parent has it
        """Log nothing."""

    def _answer(self, method: str) -> None:
        try:
            status, answer = HTTPStatus.OK, self._done(method)
        except ControlRefusedError as error:
            status, answer = error.http_status, _error("the request cannot be carried out", error)
        except WrongArgumentError as error:
            status, answer = HTTPStatus.NOT_FOUND, _error("there is nothing to act on", error)
        except DcpdError as error:
            status, answer = HTTPStatus.CONFLICT, _error("the act was refused, or waits", error)
        data = json.dumps(answer).encode() + b"\n"
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _done(self, method: str) -> dict[str, Any]:
        name = self.path.strip("/")
        host = self.headers.get("host", "").rpartition(":")[0]
        if host not in {"127.0.0.1", "localhost"}:
            why = f"host {host!r} is not this machine"
            raise ControlRefusedError(HTTPStatus.FORBIDDEN, why, f"Use {self.server.url}.")
        if method == "GET":
            if name != "state":
                why = f"there is nothing at /{name} to read"
                raise ControlRefusedError(HTTPStatus.NOT_FOUND, why, "GET /state, or POST an act.")
            return self.server.state()
        if self.headers.get_content_type() != "application/json":
            why = "the body must be application/json"
            raise ControlRefusedError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, why, "Send that content-type."
            )
        try:
            size = int(self.headers.get("content-length", "0"))
            if not 0 <= size <= BODY_BYTES_MAX:
                raise ValueError(f"{size} bytes")
            body = json.loads(self.rfile.read(size) or b"{}")
        except (ValueError, RecursionError) as error:
            why = f"the body is no JSON object of at most {BODY_BYTES_MAX} bytes: {error}"
            raise ControlRefusedError(
                HTTPStatus.BAD_REQUEST, why, 'Send {} or {"vb": 1}.'
            ) from None
        if not isinstance(body, dict):
            why = "the body is no JSON object"
            raise ControlRefusedError(HTTPStatus.BAD_REQUEST, why, 'Send {} or {"vb": 1}.')
        return self.server.act(name, body)


def _error(what: str, error: DcpdError) -> dict[str, Any]:
    return {"error": {"what": what, "why": str(error), "try": error.hint or ""}}

"""Client of the server's admin HTTP API, for what the key-value protocol cannot do.

The admin port comes from the cluster configuration, which is read over a key-value connection. The
credentials are the same.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

import click

from clients.cli.dcpctl import (
    EXIT_AUTH,
    EXIT_CONFLICT,
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    Target,
)
from clients.errors import ConnectError, DcpdError, OperationTimeoutError
from clients.kv.sync_client import SyncKv
from clients.link.topology import ClusterNode

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

TEMPORARY_REDIRECT: Final = 307
"""Another node serves the partition; the header Location says which."""
HOPS_MAX: Final = 3
_EXIT_CODES: Final = {
    400: EXIT_USAGE,
    401: EXIT_AUTH,
    403: EXIT_AUTH,
    404: EXIT_NOT_FOUND,
    409: EXIT_CONFLICT,
    503: EXIT_UNAVAILABLE,
}


class AdminRequestError(DcpdError):
    """The admin API refused a request. Text and hint come from the server."""

    exit_code = EXIT_FAILED


class AdminClient:
    """Requests to the admin API of one node."""

    def __init__(self, target: Target, node: ClusterNode, *, hops_left: int = HOPS_MAX) -> None:
        if not node.mgmt_port:
            raise ConnectError(
                "the server has no admin port",
                node=node.name,
                hint="Start dcpd with --admin-port.",
            )
        self._node = node
        self._place = f"{node.host}:{node.mgmt_port}"
        self._address = target.address
        self._timeout_s = target.timeout_s
        self._target = target
        self._hops_left = hops_left
        address = target.address
        login = b64encode(f"{address.user}:{address.password}".encode()).decode()
        self._headers = {"Authorization": f"Basic {login}"}

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, form: str | None = None
    ) -> Any:
        """Send a request with a JSON body or a form; return the JSON answer.

        Raises AdminRequestError, ConnectError, OperationTimeoutError.
        """
        payload = form if body is None else json.dumps(body)
        kind = "application/x-www-form-urlencoded" if body is None else "application/json"
        headers = self._headers | ({"Content-Type": kind} if payload is not None else {})
        with self._connection() as connection:
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
            if response.status != TEMPORARY_REDIRECT:
                return _answer(response.status, response.read(), self._place)
            other = self._sent_on(response)
        return other.request(method, path, body, form=form)

    def _sent_on(self, response: HTTPResponse) -> AdminClient:
        """Return a client for the node that serves the partition of a request. It may be another
        one by then, for a moment. Raises AdminRequestError.
        """
        place = urlsplit(response.headers["Location"])
        if self._hops_left == 0 or place.hostname is None or place.port is None:
            raise AdminRequestError(
                "each node says that another one serves the partition", node=self._place,
                hint="It is being moved. Try again.",
            )  # fmt: skip
        node = self._node._replace(host=place.hostname, mgmt_port=place.port)
        return AdminClient(self._target, node, hops_left=self._hops_left - 1)

    @contextmanager
    def lines(self, path: str) -> Iterator[HTTPResponse]:
        """GET a path and yield the response, to be read line by line. The timeout is per read.

        Raises AdminRequestError, ConnectError, OperationTimeoutError.
        """
        with self._connection() as connection:
            connection.request("GET", path, None, self._headers)
            response = connection.getresponse()
            if response.status >= 400:
                _answer(response.status, response.read(), self._place)
            if response.status != TEMPORARY_REDIRECT:
                yield response
                return
            other = self._sent_on(response)
        with other.lines(path) as response:
            yield response

    @contextmanager
    def _connection(self) -> Iterator[HTTPConnection]:
        """Yield a connection; turn its errors into ConnectError or OperationTimeoutError."""
        from http.client import HTTPConnection, HTTPException, HTTPSConnection

        where, port, timeout_s = self._node.host, self._node.mgmt_port, self._timeout_s
        connection: HTTPConnection
        if self._address.is_tls:
            from clients.link.client_tls import client_context

            tls = client_context(self._address)
            connection = HTTPSConnection(where, port, timeout=timeout_s, context=tls)
        else:
            connection = HTTPConnection(where, port, timeout=timeout_s)
        try:
            yield connection
        except BrokenPipeError:
            raise  # the reader of our own output closed it, for example `head`
        except TimeoutError:
            raise OperationTimeoutError(
                f"the admin port did not answer within {timeout_s:g} s", node=self._place
            ) from None
        except (OSError, HTTPException) as error:
            what = f"the connection to the admin port failed: {error}"
            raise ConnectError(what, node=self._place) from error
        finally:
            connection.close()


def admin_of(target: Target, *, vb_id: int | None = None) -> AdminClient:
    """Return a client for the node of a partition, or for the first node."""
    with SyncKv(target.address, timeout_s=target.timeout_s) as kv:
        topology = kv.topology()
    node = topology.nodes[0] if vb_id is None else topology.node_of(vb_id)
    return AdminClient(target, node)


def ask_every_node(
    target: Target, method: str, path: str, body: dict[str, Any] | None = None
) -> list[Any]:
    """Send a request to each node that the map names; return the answers of those that have what
    it is about. Raises AdminRequestError if none has. A node that cannot be reached is named on
    stderr; if none can be, its error is raised.
    """
    with SyncKv(target.address, timeout_s=target.timeout_s) as kv:
        nodes = kv.topology().nodes
    answers, failures, absent = [], list[DcpdError](), list[DcpdError]()
    for node in nodes:
        try:
            answers.append(AdminClient(target, node).request(method, path, body))
        except (ConnectError, OperationTimeoutError) as error:
            failures.append(error)
        except AdminRequestError as error:
            if error.exit_code != EXIT_NOT_FOUND:
                raise
            absent.append(error)
    if not answers:
        raise (absent or failures)[0]
    for failure in failures:
        click.echo(f"dcpctl: not asked: {failure}", err=True)
    return answers


def quoted(name: str) -> str:
    """Return a name, quoted as one segment of a URL path."""
    return quote(name, safe="")


def _answer(status: int, raw: bytes, place: str) -> Any:
    try:
        document = json.loads(raw) if raw else {}
    except ValueError:
        document = {}
    if status < 400:
        return document
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict):
        raise AdminRequestError(
            f"the admin port answered with HTTP status {status}", node=place, status=status
        )
    what, why = error.get("what", f"status {status}"), error.get("why")
    refusal = AdminRequestError(
        f"{what}: {why}" if why else str(what), node=place, status=status, hint=error.get("try")
    )
    refusal.exit_code = _EXIT_CODES.get(status, EXIT_FAILED)
    raise refusal

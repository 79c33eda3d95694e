"""What operators and orchestrators look at.

GET /livez             the process answers                        no login
GET /readyz            200 ready, 503 not (starting, stopping, writes are refused)  no login
GET /metrics           for Prometheus; ?vbuckets=1 adds series for each partition
GET /api/v1/status     what the node is and holds
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from dcp.server.admin.answers import RouteSpec, json_answer, raw_answer
from dcp.server.admin.node_view import NodeView

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

HEALTH_PATHS: Final = frozenset({"/livez", "/readyz"})
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def routes(node: NodeView) -> list[RouteSpec]:
    """Return what can be asked for."""

    async def livez(_request: Request) -> Response:
        return json_answer({"status": "ok"})

    async def readyz(_request: Request) -> Response:
        kind = node.refusal_kind
        if node.is_ready and not kind:
            return json_answer({"status": "ok"})
        document = {"status": "writes are refused" if node.is_ready else "not ready"}
        if node.is_ready:
            document["why"] = kind  # the words, which name folders, are for who logs in: status
        return json_answer(document, HTTPStatus.SERVICE_UNAVAILABLE)

    async def status(_request: Request) -> Response:
        return json_answer(node.status())

    async def metrics(request: Request) -> Response:
        by_vbucket = request.query_params.get("vbuckets", "0") not in {"", "0"}
        return raw_answer(node.metrics(by_vbucket=by_vbucket), METRICS_TYPE)

    return [
        RouteSpec("GET", "/livez", livez, needs_login=False),
        RouteSpec("GET", "/readyz", readyz, needs_login=False),
        RouteSpec("GET", "/metrics", metrics),
        RouteSpec("GET", "/api/v1/status", status),
    ]

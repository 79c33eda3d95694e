"""What operators and orchestrators read.

GET /livez             the process answers                        no login
GET /readyz            200 ready, 503 not (starting, stopping, writes are refused)  no login
GET /metrics           for Prometheus; ?vbuckets=1 adds series for each partition
GET /api/v1/status     the node's state and contents
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from dcp.server.admin.answers import RouteSpec, json_answer, raw_answer
from dcp.server.storage.health import Health

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

HEALTH_PATHS: Final = frozenset({"/livez", "/readyz"})
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def routes(
    health: Health, status: Callable[[], dict[str, Any]], metrics: Callable[..., bytes]
) -> list[RouteSpec]:
    """Return the routes."""

    async def livez(_request: Request) -> Response:
        return json_answer({"status": "ok"})

    async def readyz(_request: Request) -> Response:
        kind = health.refusal_kind
        if health.is_ready and not kind:
            return json_answer({"status": "ok"})
        document = {"status": "writes are refused" if health.is_ready else "not ready"}
        if health.is_ready:
            document["why"] = kind  # the full text names folders, so only `status` shows it
        return json_answer(document, HTTPStatus.SERVICE_UNAVAILABLE)

    async def show_status(_request: Request) -> Response:
        return json_answer(status())

    async def show_metrics(request: Request) -> Response:
        by_vbucket = request.query_params.get("vbuckets", "0") not in {"", "0"}
        return raw_answer(metrics(by_vbucket=by_vbucket), METRICS_TYPE)

    return [
        RouteSpec("GET", "/livez", livez, needs_login=False),
        RouteSpec("GET", "/readyz", readyz, needs_login=False),
        RouteSpec("GET", "/metrics", show_metrics),
        RouteSpec("GET", "/api/v1/status", show_status),
    ]

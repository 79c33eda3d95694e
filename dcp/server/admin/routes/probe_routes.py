"""What operators and orchestrators read.

GET /livez             the process answers                        no login
GET /readyz            200 ready, 503 not (starting, stopping, writes are refused, nothing is served
                       beside an older metadata store)            no login
GET /metrics           for Prometheus; ?vbuckets=1 adds series for each partition
GET /api/v1/status     the node's state and contents
"""

from __future__ import annotations

import re
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from dcp.server.admin.answers import QueryField, RouteSpec, json_answer, raw_answer
from dcp.server.admin.bodies import HealthAnswer
from dcp.server.operate.reports import StatusReport
from dcp.server.storage.health import Health

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

HEALTH_PATHS: Final = frozenset({"/livez", "/readyz"})
PROMETHEUS: Final = "text/plain"
OPENMETRICS: Final = "application/openmetrics-text"
METRICS_TYPE: Final = f"{PROMETHEUS}; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE: Final = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
_QUALITY: Final = re.compile(r"[01](\.[0-9]{0,3})?")


def routes(
    health: Health, status: Callable[[], StatusReport], metrics: Callable[..., bytes]
) -> list[RouteSpec]:
    """Return the routes."""

    async def livez(_request: Request) -> Response:
        return json_answer(HealthAnswer("ok"))

    async def readyz(_request: Request) -> Response:
        kind = health.unready_kind
        if health.is_ready and not kind:
            return json_answer(HealthAnswer("ok"))
        if health.is_ready:  # the full text names folders, so only `status` shows it
            what = "writes are refused" if health.refusal_kind else "nothing is served"
            answer = HealthAnswer(what, kind)
        else:
            answer = HealthAnswer("not ready")
        return json_answer(answer, HTTPStatus.SERVICE_UNAVAILABLE)

    async def show_status(_request: Request) -> Response:
        return json_answer(status())

    async def show_metrics(request: Request) -> Response:
        by_vbucket = request.query_params.get("vbuckets", "0") not in {"", "0"}
        is_openmetrics = prefers_openmetrics(request.headers.get("accept", ""))
        text = metrics(by_vbucket=by_vbucket, is_openmetrics=is_openmetrics)
        return raw_answer(text, OPENMETRICS_TYPE if is_openmetrics else METRICS_TYPE)

    return [
        RouteSpec(
            "GET", "/livez", livez, needs_login=False, answer=HealthAnswer,
            summary="Whether the process answers.",
        ),
        RouteSpec(
            "GET", "/readyz", readyz, needs_login=False, answer=HealthAnswer,
            other_statuses=(HTTPStatus.SERVICE_UNAVAILABLE,),
            summary="200 if clients may be sent here; 503 while the server starts or stops,"
            " refuses writes, or serves nothing because the metadata store went back.",
        ),
        RouteSpec(
            "GET", "/metrics", show_metrics, takes_token=True,
            media_type=PROMETHEUS, other_media_types=(OPENMETRICS,),
            summary="The metrics, in Prometheus's format or in OpenMetrics, as Accept says.",
            query=(QueryField("vbuckets", "1 adds series of each partition.", "integer"),),
        ),
        RouteSpec(
            "GET", "/api/v1/status", show_status, answer=StatusReport,
            summary="The node's state and contents.",
        ),
    ]  # fmt: skip


def prefers_openmetrics(accept: str) -> bool:
    """Return whether an Accept header ranks OpenMetrics before Prometheus's own text."""
    ranks = {OPENMETRICS: 0.0, PROMETHEUS: 0.0}
    for part in accept.split(","):
        kind, *parameters = (text.strip().lower() for text in part.split(";"))
        if kind in ranks:
            ranks[kind] = max(ranks[kind], _quality(parameters))
    return ranks[OPENMETRICS] > ranks[PROMETHEUS]


def _quality(parameters: list[str]) -> float:
    """Return the q of a media type, 1 without one."""
    for parameter in parameters:
        if parameter.startswith("q="):
            found = _QUALITY.fullmatch(parameter.removeprefix("q="))
            return float(found[0]) if found else 0.0
    return 1.0

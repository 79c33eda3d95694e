"""Named consumers (dcp.server.operate.consumer_desk), in the partitions that this node serves.

GET  /api/v1/consumers            saved positions, and what is kept for whom
POST /api/v1/consumers/keep       keep deletions that a consumer has not seen, within limits
POST /api/v1/consumers/forget     delete its positions, and keep nothing for it
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from dcp.server.admin.answers import AdminError, RouteSpec, invalid, json_answer, read_body
from dcp.server.admin.bodies import ForgetRequest, KeepRequest
from dcp.server.config.setting_values import Option, read_duration, read_size
from dcp.server.operate.consumer_desk import (
    ConsumerDesk,
    KeepingReport,
    SavedConsumers,
    TooManyKeepsError,
)
from dcp.server.operate.operations import WritesRefusedError
from vbucket.model.consumer_documents import (
    BYTES_MAX,
    BYTES_MIN,
    FOR_MAX_S,
    FOR_MIN_S,
    KEEPS_MAX,
    NAME_BYTES_MAX,
)

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_PATH: Final = "/api/v1/consumers"
_FOR: Final = Option("", read_duration, "TIME", FOR_MIN_S, FOR_MAX_S)
_BYTES: Final = Option("", read_size, "SIZE", BYTES_MIN, BYTES_MAX)


def routes(desk: ConsumerDesk) -> list[RouteSpec]:
    """Return the routes."""

    async def listed(_request: Request) -> Response:
        return json_answer(await desk.consumers())

    async def keep(request: Request) -> Response:
        body = await read_body(request, KeepRequest)
        name = _name(body.name)
        for_s, bytes_max = _limit("for", body.for_, _FOR), _limit("bytes", body.bytes, _BYTES)
        try:
            return json_answer(await desk.keep(name, for_s, bytes_max))
        except TooManyKeepsError:
            raise AdminError(
                HTTPStatus.CONFLICT,
                "nothing is kept for this consumer",
                why=f"deletions are kept for {KEEPS_MAX} consumers, the limit",
                try_this="dcpctl consumer list, and forget those that do not come back",
            ) from None
        except WritesRefusedError as error:
            raise _full(error) from error

    async def forget(request: Request) -> Response:
        name = _name((await read_body(request, ForgetRequest)).name)
        try:
            return json_answer(await desk.forget(name))
        except WritesRefusedError as error:
            raise _full(error) from error

    return [
        RouteSpec(
            "GET", _PATH, listed, answer=SavedConsumers,
            summary="List consumers by the name of their checkpoint in the server: saved positions,"
            " and what is kept for them while they are away.",
        ),
        RouteSpec(
            "POST", f"{_PATH}/keep", keep, body=KeepRequest, answer=KeepingReport,
            summary="Keep deletions that a consumer has not seen, within limits: no purge passes"
            " its saved position.",
        ),
        RouteSpec(
            "POST", f"{_PATH}/forget", forget, body=ForgetRequest, answer=KeepingReport,
            summary="Delete a consumer's saved positions, and keep nothing for it.",
        ),
    ]  # fmt: skip


def _name(name: str) -> str:
    if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
        raise invalid(f'"name" has 1 to {NAME_BYTES_MAX} bytes')
    return name


def _limit(name: str, text: str | int, option: Option) -> Any:
    try:
        return option.parse(text, option)
    except ValueError as error:
        raise invalid(f'"{name}" {error}; nothing was changed') from error


def _full(error: WritesRefusedError) -> AdminError:
    return AdminError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "nothing was changed",
        why=str(error),
        try_this="try again once the cause is gone",
    )

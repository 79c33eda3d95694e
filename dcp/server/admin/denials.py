"""The refusal of what a user may not do, for routes that look at more than the role."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from dcp.server.admin.answers import AdminError

if TYPE_CHECKING:
    from starlette.requests import Request


def denied(request: Request, why: str) -> AdminError:
    """Return the refusal."""
    return AdminError(
        HTTPStatus.FORBIDDEN,
        f"user {request.state.user!r} may not do this",
        why=why,
        try_this="ask an admin: dcpctl user show NAME lists the roles, dcpctl user grant adds one",
    )

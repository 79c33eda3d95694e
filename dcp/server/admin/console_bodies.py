"""Reads bodies of requests as structs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from dcp.server.admin.answers import JSON_TYPE, _body_of, _without_secrets, invalid

if TYPE_CHECKING:
    from starlette.requests import Request

_B = TypeVar("_B", bound=msgspec.Struct)


async def read_body(request: Request, kind: type[_B]) -> _B:
    """Read a JSON object as a struct; what is not secret goes into the audit log."""
    body = _body_of(request, JSON_TYPE)
    try:
        found = msgspec.json.decode(body, type=kind)
        fields = msgspec.to_builtins(found)
        # Strings with half a surrogate pair cannot be stored, logged or sent.
        msgspec.json.encode(fields)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise invalid(f"{error}; the members are {', '.join(kind.__struct_fields__)}") from error
    request.state.told = _without_secrets(fields)
    return found

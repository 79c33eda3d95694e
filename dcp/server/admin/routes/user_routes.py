"""Users and their rights. All requests need the role admin.

GET    /api/v1/users                  all users with their roles
POST   /api/v1/users                  add, or new password
PUT    /api/v1/users/{name}/password
POST   /api/v1/users/{name}/grant     a role, for everything or a scope
POST   /api/v1/users/{name}/revoke    a role, or one scope of it
DELETE /api/v1/users/{name}

With ?force=true, the last two take the role admin from the last user that has it, if the guest may
log in. Roles are read, write, stream, admin and replicate; without "roles" a new user has read. A
scope is {"prefix"?, "collection"?}; {} is everything.
Changes apply to open connections at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dcp.server.access.users import UnknownUserError, UserError, Users
from dcp.server.access.users_file import (
    UsersFileError,
    UsersHeldError,
    parse_roles,
    roles_document,
)
from dcp.server.admin.answers import (
    AdminError,
    QueryField,
    RouteSpec,
    invalid,
    json_answer,
    read_body,
)
from dcp.server.admin.bodies import (
    GrantRequest,
    NewUserRequest,
    PasswordRequest,
    ScopeBody,
    UserName,
    UserRoles,
    UserTable,
)
from dcp.session.access.rights import EVERYTHING, Rights, Role, Scope

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


_FORCE: Final = (
    QueryField("force", "true: also if nobody has the role admin then and the guest may log in."),
)


def routes(users: Users, users_changed: Callable[[], None]) -> list[RouteSpec]:
    """Return the routes."""
    api = _Users(users, users_changed)
    one = "/api/v1/users/{name}"
    return [
        RouteSpec(
            "GET", "/api/v1/users", api.table, role=Role.ADMIN, answer=UserTable,
            summary="List users with their roles.",
        ),
        RouteSpec(
            "POST", "/api/v1/users", api.add, body=NewUserRequest, answer=UserName,
            status=HTTPStatus.CREATED, summary="Add a user, or give one a new password.",
        ),
        RouteSpec(
            "PUT", f"{one}/password", api.set_password, body=PasswordRequest, answer=UserName,
            summary="Give a user a new password.",
        ),
        RouteSpec(
            "POST", f"{one}/grant", api.grant, body=GrantRequest, answer=UserRoles,
            summary="Give a user a role, for everything or for some keys.",
        ),
        RouteSpec(
            "POST", f"{one}/revoke", api.revoke, body=GrantRequest, answer=UserRoles,
            query=_FORCE, summary="Take a role, or its grant for some keys, from a user.",
        ),
        RouteSpec(
            "DELETE", one, api.remove, answer=UserName, query=_FORCE, summary="Remove a user."
        ),
    ]  # fmt: skip


class _Users:
    def __init__(self, users: Users, users_changed: Callable[[], None]) -> None:
        self._users = users
        self._users_changed = users_changed

    async def table(self, _request: Request) -> Response:
        """Answer all users with their roles."""
        table = self._users.table()
        roles = {name: roles_of(rights) for name, rights in table.items()}
        return json_answer(UserTable(list(table), roles))

    async def add(self, request: Request) -> Response:
        """Add a user, or give one a new password."""
        body = await read_body(request, NewUserRequest)
        rights = None if body.roles is None else _rights_of(body.roles)
        await self._change(lambda: self._users.add(body.name, body.password, rights))
        return json_answer(UserName(body.name), HTTPStatus.CREATED)

    async def set_password(self, request: Request) -> Response:
        """Give a user a new password."""
        name = request.path_params["name"]
        body = await read_body(request, PasswordRequest)
        await self._change(lambda: self._users.set_password(name, body.password))
        return json_answer(UserName(name))

    async def grant(self, request: Request) -> Response:
        """Give a user a role."""
        name = request.path_params["name"]
        body = await read_body(request, GrantRequest)
        role, scope = _role_of(body.role), _scope_of(body) or EVERYTHING
        rights = await self._change(lambda: self._users.grant(name, role, scope))
        return json_answer(UserRoles(name, roles_of(rights)))

    async def revoke(self, request: Request) -> Response:
        """Take a role, or one scope of it, from a user."""
        name = request.path_params["name"]
        body = await read_body(request, GrantRequest)
        role, scope, force = _role_of(body.role), _scope_of(body), _is_forced(request)
        rights = await self._change(lambda: self._users.revoke(name, role, scope, force=force))
        return json_answer(UserRoles(name, roles_of(rights)))

    async def remove(self, request: Request) -> Response:
        """Remove a user."""
        name = request.path_params["name"]
        try:
            was_there = await asyncio.to_thread(self._users.remove, name, force=_is_forced(request))
        except UserError as error:
            raise AdminError(
                HTTPStatus.CONFLICT,
                f"user {name!r} cannot be removed",
                why=str(error),
                try_this="dcpctl user list",
            ) from error
        except UsersFileError as error:
            raise _file_failed(error) from error
        if not was_there:
            raise _unknown(f"there is no user {name!r}")
        self._users_changed()
        return json_answer(UserName(name))

    async def _change(self, change: Callable[[], Any]) -> Any:
        """Change the users in a thread: keys and the sync of the file take tens of milliseconds."""
        try:
            result = await asyncio.to_thread(change)
        except UnknownUserError as error:
            raise _unknown(str(error)) from error
        except UserError as error:
            raise invalid(str(error)) from error
        except UsersFileError as error:
            raise _file_failed(error) from error
        self._users_changed()
        return result


def _is_forced(request: Request) -> bool:
    return request.query_params.get("force") == "true"


def _role_of(text: str) -> Role:
    try:
        return Role(text)
    except ValueError:
        raise invalid(f"there is no role {text!r}; use {', '.join(Role)}") from None


def _scope_of(body: GrantRequest) -> Scope | None:
    """Return the scope of a request, None if it has none."""
    prefix, collection = body.prefix or "", body.collection or None
    return Scope(prefix.encode(), collection) if prefix or collection else None


def _rights_of(roles: dict[str, list[ScopeBody]]) -> Rights:
    try:
        return parse_roles(msgspec.to_builtins(roles))
    except ValueError as error:
        raise invalid(f'"roles" must be an object of role and list of scopes: {error}') from error


def roles_of(rights: Rights) -> dict[str, list[ScopeBody]]:
    """Return rights as the API shows them."""
    return msgspec.convert(roles_document(rights), dict[str, list[ScopeBody]])


def _unknown(what: str) -> AdminError:
    return AdminError(
        HTTPStatus.NOT_FOUND,
        what,
        why="no user of that name was added",
        try_this="GET /api/v1/users lists the names",
    )


def _file_failed(error: UsersFileError) -> AdminError:
    if isinstance(error, UsersHeldError):
        return AdminError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "the users were not changed",
            why=str(error),
            try_this="try again in a few seconds",
        )
    return AdminError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "the users were not changed",
        why=str(error),
        try_this="repair the file, then try again",
    )

"""Users and their rights. All requests need the role admin.

GET    /api/v1/users                  {"users": [names], "roles": {name: {role: [scopes]}}}
POST   /api/v1/users                  {"name", "password", "roles"?}: add, or new password
PUT    /api/v1/users/{name}/password  {"password"}
POST   /api/v1/users/{name}/grant     {"role", "prefix"?, "collection"?}: for all or a scope
POST   /api/v1/users/{name}/revoke    {"role", "prefix"?, "collection"?}: all or one scope of it
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

from dcp.server.access.users import UnknownUserError, UserError, Users
from dcp.server.access.users_file import UsersFileError, parse_roles, roles_document
from dcp.server.admin.answers import AdminError, RouteSpec, invalid, json_answer, read_object
from dcp.session.rights import EVERYTHING, Rights, Role, Scope

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_SCOPE: Final = {"prefix": str, "collection": str}


def routes(users: Users, users_changed: Callable[[], None]) -> list[RouteSpec]:
    """Return the routes."""
    api = _Users(users, users_changed)
    one = "/api/v1/users/{name}"
    return [
        RouteSpec("GET", "/api/v1/users", api.table, role=Role.ADMIN),
        RouteSpec("POST", "/api/v1/users", api.add),
        RouteSpec("PUT", f"{one}/password", api.set_password),
        RouteSpec("POST", f"{one}/grant", api.grant),
        RouteSpec("POST", f"{one}/revoke", api.revoke),
        RouteSpec("DELETE", one, api.remove),
    ]


class _Users:
    def __init__(self, users: Users, users_changed: Callable[[], None]) -> None:
        self._users = users
        self._users_changed = users_changed

    async def table(self, _request: Request) -> Response:
        """Answer all users with their roles."""
        table = self._users.table()
        roles = {name: roles_document(rights) for name, rights in table.items()}
        return json_answer({"users": list(table), "roles": roles})

    async def add(self, request: Request) -> Response:
        """Add a user, or give one a new password."""
        body = await read_object(request, {"name": str, "password": str}, {"roles": dict})
        rights = _rights_of(body["roles"]) if "roles" in body else None
        await self._change(lambda: self._users.add(body["name"], body["password"], rights))
        return json_answer({"name": body["name"]}, HTTPStatus.CREATED)

    async def set_password(self, request: Request) -> Response:
        """Give a user a new password."""
        name = request.path_params["name"]
        body = await read_object(request, {"password": str})
        await self._change(lambda: self._users.set_password(name, body["password"]))
        return json_answer({"name": name})

    async def grant(self, request: Request) -> Response:
        """Give a user a role."""
        name = request.path_params["name"]
        body = await read_object(request, {"role": str}, _SCOPE)
        role, scope = _role_of(body["role"]), _scope_of(body) or EVERYTHING
        rights = await self._change(lambda: self._users.grant(name, role, scope))
        return json_answer({"name": name, "roles": roles_document(rights)})

    async def revoke(self, request: Request) -> Response:
        """Take a role, or one scope of it, from a user."""
        name = request.path_params["name"]
        body = await read_object(request, {"role": str}, _SCOPE)
        role, scope, force = _role_of(body["role"]), _scope_of(body), _is_forced(request)
        rights = await self._change(lambda: self._users.revoke(name, role, scope, force=force))
        return json_answer({"name": name, "roles": roles_document(rights)})

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
        return json_answer({"name": name})

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


def _scope_of(body: dict[str, Any]) -> Scope | None:
    """Return the scope of a request, None if it has none."""
    prefix, collection = body.get("prefix", ""), body.get("collection")
    return Scope(prefix.encode(), collection or None) if prefix or collection else None


def _rights_of(document: dict[str, Any]) -> Rights:
    try:
        return parse_roles(document)
    except (ValueError, TypeError, AttributeError) as error:
        raise invalid(f'"roles" must be an object of role and list of scopes: {error}') from error


def _unknown(what: str) -> AdminError:
    return AdminError(
        HTTPStatus.NOT_FOUND,
        what,
        why="no user of that name was added",
        try_this="GET /api/v1/users lists the names",
    )


def _file_failed(error: UsersFileError) -> AdminError:
    return AdminError(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "the users were not changed",
        why=str(error),
        try_this="repair the file, then try again",
    )

"""The description of the HTTP API: an OpenAPI 3.1 document, made from the routes and their bodies.

It is served at /api/v1/openapi.json, and docs/http-api.md is generated from it (`api_page`). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dcp import __version__
from dcp.server.admin.answers import (
    FORM_TYPE,
    JSON_TYPE,
    PROBLEM_TYPE,
    RouteSpec,
    is_couchbase_path,
    raw_answer,
)
from dcp.server.admin.bodies import CouchbaseProblem, Problem
from dcp.session.access.rights import Role
from vbucket.model.ids import NUM_VBUCKETS

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

OPENAPI_PATH: Final = "/api/v1/openapi.json"
EVENT_DATA: Final = "x-event-data"
"""Has the schema of the data of an event, beside that of the whole stream."""
_REF: Final = "#/components/schemas/{name}"
_PLACE: Final = re.compile(r"{(\w+)}")
PATH_FIELDS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "vb": ("A partition.", {"type": "integer", "minimum": 0, "maximum": NUM_VBUCKETS - 1}),
    "id": ("The id of a fault rule.", {"type": "integer", "minimum": 0}),
    "name": ("The name of a user.", {"type": "string"}),
    "bucket": ("The name of the bucket: the setting bucket.", {"type": "string"}),
    "scope": ("The name of a scope.", {"type": "string"}),
    "collection": ("The name of a collection.", {"type": "string"}),
    "key": ("The key of a setting.", {"type": "string"}),
}
"""Field of a path -> meaning and schema."""
_TAGS: Final = (
    ("/api/v1/vbuckets", "partitions"), ("/api/v1/documents", "documents"),
    ("/api/v1/streams", "streams"), ("/api/v1/console", "console"), ("/api/v1/faults", "faults"),
    ("/api/v1/users", "users"), ("/api/v1/compact", "store"),
    ("/pools", "Couchbase"), ("/whoami", "Couchbase"), ("/", "node"),
)  # fmt: skip
"""Beginning of a path -> its group; the first that fits counts."""
INTRODUCTION: Final = (
    "The admin port. It takes HTTP basic authentication with the users of the key-value port; the "
    "guest works from this machine only. Refusals are problem documents (RFC 9457). Their member "
    "`error` has the parts: what, where, why, and what to try. On Couchbase's own paths a refusal "
    "has only this member, or the form that SDKs know."
)


def openapi_document(routes: Iterable[RouteSpec], version: str) -> dict[str, Any]:
    """Return the document."""
    routes = [route for route in routes if route.is_described]
    kinds: list[Any] = [Problem, CouchbaseProblem]
    for route in routes:
        kinds += [kind for kind in (route.body, route.answer, route.event) if kind]
    kinds = list({str(kind): kind for kind in kinds}.values())
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = {str(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dcpd",
            "version": version,
            "description": INTRODUCTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"login": []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {
                "login": {"type": "http", "scheme": "basic"},
                "metricsToken": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The token of the setting metrics_token.",
                },
            },
        },
    }


def role_of(route: RouteSpec) -> Role | None:
    """Return the role that a request needs; None: any login will do, if one is needed."""
    if not route.needs_login or route.is_for_all:
        return None
    return route.role or (None if route.method == "GET" else Role.ADMIN)


def tag_of(path: str) -> str:
    """Return the group of a path."""
    return next(tag for start, tag in _TAGS if path.startswith(start))


def _operation(route: RouteSpec, schema_of: Mapping[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "tags": [tag_of(route.path)],
        "summary": route.summary,
        "parameters": [*_path_fields(route), *_query_fields(route)],
        "responses": _responses(route, schema_of),
    }
    role = role_of(route)
    if role is not None:
        operation["description"] = f"Needs the role {role}."
        operation["x-role"] = role.value
    if not route.needs_login:
        operation["security"] = []
    elif route.takes_token:
        operation["security"] = [{"login": []}, {"metricsToken": []}]
    if route.body is not None:
        kind = FORM_TYPE if is_couchbase_path(route.path) else JSON_TYPE
        content = {kind: {"schema": schema_of[str(route.body)]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _operation_id(route: RouteSpec) -> str:
    """Return a name such as postVbucketsVbBranch."""
    words = re.findall(r"[A-Za-z]+", route.path.removeprefix("/api/v1"))
    end = "Slash" if route.path.endswith("/") else ""
    return route.method.lower() + "".join(word[0].upper() + word[1:] for word in words) + end


def _path_fields(route: RouteSpec) -> list[dict[str, Any]]:
    names = _PLACE.findall(route.path)
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": PATH_FIELDS[name][0],
            "schema": PATH_FIELDS[name][1],
        }
        for name in names
    ]


def _query_fields(route: RouteSpec) -> list[dict[str, Any]]:
    return [
        {
            "name": field.name,
            "in": "query",
            "required": field.is_required,
            "description": field.meaning,
            "schema": {"type": field.kind},
        }
        for field in route.query
    ]


def _responses(route: RouteSpec, schema_of: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {route.media_type.partition(";")[0]: {}}
    if route.answer is not None:
        content = {route.media_type: {"schema": schema_of[str(route.answer)]}}
    if route.event is not None:
        # OpenAPI 3.1 has no member for what each event holds.
        events = {"schema": {"type": "string"}, EVENT_DATA: schema_of[str(route.event)]}
        content = {route.media_type: events}
    content |= {kind: {} for kind in route.other_media_types}
    found = {str(route.status.value): {"description": "The answer.", "content": content}}
    for status in route.other_statuses:
        found[str(status.value)] = {"description": status.phrase, "content": content}
    problem_type, problem = (
        (JSON_TYPE, CouchbaseProblem) if is_couchbase_path(route.path) else (PROBLEM_TYPE, Problem)
    )
    refusal = {problem_type: {"schema": schema_of[str(problem)]}}
    for status in _refusals(route):
        found[str(status.value)] = {"description": status.phrase, "content": refusal}
    if route.answer is not None and route.status >= HTTPStatus.BAD_REQUEST:
        # What Couchbase can do and this server cannot: other refusals may have the same status.
        either = {"anyOf": [schema_of[str(route.answer)], schema_of[str(problem)]]}
        found[str(route.status.value)]["content"] = {problem_type: {"schema": either}}
    return found | {"default": {"description": "Another refusal.", "content": refusal}}


def _refusals(route: RouteSpec) -> list[HTTPStatus]:
    """Return the statuses that every route of this kind may answer."""
    statuses = [HTTPStatus.FORBIDDEN]  # a web page of another site
    if route.needs_login:
        statuses += [HTTPStatus.UNAUTHORIZED, HTTPStatus.SERVICE_UNAVAILABLE]
    if route.body is not None or route.query:
        statuses.append(HTTPStatus.BAD_REQUEST)
    if route.body is not None:
        statuses += [HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNSUPPORTED_MEDIA_TYPE]
    if "{" in route.path:
        statuses.append(HTTPStatus.NOT_FOUND)
    taken = {route.status, *route.other_statuses}
    return sorted(status for status in statuses if status not in taken)


def description_routes(described: list[RouteSpec]) -> list[RouteSpec]:
    """Return the route. It describes these routes, and itself."""

    @cache  # it takes 10 ms to make
    def document() -> bytes:
        return msgspec.json.encode(openapi_document([*described, own], __version__))

    async def show(_request: Request) -> Response:
        return raw_answer(document())

    own = RouteSpec(
        "GET", OPENAPI_PATH, show, answer=dict[str, Any],
        summary="The description of this API, as OpenAPI 3.1.",
    )  # fmt: skip
    return [own]

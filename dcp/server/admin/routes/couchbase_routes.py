"""What Couchbase clients ask for over HTTP: go-dcp, gocbcore's bootstrap, tests of collections.

    GET /pools                                 the version, for go-dcp
    GET /pools/default                         the nodes of the cluster, and its bucket
    GET /pools/default/nodeServices            ports
    GET /pools/default/buckets[/B]             type, backend, nodes, partition map
    POST, DELETE of those; POST /pools/default  refused: there is one bucket, and no quota
    GET /pools/default/b/B                     the terse partition map
    GET /pools/default/bs/B                    the same as a stream: a block now and after changes
    GET /pools/default/bucketsStreaming/B      buckets/B as a stream
    GET /whoami
    GET, POST, PATCH, DELETE /pools/default/buckets/B/scopes[/S[/collections[/C]]]

Blocks of a stream are separated by four newlines. A block comes at least every KEEPALIVE_S.
`$HOST` in a terse map stands for the address that the client uses for this node.

Facts: what go-dcp, gocbcore and the SDKs ask for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from dcp.server.admin.answers import (
    JSON_TYPE,
    AdminError,
    RouteSpec,
    json_answer,
    raw_answer,
    read_form,
)
from dcp.server.admin.bodies import (
    BucketForm,
    CollectionForm,
    CouchbaseRefusal,
    ManifestUid,
    MaxTtlForm,
    ScopeForm,
)
from dcp.server.net.cluster_config import ClusterConfig
from dcp.server.operate.collection_changes import Collections, CollectionsRefusedError
from dcp.server.storage.health import Health
from dcp.session.session_commands import REPORTED_VERSION

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from dcp.server.admin.answers import Handler

IMPLEMENTATION_VERSION: Final = f"{REPORTED_VERSION.decode()}-0000-community"
"""MAJOR.MINOR.PATCH-BUILD-EDITION; go-dcp and SDKs derive features from it."""
BLOCK_END: Final = b"\n\n\n\n"
KEEPALIVE_S: Final = 10.0
POLL_S: Final = 0.25
"""How soon a stream reports a change of the map, and notices that the server stops."""
FORBIDDEN: Final = HTTPStatus.FORBIDDEN
_BUCKETS: Final = ("/pools/default/buckets", "/pools/default/buckets/")
"""Some SDKs ask with the slash."""

SETTINGS_OF_BUCKET: Final[dict[str, Any]] = {
    "controllers": {},
    "quota": {"ram": 0, "rawRAM": 0},
    "replicaIndex": False,
    "maxTTL": 0,
    "evictionPolicy": "valueOnly",
    "compressionMode": "passive",
    "conflictResolutionType": "seqno",
    "durabilityMinLevel": "none",
    "authType": "sasl",
}
"""What SDKs read of a bucket (Java: getBucket). No controllers: compaction and flushes are not
started over these paths. A quota of 0: there is none."""


def routes(config: ClusterConfig, collections: Collections, health: Health) -> list[RouteSpec]:
    """Return the routes."""
    field = _Field(config, collections, health)
    bucket = "/pools/default/buckets/{bucket}"
    scope = f"{bucket}/scopes/{{scope}}"
    return [
        _read("/pools", field.pools, "The version, and the only pool."),
        _read("/pools/default", field.pool, "The nodes of the cluster, and its bucket."),
        _read("/pools/default/nodeServices", field.node_services, "The nodes' ports."),
        _refusal("POST", "/pools/default", field.set_quota, "memory has settings of its own"),
        *(
            _read(path, field.buckets, "The only bucket, in a list.", list[dict[str, Any]])
            for path in _BUCKETS
        ),
        *(
            _refusal("POST", path, field.create_bucket, "there is one bucket", BucketForm)
            for path in _BUCKETS
        ),
        _read(bucket, field.of_bucket(field.details), "The bucket: type, nodes, partition map."),
        _refusal("POST", bucket, field.change_bucket, "it has no settings of its own"),
        _refusal("DELETE", bucket, field.drop_bucket, "it is the only one", None, FORBIDDEN),
        _refusal("POST", f"{bucket}/controller/doFlush", field.flush_bucket, "it is not enabled"),
        _read("/pools/default/b/{bucket}", field.of_bucket(field.terse), "The partition map."),
        _stream("/pools/default/bs/{bucket}", field.stream_of(field.terse), "The partition map"),
        _stream(
            "/pools/default/bucketsStreaming/{bucket}", field.stream_of(field.details), "The bucket"
        ),
        _read("/whoami", field.whoami, "Who is logged in."),
        _read(f"{bucket}/scopes", field.of_bucket(field.manifest), "All scopes and collections."),
        _change("POST", f"{bucket}/scopes", field.create_scope, "Create a scope.", ScopeForm),
        _change("DELETE", scope, field.drop_scope, "Drop a scope and its collections."),
        _change(
            "POST", f"{scope}/collections", field.create_collection, "Create a collection.",
            CollectionForm,
        ),
        _change(
            "PATCH", f"{scope}/collections/{{collection}}", field.change_collection,
            "Change the maxTTL of a collection.", MaxTtlForm,
        ),
        _change(
            "DELETE", f"{scope}/collections/{{collection}}", field.drop_collection,
            "Drop a collection.",
        ),
    ]  # fmt: skip


def _read(path: str, handler: Handler, summary: str, answer: Any = dict[str, Any]) -> RouteSpec:
    return RouteSpec("GET", path, handler, summary=summary, answer=answer)


def _stream(path: str, handler: Handler, what: str) -> RouteSpec:
    summary = f"{what}, now and after each change; four newlines end each document."
    return RouteSpec("GET", path, handler, is_long=True, summary=summary)


def _change(
    method: str, path: str, handler: Handler, summary: str, body: type[Struct] | None = None
) -> RouteSpec:
    return RouteSpec(method, path, handler, summary=summary, body=body, answer=ManifestUid)


def _refusal(
    method: str,
    path: str,
    handler: Handler,
    why: str,
    body: type[Struct] | None = None,
    status: HTTPStatus = HTTPStatus.BAD_REQUEST,
) -> RouteSpec:
    """Return a route for what Couchbase can do and this server cannot."""
    summary = f"Refused in Couchbase's form: {why}."
    return RouteSpec(
        method, path, handler, summary=summary, body=body, answer=CouchbaseRefusal, status=status
    )


class _Field:
    """The handlers. `terse`, `details` and `manifest` return documents as bytes of JSON."""

    def __init__(self, config: ClusterConfig, collections: Collections, health: Health) -> None:
        self._config = config
        self._scopes = collections
        self._health = health

    # -- the node --------------------------------------------------------------------------------

    async def pools(self, _request: Request) -> Response:
        """Answer the only pool, and the version."""
        return json_answer(
            {
                "isAdminCreds": True,
                "implementationVersion": IMPLEMENTATION_VERSION,
                "pools": [{"name": "default", "uri": "/pools/default"}],
                "uuid": json.loads(self._config.bucket_config())["uuid"],
            }
        )

    async def pool(self, request: Request) -> Response:
        """Answer the nodes of the cluster: those that clients' maps list."""
        document = json.loads(self.details(request))
        return json_answer(
            {
                "name": "default",
                "nodes": document["nodes"],
                "buckets": {"uri": "/pools/default/buckets"},
                "bucketNames": [{"bucketName": self._config.bucket, "uuid": document["uuid"]}],
                "balanced": True,
                "rebalanceStatus": "none",
            }
        )

    async def node_services(self, _request: Request) -> Response:
        """Answer the ports of the nodes."""
        return raw_answer(self._config.global_config())

    async def buckets(self, request: Request) -> Response:
        """Answer the only bucket, in a list."""
        return raw_answer(b"[" + self.details(request) + b"]")

    async def whoami(self, request: Request) -> Response:
        """Answer who is logged in."""
        roles = [{"role": role.value} for role in request.state.rights.scopes()]
        return json_answer({"id": request.state.user, "domain": "local", "roles": roles})

    # -- documents of the bucket -----------------------------------------------------------------

    def of_bucket(self, document: Callable[[Request], bytes]) -> Callable[[Request], Any]:
        """Return a handler that answers a document."""

        async def answer(request: Request) -> Response:
            self._check_bucket(request)
            return raw_answer(document(request))

        return answer

    def stream_of(self, document: Callable[[Request], bytes]) -> Callable[[Request], Any]:
        """Return a handler that answers a document again after each change."""

        async def answer(request: Request) -> Response:
            from starlette.responses import StreamingResponse

            self._check_bucket(request)
            return StreamingResponse(self._blocks(lambda: document(request)), media_type=JSON_TYPE)

        return answer

    async def _blocks(self, document: Callable[[], bytes]) -> AsyncIterator[bytes]:
        while self._health.is_ready:
            version = self._config.config_version()
            yield document() + BLOCK_END
            waited_s = 0.0
            while self._still_has(version) and waited_s < KEEPALIVE_S:
                await asyncio.sleep(POLL_S)
                waited_s += POLL_S

    def _still_has(self, version: tuple[int, int]) -> bool:
        return self._health.is_ready and self._config.config_version() == version

    def terse(self, _request: Request) -> bytes:
        """Return the partition map."""
        return self._config.bucket_config()

    def manifest(self, _request: Request) -> bytes:
        """Return scopes and collections."""
        return json.dumps(self._scopes.manifest()).encode()

    def details(self, request: Request) -> bytes:
        """Return the partition map with our address, and the bucket's type."""
        address = str(request.scope["server"][0])
        host = f"[{address}]" if ":" in address else address
        config = json.loads(self._config.bucket_config().replace(b"$HOST", host.encode()))
        for entry in config["nodes"]:
            entry["status"] = "healthy"
            entry["clusterMembership"] = "active"
            entry["services"] = ["kv"]
            entry["version"] = IMPLEMENTATION_VERSION
        for entry, extended in zip(config["nodes"], config["nodesExt"], strict=False):
            tls_port = extended["services"].get("mgmtSSL")
            if tls_port:
                entry["ports"]["httpsMgmt"] = tls_port
        bucket = self._config.bucket
        return json.dumps(
            config
            | SETTINGS_OF_BUCKET
            | {
                "storageBackend": "couchstore",
                "numVBuckets": self._config.num_vbuckets,
                "replicaNumber": config["vBucketServerMap"]["numReplicas"],
                "uri": f"/pools/default/buckets/{bucket}",
                "streamingUri": f"/pools/default/bucketsStreaming/{bucket}",
                "collectionsManifestUid": json.loads(self.manifest(request))["uid"],
            }
        ).encode()

    # -- changes of buckets: there is one, and it stays ------------------------------------------

    async def create_bucket(self, request: Request) -> Response:
        """Refuse POST name=B, as Couchbase refuses a bucket that exists or cannot be made."""
        name, bucket = (await read_form(request, BucketForm)).name, self._config.bucket
        if name == bucket:
            return _refused({"name": "Bucket with given name already exists"})
        why = f"this server has one bucket, {bucket!r} (setting bucket), and makes no others"
        return _refused({"name": why})

    async def change_bucket(self, request: Request) -> Response:
        """Refuse POST to a bucket: what it could change is set for the whole server."""
        self._check_bucket(request)
        return _refused({"_": "a bucket has no settings of its own here; see dcpd --help"})

    async def drop_bucket(self, request: Request) -> Response:
        """Refuse DELETE of the only bucket."""
        self._check_bucket(request)
        why = "this is the only bucket; to empty it, stop the server and remove its data folder"
        return _refused({"_": why}, HTTPStatus.FORBIDDEN)

    async def flush_bucket(self, request: Request) -> Response:
        """Refuse to flush over HTTP, as Couchbase does for buckets that do not enable it."""
        self._check_bucket(request)
        return _refused({"_": "Flush is disabled for the bucket"})

    async def set_quota(self, _request: Request) -> Response:
        """Refuse POST memoryQuota=M: memory has settings of its own."""
        why = "there is no quota; the settings memtable_bytes and item_cache_bytes bound memory"
        return _refused({"memoryQuota": why})

    def _check_bucket(self, request: Request) -> None:
        name, bucket = request.path_params["bucket"], self._config.bucket
        if name != bucket:
            raise AdminError(
                HTTPStatus.NOT_FOUND,
                f"there is no bucket {name!r}",
                why=f"there is only {bucket!r}",
                try_this=f"/pools/default/buckets/{bucket}",
            )

    # -- scopes and collections ------------------------------------------------------------------

    async def create_scope(self, request: Request) -> Response:
        """Handle POST name=S."""
        collections = self._collections(request)
        form = await read_form(request, ScopeForm)
        return await _changed(collections.create_scope(form.name))

    async def drop_scope(self, request: Request) -> Response:
        """Handle DELETE of a scope."""
        collections = self._collections(request)
        return await _changed(collections.drop_scope(request.path_params["scope"]))

    async def create_collection(self, request: Request) -> Response:
        """Handle POST name=C, with maxTTL=SECONDS if documents expire."""
        collections = self._collections(request)
        form = await read_form(request, CollectionForm)
        scope = request.path_params["scope"]
        change = collections.create_collection(scope, form.name, form.max_ttl_s)
        return await _changed(change)

    async def change_collection(self, request: Request) -> Response:
        """Handle PATCH maxTTL=SECONDS of a collection, as Couchbase has it since 7.6."""
        collections = self._collections(request)
        form = await read_form(request, MaxTtlForm)
        path = request.path_params
        change = collections.change_max_ttl(path["scope"], path["collection"], form.max_ttl_s)
        return await _changed(change)

    async def drop_collection(self, request: Request) -> Response:
        """Handle DELETE of a collection."""
        collections = self._collections(request)
        path = request.path_params
        return await _changed(collections.drop_collection(path["scope"], path["collection"]))

    def _collections(self, request: Request) -> Collections:
        self._check_bucket(request)
        return self._scopes


async def _changed(change: Any) -> Response:
    try:
        uid = await change
    except CollectionsRefusedError as error:
        raise AdminError(
            error.status,
            "scopes and collections were not changed",
            why=str(error),
            try_this="GET /pools/default/buckets/default/scopes lists them",
        ) from error
    return json_answer(ManifestUid(f"{uid:x}"))


def _refused(errors: dict[str, str], status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> Response:
    """Return a refusal in Couchbase's form, which SDKs read: field -> reason."""
    return json_answer(CouchbaseRefusal(errors, errors.get("_")), status)

"""The admin interface: a small HTTP API on its own port, for dcpctl, probes, scripts and SDKs.

    probes        /livez  /readyz  /metrics
    our own       /api/v1/...            JSON in, JSON out (docs/http-api.md)
    Couchbase's   /pools/... /whoami     what Couchbase clients ask for over HTTP

HTTP basic authentication; the guest from loopback only. Refusals are problem documents (RFC 9457)
with a member {"error": {"what", "where", "why", "try"}}; on Couchbase's paths they have Couchbase's
form. `routes` of each module returns its requests, `bodies` has what they take, and `openapi`
describes all of them.

The way of a request:

    port        accepts a connection, and closes it if it is too late
    crowd       the limits: how many, how long, who makes room for whom
    protocol    uvicorn's HTTP/1.1, which tells the crowd what a connection does
    origin      refuses web pages of other sites: Host, Origin, Sec-Fetch-Site
    application login, role, audit, then the handler of the route

Starlette and uvicorn take 50 ms to import. Only AdminServer.start, the application and `protocol`
import them.
"""

from dcp.server.admin.port import AdminServer

__all__ = ["AdminServer"]

"""The admin interface: a small HTTP API on its own port, for dcpctl, probes, scripts and SDKs.

    probes        /livez  /readyz  /metrics
    our own       /api/v1/...            JSON in, JSON out (docs/testing-consumers.md)
    the field's   /pools/... /whoami     what Couchbase clients ask for over HTTP

HTTP basic authentication; the guest from loopback only. Every error is JSON of one form:
{"error": {"what", "where", "why", "try"}}. `ROUTES` of each module is the list of what there is.

What a request goes through:

    port        accepts a connection, and ends it when it is too late
    crowd       the bounds: how many, how long, who makes room for whom
    protocol    uvicorn's HTTP/1.1, which tells the crowd what a connection does
    origin      refuses web pages of other sites: Host, Origin, Sec-Fetch-Site
    server      login, role, audit, then the handler of the route

Starlette and uvicorn take 50 ms to import: only AdminServer.start, the app and `protocol` pull them
in.
"""

from dcp.server.admin.port import AdminServer

__all__ = ["AdminServer"]

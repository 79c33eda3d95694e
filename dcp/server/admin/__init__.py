"""The admin interface: a small HTTP API on its own port, for dcpctl, probes, scripts and SDKs.

    probes        /livez  /readyz  /metrics
    our own       /api/v1/...            JSON in, JSON out (docs/testing-consumers.md)
    the field's   /pools/... /whoami     what Couchbase clients ask for over HTTP

HTTP basic authentication; the guest from loopback only. Every error is JSON of one form:
{"error": {"what", "where", "why", "try"}}. `ROUTES` of each module is the list of what there is.

Starlette and uvicorn take 50 ms to import: only AdminServer.start and the app pull them in.

A browser page of another site cannot use it: bodies are application/json, which browsers ask about
first, and the forms of the field's API are refused where a browser says that they come from there.
"""

from dcp.server.admin.server import AdminServer

__all__ = ["AdminServer"]

"""Imports all that a starting dcpd imports. The fork server imports this before its first fork."""

import encodings.idna
import gc

import lmdb._envid
import starlette.applications
import starlette.middleware.body_limit
import starlette.routing
import uvicorn.config
import uvicorn.lifespan.off
import uvicorn.protocols.http.h11_impl
import uvloop

import dcp.server.access.users_file
import dcp.server.main
import dcp.server.net.open_files
import dcp.server.node
import dcp.server.observe.event_log
import dcp.server.observe.service_notices

__all__ = ["dcp", "encodings", "lmdb", "starlette", "uvicorn", "uvloop"]

gc.freeze()  # a collection would copy the pages that the servers share

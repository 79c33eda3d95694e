"""An etcd of a version that Debian does not have, as a process. It answers a login, and no more.

    python -m support.other_etcd VERSION

It prints HOST:PORT, and ends with its input. An empty version: only root may ask for it, as from
etcd 3.6 on.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc

from failover.metadata.etcd_stubs import etcd_api_pb2 as pb

REVISION: Final = 5


@contextmanager
def other_etcd(version: str) -> Iterator[str]:
    """Run one; yield its endpoint."""
    with subprocess.Popen(
        [sys.executable, "-m", "support.other_etcd", version],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(),
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            endpoint = process.stdout.readline().strip()
            assert endpoint, "it did not start"
            yield endpoint
        finally:
            process.kill()


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": ":".join(sys.path)}


class OtherEtcd:
    """The service."""

    def __init__(self, version: str) -> None:
        self._version = version

    async def serve(self) -> None:
        """Serve until the input ends."""
        methods: dict[str, tuple[Any, Any]] = {
            "Maintenance/Status": (self._status, pb.StatusRequest),
            "KV/Range": (self._range, pb.RangeRequest),
        }
        server = grpc.aio.server()
        for path, (method, request) in methods.items():
            service, _, name = path.partition("/")
            handler = grpc.unary_unary_rpc_method_handler(
                method,
                request_deserializer=request.FromString,
                response_serializer=lambda response: response.SerializeToString(),
            )
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(f"etcdserverpb.{service}", {name: handler}),)
            )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(f"127.0.0.1:{port}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(None)

    async def _status(self, request: Any, context: Any) -> Any:
        if not self._version:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "etcdserver: permission denied")
        return pb.StatusResponse(version=self._version)

    async def _range(self, request: Any, context: Any) -> Any:
        header = pb.ResponseHeader(cluster_id=1, revision=REVISION)
        return pb.RangeResponse(header=header)


if __name__ == "__main__":
    asyncio.run(OtherEtcd(sys.argv[1]).serve())

"""The source over TLS, as a user with just the roles that the page names."""

from __future__ import annotations

import re

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from clients.errors import DcpdError
from clients.spark.fetch import fetch
from clients.spark.options import parse_options
from clients.spark.source import DcpStreamReader, ReadTask
from clients.testing import DcpServer
from support.credentials import TestCa

KV_TLS = re.compile(r"with TLS\s+127\.0\.0\.1:(\d+)")


@pytest.fixture
def ca(tmp_path) -> TestCa:
    return TestCa(tmp_path)


def test_a_user_with_read_and_stream_over_tls(tmp_path, ca):
    certificate = ca.issue("server")
    with DcpServer(tmp_path / "data", "--tls-port", "0", "--tls-cert", str(certificate)) as server:
        found = KV_TLS.search(server.output)
        assert found is not None, server.output
        server.ask("POST", "/api/v1/users", {"name": "ada", "password": "secret12",
                                             "roles": {"read": [{}], "stream": [{}]}})  # fmt: skip
        with server.connect() as kv:
            kv.set(b"key", b"value")
        options = {"servers": f"127.0.0.1:{found[1]}", "username": "ada", "password": "secret12",
                   "tls": "true", "tlsCa": str(ca.path)}  # fmt: skip
        settings = parse_options(options)
        reader = DcpStreamReader(settings, StructType([]))
        end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        (task,) = reader.partitions({}, end)
        reader.stop()
        assert isinstance(task, ReadTask)
        values = [
            value
            for arrived in fetch(settings.servers, task.steps)
            for value in arrived.changes.values.to_pylist()
        ]
        assert values == [b"value"]
        wrong = DcpStreamReader(parse_options({**options, "password": "wrong"}), StructType([]))
        with pytest.raises(DcpdError, match="'ada' was refused"):
            wrong.latestOffset({}, ReadAllAvailable())
        wrong.stop()

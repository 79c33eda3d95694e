"""dcpctl cluster init: the token is told as soon as there is a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from clients.cli.cluster import cluster_commands
from clients.cli.dcpctl import run
from clients.errors import DcpdError


class NodeThatDoesNotComeBack:
    """Becomes a member, and is not reached after that."""

    def request(self, method: str, path: str, _body: Any = None) -> dict[str, Any]:
        if (method, path) == ("POST", "/api/v1/cluster/init"):
            return {"token": "dcpd-token", "cluster": "ab"}
        raise DcpdError("nobody listens")


@pytest.mark.parametrize("output", ["plain", "json"])
def test_the_token_is_told_although_the_node_is_not_back_in_time(
    output: str, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The node is a member already: `init > token` must leave a token."""
    monkeypatch.setattr(cluster_commands, "admin_of_named", lambda _: NodeThatDoesNotComeBack())
    assert run(["--timeout", "1", "-o", output, "cluster", "init"]) != 0
    told = capfdbinary.readouterr()
    assert b"dcpd-token" in told.out
    assert b"does not take part yet: " in told.err

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.server import DcpdProcess


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DcpdProcess]:
    with DcpdProcess(tmp_path_factory.mktemp("foreign") / "data") as process:
        yield process

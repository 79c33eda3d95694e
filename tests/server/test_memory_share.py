"""The size of the item cache with `auto`: an eighth of what the process may use, with a bound."""

from __future__ import annotations

import logging
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dcp.server.config.sources import ConfigError, resolve
from dcp.server.observe.event_log import EventLog
from dcp.server.storage import memory_share
from dcp.server.storage.memory_share import (
    AUTO_BYTES_MAX,
    auto_size,
    item_cache_size,
    usable_bytes,
)
from dcp.server.storage.opening import Storage

MIB = 1 << 20


def test_auto_is_an_eighth_of_the_lowest_limit() -> None:
    found = auto_size({"the machine's memory": 64 << 30, "the cgroup's limit": 2 << 30})
    assert found.bytes_max == 256 * MIB
    assert "the cgroup's limit (2048 MiB)" in found.reason


def test_auto_has_a_bound() -> None:
    assert auto_size({"the machine's memory": 256 << 30}).bytes_max == AUTO_BYTES_MAX
    assert auto_size({"the cgroup's limit": 4 * MIB}).bytes_max == MIB


def test_auto_is_the_default_and_a_size_is_taken_as_it_is() -> None:
    assert resolve({}, {}).settings.item_cache_bytes is None
    assert resolve({"item_cache_bytes": "Auto"}, {}).settings.item_cache_bytes is None
    assert item_cache_size(resolve({"item_cache_bytes": "0"}, {}).settings.item_cache_bytes) == (
        0, "item_cache_bytes",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="or auto"):
        resolve({"item_cache_bytes": "much"}, {})


@pytest.mark.parametrize(
    ("setting", "bytes_max", "why"),
    [("auto", 10 * MIB, "auto: 1/8 of a limit (80 MiB)"), ("3MiB", 3 * MIB, "item_cache_bytes")],
)
def test_the_cache_of_an_opened_store_has_that_size(
    setting: str, bytes_max: int, why: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """And the log says where it comes from."""
    monkeypatch.setattr(memory_share, "usable_bytes", lambda: {"a limit": 80 * MIB})
    settings = resolve({"data": str(tmp_path / "data"), "item_cache_bytes": setting}, {}).settings
    storage = Storage(settings.data, settings)
    try:
        assert storage.engine.item_cache.bytes_max == bytes_max
        with caplog.at_level(logging.DEBUG, "test"):
            storage.tell(EventLog(logging.getLogger("test")))
    finally:
        storage.close(is_clean=False)
    (told,) = [record.__dict__["fields"] for record in caplog.records if record.msg == "item cache"]
    assert told["bytes"] == bytes_max
    assert told["why"].startswith(why)


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/a/b\n", {"a/memory.max": "1000000", "a/b/memory.max": "max"}, 1_000_000),
        ("0::/a/b\n", {"a/memory.max": "1000000", "a/b/memory.max": "500"}, 500),
        ("0::/gone\n", {"memory.max": "77"}, 77),
        ("4:cpu:/x\n5:memory,io:/x\n", {"memory/x/memory.limit_in_bytes": "88"}, 88),
        ("0::/a\n", {"a/memory.max": "max"}, None),
        ("nonsense\n", {}, None),
    ],
)  # fmt: skip
def test_limits_of_cgroups(
    tmp_path: Path, own: str, files: dict[str, str], limit: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "self").write_text(own)
    assert usable_bytes(tmp_path, tmp_path / "self").get("the cgroup's limit") == limit


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    assert usable_bytes(tmp_path, tmp_path / "none")["the machine's memory"] > MIB


def test_a_limit_of_address_space_counts() -> None:
    code = "from dcp.server.storage.memory_share import usable_bytes as u; print(u())"
    limit = 4 << 30
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    assert f"'the limit of address space': {limit}" in done.stdout


_FREE_AND_AGAIN = """
import gc, resource
from dcp.server.storage.memory_share import tune_memory
keeps = {keeps}
if keeps:
    tune_memory()
assert (gc.get_threshold()[0] == 50_000) is keeps
for _ in range(50):
    [bytes([n]) * (1 << 20) for n in range(1, 9)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_memory_of_freed_values_is_used_again() -> None:
    """Without it, eight values of a megabyte take 2,048 new pages each time."""

    def new_pages(*, keeps: bool) -> int:
        code = _FREE_AND_AGAIN.format(keeps=keeps)
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        return int(run.stdout)

    assert new_pages(keeps=False) - new_pages(keeps=True) > 50 * 1024


@pytest.mark.parametrize(
    "start",
    [
        "from dcp.server.main import main; sys.argv = ['dcpd', '--data', sys.argv[1]]; main()",
        """from dcp.server.storage.process.store_process import main
main([sys.argv[1], str(os.getppid()), '0', '1048576', '4096'])""",
    ],
    ids=["server", "store process"],
)
def test_both_processes_tune_memory(tmp_path: Path, start: str) -> None:
    code = (
        "import os, sys\nfrom dcp.server.storage import memory_share\n"
        f"memory_share.tune_memory = lambda: os._exit(77)\n{start}"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "data")], capture_output=True, check=False
    )
    assert run.returncode == 77, run.stderr

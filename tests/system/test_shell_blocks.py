"""Every shell block of README and docs/, pasted as it is into a clean shell, page by page.

What cannot be pasted has a row in NOT_PASTED with the reason. If another test runs the block, the
reason is that test's file. If none does, the page says so: the block begins with "```sh not-run".
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.shell_blocks import (
    NOT_RUN_MARK,
    ROOT,
    Block,
    CleanShell,
    blocks_of,
    can_have_own_network,
    pages,
    programs,
)

LONG = "takes minutes; what it runs has tests of its own"
NETWORK = "needs the network, or software that does not come with dcpd"
README = "tests/system/test_readme.py"

NOT_PASTED = {
    ("README.md", "scripts/install"): README,
    ("CONTRIBUTING.md", "scripts/test"): LONG,
    ("docs/clusters.md", "dcpctl cluster demo"): "tests/cluster_processes/test_cluster_commands.py",
    ("docs/clusters.md", "pip install"): NETWORK,
    ("docs/clusters.md", "scripts/soak cluster"): LONG,
    ("docs/compatibility.md", ".venv/bin/python -m pytest"): "tests/foreign/test_npm_clients.py",
    ("docs/compatibility.md", "dcpd --data demo &"): NETWORK,
    ("docs/compatibility.md", "cp -r"): NETWORK,
    ("docs/conformance.md", "dcpctl conformance server 10.0.0.5"): NETWORK,
    ("docs/consumers-compared.md", "scripts/go-consumers"): NETWORK,
    ("docs/consumers-compared.md", "mvn compile"): NETWORK,
    ("docs/consumers-compared.md", "javac"): "tests/foreign/test_java_clients.py",
    ("docs/howto/start-a-server.md", "scripts/install"): README,
    ("docs/howto/monitor.md", "pip install"): NETWORK,
    ("docs/operations.md", "python3 -m pip install --require-hashes"): NETWORK,
    ("docs/operations.md", "dcpd --print json"): "tests/server/test_announce.py",
    ("docs/operations.md", "dcpctl context add prod"): "tests/cli/test_login.py",
    ("docs/operations.md", "dcpctl stream list"): "tests/cli/test_stream_commands.py",
    ("docs/operations.md", "dcpctl config show"): "tests/cli/test_config_and_logs.py",
    ("docs/performance.md", "scripts/install bench"): LONG,
    ("docs/replication.md", "dcpctl discarded show"): "needs a file that a cluster's node wrote",
    ("docs/replication.md", "python -m tests.modelcheck"): LONG,
    ("docs/scrubbing.md", "dcpctl repair"): "tests/server/test_repair_command.py",
    ("docs/replication.md", "python -m tests.sim --nodes 3 --bug all"): LONG,
    ("docs/simulator.md", "python -m tests.sim --nodes 3 --seed 7"): LONG,
    ("docs/simulator.md", "python -m tests.sim --bug all"): LONG,
    ("docs/runbook.md", ""): "tests/cluster_processes/test_runbook.py",
    (
        "docs/security.md",
        "dcpd --host 10.0.0.1",
    ): "needs an address of its own",
    ("docs/spark.md", "pip install"): NETWORK,
    ("docs/spark.md", "spark-submit"): "needs a Spark cluster",
    ("docs/testing-consumers.md", "dcpd --port 0"): "tests/system/test_testing_page.py",
    (
        "docs/testing-scenarios.md",
        "dcpctl cluster demo",
    ): "tests/clients/test_testing_cluster.py",
    ("docs/testing-scenarios.md", "C="): "tests/clients/test_testing_cluster.py",
    ("docs/tutorial-flights.md", "scripts/demo"): LONG,
    ("docs/tutorial-spark.md", "python examples/demos/spark_ingest.py"): (
        "tests/spark/test_spark_example.py"
    ),
}
"""(page, beginning of the block) -> the test that runs it, or why none does."""

BEFORE = {
    "docs/consumers.md": ("dcpd --data demo &",),
    "docs/scrubbing.md": ("dcpd --data demo &", "dcpctl --wait ping"),
    "docs/http-api.md": ("dcpd --data demo &",),
    "docs/metrics.md": ("dcpd --data demo &",),
    "docs/operations.md": ("dcpd &", "dcpctl set hello world; kill $!; wait $!"),
}
"""Page -> what its reader has done before: it is about a server that runs, or a folder of one."""

SAID = {
    "README.md": ("b is in cluster", "2 copies, a majority in sync for a write", "world"),
    "docs/clusters.md": ("b is in cluster",),
    "docs/index.md": ("key=b'hello'",),
    "docs/howto/follow-changes.md": (
        "set hello world", "set hello again", "partition 528 starts again",
    ),
    "docs/howto/undo-changes.md": ("branched at seqno 2, 1 change undone", "second"),
    "docs/howto/move-data.md": ("nothing is wrong", "world"),
    "docs/howto/import-and-export.md": ("A320-214", '"sold"'),
    "docs/howto/monitor.md": ("dcpd_ready 1",),
    "docs/howto/add-users.md": ("stored app:1",),
}  # fmt: skip
"""Page -> what the shell must have printed, because the page says so."""


def is_about(row: tuple[str, str], block: Block) -> bool:
    return row[0] == block.page and block.text.startswith(row[1])


def reason_of(block: Block) -> str | None:
    """Return why a block is not pasted; None if it is."""
    rows = [row for row in NOT_PASTED if is_about(row, block)]
    assert len(rows) <= 1, rows
    return NOT_PASTED[rows[0]] if rows else None


SHELL = [block for page in pages() for block in blocks_of(page) if block.is_shell]
PASTED = [block for block in SHELL if reason_of(block) is None]


def test_every_block_is_pasted_or_has_a_reason() -> None:
    used = {row for row in NOT_PASTED for block in SHELL if is_about(row, block)}
    assert used == set(NOT_PASTED), "idle rows"
    for block in SHELL:
        reason = reason_of(block)
        is_run = reason is None or reason.startswith("tests/")
        assert block.mark == ("" if is_run else NOT_RUN_MARK), (block.page, block.first_line)
        if reason is not None and is_run:
            assert (ROOT / reason).exists(), reason


def test_the_how_to_installs_as_the_readme_does() -> None:
    """So that one test runs both."""
    first = [block for block in SHELL if block.first_line == "scripts/install"]
    assert {block.page for block in first} == {"README.md", "docs/howto/start-a-server.md"}
    assert len({block.text for block in first}) == 1


def test_the_readme_makes_a_cluster_in_five_commands() -> None:
    text = (ROOT / "README.md").read_text().partition("## The cluster in five commands\n")[2]
    (block,) = [block for block in PASTED if block.page == "README.md" and "init" in block.text]
    assert block.text in text
    assert len(block.text.strip().splitlines()) == 5


def test_commands_are_in_fenced_blocks() -> None:
    """An indented block is not found by the test above, and cannot be copied with one click."""
    words = ("dcpd ", "dcpctl ", "scripts/", "python", ".venv/", "curl ", "pip ", "export ", "$ ")
    loose = [
        f"{page.relative_to(ROOT)}: {line.strip()}"
        for page in pages()
        for line in page.read_text().splitlines()
        if line.startswith("    ") and line.strip().startswith(words)
    ]
    assert loose == []


@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", sorted({block.page for block in PASTED}))
def test_the_shell_blocks(page: str, tmp_path: Path) -> None:
    if not can_have_own_network():
        pytest.skip("this user may not create a network namespace (unshare --net, ip)")
    before = [Block(page, "sh", "", f"{text}\n") for text in BEFORE.get(page, ())]
    blocks = before + [block for block in PASTED if block.page == page]
    shell = CleanShell(tmp_path / "clone")
    try:
        for name, text in programs(blocks_of(ROOT / page)):
            (tmp_path / "clone" / name).write_text(text)
        output = "".join(shell.paste(block) for block in blocks)
    finally:
        shell.close()
    assert [text for text in SAID.get(page, ()) if text not in output] == [], output


def test_a_block_that_fails_is_noticed(tmp_path: Path) -> None:
    if not can_have_own_network():
        pytest.skip("this user may not create a network namespace (unshare --net, ip)")
    shell = CleanShell(tmp_path / "clone")
    try:
        with pytest.raises(AssertionError, match="ls no-such-file"):
            shell.paste(Block("page", "sh", "", "true\nls no-such-file\ntrue\n"))
        assert "said" in shell.paste(Block("page", "sh", "", "echo said\n"))
    finally:
        shell.close()

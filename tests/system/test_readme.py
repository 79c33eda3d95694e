"""Every command of the README runs as it stands there, in its order, from a fresh copy. Its cluster
needs ports of its own: test_shell_blocks.py runs that block.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.etcd_members import free_ports

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

COMMANDS_TO_FIRST = {"set": 2, "get": 3, "watch": 4}
FIRST_KEY_LINES = 4


def code_blocks(language: str) -> list[str]:
    text, found, _ = README.read_text().partition("\n## The cluster in five commands\n")
    assert found
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


class Shell:
    """Runs README lines one by one; `dcpd &` and `dcpctl watch`, which do not end, by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (port,) = map(str, free_ports(1))
        self.environment = os.environ | {
            "DCPD_PORT": port,
            "DCPD_ADMIN_PORT": "0",
            "DCPCTL_SERVER": f"127.0.0.1:{port}",
            "PWD": str(folder),
            "DCPD_COMPILE_LEVEL": "0",
        }
        self.port = port
        self.server: subprocess.Popen[bytes] | None = None
        self.output: dict[str, str] = {}

    def run(self, line: str) -> None:
        line = line.strip()
        if line.startswith("export PATH="):
            path = line.removeprefix("export PATH=").strip('"').replace("$PWD", str(self.folder))
            self.environment["PATH"] = path.replace("$PATH", self.environment["PATH"])
        elif line == "dcpd &":
            # As in a shell: the next line does not wait for the server to get ready.
            self.server = subprocess.Popen(
                ["dcpd"], cwd=self.folder, env=self.environment, stdout=subprocess.DEVNULL
            )
        elif line == "dcpctl watch":
            self.output[line] = self.watch()
        else:
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=self.folder,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=400,
                check=False,
            )
            self.output[line] = done.stdout + done.stderr
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"

    def watch(self) -> str:
        watch = subprocess.Popen(
            ["dcpctl", "watch"],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watch.stdout is not None
        first = watch.stdout.readline()
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=10)
        return first


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("readme") / "dcpd"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    shell = Shell(folder)
    yield shell
    if shell.server is not None:
        shell.server.terminate()
        shell.server.communicate(timeout=20)


def shell_lines() -> list[str]:
    return [line for block in code_blocks("sh") for line in block.splitlines() if line.strip()]


@pytest.mark.timeout(180)
def test_the_first_five_minutes(shell: Shell) -> None:
    for line in shell_lines():
        shell.run(line)
    output = shell.output
    assert output["dcpctl get hello"].startswith("world")
    assert "world" in output["dcpctl watch"]
    assert '"value":"again"' in output["dcpctl watch --until-now -o json"].replace(" ", "")
    assert "ROLLBACK" in output["dcpctl watch --until-now --state watched.ckpt"]
    assert output["dcpctl keys hel"] == "hello\n"
    assert "528" in output["dcpctl vb branch --vb 528 --at 1"]
    (program,) = code_blocks("python")
    ran = subprocess.run(
        [sys.executable, "-c", program.replace("11210", shell.port)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    kinds = [line.partition("(")[0] for line in ran.stdout.splitlines()]
    assert kinds == ["MutationResult", "Mutation", "Mutation"], "what happened to documents only"
    assert "greeting" in ran.stdout


def test_few_commands_lead_to_the_first_set_get_and_watch() -> None:
    block = code_blocks("sh")[1]
    commands = [line for line in block.splitlines() if line.strip()]
    for word, count in COMMANDS_TO_FIRST.items():
        assert commands[count - 1].startswith(f"dcpctl {word}")


def test_four_lines_lead_from_a_clone_to_the_first_key() -> None:
    lines = shell_lines()
    first = next(at for at, line in enumerate(lines) if line.startswith("dcpctl set"))
    assert first + 1 == FIRST_KEY_LINES
    assert lines[first].endswith("--wait"), "no line waits for the server but this one"


def test_every_file_that_the_readme_names_is_there() -> None:
    text = README.read_text()
    names = set(re.findall(r"\]\(([^)#]+)\)", text)) | set(re.findall(r"`(scripts/\w+)`", text))
    missing = [name for name in names if not (ROOT / name).exists()]
    assert not missing

"""dcpctl completion: the scripts, in the shells that they are for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
ENV = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}


def script(shell: str, program: str = "dcpctl") -> str:
    done = subprocess.run(
        [str(BIN / "dcpctl"), "completion", shell, "--program", program],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout


def completed_by_bash(words: list[str], program: str) -> set[str]:
    """What bash offers for the last word."""
    asked = (
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        f'_{program}_completion {program}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    command = shutil.which("bash")
    if command is None:
        pytest.skip("the command bash is missing (sudo apt-get install bash)")
    done = subprocess.run(
        [command, "--norc", "-euc", script("bash", program) + asked],
        env=ENV, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return set(done.stdout.split())


def test_bash_completes_commands_and_options() -> None:
    assert completed_by_bash(["dcpctl", "wat"], "dcpctl") == {"watch"}
    assert {"branch", "dump", "purge"} <= completed_by_bash(["dcpctl", "vb", "''"], "dcpctl")
    assert "--until-now" in completed_by_bash(["dcpctl", "watch", "--unt"], "dcpctl")
    assert completed_by_bash(["dcpctl", "completion", "z"], "dcpctl") == {"zsh"}
    assert "--metrics-token" in completed_by_bash(["dcpd", "--metr"], "dcpd")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_the_script(shell: str, tmp_path: Path) -> None:
    text = script(shell)
    assert f"_DCPCTL_COMPLETE={shell}_complete" in text
    assert "dcpctl" in text
    command = shutil.which(shell)
    if command is None:
        pytest.skip(f"the command {shell} is missing (sudo apt-get install {shell})")
    path = tmp_path / "script"
    path.write_text(text)
    subprocess.run([command, "-n", str(path)], check=True, timeout=60)

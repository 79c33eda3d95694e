"""dcpctl completion: the scripts, in the shells that they are for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from site_pages.man_pages import share_files

ROOT = Path(__file__).parents[2]
SHARE = ROOT / "deploy" / "share"
_PRINTS_SHARE_FILES = (
    "import json; from site_pages.man_pages import share_files; print(json.dumps(share_files()))"
)
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


def test_what_a_wheel_installs_is_current() -> None:
    found = {str(path.relative_to(SHARE)): path for path in SHARE.rglob("*") if path.is_file()}
    # In a process of its own: click keeps the help option of a command that another test has made.
    made = subprocess.run(
        [sys.executable, "-c", _PRINTS_SHARE_FILES], check=True, capture_output=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "docs"},
    )  # fmt: skip
    wanted = json.loads(made.stdout)
    assert set(found) == set(wanted), "run scripts/pages"
    for name, text in wanted.items():
        assert found[name].read_text() == text, f"{name}: run scripts/pages"
    assert wanted["bash-completion/completions/dcpctl"].rstrip() == script("bash").rstrip()


def test_the_man_page_of_dcpctl_has_every_command() -> None:
    text = share_files()["man/man1/dcpctl.1"]
    parts = ("vb branch [OPTIONS]", "edit [OPTIONS] KEY", "cluster meta export [OPTIONS]")
    for part in (".SH EXIT STATUS", *(f".SS dcpctl {each}" for each in parts)):
        assert part in text
    groff = shutil.which("groff")
    if groff is None:
        pytest.skip("the command groff is missing (sudo apt-get install groff)")
    done = subprocess.run(
        [groff, "-man", "-Tutf8", "-ww", "-z", str(SHARE / "man/man1/dcpctl.1")],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""


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

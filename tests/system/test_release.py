"""scripts/release: the packages, man pages, completion scripts and the list of requirements."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml

from clients.install_hint import IS_PUBLISHED, hint_of
from dcp import __version__
from site_pages.man_pages import share_files
from vbucket.native.form import has_loops

ROOT = Path(__file__).parents[2]
PACKAGES = ("clients", "dcp", "failover", "vbucket")
FRONT = "clients/front/dcpd/"


def release(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "scripts/release", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "dist"
    done = release("--untagged", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2, "twine checks both"
    return folder


def test_the_wheel_has_the_packages_in_one_and_their_types(made: Path) -> None:
    (wheel,) = made.glob("*.whl")
    with ZipFile(wheel) as file:
        names = set(file.namelist())
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        text = file.read(metadata).decode()
    assert f"\nVersion: {__version__}\n" in text
    assert "dcpd/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"dcpd", *(f"dcpd-{__version__}.{kind}" for kind in ("data", "dist-info"))}
    shared = {name.partition(".data/data/share/")[2] for name in names if "/share/" in name}
    assert shared == set(share_files())
    sources = {
        f"dcpd/{str(path.relative_to(ROOT)).removeprefix(FRONT)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == sources


def test_the_sdist_has_what_a_developer_needs(made: Path) -> None:
    (sdist,) = made.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    wanted = {
        "scripts/test", "requirements/test.txt", "tests/conftest.py", "docs/http-api.md",
        "deploy/docker/Dockerfile", "hatch_build.py", "LICENSE",
    }  # fmt: skip
    assert wanted <= names
    assert not any(re.match(r"\.venv|\.git/|dist/", name) for name in names)


def test_every_command_has_a_man_page(made: Path) -> None:
    pages = {path.stem: path for path in (made / "man").iterdir()}
    assert {"dcpd", "dcpctl", "dcpctl-watch", "dcpctl-vb-branch", "dcpctl-backup-run"} <= set(pages)
    dcpd = pages["dcpd"].read_text()
    assert ".B \\-\\-metrics\\-token FILE" in dcpd
    assert f'"dcpd {__version__}"' in dcpd
    command = shutil.which("groff")
    if command is None:
        pytest.skip("the command groff is missing (sudo apt-get install groff)")
    done = subprocess.run(
        [command, "-ww", "-man", "-Tutf8", "-z", *map(str, pages.values())],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_completion_scripts_are_there(made: Path) -> None:
    names = {path.name for path in (made / "completion").iterdir()}
    assert names == {f"{p}.{s}" for p in ("dcpctl", "dcpd") for s in ("bash", "zsh", "fish")}


def test_the_list_of_requirements_is_the_lock(made: Path) -> None:
    document = json.loads((made / f"dcpd-{__version__}.cdx.json").read_text())
    assert document["metadata"]["component"]["version"] == __version__
    listed = {component["name"]: component["version"] for component in document["components"]}
    lock = (ROOT / "requirements" / "run.txt").read_text()
    assert listed == dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^ ;\\]+)", lock, re.MULTILINE))
    assert all(
        reference["hashes"]
        for component in document["components"]
        for reference in component["externalReferences"]
    )


def test_checksums_are_right(made: Path) -> None:
    lines = (made / "SHA256SUMS").read_text().splitlines()
    for line in lines:
        digest, _, name = line.partition("  ")
        assert hashlib.sha256((made / name).read_bytes()).hexdigest() == digest, name
    files = [path for path in made.rglob("*") if path.is_file()]
    assert len(lines) == len(files) - 1


def test_a_release_needs_its_tag(tmp_path: Path) -> None:
    done = release(str(tmp_path / "dist"))
    assert (done.returncode, f"v{__version__}" in done.stderr) == (1, True)
    assert not (tmp_path / "dist").exists()


def test_hints_name_what_works() -> None:
    """docs, examples and messages: a package of the public index only once there is one."""
    wrong = hint_of("", is_published=not IS_PUBLISHED).partition("[")[0]
    folders = ("docs", "examples", "benchmarks", "clients", "dcp")
    pages = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    found = [
        str(path.relative_to(ROOT))
        for path in [*pages, ROOT / "README.md"]
        if path.suffix in {".md", ".py"} and path.name != "install_hint.py"
        and f"{wrong}[" in path.read_text()
    ]  # fmt: skip
    right = hint_of("", is_published=IS_PUBLISHED).partition("[")[0]
    assert found == [], f"replace {wrong}[ by {right}["


# -- .github/workflows/release.yml: as far as it goes here -----------------------------------------


def workflow() -> dict[str, Any]:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    jobs: dict[str, Any] = yaml.safe_load(text)["jobs"]
    return jobs


def test_the_workflow_runs_what_is_there() -> None:
    """Its commands are our scripts and the locked cibuildwheel."""
    commands = [
        step["run"] for job in workflow().values() for step in job["steps"] if "run" in step
    ]
    assert any(command.startswith("python -m cibuildwheel") for command in commands)
    for command in commands:
        for name in re.findall(r"(?:scripts|requirements)/[\w.-]+", command):
            assert (ROOT / name).exists(), command
    assert "cibuildwheel==" in (ROOT / "requirements" / "wheels.txt").read_text()
    runners = workflow()["loops"]["strategy"]["matrix"]["runner"]
    assert sorted(name.endswith("-arm") for name in runners) == [False, True]


def test_the_wheels_are_for_the_versions_that_the_project_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = [
        re.sub(r".* :: (3)\.(\d+)$", r"cp\1\2-manylinux_*", classifier)
        for classifier in project["project"]["classifiers"]
        if re.search(r":: 3\.\d+$", classifier)
    ]
    settings = project["tool"]["cibuildwheel"]
    assert settings["build"] == named == [f"cp3{minor}-manylinux_*" for minor in range(11, 15)]
    assert settings["environment"] == {"DCPD_COMPILE": "1"}, "a wheel that is plain is no release"
    assert (ROOT / settings["test-command"].split("{project}/")[1]).exists()


def test_the_smoke_test_tells_a_plain_installation() -> None:
    """Every run of it stores and reads; test_loops_build.py runs it on one with the loops."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    asked = [sys.executable, "scripts/smoke.py"]
    plain = subprocess.run(
        [*asked, "--plain"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.endswith("documents were stored, and read after a restart\n")
    strict = subprocess.run(
        asked, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (strict.returncode, "it has no loops in C" in strict.stderr) == (
        (0, False) if has_loops() else (1, True)
    )

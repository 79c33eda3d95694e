"""What is installed takes one name, `dcpd`, also beside packages named as ours."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import hatch_build
from clients.testing import DcpServer
from support.installations import ROOT, build_wheel, copied_sources, plain_environment, run, use

APP = """
import clients, dcp
from dcpd import DcpdError, SyncKv
from dcpd.testing import DcpServer

assert (clients.NAME, dcp.NAME) == ("shop", "shop")
with DcpServer() as server, SyncKv(server.address) as kv:
    kv.set_json("order", {"total": 7})
    print(kv.get_json("order").value)
    try:
        kv.get("nothing")
    except DcpdError as error:
        print(type(error).__name__)
"""
TEST = """
import clients

def test_the_fixture_is_there(dcp_server):
    assert clients.NAME == "shop"
    assert dcp_server.status()["items"] == 0
"""
TYPED = """
from clients import NAME
from dcpd import Consumer, SyncKv
from dcpd.testing import DcpServer

reveal_type(NAME)
with SyncKv("127.0.0.1:11210") as kv:
    kv.set("order", {"total": 7})
reveal_type(DcpServer().address)
from dcpd import Nothing
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which sees the other packages that are here."""
    folder = tmp_path_factory.mktemp("wheel")
    built = build_wheel(copied_sources(folder), folder, DCPD_COMPILE="0")
    assert built.returncode == 0, built.stderr
    venv.create(folder / "environment", with_pip=False)
    (packages,) = folder.glob("environment/lib/python*/site-packages")
    (packages / "here.pth").write_text(sysconfig.get_path("purelib"))
    python = folder / "environment" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    install = ("-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index")
    done = run(*install, "--ignore-installed", str(wheel))
    assert done.returncode == 0, done.stderr
    return python


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose packages have the names of ours."""
    folder = tmp_path_factory.mktemp("shop")
    for package in hatch_build.PACKAGES:
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text('NAME = "shop"\n')
    for name, text in (("app", APP), ("test_shop", TEST), ("typed", TYPED)):
        (folder / f"{name}.py").write_text(text)
    return folder


def test_a_project_with_a_package_clients_keeps_it(python: Path, shop: Path) -> None:
    done = run("app.py", cwd=shop, python=python)
    assert (done.stdout, done.stderr) == ("{'total': 7}\nNotFoundError\n", "")


def test_the_commands_run_in_its_folder(python: Path, shop: Path) -> None:
    """Also with the folder in the path, which some set for all programs."""
    assert "is ready" in use(python, shop, PYTHONPATH=str(shop))


def test_the_conformance_kit_runs_as_it_is_installed(python: Path, shop: Path) -> None:
    """With dcpctl's own hooks, which run as a module of the package."""
    with DcpServer() as server:
        done = run(
            str(python.parent / "dcpctl"), "conformance", "server", server.address, "--dcpd",
            "--only", "framing,branch.log,collections.begin", python=python, cwd=shop,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "0 fail, 0 refused, 0 n/a" in done.stdout


def test_the_fixture_of_pytest_needs_no_import(python: Path, shop: Path) -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=shop, python=python)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_pytest_loads_nothing_of_dcpd_but_the_fixtures(python: Path) -> None:
    """Whoever has dcpd installed pays for the plugin in each run of pytest."""
    program = "import sys, dcpd.pytest_plugin; print(*[n for n in sys.modules if 'clients' in n])"
    names = run("-c", program, python=python).stdout.split()
    assert {name.rpartition(".")[2] for name in names} == {
        "clients", "testing", "fixture", "lazy_names",
    }  # fmt: skip


def test_type_checkers_find_what_is_wrong(python: Path, shop: Path) -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "typed.py"],
        cwd=shop, env=plain_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.findall(
        r"typed.py:(\d+): (?:error|note): (.+?)(?:  \[|$)", checked.stdout, re.MULTILINE
    )
    assert found == [
        ("6", 'Revealed type is "str"'),
        ("8", 'Argument 2 has incompatible type "dict[str, int]"; expected "bytes"'),
        ("9", 'Revealed type is "str"'),
        ("10", 'Module "dcpd" has no attribute "Nothing"'),
    ]


def test_imports_and_names_of_modules_move_and_nothing_else() -> None:
    source = '''"""Text: from clients import Consumer."""
from dcp.wire import frame
import clients.kv as kv, os
COMMAND = ("-m", "dcp.server.main", "dcp.server", "é"); from vbucket import model
from clients_of_others import dcp
'''
    wanted = '''"""Text: from clients import Consumer."""
from dcpd.dcp.wire import frame
import dcpd.clients.kv as kv, os
COMMAND = ("-m", "dcpd.dcp.server.main", "dcp.server", "é"); from dcpd.vbucket import model
from clients_of_others import dcp
'''
    assert hatch_build.moved(source, hatch_build.module_names(ROOT)) == wanted
    with pytest.raises(ValueError, match=r"line 2: `import clients[.]kv` has no `as`"):
        hatch_build.moved("import os\nimport clients.kv\n", frozenset())
    with pytest.raises(ValueError, match=r"line 1: 'dcp\.wire' is written in a form"):
        hatch_build.moved("from  dcp.wire import frame", frozenset())


def test_no_name_of_a_module_is_put_together_from_text() -> None:
    """`f"clients.{name}"` would not move: write `f"{__package__}.{name}"`."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {part.value}"
        for package in hatch_build.PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr)
        for part in node.values[:1]
        if isinstance(part, ast.Constant)
        and str(part.value).startswith(tuple(f"{name}." for name in hatch_build.PACKAGES))
    ]
    assert found == []

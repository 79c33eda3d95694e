"""What users import from `clients` is there, and nothing is imported before it is used."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import clients
import dcp

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_there_and_every_module_in_table():
    for name in clients.__all__:
        assert getattr(clients, name) is not None
    table = next(
        ast.literal_eval(node.args[1])
        for node in ast.walk(ast.parse(Path(clients.__file__).read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_names"
    )
    assert sorted(clients.__all__) == sorted(["__version__", *" ".join(table.values()).split()])


def test_type_checkers_see_the_same_names():
    text = Path(clients.__file__).read_text()
    block = text.partition("if TYPE_CHECKING:")[2].partition("__getattr__")[0]
    imported = re.findall(r"^        (\w+),$|import (\w+(?:, \w+)*)$", block, re.MULTILINE)
    names = {name for pair in imported for part in pair if part for name in part.split(", ")}
    assert names | {"__version__"} == set(clients.__all__)


FACES = {
    "checkpoint": "Checkpoint CheckpointFile MemoryCheckpoint decode_checkpoint encode_checkpoint",
    "consumer": "Consumer",
    "kv": "KvClient SyncKv",
    "mirror": "Mirror",
    "operation": "MutationResult",
}
"""Modules from which users may import, beside `clients`, and names that they have."""


@pytest.mark.parametrize("module", FACES)
def test_the_modules_of_public_names_keep_them(module):
    face = importlib.import_module(f"clients.{module}")
    for name in FACES[module].split():
        assert getattr(face, name) is not None
        assert name in getattr(face, "__all__", [name])
        if name in clients.__all__:
            assert getattr(face, name) is getattr(clients, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Producer'"):
        clients.Producer  # noqa: B018


def test_importing_clients_imports_none_of_its_modules():
    program = (
        "import sys, clients; print(sorted(n for n in sys.modules if n.startswith('clients.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['clients.lazy_names']"


def test_docs_name_what_there_is():
    text = (ROOT / "docs" / "consumers.md").read_text()
    named = set(re.findall(r"`(?:async with )?([A-Z]\w+)(?:\(|`)", text))
    known = set(clients.__all__)
    assert named - known <= {"HistoryBranchedError", "DCPD_GROUP_SIZE"}
    options = set(re.findall(r"`(\w+)=", text))
    accepted = {field.name for field in dataclasses.fields(clients.ConsumerOptions)}
    assert options <= accepted, options - accepted


def test_type_checkers_of_users_believe_the_annotations():
    """Without the marker of PEP 561 they take every name for Any; mypy --strict checks the rest."""
    assert (Path(clients.__file__).parent / "py.typed").is_file()
    for name in clients.__all__:
        public = getattr(clients, name)
        members = inspect.getmembers(public, inspect.isfunction) if inspect.isclass(public) else ()
        for _, function in members:
            if function.__module__.startswith("clients") and not function.__name__.startswith("_"):
                assert "return" in function.__annotations__, function


# -- what is public, and what examples use ---------------------------------------------------------

PUBLIC_PACKAGES = ("clients", "clients.backup", "clients.spark", "clients.testing")
OURS = ("dcpd", "clients", "dcp", "vbucket", "failover")
INTERNAL_ERRORS = {
    "clients.backup.archives.segment.DamagedError": "becomes ArchiveDamagedError, with its segment",
    "clients.spark.columns.NotTextError": "becomes DcpdError, which names the change",
    "clients.kv.differences.": "dcpctl diff prints it",
    "clients.cli.": "dcpctl prints them",
    "clients.conformance.": "become results and reports; dcpd.conformance exports its one error",
    "clients.testing.control.": "becomes an answer over HTTP",
}
"""Class or package -> why its errors never reach a user's program."""


def error_classes() -> dict[str, type[BaseException]]:
    """Every exception class that is defined below clients/, by full name."""
    found = {}
    for path in sorted((ROOT / "clients").rglob("*.py")):
        names = [
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error")
        ]
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found.update({f"{module}.{name}": name for name in names})
    return {
        full: getattr(importlib.import_module(full.rpartition(".")[0]), name)
        for full, name in found.items()
    }


def test_every_error_that_a_program_can_meet_is_exported():
    hidden = []
    for full, error in error_classes().items():
        if full.startswith(tuple(INTERNAL_ERRORS)):
            continue
        package = next((p for p in PUBLIC_PACKAGES[1:] if full.startswith(f"{p}.")), "clients")
        public = importlib.import_module(package)
        if error.__name__ not in public.__all__ or getattr(public, error.__name__) is not error:
            hidden.append(full)
    assert hidden == []
    assert clients.NotFoundError.__mro__[1:3] == (clients.StatusError, clients.DcpdError)


def test_the_names_in_signatures_are_exported():
    """Who annotates a function that takes a client's result needs the class of that result."""
    hidden = set()
    for public in (getattr(clients, name) for name in clients.__all__):
        members = [public] if inspect.isfunction(public) else []
        if inspect.isclass(public) and public.__module__.startswith("clients"):
            members += [
                getattr(member, "__func__", getattr(member, "fget", member))
                for name, member in vars(public).items()
                if name == "__init__" or not name.startswith("_")
            ]
        for function in filter(inspect.isfunction, members):
            text = " ".join(map(str, function.__annotations__.values()))
            for word in set(re.findall(r"\b[A-Z]\w+", text)):
                found = function.__globals__.get(word)
                is_ours = getattr(found, "__module__", "").startswith("clients")
                is_alias = found is not None and word in {"Start", "OnRollback", "Outcome"}
                if (is_ours or is_alias) and word not in clients.__all__:
                    hidden.add(f"{function.__qualname__}: {word}")
    assert hidden == set()


def test_every_command_of_a_client_says_what_it_raises():
    """Those of KvClient are the same functions."""
    commands = {
        name: inspect.getdoc(member) or ""
        for name, member in inspect.getmembers(clients.SyncKv, inspect.isfunction)
        if not name.startswith("_") and name != "close"
    }
    assert len(commands) >= 20
    assert [name for name, text in commands.items() if "Raises" not in text] == []


def test_the_package_says_its_version():
    assert clients.__version__ == dcp.__version__


def test_examples_and_pages_import_public_names_only():
    """From `dcpd`: the packages below it have other names where it is installed."""
    examples = sorted((ROOT / "examples").rglob("*.py"))
    sources = {path.name: path.read_text() for path in examples}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        sources.update({f"{page.name} {n}": block for n, block in enumerate(blocks)})
    assert len(sources) > 10
    hidden = []
    for source, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in names:
                if module.partition(".")[0] not in {
                    "dcpd",
                    "clients",
                    "dcp",
                    "vbucket",
                    "failover",
                }:
                    continue
                is_public = module in {
                    "dcpd", "dcpd.conformance", "dcpd.spark", "dcpd.testing",
                }  # fmt: skip
                known = importlib.import_module(module).__all__ if is_public else ()
                taken = [alias.name for alias in getattr(node, "names", ())]
                hidden += [f"{source}: {module} {name}" for name in taken if name not in known]
    assert hidden == []

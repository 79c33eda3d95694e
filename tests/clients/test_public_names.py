"""What users import from `clients` is there, and nothing is imported before it is used."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import clients

ROOT = Path(__file__).parents[2]


def test_every_public_name_is_there_and_every_module_told_by_the_table():
    for name in clients.__all__:
        assert getattr(clients, name) is not None
    table = next(
        ast.literal_eval(node.args[1])
        for node in ast.walk(ast.parse(Path(clients.__file__).read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_names"
    )
    assert sorted(clients.__all__) == sorted(" ".join(table.values()).split())


def test_type_checkers_see_the_same_names():
    text = Path(clients.__file__).read_text()
    block = text.partition("if TYPE_CHECKING:")[2].partition("__getattr__")[0]
    imported = re.findall(r"^        (\w+),$|import (\w+(?:, \w+)*)$", block, re.MULTILINE)
    names = {name for pair in imported for part in pair if part for name in part.split(", ")}
    assert names == set(clients.__all__)


FACES = {
    "checkpoint": "Checkpoint CheckpointFile MemoryCheckpoint decode_checkpoint encode_checkpoint",
    "checkpoint_lmdb": "LmdbCheckpoint",
    "checkpoint_server": "ServerCheckpoint",
    "consumer": "Consumer",
    "consumer_group": "Group",
    "consumer_metrics": "ConsumerMetrics export_prometheus",
    "consumer_reader": "Delivery",
    "consumer_sync": "SyncConsumer SyncMirror",
    "kv": "KvClient SyncKv",
    "kv_sync": "SyncKv",
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
    accepted = set(inspect.signature(clients.Consumer).parameters)
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

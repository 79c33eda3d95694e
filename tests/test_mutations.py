"""The mutations of scripts/mutate can be applied, and say so where one cannot."""

from __future__ import annotations

import pytest

from tests.mutations.__main__ import AnchorError, files_of_tests, main, place_of
from tests.mutations.mutation import Mutation
from tests.mutations.table import MUTATIONS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_has_one_place_and_its_tests(mutation: Mutation) -> None:
    text = place_of(mutation).read_text()
    assert mutation.old != mutation.new
    compile(text.replace(mutation.old, mutation.new), mutation.name, "exec")
    assert files_of_tests(mutation)


def test_names_are_unique() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 20


@pytest.mark.parametrize(
    ("old", "found"), [("no such line of code\n", "0 times"), ("import annotations\n", "times")]
)
def test_an_anchor_that_is_not_there_once_is_an_error(old: str, found: str) -> None:
    with pytest.raises(AnchorError, match=rf"nowhere: .* it is.*{found}"):
        place_of(Mutation("nowhere", old, "", ("test_log",)))


def test_a_test_file_that_is_gone_is_an_error() -> None:
    mutation = MUTATIONS[0]._replace(tests=("test_of_nothing",))
    with pytest.raises(AnchorError, match=r"0 files .*/test_of_nothing\.py"):
        files_of_tests(mutation)


def test_a_name_that_is_not_known_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["mutate", "--name", "no-such-mutation"])
    assert main() == 2
    assert "no mutation no-such-mutation" in capsys.readouterr().err

"""The scenarios of the conformance kit, for tests of consumers with pytest (clients/conformance).

@pytest.mark.parametrize("scenario", scenarios("rollback", "stream"))
def test_my_consumer(scenario: str) -> None:
play(scenario, ["python", "my_consumer.py"])
"""

from __future__ import annotations

from collections.abc import Sequence

from clients.conformance.check import FAIL
from clients.conformance.consumers.suite import TIMEOUT_S, UnknownScenarioError, chosen, play_all

__all__ = ["UnknownScenarioError", "play", "scenarios"]


def scenarios(*names: str) -> list[str]:
    """Return the names of scenarios; `names` are scenarios or groups, none for all.

    Raises UnknownScenarioError.
    """
    return [each.name for each in chosen(names or ("all",))]


def play(scenario: str, command: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> None:
    """Play a scenario for a consumer's command; docs/conformance.md says what it has to do.

    `timeout_s` is how long it may take to have what the server has. Raises AssertionError with the
    report if the consumer fails, UnknownScenarioError.
    """
    for result in play_all(chosen([scenario]), command, timeout_s=timeout_s):
        assert result.outcome != FAIL, "\n".join([result.reason, *result.exchange])

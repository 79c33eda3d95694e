"""The secrets of a cluster: nodes log in at each other, and at the embedded store, with the first.

All nodes change to another secret while they run, one step at a time. Each step is taken by all
nodes before the next one begins:

    before   A        every node uses A
    accept   A, B     every node lets B in; none uses it yet
    use      B, A     every node uses B; those that still use A are let in
    forget   B        nobody is let in with A any more

A secret that follows another one begins with its number and a dot, so all agree which is newer.

Invariants
- there are one or two secrets, all different and each long enough; the one in use is the first;
- a step keeps the secret that is in use, so nodes that are one step apart let each other in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

SECRETS_MAX: Final = 2
SECRET_BYTES_MIN: Final = 16
"""128 random bits."""


class KeyringError(ValueError):
    """The secrets cannot be these. The text says why, without a secret in it."""


class Keyring:
    """See the module. Whoever logs nodes in or dials them reads it each time."""

    def __init__(self, secrets: Sequence[str]) -> None:
        """Raises KeyringError."""
        self.secrets = _checked(secrets)
        self._has_step = False

    @property
    def in_use(self) -> str:
        """What this node logs in with."""
        return self.secrets[0]

    @contextmanager
    def step(self, secrets: Sequence[str]) -> Iterator[None]:
        """Take one step when the block has ended without an error. Raises KeyringError."""
        if self.in_use not in _checked(secrets):
            raise KeyringError(
                "the secret that this node uses has to stay among those that it accepts; let all "
                "nodes use the other one first"
            )
        if self._has_step:
            raise KeyringError("another change of this node's secrets is under way; try again soon")
        self._has_step = True
        try:
            yield
            self.secrets = tuple(secrets)
        finally:
            self._has_step = False


def number_of(secret: str) -> int:
    """Return how many secrets of the cluster came before this one."""
    number, dot, _ = secret.partition(".")
    return int(number) if dot and number.isdecimal() else 0


def next_step(now: Sequence[Sequence[str]], target: str) -> list[tuple[str, ...]]:
    """Return what the nodes with these secrets take next on the way to `target`; the same as now
    if all have nothing but that. It does not matter how far an earlier attempt has come.
    """
    assert now
    if not all(target in secrets for secrets in now):
        return [(secrets[0], target) if secrets[0] != target else tuple(secrets) for secrets in now]
    if not all(secrets[0] == target for secrets in now):
        return [(target, *(each for each in secrets if each != target)) for secrets in now]
    return [(target,)] * len(now)


def _checked(secrets: Sequence[str]) -> tuple[str, ...]:
    if not 1 <= len(secrets) <= SECRETS_MAX or len(set(secrets)) != len(secrets):
        raise KeyringError(
            f"a node knows one secret or {SECRETS_MAX} different ones, and not {len(secrets)}"
        )
    for secret in secrets:
        size = len(secret.encode())
        if size < SECRET_BYTES_MIN:
            raise KeyringError(
                f"the cluster's secret has {size} bytes, at least {SECRET_BYTES_MIN} are needed"
            )
    return tuple(secrets)

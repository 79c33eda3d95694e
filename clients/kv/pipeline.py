"""`Pipeline`: operations that are collected and sent together. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from clients.operation import (
    Operation,
    Outcome,
    counter_operation,
    delete_operation,
    get_operation,
    store_operation,
)
from dcp.wire.opcode import Opcode


class Pipeline:
    """Operations that are collected and sent together; see `KvClient.pipeline`."""

    def __init__(self, execute: Callable[[list[Operation]], Awaitable[list[Outcome]]]) -> None:
        self.results: list[Outcome] = []
        """After `execute`: one result or error per operation, in order."""
        self._execute = execute
        self._operations: list[Operation] = []

    def __len__(self) -> int:
        """Return the number of collected operations."""
        return len(self._operations)

    def get(self, key: bytes | str) -> None:
        """Add a GET; its result is a Document."""
        self._operations.append(get_operation(key))

    def set(
        self, key: bytes | str, value: bytes, *, flags: int = 0, expiry_s: int = 0, cas: int = 0
    ) -> None:
        """Add a SET; its result is a MutationResult."""
        self._operations.append(store_operation(Opcode.SET, key, value, flags, expiry_s, cas))

    def add(self, key: bytes | str, value: bytes, *, flags: int = 0, expiry_s: int = 0) -> None:
        """Add an ADD."""
        self._operations.append(store_operation(Opcode.ADD, key, value, flags, expiry_s))

    def replace(
        self, key: bytes | str, value: bytes, *, flags: int = 0, expiry_s: int = 0, cas: int = 0
    ) -> None:
        """Add a REPLACE."""
        self._operations.append(store_operation(Opcode.REPLACE, key, value, flags, expiry_s, cas))

    def delete(self, key: bytes | str, *, cas: int = 0) -> None:
        """Add a DELETE."""
        self._operations.append(delete_operation(key, cas))

    def increment(
        self, key: bytes | str, delta: int = 1, *, initial: int | None = None, expiry_s: int = 0
    ) -> None:
        """Add an INCREMENT; its result is a CounterResult."""
        operation = counter_operation(Opcode.INCREMENT, key, delta, initial, expiry_s)
        self._operations.append(operation)

    async def execute(self) -> list[Outcome]:
        """Send the collected operations; return one result or error per operation, in order."""
        operations, self._operations = self._operations, []
        self.results = await self._execute(operations)
        return self.results

"""Checks passwords: a few derivations at a time, in threads beside the loop.

Called by logins (dcp.server.access.logins), for the key-value and the admin ports. A derivation
takes 5 ms of processor time. On the loop, a few hundred guesses a second would leave no time for
other clients.

Invariants
- at most THREADS derivations run; at most WAITING_MAX checks wait, WAITING_PER_HOST_MAX of one
  address. One more is refused at once;
- addresses take turns: the next check of an address waits for one check of each other address,
  however many those send;
- the limit of wrong logins is checked again when a check's turn comes, so guesses that waited do
  not bypass it;
- a check that was accepted has one outcome, reported on the loop, unless it was dropped;
- equal checks of one address are combined: clients that come together with the same password cost
  one derivation.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from dcp.server.access.users import PasswordCheck

THREADS: Final = max(1, min(4, (os.cpu_count() or 2) // 2))
"""Derivations at a time. They release the interpreter lock, so each takes a core. The loop, the
log's thread and the store process need cores, too."""
WAITING_MAX: Final = 256
"""With 5 ms each on one core, the last one waits for 1.3 s: far less than handshake_timeout."""
WAITING_PER_HOST_MAX: Final = 64
NICENESS: Final = 10
"""How much lower the priority of the threads is than that of the process. If there are few cores,
clients that are logged in go first."""
NICENESS_MAX: Final = 19
"""Linux's maximum."""

Outcome = bool | None
"""Whether the password matches; None: not checked, because its user or address is blocked."""
Tell = Callable[[Outcome], None]


class Ticket:
    """A caller that waits for the outcome of a check."""

    def __init__(self, entry: _WaitingCheck, tell: Tell) -> None:
        self.entry = entry
        self.tell = tell


class _WaitingCheck:
    """A check that waits for its turn or is under way."""

    def __init__(self, host: str, check: PasswordCheck) -> None:
        self.host = host
        self.check = check
        self.tickets: list[Ticket] = []


class PasswordChecks:
    """See the module. Everything is called on the loop, callbacks too."""

    def __init__(
        self,
        is_blocked: Callable[[str, str], bool],
        *,
        waiting_max: int = WAITING_MAX,
        waiting_per_host_max: int = WAITING_PER_HOST_MAX,
    ) -> None:
        """`is_blocked` says whether logins of an address and a user are refused now."""
        self._is_blocked = is_blocked
        self._waiting_max = waiting_max
        self._waiting_per_host_max = waiting_per_host_max
        self._executor = ThreadPoolExecutor(THREADS, "password", initializer=_yield_to_others)
        self._waiting: OrderedDict[str, OrderedDict[bytes, _WaitingCheck]] = OrderedDict()
        """By address, next turn first; then by what is checked."""
        self._waiting_count = 0
        self._running: dict[tuple[str, bytes], _WaitingCheck] = {}
        self._is_closed = False

    def __len__(self) -> int:
        """Return how many checks wait or are under way."""
        return self._waiting_count + len(self._running)

    def submit(self, host: str, check: PasswordCheck, tell: Tell) -> Ticket | None:
        """Accept a check for an address; None: too many wait already."""
        entry = self._running.get((host, check.memory)) or self._waiting_entry(host, check)
        if entry is None:
            entry = _WaitingCheck(host, check)
            if len(self._running) < THREADS and not self._is_closed:
                self._start(entry)
            elif not self._queue(entry):
                return None
        ticket = Ticket(entry, tell)
        entry.tickets.append(ticket)
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Forget a caller that waits. A check that nobody waits for is not begun."""
        entry = ticket.entry
        if ticket in entry.tickets:
            entry.tickets.remove(ticket)
        if not entry.tickets and self._waiting_entry(entry.host, entry.check) is entry:
            self._leave_queue(entry)

    async def close(self) -> None:
        """Begin no more checks, and wait for those under way; their outcomes are not reported."""
        self._is_closed = True
        self._waiting.clear()
        self._waiting_count = 0
        await asyncio.to_thread(self._executor.shutdown)

    def _waiting_entry(self, host: str, check: PasswordCheck) -> _WaitingCheck | None:
        of_host = self._waiting.get(host)
        return None if of_host is None else of_host.get(check.memory)

    def _queue(self, entry: _WaitingCheck) -> bool:
        of_host = len(self._waiting.get(entry.host, ()))
        is_full = self._waiting_count >= self._waiting_max or of_host >= self._waiting_per_host_max
        if self._is_closed or is_full:
            return False
        self._waiting.setdefault(entry.host, OrderedDict())[entry.check.memory] = entry
        self._waiting_count += 1
        return True

    def _leave_queue(self, entry: _WaitingCheck) -> None:
        of_host = self._waiting[entry.host]
        del of_host[entry.check.memory]
        self._waiting_count -= 1
        if not of_host:
            del self._waiting[entry.host]

    def _start(self, entry: _WaitingCheck) -> None:
        self._running[entry.host, entry.check.memory] = entry
        loop = asyncio.get_running_loop()
        derivation = loop.run_in_executor(self._executor, entry.check.matches)
        derivation.add_done_callback(partial(self._derived, entry))

    def _start_next(self) -> None:
        while self._waiting and len(self._running) < THREADS:
            host, of_host = next(iter(self._waiting.items()))
            entry = next(iter(of_host.values()))
            self._waiting.move_to_end(host)
            self._leave_queue(entry)
            if self._is_blocked(host, entry.check.user):
                self._tell(entry, None)
            else:
                self._start(entry)

    def _derived(self, entry: _WaitingCheck, derivation: asyncio.Future[bool]) -> None:
        del self._running[entry.host, entry.check.memory]
        outcome = False
        try:
            outcome = derivation.result()
        finally:  # after an error, too, nobody may wait for ever
            self._tell(entry, outcome)
            self._start_next()

    def _tell(self, entry: _WaitingCheck, outcome: Outcome) -> None:
        tickets, entry.tickets = entry.tickets, []
        for ticket in tickets:
            ticket.tell(outcome)


def _yield_to_others() -> None:
    """Give this thread a lower priority. On Linux, threads have their own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(own + NICENESS, NICENESS_MAX))

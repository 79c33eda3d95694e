"""Runs long requests in a session: begins them, takes their steps, ends them. Sans-IO.

The rules are those of `dcp.session.answers.long_requests`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from dcp.session.answers.long_requests import LongRequest, Steps
from dcp.session.state import SessionState
from dcp.wire.status import RefusedError, Status
from failover.rules.write_answer import Durability
from vbucket.store.environment import StoreDamagedError

REMOVED: Final = "user {!r} was removed; log in again (SASL_AUTH)"

CheckGuard = Callable[[int, Durability], None]
"""Raises RefusedError if a change of a partition with this durability must not be applied."""


def begin_steps(
    state: SessionState,
    make: Callable[[], Steps],
    opcode: int,
    opaque: int,
    vb_id: int,
    wire_key: bytes,
    held_bytes: int,
) -> None:
    """Run a handler that may be long. Raises what it raises, and RefusedError if too many wait."""
    steps = make()
    try:
        next(steps)
    except StopIteration:
        return
    steps.close()
    request = LongRequest(
        make, opcode, opaque, vb_id, wire_key, held_bytes=held_bytes, user=state.login.user,
        durability=state.current.durability,
    )  # fmt: skip
    state.shared.long_queue.enter(request, state.engine.now_ns)
    state.unfinished = request
    state.is_full = True


def go_on(state: SessionState, now_ns: int, check_guard: CheckGuard) -> LongRequest | None:
    """Take the next step of the long request under way, if it is its turn. Return the request if it
    is done; None: the session is full until the next step.
    """
    request = state.unfinished
    assert isinstance(request, LongRequest), "asked before"
    wait_ns = state.shared.long_queue.wait_ns(request, now_ns)
    if wait_ns:
        state.pause.until_ns = now_ns + wait_ns
        state.is_full = True
        return None
    first_answer, first_entry = len(state.answers), len(state.engine.keyspace.pending)
    state.current.durability = request.durability
    is_done = True
    try:
        _check_still_may(state, request, check_guard)
        is_done = request.step()
    except (RefusedError, StoreDamagedError) as error:
        state.answer_error(request.opcode, request.opaque, request.vb_id, error)
    if is_done:
        end_long(state)
    else:
        state.is_full = True
    if state.marks is not None:
        state.mark(request.opcode, request.opaque, first_answer, first_entry)
    state.current.durability = None
    return request if is_done else None


def end_long(state: SessionState) -> None:
    """Forget the long request under way, if there is one."""
    if isinstance(state.unfinished, LongRequest):
        state.shared.long_queue.leave(state.unfinished)
        state.unfinished = None


def _check_still_may(state: SessionState, request: LongRequest, check_guard: CheckGuard) -> None:
    """Raise RefusedError if the client may not do any more what it waits for."""
    if state.login.rights is None:
        raise RefusedError(Status.AUTH_STALE, REMOVED.format(state.login.stale_user))
    has_all = state.login.rights.has_all_documents
    if not has_all and (why := state.denial(request.opcode, request.wire_key)):
        raise RefusedError(Status.EACCESS, why)
    if request.durability is not None:
        check_guard(request.vb_id, request.durability)

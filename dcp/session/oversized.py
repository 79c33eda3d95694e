"""Values over the limit. Sans-IO.

A body over the limit is refused with E2BIG as soon as its header is there. Its bytes are skipped as
they arrive and never kept, so the connection goes on. A body of more than SKIPPED_BYTES_MAX closes
the connection instead.

With setting `oversized_set` remove, a refused SET removes the document, as in memcached: a cache
must not go on answering with a value that the client meant to replace.
"""

from __future__ import annotations

from typing import Final

from dcp.session.state import SessionState
from dcp.wire.status import RefusedError, Status

SKIPPED_BYTES_MAX: Final = 1 << 30
"""memcached's largest item, so no client means more. A length above it is noise."""


def too_big(state: SessionState, why: str = "") -> RefusedError:
    """Return the refusal of a value."""
    limit = f"a value has at most {state.limits.value_bytes_max} bytes (setting value_bytes_max)"
    return RefusedError(Status.E2BIG, f"{why}; {limit}" if why else limit)


def remove_old(state: SessionState, vb_id: int, key: bytes, cas: int) -> None:
    """Remove the document that a refused SET would have replaced, if the setting says so.

    `key` is the stored key. A CAS that is not the document's removes nothing.
    """
    if state.limits.oversized_set_removes:
        state.engine.delete(vb_id, key, cas)
        state.observes(vb_id)

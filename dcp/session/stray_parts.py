"""Parts of a request that its command does not have. Pure.

kv_engine refuses such requests (daemon/mcbp_validators.cc): a client that sends a part which nobody
reads has taken the command for another one.
"""

from __future__ import annotations

from typing import Literal

from dcp.wire.frame import Frame
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status


def refuse_stray(request: Frame, *parts: Literal["extras", "key", "value"]) -> None:
    """Raise RefusedError (EINVAL) if the request has any of these parts."""
    for part in parts:
        if found := len(getattr(request, part)):
            name = Opcode(request.opcode).name
            raise RefusedError(Status.EINVAL, f"{name} takes no {part}; found {found} bytes")

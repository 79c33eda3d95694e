"""The refusal of a command about the cluster: why, and what to try, as fields of their own."""

from __future__ import annotations

from http import HTTPStatus


class ClusterRefusedError(Exception):
    """A command is refused, and changes nothing. `str(error)` is one line with both parts."""

    def __init__(
        self, why: str, try_this: str = "", *, status: HTTPStatus = HTTPStatus.CONFLICT
    ) -> None:
        """`why` is a clause without a full stop, `try_this` a sentence without one."""
        super().__init__(f"{why}. {try_this}" if try_this else why)
        self.why = why
        self.try_this = try_this
        self.status = status
        """The status of the HTTP answer."""

"""The first user of a server: `admin`, with the password in a file.

For containers and service managers, which hand over secrets as files. The file is only read while
there is no user, so it can be removed after the first start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from dcp.server.access.users import UserError, Users
from dcp.session.access.rights import FULL_RIGHTS

FIRST_ADMIN: Final = "admin"
PASSWORD_BYTES_MAX: Final = 4096
"""Of the file. The longest password is far shorter; the error about it comes from `Users`."""


class FirstAdminError(Exception):
    """The first user cannot be added; the text says why and what to do."""


def add_first_admin(users: Users, path: Path) -> bool:
    """Add the user if there is none; return whether it was added.

    Raises FirstAdminError, UsersFileError.
    """
    if users.names():
        return False
    try:
        with path.open("rb") as file:
            text = file.read(PASSWORD_BYTES_MAX + 1)
        password = text.decode().rstrip("\r\n")
    except OSError as error:
        raise FirstAdminError(
            f"there is no user yet, and the password file {path} of the first one cannot be read: "
            f"{error.strerror or error} (setting admin_password_file)"
        ) from error
    except UnicodeDecodeError as error:
        raise FirstAdminError(f"the password file {path} is not UTF-8 text") from error
    try:
        users.add(FIRST_ADMIN, password, FULL_RIGHTS)
    except UserError as error:
        raise FirstAdminError(f"the password file {path} cannot be used: {error}") from error
    return True

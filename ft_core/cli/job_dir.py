"""Whose the job directory is: what is in it is run, and the job's secret is there.

Somebody else may have made it first, in a place such as /tmp. Who is asked for is the storage: it may have
other numbers for users than this machine has, or none, and modes for files, or none.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import stat
from pathlib import Path

from ft_core.errors import ConfigError
from ft_core.settings import JOB, SECRET


def prepared(given: Path) -> Path:
    """The job directory, made if it is not there yet. Raises ConfigError if it cannot be, or if others than
    this user may have put something into it."""
    if given.is_symlink() and given.lstat().st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{given} is a link that {_name(given.lstat().st_uid)} has made: give a directory")
    path = given.resolve()
    try:
        path.mkdir(parents=True)
    except OSError as error:
        if not path.is_dir():
            raise ConfigError(f"{path} cannot be the job directory: {error.strerror}") from error
        check(path)
    return path


def check(path: Path) -> None:
    """Raises ConfigError if others than this user may have put something into it."""
    try:
        about, own = path.stat(), _made_here(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be the job directory: {error.strerror}") from error
    users, has_modes = {0, os.geteuid(), own.st_uid}, not own.st_mode & 0o077
    danger = "could have this machine run what they like, and read the job's secret"
    if about.st_uid not in users:
        raise ConfigError(
            f"{path} is a directory of {_name(about.st_uid)}, not of {_name(os.geteuid())}: its owners "
            f"{danger}; give a directory of your own, or one that is not there yet"
        )
    if has_modes and about.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{path} may be written to by all users of this machine, who {danger}: give a directory in it, "
            f"or chmod o-w {path}"
        )
    for file, forbidden in ((path / JOB, 0o002), (path / SECRET, 0o077)):
        with contextlib.suppress(FileNotFoundError):
            found = file.lstat()
            if stat.S_ISLNK(found.st_mode):
                raise ConfigError(f"{file} is a link, and may be one to what others can read: remove it")
            if found.st_uid not in users:
                raise ConfigError(f"{file} is of {_name(found.st_uid)}: its owner {danger}; remove it")
            if has_modes and found.st_mode & forbidden:
                mode = f"{found.st_mode & 0o777:o}"
                raise ConfigError(f"{file} is open to others (mode {mode}), who {danger}: chmod 600 {file}")


def _made_here(path: Path) -> os.stat_result:
    """What the system says of a file that this process makes there, and removes. Raises OSError."""
    file = path / f".whose-{secrets.token_hex(4)}"  # other machines' processes may have this one's number
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)
        file.unlink(missing_ok=True)


def _name(user: int) -> str:
    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(user).pw_name}"
    return f"user {user}"

"""Files that a user asks for by name: looked at before anything is written, never lost unasked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workbench.errors import InputError


def written(path: str | Path, write: Callable[[Path], object], *, force: bool = False) -> Path:
    """Have `write` make the file beside its place and move it there -> its path, absolute.

    So a file that is there is whole, the old one or the new. force: overwrite one that is there.
    Raises InputError where it cannot be written.
    """
    try:
        target = check(path, force=force)
        partial = target.with_name(f"{target.name}.partial")
        try:
            write(partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}.") from None
    return target


def check(path: str | Path, *, force: bool = False) -> Path:
    """The path, absolute. Raises InputError where no file may be written."""
    try:
        if "\0" in str(path):
            raise ValueError("it has a null character")
        target = Path(path).expanduser().absolute()
        return _checked(target, path, force=force)
    except OSError as error:
        raise InputError(f"{str(path)[:80]} cannot be written: {error.strerror}.") from None
    except (RuntimeError, ValueError, TypeError) as error:  # ~somebody, a NUL, no path at all
        raise InputError(f"{path!r} names no file: {error}.") from None


def _checked(target: Path, path: str | Path, *, force: bool) -> Path:
    if target.is_dir():
        raise InputError(f"{path} is a folder. Name a file in it.")
    if not target.parent.is_dir():
        raise InputError(f"There is no folder {target.parent}. Make it, or name another file.")
    if target.exists() and not target.is_file():
        raise InputError(f"{path} is no file. Name another.")
    if target.exists() and not force:
        raise InputError(f"{path} is there already. --force (force=True) overwrites it.")
    return target

"""Files that a user asks for by name: looked at before anything is written, never lost unasked."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.errors import InputError

LONGEST = 120  # characters of a path in a sentence


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
        raise InputError(f"{shown(path)} cannot be written: {error.strerror}.") from None
    return target


def replaced(path: Path, text: str) -> None:
    """Put a private file (0600) in place of the one that is there; who reads sees either whole."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def check(path: str | Path, *, force: bool = False) -> Path:
    """The path, absolute. Raises InputError where no file may be written."""
    typed = _named(path)
    try:
        if "\0" in str(typed):
            raise ValueError("it has a null character")
        return _checked(typed.expanduser().absolute(), typed, force=force)
    except OSError as error:
        raise InputError(f"{shown(path)} cannot be written: {error.strerror}.") from None
    except (RuntimeError, ValueError) as error:  # ~somebody, a NUL
        raise InputError(f"{shown(path)} names no file: {error}.") from None


def ending(path: str | Path, endings: Sequence[str]) -> str:
    """Which of the endings a name has, in small letters. Raises InputError for none of them."""
    name = _named(path, endings).name.lower()
    for one in endings:
        if name.endswith(one) and name != one:
            return one
    raise InputError(f"{shown(path)}: name a file that ends in {' or '.join(endings)}.")


def shown(path: str | Path) -> str:
    """A path in a sentence: on one line, and cut in the middle where it is long."""
    text = str(path)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}...{text[-LONGEST // 2 :]}"


def _named(path: object, endings: Sequence[str] = ()) -> Path:
    """The path as it was typed. Raises InputError for what is no path."""
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
        if isinstance(text, str) and text:
            return Path(text)
    like = f" that ends in {' or '.join(endings)}" if endings else ""
    raise InputError(f"{path!r:.40} names no file. Name one{like}.")


def _checked(target: Path, typed: Path, *, force: bool) -> Path:
    if target.is_dir():
        raise InputError(f"{shown(typed)} is a folder. Name a file in it.")
    if not target.parent.is_dir():
        where = shown(typed.parent)
        if typed.parent != target.parent:
            where += f" ({shown(target.parent)})"
        raise InputError(f"There is no folder {where}. Make it, or name another file.")
    if target.exists() and not target.is_file():
        raise InputError(f"{shown(typed)} is no file. Name another.")
    if target.exists() and not force:
        raise InputError(
            f"{shown(typed)} is there already. force=True overwrites it, in a magic --force."
        )
    return target

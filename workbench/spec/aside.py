"""Aside: the directory a checkpoint is written in before it has its name, and who writes there.

Its lock file is held by the process that finishes the checkpoint, for as long as that lives, and is
there until the directory has its name or is removed: so anybody can tell whether a save is under
way, and remove what a dead writer left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.errors import CheckpointError

MARK = ".partial-"


def new(root: Path, name: str) -> Path:
    """Where a checkpoint of this name is written, or goes to be removed; nobody else has it."""
    return root / f".{name}{MARK}{secrets.token_hex(4)}"


def lock_of(aside: Path) -> Path:
    """Its lock file, which lies beside it."""
    return aside.with_name(f"{aside.name}.lock")


def lock(path: Path, how: int = fcntl.LOCK_EX, *, create: bool = True) -> int:
    """A descriptor of the file that holds its lock until it is closed. Raises OSError."""
    # A file, not the directory: network file systems lock nothing that is not open for writing.
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Inside, names under this root are taken by nobody else."""
    descriptor = lock(root / ".lock")
    try:
        yield
    finally:
        os.close(descriptor)


def is_free(path: Path) -> bool:
    """Whether the file is there and no process holds its lock."""
    try:
        os.close(lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB, create=False))
    except OSError:
        return False
    return True


def sweep(root: Path) -> None:
    """Remove what writers left that are gone: their lock is free."""
    with contextlib.suppress(OSError), locked(root):
        names = {path.name.removesuffix(".lock") for path in root.glob(f".*{MARK}*")}
        for left in (root / name for name in names):
            try:
                descriptor = lock(lock_of(left), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # Its writer lives, or it is another user's: not ours to remove.
            discard(left)
            os.close(descriptor)


def discard(aside: Path) -> None:
    """Remove the directory, then its lock file, by which others know that it is over."""
    for _ in range(3):  # another rank may just be adding a file
        shutil.rmtree(aside, ignore_errors=True)
        if not aside.exists():
            break
    with contextlib.suppress(OSError):
        lock_of(aside).unlink(missing_ok=True)


def sync(directory: Path) -> None:
    """Have the names in a directory on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def says_where(directory: Path) -> Iterator[None]:
    """Raises CheckpointError for an error of the file system inside."""
    try:
        yield
    except OSError as error:
        root = directory.parent if MARK in directory.name else directory
        raise CheckpointError(
            f"The checkpoint cannot be written in {root}: {error.strerror}. "
            "Make room or choose another directory."
        ) from error

"""Refused: messages to this process that nobody of its cluster has signed, counted.

Every user of a machine can reach a port on its loopback interface, so who may speak there is told
by a signature (HMAC-SHA256). Whatever has none, a wrong one or one that was there before is dropped
by jupyter_client's Session before anything of it is read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_client.session import Session

_lock = threading.Lock()
_counts: Counter[int] = Counter()  # by process: what is forked from this one starts with nothing


def count_in(folder: Path) -> None:
    """From now on `folder/<pid>` says how many messages this process has refused."""
    for name in ("feed_identities", "deserialize"):
        setattr(Session, name, _counting(getattr(Session, name), folder))


def counted(folder: Path) -> dict[int, int]:
    """How many messages each process has refused; those that refused none are not there."""
    found = {}
    for path in folder.glob("*"):
        with contextlib.suppress(OSError, ValueError):  # it is just being made
            found[int(path.name)] = int(path.read_text())
    return found


def _counting(method: Callable, folder: Path) -> Callable:
    @functools.wraps(method)
    def counting(*args: Any, **how: Any) -> Any:
        try:
            return method(*args, **how)
        except Exception:
            _add(folder)
            raise

    return counting


def _add(folder: Path) -> None:
    with _lock, contextlib.suppress(OSError):
        _counts[os.getpid()] += 1
        file = os.open(folder / str(os.getpid()), os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(file, b"%d" % _counts[os.getpid()], 0)
        os.close(file)

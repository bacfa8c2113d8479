"""Breakable: the store in which ranks find each other, whose waits can be broken off.

What waits in torch's own stores for a rank that is lost waits until its time is up, out of anyone's
reach. Cost: a key that is not there yet is looked for every millisecond, in Python.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

POLL_S = 0.001


class Breakable(dist.Store):
    """A file that no rank owns, in a private folder.

    wait_s: how long to wait for a key. Whoever waits longer gets a RuntimeError, and whoever waits
    or begins to wait after `break_off` at once.
    """

    def __init__(self, path: str, wait_s: float) -> None:
        super().__init__()
        self._file = dist.FileStore(path, -1)
        self.wait_s = wait_s
        self._is_broken = False

    def break_off(self) -> None:
        """Have all that wait raise; from any thread."""
        self._is_broken = True

    # What torch calls. It passes timeouts of its own, of operations, which say nothing here.

    def set(self, key: str, value: str) -> None:  # noqa: D102
        self._file.set(key, value)

    def get(self, key: str) -> bytes:  # noqa: D102
        self.wait([key])
        return self._file.get(key)

    def add(self, key: str, value: int) -> int:  # noqa: D102
        return self._file.add(key, value)

    def check(self, keys: list[str]) -> bool:  # noqa: D102
        return self._file.check(keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:  # noqa: D102
        return self._file.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:  # noqa: D102
        return self._file.delete_key(key)

    def wait(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, keys: Sequence[str], _timeout: timedelta | None = None
    ) -> None:
        """Until all keys are there."""
        end_s = time.monotonic() + self.wait_s
        while not self._file.check(list(keys)):
            if self._is_broken:
                raise RuntimeError("The meeting was broken off: a rank is lost.")
            if time.monotonic() > end_s:
                raise RuntimeError(f"{', '.join(keys)} did not come within {self.wait_s:g} s.")
            time.sleep(POLL_S)

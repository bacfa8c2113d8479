"""Journal: each rank appends what it tells of its steps to a file of its own.

It is a copy of what the driver gets; a full disk must not end the training. What the disk does not
take is kept and written once it does, so that each step is there once.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

# What is kept for a disk that is full; what comes after that is lost to the journal.
MOST_KEPT_BYTES = 32 << 20


class Journal:
    """journal/rank<r>.jsonl of the run in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._folder = directory / "journal"
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._rank = 0

    def append(self, reply: dict[str, Any]) -> bool:
        """Add a slice; False where the disk does not take it."""
        if not reply["columns"]["loss"]:
            return True
        line = json.dumps({"time_s": time.time(), **reply}, separators=(",", ":")).encode() + b"\n"
        if self._kept_bytes < MOST_KEPT_BYTES:
            self._kept.append(line)
            self._kept_bytes += len(line)
        self._rank = reply["rank"]
        return not self.unwritten()

    def unwritten(self) -> str:
        """The lines that the disk does not take, tried once more."""
        if self._kept:
            try:
                _append(self._folder / f"rank{self._rank}.jsonl", b"".join(self._kept))
                self._kept, self._kept_bytes = [], 0
            except OSError:
                pass  # it is full, or the folder is gone
        return b"".join(self._kept).decode()


def _append(path: Path, data: bytes) -> None:
    """All of it or nothing, also for who reads the file: no half line stays."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        before = os.fstat(file).st_size
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(file, left) :]
        except OSError:
            os.ftruncate(file, before)
            raise
    finally:
        os.close(file)

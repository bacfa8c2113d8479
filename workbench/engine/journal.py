"""Journal: each rank appends what it tells of its steps to a file of its own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def append(directory: Path | None, reply: dict[str, Any]) -> bool:
    """Add a slice to journal/rank<r>.jsonl of a run; False where the disk does not take it."""
    if directory is None or not reply["columns"]["loss"]:
        return True
    path = directory / "journal" / f"rank{reply['rank']}.jsonl"
    line = json.dumps({"time_s": time.time(), **reply}, separators=(",", ":"))
    # The journal is a copy of what the driver gets; a full disk must not end the training.
    try:
        with path.open("a") as file:
            file.write(line + "\n")
    except OSError:
        return False
    return True

"""Retention: the automatic checkpoints that need not stay. Those that somebody asked for all do."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def superseded(
    saved: Sequence[Mapping[str, Any]], keep: int, keep_every: int
) -> list[Mapping[str, Any]]:
    """All automatic ones but the last `keep` and those of every `keep_every`-th step.

    saved: as checkpoints.list_in. keep: 0 for all of them. keep_every: 0 for none.
    """
    automatic = [one for one in saved if one["by_itself"]]
    old = automatic[: -keep or len(automatic)] if keep else []
    return [one for one in old if not (keep_every and one["step"] % keep_every == 0)]


def remove(path: Path) -> None:
    """Take a checkpoint away, from one moment to the next. Raises OSError.

    What is left if this process ends in between has the name of one that was not finished, which
    the next save sweeps.
    """
    left = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    os.rename(path, left)
    shutil.rmtree(left)

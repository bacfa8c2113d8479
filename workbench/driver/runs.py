"""The checkpoints of all runs in a folder, as `train` lays them out: RUN/checkpoints/NAME."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.driver import checkpoints
from workbench.errors import CheckpointError
from workbench.spec.near import unknown

FOLDER = "checkpoints"
LONGEST = 4000


def list_in(root: str | Path) -> list[dict[str, Any]]:
    """What `checkpoints.list_in` tells of each, with its `run`; the newest last."""
    root = Path(root)
    found = [
        {**entry, "run": run.name}
        for run in (sorted(root.iterdir()) if root.is_dir() else ())
        if (run / FOLDER).is_dir()
        for entry in checkpoints.list_in(run / FOLDER)
    ]
    return sorted(found, key=lambda entry: entry["time_s"])


def find(root: str | Path, text: str | int = checkpoints.LAST, *, run: str | None = None) -> Path:
    """The checkpoint that `text` names: RUN/NAME, NAME, a step, 'last', or a path.

    run: whose checkpoints are meant where no run is named, default the newest that fits.
    Raises CheckpointError with the names there are.
    """
    root, text = Path(root), str(text).strip()
    if len(text) > LONGEST or "\0" in text:
        raise CheckpointError(f"{text[:40]!r}... names no checkpoint: it is no path.")
    if "/" in text:
        owner, _, name = text.partition("/")
        inside = root / owner / FOLDER / name
        if owner and "/" not in name and inside.is_dir() and not Path(text).exists():
            return checkpoints.find(inside.parent, name)
        return checkpoints.find(root, text)
    if run is not None:
        return checkpoints.find(root / run / FOLDER, text)
    known = list_in(root)
    if not known:
        raise CheckpointError(f"No checkpoint of any run in {root} yet. Save one first.")
    fitting = [
        entry for entry in known if text in (checkpoints.LAST, entry["name"], str(entry["step"]))
    ]
    if not fitting:
        names = [f"{entry['run']}/{entry['name']}" for entry in known]
        raise CheckpointError(unknown("checkpoint", text, names))
    return Path(fitting[-1]["path"])

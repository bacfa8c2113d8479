"""Checkpoints as the notebook sees them: listed and found by their manifests alone, no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from workbench.errors import CheckpointError
from workbench.spec import manifest as manifests
from workbench.spec.near import unknown

LAST = "last"


def list_in(root: Path) -> list[dict[str, Any]]:
    """Name, step, time_s, bytes, layout, recipe, by_itself, path, costs; the newest last.

    stall_ms: that the training stood still for it. write_ms: from then on until it was written.

    Half-written ones are no checkpoints; one with a damaged manifest is left out, and `find`
    says what is wrong with it. A root that is not there has none.
    """
    root = Path(root)
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        try:
            if manifests.is_checkpoint(path):
                found.append(_summary(path, manifests.read(path)))
        except (CheckpointError, AttributeError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda entry: (entry["time_s"], entry["name"]))


def find(root: Path, text: str | int = LAST) -> Path:
    """The checkpoint that `text` names: a name in root, a step, 'last', or a path.

    Raises CheckpointError with the names there are.
    """
    root, text = Path(root), str(text).strip()
    if "/" in text or text.startswith("~"):
        path = Path(text).expanduser()
        manifests.read(path)
        return path
    if (root / text).is_dir() and text not in ("", ".", ".."):
        manifests.read(root / text)
        return root / text
    known = list_in(root)
    if not known:
        raise CheckpointError(f"No checkpoint in {root} yet. Save one first.")
    if text == LAST:
        return Path(known[-1]["path"])
    if text.isdecimal():
        at_step = [entry for entry in known if entry["step"] == int(text)]
        if at_step:
            return Path(at_step[-1]["path"])
        steps = sorted({entry["step"] for entry in known if entry["step"] is not None})
        there = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"No checkpoint of step {text}. Steps saved: {there}.")
    raise CheckpointError(unknown("checkpoint", text, [entry["name"] for entry in known]))


def _summary(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": path.name,
        "step": manifest.get("step"),
        "time_s": manifest["time_s"],
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "layout": manifest.get("layout", ""),
        "recipe": manifest.get("recipe", ""),
        "by_itself": manifest.get("by_itself", False),
        "path": str(path),
        "stall_ms": _ms(manifest.get("stall_s")),
        "write_ms": _ms(manifest.get("write_s")),
    }


def _ms(seconds: Any) -> float | None:
    return round(1e3 * seconds, 1) if isinstance(seconds, (int, float)) else None


def is_whole(path: Path) -> bool:
    """Whether each file of a checkpoint is as it was written: size and hash are read."""
    try:
        for file, facts in manifests.read(path)["files"].items():
            if (path / file).stat().st_size != facts["bytes"]:
                return False
            with open(path / file, "rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != facts["sha256"]:
                    return False
    except (OSError, CheckpointError):
        return False
    return True


def with_another(error: CheckpointError, path: Path, own: Path | None) -> CheckpointError:
    """The error of a restore, and where the checkpoint is damaged the last whole one beside it.

    own: the folder whose checkpoints may be called by their names alone.
    """
    text = str(error)
    if not text.endswith(manifests.ANOTHER):
        return error
    others = [Path(entry["path"]) for entry in list_in(path.parent)]
    whole = next((one for one in reversed(others) if one != path and is_whole(one)), None)
    if whole is None:
        hint = f"No other one in {path.parent} is whole."
    else:
        name = whole.name if whole.parent == own else whole
        hint = f"%dist_restore {name} is the last whole one."
    better = CheckpointError(text.removesuffix(manifests.ANOTHER) + hint)
    for note in getattr(error, "__notes__", ()):
        better.add_note(note)
    return better

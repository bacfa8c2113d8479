"""manifest.json: what a checkpoint holds, readable without torch and without its data files.

docs/checkpoints.md describes each field. The manifest ends with a seal, the SHA-256 of the rest,
so that a changed byte in it is noticed as surely as one in a data file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.errors import CheckpointError

FORMAT = 1
FILE_NAME = "manifest.json"
OWN_FIELDS = (
    "format", "name", "created", "time_s", "stall_s", "write_s", "torch", "ranks", "keys", "files",
    "seal",
)  # fmt: skip


# How what is said of a damaged checkpoint ends; the driver knows which other one is whole.
ANOTHER = "Restore another one."


def is_checkpoint(path: Path) -> bool:
    """Whether the directory is one whole checkpoint; those half written have a dot in front."""
    return not path.name.startswith(".") and (path / FILE_NAME).is_file()


def to_text(manifest: Mapping[str, Any]) -> str:
    """The JSON text of a manifest, seal included."""
    return json.dumps({**manifest, "seal": _seal(manifest)}, indent=1, allow_nan=False) + "\n"


def read(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint directory, checked as far as it goes alone.

    Raises CheckpointError when there is none, or when it is not as it was written.
    """
    name = path.name
    try:
        file = path / FILE_NAME
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise FileNotFoundError  # a pipe, say, which would be read for ever
        manifest = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse)
    except FileNotFoundError:
        what = "has no manifest.json" if path.is_dir() else "is not there"
        raise CheckpointError(f"{path} is no checkpoint: it {what}.") from None
    except OSError as error:
        raise CheckpointError(f"{path / FILE_NAME} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise CheckpointError(damaged(name, FILE_NAME, "is cut short or changed")) from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise CheckpointError(f"{path} is no checkpoint: its manifest.json is of another kind.")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"Checkpoint {name} has format {manifest['format']!r}, this version reads {FORMAT}. "
            "Use the version of workbench that wrote it."
        )
    if manifest.get("seal") != _seal(manifest):
        raise CheckpointError(damaged(name, FILE_NAME, "was changed after it was written"))
    for key, is_right in FIELDS.items():
        if key in manifest and not is_right(manifest[key]):
            how = f"has {key}={str(manifest[key])[:40]!r}, which none can have"
            raise CheckpointError(damaged(name, FILE_NAME, how))
    return manifest


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _is_seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_CHARS


def _are_groups(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(group, dict) for group in value)


# What a sealed manifest may say all the same, from whoever made it: nothing else is taken.
MOST_CHARS = 200
FIELDS: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: value is None or _is_count(value),
    "samples": _is_count,
    "time_s": _is_seconds,
    "stall_s": _is_seconds,
    "write_s": _is_seconds,
    "layout": _is_text,
    "recipe": _is_text,
    "name": _is_text,
    "optimizer": _are_groups,
    "by_itself": lambda value: isinstance(value, bool),
    "all_used": lambda value: isinstance(value, bool),
}


def plain(value: Any, where: str = "meta") -> Any:
    """The value as JSON holds it: tuples become lists, numbers that are not finite None.

    Raises CheckpointError for what has no plain form.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{place}]") for place, item in enumerate(value)]
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a manifest cannot hold. "
        "Use numbers, text, lists and dicts."
    )


def _seal(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def damaged(name: str, file: str, how: str) -> str:
    """What is said of a checkpoint that is not as it was written."""
    return f"Checkpoint {name} is damaged: {file} {how}. {ANOTHER}"

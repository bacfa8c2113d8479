"""Reading a checkpoint: everything is checked first, then the boxes a rank holds are copied."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workbench.engine.shards import Box
from workbench.engine.state import Piece, differences
from workbench.errors import CheckpointError
from workbench.spec import manifest as manifests


@dataclass(frozen=True)
class Copy:
    """A part of a piece, `common`, and where it is: in `box`, stored under `key` of `file`."""

    file: str
    key: str
    box: Box
    common: Box
    piece: Piece


# Shape and dtype of a whole tensor, as a manifest names them.
Kind = tuple[tuple[int, ...], str]


def restored(
    path: Path, pieces: Mapping[str, Piece], model: Mapping[str, Kind]
) -> tuple[dict[str, Any], Callable[[], None]]:
    """The meta of the checkpoint, and a function that fills the pieces in place.

    pieces: what this rank holds. model: what all ranks together hold.

    Raises CheckpointError for a checkpoint that is damaged, or of another model; the function
    works on files already open and checked.
    """
    manifest = manifests.read(path)
    try:
        keys = manifest["keys"]
        _check_model(path.name, keys, model)
        copies = [
            copy for key, piece in pieces.items() for copy in _copies(path.name, key, piece, keys)
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        how = "does not describe a checkpoint"
        raise CheckpointError(manifests.damaged(path.name, manifests.FILE_NAME, how)) from None
    files = {copy.file: None for copy in copies}
    opened = {file: _checked_file(path, file, manifest["files"]) for file in files}
    for copy in copies:
        if opened[copy.file][1].get(copy.key) != copy.box.shape:
            raise CheckpointError(
                manifests.damaged(path.name, copy.file, f"does not hold {copy.key}")
            )

    def fill() -> None:
        with torch.no_grad():
            for copy in copies:
                file, box, piece = opened[copy.file][0], copy.common, copy.piece
                if box.shape:
                    part = file.get_slice(copy.key)[box.slices(copy.box.offset)]
                else:
                    part = file.get_tensor(copy.key)
                piece.local[box.slices(piece.offset)] = part.to(piece.local.device)

    own = set(manifests.OWN_FIELDS)
    return {key: value for key, value in manifest.items() if key not in own}, fill


def _check_model(name: str, keys: Mapping[str, Any], model: Mapping[str, Kind]) -> None:
    theirs = {key: tuple(entry["shape"]) for key, entry in keys.items()}
    problem = differences(theirs, {key: shape for key, (shape, _) in model.items()})
    if problem:
        what = "model" if "model/" in problem else "optimizer"
        raise CheckpointError(
            f"Checkpoint {name} is of another {what}: {problem}. "
            "Restore it into the recipe it was saved from."
        )
    for key, (_, dtype) in model.items():
        if dtype != keys[key]["dtype"]:
            raise CheckpointError(
                f"Checkpoint {name} has {key} as {keys[key]['dtype']}, and here it is {dtype}. "
                "Restore it into the recipe it was saved from."
            )


def _copies(name: str, key: str, piece: Piece, keys: Mapping[str, Any]) -> list[Copy]:
    """What this rank needs of a key."""
    found: list[Copy] = []
    covered = 0
    for stored in keys[key]["pieces"]:
        box = Box(tuple(stored["offset"]), tuple(stored["shape"]))
        common = box.common(piece.box)
        if common is not None:
            if any(common.common(other.common) is not None for other in found):
                covered = -1  # what lies there twice may lack elsewhere
                break
            covered += common.numel
            found.append(Copy(stored["file"], stored["key"], box, common, piece))
    if covered != piece.local.numel():
        raise CheckpointError(manifests.damaged(name, manifests.FILE_NAME, f"does not cover {key}"))
    return found


def _checked_file(path: Path, file: str, files: Mapping[str, Any]) -> tuple[Any, dict[str, tuple]]:
    """The open file and the shapes in it, once its size and hash are those in the manifest."""
    if Path(file).name != file or file not in files:
        raise CheckpointError(manifests.damaged(path.name, manifests.FILE_NAME, f"names {file!r}"))
    try:
        num_bytes = (path / file).stat().st_size
        if num_bytes != files[file]["bytes"]:
            how = f"has {num_bytes} bytes instead of {files[file]['bytes']}"
            raise CheckpointError(manifests.damaged(path.name, file, how))
        with open(path / file, "rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != files[file]["sha256"]:
                raise CheckpointError(
                    manifests.damaged(path.name, file, "was changed after it was written")
                )
        opened = safe_open(path / file, framework="pt")
        shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            manifests.damaged(path.name, file, f"cannot be read ({reason})")
        ) from error
    return opened, shapes

"""Checkpoints: one safetensors file a rank and a manifest, written aside and renamed whole.

`begin` is collective: the ranks tell each other which boxes they hold, and each copies what it
will write. The training then goes on, while every rank writes from its copy (engine/writing.py).
Every rank raises the same error or none does. Nothing is unpickled from a file.

Format: docs/checkpoints.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workbench.engine import share as shares
from workbench.engine.agreed import agreed, agreed_all, rank_and_size
from workbench.engine.finish import Finish
from workbench.engine.restore import restored
from workbench.engine.staging import Staging
from workbench.engine.state import Piece
from workbench.engine.writing import Writing
from workbench.errors import CheckpointError


def begin(
    pieces: Mapping[str, Piece],
    meta: Mapping[str, Any],
    root: Path,
    name: str,
    *,
    unique: bool = False,
    staging: Staging | None = None,
) -> Writing:
    """Copy what this rank writes of the checkpoint `name` under `root`; collective.

    The keys of all ranks count: each may hold others, a part of a tensor, or nothing. The
    Writing is to be started, or run, on every rank.
    meta: plain values, kept beside the format's own fields (step, layout, recipe, ...). unique:
    take `name-2`, `name-3`, ... where the name exists, instead of refusing it. staging: the memory
    to copy to, which no other save uses until this one is over.

    Raises the same CheckpointError on all ranks, with nothing left on disk.
    """
    rank, size = place = rank_and_size()
    staging = staging or Staging()
    finish = Finish(Path(root), name, unique=unique)
    writing: list[Writing] = []
    held = shares.held(pieces)

    def opened() -> tuple[bool, Path | None]:
        return staging.knows(place, held), finish.open(meta, size) if rank == 0 else None

    def staged(directory: Path, share: shares.Share) -> None:
        if rank == 0:
            finish.check_room(share.total_bytes)
        writing.append(Writing(directory, rank, share, staging.fill(share, pieces)))

    try:
        told = agreed_all(opened)
        directory = told[0][1]
        assert directory is not None
        if all(is_known for is_known, _ in told):
            share = staging.share
        else:
            staging.forget()
            share = staging.keep(place, held, shares.plan(agreed_all(lambda: held), rank))
        agreed(lambda: staged(directory, share))
    except BaseException:
        for one in writing:
            one.discard()
        finish.discard()
        raise
    if rank == 0:
        writing[0].finish = finish
    return writing[0]


def save(
    pieces: Mapping[str, Piece],
    meta: Mapping[str, Any],
    root: Path,
    name: str,
    *,
    unique: bool = False,
) -> str:
    """Write a checkpoint while the training stands -> its name; collective, else as `begin`."""
    writing = begin(pieces, meta, root, name, unique=unique)
    writing.run()
    told = agreed_all(lambda: (writing.problem, writing.is_first, writing.name))
    problems = sorted((not is_first, text) for text, is_first, _ in told if text is not None)
    if problems:
        raise CheckpointError(problems[0][1])
    return str(told[0][2])


def load(
    path: Path, pieces: Mapping[str, Piece], check: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Fill the pieces, in place, from a checkpoint; collective, what `save` got as meta.

    The pieces are those of `state.take`, at any number of ranks and in any layout; each rank
    reads the boxes it holds, and all ranks together must hold what was saved. Manifest, sizes and
    hashes are checked on all ranks before the first byte changes. `state.load` then puts back the
    numbers that no tensor of the model holds. check: raises CheckpointError for a meta that will
    not do.

    Raises the same CheckpointError on all ranks, with nothing changed.
    """
    mine = {key: shares.kind_of(piece) for key, piece in pieces.items()}
    model = shares.one_kind(agreed_all(lambda: mine))

    def looked_at() -> tuple[dict[str, Any], Callable[[], None]]:
        meta, fill = restored(Path(path), pieces, model)
        if check is not None:
            check(meta)
        return meta, fill

    meta, fill = agreed(looked_at)
    fill()
    return meta

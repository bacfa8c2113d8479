"""Checkpoints: one safetensors file a rank and a manifest, written aside and renamed whole.

Each element is written once: what several ranks hold is shared out among them by bytes. The
collectives here are small (who holds which box, how it went); tensors go to disk from where they
are. Every rank raises the same error or none does. Nothing is unpickled from a file.

Format: docs/checkpoints.md. Data files: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.engine.cells import Cell, cells, cells_of_buffer
from workbench.engine.restore import Kind, restored
from workbench.engine.shards import Box, whole
from workbench.engine.state import Piece
from workbench.errors import CheckpointError
from workbench.spec import manifest as manifests

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# dtype in a manifest: its name in a safetensors file, and the bytes of an element.
DTYPES = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint8": ("U8", 1), "bool": ("BOOL", 1),
}  # fmt: skip
T = TypeVar("T")


def save(
    pieces: Mapping[str, Piece],
    meta: Mapping[str, Any],
    root: Path,
    name: str,
    *,
    unique: bool = False,
) -> dict[str, Any]:
    """Write the checkpoint `name` under `root`; collective, the manifest on every rank.

    The keys of all ranks count: each may hold others, a part of a tensor, or nothing.
    meta: plain values, kept beside the format's own fields (step, layout, recipe, ...). unique:
    take `name-2`, `name-3`, ... where the name exists, instead of refusing it.

    Raises the same CheckpointError on all ranks, with nothing left on disk.
    """
    root = Path(root)
    owned, keys, total_bytes = _plan(pieces)
    writer = _Writer(root, name, unique)
    try:
        partial = Path(_from_first(lambda: writer.open(total_bytes, meta)))
        file_name = f"rank-{_rank()}.safetensors"
        files = _agreed_all(lambda: _write_file(partial / file_name, owned))
        fields = {
            "ranks": len(files),
            "torch": str(torch.__version__),
            "files": {f"rank-{rank}.safetensors": file for rank, file in enumerate(files) if file},
            "keys": keys,
        }
        return _from_first(lambda: writer.close(meta, fields))
    finally:
        writer.discard()


def load(path: Path, pieces: Mapping[str, Piece]) -> dict[str, Any]:
    """Fill the pieces, in place, from a checkpoint; collective, what `save` got as meta.

    The pieces are those of `state.take`, at any number of ranks and in any layout; each rank
    reads the boxes it holds, and all ranks together must hold what was saved. Manifest, sizes and
    hashes are checked on all ranks before the first byte changes. `state.load` then puts back the
    numbers that no tensor of the model holds.

    Raises the same CheckpointError on all ranks, with nothing changed.
    """
    mine = {key: _kind(piece) for key, piece in pieces.items()}
    model = _one_kind(_agreed_all(lambda: mine))
    meta, fill = _agreed(lambda: restored(Path(path), pieces, model))
    fill()
    return meta


class _Writer:
    """What rank 0 alone does: the directory aside, the manifest, the rename."""

    def __init__(self, root: Path, name: str, unique: bool) -> None:
        self.root, self.name, self.unique = root, name, unique
        self._partial: Path | None = None
        self._lock = -1

    def open(self, num_bytes: int, meta: Mapping[str, Any]) -> str:
        """Make the directory that the ranks write into."""
        if not NAME.fullmatch(self.name):
            raise CheckpointError(
                f"{self.name!r} cannot name a checkpoint. Use letters, digits, '.', '_' and '-'."
            )
        if taken := set(meta) & set(manifests.OWN_FIELDS):
            raise CheckpointError(f"meta has fields of the format itself: {', '.join(taken)}.")
        manifests.plain(meta)  # Before any byte is written.
        with _says_where(self.root):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self.root):
                self.name = self._free_name()
                _sweep(self.root)
                _check_room(self.root, num_bytes)
                partial = self.root / f".{self.name}.partial-{secrets.token_hex(4)}"
                # Held until this process ends: how a sweep knows that the writer lives.
                self._lock = _lock(_lock_of(partial))
                partial.mkdir(mode=0o700)
                self._partial = partial
        return str(partial)

    def close(self, meta: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Write the manifest and let the checkpoint appear under its name."""
        assert self._partial is not None
        now = time.time()
        manifest = {
            "format": manifests.FORMAT,
            "name": self.name,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
            "time_s": now,
            **manifests.plain(meta),
            **fields,
        }
        with _says_where(self.root):
            with _new_file(self._partial / manifests.FILE_NAME) as file:
                file.write(manifests.to_text(manifest).encode())
            _sync(self._partial)
            with _locked(self.root):
                # Not rename alone: it would silently take the place of an empty directory.
                self._free_name(may_change=False)
                os.rename(self._partial, self.root / self.name)
                _lock_of(self._partial).unlink()
                self._partial = None
                _sync(self.root)
        return manifest

    def discard(self) -> None:
        """Remove what was not renamed, and let go of it."""
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
            _lock_of(self._partial).unlink(missing_ok=True)
        if self._lock >= 0:
            os.close(self._lock)

    def _free_name(self, *, may_change: bool = True) -> str:
        name, number = self.name, 1
        while os.path.lexists(self.root / name):
            if not (self.unique and may_change):
                raise CheckpointError(
                    f"A checkpoint named {name!r} exists in {self.root}. Choose another name."
                )
            number += 1
            name = f"{self.name}-{number}"
        return name


def _kind(piece: Piece) -> Kind:
    return tuple(piece.shape), str(piece.local.dtype).removeprefix("torch.")


def _one_kind(everyone: list[dict[str, Kind]]) -> dict[str, Kind]:
    """The keys of all ranks, each once. Raises CheckpointError for one that is of two kinds."""
    found: dict[str, tuple[int, Kind]] = {}
    for rank, kinds in enumerate(everyone):
        for key, kind in kinds.items():
            first, known = found.setdefault(key, (rank, kind))
            if kind != known:
                raise CheckpointError(
                    f"{key} is {known[1]} {list(known[0])} on rank {first} and "
                    f"{kind[1]} {list(kind[0])} on rank {rank}. Use one recipe on all ranks."
                )
    return {key: kind for key, (_, kind) in found.items()}


def _plan(pieces: Mapping[str, Piece]) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """What this rank writes, the manifest's entry of every key, the bytes of all ranks.

    Collective; every rank makes the whole plan, so that they raise alike.
    """
    mine = {key: (_kind(piece), piece.box, piece.buffer) for key, piece in pieces.items()}
    everyone = _agreed_all(lambda: mine)
    kinds = _one_kind([{key: kind for key, (kind, *_) in rank.items()} for rank in everyone])
    loads, owned, entries = [0] * len(everyone), {}, {}
    # The largest first: the small ones then even the loads out.
    for key in sorted(kinds, key=lambda key: (-torch.Size(kinds[key][0]).numel(), key)):
        boxes = tuple(rank[key][1] if key in rank else None for rank in everyone)
        is_buffer = any(rank[key][2] for rank in everyone if key in rank)
        entries[key] = []
        for number, cell in enumerate(_cells(key, kinds[key], boxes, is_buffer)):
            owner = min(cell.sources, key=lambda rank: (loads[rank], rank))
            loads[owner] += cell.numel * DTYPES[kinds[key][1]][1]
            # A rank that holds more than others writes a part of it, or several.
            stored = key if boxes[owner] == cell.box else f"{key}#{number}"
            if owner == _rank():
                owned[stored] = pieces[key].local[cell.box.slices(pieces[key].offset)]
            file = f"rank-{owner}.safetensors"
            entries[key].append({"file": file, "key": stored, **asdict(cell.box)})
    keys = {
        key: {"shape": shape, "dtype": dtype, "pieces": entries[key]}
        for key, (shape, dtype) in kinds.items()
    }
    return owned, manifests.plain(keys, "keys"), sum(loads)


def _cells(
    key: str, kind: Kind, boxes: tuple[Box | None, ...], is_buffer: bool
) -> tuple[Cell, ...]:
    """The whole of a key in parts, with the ranks that can write each.

    Raises CheckpointError for one that is not whole, or of a dtype that no file holds.
    """
    shape, dtype = kind
    if dtype not in DTYPES:
        raise CheckpointError(f"{key} has dtype {dtype}, which a safetensors file lacks.")
    # Replicas of a buffer may differ (running statistics): all come from the first rank.
    found = (cells_of_buffer if is_buffer else cells)(whole(shape), boxes)
    if gap := next((cell for cell in found if not cell.sources), None):
        raise CheckpointError(
            f"The ranks together do not hold {key}: {list(gap.box.shape)} of its {list(shape)} "
            f"from {list(gap.box.offset)} on are on none. Restore another checkpoint."
        )
    return found


def _write_file(path: Path, owned: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Write the pieces as a safetensors file, hashing on the way; its size and hash."""
    if not owned:
        return None
    # Wide elements first keeps every tensor aligned for those who map the file.
    order = sorted(owned, key=lambda key: (-owned[key].element_size(), key))
    header: dict[str, Any] = {}
    end = 0
    for key in order:
        local = owned[key]
        start, end = end, end + local.numel() * local.element_size()
        shape = list(local.shape)
        dtype = DTYPES[str(local.dtype).removeprefix("torch.")][0]
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with _says_where(path.parent), _new_file(path) as file:
        for part in _parts(text, [owned[key] for key in order]):
            digest.update(part)
            file.write(part)
    return {"bytes": 8 + len(text) + end, "sha256": digest.hexdigest()}


def _parts(header: bytes, tensors: list[Tensor]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little")
    yield header
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield memoryview(flat.numpy())  # type: ignore[arg-type] - numpy arrays are buffers


@contextmanager
def _new_file(path: Path) -> Iterator[Any]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    descriptor = _lock(root / ".lock")
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(path: Path, how: int = fcntl.LOCK_EX) -> int:
    # A file, not the directory: network file systems lock nothing that is not open for writing.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock_of(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.lock")


def _sweep(root: Path) -> None:
    """Remove what writers left that are gone: their lock is free. The root's lock is held."""
    names = {path.name.removesuffix(".lock") for path in root.glob(".*.partial-*")}
    for left in (root / name for name in names):
        try:
            descriptor = _lock(_lock_of(left), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # Its writer lives, or it is another user's: not ours to remove.
        shutil.rmtree(left, ignore_errors=True)
        _lock_of(left).unlink(missing_ok=True)
        os.close(descriptor)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_room(root: Path, num_bytes: int) -> None:
    free_bytes = shutil.disk_usage(root).free
    if free_bytes < num_bytes * 1.02:
        raise CheckpointError(
            f"A checkpoint of {num_bytes / 1e6:.1f} MB does not fit in {root}: "
            f"{free_bytes / 1e6:.1f} MB are free. Remove old checkpoints or save elsewhere."
        )


@contextmanager
def _says_where(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint cannot be written in {directory}: {error.strerror}. "
            "Make room or choose another directory."
        ) from error


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _agreed_all(make: Callable[[], T]) -> list[T]:
    """What make() gives on each rank; where it raises CheckpointError, the first on all ranks."""
    try:
        mine = (make(), None)
    except CheckpointError as error:
        mine = (None, str(error))
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    for _, problem in everyone:
        if problem is not None:
            raise CheckpointError(problem)
    return [value for value, _ in everyone]


def _agreed(make: Callable[[], T]) -> T:
    """What make() gives on this rank, once it has not raised on any."""
    kept = []
    _agreed_all(lambda: kept.append(make()))
    return kept[0]


def _from_first(make: Callable[[], T]) -> T:
    """What make() gives on rank 0, on every rank."""
    return _agreed_all(lambda: make() if _rank() == 0 else None)[0]  # type: ignore[return-value]

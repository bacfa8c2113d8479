"""Share: what each rank writes of a checkpoint, so that each element is written once.

What several ranks hold is shared out among them by bytes. Every rank makes the whole plan, so that
all raise alike and each can write the manifest's part of it.

Data files: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.engine.cells import Cell, cells, cells_of_buffer
from workbench.engine.restore import Kind
from workbench.engine.shards import Box, whole
from workbench.engine.state import Piece
from workbench.errors import CheckpointError
from workbench.spec import manifest as manifests

# dtype in a manifest: its name in a safetensors file, and the bytes of an element.
DTYPES = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint8": ("U8", 1), "bool": ("BOOL", 1),
}  # fmt: skip
# Of one rank, by key: shape and dtype of the whole, the box it holds, whether it is a buffer.
Held = dict[str, tuple[Kind, Box, bool]]


@dataclass(frozen=True)
class Part:
    """A box of the piece `key` that lies from `begin` to `end` among the data of a file, bytes."""

    key: str
    box: Box
    begin: int
    end: int


@dataclass(frozen=True)
class Share:
    """What one rank writes, and the plan of all.

    head: the file's bytes before its data; b"" where it writes nothing. keys: the manifest's
    entries. writers: ranks that write a file. total_bytes: data of all of them.
    """

    head: bytes
    parts: tuple[Part, ...]
    keys: dict[str, Any]
    writers: tuple[int, ...]
    total_bytes: int

    @property
    def data_bytes(self) -> int:
        """Data of this rank's file."""
        return self.parts[-1].end if self.parts else 0


def kind_of(piece: Piece) -> Kind:
    """Shape of the whole and dtype, as a manifest names them."""
    return tuple(piece.shape), str(piece.local.dtype).removeprefix("torch.")


def held(pieces: Mapping[str, Piece]) -> Held:
    """What this rank has to say of its pieces for the plan."""
    return {key: (kind_of(piece), piece.box, piece.buffer) for key, piece in pieces.items()}


def one_kind(everyone: list[dict[str, Kind]]) -> dict[str, Kind]:
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


def file_of(rank: int) -> str:
    """The data file of a rank."""
    return f"rank-{rank}.safetensors"


def note_of(directory: Path, rank: int) -> Path:
    """Where a rank says that its data file is whole; gone when the checkpoint is."""
    return directory / f"rank-{rank}.json"


def plan(everyone: list[Held], mine: int) -> Share:
    """The share of rank `mine`, from what all ranks hold."""
    kinds = one_kind([{key: kind for key, (kind, *_) in rank.items()} for rank in everyone])
    loads, owned, keys = [0] * len(everyone), {}, {}
    writers: set[int] = set()
    # The largest first: the small ones then even the loads out.
    for key in sorted(kinds, key=lambda key: (-torch.Size(kinds[key][0]).numel(), key)):
        shape, dtype = kinds[key]
        boxes = tuple(rank[key][1] if key in rank else None for rank in everyone)
        is_buffer = any(rank[key][2] for rank in everyone if key in rank)
        stored_as = []
        for number, cell in enumerate(_cells(key, kinds[key], boxes, is_buffer)):
            owner = min(cell.sources, key=lambda rank: (loads[rank], rank))
            loads[owner] += cell.numel * DTYPES[dtype][1]
            writers.add(owner)
            # A rank that holds more than others writes a part of it, or several.
            stored = key if boxes[owner] == cell.box else f"{key}#{number}"
            if owner == mine:
                owned[stored] = key, cell.box, dtype
            stored_as.append({"file": file_of(owner), "key": stored, **asdict(cell.box)})
        keys[key] = {"shape": shape, "dtype": dtype, "pieces": stored_as}
    head, parts = _file(owned)
    ranks = tuple(sorted(writers))
    return Share(head, parts, manifests.plain(keys, "keys"), ranks, sum(loads))


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


def _file(owned: Mapping[str, tuple[str, Box, str]]) -> tuple[bytes, tuple[Part, ...]]:
    """A safetensors file of these: what comes before its data, and where each lies in them."""
    if not owned:
        return b"", ()
    # Wide elements first keeps every tensor aligned for those who map the file.
    order = sorted(owned, key=lambda stored: (-DTYPES[owned[stored][2]][1], stored))
    header: dict[str, Any] = {}
    parts = []
    end = 0
    for stored in order:
        key, box, dtype = owned[stored]
        name, size = DTYPES[dtype]
        begin, end = end, end + box.numel * size
        header[stored] = {"dtype": name, "shape": box.shape, "data_offsets": [begin, end]}
        parts.append(Part(key, box, begin, end))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, tuple(parts)


def local(part: Part, pieces: Mapping[str, Piece]) -> Tensor:
    """The memory of the model, or of the optimizer, that a part is a copy of."""
    piece = pieces[part.key]
    return piece.local[part.box.slices(piece.offset)]

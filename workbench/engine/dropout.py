"""Dropout with the same masks for the same sample, however samples and tensors are spread.

Whether an element is dropped is a hash of (seed, step, number of the sample, name of the module,
which of its calls, index of the element within the sample): no generator is advanced, so that
another number of ranks or microbatches, a step redone or recomputed draws the same. A tensor costs
five integer operations an element, less than what torch's generator costs on a CPU.

Source: Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3" (the idea of counters);
Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators" (the mixing of keys).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from workbench.engine.shards import Box, local_part, whole

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
MIX_STEP, MIX_CALL = 0xD1342543DE82EF95, 0xAF251AF3B0F025B5
ODD_32 = 0x85EBCA6B - 2**32
# What SELU tends to far below zero, with the sign turned: what alpha dropout puts in.
ALPHA = 1.7580993408473766
SHAPES_KEPT = 16


@dataclass
class Draw:
    """Where the forward now running is: samples first .. first+count-1 of the stream, in a step.

    padded: rows that the inputs were brought to, 0 when they are `count`. calls: how often each
    module has run there; every move starts them anew. A copy of a model shares the Draw.
    """

    step: int = 0
    first: int = 0
    count: int = 1
    padded: int = 0
    calls: dict[str, int] = field(default_factory=dict)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name != "calls":
            object.__setattr__(self, "calls", {})

    def __deepcopy__(self, memo: dict) -> Draw:
        return self

    def taken(self) -> tuple[int, int, int, int, dict[str, int]]:
        """The position, to return to it with `back_at`."""
        return self.step, self.first, self.count, self.padded, dict(self.calls)

    def put(self, taken: tuple[int, int, int, int, dict[str, int]]) -> None:
        """Go to a position that was taken, calls included."""
        self.step, self.first, self.count, self.padded, calls = taken
        self.calls = dict(calls)

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which `here` is this one: a forward is on its way."""
        token = _here.set(self)
        try:
            yield
        finally:
            _here.reset(token)

    @contextmanager
    def back_at(self, taken: tuple[int, int, int, int, dict[str, int]]) -> Iterator[None]:
        """A context in which forwards draw what they drew at that position."""
        now = self.taken()
        self.put(taken)
        try:
            yield
        finally:
            self.put(now)


_here: ContextVar[Draw | None] = ContextVar("draw", default=None)


def here() -> Draw | None:
    """Where the forward that is on its way stands; None outside of one."""
    return _here.get()


@dataclass(frozen=True)
class Kind:
    """batch_ndim: of an input that has samples and channels, for dropout of whole channels."""

    batch_ndim: int | None = None
    alpha: bool = False

    def mask_dims(self, ndim: int) -> int:
        """The leading dims along which entries are dropped one by one."""
        if self.batch_ndim is None:
            return ndim
        return min(2 if ndim >= self.batch_ndim else 1, ndim)


# By forward: a subclass with a forward of its own does something else.
KINDS: dict[Callable, Kind] = {
    nn.Dropout.forward: Kind(),
    nn.Dropout1d.forward: Kind(3),
    nn.Dropout2d.forward: Kind(2),
    nn.Dropout3d.forward: Kind(5),
    nn.AlphaDropout.forward: Kind(alpha=True),
    nn.FeatureAlphaDropout.forward: Kind(2, alpha=True),
}


def kind_of(module: nn.Module) -> Kind | None:
    """What make_invariant can do for a module; None when it leaves the module as it is."""
    return KINDS.get(type(module).forward)


def make_invariant(
    model: nn.Module,
    draw: Draw,
    seed: int,
    *,
    full_shapes: Mapping[str, Sequence[tuple[int, ...]]] | None = None,
    index: int = 0,
    of: int = 1,
) -> None:
    """Replace the forward of each dropout module of torch (on the instance: names stay).

    The first dim of an input is the batch; k times as many rows as there are samples are k rows a
    sample, in order. Any other number of rows, as in dropout of a table of positions, gives one
    mask for all samples. The same values in another dtype lose the same elements.

    full_shapes: what each module's inputs are before tensor parallelism cuts them, by name and
    call in a forward, found with inputs as long as those trained on. A plain tensor that is the
    `of`-th part of it in one dim is taken as the part `index`; any other as whole, since ranks
    that hold the same activation must drop the same. A DTensor knows its part.
    """
    counters = functools.lru_cache(maxsize=SHAPES_KEPT)(_counters)
    for name, module in model.named_modules():
        if (kind := kind_of(module)) is not None:
            shapes = (full_shapes or {}).get(name) if of > 1 else None
            part = Part(tuple(shapes), index, of) if shapes else None
            digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
            key = int.from_bytes(digest, "little")
            module.forward = Masked(module, kind, name, key, draw, part, counters)


def draws_in(model: nn.Module) -> list[Draw]:
    """The positions that the modules of a model draw at; none before make_invariant."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    found = {id(f.draw): f.draw for f in forwards if isinstance(f, Masked)}
    return list(found.values())


@dataclass(frozen=True)
class Part:
    """Which part of a tensor-parallel input a rank may have: the `index`-th `of` equal ones.

    shapes: of the whole inputs, by call; later calls are taken to be like the last.
    """

    shapes: tuple[tuple[int, ...], ...]
    index: int
    of: int

    def box(self, shape: tuple[int, ...], call: int) -> tuple[Box, tuple[int, ...]]:
        """The box of a local tensor, and the shape it is a box of; the first dim never counts."""
        offset, total = [0] * len(shape), list(shape)
        full = self.shapes[min(call, len(self.shapes) - 1)]
        if len(shape) == len(full):
            pairs = zip(shape, full, strict=True)
            other = [dim for dim, (n, m) in enumerate(pairs) if dim and n != m]
            if len(other) == 1 and shape[other[0]] * self.of == full[other[0]]:
                offset[other[0]] = self.index * shape[other[0]]
                total[other[0]] = full[other[0]]
        return Box(tuple(offset), shape), tuple(total)


@dataclass
class Masked:
    """The forward of one dropout module."""

    module: nn.Module
    kind: Kind
    name: str
    key: int
    draw: Draw
    part: Part | None
    counters: Callable[[Box, tuple[int, ...], torch.device], Tensor]

    def __call__(self, input: Tensor) -> Tensor:
        """input [rows, ...] -> the same shape and dtype."""
        p = float(self.module.p)  # pyright: ignore[reportArgumentType]
        if not self.module.training or p == 0:
            return input
        if not isinstance(input, DTensor):
            shape = tuple(input.shape)
            call = self.draw.calls.get(self.name, 0)
            box, total = self.part.box(shape, call) if self.part else (whole(shape), shape)
            return self._dropped(input, p, box, total)
        # Parts of a sum are no activation yet.
        places = [Replicate() if one.is_partial() else one for one in input.placements]
        input = input.redistribute(placements=places)
        box = local_part(input)[1]
        out = self._dropped(input.to_local(), p, box, tuple(input.shape))
        return DTensor.from_local(out, input.device_mesh, input.placements, run_check=False)

    def _dropped(self, x: Tensor, p: float, box: Box, total: tuple[int, ...]) -> Tensor:
        dims = self.kind.mask_dims(x.ndim)
        kept = self._kept(Box(box.offset[:dims], box.shape[:dims]), total[:dims], p, x.device)
        kept = kept.view((*box.shape[:dims], *(1,) * (x.ndim - dims)))
        if self.kind.alpha:
            gain = ((1 - p) * (1 + p * ALPHA**2)) ** -0.5 if p < 1 else 0.0
            return torch.where(kept, x, -ALPHA) * gain + ALPHA * gain * p
        scale = 1 / (1 - p) if p < 1 else 0.0
        if self.module.inplace:
            return x.mul_(kept).mul_(scale)
        return x * kept * scale

    def _kept(self, box: Box, total: tuple[int, ...], p: float, device: torch.device) -> Tensor:
        """The elements of a box that stay: bool, in the order of the box."""
        draw = self.draw
        call = draw.calls.get(self.name, 0)
        draw.calls[self.name] = call + 1
        rows, samples = (box.shape or (1,))[0], draw.padded or draw.count
        per_sample, is_odd = divmod(rows, samples)
        if is_odd or not box.shape:
            samples, per_sample, first = 1, rows, -1
        else:
            first = draw.first
        # Apart from `first * GOLDEN` by multipliers with no small relation to it.
        key = self.key + draw.step * MIX_STEP + call * MIX_CALL
        keys = _keys(key, first, samples).to(device)
        inner = Box((0, *box.offset[1:]), (per_sample, *box.shape[1:]))
        bits = self.counters(inner, (per_sample, *total[1:]), device) ^ keys[:, :1]
        bits *= ODD_32
        bits ^= bits >> 15
        bits *= keys[:, 1:]
        # The highest bits, which are the best mixed, decide.
        return bits >= min(round(p * 2**32), 2**32 - 1) - 2**31


def _keys(key: int, first: int, samples: int) -> Tensor:
    """Two 32-bit numbers a sample, the second one odd: int32 [samples, 2]."""
    # In numpy, which knows unsigned numbers and takes a microsecond for an array this small.
    numbers = np.arange(first, first + samples).astype(np.uint64)
    mixed = _mixed(numbers * GOLDEN + np.uint64(key % 2**64)).view(np.int32)
    pairs = mixed.reshape(samples, 2)
    pairs[:, 1] |= 1
    return torch.from_numpy(pairs)


def _counters(box: Box, total: tuple[int, ...], device: torch.device) -> Tensor:
    """A hash of each element's index in the whole: int32 [1, elements of the box]."""
    index = np.zeros((), np.uint64)
    for first, size, length in zip(box.offset, box.shape, total, strict=True):
        places = np.arange(first, first + size, dtype=np.uint64)
        index = index[..., None] * np.uint64(length) + places
    halves = _mixed(index.reshape(-1) + np.uint64(1)).view(np.int32)
    return torch.from_numpy(halves[None, ::2].copy()).to(device)


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer, on uint64."""
    x = (x ^ (x >> np.uint64(30))) * MIX[0]
    x = (x ^ (x >> np.uint64(27))) * MIX[1]
    return x ^ (x >> np.uint64(31))

"""Samples: one endless stream of samples that every rank can compute for itself.

A global counter numbers the samples 0, 1, 2, ... Epoch e of a dataset of n samples is the counter
range [e*n, (e+1)*n) in an order drawn from (seed, e), so a batch may straddle two epochs and none
is ever short. Nothing here knows a rank: position is one number, and a run continues at any number
of ranks with no sample twice or never. What a sample draws at random depends on (seed, counter).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from workbench.errors import InputError, RecipeError

DATA_KINDS = (
    "a dataset with __len__ and __getitem__, a pair of tensors (inputs, targets), "
    "or a function of a tensor of sample numbers that returns (inputs, targets)"
)


def shares(batch: int, ranks: int, accumulate: int = 1) -> list[list[tuple[int, int]]]:
    """For each rank its microbatches (offset, count) of one global batch.

    Contiguous in rank order, every count >= 1, and counts differ by at most one.

    Raises InputError when the batch has fewer samples than there are microbatches.
    """
    pieces = ranks * accumulate
    if batch < pieces:
        fewer = [f"batch >= {pieces}"]
        if accumulate > 1 and batch >= ranks:
            fewer.append(f"accumulate <= {batch // ranks}")
        elif accumulate == 1:
            fewer.append(f"at most {batch} ranks")
        per_rank = f"{ranks} ranks" + (f" x accumulate={accumulate}" if accumulate > 1 else "")
        raise InputError(
            f"batch={batch} leaves a microbatch without a sample on {per_rank}. "
            f"Use {' or '.join(fewer)}."
        )
    out, offset = [], 0
    for count in _cut(batch, ranks):
        mine = []
        for micro in _cut(count, accumulate):
            mine.append((offset, micro))
            offset += micro
        out.append(mine)
    return out


def _cut(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


@contextmanager
def fixed_random(seed: int | None = None) -> Iterator[None]:
    """The CPU streams of torch, random and numpy, seeded inside and as before afterwards.

    So what data draws neither depends on the rank nor moves the stream that dropout draws from.
    """
    state = _random_state()
    try:
        if seed is not None:
            _seed_all(seed)
        yield
    finally:
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])


class Samples:
    """The stream over `source`, one of the DATA_KINDS; `length` is None for a batch function."""

    def __init__(self, source: Any, seed: int = 0) -> None:
        self.source = source
        self.seed = seed
        self._orders: dict[int, Tensor] = {}
        self._draws = False
        self._tensors, self._batch_of, self.length = _kind(source)

    def seeded(self, seed: int) -> Samples:
        """The same data in the order of another seed."""
        return Samples(self.source, seed)

    def indices(self, first: int, count: int) -> Tensor:
        """Dataset indices [count] of the samples first .. first+count-1."""
        if self.length is None:
            raise ValueError("a batch function has no dataset indices")
        epoch, start = divmod(first, self.length)
        order = self._order(epoch)
        if start + count <= self.length:
            return order[start : start + count]
        pieces = [order[start:]]
        while (missing := count - sum(map(len, pieces))) > 0:
            epoch += 1
            pieces.append(self._order(epoch)[:missing])
        return torch.cat(pieces)

    def fetch(self, first: int, count: int) -> tuple[Any, Any]:
        """Inputs and targets of the samples first .. first+count-1, batched along dim 0.

        Raises RecipeError when the data does not give pairs.
        """
        if self._tensors:
            index = self.indices(first, count)
            return self._tensors[0][index], self._tensors[1][index]
        with fixed_random():
            got = self._from_function(first, count) if self._batch_of else self._items(first, count)
        if not isinstance(got, (tuple, list)) or len(got) != 2:
            what = f"{len(got)} parts" if isinstance(got, (tuple, list)) else type(got).__name__
            raise RecipeError(f"The data gives {what} a sample. Give pairs: (input, target).")
        return got[0], got[1]

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(mixed("order", self.seed, epoch))
            # Two are enough: a batch straddles the current and the next epoch.
            for old in sorted(self._orders)[:-1]:
                del self._orders[old]
            self._orders[epoch] = torch.randperm(self.length or 0, generator=generator)
        return self._orders[epoch]

    def _items(self, first: int, count: int) -> Any:
        items = []
        for number, index in enumerate(self.indices(first, count).tolist(), start=first):
            self._reseed(number)
            items.append(self.source[index])
        return default_collate(items)

    def _from_function(self, first: int, count: int) -> Any:
        assert self._batch_of is not None
        numbers = torch.arange(first, first + count)
        if not self._draws:
            before = _random_state()
            got = self._batch_of(numbers)
            if _same_state(before, _random_state()):
                return got
            # It draws random numbers: from here on sample by sample, each with its own seed, or
            # the samples would depend on how many ranks share the batch.
            self._draws = True
        parts = []
        for number in numbers.split(1):
            self._reseed(int(number))
            parts.append(self._batch_of(number))
        return _joined(parts)

    def _reseed(self, number: int) -> None:
        _seed_all(mixed("sample", self.seed, number))


def _kind(source: Any) -> tuple[tuple[Tensor, Tensor] | None, Callable | None, int | None]:
    if isinstance(source, TensorDataset) and len(source.tensors) == 2:
        source = source.tensors
    if isinstance(source, (tuple, list)) and len(source) == 2 and _are_tensors(source):
        inputs, targets = source
        if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
            raise RecipeError(
                f"data() gives inputs of shape {list(inputs.shape)} and targets of shape "
                f"{list(targets.shape)}. Give as many targets as inputs along the first dimension."
            )
        return (inputs, targets), None, _filled(len(inputs))
    if isinstance(source, IterableDataset):
        raise RecipeError(
            f"data() gives {type(source).__name__}, an IterableDataset, which has no sample "
            f"numbers. Give {DATA_KINDS}."
        )
    if hasattr(source, "__getitem__") and isinstance(source, Sized) and not _are_tensors([source]):
        return None, None, _filled(len(source))
    if callable(source) and not isinstance(source, type):
        return None, source, None
    raise RecipeError(f"data() gives {type(source).__name__}. Give {DATA_KINDS}.")


def _are_tensors(values: Any) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def _filled(length: int) -> int:
    if length == 0:
        raise RecipeError("data() gives no samples: its length is 0. Give at least one.")
    return length


def mixed(use: str, *numbers: int) -> int:
    """A seed for one use and place: 63 bits that neighbouring numbers do not share."""
    # A hash, not seed + number: neighbouring seeds must not share streams.
    digest = hashlib.blake2b(f"{use}{numbers}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _random_state() -> tuple:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _same_state(one: tuple, two: tuple) -> bool:
    same_numpy = all(np.array_equal(a, b) for a, b in zip(one[2], two[2], strict=True))
    return torch.equal(one[0], two[0]) and one[1] == two[1] and same_numpy


def _seed_all(seed: int) -> None:
    # Not torch.manual_seed: that would also reset the device's stream, which dropout uses.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _joined(parts: list) -> Any:
    """Batches of one sample each, concatenated along dim 0 through tuples, lists and dicts."""
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], dict):
        return {key: _joined([part[key] for part in parts]) for key in parts[0]}
    if isinstance(parts[0], (tuple, list)):
        return tuple(_joined([part[place] for part in parts]) for place in range(len(parts[0])))
    raise RecipeError(
        f"batch_of() gives {type(parts[0]).__name__} where a tensor is wanted. "
        "Return (inputs, targets) as tensors."
    )

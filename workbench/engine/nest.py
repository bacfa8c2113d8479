"""Nest: tensors in tuples, lists, dicts, slices and dataclasses, and templates of such values.

A template has a Ref or a State where the value has a tensor. torch's own pytrees know neither
dataclasses nor slices, and what they register is private.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Ref:
    """A value of a tape by its number."""

    slot: int


@dataclass(frozen=True)
class State:
    """A parameter or buffer by its name, looked up when it is used."""

    name: str


@dataclass(frozen=True)
class Made:
    """A dataclass to be made of its fields."""

    kind: type
    fields: dict[str, Any]


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif _is_record(value):
        for part in fields(value):
            yield from tensors(getattr(value, part.name, None))
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, slice):
        yield from tensors((value.start, value.stop, value.step))


def template(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The value with change(tensor) for each tensor, in the order of `tensors`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return _like(value, [template(item, change) for item in value])
    if _is_record(value):
        names = [part.name for part in fields(value) if part.init]
        return Made(type(value), {n: template(getattr(value, n), change) for n in names})
    if isinstance(value, dict):
        return _dict_like(value, {key: template(item, change) for key, item in value.items()})
    if isinstance(value, slice):
        return slice(*(template(end, change) for end in (value.start, value.stop, value.step)))
    return value


def filled(made: Any) -> Any:
    """The value of a template that has tensors in it already."""
    return filler(made, None)([])


def signature(value: Any) -> tuple[Any, ...]:
    """What a forward may depend on other than values: shapes, types, and all that is no tensor."""
    if isinstance(value, Tensor):
        return (value.shape, value.dtype)
    return (
        *((tensor.shape, tensor.dtype) for tensor in tensors(value)),
        repr(template(value, lambda _: "")),
    )


def filler(made: Any, model: nn.Module | None) -> Callable[[list], Any]:
    """A function from the values of a tape to the value of a template, for one model."""
    if isinstance(made, Ref):
        return itemgetter(made.slot)
    if isinstance(made, State):
        assert model is not None
        path, _, key = made.name.rpartition(".")
        # Looked up at each use: FSDP puts another tensor there for the time of a forward.
        owner = model.get_submodule(path)
        return lambda values: getattr(owner, key)
    parts, build = _taken_apart(made)
    if parts is None:
        return lambda values: made
    fills = [filler(part, model) for part in parts]
    return lambda values: build([fill(values) for fill in fills])


def _taken_apart(made: Any) -> tuple[list[Any] | None, Callable[[list], Any]]:
    """The parts of a template and how to put them together; None for a constant."""
    if isinstance(made, Made):
        names = list(made.fields)
        return [*made.fields.values()], lambda got: made.kind(**dict(zip(names, got, strict=True)))
    # Lists and dicts are made anew each time, since a unit may write into them.
    if isinstance(made, list) or (isinstance(made, tuple) and _has_refs(made)):
        return list(made), lambda got: _like(made, got)
    if isinstance(made, dict):
        keys = list(made)
        return [*made.values()], lambda got: _dict_like(made, dict(zip(keys, got, strict=True)))
    if isinstance(made, slice):
        return [made.start, made.stop, made.step], lambda got: slice(*got)
    return None, lambda got: made


def _has_refs(made: tuple) -> bool:
    return any(isinstance(item, (Ref, State)) or _taken_apart(item)[0] is not None for item in made)


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _like(value: Any, items: list[Any]) -> Any:
    if hasattr(value, "_fields"):  # a named tuple
        return type(value)(*items)
    kind = type(value)
    # What torch.max and its like return is made of a tuple, but holds nothing but tensors.
    return kind(items) if kind in (list, tuple, torch.Size) else kind(tuple(items))


def _dict_like(value: Any, items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    made = value.copy()  # an OrderedDict, or a defaultdict with its factory
    made.update(items)
    return made

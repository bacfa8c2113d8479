"""Calls: the expression that a reader would have written for a function and its arguments."""

from __future__ import annotations

import enum
import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from workbench.engine.export.imports import Import
from workbench.engine.nest import Made, Ref, State
from workbench.errors import LayoutError

OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "true_divide": "/", "matmul": "@",
    "__add__": "+", "__sub__": "-", "__mul__": "*", "__truediv__": "/", "__matmul__": "@",
    "pow": "**", "__pow__": "**", "remainder": "%", "__floordiv__": "//", "__mod__": "%",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "__eq__": "==", "__ne__": "!=", "__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">=",
    "__and__": "&", "__or__": "|", "__xor__": "^",
}  # fmt: skip
REVERSED = {
    "__radd__": "+", "__rsub__": "-", "__rmul__": "*", "__rdiv__": "/", "__rtruediv__": "/",
    "__rpow__": "**", "__rmatmul__": "@", "__rfloordiv__": "//", "__rmod__": "%",
}  # fmt: skip
# How tightly operators bind; those not here are put in brackets wherever they are a part.
BINDS = {"+": 1, "-": 1, "*": 2, "/": 2, "@": 2}
SIGNS = {"neg": "-", "__neg__": "-", "__invert__": "~"}
FUNCTIONAL = "torch.nn.functional."
SMALL = 64


@dataclass(frozen=True)
class Code:
    """An expression; sign: of the operator outermost in it, "" for none."""

    text: str
    sign: str = ""

    @property
    def closed(self) -> str:
        """The text as what a method is called of."""
        return f"({self.text})" if self.sign else self.text

    def beside(self, sign: str, *, right: bool) -> str:
        """The text as one side of another operator."""
        own, other = BINDS.get(self.sign, 0), BINDS.get(sign, 0)
        is_tight = own > other if right or not other else own >= other
        return self.text if is_tight and own else self.closed


@dataclass
class Writer:
    """Values and calls to code. tensor: what stands for a Ref or State. names: what the recipe's
    text binds, by which its own classes are called. functional: what torch.nn.functional is called.

    known: values by names of the recipe's text. constant: what stands for a tensor that is neither
    parameter nor buffer, None for nothing. imports: what the code needs.
    """

    tensor: Callable[[Ref | State], Code]
    constant: Callable[[Tensor], str | None]
    names: frozenset[str]
    device_type: str
    functional: str = "functional"
    known: Mapping[str, Any] = field(default_factory=dict)
    imports: set[Import] = field(default_factory=set)

    def value(self, value: Any) -> Code:
        """The code of a template. Raises LayoutError for an object without a source form."""
        if isinstance(value, (Ref, State)):
            return self.tensor(value)
        if isinstance(value, (tuple, list, dict, slice, Made)):
            return Code(self._nested(value))
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number or value is None or isinstance(value, (bool, complex)):
            return _constant(value)
        return Code(self._single(value))

    def _nested(self, value: Any) -> str:
        if isinstance(value, Made):
            defaults = {part.name: part.default for part in fields(value.kind)}
            given = {k: v for k, v in value.fields.items() if v is not None or defaults[k] is not v}
            inside = ", ".join(f"{key}={self.value(v).text}" for key, v in given.items())
            return f"{self._named(value.kind)}({inside})"
        if isinstance(value, dict):
            inside = ", ".join(f"{quoted(k)}: {self.value(v).text}" for k, v in value.items())
            return f"{{{inside}}}"
        if isinstance(value, slice):
            ends = (value.start, value.stop, value.step)
            return f"slice({', '.join(self.value(end).text for end in ends)})"
        parts = [self.value(item).text for item in value]
        if isinstance(value, list):
            return f"[{', '.join(parts)}]"
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"

    def _single(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, enum.Enum):
            return f"{self._named(type(value))}.{value.name}"
        if isinstance(value, type) or inspect.isfunction(value):
            return self._named(value)
        if isinstance(value, torch.device):
            is_here = value.type == self.device_type
            return "DEVICE" if is_here else f'torch.device("{value}")'
        for kinds, form in FORMS:
            if isinstance(value, kinds):
                return form(value)
        raise LayoutError(_no_form(f"a {type(value).__name__}"))

    def _tensor(self, value: Tensor) -> str:
        found = next((name for name, other in self.known.items() if other is value), None)
        found = found or self.constant(value)
        if found is None and value.numel() <= SMALL and type(value) is Tensor:
            listed = self.value(value.tolist()).text
            return f"torch.tensor({listed}, dtype={value.dtype}, device=DEVICE)"
        if found is None:
            raise LayoutError(_no_form(f"a tensor {list(value.shape)} that is no buffer"))
        return found

    def _named(self, value: Any) -> str:
        """A class or function by its name: the recipe's own, or imported."""
        module, name = value.__module__, value.__qualname__
        if name.partition(".")[0] in self.names and module in ("__main__", "builtins"):
            return name
        if f"{module}".startswith("workbench.recipes.") and name in self.names:
            return name
        if getattr(sys.modules.get(module), name, None) is value and module != "__main__":
            self.imports.add(Import(module, name))
            return name
        if name in self.names:
            return name
        raise LayoutError(_no_form(name))

    def call(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Code:
        """The code of a call. Raises LayoutError for a function without a public name."""
        name = public_name(function)
        kwargs = _without_defaults(function, args, kwargs)
        if name.startswith("torch.Tensor."):
            return self._method(name.removeprefix("torch.Tensor."), args, kwargs)
        if not name and (kind := getattr(function, "__self__", None)) is not None:
            if not isinstance(kind, type):
                raise LayoutError(_no_form(repr(function)))
            name = f"{self._named(kind)}.{getattr(function, '__name__', 'apply')}"
        elif not name:
            name = self._named(function)
        if name.startswith(FUNCTIONAL):
            name = f"{self.functional}.{name.removeprefix(FUNCTIONAL)}"
        return Code(f"{name}({self.arguments(args, kwargs)})")

    def arguments(self, args: tuple, kwargs: dict[str, Any]) -> str:
        """What stands between the brackets of a call."""
        parts = [self.value(value).text for value in args]
        return ", ".join([*parts, *(f"{k}={self.value(v).text}" for k, v in kwargs.items())])

    def _method(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Code:
        first = self.value(args[0])
        if name.endswith(".__get__"):
            return Code(f"{first.closed}.{name.removesuffix('.__get__')}")
        if name in ("__getitem__", "__setitem__"):
            item = f"{first.closed}[{self._index(args[1])}]"
            return Code(item if len(args) == 2 else f"{item} = {self.value(args[2]).text}")
        if not kwargs and len(args) == 1 and name in SIGNS:
            return Code(f"{SIGNS[name]}{first.closed}", SIGNS[name] * 2)
        sign = {**OPERATORS, **REVERSED}.get(name)
        if not kwargs and len(args) == 2 and sign:
            left, right = (first, self.value(args[1]))[:: 1 if name in OPERATORS else -1]
            sides = left.beside(sign, right=False), right.beside(sign, right=True)
            return Code(f" {sign} ".join(sides), sign)
        return Code(f"{first.closed}.{name}({self.arguments(args[1:], kwargs)})")

    def _index(self, index: Any) -> str:
        parts = index if type(index) is tuple and index else (index,)
        found = []
        for part in parts:
            if not isinstance(part, slice):
                found.append(self.value(part).text)
                continue
            ends = ["" if e is None else self.value(e).text for e in (part.start, part.stop)]
            step = "" if part.step is None else f":{self.value(part.step).text}"
            found.append(f"{ends[0]}:{ends[1]}{step}")
        return ", ".join(found) + ("," if type(index) is tuple and len(index) == 1 else "")


def _constant(value: Any) -> Code:
    if isinstance(value, float) and not math.isfinite(value):
        return Code(f'float("{value}")')
    return Code(repr(value), "--" if repr(value).startswith("-") else "")


def quoted(value: Any) -> str:
    """repr, with the quotes that formatters prefer."""
    text = repr(value)
    is_plain = isinstance(value, str) and '"' not in text and "\\" not in text
    return f'"{text[1:-1]}"' if is_plain else text


FORMS: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    (str, quoted),
    (bytes, repr),
    (range, repr),
    (type(Ellipsis), lambda _: "..."),
    ((torch.dtype, torch.layout, torch.memory_format), str),
)


@functools.cache
def public_name(function: Callable[..., Any]) -> str:
    """torch's public name of one of its functions, "" for others."""
    name = resolve_name(function) or ""
    short = name.rpartition(".")[2]
    if name.startswith("torch.functional.") and getattr(torch, short, None) is function:
        return f"torch.{short}"
    if name and "._" not in name.replace(".__", "."):
        return name
    places = {"torch": torch, FUNCTIONAL[:-1]: torch.nn.functional, "torch.linalg": torch.linalg}
    for place, module in places.items():
        found = [key for key, value in vars(module).items() if value is function and key[0] != "_"]
        if found:
            return f"{place}.{found[0]}"
    return ""


def _without_defaults(
    function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Without what is the default, and what torch passes for its own use."""
    try:
        params = inspect.signature(function).parameters
    except (TypeError, ValueError):
        params = {}
    kept = {}
    for key, value in kwargs.items():
        default = params[key].default if key in params else inspect.Parameter.empty
        is_default = type(value) is type(default) and (
            value is default or (isinstance(value, (bool, int, float, str)) and value == default)
        )
        if not is_default and not key.startswith("_"):
            kept[key] = value
    return kept


def _no_form(what: str) -> str:
    return (
        f"The forward uses {what} between the parts of the model, which cannot be written as code. "
        "Export it under data or tensor parallelism."
    )

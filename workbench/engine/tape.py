"""Tape: what a model's forward does, as a list of calls, found by running it once without values.

Units (see units.py) are recorded as one call each, and so is every torch function called outside
of them. Replaying the calls against a copy of the model does what its forward did, hooks of the
units included, so that a tape can be cut anywhere. Sizes and branches are those of the inputs it
was recorded with: other shapes need a tape of their own.

Source: Reed et al. 2022, "torch.fx", https://arxiv.org/abs/2112.08429, which traces without shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

INPUT = -1


@dataclass(frozen=True)
class Value:
    """What is known of a value.

    storage tells which values share memory. turns: from which nodes on it takes gradients or does
    not, which writing in place can change.
    """

    shape: torch.Size
    dtype: torch.dtype
    storage: int
    turns: list[tuple[int, bool]]

    def meta(self, index: int) -> Tensor:
        """A tensor without memory of this shape, dtype and requires_grad as before a node."""
        takes = [requires_grad for since, requires_grad in self.turns if since < index]
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=takes[-1])


@dataclass(frozen=True)
class Node:
    """One call: of `function`, or of the unit named when that is None.

    outs: where the tensors of the result go, in their order. mutates: storages written in place.
    state: parameters and buffers it uses, all of a unit's. grad, autocast: where they differ from
    what they were around the forward. dropped: dropout modules it calls, one name a call.
    """

    function: Callable[..., Any] | None
    unit: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int, ...]
    reads: frozenset[int]
    state: frozenset[str]
    mutates: frozenset[int]
    cost: float
    random: bool
    grad: bool | None
    autocast: tuple[str, bool, torch.dtype] | None
    dropped: tuple[str, ...]


@dataclass
class Tape:
    """nodes in order. inputs: slots of the tensors in the inputs; output: a template, with the
    slots and the state it has.

    changed: state that the forward writes. writes: buffers assigned anew, with the slot assigned.
    storages: of parameters and buffers, by name. attributes: plain ones of modules that the forward
    changed, and "" when it drew from Python's or NumPy's generator.
    """

    nodes: list[Node] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    signature: tuple[Any, ...] = ()
    output: Any = None
    returns: frozenset[int] = frozenset()
    returns_state: frozenset[str] = frozenset()
    changed: set[str] = field(default_factory=set)
    writes: dict[str, int] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)
    params: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    device_type: str = "cpu"
    attributes: list[str] = field(default_factory=list)

"""Halves: a backward pass in two halves that loses no gradient; a script takes this file's code.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", https://arxiv.org/abs/2401.10241
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage


class HalvesStage(PipelineStage):
    """torch's stage, which goes backward at once where two halves would be wrong.

    Schedules without a bubble ask for the gradients of a stage's inputs first and for those of its
    weights later. torch then finds the weights on the way to an input and no others, and fails
    where an output is a view.
    """

    def clear_runtime_states(self) -> None:
        """A step begins."""
        super().clear_runtime_states()
        self.done: set[int] = set()

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **how: Any) -> Any:
        """torch's, of the inputs alone or of everything."""
        if not how.get("full_backward", True) and not self.is_first:
            outputs, inputs = self.fwd_cache[bwd_chunk_id]
            if not can_be_split((how["loss"],) if self.is_last else outputs, inputs):
                how["full_backward"] = True
                self.done.add(bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **how)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **how: Any) -> Any:
        """torch's, unless the weights have theirs."""
        if bwd_chunk_id not in self.done:
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **how)


def can_be_split(outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether every output leads back to an input, and none is a view or an input."""
    trained = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    ends = {torch.autograd.graph.get_gradient_edge(x).node for x in trained}
    roots = [x.grad_fn for x in outputs if x.requires_grad]
    if any(x._is_view() for x in outputs) or any(root is None for root in roots):
        return False
    return all(leads_to(root, ends) for root in roots)


def leads_to(root: Any, ends: set[Any]) -> bool:
    """Whether the graph of gradients goes from the root to one of the ends."""
    seen, left = {root}, [root]
    while left:
        node = left.pop()
        if node in ends:
            return True
        new = [one for one, _ in node.next_functions if one is not None and one not in seen]
        left += new
        seen.update(new)
    return False

"""Held: what one rank holds of a model under a layout, by the names of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from workbench.engine.shards import Box, local_part


@dataclass(frozen=True)
class TensorCut:
    """Tensor parallelism keeps part `index` of `of` equal parts along `dim` of a parameter."""

    dim: int
    index: int
    of: int


@dataclass
class Held:
    """parts: copies of the user's module, one a pipeline stage of this rank, each with the
    parameters of its stage alone. cuts: which parameters are cut by tensor parallelism.
    """

    parts: list[nn.Module]
    cuts: Mapping[str, TensorCut] = field(default_factory=dict)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each name once; of parameters tied to one tensor the first name."""
        seen = set()
        for part in self.parts:
            for name, param in part.named_parameters():
                if name not in seen:
                    seen.add(name)
                    yield name, param

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that belong to the state, each name once."""
        seen = set()
        for part in self.parts:
            kept = part.state_dict(keep_vars=True).keys()
            for name, buffer in part.named_buffers():
                if name in kept and name not in seen:
                    seen.add(name)
                    yield name, buffer

    def num_elements(self) -> int:
        """Elements of parameters in this rank's memory."""
        return sum(self.local(name, param)[0].numel() for name, param in self.named_parameters())

    def shape_of(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """Shape of the whole tensor, of which `tensor` is what this rank holds."""
        shape = list(tensor.shape)
        cut = self.cuts.get(name)
        if cut is not None:
            shape[cut.dim] *= cut.of
        return tuple(shape)

    def local(self, name: str, tensor: Tensor) -> tuple[Tensor, Box]:
        """The memory of a parameter, or of state of its shape, and its box in the whole."""
        local, box = local_part(tensor)
        cut = self.cuts.get(name)
        if cut is None:
            return local, box
        offset = list(box.offset)
        offset[cut.dim] += cut.index * tensor.shape[cut.dim]
        return local, Box(tuple(offset), box.shape)

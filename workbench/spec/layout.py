"""Layout: how many ranks each mesh axis has, and the only place that knows the axis order."""

from __future__ import annotations

from dataclasses import dataclass, fields

from workbench.errors import LayoutError


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh axes, outermost first; their product is the world size.

    dp_replicate: ranks that hold the whole model and average gradients (DDP).
    dp_shard: ranks that hold one shard each of parameters, gradients and optimizer state (FSDP2).
    """

    dp_replicate: int = 1
    dp_shard: int = 1

    def __post_init__(self) -> None:
        for name, degree in self.degrees().items():
            if not isinstance(degree, int) or degree < 1:
                raise LayoutError(f"{name}={degree!r} is not a degree. Use a whole number >= 1.")

    def degrees(self) -> dict[str, int]:
        """Axis name to degree, outermost axis first."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def world_size(self) -> int:
        """Number of ranks the layout needs."""
        size = 1
        for degree in self.degrees().values():
            size *= degree
        return size

    @property
    def dp(self) -> int:
        """Number of shares the global batch is cut into."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        """Short text such as `dp4` or `fsdp4`; what `strategy.parse_layout` reads."""
        if self.dp_shard > 1 and self.dp_replicate > 1:
            return f"dp{self.dp_replicate} fsdp{self.dp_shard}"
        return f"fsdp{self.dp_shard}" if self.dp_shard > 1 else f"dp{self.dp_replicate}"

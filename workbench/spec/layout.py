"""Layout: how many ranks each mesh axis has, and the only place that knows the axis order."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import asdict, dataclass
from typing import Any

from workbench.errors import LayoutError
from workbench.spec.near import unknown
from workbench.spec.schedules import SCHEDULES, Schedule

# Outermost first. The mesh, the text form and the composition all follow this order.
AXES = ("pp", "dp_replicate", "dp_shard", "tp")
SHORT = {"pp": "pp", "dp_replicate": "dp", "dp_shard": "fsdp", "tp": "tp"}
PART = re.compile(r"([a-z]+)([0-9]+)")


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh axes, outermost first; their product is the world size.

    pp: pipeline ranks, each with consecutive layers. dp_replicate: ranks that hold the same and
    average gradients (DDP). dp_shard: ranks that hold one shard each of parameters, gradients and
    optimizer state (FSDP2). tp: ranks that share each large matrix.
    schedule, microbatches: of the pipeline; microbatches are those of one data-parallel share.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    schedule: str = "gpipe"
    microbatches: int = 1

    def __post_init__(self) -> None:
        for name, degree in (*self.degrees().items(), ("microbatches", self.microbatches)):
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise LayoutError(f"{name}={degree!r} is not a degree. Use a whole number >= 1.")
        if self.schedule not in SCHEDULES:
            raise LayoutError(unknown("schedule", str(self.schedule), SCHEDULES))
        if self.pp == 1 and (self.schedule, self.microbatches) != ("gpipe", 1):
            raise LayoutError(
                f"{self.schedule} x{self.microbatches} belongs to a pipeline, and pp=1 is none. "
                "Leave schedule and microbatches out, or use pp >= 2."
            )

    def degrees(self) -> dict[str, int]:
        """Axis name to degree, outermost axis first."""
        return {name: getattr(self, name) for name in AXES}

    def used(self) -> dict[str, int]:
        """The axes with more than one rank."""
        return {name: degree for name, degree in self.degrees().items() if degree > 1}

    @property
    def world_size(self) -> int:
        """Number of ranks the layout needs."""
        return math.prod(self.degrees().values())

    @property
    def dp(self) -> int:
        """Number of shares the global batch is cut into."""
        return self.dp_replicate * self.dp_shard

    @property
    def order(self) -> Schedule:
        """The schedule by its name."""
        return SCHEDULES[self.schedule]

    @property
    def num_stages(self) -> int:
        """Parts the model is cut into along its layers."""
        return self.pp * self.order.stages_per_rank

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank lies on each axis; the last axis runs fastest."""
        found = {}
        for name, degree in reversed(self.degrees().items()):
            rank, found[name] = divmod(rank, degree)
        return {name: found[name] for name in AXES}

    def share(self, rank: int) -> int:
        """Which share of the global batch a rank takes."""
        where = self.coordinate(rank)
        return where["dp_replicate"] * self.dp_shard + where["dp_shard"]

    def stages(self, rank: int) -> list[int]:
        """The stages that a rank holds."""
        return self.order.stages_of(self.coordinate(rank)["pp"], self.pp)

    def rank_of_stage(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return next(r for r in range(self.pp) if stage in self.order.stages_of(r, self.pp))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the wire and the manifest."""
        return asdict(self)

    def __str__(self) -> str:
        """Short text such as `dp4`, `fsdp2 tp2` or `pp2 dp2, 1f1b x8`; parse_layout reads it."""
        degrees = " ".join(f"{SHORT[name]}{degree}" for name, degree in self.used().items())
        text = degrees or "dp1"
        return f"{text}, {self.schedule} x{self.microbatches}" if self.pp > 1 else text


def parse_layout(text: str) -> Layout:
    """The Layout that a short text such as `pp2 dp2 tp2, 1f1b x8` means.

    Raises LayoutError for text that means none.
    """
    axes, _, order = text.partition(",")
    long = {short: name for name, short in SHORT.items()}
    how: dict[str, Any] = {}
    for word in axes.split():
        part = PART.fullmatch(word)
        if not part or part[1] not in long or long[part[1]] in how:
            raise LayoutError(
                f"{word!r} in {text!r} is no degree. Use {', '.join(SHORT.values())} with a "
                "number, each once, such as pp2 dp2."
            )
        how[long[part[1]]] = int(part[2])
    for word in order.split():
        if re.fullmatch(r"x[0-9]+", word):
            how["microbatches"] = int(word[1:])
        else:
            how["schedule"] = word
    if not how:
        raise LayoutError(f"{text!r} is no layout. Write one such as dp4 or pp2 dp2, 1f1b x8.")
    return Layout(**how)


@functools.lru_cache(maxsize=4096)
def axis_of(layout: Layout, ranks: tuple[int, ...]) -> str:
    """The mesh axis along which these ranks lie: `tp`, or `dp` over both data axes, or `all`."""
    if max(ranks) >= layout.world_size:
        return "all"
    places = [layout.coordinate(rank) for rank in ranks]
    moved = [name for name in layout.used() if len({place[name] for place in places}) > 1]
    if len(moved) == 1:
        return moved[0]
    return "dp" if moved == ["dp_replicate", "dp_shard"] and layout.pp * layout.tp > 1 else "all"

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
from workbench.spec.typed import typed

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
        for name, degree in self.degrees().items():
            check_count(SHORT[name], degree)
        check_count("microbatches", self.microbatches)
        if self.schedule not in SCHEDULES:
            raise LayoutError(unknown("schedule", str(self.schedule), SCHEDULES))
        if self.pp == 1 and (self.schedule, self.microbatches) != ("gpipe", 1):
            alone = str(self)
            raise LayoutError(
                f"{self.schedule} x{self.microbatches} belongs to a pipeline, and {alone} is none. "
                f'Use the layout "{alone}".'
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


def check_count(name: str, value: object) -> None:
    """Raises LayoutError for a degree, or a number of microbatches, that is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        what = "number of microbatches" if name == "microbatches" else "degree"
        raise LayoutError(f"{name}={value!r} is not a {what}. Use a whole number >= 1.")


def parse_layout(text: str) -> Layout:
    """The Layout that a short text such as `pp2 dp2 tp2, 1f1b x8` means.

    Raises LayoutError for text that means none.
    """
    axes, _, order = text.partition(",")
    how: dict[str, Any] = {}
    for word in axes.split():
        name, degree = _degree(word) or ("", 0)
        if not name or name in how:
            raise LayoutError(_no_degree(word, text))
        how[name] = degree
    words = order.split()
    for place, word in enumerate(words):
        number = re.fullmatch(r"[a-z]?([0-9]+)", word)
        if word.startswith("x") and number:
            how["microbatches"] = int(number[1])
        elif number and word not in SCHEDULES:
            right = f"{axes}, {' '.join((*words[:place], f'x{number[1]}', *words[place + 1 :]))}"
            parse_layout(right)
            raise LayoutError(f'{word!r} in {text!r} is no number of microbatches. Use "{right}".')
        else:
            how["schedule"] = word
    if not how:
        raise LayoutError(f'{text!r} is no layout. Write one such as "dp4" or "pp2 dp2, 1f1b x8".')
    return Layout(**how)


def _degree(word: str) -> tuple[str, int] | None:
    """Axis and degree that a word such as `fsdp2` names."""
    part = PART.fullmatch(word)
    names = [name for name, short in SHORT.items() if part and short == part[1]]
    return (names[0], int(part[2])) if part and names else None


def _no_degree(word: str, text: str) -> str:
    """What was meant by a word that is no degree; raises LayoutError where that is none either."""
    words = text.replace(",", " ").split()
    degrees = [each for each in words if _degree(each)]
    order = [each for each in words if each in SCHEDULES or re.fullmatch(r"x[0-9]+", each)]
    said = f"{word!r} in {text!r} is no degree"
    if word in order and degrees and sorted(words) == sorted(degrees + order):
        right = f"{' '.join(degrees)}, {' '.join(order)}"
        parse_layout(right)
        return f'{said}: it goes behind a comma. Use "{right}".'
    if word in order and words == order:
        given = {
            "schedule" if each in SCHEDULES else "microbatches": _value(each) for each in order
        }
        return f"{said}, and a layout begins with one. Use {typed('pipeline', given)}."
    known = ", ".join(SHORT.values())
    return f'{said}. Use {known} with a number, each once, such as "pp2 dp2".'


def _value(word: str) -> str | int:
    return word if word in SCHEDULES else int(word[1:])


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

"""What a user may set for one training, checked before anything is sent to a rank."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass

from workbench.errors import InputError
from workbench.spec import policies

PRECISIONS = ("fp32", "bf16")
UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}
TIME = re.compile(rf"([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?) *({'|'.join(UNITS_S)})")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of one training; None means: as the recipe says.

    batch: samples in the global batch. seed: of parameters and data order. accumulate:
    microbatches whose gradients are summed before one optimizer step. clip: largest global
    gradient norm. precision: fp32, or bf16 autocast. size: passed to recipes that have sizes.
    save_every: steps between automatic saves, or a time such as "30s" or "5min", 0 for none. keep:
    of these the last so many stay, 0 for all; keep_every: and those of every so-manieth step, 0 for
    none. recompute: activation checkpointing, each block's activations computed again in the
    backward pass instead of kept. on_nan: what happens about a loss or gradient that is not finite,
    see policies.ON_NAN. replicate_state: steps between two copies of what a rank alone holds to the
    memory of another, 0 for none.
    """

    steps: int = 100
    batch: int | None = None
    seed: int | None = None
    accumulate: int = 1
    clip: float | None = None
    precision: str = "fp32"
    size: str | None = None
    save_every: int | str = 0
    keep: int = 0
    keep_every: int = 0
    recompute: bool = False
    on_nan: str = "stop"
    replicate_state: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 0),
            ("batch", 1),
            ("seed", 0),
            ("accumulate", 1),
            ("keep", 0),
            ("keep_every", 0),
            ("replicate_state", 0),
        ):
            value = getattr(self, name)
            if value is None and name in ("batch", "seed"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name}={value!r}: use a whole number >= {least}.")
        self._check_save_every()
        if self.seed is not None and self.seed >= 2**63:
            raise InputError(f"seed={self.seed}: use a whole number below 2**63.")
        is_number = isinstance(self.clip, (int, float)) and not isinstance(self.clip, bool)
        if self.clip is not None and not (is_number and self.clip > 0 and math.isfinite(self.clip)):
            raise InputError(f"clip={self.clip!r}: use a gradient norm > 0, e.g. 1.0.")
        if self.keep_every and not self.keep:
            raise InputError(
                f"keep_every={self.keep_every} says what stays besides the last ones: give keep, "
                "such as keep=3, too."
            )
        if not isinstance(self.recompute, bool):
            raise InputError(f"recompute={self.recompute!r}: use True or False.")
        if not isinstance(self.size, (str, type(None))):
            raise InputError(f"size={self.size!r}: use text, such as the 'small' of pytext.")
        policies.check("on_nan", self.on_nan, policies.ON_NAN)
        if self.precision not in PRECISIONS:
            raise InputError(f"precision={self.precision!r}: use one of {', '.join(PRECISIONS)}.")

    def _check_save_every(self) -> None:
        value = self.save_every
        if isinstance(value, str):
            is_good = _seconds(value) is not None
        else:
            is_good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not is_good:
            raise InputError(
                f"save_every={value!r}: use a number of steps such as 100, or a time such as 30s "
                "or 5min."
            )

    @property
    def save_every_steps(self) -> int:
        """Steps between automatic saves, 0 for none by steps."""
        return self.save_every if isinstance(self.save_every, int) else 0

    @property
    def save_every_s(self) -> float | None:
        """Seconds between automatic saves, None for none by the clock."""
        return _seconds(self.save_every) if isinstance(self.save_every, str) else None

    def to_dict(self) -> dict:
        """Plain values, for the wire and the manifest."""
        return asdict(self)


def _seconds(text: str) -> float | None:
    """`30s`, `0.5 min` -> seconds; None for what is no time above 0."""
    found = TIME.fullmatch(text.strip())
    value = float(found[1]) * UNITS_S[found[2]] if found else 0.0
    return value or None

"""Pipeline schedules: the order in which a stage takes the microbatches.

The name is what the user types; the schedules themselves are torch's. With S stages and M
microbatches GPipe and 1F1B idle (S-1)/(M+S-1) of a step; 1F1B keeps at most S microbatches'
activations where GPipe keeps M.

Source: Huang et al. 2019, https://arxiv.org/abs/1811.06965; Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473; Qi et al. 2024, https://arxiv.org/abs/2401.10241
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """torch_name: of torch's class. stages_per_rank: consecutive parts of the model a rank holds.

    is_v: the second stage of a rank lies as far from the end as the first from the beginning, so
    the first rank holds the last stage too. least: the fewest microbatches a pipeline of n ranks
    needs. in_rounds: the microbatches come in as many rounds as n fits in, all of one length: four
    ranks take 4 to 8, 10, 12, 15, ... splits: gradients of weights are computed apart from those of
    inputs, to fill the bubble with them.
    """

    torch_name: str
    stages_per_rank: int = 1
    is_v: bool = False
    least: str = "1"
    in_rounds: bool = False
    splits: bool = False

    def least_microbatches(self, ranks: int) -> int:
        """The fewest microbatches that this schedule can run on so many pipeline ranks."""
        return {"1": 1, "n": ranks, "2n": 2 * ranks}[self.least]

    def why_not(self, ranks: int, microbatches: int) -> str:
        """Why this schedule cannot run so many microbatches; "" when it can."""
        least = self.least_microbatches(ranks)
        if microbatches < least:
            return f"needs at least {least} microbatches on {ranks} pipeline ranks"
        if self.in_rounds and microbatches % (microbatches // ranks):
            rounds = microbatches // ranks
            return f"needs {rounds} rounds of equal length on {ranks} pipeline ranks"
        return ""

    def bubble(self, ranks: int, microbatches: int) -> float | None:
        """The share of forward and backward in which a rank waits, if all stages take as long.

        None for schedules that fill it with gradients of weights: what is left depends on what
        those cost. Source: Narayanan et al. 2021, section 2.2.
        """
        if self.splits:
            return None
        rounds = self.stages_per_rank * microbatches
        return (ranks - 1) / (rounds + ranks - 1)

    def stages_of(self, rank: int, ranks: int) -> list[int]:
        """The stages that a pipeline rank holds, in the order of the model."""
        first = list(range(rank, ranks * self.stages_per_rank, ranks))
        if self.is_v:
            return [rank, 2 * ranks - 1 - rank]
        return first


SCHEDULES = {
    "gpipe": Schedule("GPipe"),
    "1f1b": Schedule("1F1B", least="n"),
    "interleaved": Schedule("Interleaved1F1B", 2, in_rounds=True, least="n"),
    "looped-bfs": Schedule("LoopedBFS", 2),
    "zero-bubble": Schedule("InterleavedZeroBubble", 2, in_rounds=True, least="n", splits=True),
    "zbv": Schedule("ZBVZeroBubble", 2, is_v=True, least="n", splits=True),
    "dualpipev": Schedule("DualPipeV", 2, is_v=True, least="2n", splits=True),
}

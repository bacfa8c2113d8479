"""The books balance, under every layout: what was slept is found where it was slept."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.contract.batteries import Ranks, on_ranks
from workbench.driver.sample import bubble, joined
from workbench.engine import recipe as recipes
from workbench.spec.layout import Layout, parse_layout
from workbench.spec.options import TrainOptions
from workbench.spec.records import COLUMNS, MARKER, PARTS

BLOCKS, BATCH, STEPS, SINGLE = 8, 16, 4, 10
# Long against what a thread has to wait for a core.
FORWARD_S, BACKWARD_S, OPTIMIZER_S, DATA_S = 0.004, 0.006, 0.02, 0.01
LATE_S = 0.03
LAYOUTS = (
    "dp1", "dp2", "dp4", "fsdp2", "fsdp4", "tp2", "tp4", "pp2", "pp4", "pp2, gpipe x4",
    "pp4, gpipe x4", "pp4, 1f1b x8", "pp2, interleaved x4", "pp2, looped-bfs x4",
    "pp2, zero-bubble x4",
    "pp2, zbv x4", "pp2, dualpipev x4", "dp2 fsdp2", "dp2 tp2", "fsdp2 tp2", "pp2 tp2, 1f1b x4",
    "pp2 dp2, 1f1b x4", "pp2 fsdp2, gpipe x4",
)  # fmt: skip


class Sleep(torch.autograd.Function):
    """The identity, at a price for each sample."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> Tensor:
        """x [n, ...] -> the same."""
        ctx.times = times
        time.sleep(FORWARD_S * x.shape[0] / BATCH * times)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """As the forward."""
        time.sleep(BACKWARD_S * grads[0].shape[0] / BATCH * ctx.times)
        return grads[0], None


class Block(nn.Module):
    """Two layers that tensor parallelism can cut, and a nap."""

    def __init__(self, naps: int = 1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.naps = naps

    def forward(self, x: Tensor) -> Tensor:
        """x [n, 8] -> the same shape."""
        return Sleep.apply(x + self.down(torch.tanh(self.up(x))), self.naps)  # pyright: ignore


class Slow(torch.optim.SGD):
    """SGD that takes its time."""

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """torch's, later."""
        time.sleep(OPTIMIZER_S)
        super().step(closure)


def recipe(slower: int = 1) -> recipes.Recipe:
    """Blocks that sleep; a rank of tensor parallelism sleeps as long as the whole would."""

    def batch_of(samples: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(DATA_S * len(samples) / BATCH)
        x = samples[:, None].float().expand(-1, 8) / 100
        return x, x.flip(1)

    return recipes.from_namespace(
        {
            "model": lambda: nn.Sequential(*(Block(slower) for _ in range(BLOCKS))),
            "batch_of": batch_of,
            "loss": nn.functional.mse_loss,
            "optimizer": lambda params: Slow(params, lr=0.01),
            "batch": BATCH,
        }
    )


def _measured(rank: int, store: str, size: int, texts: list[str]) -> dict[str, Any]:
    """By layout what the rank told of its steps."""
    torch.set_num_threads(1)
    ranks = Ranks(rank, size, store, recipe(), TrainOptions())
    found = {}
    for text in texts:
        trainer = ranks.fresh(parse_layout(text))
        trainer.run_steps(2, {name: [] for name in COLUMNS}, follows=False)
        found[text] = min((_watched(trainer) for _ in range(2)), key=lambda one: one["outside_s"])
        dist.barrier()
    ranks.close()
    return found


def _watched(trainer: Any) -> dict[str, Any]:
    """Some steps, and the most time that a rank spent outside of them: mostly chance."""
    columns: dict[str, list] = {name: [] for name in COLUMNS}
    dist.barrier()
    began_s = time.perf_counter()
    sample = trainer.run_steps(STEPS, columns, follows=False)
    took_s = time.perf_counter() - began_s
    outside_s = torch.tensor([took_s - sum(columns["wall_s"])])
    dist.all_reduce(outside_s, dist.ReduceOp.MAX)  # the ranks choose the same
    found = {"columns": columns, "took_s": took_s, "sample": sample}
    return {**found, "outside_s": outside_s.item()}


@functools.cache
def measured(size: int) -> dict[str, list[dict[str, Any]]]:
    """By layout of so many ranks, what each rank told."""
    texts = [text for text in LAYOUTS if parse_layout(text).world_size == size]
    told = on_ranks(size, _measured, size, texts)
    return {text: [one[text] for one in told] for text in told[0]}


def sample_of(text: str) -> dict[str, Any]:
    """The last step under a layout, joined."""
    layout = parse_layout(text)
    told = measured(layout.world_size)[text]
    return joined([one["sample"] for one in told], layout)


def _held(layout: Layout, rank: int) -> float:
    """The share of the naps of a step that a rank takes."""
    share = len(layout.stages(rank)) / layout.num_stages if layout.pp > 1 else 1.0
    return share / layout.dp


@pytest.mark.parametrize("text", LAYOUTS)
def test_what_was_slept_is_booked_where_it_was_slept(text):
    layout = parse_layout(text)
    sample = sample_of(text)
    for rank, one in enumerate(measured(layout.world_size)[text]):
        of = {name: sum(values) / STEPS for name, values in one["columns"].items()}
        held = _held(layout, rank)
        slept = {
            "forward_s": BLOCKS * FORWARD_S * held,
            "backward_s": BLOCKS * BACKWARD_S * held,
            "optimizer_s": OPTIMIZER_S,
            "data_s": DATA_S / layout.dp,
        }
        # The clock of the rank against the one around all its steps, and what is told of them.
        assert of["wall_s"] == pytest.approx(one["took_s"] / STEPS, rel=0.02, abs=0.005)
        assert sum(of[name] for name in PARTS) <= of["wall_s"] * (1 + 1e-9)
        for name, least_s in slept.items():
            assert of[name] >= 0.99 * least_s, (rank, name)
        spans = sample["ranks"][rank]["spans"]
        drawn_ms = sum(end - begin for _, begin, end, *_ in spans)
        assert drawn_ms == pytest.approx(1e3 * one["columns"]["wall_s"][-1], rel=0.02)
        assert all(a[2] == pytest.approx(b[1], abs=2e-3) for a, b in itertools.pairwise(spans))


def _samples(
    rank: int, store: str, size: int, text: str, slower: int, late: float
) -> list[dict[str, Any]]:
    """What the rank told of single steps; late: seconds more in the last rank's forward."""
    ranks = Ranks(rank, size, store, recipe(slower), TrainOptions())
    trainer = ranks.fresh(parse_layout(text))
    if rank == size - 1:
        trainer.held.parts[0].register_forward_pre_hook(lambda *_: time.sleep(late))
    columns: dict[str, list] = {name: [] for name in COLUMNS}
    found = [trainer.run_steps(1, columns, follows=False) for _ in range(SINGLE)][1:]
    dist.barrier()
    ranks.close()
    return [one for one in found if one is not None]


def samples_of(text: str, slower: int = 1, late: float = 0.0) -> list[dict[str, Any]]:
    """Single steps under a layout, each joined; what a busy machine does to some, most lack."""
    layout = parse_layout(text)
    size = layout.world_size
    told = on_ranks(size, _samples, size, text, slower, late)
    return [joined(list(step), layout) for step in zip(*told, strict=True)]


def test_a_rank_that_is_late_is_named_with_what_it_cost():
    samples = samples_of("dp4", late=LATE_S)
    named = [one["straggler"] for one in samples if one["straggler"]]
    assert statistics.mode(one["rank"] for one in named) == 3
    told_ms = statistics.median(one["ms"] for one in named if one["rank"] == 3)
    assert told_ms == pytest.approx(1e3 * LATE_S, rel=0.2)
    waited_ms = [statistics.median(_waited_ms(one, rank) for one in samples) for rank in range(4)]
    assert all(one > 500 * LATE_S for one in waited_ms[:3])
    assert waited_ms[3] < 250 * LATE_S
    assert samples[0]["clock_error_ms"] == 0  # one machine, one clock


def _waited_ms(sample: dict[str, Any], rank: int) -> float:
    spans = sample["ranks"][rank]["spans"]
    return sum(end - begin for kind, begin, end, *_ in spans if kind == "idle")


@pytest.mark.parametrize(
    "text", ["pp2, gpipe x4", "pp4, gpipe x4", "pp4, 1f1b x8", "pp2, interleaved x4"]
)
def test_the_bubble_of_equal_stages_is_that_of_the_formula(text):
    layout = parse_layout(text)
    formula = layout.order.bubble(layout.pp, layout.microbatches)
    shares = [bubble(one) for one in samples_of(text, slower=8)]
    assert statistics.median(shares) == pytest.approx(formula, abs=0.05)


def test_bytes_are_those_of_the_formulas():
    model = recipe().model()
    sizes = [param.nbytes for param in model.parameters()]
    activation = BATCH * 8 * 4
    counted = {
        text: {(one["axis"], one["op"]): one for one in sample_of(text)["comms"]}
        for text in ("dp4", "fsdp4", "tp4", "pp4, gpipe x4")
    }
    assert counted["dp4"]["dp_replicate", "all-reduce"]["bytes"] == sum(sizes)
    shards = counted["fsdp4"]
    assert shards["dp_shard", "reduce-scatter"]["bytes"] == sum(sizes)
    assert shards["dp_shard", "all-gather"]["bytes"] in (sum(sizes) / 4, sum(sizes) / 2)
    # One after the rows of each block; going back one for its input, but for that of the model.
    # And one number: whether each part of the gradient is finite.
    assert counted["tp4"]["tp", "all-reduce"]["count"] == 2 * BLOCKS - 1 + 1
    assert counted["tp4"]["tp", "all-reduce"]["bytes"] == (2 * BLOCKS - 1) * activation + 4
    # Three of four ranks send on, three send back.
    messages = counted["pp4, gpipe x4"]
    for kind in ("send", "recv"):
        assert messages["pp", kind]["count"] == 2 * 4 * 3 / 4
        assert messages["pp", kind]["bytes"] == 2 * activation * 3 / 4


WIDE = 1 << 21  # numbers in a message: long against what a thread takes to wake up


class Wide(nn.Module):
    """A small layer whose output is long, so that tensor parallelism has something to sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, WIDE // BATCH)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, 8] -> [n, WIDE // BATCH]."""
        return self.down(torch.tanh(self.up(x)))


class Heavy(nn.Module):
    """Weights of 32 MB that are used between naps, so that their communication can hide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))
        self.head = nn.Linear(1024, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, 8] -> the same shape."""
        x = x.repeat(1, 128)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def _profiled(rank: int, store: str, text: str) -> list[tuple[float, float]]:
    """(ours, torch.profiler's) seconds that the step waited for communication, of several steps."""
    model, width = (Wide, WIDE // BATCH) if text == "tp2" else (Heavy, 8)
    names = {
        "model": model,
        "data": lambda: (torch.rand(64, 8), torch.rand(64, width)),
        "loss": nn.functional.mse_loss,
        "batch": BATCH,
    }
    ranks = Ranks(rank, 2, store, recipes.from_namespace(names), TrainOptions())
    trainer = ranks.fresh(parse_layout(text))
    trainer.run_steps(3, {name: [] for name in COLUMNS}, follows=False)
    found = []
    for _ in range(9):
        columns: dict[str, list] = {name: [] for name in COLUMNS}
        dist.barrier()
        with torch.profiler.profile() as profile:
            trainer.run_steps(1, columns, follows=False)
        found.append((columns["comm_s"][0], _exposed_s(profile.events())))
    dist.barrier()
    ranks.close()
    return found


def _exposed_s(events: Any) -> float:
    """Seconds in which communication went on and the training's own thread did nothing else."""
    spans = [(e.name, e.time_range.start, e.time_range.end, e.thread) for e in events]
    mine = next(thread for name, _, _, thread in spans if name == MARKER)
    own = [span for span in spans if span[3] == mine]
    # What gloo copies in a call of its own is part of the call.
    calls = [(begin, end) for name, begin, end, _ in own if name.startswith("c10d::")]
    wire = [(begin, end) for name, begin, end, _ in spans if name.startswith("gloo:")]
    work = [
        (begin, end)
        for name, begin, end, _ in own
        if name.startswith("aten::") and not any(a <= begin and end <= b for a, b in calls)
    ]
    return (_length(wire + calls + work) - _length(work)) / 1e6


def _length(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


@pytest.mark.parametrize("text", ["tp2", "dp2", "fsdp2"])
def test_exposed_communication_is_what_torchs_profiler_sees(text):
    for told in on_ranks(2, _profiled, text):
        ratios = [ours / theirs for ours, theirs in told]
        assert statistics.median(ratios) == pytest.approx(1.0, rel=0.1), told

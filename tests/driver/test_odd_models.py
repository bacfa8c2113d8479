"""Models that do more than compute: the curve is right, or a note or a refusal says why not."""

from __future__ import annotations

import pytest

from workbench.errors import InputError, LayoutError, RankError, RecipeError, TrainingLostError

# Residual blocks with dropout; `block` and `net` are what a case changes.
CELL = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
batch, seed = 13, 2

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)
        self.n = 0
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        {block}
        return x + self.down(self.drop(torch.tanh(self.up(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 1)
        {more}

    def forward(self, x):
        for layer in self.layers:
            x = {call}
        return {out}

def model(): return Net()
def data():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True)
def loss(output, target): return {loss}
def optimizer(params): return torch.optim.SGD(params, lr=0.02, momentum=0.9)
"""
USUAL = {
    "block": "pass", "more": "pass", "call": "layer(x)", "out": "self.head(x)",
    "loss": "F.mse_loss(output, target)",
}  # fmt: skip


def cell(**changes):
    """The recipe with some of it changed."""
    return CELL.format(**{**USUAL, **changes})


@pytest.fixture
def train(clusters, tmp_path):
    engines = clusters(2)

    def start(text=None, **how):
        return engines.train(cell=text or cell(), steps=100, directory=tmp_path, start=False, **how)

    return start


def curve(run, *steps):
    """The losses after steps, and switches between them."""
    for one in steps:
        run.step(one) if isinstance(one, int) else run.switch(one)
    return run.history.loss


def test_what_a_model_checkpoints_itself_drops_the_same_again(train):
    plain = curve(train(strategy="none"), 4)
    own = cell(call="checkpoint(layer, x, use_reentrant=False)")
    found = curve(train(own, strategy="none"), 2, "pp2, 1f1b x4", 2)
    assert found == pytest.approx(plain, rel=1e-5)


SPLIT = {
    "a frozen first stage": cell(
        more="[p.requires_grad_(False) for p in self.layers[0].parameters()]"
    ),
    "views between stages": cell(call="layer(x).view(-1, 8)"),
    "what no input leads to": cell(
        more="self.other = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))",
        call="layer(x) if layer is not self.layers[0] else layer(self.keep(x))",
        out="self.head(x * self.others())",
    ).replace(
        "    def forward(self, x):\n        for layer",
        """    def keep(self, x):
        self.begin = x
        return x

    def others(self):
        y, self.begin = self.begin, None
        for layer in self.other:
            y = torch.tanh(layer(y))
        return y

    def forward(self, x):
        for layer""",
    ),
}


@pytest.mark.parametrize("text", ["zbv", "zero-bubble", "dualpipev"])
def test_a_backward_in_two_halves_loses_no_gradient(train, text):
    layout = f"pp2, {text} x4"
    for what, own in SPLIT.items():
        plain = curve(train(own, strategy="none", batch=12), 4)
        run = train(own, strategy="none", batch=12)
        assert curve(run, 1, layout, 3) == pytest.approx(plain, rel=1e-5), what
        assert curve(train(own, strategy=layout, batch=12), 4) == pytest.approx(plain, rel=1e-5)


def test_a_mean_that_the_model_takes_needs_even_microbatches(train):
    how = {"out": "self.head(x), x.square().mean()"}
    how["loss"] = "F.mse_loss(output[0], target) + 0.01 * output[1]"
    run = train(cell(**how), strategy="none")
    with pytest.raises(
        LayoutError, match=r"batch=13 is not 4 times as many\..*start with batch=12 or 16"
    ):
        curve(run, 1, "pp2, 1f1b x4")
    expected = curve(train(cell(**how), strategy="none", batch=12), 3)
    assert curve(train(cell(**how), batch=12, strategy="pp2, 1f1b x4"), 3) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ("self.n += 1", "changes layers.0.n, layers.1.n"),
        ("self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))", "changes layers.0.mean"),
        ("import random; x = x if random.random() < 2 else -x", "draws from Python's or NumPy's"),
        ("pass", ""),
    ],
)
def test_what_a_forward_writes_or_draws_is_noted(train, block, told):
    notes = train(cell(block=block)).about["notes"]
    assert bool(notes) == bool(told)
    assert not told or told in notes[0]


def test_sparse_gradients_train_where_nothing_is_averaged(train):
    how = {"more": "self.table = nn.Embedding(5, 8, sparse=True)"}
    how["out"] = "self.head(x + self.table(x[:, 0].abs().long().clamp(max=4)))"
    run = train(cell(**how), strategy="none", batch=12)
    expected = curve(run, 4)
    with pytest.raises(LayoutError, match="table has sparse gradients"):
        run.switch("data")
    found = curve(train(cell(**how), batch=12, strategy="pp2, gpipe x2"), 4)
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("self.layers[2].up.weight = self.layers[0].up.weight", "is shared by two blocks"),
        (
            "self.layers[1].odd = nn.Parameter(torch.ones(2).double())",
            "is float32 and others beside it are not",
        ),
        ("self.scale = nn.Parameter(torch.tensor(1.0))", "scale is a single number"),
        ("self.layers[3] = self.layers[0]", "A block stands twice"),
    ],
)
def test_what_cannot_be_sharded_is_refused_before_anything_is_built(train, more, why):
    run = train(cell(more=more), strategy="none")
    run.step(1)
    with pytest.raises(LayoutError, match=why):
        run.switch("data", shard=True)
    data = next(one for one in run.choices if one["strategy"] == "data")
    assert why in str(data)
    assert run.step(1) == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def optimizer(p): return torch.optim.LBFGS(p)", "LBFGS runs the model several times"),
        ("def model(): return nn.LazyLinear(1)", "weight has no shape before the first input"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_sentence(train, text, why):
    with pytest.raises(RecipeError, match=why):
        train(f"{cell()}\n{text}")


def test_a_step_that_fails_in_shards_keeps_the_training(train):
    run = train(cell(out="F.linear(x, self.layers[0].up.weight[:1])"), strategy="none")
    run.step(1)
    run.switch("fsdp2")
    with pytest.raises(RankError, match=r"mixed torch\.Tensor and DTensor"):
        run.step(1)
    run.switch("dp1")
    assert run.step(1) == 2


def test_a_training_that_a_rank_cannot_keep_is_over_and_the_ranks_take_another(train):
    text = f"""{cell()}
made = 0
def optimizer(params):
    global made
    made += 1
    if made > 2 and rank == 1: raise MemoryError("no room here")
    return torch.optim.SGD(params, lr=0.02)
"""
    run = train(text)
    run.step(1)
    with pytest.raises(TrainingLostError, match=r"Rank 1 could not keep .*no room here"):
        run.switch("pp2, 1f1b x4")
    assert run.state == "gone"
    assert train().step(1) == 1


def test_arguments_of_another_kind_are_one_sentence_and_change_nothing(train, tmp_path):
    run = train()
    run.step(1)
    for path in (5, None, "a\0b.py", "a" * 300):
        with pytest.raises(InputError):
            run.export(path)
    with pytest.raises(InputError, match="ranks has no place beside the whole layout"):
        run.switch("dp2", ranks=2)
    assert isinstance(run.ask("save", nm="x").exception(), TypeError)
    assert run.state == "paused"
    assert run.step(1) == 2
    for how in ({"clip": "1"}, {"clip": True}, {"recompute": "yes"}, {"strategy": None},
                {"strategy": 5}, {"directory": 5}, {"recipe": 5}):  # fmt: skip
        with pytest.raises(InputError):
            run.engines.train(**{"cell": cell(), "directory": tmp_path, **how})
    assert run.state == "paused"
    assert str(train(strategy="pp2, gpipe x2").layout) == "pp2, gpipe x2"


@pytest.mark.parametrize("where", ["block", "loss"])
def test_a_model_that_communicates_trains_where_all_ranks_run_it(train, where):
    sums = "import torch.distributed as dist; dist.all_reduce(torch.ones(9))"
    own = cell(block=sums)
    if where == "loss":
        own = cell(loss=USUAL["loss"]).replace(
            "target): return", f"target):\n    {sums}\n    return"
        )
    expected = curve(train(cell(), batch=12), 4)
    run = train(own, batch=12)
    assert curve(run, 2, "fsdp2", 2) == pytest.approx(expected, rel=1e-5)
    told = {(one["axis"], one["op"]): one["bytes"] for one in run.samples[-1]["comms"]}
    assert max(told.values()) >= 36
    if where == "block":
        with pytest.raises(LayoutError, match="The model communicates by itself"):
            run.switch("pp2")


def test_a_group_that_a_forward_makes_is_made_by_all_ranks(clusters, tmp_path):
    own = "import torch.distributed as dist; dist.all_reduce(torch.ones(9), group=dist.new_group())"
    engines = clusters(3)
    losses = []
    for block in ("pass", own):
        run = engines.train(cell=cell(block=block), directory=tmp_path, steps=2, batch=12)
        assert run.wait(60)["step"] == 2
        losses.append(run.history.loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_folder_of_event_files_that_cannot_be_made_leaves_the_training_there_was(train, tmp_path):
    run = train(batch=12)
    first = list(curve(run, 2))
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "x", 5, ""):
        with pytest.raises(InputError, match=r"event file|tensorboard="):
            train(tensorboard=folder)
    assert run.engines.run is run
    assert curve(run, 2)[:2] == first
    assert run.history.loss[-1] != pytest.approx(first[0], rel=0.01)  # not begun anew
    assert {path.name for path in tmp_path.iterdir()} == {run.name, "file"}

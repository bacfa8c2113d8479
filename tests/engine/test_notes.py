import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn import functional as F  # noqa: N812 - as users write it

from workbench.engine.notes import batchnorms, loss_note, notes
from workbench.engine.recipe import from_namespace
from workbench.spec.layout import Layout

TWO = Layout(dp_replicate=2)
PIPELINE = Layout(pp=2, microbatches=4)


class Forward(nn.Module):
    """A module with children and attributes as given."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class FunctionalDropout(Forward):
    def forward(self, x):
        return F.dropout(x, 0.1, self.training)


class PassesItsShareOn(Forward):
    def forward(self, x):
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=self.attn_drop.p)


class Sampler(Forward):
    def forward(self, x):
        return self.sample(x)

    def sample(self, x):
        return [x + torch.randn_like(x) for _ in range(2)]


class StochasticDepth(Forward):
    def __init__(self, p):
        super().__init__()
        self.drop_prob = p

    def forward(self, x):
        return x


class MyDropout(nn.Dropout):
    def forward(self, input):
        return input


class Calm(Forward):
    """Nothing here depends on the layout, whatever its names."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.randn = nn.Linear(2, 2)
        self.attention_dropout = 0.0
        self.drop_count = 3
        self.reset()

    def reset(self):
        nn.init.normal_(self.randn.weight)

    def forward(self, x):
        return self.dropout(self.randn(x))


@pytest.mark.parametrize("layout", [TWO, PIPELINE, Layout(tp=2), Layout(dp_shard=2, pp=2)])
def test_nothing_is_said_of_what_is_the_same_in_every_layout(layout):
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    model = nn.Sequential(
        *(kind(0.5) for kind in kinds),
        Calm(),
        nn.LSTM(2, 2, batch_first=True),
        nn.GRU(2, 2, batch_first=True),
        nn.MultiheadAttention(2, 2, batch_first=True),
        nn.InstanceNorm2d(2),
        nn.LayerNorm(2),
    )
    assert notes(model, layout, 1) == []


DROPS = {
    "functional": (FunctionalDropout(), "0."),
    "a share passed on": (PassesItsShareOn(attn_drop=nn.Dropout(0.1)), "0 (attn_drop.p=0.1)."),
    "attention": (nn.MultiheadAttention(2, 2, 0.2, batch_first=True), "0 (dropout=0.2)."),
    "between layers": (nn.LSTM(2, 2, 2, dropout=0.3, batch_first=True), "0 (dropout=0.3)."),
    "depth": (StochasticDepth(0.25), "0 (drop_prob=0.25)."),
    "a subclass": (MyDropout(0.5), "0 (p=0.5)."),
}


@pytest.mark.parametrize("case", DROPS)
def test_dropout_that_is_no_module_of_torch_is_named_with_its_share(case):
    module, ending = DROPS[case]
    model = nn.Sequential(module)
    (note,) = notes(model, TWO, 1)
    assert note.startswith("Dropout in a module's own code draws other masks")
    assert note.endswith(f": {ending}")
    assert notes(model, Layout(), 1) == []
    assert len(notes(model, Layout(), 2)) == 1


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(2, 2, 1, batch_first=True),
        StochasticDepth(0.0),
        PassesItsShareOn(attn_drop=nn.Dropout(0)),
    ],
)
def test_dropout_that_drops_nothing_is_not_named(module):
    assert notes(nn.Sequential(module), TWO, 1) == []


def test_batchnorm_is_noted_under_microbatches_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert notes(model, TWO, 1) == []
    assert notes(model, Layout(pp=2), 1) == []
    for layout, accumulate, rounds in ((TWO, 2, 2), (PIPELINE, 1, 4), (PIPELINE, 2, 8)):
        (note,) = notes(model, layout, accumulate)
        assert note == (
            f"Statistics of BatchNorm1d 1 come from each of {rounds} microbatches, not from the "
            "whole batch, so the loss differs from now on."
        )
    assert batchnorms(model) == "BatchNorm1d 1"
    assert batchnorms(model, of_a_rank=True) == ""


def test_other_code_that_normalises_a_batch_is_found_by_its_running_statistics():
    class Own(nn.BatchNorm1d):
        def forward(self, input):
            return super().forward(input)

    model = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), Own(2))
    assert batchnorms(model) == ""
    assert batchnorms(model, of_a_rank=True) == "Own 1"


def test_other_running_statistics_and_random_numbers_are_noted():
    model = nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), Sampler(), nn.RReLU())
    told = notes(model, TWO, 1)
    assert [note.rsplit(": ")[1] for note in told] == ["0.", "1, 2."]
    assert [note.rsplit(": ")[1] for note in notes(model, Layout(tp=2), 1)] == ["1, 2."]


def test_time_before_samples_is_noted_where_something_drops():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
    assert notes(layer, TWO, 1) == []
    layer.dropout.p = 0.1
    (note,) = notes(layer, TWO, 1)
    assert note.endswith("(batch_first=False): self_attn.")


class Mixes(nn.Linear):
    def forward(self, input):
        return super().forward(input) + input.abs().mean(0).amax()


class Noisy(nn.Linear):
    def forward(self, input):
        return super().forward(input) + torch.randn(1)


@pytest.mark.parametrize(
    ("model", "loss", "is_told"),
    [
        (nn.Linear, F.mse_loss, False),
        (nn.Linear, lambda output, target: (output - target).square().sum(), True),
        (Mixes, F.mse_loss, True),
        (Noisy, F.mse_loss, False),
    ],
)
def test_a_loss_that_depends_on_how_a_batch_is_split_is_noted(model, loss, is_told):
    data = torch.randn(8, 2), torch.randn(8, 1)
    parts = {"model": lambda: model(2, 1), "data": lambda: data, "loss": loss}
    note = loss_note(from_namespace(parts, "cell"), model(2, 1))
    assert ("or the model mixes the samples of a batch" in note) == is_told
    assert bool(note) == is_told


def test_only_a_few_are_named():
    model = nn.Sequential(*(FunctionalDropout() for _ in range(7)))
    assert notes(model, TWO, 1)[0].endswith(": 0, 1, 2 and 4 more.")
    assert notes(FunctionalDropout(), TWO, 1)[0].endswith(": the model.")


def test_hugging_face_attention_is_named_by_what_it_passes_on():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=8, n_positions=8)
    (note,) = notes(transformers.GPT2LMHeadModel(config), TWO, 1)
    assert note.endswith(
        ": transformer.h.0.attn (attn_dropout.p=0.1), transformer.h.1.attn (attn_dropout.p=0.1)."
    )
    config = transformers.LlamaConfig(
        num_hidden_layers=1, num_attention_heads=2, hidden_size=8, vocab_size=8
    )
    assert notes(transformers.LlamaForCausalLM(config), TWO, 1) == []

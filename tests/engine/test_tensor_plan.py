import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.engine.tensor_models import (
    HEADS,
    WIDTH,
    Attention,
    Block,
    Fused,
    Hidden,
    Remembers,
    Scaled,
    Words,
    case,
    ids,
    llama,
    mlp,
    numbers,
    sequences,
    text,
)
from workbench.engine import tensor_plan
from workbench.engine.skeleton import skeleton
from workbench.engine.tensor_plan import Group
from workbench.errors import RecipeError
from workbench.spec.layout import Layout
from workbench.spec.limits import Limits, why_not

CPU = torch.device("cpu")


def found(model, inputs, optimizer_kind="AdamW"):
    return tensor_plan.find(skeleton(model), inputs, CPU, optimizer_kind)


def refusal(plan, tp):
    limits = Limits(batch=8, units=["all"], tensor=dict(plan.sizes), tp_why=plan.why)
    return why_not(Layout(tp=tp), limits, ranks=8)


def test_layers_pair_up_in_the_order_of_their_calls():
    plan = found(mlp(), numbers())
    assert plan.groups == (Group(("0",), "2"), Group(("4",), "5"))
    assert plan.sizes == {"outputs of Linear 0": 16, "parts that Linear 4 can be cut into": 4}
    assert not refusal(plan, 4)
    assert refusal(plan, 8) == (
        "tp=8 does not divide the 4 parts that Linear 4 can be cut into. "
        'Use the layout "tp4" (4 of 8 ranks) or "dp2 tp4".'
    )


def test_what_does_not_divide_is_refused_with_what_does():
    plan = found(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), torch.rand(2, 4))
    assert refusal(plan, 5) == ""
    assert refusal(plan, 4).startswith(
        'tp=4 does not divide the 5 outputs of Linear 0. Use the layout "tp5" (5 of 8 ranks) or "'
    )
    model = Attention(heads=2)
    plan = found(model, sequences())
    assert plan.groups == (Group(("q", "k", "v"), "out", (("", "num_heads"),)),)
    assert refusal(plan, 4).startswith("tp=4 does not divide the 2 heads (num_heads). Use ")


def test_attention_and_perceptron_of_each_block_and_a_large_vocabulary_are_cut():
    plan = found(Words(), ids())
    heads = (("blocks.1.attention", "num_heads"),)
    qkv = tuple(f"blocks.1.attention.{name}" for name in "qkv")
    assert plan.groups[2:] == (
        Group(qkv, "blocks.1.attention.out", heads),
        Group(("blocks.1.up",), "blocks.1.down"),
    )
    assert plan.sizes == {"heads (blocks.0.attention.num_heads)": 4}
    assert (plan.embeddings, plan.gathered, plan.notes) == (("token",), ("head",), [])


def test_the_built_in_text_model_is_cut_by_whole_heads():
    plan = found(text(), ids())
    rows = ["blocks.0.out", "blocks.0.down", "blocks.1.out", "blocks.1.down"]
    assert [group.row for group in plan.groups] == rows
    assert plan.sizes == {"heads (blocks.0.heads)": 4}
    assert refusal(plan, 3).startswith("tp=3 does not divide the 4 heads (blocks.0.heads). Use ")


def test_parts_of_an_attention_are_heads_though_no_attribute_tells_how_many():
    model = Fixed()
    del model.num_heads
    assert found(model, sequences()).sizes == {"heads": 4}
    assert found(Stream(model), sequences()).sizes == {"heads of 0": 4}


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        (Fused, "would compute something else if cut"),
        (Hidden, "would compute something else if cut"),
        (Remembers, "would compute something else if cut"),
        (Scaled, "also depends on trained tensors that are not cut"),
    ],
)
def test_attention_that_cannot_be_proven_stays_whole_and_the_rest_is_cut(attention, why):
    plan = found(Words(attention), ids())
    assert [group.row for group in plan.groups] == ["blocks.0.down", "blocks.1.down"]
    layers = ("out", "qkv") if attention is Fused else ("q", "k", "v", "out")
    named = ", ".join(f"blocks.*.attention.{name}" for name in layers)
    assert plan.notes == [f"Whole on every tensor-parallel rank: {named} ({why})"]


class Fixed(Hidden):
    """As the advice for Hidden has it."""

    def split(self, x):
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


class Rows(Fused):
    """As the advice for Fused has it."""

    def mix(self, x):
        batch, time, _ = x.shape
        parts = self.qkv(x).view(batch, time, -1, 3, WIDTH // HEADS).transpose(1, 2)
        q, k, v = parts.unbind(-2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Stream(nn.Sequential):
    """Each part is added to what goes in."""

    def forward(self, x):
        for part in self:
            x = x + part(x)
        return x


@pytest.mark.parametrize(
    ("wrong", "right", "says"),
    [
        (Hidden, Fixed, "0.q, 0.k, 0.v and 0.out look like a group, but cut in parts they compute "
         "something else: take the number of heads from the tensor, with view(..., -1, width of a "
         "head)."),
        (Fused, Rows, "0.qkv and 0.out look like a pair, but cut in parts they compute something "
         "else: put whole heads side by side in its rows, with view(..., -1, 3, width of a head)."),
    ],
)  # fmt: skip
def test_what_looks_like_a_pair_is_named_with_what_to_change(wrong, right, says):
    plan = found(Stream(wrong(), wrong()), sequences())
    assert (plan.groups, plan.why) == ((), says)
    plan = found(Stream(right(), right()), sequences())
    assert [group.row for group in plan.groups] == ["0.out", "1.out"]
    assert plan.why == ""


class Encoder(nn.Module):
    """Small matrices in many blocks, a table of its own, torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True) for _ in "123")
        self.blocks = nn.ModuleList(layers)
        self.place = nn.Parameter(torch.zeros(5, WIDTH))
        self.small = nn.Linear(2, 2)

    def forward(self, x):
        x = x + self.place
        for block in self.blocks:
            x = block(x)
        return x + self.small(x[..., :2]).sum()


def test_torchs_attention_and_tables_are_named_among_what_is_whole():
    plan = found(Encoder(), sequences())
    assert [group.row for group in plan.groups] == [f"blocks.{n}.linear2" for n in range(3)]
    assert plan.notes == [
        "Whole on every tensor-parallel rank: place, blocks.*.self_attn (nn.MultiheadAttention is "
        "not cut by itself)"
    ]


def test_heads_that_do_not_divide_are_the_reason():
    wide = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 12))
    attention = Attention(heads=3)
    for name in "qkv":
        setattr(attention, name, nn.Linear(12, 12))
    attention.out = nn.Linear(12, 12)
    plan = found(nn.Sequential(wide, attention), sequences())
    assert [group.row for group in plan.groups] == ["0.2"]
    assert plan.notes == [
        "Whole on every tensor-parallel rank: 1.q, 1.k, 1.v, 1.out (goes with 3 heads, which do "
        "not divide as other layers need)"
    ]


def test_a_mask_may_hide_where_it_is_true():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(x, x[..., :1] > 0.5)

    class Inner(Attention):
        def forward(self, x, hidden):
            return self.out(self.mix(x).masked_fill(hidden, 0.0))

    plan = found(Masked(), sequences())
    assert [group.row for group in plan.groups] == ["inner.out"]


def test_what_is_always_zero_is_not_taken_for_a_proof():
    class Zero(Attention):
        def forward(self, x):
            return self.out(self.mix(x) * 0.0)

    plan = found(Zero(), sequences())
    assert plan.groups == ()
    assert plan.why.startswith("q, k, v and out look like a group, but out gives nothing to")
    assert "gives nothing to compare" in plan.notes[0]


def test_weights_that_other_code_uses_stay_whole():
    class Regularised(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + self[0].weight.square().mean()

    parts = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)
    assert found(nn.Sequential(*parts), numbers()).groups
    assert not found(Regularised(*parts), numbers()).groups

    shared = Block(Attention)
    shared.up.weight = nn.Parameter(torch.rand(16, 16))
    shared.down.weight = shared.attention.q.weight
    plan = found(shared, sequences())
    assert plan.groups == ()


@pytest.mark.parametrize(("tied", "cut"), [("module", True), ("function", False)])
def test_a_tied_vocabulary_is_cut_in_one_way_or_not_at_all(tied, cut):
    plan = found(Words(tied=tied), ids())
    assert plan.groups
    assert plan.embeddings == (("token",) if cut else ())
    assert plan.gathered == (("head",) if cut else ())
    assert bool(plan.notes) != cut


def test_a_layer_called_inside_and_outside_of_a_block_is_not_cut():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))

        def forward(self, x):
            return self.pair(x) + self.pair[1](x @ torch.ones(6, 8))

    assert found(Twice(), numbers()).groups == ()


@pytest.mark.parametrize("kind", ["LBFGS", "Muon", "Adafactor"])
def test_an_optimizer_that_needs_whole_matrices_is_refused(kind):
    sentence = (
        f"{kind} looks at whole matrices, and tensor parallelism cuts them. "
        "Use an optimizer that works element by element, such as AdamW."
    )
    plan = found(mlp(), numbers(), kind)
    assert (plan.why, plan.groups) == (sentence, ())
    assert refusal(plan, 8) == f'{sentence} As the model is, use the layout "dp8".'
    assert tensor_plan.given(skeleton(mlp()), {"0": "gathered"}, optimizer_kind=kind).why


def test_a_model_without_a_pair_or_that_needs_values_says_what_to_give():
    plan = found(
        nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), numbers()[:, None]
    )
    none = "No two linear layers of the model were found that can be cut together."
    assert plan.why == none
    assert refusal(plan, 8) == f'{none} As the model is, use the layout "dp8".'
    parts = nn.Linear(6, 8), nn.Linear(8, 6)
    parts[0].weight.requires_grad_(False)
    twice = nn.Sequential(*parts)
    twice.register_forward_hook(lambda module, args, output: output + module[1].weight.sum())
    assert found(twice, numbers()).why == none

    class Looks(nn.Sequential):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else x

    plan = found(Looks(nn.Linear(6, 6), nn.Linear(6, 6)), numbers())
    assert plan.why.startswith("The model does not run on tensors without values (")
    assert plan.why.endswith(
        'Give tensor_plan in the recipe, such as {"0": "colwise", "1": "rowwise"}.'
    )


class Beside(nn.Module):
    """A pair with a tied layer called between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.side, self.tied, self.down = (nn.Linear(6, 6) for _ in range(4))
        self.tied.weight = self.side.weight

    def forward(self, x):
        up, side = self.up(x), self.side(x)
        return self.down(torch.relu(up)) + self.tied(side)


def test_a_tensor_plan_that_is_proposed_is_accepted():
    plan = found(Beside(), numbers())
    proposed = '{"up": "colwise", "down": "rowwise"}'
    assert plan.why.endswith(f"Give tensor_plan in the recipe, such as {proposed}.")
    plan = tensor_plan.given(skeleton(Beside()), json.loads(proposed), numbers(), CPU)
    assert plan.groups == (Group(("up",), "down"),)


def test_a_pair_that_other_weights_reach_says_so_and_what_to_use():
    class Past(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = x + torch.tanh(layer(x))
            return x

    model = Past(*(nn.Linear(6, 6) for _ in range(4)))
    model[1].weight = model[0].weight
    plan = found(model, numbers())
    why = "2 and 3 look like a pair, but other trained weights reach 3 past 2"
    only = "and a pair can be cut only where none do."
    assert plan.why == f"{why}, {only}"
    assert refusal(plan, 2).startswith(f'{why}, {only} As the model is, use the layout "')


def test_finding_changes_nothing_and_draws_nothing():
    bones = skeleton(Words())
    names = [name for name, _ in bones.named_modules()]
    inputs, state = ids(), torch.get_rng_state()
    tensor_plan.find(bones, inputs, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert [name for name, _ in bones.named_modules()] == names
    assert all(not module._forward_hooks for module in bones.modules())


def test_groups_that_reach_over_units_are_left_out_of_a_pipeline():
    plan = found(Words(), ids())
    assert plan.inside(["token", "blocks.0", "blocks.1", "head"]) == plan
    assert [g.row for g in plan.inside(["blocks.0"]).groups] == [g.row for g in plan.groups[:2]]
    chain = found(mlp(), numbers())
    assert chain.inside(list("024")).groups == ()


GIVEN = {"blocks.*.attention.[qkv]": "colwise", "blocks.*.out": "rowwise"}


def test_a_given_plan_is_used_and_proven():
    model = skeleton(Words())
    plan = tensor_plan.given(model, GIVEN | {"token": "vocab"}, ids(), CPU)
    assert [group.row for group in plan.groups] == [
        "blocks.0.attention.out",
        "blocks.1.attention.out",
    ]
    assert plan.groups[0].heads == (("blocks.0.attention", "num_heads"),)
    assert plan.embeddings == ("token",)
    assert plan.sizes["heads (blocks.0.attention.num_heads)"] == 4
    with pytest.raises(RecipeError, match=r"cuts blocks\.0\.attention\.out, which would compute"):
        tensor_plan.given(skeleton(Words(Hidden)), GIVEN, ids(), CPU)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ({"blocks.*.nothing": "colwise"}, "which matches no module of the model. Print the model"),
        ({"token": "columns"}, "Known: colwise, rowwise, vocab, gathered."),
        ({"token": "colwise"}, "cuts token as colwise, which needs an nn.Linear, and it is Embed"),
        ({"*.down": "rowwise"}, "cuts blocks.0.down rowwise, and no layer before it colwise."),
        ({"*.up": "colwise"}, "cuts blocks.1.up colwise, and no layer after it rowwise."),
        ({"token": "vocab"}, "cuts the weight of head as vocab under another name. Name head too"),
    ],
)
def test_a_given_plan_that_does_not_fit_is_refused(plan, sentence):
    with pytest.raises(RecipeError) as error:
        tensor_plan.given(skeleton(Words(tied="module")), plan)
    assert sentence in str(error.value)


def test_hugging_face_attention_is_cut_by_its_key_heads():
    pytest.importorskip("transformers")
    plan = found(llama(), ids())
    assert plan.groups[0].row == "model.model.layers.0.self_attn.o_proj"
    assert len(plan.groups) == 4
    assert list(plan.sizes.values()) == [2]
    assert found(*case("gpt2")).groups[0].row == "model.transformer.h.0.mlp.c_proj"

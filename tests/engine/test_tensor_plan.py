import pytest
import torch
from torch import nn

from tests.engine.tensor_models import (
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
    limits = Limits(batch=8, tensor=dict(plan.sizes), tp_why=plan.why)
    return why_not(Layout(tp=tp), limits, ranks=8)


def test_layers_pair_up_in_the_order_of_their_calls():
    plan = found(mlp(), numbers())
    assert plan.groups == (Group(("0",), "2"), Group(("4",), "5"))
    assert plan.sizes == {"the outputs of 0": 16, "the parts that 4 can be cut into": 4}
    assert not refusal(plan, 4)
    assert refusal(plan, 8) == (
        "tp=8 does not divide the parts that 4 can be cut into, 4. Use tp=2 or 4."
    )


def test_what_does_not_divide_is_refused_with_what_does():
    plan = found(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), torch.rand(2, 4))
    assert refusal(plan, 2) == "tp=2 does not divide the outputs of 0, 5. Use tp=5."
    model = Attention(heads=2)
    plan = found(model, sequences())
    assert plan.groups == (Group(("q", "k", "v"), "out", (("", "num_heads"),)),)
    assert refusal(plan, 4) == "tp=4 does not divide num_heads, 2. Use tp=2."


def test_attention_and_perceptron_of_each_block_and_a_large_vocabulary_are_cut():
    plan = found(Words(), ids())
    heads = (("blocks.1.attention", "num_heads"),)
    qkv = tuple(f"blocks.1.attention.{name}" for name in "qkv")
    assert plan.groups[2:] == (
        Group(qkv, "blocks.1.attention.out", heads),
        Group(("blocks.1.up",), "blocks.1.down"),
    )
    assert plan.sizes == {"blocks.0.attention.num_heads": 4}
    assert (plan.embeddings, plan.gathered, plan.notes) == (("token",), ("head",), [])


def test_the_built_in_text_model_is_cut_by_whole_heads():
    plan = found(text(), ids())
    rows = ["blocks.0.out", "blocks.0.down", "blocks.1.out", "blocks.1.down"]
    assert [group.row for group in plan.groups] == rows
    assert plan.sizes == {"the parts that blocks.0.qkv can be cut into": 4}


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
    (note,) = plan.notes
    assert note.startswith("Whole on every tensor-parallel rank: blocks.0.attention.")
    assert f"blocks.0.attention.out {why}" in note


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
    assert plan.why.startswith("No two linear layers of the model were found")
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
    assert refusal(plan, 2) == sentence
    assert tensor_plan.given(skeleton(mlp()), {"0": "gathered"}, optimizer_kind=kind).why


def test_a_model_without_a_pair_or_that_needs_values_says_what_to_give():
    plan = found(
        nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), numbers()[:, None]
    )
    assert plan.why == (
        "No two linear layers of the model were found that can be cut together. Give tensor_plan "
        'in the recipe, such as {"up": "colwise", "down": "rowwise"}.'
    )

    class Looks(nn.Sequential):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else x

    plan = found(Looks(nn.Linear(6, 6), nn.Linear(6, 6)), numbers())
    assert plan.why.startswith("The model does not run on tensors without values (")
    assert plan.why.endswith("Give tensor_plan in the recipe.")


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
    assert plan.sizes["blocks.0.attention.num_heads"] == 4
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

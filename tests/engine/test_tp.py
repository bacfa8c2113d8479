from copy import deepcopy

import pytest
import torch
import torch.distributed as dist

from tests.engine.procs import ranks
from tests.engine.tensor_models import CASES, HUGGING_FACE, WORDS, Words, case
from workbench.engine import tensor_plan
from workbench.engine.axes import tp
from workbench.engine.skeleton import skeleton
from workbench.engine.tensor_plan import TensorPlan

CPU = torch.device("cpu")


def loss_of(model, inputs):
    """A loss in which every output counts differently."""
    output = model(inputs)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return output, (output * weights).square().mean() + (output * weights).mean()


def gradients(model):
    return {name: param.grad for name, param in model.named_parameters()}


def _train_all(rank, names):
    return [_train(rank, name)[0] for name in names]


def _train(rank, name):
    """Output, loss and gradients under each degree against the whole model on this rank."""
    whole, inputs = case(name)
    plan = tensor_plan.find(skeleton(whole), inputs, CPU)
    assert not plan.why
    expected = loss_of(whole, inputs)
    expected[1].backward()
    told = []
    world = dist.get_world_size()
    for of in (of for of in CASES[name][2] if of <= world):
        teams = [dist.new_group(list(range(i, i + of))) for i in range(0, world, of)]
        group = teams[rank // of]
        model = deepcopy(whole)
        model.zero_grad(set_to_none=True)
        cuts = tp.cut(model, plan, group, rank % of, of)
        output, loss = loss_of(model, inputs)
        loss.backward()
        torch.testing.assert_close(output, expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(loss, expected[1], rtol=1e-5, atol=1e-7)
        ours, theirs = gradients(model), gradients(whole)
        assert ours.keys() == theirs.keys()
        for key, grad in theirs.items():
            cut = cuts.get(key)
            part = grad if cut is None else grad.chunk(cut.of, cut.dim)[cut.index]
            torch.testing.assert_close(ours[key], part, rtol=1e-4, atol=1e-6, msg=f"{of}: {key}")
        told.append((len(cuts), {n: g for n, g in ours.items() if n not in cuts}))
    return told


def check_agree(told):
    """told: by rank, (number of cut parameters, gradients of the whole ones)."""
    assert told[0][0] > 0
    for _, gradients_there in told[1:]:
        # Bit for bit: nothing would bring them together again.
        assert all(torch.equal(gradients_there[key], grad) for key, grad in told[0][1].items())


@pytest.mark.parametrize("name", [name for name in CASES if name not in HUGGING_FACE])
def test_output_loss_and_gradients_are_those_of_one_process(name):
    answers = ranks(4, _train, name)
    assert len(answers[0]) == 2
    for index in range(2):
        check_agree([answer[index] for answer in answers])


def test_hugging_face_models_train_as_in_one_process():
    pytest.importorskip("transformers")
    names = sorted(HUGGING_FACE)
    # Each process imports transformers, which takes a while.
    answers = ranks(2, _train_all, names, timeout_s=120)
    for index in range(len(names)):
        check_agree([answer[index] for answer in answers])


def _ids_out_of_range(rank, wrong):
    model, ids = case("tied")
    plan = TensorPlan(embeddings=("token",), gathered=("head",))
    tp.cut(model, plan, dist.group.WORLD, rank, 2)
    ids[0, 0] = wrong
    try:
        with torch.no_grad():
            model(ids)
    except IndexError as error:
        dist.destroy_process_group()  # lets the other rank go
        return str(error)
    except RuntimeError:
        dist.destroy_process_group()
        return ""
    return "nothing raised"


@pytest.mark.parametrize("wrong", [WORDS, -1])
def test_an_id_that_is_no_word_raises_as_in_one_process(wrong):
    told = ranks(2, _ids_out_of_range, wrong)
    assert sorted(text[:18] for text in told) == ["", "index out of range"]


def _count_all_reduces(rank):
    model, inputs = case("attention")
    plan = tensor_plan.find(skeleton(model), inputs, CPU)
    tp.cut(model, plan, dist.group.WORLD, rank, 2)
    counts, plain = [], dist.all_reduce

    def counted(*args, **kwargs):
        counts[-1] += 1
        return plain(*args, **kwargs)

    dist.all_reduce = counted
    inputs.requires_grad_()
    counts.append(0)
    loss = model(inputs).sum()
    counts.append(0)
    loss.backward()
    dist.all_reduce = plain
    return counts


def test_a_group_costs_one_all_reduce_each_way():
    assert ranks(2, _count_all_reduces) == [[1, 1], [1, 1]]


def test_a_cut_skeleton_keeps_names_ties_and_has_no_memory():
    model = skeleton(Words(tied="module"))
    names = [name for name, _ in model.named_parameters()]
    plan = tensor_plan.find(model, case("tied")[1], CPU)
    cuts = tp.cut(model, plan, None, 1, 4)
    assert [name for name, _ in model.named_parameters()] == names
    assert model.head.weight is model.token.weight
    assert all(param.is_meta for param in model.parameters())
    assert tuple(model.token.weight.shape) == (WORDS // 4, 16)
    assert cuts["token.weight"] == tp.TensorCut(dim=0, index=1, of=4)
    assert "head.weight" not in cuts


def test_modules_of_other_stages_are_passed_over():
    model = skeleton(Words())
    plan = tensor_plan.find(model, case("words")[1], CPU)
    for module in model.blocks[1].modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            setattr(module, name, None)
    cuts = tp.cut(model, plan, None, 0, 2)
    assert any(name.startswith("blocks.0.") for name in cuts)
    assert not any(name.startswith("blocks.1.") for name in cuts)


def test_no_activation_outlives_a_pass():
    model, inputs = case("swiglu")
    plan = tensor_plan.find(skeleton(model), inputs, CPU)
    tp.cut(model, plan, None, 0, 2)
    seen = []
    model.gate.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(inputs)
    entry = model.gate.forward.args[1]
    assert seen
    assert entry._seen is None


def _autocast(rank):
    whole, inputs = case("tied")
    model = deepcopy(whole)
    plan = tensor_plan.find(skeleton(whole), inputs, CPU)
    tp.cut(model, plan, dist.group.WORLD, rank, 2)
    outputs = []
    for each in (whole, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, loss = loss_of(each, inputs)
        loss.backward()
        outputs.append(output)
    assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0.05, atol=0.02)
    row = model.blocks[0].down.weight
    part = whole.blocks[0].down.weight.grad.chunk(2, 1)[rank]
    return row.dtype, ((row.grad - part).norm() / part.norm()).item()


def test_autocast_gives_the_dtypes_of_one_process_and_its_gradients_to_bf16():
    for dtype, difference in ranks(2, _autocast):
        assert dtype == torch.float32
        assert difference < 0.05

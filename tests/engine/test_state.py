import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.engine.models import OPTIMIZERS, carry, same, step, training, whole_state
from tests.engine.procs import ranks
from workbench.engine import shards, state
from workbench.errors import CheckpointError


def test_keys_are_names_and_what_is_tied_comes_once():
    model, optim = training(steps=1)
    pieces = state.take(model, optim)
    assert list(pieces)[:2] == ["model/frozen", "model/unused"]
    assert "model/first.weight" in pieces
    assert "model/tied.weight" not in pieces
    assert "model/norm.running_mean" in pieces
    assert "model/scratch" not in pieces
    assert pieces["optim/first.weight/exp_avg"].shape == (7, 5)
    assert pieces["optim/first.weight/step"].shape == ()
    assert state.tied(model) == {"tied.weight": "first.weight"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fresh_optimizer_taken_and_put_into_another_trains_as_if_untouched(optimizer):
    untouched = training(optimizer)
    source = training(optimizer)
    before = [param.clone() for param in source[0].parameters()]
    other = training(optimizer, seed=3, steps=2)
    carry(source, other)
    assert all(map(torch.equal, before, source[0].parameters()))
    assert all(param.grad is None for param in source[0].parameters())
    for one in (untouched, source, other):
        step(*one, 3)
    state.take(*untouched)
    assert same(whole_state(*untouched), whole_state(*source))
    assert same(whole_state(*untouched), whole_state(*other))


def test_an_optimizer_under_way_is_created_in_a_fresh_one():
    one, other = training(steps=3), training(seed=5)
    carry(one, other)
    step(*one, 2)
    step(*other, 2)
    assert same(whole_state(*one), whole_state(*other))


def test_numbers_in_optimizer_state_are_put_back_as_numbers():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self.state[param]["seen"] = self.state[param].get("seen", 0) + 1

    model = torch.nn.Linear(2, 2)
    one, other = Counting(model.parameters(), lr=0.1), Counting(model.parameters(), lr=0.1)
    model(torch.rand(1, 2)).sum().backward()
    one.step()
    one.step()
    state.load(model, other, state.take(model, one))
    assert [other.state[param]["seen"] for param in model.parameters()] == [2, 2]
    assert all(isinstance(other.state[param]["seen"], int) for param in model.parameters())


def test_load_of_another_model_changes_nothing_and_says_how_it_differs():
    model, optim = training()
    pieces = state.take(torch.nn.Linear(2, 2))
    before = whole_state(model, optim)
    with pytest.raises(CheckpointError, match=r"it lacks .* and \d+ more; it has model/bias"):
        state.load(model, optim, pieces)
    assert same(before, whole_state(model, optim))


def test_settings_are_plain_and_given_back():
    import json

    model = torch.nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": torch.tensor(0.5)}, {"params": [model.bias]}]
    optim = torch.optim.Adam(groups, betas=(0.8, 0.9))
    names = state.group_names(model, optim)
    assert names == [["weight"], ["bias"]]
    saved = json.loads(json.dumps(state.settings(optim, names)))
    other = torch.optim.Adam([{"params": [model.weight]}, {"params": [model.bias]}])
    state.set_settings(other, names, saved)
    assert other.param_groups[0]["lr"] == 0.5
    assert other.param_groups[1]["betas"] == (0.8, 0.9)
    one = torch.optim.Adam(model.parameters())
    with pytest.raises(CheckpointError, match="2 groups there, 1 here"):
        state.set_settings(one, state.group_names(model, one), saved)


def test_parameters_that_are_not_the_models_are_refused():
    with pytest.raises(CheckpointError, match="1 parameters that are not the model's"):
        state.take(torch.nn.Linear(2, 2), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))


def _moved(rank, optimizer):
    plain = training(optimizer, steps=3)
    expected = whole_state(*plain)
    sharded = training(optimizer, shard=True, seed=7)
    carry(plain, sharded)
    held = sum(piece.local.numel() for piece in state.take(*sharded).values())
    there = same(expected, whole_state(*sharded))
    again = training(optimizer, seed=8)
    carry(sharded, again)
    step(*plain, 2)
    step(*again, 2)
    return there, same(whole_state(*plain), whole_state(*again)), held


@pytest.mark.parametrize(("num", "optimizer"), [(2, "momentum"), (3, "adamw")])
def test_replicated_to_sharded_and_back_is_bit_equal(num, optimizer):
    results = ranks(num, _moved, optimizer)
    assert all(there and back for there, back, _ in results)
    assert results[-1][2] < results[0][2]


def _after_evaluation(rank):
    model, optim = training(shard=True, steps=1)
    before = whole_state(model, optim)
    model.eval()
    with torch.no_grad():
        model(torch.rand(2, 5))
    return same(before, whole_state(model, optim))


def test_parameters_left_whole_by_an_evaluation_are_taken_as_shards():
    assert ranks(2, _after_evaluation) == [True, True]


def _buffers(rank):
    model, optim = training()
    model.norm.running_mean.fill_(rank + 1)
    return whole_state(model, optim)["model/norm.running_mean"].tolist()


def test_buffers_that_differ_are_those_of_rank_0():
    assert ranks(2, _buffers) == [[1.0] * 7] * 2


def _boxes(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    found = []
    for shape, placements in [
        ((5, 3), (Replicate(), Shard(0))),
        ((5, 3), (Shard(0), Replicate())),
        ((7, 3), (Shard(0), Shard(0))),
        ((3, 5), (Shard(1), Shard(0))),
        ((1,), (Shard(0), Shard(0))),
    ]:
        full = torch.arange(torch.Size(shape).numel()).reshape(shape)
        local, box = shards.local_part(distribute_tensor(full, mesh, placements))
        found.append(torch.equal(full[box.slices()], local))
    try:
        shards.local_part(DTensor.from_local(torch.ones(2), mesh, (Partial(), Replicate())))
    except CheckpointError as error:
        found.append("no box of its own" in str(error))
    return found


def test_boxes_are_where_the_shards_lie_in_the_whole():
    assert ranks(4, _boxes) == [[True] * 6] * 4

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from tests.engine import procs
from workbench.engine.dropout import Draw, make_invariant

SAMPLES, WIDTH = 12, 4000


def dropping(kind=nn.Dropout, p=0.3, *, seed=0, name="drop", **how):
    """A module at the given name, and the position it draws at."""
    model, draw = nn.ModuleDict({name: kind(p)}), Draw()
    make_invariant(model, draw, seed, **how)
    return model[name], draw


def at(draw, step=0, first=0, count=1, padded=0):
    draw.step, draw.first, draw.count, draw.padded = step, first, count, padded


def masks(p=0.3, *, step=0, first=0, count=SAMPLES, width=WIDTH, **how):
    """What stays of ones, as 0 and 1: [count, width]."""
    drop, draw = dropping(p=p, **how)
    at(draw, step, first, count)
    return (drop(torch.ones(count, width)) > 0).float()


def correlation(one, two):
    return torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1].abs().item()


@pytest.mark.parametrize("counts", [[12], [5, 7], [1] * 12, [4, 4, 3, 1]])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_masks_of_samples_do_not_depend_on_how_they_are_cut(counts, rows):
    drop, draw = dropping()
    x = torch.randn(SAMPLES * rows, 7, 5)
    at(draw, 3, 100, SAMPLES)
    whole, parts, first = drop(x), [], 0
    for count in counts:
        at(draw, 3, 100 + first, count)
        parts.append(drop(x[first * rows : (first + count) * rows]))
        first += count
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(whole, torch.where(whole == 0, 0, x * (1 / 0.7)))


def test_rows_of_padding_change_nothing():
    drop, draw = dropping()
    x = torch.randn(6, 10)
    at(draw, first=3, count=6)
    whole = drop(x)
    at(draw, first=3, count=4, padded=6)
    assert torch.equal(drop(x)[:4], whole[:4])


def test_an_input_without_samples_has_one_mask_for_all_of_them():
    drop, draw = dropping()
    at(draw, 0, 0, 4)
    table = drop(torch.ones(7, 50))
    at(draw, 0, 4, 5)
    assert torch.equal(drop(torch.ones(7, 50)), table)
    at(draw, 1, 4, 5)
    assert not torch.equal(drop(torch.ones(7, 50)), table)
    assert drop(torch.tensor(1.0)).shape == ()


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_masks_keep_the_share_they_should(p):
    kept = masks(p)
    share, deviation = kept.mean().item(), (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(share - (1 - p)) < 4 * deviation
    # So does every sample for itself, and every column: as spread as chance makes them.
    for dim in (0, 1):
        spread = kept.mean(dim).std().item()
        assert spread == pytest.approx((p * (1 - p) / kept.shape[dim]) ** 0.5, rel=0.6)


def test_masks_of_other_samples_steps_names_seeds_and_neighbours_have_nothing_in_common():
    # Chance alone stays under this with 1 - 1e-4, for each of the comparisons.
    limit = 4 / (SAMPLES * WIDTH) ** 0.5
    one = masks()
    others = [
        masks(step=1),
        masks(first=SAMPLES),
        masks(name="drop1"),
        masks(seed=1),
        masks(step=2**40),
        masks(first=2**33),
    ]
    assert max(correlation(one, other) for other in others) < limit
    for apart in (1, 2, 3, 64, 1000):
        assert correlation(one[:, apart:], one[:, :-apart]) < 1.2 * limit
    for apart in (1, 2, 5):
        assert correlation(one[apart:], one[:-apart]) < 1.5 * limit


def test_eight_neighbours_take_all_patterns_alike():
    bits = masks(0.5, count=64, width=8192).view(-1, 8)
    counts = (bits * 2 ** torch.arange(8.0)).sum(1).long().bincount(minlength=256)
    expected = len(bits) / 256
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_squared - 255) < 4 * (2 * 255) ** 0.5


def test_the_second_call_of_a_module_has_masks_of_its_own_until_the_position_moves():
    drop, draw = dropping()
    ones = torch.ones(4, 100)
    at(draw, 0, 0, 4)
    first, second = drop(ones), drop(ones)
    assert not torch.equal(first, second)
    before = draw.taken()
    at(draw, 0, 0, 4)
    assert torch.equal(drop(ones), first)
    with draw.back_at(before):
        assert not torch.equal(drop(ones), second)
    assert torch.equal(drop(ones), second)


def test_nothing_is_dropped_in_eval_nor_at_zero_and_everything_at_one():
    x = torch.randn(4, 9)
    drop, draw = dropping()
    at(draw, count=4)
    drop.eval()
    assert drop(x) is x
    assert dropping(p=0.0)[0](x) is x
    assert not dropping(p=1.0)[0](x).any()
    assert not dropping(nn.AlphaDropout, p=1.0)[0](x).any()


@pytest.mark.parametrize(
    ("kind", "shape", "whole_from"),
    [
        (nn.Dropout, (6, 8, 5), None),
        (nn.Dropout1d, (6, 8, 5), 2),
        (nn.Dropout2d, (6, 8, 5, 5), 2),
        (nn.Dropout2d, (6, 8, 5), 2),
        (nn.Dropout3d, (6, 8, 2, 5, 5), 2),
        (nn.Dropout2d, (6, 80), None),
        (nn.Dropout1d, (6, 80), 1),
        (nn.AlphaDropout, (6, 8, 5), None),
        (nn.FeatureAlphaDropout, (6, 8, 5), 2),
    ],
)
@pytest.mark.parametrize("p", [0.3, 0.8])
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_each_kind_gives_the_values_torch_gives_and_drops_what_belongs_together(
    kind, shape, whole_from, p
):
    drop, draw = dropping(kind, p)
    at(draw, count=6)
    x = torch.randn(shape) + 10
    torch.manual_seed(0)
    ours, theirs = drop(x), kind(p)(x)
    # No kept value comes near: those are at 10.
    gone, gone_by_torch = (torch.isclose(y, y.min()) for y in (ours, theirs))
    assert gone.any()
    both = ~gone & ~gone_by_torch
    torch.testing.assert_close(ours[both], theirs[both])
    torch.testing.assert_close(ours[gone].mean(), theirs[gone_by_torch].mean())
    if whole_from is not None:
        flat = gone.flatten(whole_from)
        assert torch.equal(flat.all(-1), flat.any(-1))


def test_gradients_pass_where_values_do_and_in_place_is_in_place():
    drop, draw = dropping()
    at(draw, count=4)
    x = torch.randn(4, 9, requires_grad=True)
    out = drop(x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.where(out == 0, 0.0, 1 / 0.7))
    drop.inplace = True
    at(draw, count=4)
    y = x.detach().clone()
    assert drop(y) is y
    torch.testing.assert_close(y, out)
    assert drop(y.bfloat16()).dtype == torch.bfloat16


def test_a_copy_draws_where_the_model_draws():
    model, draw = nn.Sequential(nn.Dropout(0.5)), Draw()
    make_invariant(model, draw, 0)
    twin = copy.deepcopy(model)
    model.eval()
    at(draw, 5, 7, 3)
    ones = torch.ones(3, 20)
    mine = twin(ones)
    assert not torch.equal(mine, ones)
    at(draw, 5, 7, 3)
    assert torch.equal(model.train()(ones), mine)


def test_what_has_a_forward_of_its_own_is_left_alone():
    class Half(nn.Dropout):
        def forward(self, input):
            return input / 2

    model = nn.Sequential(Half(0.5))
    make_invariant(model, Draw(), 0)
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 0.5))


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d])
@pytest.mark.parametrize("dim", [1, 2])
def test_ranks_that_share_a_tensor_drop_what_one_process_drops(kind, dim):
    x = torch.randn(3, 8, 6)
    full_shapes = {"drop": [(1, 8, 6)]}
    drop, draw = dropping(kind)
    at(draw, first=9, count=3)
    whole = drop(x)
    parts = []
    for index, mine in enumerate(x.chunk(2, dim)):
        drop, draw = dropping(kind, full_shapes=full_shapes, index=index, of=2)
        at(draw, first=9, count=3)
        parts.append(drop(mine))
        at(draw, first=9, count=3)
        assert torch.equal(drop(x), whole)  # held by every rank as a whole
    assert torch.equal(torch.cat(parts, dim), whole)


def test_each_call_has_a_shape_of_its_own():
    # In a block: within the perceptron, where ranks have half each, and behind it.
    full_shapes = {"drop": [(1, 8), (1, 4)]}
    wide, narrow = torch.ones(3, 8), torch.ones(3, 4)
    drop, draw = dropping()
    at(draw, count=3)
    whole = drop(wide), drop(narrow)
    for index in range(2):
        drop, draw = dropping(full_shapes=full_shapes, index=index, of=2)
        at(draw, count=3)
        assert torch.equal(drop(wide.chunk(2, 1)[index]), whole[0].chunk(2, 1)[index])
        assert torch.equal(drop(narrow), whole[1])


def test_ranks_draw_alike_what_fits_no_part():
    x = torch.ones(3, 5)
    outs = []
    for index in range(2):
        drop, draw = dropping(full_shapes={"drop": [(3, 8)]}, index=index, of=2)
        at(draw, count=3)
        outs.append(drop(x))
    assert torch.equal(*outs)


def spread_rows(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0))
    drop, draw = dropping()
    outs = []
    for dim in (1, 2):
        at(draw, count=3)
        whole = drop(x.clone())
        at(draw, count=3)
        mine = DTensor.from_local(x.chunk(2, dim)[rank], mesh, [Shard(dim)]).requires_grad_()
        out = drop(mine)
        out.sum().backward()
        assert isinstance(mine.grad, DTensor)
        outs.append(bool(torch.equal(out.full_tensor(), whole)))
        outs.append(bool(((mine.grad.full_tensor() == 0) == (whole == 0)).all()))
    dist.barrier()
    return outs


def test_a_dtensor_knows_its_part():
    assert procs.ranks(2, spread_rows) == [[True] * 4] * 2


def test_it_costs_no_more_than_twice_torchs():
    x = torch.randn(16, 128, 384)
    drop, draw = dropping(p=0.1)
    at(draw, count=16)
    times = {"ours": [], "torch": []}
    for _ in range(9):
        for name, call in (("ours", drop), ("torch", lambda x: functional.dropout(x, 0.1))):
            began = time.perf_counter()
            call(x)
            times[name].append(time.perf_counter() - began)
    assert min(times["ours"]) < 2 * min(times["torch"])

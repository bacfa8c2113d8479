import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.engine.procs import ranks
from workbench.engine.clipping import clip
from workbench.engine.held import Held, TensorCut
from workbench.spec.layout import AXES, Layout, parse_layout

SHAPES = {"first": (8, 4), "column": (12, 4), "row": (4, 12), "bias": (5,), "unused": (3,)}
CUTS = {"column": 0, "row": 1}
# On which of two pipeline ranks a parameter lies; "first" is tied over both.
STAGES = {"first": (0, 1), "column": (0,), "row": (0,), "bias": (1,), "unused": (1,)}
LAYOUTS = ["dp2", "fsdp4", "tp4", "fsdp2 tp2", "dp2 tp2", "dp2 fsdp2", "pp2 tp2", "pp2 fsdp2"]


def whole_model():
    torch.manual_seed(0)
    model = nn.Module()
    for name, shape in SHAPES.items():
        param = nn.Parameter(torch.randn(shape))
        param.grad = None if name == "unused" else 3 * torch.randn(shape)
        model.register_parameter(name, param)
    return model


def part_of(tensor, name, layout, rank, mesh):
    """What a rank holds of a tensor: its tensor-parallel part, of that its shard."""
    if name in CUTS:
        tensor = tensor.chunk(layout.tp, CUTS[name])[layout.coordinate(rank)["tp"]].contiguous()
    return (
        distribute_tensor(tensor, mesh["dp_shard"], [Shard(0)]) if layout.dp_shard > 1 else tensor
    )


def held_by(rank, layout, mesh):
    whole, model = whole_model(), nn.Module()
    where = layout.coordinate(rank)
    for name, param in whole.named_parameters():
        if layout.pp == 1 or where["pp"] in STAGES[name]:
            part = nn.Parameter(part_of(param.detach(), name, layout, rank, mesh))
            if param.grad is not None:
                part.grad = part_of(param.grad, name, layout, rank, mesh)
            model.register_parameter(name, part)
    cuts = {name: TensorCut(dim, where["tp"], layout.tp) for name, dim in CUTS.items()}
    return Held([model], cuts if layout.tp > 1 else {})


def _clip(rank, text, max_norm):
    layout = parse_layout(text)
    mesh = init_device_mesh("cpu", tuple(layout.degrees().values()), mesh_dim_names=AXES)
    held = held_by(rank, layout, mesh)
    norm = clip(held, max_norm, layout, holders={"first": layout.pp})
    whole = whole_model()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm).item()
    for name, param in held.named_parameters():
        grad = whole.get_parameter(name).grad
        assert (param.grad is None) == (grad is None)
        if grad is not None:
            right = part_of(grad, name, layout, rank, mesh)
            torch.testing.assert_close(param.grad, right, rtol=1e-6, atol=1e-9)
    return norm, expected


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_norm_is_that_of_one_process_and_gradients_are_scaled_by_it(text):
    for norm, expected in ranks(parse_layout(text).world_size, _clip, text, 0.7):
        assert norm == pytest.approx(expected, rel=1e-6)


def test_a_norm_below_the_limit_leaves_gradients_alone():
    whole = whole_model()
    norm = clip(Held([whole_model()]), 1e3, Layout())
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(whole.parameters(), 1e3).item())
    held = whole_model()
    before = held.first.grad.clone()
    clip(Held([held]), 1e3, Layout())
    assert torch.equal(held.first.grad, before)


def test_replicas_alone_send_nothing():
    # There is no process group here to send with.
    assert clip(Held([whole_model()]), 1.0, Layout(dp_replicate=2)) > 1.0


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_gradients_that_are_not_finite_stay_and_tell_where(value):
    model = whole_model()
    model.bias.grad[0] = value
    first = model.first.grad.clone()
    assert not math.isfinite(clip(Held([model]), 1.0, Layout()))
    assert torch.equal(model.first.grad, first)
    assert not model.bias.grad[0].isfinite()

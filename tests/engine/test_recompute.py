import contextlib
import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.nn.utils.parametrizations import spectral_norm

from tests.engine.procs import ranks
from workbench.engine.batchnorm import make_exact
from workbench.engine.dropout import Draw, make_invariant
from workbench.engine.recompute import recompute

WIDTH, BLOCKS = 6, 3


class Drifting(nn.Module):
    """Subtracts a mean that it moves at each forward, as a new tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        """x [n, WIDTH] -> the same, times how far it is from the mean."""
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x * (x.detach() - self.mean)


class Inner(nn.Module):
    """Keeps a weak reference to what it computes last."""

    def __init__(self, norm):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = norm
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.last = lambda: None

    def forward(self, x, *, scale=1.0):
        """x [n, WIDTH] -> the same."""
        inside = self.drop(torch.tanh(self.norm(self.up(x))))
        self.last = weakref.ref(inside)
        return x + scale * self.drop(self.down(inside))


NORMS = {
    "batch": lambda: nn.BatchNorm1d(WIDTH),
    "cumulative batch": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "spectral": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "drifting": Drifting,
    "layer": lambda: nn.LayerNorm(WIDTH),
}


def stack(norm):
    """A model and its twin that recomputes, each with a position to draw dropout at."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Inner(NORMS[norm]()) for _ in range(BLOCKS)))
    pair = []
    for net in (model, copy.deepcopy(model)):
        draw = Draw()
        make_invariant(net, draw, 0)
        pair.append((net, draw))
    recompute(list(pair[1][0]))
    return pair


def two_microbatches(net, draw, context=contextlib.nullcontext):
    """Both forwards before both backwards, as a pipeline has them: outputs and grads."""
    outs = []
    inputs = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1))
    for index, x in enumerate(inputs):
        draw.step, draw.first, draw.count = 3, 4 * index, 4
        with context():
            outs.append(net(x).square().sum())
    for out in outs:
        out.backward()
    return [*outs, *(param.grad for param in net.parameters())]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_dropout_and_buffers_are_those_without(norm, precision):
    def context():
        on = precision == "bf16"
        return torch.autocast("cpu", torch.bfloat16, enabled=on)

    (plain, draw), (again, its_draw) = stack(norm)
    for _ in range(2):
        expected = two_microbatches(plain, draw, context)
        found = two_microbatches(again, its_draw, context)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        states = plain.state_dict(), again.state_dict()
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        assert draw == its_draw


def test_the_inside_is_gone_after_the_forward_and_comes_back():
    for (net, draw), is_kept in zip(stack("layer"), (True, False), strict=True):
        draw.count = 4
        out = net(torch.ones(4, WIDTH))
        assert [block.last() is not None for block in net] == [is_kept] * BLOCKS
        out.sum().backward()
        assert all(param.grad is not None for param in net.parameters())


def test_without_a_way_back_nothing_is_prepared_and_keywords_pass():
    (plain, _), (again, _) = stack("batch")
    x = torch.ones(4, WIDTH)
    with torch.no_grad():
        expected = plain.eval()[0](x, scale=0.5)
        assert torch.equal(again.eval()[0](x, scale=0.5), expected)
    assert torch.equal(again[0](x, scale=0.5), expected)


def test_functional_dropout_draws_the_same_again():
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    twin = copy.deepcopy(block)
    recompute([twin])
    x = torch.ones(4, WIDTH)
    for net in (block, twin):
        torch.manual_seed(0)
        net(x).square().sum().backward()
    assert torch.equal(block[0].weight.grad, twin[0].weight.grad)


def sharded(rank):
    """Whether each gradient of FSDP2 over recomputed blocks is that of the plain model."""
    mesh = init_device_mesh("cpu", (2,))
    (plain, draw), (again, its_draw) = stack("batch")
    make_exact(again, dist.group.WORLD)
    for block in again:
        fully_shard(block, mesh=mesh)
    fully_shard(again, mesh=mesh)
    for net, position in ((plain, draw), (again, its_draw)):
        generator = torch.Generator().manual_seed(1)
        for step in range(2):
            x = torch.randn(4, WIDTH, generator=generator)
            position.step, position.count = step, 4
            if net is again:
                position.first, position.count, x = 2 * rank, 2, x[2 * rank :][:2]
            loss = net(x).square().sum()
            (loss * 2 if net is again else loss).backward()
    pairs = zip(plain.parameters(), again.parameters(), strict=True)
    right = [torch.allclose(a.grad, b.grad.full_tensor(), rtol=1e-5, atol=1e-5) for a, b in pairs]
    buffers = zip(plain.buffers(), again.buffers(), strict=True)
    return right, [torch.allclose(a, b, atol=1e-6) for a, b in buffers]


def test_fsdp_on_recomputed_blocks_with_exact_batchnorm():
    for right, buffers in ranks(2, sharded):
        assert right == [True] * (BLOCKS * 6)
        assert buffers == [True] * (BLOCKS * 3)


def piped(rank):
    """Gradients under a schedule that splits the way back in two, against the plain model."""
    (plain, draw), (again, _) = stack("layer")
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    # Two stages a rank, and one block more than the stack has; the same on both ranks.
    last = Inner(nn.LayerNorm(WIDTH))
    with torch.no_grad():
        for param in last.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel()).sin().view_as(param))
    plain.append(copy.deepcopy(last))
    again.append(last)
    for net in (plain, again):
        net.eval()
    recompute([last])
    draw.count = 4
    plain(inputs).square().sum().backward()
    like = torch.empty(1, WIDTH, device="meta", requires_grad=True)
    stages = [
        PipelineStage(again[n], n, 4, torch.device("cpu"), input_args=(like,), output_args=(like,))
        for n in (rank, rank + 2)
    ]
    schedule = ScheduleInterleavedZeroBubble(
        stages, 4, loss_fn=lambda out, _: out.square().sum(), scale_grads=False
    )
    args = (inputs,) if rank == 0 else ()
    how = {"target": torch.zeros(4), "losses": []} if rank == 1 else {}
    schedule.step(*args, return_outputs=False, **how)
    mine = [
        torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-4)
        for n in (rank, rank + 2)
        for a, b in zip(plain[n].parameters(), again[n].parameters(), strict=True)
    ]
    return mine


def test_a_schedule_that_splits_the_way_back_recomputes_for_both_halves():
    for right in ranks(2, piped):
        assert right == [True] * 12

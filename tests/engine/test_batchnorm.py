import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine.procs import ranks
from workbench.engine.batchnorm import is_batchnorm, make_exact

SHARES = [5, 1, 3]

CASES = {
    "1d": (nn.BatchNorm1d(4), (4,)),
    "1d of sequences": (nn.BatchNorm1d(4), (4, 6)),
    "2d": (nn.BatchNorm2d(4), (4, 3, 3)),
    "3d": (nn.BatchNorm3d(4), (4, 2, 3, 2)),
    "cumulative": (nn.BatchNorm2d(4, momentum=None), (4, 3, 3)),
    "without weight and bias": (nn.BatchNorm2d(4, affine=False), (4, 3, 3)),
    "without running statistics": (nn.BatchNorm2d(4, track_running_stats=False), (4, 3, 3)),
    "other constants": (nn.BatchNorm1d(4, eps=0.1, momentum=0.7), (4,)),
}


def compared(norm, x, targets, rank, group=None):
    """Largest differences from one process after three steps, and what was compared."""
    model = nn.Sequential(nn.Conv2d(4, 4, 1) if x.ndim == 4 else nn.Identity(), norm)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
    plain = copy.deepcopy(model)
    make_exact(model, group or dist.group.WORLD)
    mine = slice(sum(SHARES[:rank]), sum(SHARES[: rank + 1]))
    worst = {}
    for step in range(3):
        inputs = [(x + step)[mine].clone().requires_grad_(), (x + step).clone().requires_grad_()]
        outs = [net(inp) for net, inp in zip((model, plain), inputs, strict=True)]
        # A sum over samples, as the trainer weighs losses: no rank's mean.
        (outs[0].tanh() * targets[mine]).sum().backward()
        (outs[1].tanh() * targets).sum().backward()
        pairs = {"output": (outs[0], outs[1][mine]), "x": (inputs[0].grad, inputs[1].grad[mine])}
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            dist.all_reduce(ours.grad)
            pairs[f"grad of {name}"] = (ours.grad, theirs.grad)
        for (name, ours), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
            assert ours.dtype == theirs.dtype
            pairs[name] = (ours.double(), theirs.double())
        for name, (ours, theirs) in pairs.items():
            differs = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1.0)
            worst[name] = max(worst.get(name, 0.0), differs.item())
        for param in (*model.parameters(), *plain.parameters()):
            param.grad = None
    inputs = x[mine]
    worst["eval"] = (model.eval()(inputs) - plain.eval()(inputs)).abs().max().item()
    return worst


def spread(rank):
    found = {}
    for name, (norm, shape) in CASES.items():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(sum(SHARES), *shape, generator=generator) * 3 + 2
        targets = torch.randn(x.shape, generator=generator)
        found[name] = compared(copy.deepcopy(norm), x, targets, rank)
    return found


def test_outputs_gradients_and_running_statistics_are_those_of_one_process():
    for found in ranks(len(SHARES), spread):
        assert found.keys() == CASES.keys()
        assert len(found["2d"]) == 10
        wrong = {k: v for case, worst in found.items() for k, v in worst.items() if not v < 2e-6}
        assert not wrong


def far_from_zero(rank):
    x = torch.randn(sum(SHARES), 4, 6, generator=torch.Generator().manual_seed(0)) + 10_000
    mine = slice(sum(SHARES[:rank]), sum(SHARES[: rank + 1]))
    norm = nn.BatchNorm1d(4)
    make_exact(norm, dist.group.WORLD)
    out, true = norm(x[mine]).double(), nn.BatchNorm1d(4).double()(x.double())[mine]
    return (out - true).abs().max().item()


def test_a_large_mean_costs_no_digits():
    # A difference of squares of 1e8 would leave no digit of a variance of 1; floats at 1e4 are
    # themselves 1e-3 apart.
    assert max(ranks(len(SHARES), far_from_zero)) < 2e-3


def under_bfloat16(rank):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SHARES), 4, 3, 3, generator=generator)
    mine = slice(sum(SHARES[:rank]), sum(SHARES[: rank + 1]))
    norm = nn.BatchNorm2d(4)
    plain = copy.deepcopy(norm)
    make_exact(norm, dist.group.WORLD)
    inputs = [part.bfloat16().requires_grad_() for part in (x[mine], x)]
    outs = [norm(inputs[0]), plain(inputs[1])[mine]]
    outs[0].square().sum().backward()
    plain(inputs[1]).square().sum().backward()
    grads = inputs[0].grad, inputs[1].grad[mine]
    return [
        outs[0].dtype == grads[0].dtype == torch.bfloat16,
        norm.running_mean.dtype == norm.weight.grad.dtype == torch.float32,
        (outs[0] - outs[1]).abs().max().item() < 0.02,
        (grads[0] - grads[1]).abs().max().item() < 0.02,
    ]


def test_bfloat16_inputs_have_statistics_of_float32():
    assert ranks(len(SHARES), under_bfloat16) == [[True] * 4] * len(SHARES)


def in_a_copy(rank):
    model = nn.Sequential(nn.BatchNorm1d(4))
    make_exact(model, dist.group.WORLD)
    twin = copy.deepcopy(model)
    twin(torch.full((2, 4), float(rank)))
    return model[0].running_mean[0].item(), twin[0].running_mean[0].item()


def test_a_copy_has_statistics_of_its_own():
    assert ranks(2, in_a_copy) == [pytest.approx((0.0, 0.05))] * 2


def test_only_torchs_own_are_taken():
    class Ghost(nn.BatchNorm2d):
        def forward(self, input):
            return input

    assert is_batchnorm(nn.BatchNorm3d(2))
    assert not is_batchnorm(Ghost(2))
    assert not is_batchnorm(nn.InstanceNorm2d(2))

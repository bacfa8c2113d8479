"""Flops: floating-point operations of a step, counted by torch on tensors without values.

What model flops utilisation counts: matrix products, convolutions, attention and recurrent layers,
forward and backward, each once, however often a strategy computes them.

Source: Chowdhery et al. 2022, "PaLM", appendix B, https://arxiv.org/abs/2204.02311
"""

from __future__ import annotations

import functools
import math
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from workbench.engine.nest import tensors
from workbench.engine.recipe import Recipe
from workbench.engine.skeleton import fake_like, faked

SAMPLES = 2
# Of the peak: the best of so many short times, so that one busy moment does not spoil it.
WINDOWS, WINDOW_S = 5, 0.02
SIZES = {"cpu": (96, 384), "else": (512, 4096)}


def per_sample(bones: nn.Module, recipe: Recipe, device: torch.device) -> float | None:
    """Operations of forward and backward of one sample, but for those of the loss.

    None where values are needed to run, or where a product has no formula.
    """
    count = min(SAMPLES, recipe.batch)
    inputs, _ = recipe.samples.fetch(0, count)
    try:
        with faked(bones, device) as (model, mode):
            x = fake_like(inputs, mode, device)
            counter = FlopCounterMode(display=False, custom_mapping=_unknown_to_torch())
            with mode, counter, torch.enable_grad():
                # Not the loss, which may count its calls, and rarely has products in it.
                outputs = [one.sum() for one in tensors(model(x)) if one.requires_grad]
                known = counter.flop_registry.items()
                counter.flop_registry = {op: _but_recomputed(formula) for op, formula in known}
                torch.stack(outputs).sum().backward()
    except Exception:  # noqa: BLE001 - the user's code may look at values
        return None
    return counter.get_total_flops() / count


def peak_per_s(device: torch.device, dtype: torch.dtype, *, is_active: bool) -> float:
    """Operations a second that this rank can do in matrix products while all active ones do.

    0.0 where it is not active. Collective over all ranks. Ranks on a CPU share its cores evenly,
    and as many measure at once as it has cores for: more would only take turns.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    is_cpu = device.type == "cpu"
    host = socket.gethostname() if is_cpu else f"rank {rank}"
    every: list[Any] = [None] * size
    dist.all_gather_object(every, (host, is_active, _cores()))
    sharers = [r for r, (where, active, _) in enumerate(every) if active and where == host]
    num_cores = len(set().union(*(every[r][2] for r in sharers)))
    num_at_once = max(1, num_cores // torch.get_num_threads()) if is_cpu else 1
    at_once = sharers[:num_at_once]
    best = 0.0
    factors = _factors(device, dtype) if rank in at_once else None
    for _ in range(WINDOWS):
        dist.barrier()
        if factors is not None:
            best = max(best, _rate(*factors, WINDOW_S))
    told: list[Any] = [None] * size
    dist.all_gather_object(told, best)
    if not is_active:
        return 0.0
    # Cores are alike; whoever was disturbed in every window is not the measure of the others.
    return statistics.median_high(told[r] for r in at_once) * len(at_once) / len(sharers)


def _cores() -> set[int]:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _factors(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two matrices, as large as is worth a device's while, and multiplied well within a window.

    A CPU may compute a precision that it does not know a hundred times slower.
    """
    size, largest = SIZES["cpu" if device.type == "cpu" else "else"]
    while True:
        a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        _rate(a, b, 0.0)  # the first is slower: libraries get ready
        next_s = 2 * (2 * size) ** 3 / _rate(a, b, 0.0)
        if size == largest or next_s > WINDOW_S / 2:
            return a, b
        size *= 2


def _rate(a: Tensor, b: Tensor, at_least_s: float) -> float:
    """Operations a second of their product, again and again for a while."""
    if a.device.type != "cpu":
        torch.accelerator.synchronize()
    began_s, count, took_s = time.perf_counter(), 0, 0.0
    while not count or took_s < at_least_s:
        torch.mm(a, b)
        if a.device.type != "cpu":
            torch.accelerator.synchronize()
        count += 1
        took_s = time.perf_counter() - began_s
    return 2 * len(a) ** 3 * count / took_s


def _but_recomputed(formula: Callable[..., int]) -> Callable[..., int]:
    """Zero for what runs on the way back with gradients enabled: a forward that is done again."""

    @functools.wraps(formula)
    def counted(*args: Any, **kwargs: Any) -> int:
        return 0 if torch.is_grad_enabled() else formula(*args, **kwargs)

    return counted


def _unknown_to_torch() -> dict[Any, Any]:
    """Formulas that torch's counter lacks: attention on a CPU, and fused recurrent layers.

    Tensors come as their shapes. Raises NotImplementedError for a product without a formula.
    """
    ops = torch.ops.aten

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return _attention(query, key, value)

    def backward(_grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        # Scores again, and the gradients of values, scores, queries and keys: five of two products.
        return _attention(query, key, value) * 5 // 2

    def layer(x: Any, from_x: Any, from_state: Any, *_: Any, **__: Any) -> int:
        return _recurrent(x, [from_x, from_state])

    def layers(x: Any, weights: Any, *_: Any, **__: Any) -> int:
        return _recurrent(x, weights)

    return {
        ops._scaled_dot_product_flash_attention_for_cpu: forward,
        ops._scaled_dot_product_flash_attention_for_cpu_backward: backward,
        ops.mkldnn_rnn_layer: layer,
        ops.mkldnn_rnn_layer_backward: _twice(layer),
        ops._cudnn_rnn: layers,
        ops._cudnn_rnn_backward: _twice(layers),
        ops.miopen_rnn: layers,
        ops.miopen_rnn_backward: _twice(layers),
        ops._trilinear: _no_formula,  # nn.Bilinear
    }


def _twice(formula: Callable[..., int]) -> Callable[..., int]:
    """The way back of products: a gradient for each of the two factors."""
    return lambda *args, **kwargs: 2 * formula(*args, **kwargs)


def _no_formula(*_: Any, **__: Any) -> int:
    raise NotImplementedError


def _recurrent(x: Any, weights: Any) -> int:
    """Every row of x [..., width] meets every weight once; vectors are biases. Shapes."""
    return 2 * math.prod(x[:-1]) * sum(math.prod(one) for one in weights if len(one) > 1)


def _attention(query: Any, key: Any, value: Any) -> int:
    """Two products; query [n, heads, q, width], key and value [n, heads, k, width], or shapes."""
    q, k, v = (x.shape if isinstance(x, Tensor) else x for x in (query, key, value))
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])

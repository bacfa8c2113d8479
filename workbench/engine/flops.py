"""Flops: floating-point operations of a step, counted by torch on tensors without values.

What model flops utilisation counts: matrix products, convolutions, attention and recurrent layers,
forward and backward, each once, however often a strategy computes them.

Source: Chowdhery et al. 2022, "PaLM", appendix B, https://arxiv.org/abs/2204.02311
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from workbench.engine.nest import tensors
from workbench.engine.recipe import Recipe
from workbench.engine.skeleton import fake_like, faked

SAMPLES = 2
PEAK_S = 0.03
# Large enough to be worth a core's or a GPU's while.
PEAK_SIZE = {"cpu": 384}
PEAK_SIZE_ELSE = 4096


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


def peak_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a matrix product on this rank's device, as busy as it is now."""
    size = PEAK_SIZE.get(device.type, PEAK_SIZE_ELSE)
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    count, best = 0, 0.0
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < PEAK_S or count < 3:
        before_s = time.perf_counter()
        torch.mm(a, b)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        best = max(best, 2 * size**3 / (time.perf_counter() - before_s))
        count += 1
    total = 2 * size**3 * count / (time.perf_counter() - began_s)
    # Ranks that share a core take turns: the mean, not the best, is what this one may have.
    return total if device.type == "cpu" else best


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

"""Flops: floating-point operations of a step, counted by torch on tensors without values.

What model flops utilisation counts: matrix products, convolutions and attention, forward and
backward, each once, however often a strategy computes them.

Source: Chowdhery et al. 2022, "PaLM", appendix B, https://arxiv.org/abs/2204.02311
"""

from __future__ import annotations

import time
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

    None where values are needed to run.
    """
    count = min(SAMPLES, recipe.batch)
    inputs, _ = recipe.samples.fetch(0, count)
    try:
        with faked(bones, device) as (model, mode):
            x = fake_like(inputs, mode, device)
            counter = FlopCounterMode(display=False, custom_mapping=_on_cpu())
            with mode, counter, torch.enable_grad():
                # Not the loss, which may count its calls, and has no products in it.
                outputs = [one.sum() for one in tensors(model(x)) if one.requires_grad]
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


def _on_cpu() -> dict[Any, Any]:
    """Attention on a CPU, which torch's counter does not know."""
    ops = torch.ops.aten

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return _attention(query, key, value)

    def backward(_grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        # Scores again, and the gradients of values, scores, queries and keys: five of two products.
        return _attention(query, key, value) * 5 // 2

    return {
        ops._scaled_dot_product_flash_attention_for_cpu: forward,
        ops._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }


def _attention(query: Any, key: Any, value: Any) -> int:
    """Two products; query [n, heads, q, width], key and value [n, heads, k, width], or shapes."""
    q, k, v = (x.shape if isinstance(x, Tensor) else x for x in (query, key, value))
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])

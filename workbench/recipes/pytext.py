"""A byte-level GPT that learns to write like Python's documentation (pydoc_data.topics).

A sample is CONTEXT bytes and the same text one byte further on. Pre-norm blocks, learned
positions, no dropout.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
CONTEXT = 128
HELD_OUT_EVERY = 10
EVALUATED = 32
WARMUP_STEPS = 20

batch = 16
unit = "tokens"


@dataclass(frozen=True)
class Size:
    """width of the residual stream, number of blocks, attention heads per block."""

    width: int
    blocks: int
    heads: int


# 0.9, 10.8 and 31.9 M parameters.
SIZES = {"tiny": Size(128, 4, 4), "small": Size(384, 6, 6), "medium": Size(512, 10, 8)}


def _start(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the stream: [n, t, width] to same."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.head_width = size.width // size.heads
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)
        self.apply(_start)
        for last in (self.out, self.down):
            # Keeps the variance of the stream the same however many blocks add to it.
            nn.init.normal_(last.weight, std=0.02 / (2 * size.blocks) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, t, width] -> [n, t, width]."""
        # [n, t, 3 * width] -> three of [n, t, heads, head_width]. The heads come first in the rows
        # of qkv: any run of whole heads can then be computed on a rank of its own.
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_width)).unbind(-2)
        heads = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Bytes [n, t] to logits [n, t, VOCABULARY] of the next byte."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(CONTEXT, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for module in (self.token, self.position, self.head):
            _start(module)

    def forward(self, text: Tensor) -> Tensor:
        """text [n, t], any integer type -> logits [n, t, VOCABULARY]."""
        places = torch.arange(text.shape[1], device=text.device)
        x = self.token(text.long()) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@functools.cache
def _text() -> tuple[Tensor, Tensor]:
    """Bytes (uint8) to train on, and held out: every tenth topic, in the order of the names."""
    from pydoc_data.topics import topics

    pages = [topics[name].encode() for name in sorted(topics)]
    held_out = b"\n\n".join(pages[::HELD_OUT_EVERY])
    del pages[::HELD_OUT_EVERY]
    train = b"\n\n".join(pages)
    return tuple(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out))  # type: ignore[return-value]


def _windows(text: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    # Views of the text: no byte is copied before it is asked for.
    return text[:-1].unfold(0, CONTEXT, stride), text[1:].unfold(0, CONTEXT, stride)


def model(size: str) -> nn.Module:
    """A Gpt of one of SIZES."""
    return Gpt(SIZES[size])


def data() -> tuple[Tensor, Tensor]:
    """Windows [n, CONTEXT] of the text, each half over the one before."""
    return _windows(_text()[0], CONTEXT // 2)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats: output [n, t, VOCABULARY], target [n, t]."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten().long())


def optimizer(params) -> torch.optim.Optimizer:
    """AdamW as is usual for GPTs."""
    return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def lr(step: int) -> float:
    """Rises over WARMUP_STEPS to 1e-3 and stays."""
    return 1e-3 * min(1.0, (step + 1) / WARMUP_STEPS)


@torch.no_grad()
def evaluate(model: nn.Module) -> dict[str, float]:
    """Loss on EVALUATED windows spread over the held-out text."""
    device = next(model.parameters()).device
    text = _text()[1].to(device)
    inputs, targets = _windows(text, (len(text) - CONTEXT - 1) // (EVALUATED - 1))
    return {"held-out loss": loss(model(inputs), targets).item()}

"""Models that tensor parallelism must cut rightly, or leave whole."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from workbench.recipes import pytext

WIDTH, HEADS, WORDS, PADDING = 16, 4, 64, 35


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 12), nn.Linear(12, 3)
    )


class Swiglu(nn.Module):
    """Two layers side by side, then one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 8)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Separate q, k, v; the number of heads is an attribute that the views go by."""

    def __init__(self, heads=HEADS) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def split(self, x):
        batch, time, _ = x.shape
        return x.view(batch, time, self.num_heads, -1).transpose(1, 2)

    def mix(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    def forward(self, x):
        return self.out(self.mix(x))


class Hidden(Attention):
    """The number of heads is written where nothing can find it."""

    def split(self, x):
        batch, time, _ = x.shape
        return x.view(batch, time, 4, -1).transpose(1, 2)


class Fused(Attention):
    """Rows of one layer in the order (3, heads): a run of them is no whole number of heads."""

    def __init__(self) -> None:
        super().__init__()
        del self.q, self.k, self.v
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def mix(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Scaled(Attention):
    """A trained scale between the layers: each rank would get a part of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.out(self.mix(x) * self.scale)


class Remembers(Attention):
    """What lies between the layers is kept for a loss of its own."""

    def forward(self, x):
        self.mixed = self.mix(x)
        return self.out(self.mixed)


class Block(nn.Module):
    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = attention()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(functional.gelu(self.up(x)))


class Words(nn.Module):
    """Embedding, blocks, head: tied or not, by module or by function."""

    def __init__(self, attention=Attention, tied="") -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))
        if tied != "function":
            self.head = nn.Linear(WIDTH, WORDS, bias=tied == "")
        if tied == "module":
            self.head.weight = self.token.weight

    def forward(self, ids):
        x = self.token(ids)
        for block in self.blocks:
            x = block(x)
        if not hasattr(self, "head"):
            return functional.linear(x, self.token.weight)
        return self.head(x)


def text() -> nn.Module:
    return pytext.Gpt(replace(pytext.SIZES["tiny"], width=32, blocks=2))


def _hugging_face(kind: str, **options) -> nn.Module:
    import transformers

    options = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0} | options
    config = getattr(transformers, f"{kind}Config")(**options)
    return Logits(transformers.AutoModelForCausalLM.from_config(config))


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids).logits


def llama(**options) -> nn.Module:
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return _hugging_face("Llama", **sizes, **options)


def gpt2() -> nn.Module:
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return _hugging_face("GPT2", n_embd=WIDTH, n_layer=2, n_head=4, n_positions=32, **drop)


def numbers() -> torch.Tensor:
    return torch.rand(3, 6)


def sequences() -> torch.Tensor:
    return torch.rand(2, 5, WIDTH)


def ids() -> torch.Tensor:
    made = torch.randint(0, WORDS, (2, 5))
    made[0, :2] = PADDING  # whose row gets no gradient from being looked up
    return made


# name -> how to make the model, its inputs, the degrees that must work
CASES = {
    "mlp": (mlp, numbers, (2, 4)),
    "swiglu": (Swiglu, numbers, (2, 4)),
    "attention": (Attention, sequences, (2, 4)),
    "words": (Words, ids, (2, 4)),
    "words with a fused qkv": (lambda: Words(Fused), ids, (2, 4)),
    "words with hidden heads": (lambda: Words(Hidden), ids, (2, 4)),
    "words with a trained scale": (lambda: Words(Scaled), ids, (2, 4)),
    "tied": (lambda: Words(tied="module"), ids, (2, 4)),
    "tied by function": (lambda: Words(tied="function"), ids, (2, 4)),
    "pytext": (text, ids, (2, 4)),
    "llama": (llama, ids, (2,)),
    "llama, eager and tied": (
        lambda: llama(attn_implementation="eager", tie_word_embeddings=True), ids, (2,),
    ),
    "gpt2": (gpt2, ids, (2,)),
}  # fmt: skip

HUGGING_FACE = {"llama", "llama, eager and tied", "gpt2"}


def case(name: str) -> tuple[nn.Module, torch.Tensor]:
    """The same model and inputs on every rank."""
    make, inputs, _ = CASES[name]
    torch.manual_seed(0)
    return make(), inputs()

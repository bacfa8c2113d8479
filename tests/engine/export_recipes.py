"""Recipes of cells that the tests of export write down as scripts."""

from __future__ import annotations

# Tied embeddings, a parameter and a buffer of its own, attention with heads, blocks in a list.
GPT = '''"""A small language model."""
import torch
from torch import nn
from torch.nn import functional as F

batch, seed, WIDTH, WORDS = 16, 3, 16, 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads = 8
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        n, t, _ = x.shape
        y = self.norm(x)
        parts = [f(y).view(n, t, self.heads, -1) for f in (self.q, self.k, self.v)]
        q, k, v = [part.transpose(1, 2) for part in parts]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.o(y.reshape(n, t, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Parameter(torch.randn(6, WIDTH) * 0.02)
        self.register_buffer("scale", torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids):
        x = self.token(ids) * self.scale + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model():
    return Net()


def data():
    ids = torch.randint(WORDS, (61, 7), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1], ids[:, 1:]


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)
'''

# A class with values and functions in it, samples that draw, nested inputs, names that a script
# would like for itself, two groups of parameters, one parameter without use and one frozen.
CLASS = """import random
import torch
from torch import nn
from torch.nn.functional import mse_loss

noise = torch.randn(5)
random_shift = random.random()


def order(x):
    return x.flip(-1)


class samples(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = torch.randn(23, 5)

    def __len__(self):
        return 23

    def __getitem__(self, place):
        x = self.rows[place]
        return {"x": x + random.random(), "mask": (x > 0).float()}, x[:2] + torch.rand(2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
        self.last = nn.Linear(5, 2)
        self.unused = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, inputs):
        x = self.layers(inputs["x"] + noise * random_shift) * self.frozen
        return self.last(order(x) * inputs["mask"])


class Recipe:
    batch = 8
    seed = 4
    loss = mse_loss

    def model():
        return Net()

    def data(self):
        return samples()

    def optimizer(self, params):
        params = list(params)
        matrices = [p for p in params if p.ndim > 1]
        rest = [p for p in params if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0}]
        return torch.optim.AdamW(groups)

    def lr(self, step):
        return 0.01 / (step + 1)
"""

# A first part that is frozen, kept from the optimizer, and parameters in a list.
FROZEN = """import torch
from torch import nn

batch = 12


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(2))
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)) * self.weights[0] + self.weights[1])


def model():
    net = nn.Sequential(*(Scaled() for _ in range(4)))
    net[0].requires_grad_(False)
    return net


def batch_of(numbers):
    x = (numbers.view(-1, 1) + torch.arange(4)) % 5 - 2.0
    return x, x.flip(1)


loss = nn.functional.mse_loss


def optimizer(params):
    return torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1)
"""

# A function of sample numbers that draws, batch normalisation, no optimizer, a number as lr.
FUNCTION = """import torch
from torch import nn

batch = 12
lr = 0.003


def model():
    norm = nn.BatchNorm1d(6, affine=False)
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 1))


def batch_of(numbers):
    x = torch.randn(len(numbers), 4)
    return x, x.prod(1, keepdim=True) + numbers.view(-1, 1) % 3


loss = nn.functional.l1_loss
"""

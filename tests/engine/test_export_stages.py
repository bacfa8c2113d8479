"""Stages written as code give what the model gives, to the last bit, and read like code."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.zoo import ZOO, rows
from workbench.engine import recipe
from workbench.engine.cut import cut
from workbench.engine.export import stages
from workbench.engine.export.calls import Code, Writer
from workbench.engine.export.outputs import Outputs, access
from workbench.engine.export.paths import path
from workbench.engine.nest import tensors
from workbench.engine.skeleton import skeleton
from workbench.errors import LayoutError

CPU = torch.device("cpu")


def written(model: nn.Module, inputs, num: int) -> tuple[list[stages.StageText], Outputs, str]:
    """The classes, what is known of outputs, and the imports the classes need."""
    bones = skeleton(model)
    made = cut(bones, inputs, num, device=CPU)
    outputs = Outputs(made.stages, bones, inputs, CPU, None)
    writer = Writer(lambda _: Code(""), lambda _: None, frozenset(), "cpu")
    names = stages.input_names(bones, inputs, len(list(tensors(inputs))))
    texts = [stages.write(n, p, outputs, names, writer) for n, p in enumerate(made.stages)]
    return texts, outputs, "\n".join(map(str, writer.imports))


class Chain:
    """The stages of a model made from their text."""

    def __init__(self, model: nn.Module, inputs, num: int) -> None:
        self.texts, outputs, imports = written(model, inputs, num)
        self.names = stages.input_names(outputs.bones, inputs, len(list(tensors(inputs))))
        space: dict = {"torch": torch, "nn": nn, "functional": functional, "DEVICE": CPU}
        exec("\n\n".join([imports, *(text.text for text in self.texts)]), space)
        self.parts = [space[f"Stage{number}"](model) for number in range(num)]

    def __call__(self, inputs) -> list[Tensor]:
        """The tensors of the model's output."""
        given = dict(zip(self.names, tensors(inputs), strict=True))
        sent: tuple = tuple(given.values())
        for number, (part, text) in enumerate(zip(self.parts, self.texts, strict=True)):
            needs = {name: given[name] for name in text.needs} if number else {}
            got = part(*sent, **needs)
            sent = got if isinstance(got, tuple) else (got,)
        return list(sent)


def learned(model: nn.Module, output: list[Tensor]) -> dict[str, Tensor]:
    """Gradients by name of some loss."""
    model.zero_grad()
    total = [t.float().square().mean() for t in output if t.requires_grad]
    torch.stack(total).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ZOO)
def test_a_written_stage_computes_what_the_forward_computes(name: str):
    build, make, units = ZOO[name]
    inputs = make()
    for num in range(1, min(units, 3) + 1):
        torch.manual_seed(0)
        model = build()
        other = copy.deepcopy(model)
        chain = Chain(other, copy.deepcopy(inputs), num)
        for step in range(2):  # the second one finds the buffers that the first one wrote
            torch.manual_seed(step)
            output = list(dict.fromkeys(tensors(model(copy.deepcopy(inputs)))))
            torch.manual_seed(step)
            found = chain(copy.deepcopy(inputs))
            assert all(torch.equal(one, two) for one, two in zip(found, output, strict=True))
            expected, grads = learned(model, output), learned(other, found)
            assert grads.keys() == expected.keys()
            for key, grad in grads.items():
                torch.testing.assert_close(grad, expected[key], rtol=1e-5, atol=1e-6)


def test_a_gpt_reads_as_its_author_would_have_cut_it():
    made = recipe.builtin("pytext", "tiny")
    first, second = written(made.model(), made.samples.fetch(0, 2)[0], 2)[0]
    assert first.text.endswith(
        """
    def forward(self, text):
        x = self.token(text.long()) + self.position(torch.arange(128, device=DEVICE))
        for block in self.blocks:
            x = block(x)
        return x"""
    )
    assert second.text.endswith(
        """
    def __init__(self, whole):
        super().__init__()
        self.blocks = whole.blocks[2:]
        self.norm = whole.norm
        self.head = whole.head

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))"""
    )


class Mathematics(nn.Module):
    """Operators, and what binds how tightly."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.mask = torch.arange(6.0)

    def forward(self, x):
        x = self.one((x + 1) * 2 - (x - (3 - x)) / (1 + x**2)) * self.mask
        return self.two(-(x[:, 1:2] ** 2) + (2**-x)[..., [0]] + (x > -1) * 0.5 - (-2.0) * x)


def test_brackets_stand_where_they_must():
    torch.manual_seed(0)
    model = Mathematics()
    inputs = rows()
    (found,) = Chain(model, inputs, 2)(inputs)
    assert torch.equal(found, model(inputs))


class Guided(nn.Module):
    """Layers that each take, besides the stream, what was there before it."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, mask, *, scale):
            return self.linear(x * mask) * scale

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Guided.Layer() for _ in range(4))

    def forward(self, x):
        mask, x = x > 0.5, self.first(x)
        scale = x.sigmoid()
        for layer in self.layers:
            x = layer(x, mask, scale=scale)
        return x


def test_what_every_layer_of_a_loop_is_given_keeps_its_name():
    model, inputs = Guided(), rows()
    for num in (1, 2, 3):
        chain = Chain(model, inputs, num)
        assert torch.equal(chain(inputs)[0], model(inputs))
        assert "for layer in self.layers:" in chain.texts[-1].text


class Opaque(nn.Module):
    """A tensor that is kept out of sight."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.hidden = [torch.rand(4, 6, 5)]

    def forward(self, x):
        return self.two(self.one(x) + self.hidden[0].sum(-1))


def test_what_has_no_source_form_is_refused_in_one_sentence():
    with pytest.raises(LayoutError, match=r"a tensor \[4, 6, 5\].* cannot be written as code"):
        written(Opaque(), rows(), 2)


def test_nested_inputs_are_taken_apart():
    inputs = {"ids": torch.zeros(1), "more": [torch.zeros(1), (torch.zeros(1), 3)]}
    assert access(inputs, "inputs") == [
        'inputs["ids"]',
        'inputs["more"][0]',
        'inputs["more"][1][0]',
    ]


def test_parameters_in_lists_and_dictionaries_are_reached_as_their_owner_would():
    net = nn.Module()
    net.rows = nn.ParameterList([nn.Parameter(torch.ones(2))])
    net.named = nn.ParameterDict({"class": nn.Parameter(torch.ones(2))})
    net.register_buffer("class", torch.ones(2))
    assert path("net", net, "rows.0") == "net.rows[0]"
    assert path("net", net, "named.class") == 'net.named["class"]'
    assert path("net", net, "class") == 'net.get_buffer("class")'

"""Tensor parallelism as code: two autograd functions, and layers that keep a part of their weight.

And clipping over ranks that hold different parts, which torch's own does not see.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch import nn

from workbench.engine.axes.tp import TensorPlan, is_conv1d
from workbench.engine.export.case import Case, Section
from workbench.engine.export.paths import LISTS, item_of, path, span

FUNCTIONS = '''
    class Copy(torch.autograd.Function):
        """Into the cut layers: the same tensor forward, the sum of all gradients backward."""

        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=ctx.group)
            return grad, None


    class Sum(torch.autograd.Function):
        """Out of the cut layers: the sum of all parts forward, the same gradient backward."""

        @staticmethod
        def forward(ctx, x, group):
            x = x.clone()
            dist.all_reduce(x, group=group)
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad, None


    def part_of(param, dim, group):
        """This rank's part of a parameter, cut along a dim."""
        part = param.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
        return nn.Parameter(part.clone(), param.requires_grad)
'''
COLUMN = '''
    def column(layer, group):
        """Keep some rows of the weight, which give some of the features."""
        layer.cut = ("weight", "bias")
        layer.weight = part_of(layer.weight, 0, group)
        if layer.bias is not None:
            layer.bias = part_of(layer.bias, 0, group)
        layer.out_features //= dist.get_world_size(group)
        layer.forward = lambda x: {F}.linear(Copy.apply(x, group), layer.weight, layer.bias)
'''
ROW = '''
    def row(layer, group):
        """Keep the columns for these features; all ranks' parts are summed, then the bias added."""
        layer.cut = ("weight",)
        layer.weight = part_of(layer.weight, 1, group)
        layer.in_features //= dist.get_world_size(group)

        def forward(x):
            x = Sum.apply({F}.linear(x, layer.weight), group)
            return x if layer.bias is None else x + {BIAS}

        layer.forward = forward
'''
# Hugging Face's Conv1D is a linear layer with its weight as [in, out].
CONV_COLUMN = '''
    def column(layer, group):
        """Keep some columns of the weight [in, out], which give some of the features."""
        layer.cut = ("weight", "bias")
        layer.weight, layer.bias = part_of(layer.weight, 1, group), part_of(layer.bias, 0, group)
        layer.nf //= dist.get_world_size(group)
        layer.forward = lambda x: {F}.linear(Copy.apply(x, group), layer.weight.t(), layer.bias)
'''
CONV_ROW = '''
    def row(layer, group):
        """Keep the rows for these features; all ranks' parts are summed, then the bias added."""
        layer.cut = ("weight",)
        layer.weight = part_of(layer.weight, 0, group)

        def forward(x):
            x = Sum.apply(x @ layer.weight, group)
            return x + {BIAS}

        layer.forward = forward
'''
VOCABULARY = '''
    def vocabulary(layer, group):
        """Keep some rows of the table; a row of another rank is zero here, and all are summed."""
        layer.cut = ("weight",)
        layer.weight = part_of(layer.weight, 0, group)
        first = dist.get_rank(group) * len(layer.weight)

        def forward(ids):
            outside = (ids < first) | (ids >= first + len(layer.weight))
            x = {F}.embedding((ids - first).masked_fill(outside, 0), layer.weight)
            return Sum.apply(x.masked_fill(outside.unsqueeze(-1), 0), group)

        layer.forward = forward
'''
GATHERED = '''
    class Gather(torch.autograd.Function):
        """The features of all ranks forward, the gradient of this rank's own backward."""

        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, x.contiguous(), group=group)
            return torch.cat(parts, -1)

        @staticmethod
        def backward(ctx, grad):
            parts = grad.chunk(dist.get_world_size(ctx.group), -1)
            return parts[dist.get_rank(ctx.group)].contiguous(), None


    def gathered(layer, group):
        """Keep some rows of the weight, and give the features of all ranks."""
        column(layer, group)
        forward = layer.forward
        layer.forward = lambda x: Gather.apply(forward(x), group)
'''


def plan_of(case: Case) -> TensorPlan:
    """What is cut; in a pipeline what lies in one unit, as only whole values cross."""
    plan = case.blueprint.tensor_plan
    return plan.inside(case.blueprint.limits.units) if case.layout.pp > 1 else plan


def layers(case: Case, functional: str) -> Section:
    """The kinds of layers that are cut, and `split`, which cuts those of the model."""
    if case.layout.tp == 1:
        return Section([])
    plan = plan_of(case)
    modules = dict(case.bones.named_modules())
    texts = [FUNCTIONS]
    is_conv = any(is_conv1d(modules[group.row]) for group in plan.groups)
    if plan.groups:
        texts += [CONV_COLUMN, CONV_ROW] if is_conv else [COLUMN, ROW]
    if plan.embeddings:
        texts.append(VOCABULARY)
    if plan.gathered:
        texts += [COLUMN, GATHERED] if COLUMN not in texts and not is_conv else [GATHERED]
    # Autocast gives sums in bf16, and adding a bias in fp32 would make them fp32.
    bias = "layer.bias.to(x.dtype)" if case.options.precision == "bf16" else "layer.bias"
    found = Section([])
    for text in texts:
        filled = textwrap.dedent(text).replace("{F}", functional).replace("{BIAS}", bias)
        lines = filled.strip("\n").splitlines()
        found.lines += [*lines, "", ""]
    found.lines += [
        "def split(net, group):",
        '    """Leave each rank of the group its part of the large layers."""',
        *(f"    {line}" for line in _statements(case, plan)),
    ]
    found.needs("import torch\nimport torch.distributed as dist\nfrom torch import nn")
    return found


def _statements(case: Case, plan: TensorPlan) -> Iterator[str]:
    """One call a layer, in loops over lists of blocks that are alike."""
    bones = case.bones
    calls: list[tuple[str, str]] = []  # (name of a module, what is done with {} as the module)
    for group in plan.groups:
        calls += [(name, "column({}, group)") for name in group.columns]
        calls.append((group.row, "row({}, group)"))
        calls += [(n, f"{{}}.{key} //= {case.layout.tp}") for n, key in group.heads]
    calls += [(name, "vocabulary({}, group)") for name in plan.embeddings]
    calls += [(name, "gathered({}, group)") for name in plan.gathered]
    by_list: dict[str, dict[str, list[tuple[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for name, call in dict.fromkeys(calls):
        parent, inner = _in_list(bones, name)
        block = name[: len(name) - len(inner)].rstrip(".") if parent is not None else ""
        by_list[parent or ""][block].append((inner, call))
    for parent, blocks in by_list.items():
        names = list(blocks)
        alike = all(blocks[name] == blocks[names[0]] for name in names)
        if parent and len(names) > 1 and alike and _are_neighbours(names):
            item = item_of(names)
            yield f"for {item} in {span('net', bones, names)}:"
            block = bones.get_submodule(names[0])
            for inner, call in blocks[names[0]]:
                yield "    " + call.format(path(item, block, inner))
            continue
        for name, inside in blocks.items():
            for inner, call in inside:
                yield call.format(path("net", bones, ".".join(filter(None, (name, inner)))))
    yield from _ties(bones, [*plan.embeddings, *plan.gathered])


def _in_list(bones: nn.Module, name: str) -> tuple[str | None, str]:
    """The list of layers that a module lies in, and its name below the layer."""
    keys = name.split(".")
    for place, key in enumerate(keys):
        parent = ".".join(keys[:place])
        if place and key.isdigit() and isinstance(bones.get_submodule(parent), LISTS):
            return parent, ".".join(keys[place + 1 :])
    return None, name


def _are_neighbours(names: Sequence[str]) -> bool:
    places = [int(name.rpartition(".")[2]) for name in names]
    return places == list(range(places[0], places[0] + len(places)))


def _ties(bones: nn.Module, names: Sequence[str]) -> Iterator[str]:
    """A weight under two names is cut under each, and then one again."""
    first: dict[int, str] = {}
    for name in names:
        weight = bones.get_submodule(name).weight
        other = first.setdefault(id(weight), name)
        if other != name:
            left, right = (path("net", bones, each) for each in (name, other))
            yield f"{left}.weight = {right}.weight  # they are one"


def clip(case: Case, is_tied: bool) -> Section:
    """Clipping where ranks hold different parts of the model."""
    layout = case.layout
    if case.options.clip is None or layout.pp == layout.tp == 1:
        return Section([])
    lines = [
        f"def clip(part, mesh{', tied' if is_tied else ''}):",
        '    """Scale the gradients so that their norm, over all ranks, is at most CLIP."""',
    ]
    copies = []
    if layout.tp > 1:
        whole = f"1 if id(param) in cut else {layout.tp}"
        copies.append(f"({whole})" if is_tied else whole)
        lines += [
            "    cut = set()  # of which each rank has a part; the rest is the same on all of them",
            "    for layer in part.modules():",
            '        cut.update(id(getattr(layer, name)) for name in getattr(layer, "cut", ()))',
        ]
    if is_tied:
        copies.append("holders.get(id(param), 1)")
        lines.append("    holders = {id(param): group.size() for param, group in tied}")
    local = ".to_local()" if layout.dp_shard > 1 else ""
    lines += [
        "    params = [param for param in part.parameters() if param.grad is not None]",
        "    squares = torch.zeros((), device=DEVICE)",
        "    for param in params:",
    ]
    if copies:
        lines.append("        # On so many ranks the same values lie.")
        lines.append(f"        copies = {' * '.join(copies)}")
    lines.append(
        f"        squares += param.grad{local}.square().sum(){' / copies' if copies else ''}"
    )
    for axis in case.axes:
        if axis != "dp":
            lines.append(f'    dist.all_reduce(squares, group=mesh.get_group("{axis}"))')
    lines += [
        "    scale = min(1.0, CLIP / (squares.sqrt().item() + 1e-6))",
        "    for param in params:",
        "        param.grad *= scale",
    ]
    found = Section(lines)
    found.needs("import torch\nimport torch.distributed as dist")
    return found

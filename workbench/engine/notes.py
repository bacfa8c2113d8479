"""Notes: what of a model depends on the layout nevertheless, one sentence each.

Found by looking at modules, without running them: attributes that hold a probability of dropout,
and names that the code of a forward looks up.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Iterable, Iterator
from types import CodeType

import torch
from torch import nn

from workbench.engine.batchnorm import is_batchnorm
from workbench.engine.dropout import kind_of
from workbench.engine.recipe import Recipe
from workbench.spec.layout import Layout

NAMED = 3
DROPPING = frozenset(
    {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
)
# Other functions of torch that draw from its generator.
DRAWING = frozenset(
    {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm"}
    | {"bernoulli", "bernoulli_", "multinomial", "normal_", "uniform_"}
    | {"gumbel_softmax", "rsample"}
)
RANDOM_KINDS = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def notes(model: nn.Module, layout: Layout, accumulate: int) -> list[str]:
    """Sentences on what makes the curve another one than that of one process; [] for none.

    Nothing is said of one process with one microbatch, which is what the others are held against.
    """
    modules = list(model.named_modules())
    rounds = accumulate * layout.microbatches
    told = []
    if rounds > 1 and (found := batchnorms(model)):
        told.append(
            f"Statistics of {found} come from each of {rounds} microbatches, not from the whole "
            "batch, so the loss differs from now on."
        )
    if layout.dp > 1 and (found := [name for name, module in modules if _has_own_averages(module)]):
        told.append(f"Each rank keeps running statistics of its own share: {_list(found)}.")
    if layout.world_size * rounds == 1:
        return told
    if found := [f"{name}{how}" for name, module in modules for how in _other_dropout(module)]:
        told.append(
            "Dropout in a module's own code draws other masks under another layout, which "
            f"nn.Dropout does not: {_list(found)}."
        )
    if found := [name for name, module in modules if _is_random(module)]:
        told.append(f"Random numbers are others under another layout: {_list(found)}.")
    if (found := list(_time_first(modules))) and _has_exact_dropout(model):
        told.append(
            "Dropout takes the first dim for the samples, and draws other masks under another "
            f"layout where it is time (batch_first=False): {_list(found)}."
        )
    return told


def batchnorms(model: nn.Module, *, of_a_rank: bool = False) -> str:
    """The modules that take statistics over the samples of all ranks; "" if none. of_a_rank: those
    of some other code, which take them over the samples of their rank alone.

    `BatchNorm2d 1, BatchNorm2d 4`: the name alone may be a bare number.
    """
    is_one = _mixes_a_share if of_a_rank else is_batchnorm
    found = [(name, module) for name, module in model.named_modules() if is_one(module)]
    named = [f"{type(module).__name__} {name}".strip() for name, module in found]
    return _list(named) if named else ""


def _mixes_a_share(module: nn.Module) -> bool:
    kinds = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    return _has_own_averages(module) and not isinstance(module, kinds)


def _list(found: Iterable[str]) -> str:
    names = [name or "the model" for name in dict.fromkeys(found)]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _has_own_averages(module: nn.Module) -> bool:
    buffers = dict(module.named_buffers(recurse=False))
    is_shared = is_batchnorm(module) or isinstance(module, nn.SyncBatchNorm)
    return "running_mean" in buffers and not is_shared


def _has_exact_dropout(model: nn.Module) -> bool:
    return any(kind_of(module) is not None and module.p for module in model.modules())


def _other_dropout(module: nn.Module) -> Iterator[str]:
    """How a module drops that is no dropout module of torch: ` (attention_dropout=0.1)`."""
    if kind_of(module) is not None:
        return
    if isinstance(module, nn.RNNBase) and module.num_layers == 1:
        return  # it drops between layers only
    for key, value in vars(module).items():
        is_share = isinstance(value, float) and 0 < value <= 1
        if is_share and ("drop" in key.lower() or (key == "p" and _is_dropout(module))):
            yield f" ({key}={value:g})"
    codes = list(_codes(module))
    for key, child in module.named_children():
        if kind_of(child) is not None and child.p and any(_takes_p(code, key) for code in codes):
            yield f" ({key}.p={child.p:g})"
    if _looks_up(module, codes, DROPPING):
        yield ""


def _is_dropout(module: nn.Module) -> bool:
    return any("drop" in kind.__name__.lower() for kind in type(module).__mro__)


def _takes_p(code: CodeType, key: str) -> bool:
    """Whether the code has `key.p`: it drops by itself what its dropout module would."""
    names = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_ATTR"]
    return (key, "p") in itertools.pairwise(names)


def _is_random(module: nn.Module) -> bool:
    return isinstance(module, RANDOM_KINDS) or _looks_up(module, _codes(module), DRAWING)


def _looks_up(module: nn.Module, codes: Iterable[CodeType], names: frozenset[str]) -> bool:
    """Whether the code looks up one of the names elsewhere than on the module."""
    looked_up = {name for code in codes for name in code.co_names}
    return any(not hasattr(module, name) for name in looked_up & names)


def _codes(module: nn.Module) -> Iterator[CodeType]:
    """The code of the forward and of the methods it calls; none of torch's own modules."""
    kind = type(module)
    left, seen = ["forward"], set()
    while left:
        name = left.pop()
        method = inspect.unwrap(getattr(kind, name))
        is_torchs = getattr(method, "__module__", "").startswith("torch.")
        if name in seen or is_torchs or not inspect.isfunction(method):
            continue
        seen.add(name)
        for code in _nested(method.__code__):
            yield code
            left += [name for name in code.co_names if callable(getattr(kind, name, None))]


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _nested(value)


def _time_first(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[str]:
    for name, module in modules:
        if getattr(module, "batch_first", True) is False:
            yield name


def loss_note(recipe: Recipe, model: nn.Module) -> str:
    """Why the loss is not the mean over its samples, for which microbatches are weighed; or "".

    Nothing is known of a forward that draws random numbers: the same samples give another loss.
    """
    count = min(4, recipe.batch) // 2 * 2
    model.eval()
    try:
        with torch.no_grad():
            found = []
            half = count // 2
            for first, part in ((0, count), (0, count), (0, half), (half, half)):
                inputs, target = recipe.samples.fetch(first, part)
                found.append(recipe.loss(model(inputs), target).item())
    except Exception:  # noqa: BLE001 - the first step says what does not fit
        return ""
    finally:
        model.train()
    whole, again, halves = found[0], found[1], (found[2] + found[3]) / 2
    alike = 1e-4 * abs(whole)
    if abs(whole - again) > alike or not abs(whole - halves) > alike:
        return ""
    return (
        f"The loss of {count} samples is {whole:.5g}, and the mean of their halves {halves:.5g}: "
        "the loss is no mean over the samples, or the model mixes the samples of a batch, so the "
        "curve depends on how a batch is split."
    )

"""Proof by running it: that cut linear layers compute, inside a user's module, what whole ones do.

The smallest module around the layers is run whole on random values; then as each rank would run it,
one after another in this process, with the parts that `axes/tp.py` makes. A rank must find its
slice of what the row-parallel layer was given, and, once that layer has summed, the module must
give the same output. Code with a number of heads or a width of its own fails here, not in training.

Gradients follow from the graph: what the row-parallel layer is given may depend on trained tensors
through the column-parallel layers alone. Any other would get a part of its gradient on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engine.axes import tp
from workbench.engine.axes.tp import Group, TensorPlan, inputs, outputs
from workbench.engine.skeleton import copy_of
from workbench.engine.tensor_calls import Seen, Visit, kept, mapped

SEED = 1
# Whole numbers called like this are a number of heads, unless they are the size of one.
HEADS, NO_HEADS = "head", ("dim", "size", "width", "idx", "index")
# Far above what float32 rounds, far below the difference between two random slices.
TOLERANCE = 1e-4
# Why most groups that look like one cannot be cut.
OTHERWISE = "would compute something else if cut"


@dataclass
class _Run:
    """What came of one run: the output, what each row was given and gave, tensors left behind."""

    output: Any = None
    given: dict[str, list[Tensor]] = field(default_factory=dict)
    gave: dict[str, list[Tensor]] = field(default_factory=dict)
    left: dict[str, Tensor] = field(default_factory=dict)


class Proof:
    """A module run whole, against which to hold the run of any rank.

    module: a skeleton. visit: how the model calls it. groups: layers of it to be cut, by their
    names in it. `why` says what rules a cut out whatever the degree, "" if nothing.
    """

    def __init__(self, module: nn.Module, visit: Visit, groups: tuple[Group, ...]) -> None:
        self.module = module
        self.visit = visit
        self.groups = groups
        self.why = ""
        generator = torch.Generator().manual_seed(SEED)
        self._values = {n: _random(p, generator) for n, p in module.named_parameters()}
        # A mask of one kind may hide everything, and then nothing would be seen to go wrong.
        for flag in (True, False):
            self._flag = flag
            try:
                self._whole = self._run_whole()
            except Exception as error:  # noqa: BLE001 - whatever the user's code raises
                self.why = f"raises {type(error).__name__} on random values"
                return
            if self.why or _is_telling(self._whole):
                return
        self.why = "gives nothing to compare on random values"

    def holds(self, degree: int, ranks: Iterable[int]) -> bool:
        """Whether those of the `degree` ranks compute their part of what the whole does."""
        if self.why:
            return False
        try:
            return all(self._holds_on(rank, degree) for rank in ranks)
        except Exception:  # noqa: BLE001 - the user's code may raise anything on parts
            return False

    def _run_whole(self) -> _Run:
        module = copy_of(self.module)
        self._give_memory(module, {}, 0, 1)
        run, leaves = _Run(), set()

        def cut_graph(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
            leaf = output.detach().requires_grad_()
            leaves.add(leaf)
            return leaf

        def note(row: str, args: Any, output: Any) -> None:
            run.given.setdefault(row, []).append(args[0])
            run.gave.setdefault(row, []).append(output.detach().clone())

        for group in self.groups:
            for name in group.columns:
                module.get_submodule(name).register_forward_hook(cut_graph)
            module.get_submodule(group.row).register_forward_hook(
                lambda _, args, output, row=group.row: note(row, args, output)
            )
        self._run(module, run)
        for given in run.given.values():
            if any(_trained(x) - leaves for x in given):
                self.why = "also depends on trained tensors that are not cut"
        return run

    def _holds_on(self, rank: int, degree: int) -> bool:
        module = copy_of(self.module)
        plan = TensorPlan(groups=self.groups)
        cuts = tp.cut(module, plan, None, rank, degree)
        self._give_memory(module, cuts, rank, degree)
        run, right = _Run(), []

        def stub(row: str, x: Tensor) -> Tensor:
            nth = len(run.given.setdefault(row, []))
            run.given[row].append(x)
            whole = self._whole.given[row][nth]
            right.append(_tells_apart(whole, degree) and _same(x, whole.chunk(degree, -1)[rank]))
            return self._whole.gave[row][nth].clone()

        for group in self.groups:
            row = module.get_submodule(group.row)
            row.forward = lambda x, name=group.row: stub(name, x)
        self._run(module, run)
        return (
            all(right)
            and len(right) == sum(map(len, self._whole.given.values()))
            and _same(run.output, self._whole.output)
            and _same(run.left, self._whole.left)
        )

    def _give_memory(self, module: nn.Module, cuts: Any, rank: int, degree: int) -> None:
        made: dict[int, nn.Parameter] = {}
        for name, param in module.named_parameters():
            value = self._values[name]
            if name in cuts:
                value = value.chunk(degree, cuts[name].dim)[rank]
            made[id(param)] = nn.Parameter(value.clone(), param.requires_grad)
        for part in module.modules():
            for name, param in list(part.named_parameters(recurse=False, remove_duplicate=False)):
                setattr(part, name, made[id(param)])

    def _run(self, module: nn.Module, run: _Run) -> None:
        module.eval()
        for part in module.modules():
            for name, buffer in list(part.named_buffers(recurse=False)):
                setattr(part, name, _plain(buffer))
        generator = torch.Generator().manual_seed(SEED)
        args, kwargs = mapped(
            (self.visit.args, self.visit.kwargs), lambda v: _real(v, generator, self._flag)
        )
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(SEED)
            run.output = module(*args, **kwargs)
        run.left = {name: buffer for name, buffer in module.named_buffers()}
        for name, part in module.named_modules():
            kept = {key: v for key, v in vars(part).items() if isinstance(v, Tensor)}
            run.left |= {f"{name}.{key}": value for key, value in kept.items()}


def _random(param: Tensor, generator: torch.Generator) -> Tensor:
    """Values with which layers neither saturate nor vanish, and no two slices are alike."""
    value = torch.randn(param.shape, generator=generator, dtype=torch.float32)
    return value / param.shape[-1] ** 0.5 if param.ndim > 1 else 1 + 0.3 * value


def _plain(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype)


def _real(value: Any, generator: torch.Generator, flag: bool) -> Any:
    """An argument with values: random ones, small indices, flags that are all alike."""
    if isinstance(value, Tensor):
        return _plain(value).clone()
    if not isinstance(value, Seen):
        return kept(value)
    if value.dtype == torch.bool:
        return torch.full(value.shape, flag)
    if not value.dtype.is_floating_point:
        return torch.randint(0, 2, value.shape, generator=generator).to(value.dtype)
    made = torch.randn(value.shape, generator=generator, dtype=torch.float32)
    return made.requires_grad_(value.requires_grad)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [x for item in value for x in _tensors(item)] if isinstance(value, (tuple, list)) else []


def _is_telling(run: _Run) -> bool:
    """Whether numbers are finite, and halves of what rows are given can be told apart."""
    given = _tensors(run.given)
    return all(bool(x.isfinite().all()) for x in _tensors((run.output, given))) and all(
        _tells_apart(x, 2) for x in given
    )


def _same(one: Any, other: Any) -> bool:
    """Equal tensors; objects that hold none, or hold them out of sight, are not compared."""
    ours, theirs = _tensors(one), _tensors(other)
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and torch.allclose(a, b, TOLERANCE, TOLERANCE)
        for a, b in zip(ours, theirs, strict=True)
    )


def _tells_apart(x: Tensor, degree: int) -> bool:
    """Whether slices of x differ, so that the right one can be told from a wrong one."""
    parts = x.chunk(degree, -1)
    return parts[0].shape != parts[-1].shape or not torch.allclose(
        parts[0], parts[-1], 10 * TOLERANCE, 10 * TOLERANCE
    )


def _trained(x: Tensor) -> set[Tensor]:
    """The leaves that the gradient of x goes to."""
    leaves = {x} if x.is_leaf and x.requires_grad else set()
    todo, seen = [x.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.add(leaf)
        todo += [parent for parent, _ in node.next_functions]
    return leaves


@dataclass(frozen=True)
class Found:
    """How a group can be cut. heads: to be divided; parts: what a degree must divide; implied:
    whether others ask for that already; why: why it cannot be cut.
    """

    heads: tuple[tuple[str, str], ...] = ()
    parts: int = 1
    implied: bool = False
    why: str = ""


def prove(proof: Proof, limit: int) -> Found:
    """How the last group of the proof can be cut; limit: what a degree must divide anyhow."""
    *earlier, group = proof.groups
    if proof.why:
        return Found(why=proof.why)
    own = _common(proof.module, (group,))
    if math.gcd(own, limit) == 1:
        return Found(why=f"divides by no degree that divides {limit}, as other layers need")
    for heads in dict.fromkeys(((), _head_counts(proof.module, earlier))):
        proof.groups = (*earlier, replace(group, heads=heads))
        most = math.gcd(limit, _common(proof.module, proof.groups))
        parts = _parts(proof, most)
        if parts > 1:
            return Found(heads, parts, implied=parts == most and most == limit)
    odd = (heads for heads in _counts(proof.module) if limit and math.gcd(heads, limit) == 1)
    if heads := next(odd, 0):
        return Found(why=f"goes with {heads} heads, which do not divide as other layers need")
    return Found(why=OTHERWISE)


def _common(module: nn.Module, groups: tuple[Group, ...]) -> int:
    """The largest number that all that is cut divides by."""
    sizes = []
    for group in groups:
        sizes += [outputs(module.get_submodule(name)) for name in group.columns]
        sizes.append(inputs(module.get_submodule(group.row)))
        sizes += [getattr(module.get_submodule(name), attribute) for name, attribute in group.heads]
    return math.gcd(*sizes)


def _head_counts(module: nn.Module, earlier: list[Group]) -> tuple[tuple[str, str], ...]:
    divided = {head for group in earlier for head in group.heads}
    return tuple(
        (name, key)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if is_head_count(key, value) and (name, key) not in divided
    )


def is_head_count(key: str, value: Any) -> bool:
    """Whether an attribute is a number of heads, by its name and value."""
    is_count = type(value) is int and value > 1 and HEADS in key
    return is_count and not any(word in key for word in NO_HEADS)


def _counts(module: nn.Module) -> Iterator[int]:
    return (getattr(module.get_submodule(n), key) for n, key in _head_counts(module, []))


def _parts(proof: Proof, most: int) -> int:
    """Into how many parts the last group can be cut, 1 for none."""
    primes = list(_primes(most))
    # Every rank is run for the first degree that works; for multiples the first and the last rank.
    parts = next((p for p in dict.fromkeys(primes) if proof.holds(p, range(p))), 1)
    if parts == 1:
        return 1
    if proof.holds(most, (0, most - 1)):
        return most
    primes.remove(parts)
    for prime in primes:
        if proof.holds(parts * prime, (0, parts * prime - 1)):
            parts *= prime
    return parts


def _primes(number: int) -> Iterator[int]:
    """Prime factors, smallest first, each as often as it divides the number."""
    factor = 2
    while number > 1:
        while number % factor == 0:
            yield factor
            number //= factor
        factor += 1

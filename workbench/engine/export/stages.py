"""Stages: the part of a model's forward that a pipeline rank runs, as a class that reads like code.

It is written from the tape (see tape.py) that the stage itself runs by. Layers called one after
another become a loop, and a value that the next line alone uses is written into that line.
"""

from __future__ import annotations

import inspect
import keyword
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engine.export.calls import Code, Writer
from workbench.engine.export.layout import wrapped
from workbench.engine.export.lines import Line, groups, lines_of
from workbench.engine.export.outputs import Outputs
from workbench.engine.export.paths import Parts
from workbench.engine.nest import Ref, State
from workbench.engine.replay import StagePlan
from workbench.engine.tape import Node
from workbench.errors import LayoutError

LONG = 80
NAMES = ("x", "y", "z", "u", "v", "w")
# What a schedule's step() takes for itself.
TAKEN = {"self", "target", "losses", "return_outputs"}


@dataclass(frozen=True)
class StageText:
    """A class. needs: the names of the model's inputs that it takes besides what crosses."""

    text: str
    needs: tuple[str, ...]
    parts: Parts


def input_names(bones: nn.Module, inputs: Any, count: int) -> list[str]:
    """What the tensors of the model's inputs are called in a stage."""
    names: list[Any] = []
    if isinstance(inputs, Tensor):
        params = [p for p in inspect.signature(type(bones).forward).parameters if p != "self"]
        names = params[:1] if params and params[0] not in ("input", "args") else ["x"]
    elif isinstance(inputs, dict):
        names = list(inputs)
    is_fit = len(names) == count and not TAKEN.intersection(names)
    if is_fit and all(isinstance(n, str) and n.isidentifier() for n in names):
        return [f"{name}_" if keyword.iskeyword(name) else name for name in names]
    return [f"input{place}" for place in range(count)]


def write(
    number: int, plan: StagePlan, outputs: Outputs, names: Sequence[str], writer: Writer
) -> StageText:
    """The class of a stage. names: of the model's inputs.

    Raises LayoutError for what has no source form.
    """
    parts = Parts(outputs.bones)
    forward = _Forward(plan, outputs, dict(zip(plan.wiring.inputs, names, strict=True)), parts)
    writer.tensor, writer.constant = forward.tensor, parts.constant
    lines = (wrapped(line, " " * 8) for line in _returning(list(forward.body(writer))))
    body = "\n".join(lines)
    takes = [*forward.taken, *forward.needs]
    share = f"{round(100 * plan.share)} % of the work"
    lines = [
        f"class Stage{number}(nn.Module):",
        f'    """{_named(plan.units)}: {share}."""',
        "",
        "    def __init__(self, whole):",
        "        super().__init__()",
        *(f"        {line}" for line in parts.lines()),
        "",
        *(["    @AUTOCAST"] if outputs.is_autocast else []),
        f"    def forward({', '.join(['self', *takes])}):",
        textwrap.indent(body, " " * 8),
    ]
    return StageText("\n".join(lines), tuple(forward.needs), parts)


class _Forward:
    """The lines of one stage's forward."""

    def __init__(
        self, plan: StagePlan, outputs: Outputs, inputs: dict[int, str], parts: Parts
    ) -> None:
        self.plan, self.outputs, self.parts = plan, outputs, parts
        self.lines = lines_of(plan, outputs.bones)
        for line in sorted(self.lines, key=lambda line: len(line.nodes), reverse=True):
            if units := [node.unit for node in line.nodes if node.unit]:
                parts.add(units)
        used = {slot for line in self.lines for slot in line.reads} | plan.wiring.kept
        self.inputs = {slot: name for slot, name in inputs.items() if slot in used}
        if not self.inputs and not plan.wiring.takes:
            self.inputs = inputs  # a schedule gives the first stage something
        self.needs = list(self.inputs.values())
        self.names = _Names(self.lines, plan.wiring.kept, {*inputs.values()} - {"x"})
        self.code: dict[int, Code] = {}
        for slot, name in self.inputs.items():
            self.names.held[slot] = name
            self.code[slot] = Code(name)
        self.taken = [self._named(slot) for slot in plan.wiring.takes]

    def _named(self, slot: int, besides: Collection[str] = ()) -> str:
        name = self.names.fresh(slot, besides)
        self.code[slot] = Code(name)
        return name

    def tensor(self, found: Ref | State) -> Code:
        """What stands for a value, a parameter or a buffer."""
        return (
            Code(self.parts.tensor(found.name))
            if isinstance(found, State)
            else self.code[found.slot]
        )

    def body(self, writer: Writer) -> Iterator[str]:
        """The lines, to be indented."""
        wiring = self.plan.wiring
        for slot in sorted(wiring.copied & self.code.keys()):
            yield f"{self.code[slot].text} = {self.code[slot].text}.clone()"
        for line, waiting in groups(self.lines, wiring, self.outputs):
            while waiting and not self._fits(writer, line, waiting):
                yield from self._statement(writer, waiting.pop(0))
            for each in waiting:
                self.code[each.outs[0]] = self._expression(writer, each)
            yield from self._statement(writer, line)
        for name, slot in wiring.writes.items():
            yield f"{self.parts.tensor(name)} = {self.code[slot].text}"
        yield f"return {self._returned()}"

    def _fits(self, writer: Writer, line: Line, waiting: Sequence[Line]) -> bool:
        before = dict(self.code)
        for each in waiting:
            self.code[each.outs[0]] = self._expression(writer, each)
        is_run = len(line.nodes) > 1
        code = writer.value(line.node.args[0]) if is_run else self._expression(writer, line)
        self.code = before
        return len(code.text) <= LONG

    def _expression(self, writer: Writer, line: Line) -> Code:
        node = line.node
        if node.function is not None:
            return writer.call(node.function, node.args, node.kwargs)
        callee = self.parts.unit(node.unit)
        return Code(f"{callee}({writer.arguments(node.args, node.kwargs)})")

    def _statement(self, writer: Writer, line: Line) -> Iterator[str]:
        if len(line.nodes) > 1:
            yield from self._run(writer, line)
            return
        code = self._expression(writer, line).text
        made = [slot for slot in line.outs if slot >= 0 and slot not in self.code]
        if not made:  # written in place
            yield from _within(line.node, [code])
            return
        self.names.let_go(line)
        names = {slot: self._named(slot) for slot in made}
        pattern, more = self.outputs.pattern(line.node, names)
        yield from _within(line.node, [f"{pattern} = {code}"])
        yield from more

    def _run(self, writer: Writer, line: Line) -> Iterator[str]:
        """Layers called one after another: a part of nn.Sequential at once, others in a loop."""
        given = writer.value(line.node.args[0]).text
        rest = writer.arguments(line.node.args[1:], line.node.kwargs)
        # What every layer is given besides keeps its name for as long as the loop runs.
        beside = {self.names.held[slot] for slot in line.rest if slot in self.names.held}
        self.names.let_go(line)
        name = self._named(line.outs[0], beside)
        whole, item = self.parts.run([node.unit for node in line.nodes])
        if not item:
            yield from _within(line.node, [f"{name} = {whole}({given})"])
            return
        if name != given:
            yield f"{name} = {given}"
        call = f"{name} = {item}({', '.join(filter(None, [name, rest]))})"
        yield from _within(line.node, [f"for {item} in {whole}:", f"    {call}"])

    def _returned(self) -> str:
        wiring = self.plan.wiring
        if wiring.last:
            return ", ".join(self.code[slot].text for slot in self.outputs.returned)
        parts = []
        for slot in wiring.gives:
            text = self.code[slot].text
            if slot in wiring.takes:
                # torch's schedules expect an output with a place of its own in the graph.
                text = f"{text}.view_as({text})"
            elif not self.outputs.is_contiguous[slot]:
                text = f"{text}.contiguous()"
            parts.append(text)
        return ", ".join(parts)


class _Names:
    """Names of values: one that is not needed any more is free for the next."""

    def __init__(self, lines: Sequence[Line], kept: frozenset[int], reserved: set[str]) -> None:
        self._left = Counter(slot for line in lines for slot in set(line.reads))
        self._left.update(kept)
        self._reserved = reserved
        self.held: dict[int, str] = {}

    def let_go(self, line: Line) -> None:
        """The line, with all that is written into it, has been evaluated."""
        for each in (*line.inside, line):
            self._left.subtract(set(each.reads))
        self.held = {slot: name for slot, name in self.held.items() if self._left[slot] > 0}

    def fresh(self, slot: int, besides: Collection[str] = ()) -> str:
        """The first name that is free, and none of some others."""
        taken = {*self.held.values(), *self._reserved, *besides}
        self.held[slot] = next((name for name in NAMES if name not in taken), f"t{slot}")
        return self.held[slot]


def _within(node: Node, lines: list[str]) -> Iterator[str]:
    """Lines in the contexts that the forward had them in."""
    contexts = ["torch.no_grad()"] if node.grad is False else []
    if node.autocast is not None:
        _, enabled, dtype = node.autocast
        contexts.append(f"torch.autocast(DEVICE.type, dtype={dtype}, enabled={enabled})")
    if contexts:
        yield f"with {', '.join(contexts)}:"
    for line in lines:
        yield f"    {line}" if contexts else line


def _returning(lines: list[str]) -> list[str]:
    """What the last line names and returns is returned at once."""
    name = lines[-1].removeprefix("return ")
    if len(lines) > 1 and lines[-2].startswith(f"{name} = "):
        return [*lines[:-2], f"return {lines[-2].removeprefix(f'{name} = ')}"]
    return lines


def _named(units: Sequence[str]) -> str:
    if not units:
        return "What comes before the first layer"
    text = ", ".join(units) if len(units) <= 6 else f"{units[0]} to {units[-1]}"
    return f"Layers {text}" if all(unit.isdigit() for unit in units) else text


def like(meta: Tensor) -> str:
    """Code of a tensor without memory."""
    how = ", ".join(map(str, meta.shape)) or "()"
    if meta.dtype is not torch.float32:
        how += f", dtype={meta.dtype}"
    return (
        f'torch.empty({how}, device="meta"{", requires_grad=True" if meta.requires_grad else ""})'
    )


def unknown_tied(name: str) -> LayoutError:
    """A tied parameter that a stage holds under no name of its own."""
    return LayoutError(
        f"{name} is tied over stages in a way that cannot be written as code. Export it under data "
        "or tensor parallelism."
    )

"""Lines: the calls of a stage put together as a reader would write them down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from workbench.engine.export.outputs import Outputs
from workbench.engine.nest import Made, Ref
from workbench.engine.replay import StagePlan, Wiring
from workbench.engine.tape import INPUT, Node


@dataclass
class Line:
    """One statement. nodes: one, or layers called one after another. reads: slots, and how often.

    inside: lines that are written into this one. rest: of a run of layers, what each is given
    besides the output of the one before.
    """

    nodes: list[Node]
    reads: Counter
    outs: tuple[int, ...]
    inside: list[Line] = field(default_factory=list)

    @property
    def node(self) -> Node:
        """The first one."""
        return self.nodes[0]

    @property
    def rest(self) -> Counter:
        """The slots of all arguments but the first one."""
        return _slots((self.node.args[1:], self.node.kwargs))


def lines_of(plan: StagePlan, bones: nn.Module) -> list[Line]:
    """The calls of a stage in order, with runs of layers in one line."""
    uses: Counter = Counter()
    for node in plan.nodes:
        uses.update(_slots((node.args, node.kwargs)))
    lines: list[Line] = []
    known = {INPUT, *plan.wiring.inputs, *plan.wiring.takes}
    for node in plan.nodes:
        # What gives back what it was given, and writes nothing, does nothing: `x.to(device)`.
        if node.outs and known.issuperset(node.outs) and not node.mutates:
            continue
        known.update(node.outs)
        last = lines[-1] if lines else None
        is_next = last is not None and _follows(last.nodes[-1], node, bones)
        if last and is_next and uses[last.outs[0]] == 1 and last.outs[0] not in plan.wiring.kept:
            last.nodes.append(node)
            last.outs = node.outs
        else:
            lines.append(Line([node], _slots((node.args, node.kwargs)), node.outs))
    return lines


def groups(
    lines: Sequence[Line], wiring: Wiring, outputs: Outputs
) -> Iterator[tuple[Line, list[Line]]]:
    """Lines to be written, each with those before it that may be written into it, which are also
    its `inside`; taking one out of the list takes it out of there.
    """
    uses = Counter(slot for line in lines for slot in line.reads.elements())
    kept = {*wiring.kept, *wiring.writes.values(), *wiring.copied}
    heads: list[Line] = []
    left = list(lines)
    while left:
        line = left.pop()
        # In a loop it would be computed again each time.
        needed = Counter(line.reads) if len(line.nodes) == 1 else line.reads - line.rest
        while left and _may_be_inside(left[-1], line, outputs):
            (slot,) = left[-1].outs
            if not (needed[slot] == uses[slot] == 1) or slot in kept:
                break
            line.inside.insert(0, left.pop())
            needed.update(line.inside[0].reads)
        heads.append(line)
    for line in reversed(heads):
        yield line, line.inside


def _may_be_inside(line: Line, other: Line, outputs: Outputs) -> bool:
    is_pure = len(line.nodes) == 1 and len(line.outs) == 1 and not line.node.mutates
    same = (line.node.grad, line.node.autocast) == (other.node.grad, other.node.autocast)
    return is_pure and same and outputs.is_tensor(line.node)


def _follows(before: Node, node: Node, bones: nn.Module) -> bool:
    """Whether two calls are those of neighbours in a list of layers, each fed by the one before."""
    parent, _, place = node.unit.rpartition(".")
    parent_before, _, place_before = before.unit.rpartition(".")
    if not (place.isdigit() and place_before.isdigit() and parent == parent_before):
        return False
    kind = type(bones.get_submodule(parent))
    if int(place) != int(place_before) + 1 or kind not in (nn.Sequential, nn.ModuleList):
        return False
    if len(before.outs) != 1 or not node.args or node.args[0] != Ref(before.outs[0]):
        return False
    rest = [repr((each.args[1:], each.kwargs, each.grad, each.autocast)) for each in (before, node)]
    is_alone = not node.args[1:] and not node.kwargs
    return rest[0] == rest[1] and (is_alone or kind is nn.ModuleList) and bool(before.args)


def _slots(arguments: Any) -> Counter:
    """The slots in arguments, and how often each stands there."""
    found: Counter = Counter()

    def look(value: Any) -> None:
        if isinstance(value, Ref):
            found[value.slot] += 1
        elif isinstance(value, (tuple, list)):
            for item in value:
                look(item)
        elif isinstance(value, dict):
            look(list(value.values()))
        elif isinstance(value, slice):
            look((value.start, value.stop, value.step))
        elif isinstance(value, Made):
            look(value.fields)

    look(arguments)
    return found

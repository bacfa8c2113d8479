"""Flow: which values of a tape depend on parameters, and what would cross a cut of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from workbench.engine.tape import Tape


@dataclass(frozen=True)
class Place:
    """A place to cut: before the `nth` call (from 0) of a unit with parameters, node `index`.

    crosses: slots of the values that cross there. why_not: what forbids a cut, "" when nothing.
    """

    index: int
    unit: str
    nth: int
    crosses: tuple[int, ...]
    why_not: str


class Flow:
    """What a tape's values depend on and how long they are needed.

    stays[i]: whether node i runs on one stage alone, since it depends on parameters, draws random
    numbers, or writes state; the others run wherever their results are needed.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._params = frozenset(tape.params)
        self._defined = dict.fromkeys(tape.inputs, -1)
        self._needed = {}
        for index, node in enumerate(tape.nodes):
            for slot in node.outs:
                self._defined.setdefault(slot, index)
            self._needed.update(dict.fromkeys(node.reads, index))
        self._needed.update(dict.fromkeys(tape.returns, len(tape.nodes)))
        self.stays = [False] * len(tape.nodes)
        self._slots: set[int] = set()
        self._spread()
        self._costs = [0.0, *accumulate(node.cost for node in tape.nodes)]

    def _spread(self) -> None:
        """Until nothing changes: who reads, or shares memory that is written, depends as well."""
        nodes, values = self.tape.nodes, self.tape.values
        sources, storages = self._params | self.tape.changed, set[int]()
        seen = None
        while seen != (seen := (sum(self.stays), len(self._slots), len(storages))):
            for index, node in enumerate(nodes):
                makes = {slot for slot in node.outs if self._defined[slot] == index and slot >= 0}
                if not self.stays[index]:
                    self.stays[index] = node.random or any(
                        (
                            node.state & sources,
                            (node.reads | makes) & self._slots,
                            node.mutates & storages,
                        )
                    )
                if self.stays[index]:
                    self._slots |= makes
                    storages |= node.mutates
            self._slots |= {s for s, value in enumerate(values) if value.storage in storages}

    def cost(self, begin: int, end: int) -> float:
        """Of the nodes from begin to before end, in floating-point operations."""
        return self._costs[end] - self._costs[begin]

    def num_bytes(self, slots: tuple[int, ...]) -> int:
        """Size of the values together."""
        values = (self.tape.values[slot] for slot in slots)
        return sum(value.shape.numel() * value.dtype.itemsize for value in values)

    def places(self) -> list[Place]:
        """All places to cut, in order; each stage then begins with a unit that has parameters."""
        found, calls, first = [], Counter(), True
        for index, node in enumerate(self.tape.nodes):
            if not node.state & self._params:
                continue
            if node.unit and not first:
                crosses = self._crosses(index)
                why = self._why_not(index, node.unit, crosses)
                found.append(Place(index, node.unit, calls[node.unit], crosses, why))
            calls[node.unit] += 1
            first = False
        return found

    def _crosses(self, index: int) -> tuple[int, ...]:
        needed, defined = self._needed, self._defined
        return tuple(s for s in sorted(self._slots) if defined[s] < index <= needed.get(s, -1))

    def _why_not(self, index: int, unit: str, crosses: tuple[int, ...]) -> str:
        tape = self.tape
        for slot in crosses:
            value = tape.values[slot]
            if not value.dtype.is_floating_point:
                kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
                return f"a value {kind} that depends on parameters, which has no gradient"
        shared = Counter(tape.values[slot].storage for slot in crosses)
        shared.update(set(tape.storages.values()))
        for node in tape.nodes[index:]:
            if any(shared[storage] > 1 for storage in node.mutates):
                return "a value that is written in place later, and a part of it"
        for name in sorted(tape.changed):
            uses = list(self._uses(name))
            if uses and min(uses) < index <= max(uses):
                return f"{name}, which is written in the forward"
        return ""

    def _uses(self, name: str) -> Iterator[int]:
        for index, node in enumerate(self.tape.nodes):
            if name in node.state:
                yield index
        if name in self.tape.writes:
            yield self._defined[self.tape.writes[name]]
        if name in self.tape.returns_state:
            yield len(self.tape.nodes)

    def indices(self, begin: int, end: int) -> list[int]:
        """Nodes that a stage from begin to before end runs, in order."""
        tape = self.tape
        last = end == len(tape.nodes)
        needed = set(tape.returns) if last else set()
        chosen = []
        for index in reversed(range(end)):
            node = tape.nodes[index]
            storages = {tape.values[slot].storage for slot in needed}
            mine = self.stays[index] and index >= begin
            if not mine and (
                self.stays[index] or not (needed & {*node.outs} or node.mutates & storages)
            ):
                continue
            chosen.append(index)
            needed |= node.reads
        return chosen[::-1]

    def made(self, begin: int, end: int) -> dict[str, int]:
        """Buffers assigned anew by the nodes from begin to before end, with their slots."""
        writes = self.tape.writes
        return {n: slot for n, slot in writes.items() if begin <= max(self._defined[slot], 0) < end}

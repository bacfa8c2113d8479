"""A pipeline as code: a class a stage, torch's schedule around them, and what it has to be told."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.engine.axes import halves
from workbench.engine.cut import Cut
from workbench.engine.export import stages
from workbench.engine.export.calls import Writer
from workbench.engine.export.case import Case, Section, listed
from workbench.engine.export.layout import wrapped
from workbench.engine.export.outputs import Outputs, access
from workbench.engine.export.stages import StageText
from workbench.engine.nest import Ref, tensors
from workbench.errors import LayoutError

SCHEDULES = "torch.distributed.pipelining"


@dataclass(frozen=True)
class Pipeline:
    """texts: by stage. inputs: of the first one; access: expressions for the model's inputs by the
    names they have in stages. tied: for each parameter that several ranks hold, its name in the
    part of each of them. multi: several stages on each rank.
    """

    texts: list[StageText]
    outputs: Outputs
    cut: Cut
    inputs: list[Tensor]
    access: dict[str, str]
    tied: list[dict[int, str]]
    multi: bool

    LOSS = "torch.stack(losses).detach().sum()"

    @classmethod
    def of(cls, case: Case, writer: Writer) -> Pipeline:
        """Raises LayoutError for what cannot be written as code."""
        blueprint, layout = case.blueprint, case.layout
        if not case.is_even:
            count = layout.dp * case.micros
            raise LayoutError(
                f"batch={case.recipe.batch} does not make {count} microbatches of one size, which "
                f"the pipeline of a script needs. Use a batch that {count} divides."
            )
        if not isinstance(case.recipe.samples.fetch(0, 1)[1], Tensor):
            raise LayoutError(
                "The targets are nested values, which torch's pipelines do not cut into "
                "microbatches. Export it under data or tensor parallelism."
            )
        count = case.micro_size
        inputs = blueprint.inputs(count)
        cut = blueprint.cut(layout.num_stages, inputs, (count,))
        dtype = blueprint.precision_dtype
        outputs = Outputs(cut.stages, case.bones, inputs, blueprint.device, dtype)
        given = list(tensors(inputs))
        names = stages.input_names(case.bones, inputs, len(given))
        texts = [
            stages.write(number, plan, outputs, names, writer)
            for number, plan in enumerate(cut.stages)
        ]
        multi = layout.order.stages_per_rank > 1
        if multi and any(text.needs for text in texts[1:]):
            raise LayoutError(
                f"A later stage looks at the model's inputs, which {layout.schedule} does not pass "
                "on. Switch to gpipe or 1f1b to export it."
            )
        tied = _tied(case, cut, texts, multi)
        places = dict(zip(names, access(inputs, "inputs"), strict=True))
        first = [given[names.index(name)] for name in texts[0].needs]
        return cls(texts, outputs, cut, first, places, tied, multi)

    def sections(self, case: Case, writer: Writer) -> Iterator[Section]:
        """What stands before `main`."""
        for text in self.texts:
            section = Section(text.text.splitlines())
            section.needs("from torch import nn\nimport torch")
            yield section
        if case.layout.order.splits:
            yield from _halves()
        yield self._shapes(case)
        yield self._loss_part(case, writer)

    def _shapes(self, case: Case) -> Section:
        lines = [
            f"# What each stage takes and the last one gives, {case.micro_size} samples a time."
        ]
        every = [self.inputs, *(list(plan.takes) for plan in self.cut.stages[1:])]
        every.append(self.outputs.metas)
        lines.append("SHAPES = (")
        for found in every:
            metas = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in found]
            for meta, tensor in zip(metas, found, strict=True):
                meta.requires_grad_(tensor.requires_grad)
            codes = [stages.like(meta) for meta in metas]
            lines.append(wrapped(f"    {listed(codes)}") + ",")
        lines.append(")")
        if self.tied:
            lines.append(
                "# Parameters that several ranks hold: the name on each rank of the pipeline."
            )
            pairs = (
                ", ".join(f'{rank}: "{n}"' for rank, n in names.items()) for names in self.tied
            )
            lines.append(f"TIED = [{', '.join(f'{{{inside}}}' for inside in pairs)}]")
        found = Section(lines)
        found.needs("import torch")
        return found

    def _loss_part(self, case: Case, writer: Writer) -> Section:
        parts = "MICROBATCHES"
        if case.options.accumulate > 1:
            parts = "(ACCUMULATE * MICROBATCHES)"
        lines = []
        if self.outputs.whole != Ref(self.outputs.returned[0]):
            # The last stage gives its tensors alone, and the loss wants them as the model has them.
            places = {slot: place for place, slot in enumerate(self.outputs.returned)}
            one = len(places) == 1
            writer.tensor = lambda found: stages.Code(
                "output" if one else f"output[{places[found.slot]}]"  # pyright: ignore
            )
            lines.append(f"output = {writer.value(self.outputs.whole).text}")
        lines.append(f"return {case.own.loss}(output, target) / {parts}")
        return Section(
            [
                *(["@AUTOCAST"] if case.options.precision == "bf16" else []),
                "def part_of_loss(output, target):",
                '    """What a microbatch adds to the mean loss of a step."""',
                *(wrapped(f"    {line}") for line in lines),
            ]
        )

    # In main.

    def is_last(self, case: Case) -> str:
        """Whether a rank has the last stage, as code."""
        return f"pp == {case.layout.rank_of_stage(case.layout.num_stages - 1)}"

    def build(self, case: Case, found: Section) -> Iterator[str]:
        """This rank's part of the model, and the schedule that runs it."""
        layout = case.layout
        kind = f"Schedule{layout.order.torch_name}"
        found.needs(f"from {SCHEDULES} import {kind}")
        stage_kind = "HalvesStage" if layout.order.splits else "PipelineStage"
        if not layout.order.splits:
            found.needs(f"from {SCHEDULES} import PipelineStage")
        names = listed([f"Stage{number}" for number in range(layout.num_stages)])
        if self.multi:
            second = f"{2 * layout.pp - 1} - pp" if layout.order.is_v else f"pp + {layout.pp}"
            yield f"mine = (pp, {second})  # the stages of this rank"
            yield f"stages = {names}"
            yield "part = nn.ModuleList(stages[number](net) for number in mine)"
        else:
            yield f"part = {names}[pp](net)"
        yield "del net  # what other ranks hold is gone"
        yield from self._shard(case, found)
        number, layers = ("number", "layers") if self.multi else ("pp", "part")
        arguments = [
            f"    {layers},",
            f"    stage_index={number},",
            f"    num_stages={layout.num_stages},",
            "    device=DEVICE,",
            f"    input_args=SHAPES[{number}],",
            f"    output_args=SHAPES[{number} + 1],",
            f"    group={case.group('pp')},",
        ]
        if self.multi:
            yield "stages = ["
            yield f"    {stage_kind}("
            yield from (f"    {line}" for line in arguments)
            yield "    )"
            yield "    for number, layers in zip(mine, part, strict=True)"
            yield "]"
        else:
            yield from (f"stage = {stage_kind}(", *arguments, ")")
        stage = "stages" if self.multi else "stage"
        call = f"{stage}, MICROBATCHES, loss_fn=part_of_loss, scale_grads=False"
        line = f"schedule = {kind}({call})"
        yield from [line] if len(line) <= 96 else [f"schedule = {kind}(", f"    {call}", ")"]
        yield from self._tie(case)

    def _shard(self, case: Case, found: Section) -> Iterator[str]:
        if case.layout.dp_shard == 1:
            return
        found.needs("from torch.distributed.fsdp import fully_shard")
        names = ", ".join(f'"{axis}"' for axis in case.data_axes)
        mesh = f"mesh[{names}]"
        if self.multi:
            yield "for layers in part:"
            yield f"    fully_shard(layers, mesh={mesh})"
        else:
            yield f"fully_shard(part, mesh={mesh})"

    def _tie(self, case: Case) -> Iterator[str]:
        """The parameters of this rank that others hold too, with the group of these ranks."""
        if not self.tied:
            return
        if all(len(names) == case.layout.pp for names in self.tied):
            yield f"tied = [(part.get_parameter(names[pp]), {case.group('pp')}) for names in TIED]"
            return
        yield "tied = []"
        yield f"ranks = dist.get_process_group_ranks({case.group('pp')})"
        yield "for names in TIED:"
        yield "    if pp in names:"
        yield "        holders = [ranks[place] for place in names]"
        yield "        group = dist.new_group(holders, use_local_synchronization=True)"
        yield "        tied.append((part.get_parameter(names[pp]), group))"

    def step(self, case: Case) -> Iterator[str]:
        """A step up to its gradients."""
        first = "step * BATCH"
        count = "SHARE" if case.share else "BATCH"
        if case.share:
            first += f" + {case.share_factor} * SHARE"
        accumulate = case.options.accumulate
        if accumulate > 1:
            yield "value = torch.zeros((), device=DEVICE)"
            yield f"count = {count} // ACCUMULATE"
            yield "for micro in range(ACCUMULATE):"
            first, count = f"{first} + micro * count", "count"
        yield from _indented(self._round(case, first, count), accumulate > 1)
        yield from self._sums(case)

    def _round(self, case: Case, first: str, count: str) -> Iterator[str]:
        yield f"inputs, targets = samples({first}, {count})"
        yield "losses = []"
        last = case.layout.rank_of_stage(case.layout.num_stages - 1)
        cases = [(f"pp == {rank}", self._call(case, rank)) for rank in range(case.layout.pp)]
        default = cases[-1] if last == 0 or case.layout.pp == 2 else cases[1]
        shown = [one for one in cases if one[1] != default[1]]
        for place, (condition, call) in enumerate(shown):
            yield f"{'el' if place else ''}if {condition}:"
            yield f"    {call}"
        yield "else:"
        yield f"    {default[1]}"
        if case.options.accumulate > 1:
            yield f"if {self.is_last(case)}:"
            yield f"    value += {self.LOSS}"

    def _call(self, case: Case, rank: int) -> str:
        numbers = case.layout.order.stages_of(rank, case.layout.pp)
        args = []
        for number in numbers:
            given = [(name, self.access[name]) for name in self.texts[number].needs]
            args += [f"{name}={text}" if number else text for name, text in given]
        if case.layout.num_stages - 1 in numbers:
            args += ["target=targets", "losses=losses"]
        return f"schedule.step({', '.join([*args, 'return_outputs=False'])})"

    def _sums(self, case: Case) -> Iterator[str]:
        """What no pass has summed on its way."""
        replicas = case.layout.dp_replicate
        if replicas > 1 and case.layout.dp_shard == 1:
            yield "for param in part.parameters():  # the mean over the replicas"
            yield "    if param.requires_grad:"
            yield "        if param.grad is None:"
            yield "            param.grad = torch.zeros_like(param)"
            yield f"        dist.all_reduce(param.grad, group={case.group('dp')})"
            yield f"        param.grad /= {replicas}"
        if self.tied:
            local = ".to_local()" if case.layout.dp_shard > 1 else ""
            yield "for param, group in tied:"
            yield f"    dist.all_reduce(param.grad{local}, group=group)"


def _indented(lines: Iterator[str], deep: bool) -> Iterator[str]:
    yield from (f"    {line}" if deep else line for line in lines)


def _halves() -> Iterator[Section]:
    """The stage of schedules that go backward in two halves, as it is here."""
    for part in (halves.HalvesStage, halves.can_be_split, halves.leads_to):
        section = Section(inspect.getsource(part).splitlines())
        section.needs("from collections.abc import Sequence\nfrom typing import Any")
        section.needs(f"from {SCHEDULES} import PipelineStage\nimport torch")
        yield section


def _tied(case: Case, cut: Cut, texts: list[StageText], multi: bool) -> list[dict[int, str]]:
    layout, bones = case.layout, case.bones
    every = list(bones.named_parameters(remove_duplicate=False))
    params = dict(every)
    found = []
    for name, users in sorted(cut.tied.items()):
        if not params[name].requires_grad:
            continue
        aliases = [other for other, param in every if param is params[name]]
        where: dict[int, str] = {}
        for number in users:
            rank = layout.rank_of_stage(number)
            inside = [text for alias in aliases if (text := texts[number].parts.inside(alias))]
            if not inside:
                raise stages.unknown_tied(name)
            place = layout.order.stages_of(rank, layout.pp).index(number)
            where.setdefault(rank, f"{place}.{inside[0]}" if multi else inside[0])
        if len(where) > 1:
            found.append(where)
    return found

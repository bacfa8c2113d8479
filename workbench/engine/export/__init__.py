"""Export: a training as a plain torchrun script, which needs nothing but torch and takes the same
steps.

It holds the recipe's own text, the order of the samples, and the parallel set-up of the one layout
there is, written out by hand; nothing of it is general.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from workbench.engine import notes
from workbench.engine.blueprint import Blueprint
from workbench.engine.export import loop, own_text, tensor, texts
from workbench.engine.export.calls import Code, Writer
from workbench.engine.export.case import About, Case, Section, looked_at
from workbench.engine.export.imports import Import, rendered
from workbench.engine.export.own_text import OwnText
from workbench.engine.export.pipeline import Pipeline
from workbench.errors import RecipeError, WorkbenchError
from workbench.spec.layout import Layout

__all__ = ["script"]

FUNCTIONAL = Import("torch.nn", "functional")
# Begins what the header says of losses that need not be those of the run.
DIFFERS = "What differs:"
# What the header says of each axis.
SPREADS = {
    "pp": "Consecutive layers lie on consecutive ranks, and microbatches go through them one\n"
    "after another ({layout.schedule}, {layout.microbatches} in a step).",
    "dp": "Each replica of the model takes its share of every batch; gradients are averaged.",
    "fsdp": "Each rank keeps a shard of parameters, gradients and optimizer state, and gathers\n"
    "parameters when it needs them.",
    "tp": "Each rank computes with a part of the large matrices, and the ranks sum what they get.",
}


def script(
    blueprint: Blueprint,
    layout: Layout,
    about: Mapping[str, Any],
    *,
    cell: str | None = None,
    namespace: Mapping[str, Any] | None = None,
) -> str:
    """The text of the script. about: see About. cell: text of the cell that defined the recipe,
    None for a built-in one; namespace: where it was executed.

    Raises RecipeError or LayoutError for what cannot be written as a script that stands alone.
    """
    recipe = blueprint.plan.recipe
    if cell is None:
        own = own_text.of_builtin(recipe)
    else:
        own = own_text.of_cell(recipe, cell, namespace or {})
    unused, draws = looked_at(blueprint)
    case = Case(About(**about), own, blueprint, layout, unused, draws)
    _check_groups(case)
    functional = next((i.bound for i in own.imports if _is_functional(i)), "")
    space = vars(own_text.module_of(recipe)) if cell is None else namespace or {}
    writer = Writer(
        lambda _: Code(""),
        lambda _: None,
        own.names,
        blueprint.device.type,
        functional or "functional",
        {name: space[name] for name in own.names if name in space},
    )
    pipeline = Pipeline.of(case, writer) if case.layout.pp > 1 else None
    sections = list(_sections(case, pipeline, writer))
    imports = {*own.imports, *writer.imports}.union(*(section.imports for section in sections))
    around = "\n".join(line for section in sections for line in section.lines)
    if not functional and f"{writer.functional}." in around:
        imports.add(FUNCTIONAL)
    _check_names(own, imports)
    return _put_together(case, sections, imports)


def _sections(case: Case, pipeline: Pipeline | None, writer: Writer) -> Iterator[Section]:
    """What is put around the recipe: the first two come before it."""
    yield texts.constants(case)
    yield texts.seeding(case)
    yield texts.data(case)
    yield texts.in_parts(case)
    yield texts.batch_norm(case)
    yield tensor.layers(case, writer.functional)
    if pipeline is not None:
        yield from pipeline.sections(case, writer)
    yield tensor.clip(case, bool(pipeline and pipeline.tied))
    yield loop.main(case, pipeline)


def _put_together(case: Case, sections: Sequence[Section], imports: set[Import]) -> str:
    own = case.own
    blocks = ["\n".join(section.lines) for section in sections]
    blocks = [_renamed(block, _bound(blocks) & own.names) for block in blocks]
    recipe = [
        "# The recipe, as the cell has it." if own.is_cell else f"# The recipe {case.recipe.name}.",
        "",
        *own.given,
        *([f"{case.seed(str(case.options.seed or 0))}  # alike on all ranks"] if own.draws else []),
        own.text,
    ]
    if "recipe" in own.names and case.recipe.name in own.names:
        recipe += ["", "", f"{case.seed('0')}", f"recipe = {case.recipe.name}()"]
    before, after = blocks[:2], blocks[2:]
    parts = [*before, "\n".join(recipe), *after]
    text = "\n\n\n".join(part.strip("\n") for part in parts if part.strip())
    return f"{_header(case)}\n\n{rendered(imports)}\n\n{text}\n"


def _header(case: Case) -> str:
    about, layout, recipe = case.about, case.layout, case.recipe
    size = f" ({recipe.size})" if recipe.size else ""
    name = "A recipe of a notebook" if case.own.is_cell else recipe.name
    where, command = "on one process", f"python {about.file}"
    if layout.world_size > 1:
        where = f"on {layout.world_size} processes ({layout})"
        command = f"torchrun --standalone --nproc-per-node {layout.world_size} {about.file}"
    lines = [
        f'"""{name}{size} {where}: a plain torch script, to be run with',
        "",
        f"    {command}",
        "",
        *(text.format(layout=layout) for axis, text in SPREADS.items() if axis in case.axes),
    ]
    differences = list(_differences(case))
    gives = "." if differences else ", and gives the losses of that run."
    told = [
        f"Written by %dist_export at step {about.step:,} of {about.run}. It starts from the seed, "
        f"at step 1{gives}",
        *(f"{DIFFERS} {text}" for text in differences),
    ]
    if case.options.precision == "bf16":
        told.insert(1, "Under bf16 autocast losses agree as far as bf16 rounds.")
    lines += [line for text in told for line in textwrap.wrap(text, 95)]
    return "\n".join([*lines, '"""'])


def _differences(case: Case) -> Iterator[str]:
    """Why the losses need not be those of the run, one sentence each; its layouts are not known."""
    if case.draws:
        yield (
            "random numbers of the forward (dropout) come from torch's generator, so the losses "
            "are alike, and not the same digit by digit."
        )
    rounds, until = case.micros, "so the losses are those of the run only up to its first step"
    each = f"each of {rounds} microbatches"
    if found := notes.batchnorms(case.bones):
        where = each if rounds > 1 else "the whole batch"
        others = f"other than {rounds} microbatches" if rounds > 1 else "microbatches"
        yield f"statistics of {found} come from {where} here, {until} with {others}."
    if found := notes.batchnorms(case.bones, of_a_rank=True):
        where = each if rounds > 1 else "the batch"
        share = f"{where}, as far as it lies on a rank" if case.layout.dp > 1 else where
        yield f"statistics of {found} come from {share} here, {until} under another layout."
    if case.blueprint.loss_note:
        yield f"the loss depends on how a batch is split, {until} under another layout."
    if case.blueprint.state_note:
        yield f"the forward keeps state or draws by itself, {until} under another layout."


def _bound(blocks: Sequence[str]) -> set[str]:
    """Names that what is put around the recipe binds at the top level."""
    found: set[str] = set()
    for node in ast.parse("\n".join(blocks)).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {
                leaf.id for t in node.targets for leaf in ast.walk(t) if isinstance(leaf, ast.Name)
            }
    return found


def _renamed(text: str, taken: set[str]) -> str:
    """The text with another name for what the recipe has a name for already, but in comments."""
    lines = []
    for line in text.splitlines():
        code, mark, comment = line.partition("  # ")
        if not code.lstrip().startswith(('"""', "#")):
            for name in taken:
                code = re.sub(rf"(?<![\w.\"]){name}\b(?!=[^=])", f"{name}_", code)
        lines.append(code + mark + comment)
    return "\n".join(lines)


def _is_functional(one: Import) -> bool:
    return (one.module, one.name) in (("torch.nn", "functional"), ("", "torch.nn.functional")) and (
        bool(one.alias or one.module)
    )


def _check_names(own: OwnText, imports: set[Import]) -> None:
    """Raises RecipeError when the recipe calls something else by a name that the script needs."""
    theirs = {one.bound: one for one in own.imports | own.late}
    for one in sorted(imports - own.imports):
        other = theirs.get(one.bound)
        same_package = other is not None and not (one.module or other.module or one.alias)
        if one.bound in own.names and not (other and (other == one or same_package)):
            raise RecipeError(
                f"The recipe calls something else {one.bound!r}, the name that a script has for "
                f"what `{one}` gives. Rename it to export it."
            )


def _check_groups(case: Case) -> None:
    """Raises RecipeError when a rank's parameters alone would fall into other groups, or none."""
    groups = case.blueprint.groups
    params = dict(case.bones.named_parameters())
    if case.layout.pp == 1 or (len(groups) == 1 and len(groups[0]) == len(params)):
        return
    count = case.micro_size
    cut = case.blueprint.cut(case.layout.num_stages, case.blueprint.inputs(count), (count,))
    names = {id(param): name for name, param in params.items()}
    for rank in range(case.layout.pp):
        plans = [cut.stages[stage] for stage in case.layout.order.stages_of(rank, case.layout.pp)]
        held = {name for plan in plans for name in plan.params}
        own = [name for name in params if name in held]
        if not any(params[name].requires_grad for name in own):
            raise RecipeError(
                f"Rank {rank} of the pipeline has nothing to train, and optimizers refuse that. "
                "Export it with fewer stages, or under data or tensor parallelism."
            )
        expected = [[name for name in group if name in held] for group in groups]
        try:
            optimizer = case.recipe.optimizer(iter([params[name] for name in own]))
            found = [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]
        except (WorkbenchError, ValueError, IndexError):
            found = []
        if list(map(sorted, found)) != list(map(sorted, expected)):
            raise RecipeError(
                "optimizer() groups parameters by their place in the model, which a stage has only "
                "a part of. Export it under data or tensor parallelism."
            )

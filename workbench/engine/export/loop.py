"""Loop: the `main` of a script, set up for one layout and with what its training uses alone."""

from __future__ import annotations

from collections.abc import Iterator

from workbench.engine.export.case import Case, Section, listed
from workbench.engine.export.paths import path
from workbench.engine.export.pipeline import Pipeline

AVERAGED = "  # gradients are averaged over the shares"


def main(case: Case, pipeline: Pipeline | None) -> Section:
    """The functions that train, and the call."""
    found = Section([])
    body = [*_mesh(case, found), *_model(case, found, pipeline), "", *_steps(case, pipeline)]
    found.lines = [
        "def train():",
        '    """Take the steps, and print the loss of each."""',
        *(f"    {line}".rstrip() for line in body),
        "",
        "",
    ]
    size = case.layout.world_size
    if size > 1:
        found.needs("import torch.distributed as dist")
        # DDP's reducer must be gone before its group is: a thread of gloo would wait for Python,
        # and Python for the thread.
        found.lines += [
            "def main():",
            '    """Meet the other processes, train, and part."""',
            "    dist.init_process_group()",
            f"    if dist.get_world_size() != {size}:",
            f'        raise SystemExit("This script is for {size} processes.")',
            "    train()",
            "    dist.destroy_process_group()",
            "",
            "",
        ]
    call = "main()" if size > 1 else "train()"
    found.lines += ['if __name__ == "__main__":', f"    {call}"]
    return found


def _mesh(case: Case, found: Section) -> Iterator[str]:
    """Where this rank lies."""
    if case.layout.world_size == 1:
        return
    if case.is_plain_ddp:
        yield "rank = dist.get_rank()"
        return
    found.needs("from torch.distributed.device_mesh import init_device_mesh")
    degrees = listed([str(degree) for degree in case.axes.values()])
    names = listed([f'"{name}"' for name in case.axes])
    yield f"mesh = init_device_mesh(DEVICE.type, {degrees}, mesh_dim_names={names})"
    left = [name if _is_used(case, name) else "_" for name in case.axes]
    if any(name != "_" for name in left):
        taken = listed(left) if len(left) == 1 else ", ".join(left)
        yield f"{taken} = mesh.get_coordinate()"
    yield ""


def _is_used(case: Case, axis: str) -> bool:
    return axis in ("pp", "dp", "fsdp") or case.layout.pp > 1


def _model(case: Case, found: Section, pipeline: Pipeline | None) -> Iterator[str]:
    same = "  # the same parameters on every rank" if case.layout.world_size > 1 else ""
    yield f"{case.seed('SEED')}{same}"
    yield f"net = {case.own.model}.to(DEVICE)"
    for name in case.unused or ():
        where = path("net", case.bones, name)
        yield f"{where}.requires_grad_(False)  # takes no part in the loss"
    if case.norms:
        groups = listed([case.group(axis) for axis in case.data_axes])
        yield f"share_statistics(net, {groups})"
    if case.layout.tp > 1:
        yield f"split(net, {case.group('tp')})"
    if case.options.recompute:
        yield from _recompute(case, found)
    if pipeline is not None:
        yield from pipeline.build(case, found)
    else:
        yield from _spread(case, found)
    params = "part.parameters()" if pipeline else "net.parameters()"
    yield f"opt = {case.own.optimizer.format(params)}"
    if case.draws and case.layout.dp > 1:
        yield f"torch.manual_seed(SEED + 1 + {case.share})  # dropout of its own for each share"


def _recompute(case: Case, found: Section) -> Iterator[str]:
    found.needs("import functools\nfrom torch.utils.checkpoint import checkpoint")
    if case.blocks:
        where = path("net", case.bones, case.blocks)
    else:
        units = case.blueprint.limits.units
        where = listed([path("net", case.bones, name) for name in units])
    yield "# These are computed again on the way back, instead of kept."
    yield f"for layer in {where}:"
    yield "    layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)"


def _spread(case: Case, found: Section) -> Iterator[str]:
    """Data parallelism of a whole model."""
    if case.layout.dp_shard > 1:
        found.needs("from torch.distributed.fsdp import fully_shard")
        names = [f'"{axis}"' for axis in case.data_axes]
        mesh = f"mesh[{', '.join(names)}]" if len(case.axes) > len(names) else "mesh"
        if case.blocks:
            yield f"for block in {path('net', case.bones, case.blocks)}:"
            yield f"    fully_shard(block, mesh={mesh})"
        yield f"fully_shard(net, mesh={mesh})"
    elif case.layout.dp_replicate > 1:
        found.needs("from torch.nn.parallel import DistributedDataParallel")
        group = "" if case.is_plain_ddp else f", process_group={case.group('dp')}"
        unused = ", find_unused_parameters=True" if case.unused is None else ""
        yield f"net = DistributedDataParallel(net{group}{unused})"


# The steps.


def _steps(case: Case, pipeline: Pipeline | None) -> Iterator[str]:
    if not case.is_even:
        yield from _places(case)
    yield "for step in range(STEPS):"
    if pipeline is not None:
        inside = list(pipeline.step(case))
    elif case.micros == 1:
        inside = list(_once(case))
    else:
        inside = list(_accumulated(case))
    inside += _update(case, pipeline)
    inside += _printed(case, pipeline)
    yield from (f"    {line}" for line in inside)


def first_sample(case: Case) -> tuple[str, str]:
    """Where this rank's share of a step begins, and its size, as code."""
    if not case.share:
        return "step * BATCH", "BATCH"
    return f"step * BATCH + {case.share_factor} * SHARE", "SHARE"


def _once(case: Case) -> Iterator[str]:
    first, count = first_sample(case)
    if case.is_even:
        yield f"inputs, targets = samples({first}, {count})"
        yield from _forward(case, "value", "")
        yield "value.backward()" + _how(case)
        return
    mine = f"shares[{case.share}]"
    yield f"first, count = step * BATCH + sum(shares[:{case.share}]), {mine}"
    yield "inputs, targets = samples(first, count)"
    yield from _forward(case, "value", " * (count / BATCH)")
    yield f"(value * {case.layout.dp}).backward(){AVERAGED}"


def _how(case: Case) -> str:
    if case.layout.dp_shard > 1:
        return "  # averages gradients over the ranks; each gets its shard"
    return "  # averages gradients over the replicas" if case.layout.dp_replicate > 1 else ""


def _forward(case: Case, name: str, weight: str) -> Iterator[str]:
    line = f"{name} = {case.own.loss}(net(inputs), targets){weight}"
    if case.options.precision == "bf16":
        yield "with AUTOCAST:"
        line = f"    {line}"
    yield line


def _places(case: Case) -> Iterator[str]:
    """Where the microbatches lie when they are not of one size."""
    if case.layout.dp > 1:
        yield f"shares = in_parts(BATCH, {case.layout.dp})"
    if case.options.accumulate > 1:
        mine = f"shares[{case.share}]" if case.share else "BATCH"
        yield f"micros = in_parts({mine}, ACCUMULATE)"


def _accumulated(case: Case) -> Iterator[str]:
    accumulate, dp = case.options.accumulate, case.layout.dp
    yield "value = torch.zeros((), device=DEVICE)"
    first, _ = first_sample(case)
    if case.is_even:
        count = ("SHARE" if case.share else "BATCH") + " // ACCUMULATE"
        yield f"count = {count}"
        yield "for micro in range(ACCUMULATE):"
        inside = [f"inputs, targets = samples({first} + micro * count, count)"]
    else:
        yield f"first = step * BATCH{f' + sum(shares[:{case.share}])' if case.share else ''}"
        yield "for micro, count in enumerate(micros):"
        inside = ["inputs, targets = samples(first, count)", "first += count"]
    if accumulate > 1 and dp > 1:
        last = "micro == ACCUMULATE - 1"
        is_sharded = case.layout.dp_shard > 1
        call = f"net.set_requires_gradient_sync({last})"
        inside.append(call if is_sharded else f"net.require_backward_grad_sync = {last}")
    weight = " / ACCUMULATE" if case.is_even else " * (count / BATCH)"
    inside += [*_forward(case, "loss_part", weight)]
    back = "loss_part" if case.is_even or dp == 1 else f"(loss_part * {dp})"
    why = "" if case.is_even or dp == 1 else AVERAGED
    inside += [f"{back}.backward(){why}", "value += loss_part.detach()"]
    yield from (f"    {line}" for line in inside)


def _update(case: Case, pipeline: Pipeline | None) -> Iterator[str]:
    if case.options.clip is not None and case.layout.pp == case.layout.tp == 1:
        yield "torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)"
    elif case.options.clip is not None:
        tied = ", tied" if pipeline and pipeline.tied else ""
        yield f"clip({'part' if pipeline else 'net'}, mesh{tied})"
    if case.own.lr:
        yield "for group in opt.param_groups:"
        yield f'    group["lr"] = {case.own.lr}(step)'
    yield "opt.step()"
    yield "opt.zero_grad()"


def _printed(case: Case, pipeline: Pipeline | None) -> Iterator[str]:
    """The mean loss of the step, by one rank."""
    value = "value"
    lines = []
    if case.data_axes:
        if not pipeline and case.micros == 1:
            lines.append("value = value.detach()")
        for axis in case.data_axes:
            group = "" if case.is_plain_ddp else f", group={case.group(axis)}"
            lines.append(f"dist.all_reduce(value{group})")
        value = f"value / {case.layout.dp}" if case.is_even else "value"
    shown = f"({value}).item()" if " " in value else f"{value}.item()"
    line = f'print(f"step {{step + 1}} loss {{{shown}:.7g}}")'
    if case.layout.world_size == 1:
        lines.append(line)
    elif pipeline is None:
        rank = "rank" if case.is_plain_ddp else "dist.get_rank()"
        lines += [f"if {rank} == 0:", f"    {line}"]
    else:
        alone = " and ".join(f"{axis} == 0" for axis in case.axes if axis != "pp")
        here = pipeline.is_last(case)
        if case.options.accumulate == 1:
            lines.insert(0, f"value = {pipeline.LOSS}")
        elif alone and not lines:
            here, alone = f"{here} and {alone}", ""
        lines += [f"if {alone}:", f"    {line}"] if alone else [line]
        lines = [f"if {here}:", *(f"    {each}" for each in lines)]
    yield from lines

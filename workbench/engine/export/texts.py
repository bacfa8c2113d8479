"""Texts: the parts of a script that are the same for all models, each written when it is used."""

from __future__ import annotations

import textwrap
from typing import Any

from torch import Tensor

from workbench.engine.export.case import Case, Section, listed
from workbench.errors import RecipeError


def _section(text: str, imports: str = "") -> Section:
    found = Section(textwrap.dedent(text).strip("\n").splitlines())
    found.needs(imports)
    return found


def constants(case: Case) -> Section:
    """The numbers of the training, and the device."""
    recipe, options, layout = case.recipe, case.options, case.layout
    over = "" if layout.world_size == 1 else ", over all ranks"
    lines = [
        f"STEPS = {case.about.steps}",
        f"BATCH = {recipe.batch}  # samples in a step{over}",
    ]
    if layout.dp > 1 and case.is_even:
        whose = "each rank" if layout.pp == layout.tp == 1 else "each replica of the model"
        lines.append(f"SHARE = BATCH // {layout.dp}  # of them for {whose}")
    if options.accumulate > 1:
        what = "share" if layout.dp > 1 else "batch"
        lines.append(f"ACCUMULATE = {options.accumulate}  # parts of a {what}, one after another")
    if layout.pp > 1:
        lines.append(
            f"MICROBATCHES = {layout.microbatches}  # on their way through the pipeline at once"
        )
    if options.clip is not None:
        lines.append(f"CLIP = {options.clip}  # largest norm of the gradient")
    lines.append(f"SEED = {recipe.seed}")
    lines += ["", 'DEVICE = torch.device("cpu")', "if torch.cuda.is_available():"]
    rank = 'int(os.environ.get("LOCAL_RANK", "0"))'
    lines += [f'    DEVICE = torch.device("cuda", {rank})', "    torch.cuda.set_device(DEVICE)"]
    if options.precision == "bf16":
        lines.append("AUTOCAST = torch.autocast(DEVICE.type, dtype=torch.bfloat16)")
    found = Section(lines)
    found.needs("import os\nimport torch")
    return found


def seeding(case: Case) -> Section:
    """How all that may draw is seeded, where that is more than torch."""
    if case.own.uses_only_torch:
        return Section([])
    return _section(
        '''
        def seed_all(number):
            """Everything that may draw random numbers, alike on all ranks."""
            torch.manual_seed(number)
            random.seed(number)
            np.random.seed(number % 2**32)
        ''',
        "import random\nimport numpy as np\nimport torch",
    )


def data(case: Case) -> Section:
    """The order of the samples, which is the same on any number of ranks."""
    samples = case.recipe.samples
    if samples.length is None:
        return _function_data(case)
    is_pair = "tensors" in case.own.source or isinstance(samples.source, (tuple, list))
    names, length = ("INPUTS, TARGETS", "INPUTS") if is_pair else ("DATA", "DATA")
    found = _section(
        f'''
        {case.seed("0")}  # what the data draws is the same on all ranks
        {names} = {case.own.source}


        @functools.lru_cache(maxsize=2)
        def order(epoch):
            """The order of the samples in an epoch, drawn from SEED and its number."""
            digest = hashlib.blake2b(f"order{{(SEED, epoch)}}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            return torch.randperm(len({length}), generator=generator).tolist()
        ''',
        "import functools\nimport hashlib\nimport torch",
    )
    taken = _pair_data() if is_pair else _item_data(case)
    return Section([*found.lines, "", "", *taken.lines], found.imports | taken.imports)


def _pair_data() -> Section:
    return _section('''
        def samples(first, count):
            """Samples first .. first+count-1 of all epochs in a row."""
            length = len(INPUTS)
            index = [order(n // length)[n % length] for n in range(first, first + count)]
            return INPUTS[index].to(DEVICE), TARGETS[index].to(DEVICE)
    ''')


def _item_data(case: Case) -> Section:
    return _section(
        f'''
        def samples(first, count):
            """Samples first .. first+count-1 of all epochs in a row."""
            items = []
            for n in range(first, first + count):
                digest = hashlib.blake2b(f"sample{{(SEED, n)}}".encode(), digest_size=8).digest()
                {case.seed('int.from_bytes(digest, "little") >> 1')}  # for what it draws
                items.append(DATA[order(n // len(DATA))[n % len(DATA)]])
            inputs, targets = default_collate(items)
            return {_moved(case, 0)}, {_moved(case, 1)}
        ''',
        "from torch.utils.data import default_collate",
    )


def _function_data(case: Case) -> Section:
    """A function of the numbers of samples; one that draws is asked for one at a time."""
    samples = case.recipe.samples
    batch = samples.fetch(0, 1)
    moved = f"{_moved(case, 0)}, {_moved(case, 1)}"
    if not samples._draws:
        return _section(
            f'''
            def samples(first, count):
                """Samples first .. first+count-1."""
                inputs, targets = {case.own.source}(torch.arange(first, first + count))
                return {moved}
            ''',
            "import torch",
        )
    if not all(isinstance(value, Tensor) for value in batch):
        raise RecipeError(
            f"{case.own.source} draws random numbers and gives nested values, which a script does "
            "not put together. Give a pair of tensors to export it."
        )
    return _section(
        f'''
        def samples(first, count):
            """Samples first .. first+count-1, each drawn from SEED and its number."""
            parts = []
            for n in range(first, first + count):
                digest = hashlib.blake2b(f"sample{{(SEED, n)}}".encode(), digest_size=8).digest()
                {case.seed('int.from_bytes(digest, "little") >> 1')}
                parts.append({case.own.source}(torch.tensor([n])))
            inputs, targets = map(torch.cat, zip(*parts, strict=True))
            return {moved}
        ''',
        "import hashlib\nimport torch",
    )


def _moved(case: Case, place: int) -> str:
    """Inputs or targets on the device, as code."""
    value = case.recipe.samples.fetch(0, 1)[place]
    return _moved_code(value, ("inputs", "targets")[place])


def _moved_code(value: Any, text: str) -> str:
    if isinstance(value, Tensor):
        return f"{text}.to(DEVICE)"
    if isinstance(value, dict):
        inside = (f'"{key}": {_moved_code(v, f"""{text}["{key}"]""")}' for key, v in value.items())
        return f"{{{', '.join(inside)}}}"
    if isinstance(value, (tuple, list)):
        return listed([_moved_code(v, f"{text}[{place}]") for place, v in enumerate(value)])
    return text


SUM_OVER_RANKS = '''
    class SumOverRanks(torch.autograd.Function):
        """Forward the sum of all ranks' tensors, backward the sum of all their gradients."""

        @staticmethod
        def forward(ctx, x, groups):
            ctx.groups = groups
            x = x.clone()
            for group in groups:
                dist.all_reduce(x, group=group)
            return x

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            for group in ctx.groups:
                dist.all_reduce(grad, group=group)
            return grad, None


'''


def batch_norm(case: Case) -> Section:
    """Batch normalisation over all shares (torch's SyncBatchNorm is for accelerators alone)."""
    norms = case.norms
    if not norms:
        return Section([])
    kinds = sorted({f"nn.{type(norm).__name__}" for norm in norms})
    is_affine, is_tracked = ({bool(getattr(n, key)) for n in norms} for key in _KEYS)
    any_momentum = any(norm.momentum is None for norm in norms)
    momentum = "1 / norm.num_batches_tracked.item()" if any_momentum else "norm.momentum"
    lines = [
        *textwrap.dedent(SUM_OVER_RANKS).strip("\n").splitlines(),
        "",
        "",
        "def batch_norm(norm, groups, x):",
        '    """norm(x) with the mean and variance of the whole batch, of which x is a part."""',
        "    if not norm.training:",
        "        return type(norm).forward(norm, x)",
        *(["    dtype, x = x.dtype, x.float()"] if case.options.precision == "bf16" else []),
        "    shape, others = (1, -1, *[1] * (x.ndim - 2)), [0, *range(2, x.ndim)]",
        "    count = torch.tensor(x.numel() / x.shape[1], device=DEVICE)  # values in each channel",
        "    count = SumOverRanks.apply(count, groups)",
        "    mean = SumOverRanks.apply(x.sum(others), groups) / count",
        "    x = x - mean.view(shape)",
        "    var = SumOverRanks.apply(x.square().sum(others), groups) / count",
        *_under(is_tracked, "norm.track_running_stats", [
            "with torch.no_grad():",
            "    norm.num_batches_tracked += 1",
            f"    norm.running_mean.lerp_(mean, {momentum})",
            f"    norm.running_var.lerp_(var * count / (count - 1), {momentum})",
        ]),
        "    x = x * torch.rsqrt(var + norm.eps).view(shape)",
        *_under(is_affine, "norm.affine", [
            "x = x * norm.weight.view(shape) + norm.bias.view(shape)"
        ]),
        f"    return x{'.to(dtype)' if case.options.precision == 'bf16' else ''}",
    ]  # fmt: skip
    found = Section([*lines, "", "", *textwrap.dedent(f'''
        def share_statistics(net, groups):
            """Have all layers of batch normalisation look at the batch of all ranks."""
            for norm in net.modules():
                if isinstance(norm, {listed(kinds) if len(kinds) > 1 else kinds[0]}):
                    norm.forward = functools.partial(batch_norm, norm, groups)
    ''').strip("\n").splitlines()])  # fmt: skip
    found.needs("import functools\nimport torch.distributed as dist\nfrom torch import nn")
    return found


_KEYS = ("affine", "track_running_stats")


def _under(values: set[bool], condition: str, lines: list[str]) -> list[str]:
    """Lines that all layers need, some, or none."""
    if values == {True}:
        return [f"    {line}" for line in lines]
    return [f"    if {condition}:", *(f"        {line}" for line in lines)] if any(values) else []


def in_parts(case: Case) -> Section:
    """How a batch is cut where the parts are not of one size."""
    if case.is_even:
        return Section([])
    return _section('''
        def in_parts(total, parts):
            """Sizes of the parts of a batch; the first ones have one sample more."""
            return [total // parts + (place < total % parts) for place in range(parts)]
    ''')

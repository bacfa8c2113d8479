"""Recipe: what to train, found in a cell or in a file of workbench/recipes.

Both follow one convention: functions of a namespace, or the methods of a class, named
model, data (or batch_of), loss, and if wanted optimizer, batch, seed, lr, evaluate, unit, SIZES.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from workbench.engine.data import DATA_KINDS, Samples, fixed_random
from workbench.errors import RecipeError
from workbench.spec.near import unknown

UNITS = ("samples", "tokens")
DEFAULT_BATCH = 32
EXAMPLES = {
    "model": "def model(): return nn.Linear(64, 10)",
    "data": "def data(): return inputs, targets",
    "loss": "loss = nn.functional.cross_entropy",
}
MISSING = object()
FOLDER = "workbench.recipes"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe with every default filled in and every result checked.

    model() builds the module. loss(output, target) is the mean over the samples given.
    optimizer(params) builds the optimizer. lr: a number, a function of the step, or None for
    what the optimizer says. evaluate(model): metrics by name, or None. unit: what throughput
    counts, units_per_sample of them in each sample. size: of SIZES, "" without sizes.
    stages(model): submodules to be called one after another, where the model cannot be cut by
    itself. tensor_plan: FQN patterns to how tensor parallelism splits the module, where that is
    not to be found by itself.
    """

    name: str
    model: Callable[[], nn.Module]
    samples: Samples
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch: int = DEFAULT_BATCH
    seed: int = 0
    lr: float | Callable[[int], float] | None = None
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None
    unit: str = "samples"
    units_per_sample: int = 1
    size: str = ""
    stages: Callable[[nn.Module], list[nn.Module]] | None = None
    tensor_plan: dict[str, str] | None = None

    def changed(self, *, batch: int | None = None, seed: int | None = None) -> Recipe:
        """The recipe with the batch and the seed of the user's options; None keeps its own."""
        seed = self.seed if seed is None else seed
        samples = self.samples if seed == self.seed else self.samples.seeded(seed)
        return replace(self, batch=batch or self.batch, seed=seed, samples=samples)


def names() -> list[str]:
    """Names of the built-in recipes: the files of workbench/recipes."""
    package = importlib.import_module(FOLDER)
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def builtin(name: str, size: str | None = None) -> Recipe:
    """The built-in recipe of that name. Raises RecipeError for a name or size not known."""
    if name not in names():
        raise RecipeError(unknown("recipe", name, names()))
    module = importlib.import_module(f"{FOLDER}.{name}")
    return _resolved(vars(module), name, size)


def from_namespace(
    namespace: Mapping[str, Any], name: str | None = None, size: str | None = None
) -> Recipe:
    """The recipe in what a cell defined: its functions, or its one class with a `model`.

    namespace: only what the cell itself bound, or names of earlier cells would take part.
    name: the class to take when the cell has several.

    Raises RecipeError when there is none, more than one, or one with parts missing.
    """
    classes = {key: kind for key, kind in namespace.items() if _is_recipe_class(kind)}
    if name in classes:
        return _resolved(_parts_of(classes[name]), name, size)
    if "model" in namespace:
        return _resolved(namespace, name or "cell", size)
    # A base class is there to be extended: the recipe is what extends it.
    bases = {base for kind in classes.values() for base in kind.__mro__[1:]}
    leaves = {key: kind for key, kind in classes.items() if kind not in bases}
    if len(leaves) > 1:
        raise RecipeError(
            f"This cell has {len(leaves)} recipes: {', '.join(leaves)}. "
            "Keep one, or name the one to train."
        )
    if leaves:
        key, kind = next(iter(leaves.items()))
        return _resolved(_parts_of(kind), key, size)
    return _resolved(namespace, name or "cell", size)


def explain(
    error: BaseException, recipe: Recipe, batch: tuple[Any, Any], output: Any = None
) -> RecipeError | None:
    """One sentence for a first step in which model and loss do not fit together, else None.

    batch: (input, target) of the step. output: what the model returned, None when it did not
    return. The caller rules out a lost peer first, which is a RuntimeError too.
    """
    if isinstance(error, RecipeError):
        return error
    if not isinstance(error, (RuntimeError, TypeError, ValueError, IndexError, AttributeError)):
        return None
    says = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {says[0] if says else ''}"
    inputs, target = (described(value) for value in batch)
    if output is None:
        text = f"model() of {recipe.name} does not take its inputs {inputs} ({reason}). "
        return RecipeError(text + "Make data() give what the model takes.")
    text = f"loss() of {recipe.name} does not take what model() returns, {described(output)}, "
    text += f"with targets {target} ({reason}). "
    return RecipeError(text + "Make the output, the targets and the loss fit.")


def described(value: Any) -> str:
    """`float32 [64, 10]` for a tensor, `(float32 [64, 10], int64 [64])` for a tuple."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(described, value[:4]))}{', ...' if len(value) > 4 else ''})"
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(str, list(value)[:4]))}"
    return type(value).__name__


def _is_recipe_class(value: Any) -> bool:
    return isinstance(value, type) and not issubclass(value, nn.Module) and hasattr(value, "model")


def _parts_of(kind: type) -> dict[str, Any]:
    """The parts of a recipe class by name, methods bound to one instance."""
    try:
        with fixed_random(0):
            instance = kind()
    except TypeError as error:
        raise RecipeError(
            f"{kind.__name__}() cannot be made without arguments ({error}). "
            "Give every argument of its __init__ a default."
        ) from error
    parts = {key: getattr(instance, key) for key in dir(instance) if not key.startswith("__")}
    for key in parts:
        raw = inspect.getattr_static(kind, key, None)
        # `loss = F.cross_entropy` or `def model():` in a class is meant as it reads, unbound.
        if isinstance(raw, FunctionType) and next(iter(inspect.signature(raw).parameters), "") != (
            "self"
        ):
            parts[key] = raw
    return parts


def _resolved(parts: Mapping[str, Any], name: str, size: str | None) -> Recipe:
    build, size = _sized(_function(parts, "model", name), parts, name, size)
    loss = _function(parts, "loss", name)
    seed = _whole(parts, "seed", 0, least=0)
    samples = Samples(_source(parts, name), seed)
    lr = parts.get("lr")
    if not (lr is None or callable(lr) or (_is_number(lr) and lr >= 0)):
        raise RecipeError(f"lr={lr!r}: use a number >= 0, or a function of the step.")
    unit = parts.get("unit", "samples")
    if unit not in UNITS:
        raise RecipeError(unknown("unit", str(unit), UNITS))
    optimizer = _function(parts, "optimizer", name, needed=False)
    evaluate = _function(parts, "evaluate", name, needed=False)
    # `batch` is the batch function where it is one, and then the size keeps its default.
    batch = DEFAULT_BATCH if callable(parts.get("batch")) else _whole(parts, "batch", DEFAULT_BATCH)
    return Recipe(
        name=name,
        model=lambda: _checked_model(build()),
        samples=samples,
        loss=lambda output, target: _checked_loss(loss(output, target)),
        optimizer=lambda params: _checked_optimizer(params, optimizer, lr),
        batch=batch,
        seed=seed,
        lr=cast(Any, lr),
        evaluate=evaluate and (lambda model: _checked_metrics(evaluate(model))),
        unit=unit,
        units_per_sample=_units(parts, unit, samples),
        size=size,
        stages=_function(parts, "stages", name, needed=False),
        tensor_plan=_tensor_plan(parts),
    )


def _tensor_plan(parts: Mapping[str, Any]) -> dict[str, str] | None:
    plan = parts.get("tensor_plan")
    texts = isinstance(plan, Mapping) and all(
        isinstance(key, str) and isinstance(how, str) for key, how in plan.items()
    )
    if plan is not None and not texts:
        raise RecipeError(
            f"tensor_plan={plan!r:.60}: give a dict of module names to how each is split, such as "
            "{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}."
        )
    return dict(plan) if plan is not None else None


def _function(parts: Mapping[str, Any], key: str, name: str, *, needed: bool = True) -> Any:
    value = parts.get(key)
    if value is None:
        if not needed:
            return None
        text = f"{_called(name)} has no {key}."
        near = difflib.get_close_matches(key, [str(other) for other in parts], n=1, cutoff=0.75)
        hint = f" {near[0]!r} is there: name it {key!r}." if near else ""
        raise RecipeError(text + (hint or f" Add one, such as: {EXAMPLES[key]}"))
    if isinstance(value, nn.Module) and key == "model":
        raise RecipeError(
            f"model of {_called(name, low=True)} is a {type(value).__name__} already made. "
            "Make it a function, so that every rank starts from the same seed: "
            "def model(): return ..."
        )
    if not callable(value):
        raise RecipeError(
            f"{key} of {_called(name, low=True)} is {value!r:.60}, not a function. "
            f"Write: def {key}(...): ..."
        )
    return value


def _called(name: str, *, low: bool = False) -> str:
    return ("the cell" if low else "The cell") if name == "cell" else f"{name}"


def _sized(
    model: Callable, parts: Mapping[str, Any], name: str, size: str | None
) -> tuple[Callable[[], Any], str]:
    sizes = parts.get("SIZES")
    if not sizes:
        if size is not None:
            raise RecipeError(f"{_called(name)} has no sizes. Leave out size={size!r}.")
        return model, ""
    chosen = next(iter(sizes)) if size is None else size
    if chosen not in sizes:
        raise RecipeError(unknown(f"size of {name}", chosen, sizes))
    return lambda: model(chosen), chosen


def _source(parts: Mapping[str, Any], name: str) -> Any:
    for key in ("batch_of", "batch"):
        if callable(parts.get(key)):
            return parts[key]
    data = parts.get("data", MISSING)
    if data is MISSING:
        _function(parts, "data", name)
    # A dataset or a pair of tensors may stand there as it is.
    if hasattr(data, "__getitem__") and not isinstance(data, type):
        return data
    if not callable(data):
        raise RecipeError(f"data is {type(data).__name__}. Write: def data(): return {DATA_KINDS}")
    # Data drawn at random must be the same on every rank, and for every seed of the training.
    with fixed_random(0):
        return data()


def _whole(parts: Mapping[str, Any], key: str, default: int, *, least: int = 1) -> int:
    value = parts.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RecipeError(f"{key}={value!r}: use a whole number >= {least}.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _units(parts: Mapping[str, Any], unit: str, samples: Samples) -> int:
    if "units_per_sample" in parts:
        return _whole(parts, "units_per_sample", 1)
    if unit == "samples":
        return 1
    inputs, _ = samples.fetch(0, 1)
    if not isinstance(inputs, Tensor):
        raise RecipeError("unit='tokens' with inputs that are no tensor: set units_per_sample too.")
    return inputs.numel()


def _checked_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise RecipeError(f"model() returns {described(model)}. Return a torch.nn.Module.")
    if not any(param.requires_grad for param in model.parameters()):
        raise RecipeError(
            f"model() returns {type(model).__name__}, which has no parameter to train. "
            "Return a module with parameters that require a gradient."
        )
    return model


def _checked_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise RecipeError(f"loss() returns {described(loss)}. Return the mean over the samples.")
    if not loss.requires_grad and torch.is_grad_enabled():
        raise RecipeError("loss() returns a number with no path back to the model. Do not detach.")
    return loss.reshape(())


def _checked_optimizer(params: Iterable, make: Callable | None, lr: Any) -> torch.optim.Optimizer:
    if make is None:
        return torch.optim.AdamW(params, lr=lr if _is_number(lr) else 1e-3)
    optimizer = make(params)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RecipeError(
            f"optimizer() returns {described(optimizer)}. Return a torch.optim.Optimizer."
        )
    return optimizer


def _checked_metrics(metrics: Any) -> dict[str, float]:
    try:
        return {str(key): float(value) for key, value in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise RecipeError(
            f"evaluate() returns {described(metrics)}. Return numbers by name: {{'accuracy': 0.97}}"
        ) from error

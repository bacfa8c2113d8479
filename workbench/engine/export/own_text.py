"""Own text: a recipe as its author wrote it, and how a script calls its parts.

A recipe of a cell stands alone only when the cell defines all it uses. What it takes from other
cells is written into the script where that is a module, something importable or a plain constant.
"""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch.utils.data import TensorDataset

from workbench.engine.export.imports import Import, imports_of
from workbench.engine.recipe import FOLDER, Recipe
from workbench.errors import RecipeError

# What a cell on a rank finds there without having defined it.
GIVEN = {
    "rank": 'rank = int(os.environ.get("RANK", "0"))',
    "world_size": 'world_size = int(os.environ.get("WORLD_SIZE", "1"))',
    "device": "device = DEVICE",
}
GIVEN_IMPORTS = {
    "torch": Import("", "torch"),
    "dist": Import("", "torch.distributed", "dist"),
}
PLAIN = (bool, int, float, str, bytes, type(None))


@dataclass(frozen=True)
class OwnText:
    """imports, and the text without them; given: lines it needs before it. names: what it binds.
    late: imports that stay in the text. is_cell: whether it is the text of a cell.

    draws: whether running it may draw random numbers. model, source, loss, lr: expressions, "" for
    what there is none of; optimizer: one with {} for the parameters.
    """

    imports: frozenset[Import]
    given: tuple[str, ...]
    text: str
    names: frozenset[str]
    late: frozenset[Import] = frozenset()
    is_cell: bool = False
    draws: bool = False
    model: str = ""
    source: str = ""
    loss: str = ""
    optimizer: str = ""
    lr: str = ""

    @property
    def uses_only_torch(self) -> bool:
        """Whether no other library could draw from Python's or NumPy's random numbers."""
        safe = {"torch", "__future__", "dataclasses", "functools", "math", "typing", "collections"}
        return {found.package for found in self.imports | self.late} <= safe


def module_of(recipe: Recipe) -> ModuleType:
    """The file of a built-in recipe."""
    return importlib.import_module(f"{FOLDER}.{recipe.name}")


def of_builtin(recipe: Recipe) -> OwnText:
    """The text of a file of workbench/recipes, which must need nothing else of this package."""
    text = inspect.getsource(module_of(recipe))
    found = _taken_apart(text, f"the recipe {recipe.name}")
    ours = [one for one in found.imports if one.package == "workbench"]
    for one in ours:
        if one.module != "workbench.errors":
            raise RecipeError(f"The recipe {recipe.name} uses {one}, which no plain script has.")
        text = found.text.replace(one.bound, "RuntimeError")
        found = replace(found, text=text, imports=found.imports - {one})
    return _with_parts(found, recipe, _kinds(ast.parse(found.text)))


def of_cell(recipe: Recipe, text: str, namespace: Mapping[str, Any]) -> OwnText:
    """The text of a cell. namespace: where it was executed.

    Raises RecipeError, with their names, for what it uses of other cells.
    """
    try:
        found = _taken_apart(text, "the cell")
    except SyntaxError as error:
        raise RecipeError(
            f"Line {error.lineno} of the recipe's cell is no plain Python, such as a line that "
            "begins with % or !. Take it out of the cell of %%dist_train to export it."
        ) from error
    lines, imports, missing = [], set[Import](), []
    for name in _undefined(text):
        if name in GIVEN:
            lines.append(GIVEN[name])
            imports |= {Import("", "os")} if "os." in GIVEN[name] else set()
        elif name in GIVEN_IMPORTS:
            imports.add(GIVEN_IMPORTS[name])
        elif name not in namespace:
            missing.append(name)
        elif (made := _importable(name, namespace[name])) is not None:
            imports.add(made)
        elif isinstance(namespace[name], PLAIN):
            lines.append(f"{name} = {namespace[name]!r}  # from another cell")
        else:
            missing.append(name)
    if missing:
        what = ", ".join(missing)
        raise RecipeError(
            f"The cell of the recipe uses {what}, which other cells define. Define "
            f"{'it' if len(missing) == 1 else 'them'} in the cell of %%dist_train to export it."
        )
    tree = ast.parse(text)
    found = replace(
        found,
        imports=found.imports | imports,
        is_cell=True,
        given=tuple(lines),
        draws=any(map(_may_draw, tree.body)),
    )
    kinds = _kinds(tree)
    if kinds.get(recipe.name) is ast.ClassDef and "model" not in kinds:
        return _with_class(found, recipe, namespace.get(recipe.name))
    return _with_parts(found, recipe, kinds)


def _taken_apart(text: str, what: str) -> OwnText:
    """The imports, the docstring as comments, and the rest as it is.

    Imports after something that is called stay where they are: the call may be there for them.
    """
    tree = ast.parse(text)
    lines = text.splitlines()
    imports: set[Import] = set()
    late: set[Import] = set()
    gone: set[int] = set()
    comments: list[str] = []
    if doc := ast.get_docstring(tree):
        comments = [f"# {line}".rstrip() for line in doc.splitlines()]
        first = tree.body.pop(0)
        gone.update(range(first.lineno, (first.end_lineno or 0) + 1))
    for place, node in enumerate(tree.body):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            raise RecipeError(f"{what.capitalize()} imports from its own folder: .{node.module}.")
        shares = any(o is not node and o.lineno == node.end_lineno for o in tree.body)
        if shares or any(map(_may_draw, tree.body[:place])):
            late |= imports_of(node)
            continue
        imports |= imports_of(node)
        gone.update(range(node.lineno, (node.end_lineno or 0) + 1))
    rest = "\n".join(line for number, line in enumerate(lines, 1) if number not in gone).strip("\n")
    whole = "\n".join([*comments, "", rest] if comments else [rest]).strip("\n")
    names = {one.bound for one in imports} | _bound(compile(text, "<recipe>", "exec"))
    return OwnText(frozenset(imports), (), whole, frozenset(names), frozenset(late))


def _with_parts(found: OwnText, recipe: Recipe, kinds: Mapping[str, type]) -> OwnText:
    """Parts that are functions of the text. kinds: what node binds each of its names."""
    key = next((k for k in ("batch_of", "batch") if kinds.get(k) is ast.FunctionDef), "data")
    is_called = key == "data" and kinds.get(key) in (ast.FunctionDef, ast.Lambda)
    source = "data()" if is_called else key
    if key == "data" and kinds.get(key) not in (ast.FunctionDef, ast.Lambda, ast.Tuple):
        source = "data() if callable(data) else data"
    return replace(
        found,
        model=f"model({recipe.size!r})".replace("'", '"') if recipe.size else "model()",
        source=_tensors_of(source, recipe),
        loss="loss",
        optimizer=_optimizer("optimizer" if "optimizer" in kinds else "", recipe),
        lr="lr" if callable(recipe.lr) else "",
    )


def _with_class(found: OwnText, recipe: Recipe, kind: Any) -> OwnText:
    """Parts that are methods, or functions and values, of a class."""
    if not isinstance(kind, type):
        raise RecipeError(f"{recipe.name} is no class now. Run the cell of %%dist_train again.")

    def part(key: str) -> str:
        raw = inspect.getattr_static(kind, key, None)
        first = next(iter(inspect.signature(raw).parameters), "") if _is_function(raw) else "self"
        return f"{recipe.name}.{key}" if first != "self" else f"recipe.{key}"

    keys = [key for key in ("batch_of", "batch") if callable(getattr(kind, key, None))]
    source = part(keys[0]) if keys else part("data")
    if not keys and callable(getattr(kind, "data", None)):
        source += "()"
    size = repr(recipe.size).replace("'", '"') if recipe.size else ""
    return replace(
        found,
        names=found.names | {"recipe"},
        model=f"{part('model')}({size})",
        source=_tensors_of(source, recipe),
        loss=part("loss"),
        optimizer=_optimizer(part("optimizer") if hasattr(kind, "optimizer") else "", recipe),
        lr=part("lr") if callable(recipe.lr) else "",
    )


def _is_function(raw: Any) -> bool:
    return isinstance(raw, FunctionType)


def _tensors_of(source: str, recipe: Recipe) -> str:
    held = recipe.samples.source
    is_pair = isinstance(held, TensorDataset) and len(held.tensors) == 2
    if not is_pair:
        return source
    return f"({source}).tensors" if " " in source else f"{source}.tensors"


def _optimizer(callee: str, recipe: Recipe) -> str:
    if callee:
        return f"{callee}({{}})"
    lr = 1e-3 if recipe.lr is None or callable(recipe.lr) else recipe.lr
    return f"torch.optim.AdamW({{}}, lr={lr!r})"


def _kinds(tree: ast.Module) -> dict[str, type]:
    """Names that a text binds at its top level, with the class of the node they are bound to."""
    found: dict[str, type] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = type(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {one.bound: type(node) for one in imports_of(node)}
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names = [leaf.id for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]
                found |= dict.fromkeys(names, type(node.value))
    return found


def _may_draw(node: ast.stmt) -> bool:
    """Whether a statement of the top level calls anything when it is executed."""
    if isinstance(node, (ast.FunctionDef, ast.Import, ast.ImportFrom)):
        return False
    if isinstance(node, ast.ClassDef):
        return any(map(_may_draw, node.body))
    return any(isinstance(leaf, ast.Call) for leaf in ast.walk(node))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _bound(code: CodeType) -> set[str]:
    """Names that running a text binds in its namespace."""
    own = {s.argval for s in dis.get_instructions(code) if s.opname == "STORE_NAME"}
    inner = {
        step.argval
        for each in _codes(code)
        for step in dis.get_instructions(each)
        if step.opname == "STORE_GLOBAL"
    }
    return own | inner


def _undefined(text: str) -> list[str]:
    """Names that a text uses and does not bind, in order."""
    code = compile(text, "<recipe>", "exec")
    if any(
        isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
        for node in ast.walk(ast.parse(text))
    ):
        return []
    known = _bound(code) | set(dir(builtins)) | {"__file__", "__annotations__"}
    used: dict[str, None] = {}
    for each in _codes(code):
        own = {s.argval for s in dis.get_instructions(each) if s.opname == "STORE_NAME"}
        known_here = known | own | {"__module__", "__qualname__", "__firstlineno__"}
        for step in dis.get_instructions(each):
            is_use = step.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME"))
            if is_use and step.argval not in known_here:
                used[step.argval] = None
    return list(used)


def _importable(name: str, value: Any) -> Import | None:
    """The import that binds a name to a value; None when there is none."""
    if isinstance(value, ModuleType):
        return Import("", value.__name__, name if name != value.__name__ else "")
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(own, str) or module == "__main__":
        return None
    if getattr(sys.modules.get(module), own, None) is not value or module == "builtins":
        return None
    return Import(module, own, name if name != own else "")

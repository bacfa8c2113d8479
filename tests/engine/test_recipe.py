import functools
import textwrap

import pytest
import torch
from torch import nn

from workbench.engine import recipe as recipes
from workbench.errors import RecipeError

CELL = """
import torch
from torch import nn
def model(): return nn.Linear(3, 2)
def data(): return torch.randn(10, 3), torch.zeros(10, dtype=torch.int64)
loss = nn.functional.cross_entropy
"""


def cell(source: str) -> dict:
    namespace: dict = {}
    exec(textwrap.dedent(source), namespace)
    return {key: value for key, value in namespace.items() if key != "__builtins__"}


def first_loss(recipe: recipes.Recipe) -> torch.Tensor:
    inputs, targets = recipe.samples.fetch(0, 4)
    return recipe.loss(recipe.model()(inputs), targets)


def test_three_functions_are_a_recipe_and_the_rest_has_defaults():
    recipe = recipes.from_namespace(cell(CELL))
    assert first_loss(recipe).ndim == 0
    assert (recipe.name, recipe.batch, recipe.seed, recipe.unit) == ("cell", 32, 0, "samples")
    assert recipe.lr is None
    assert recipe.evaluate is None
    optimizer = recipe.optimizer(recipe.model().parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_a_class_is_a_recipe_whatever_kind_of_function_its_parts_are():
    source = (
        CELL
        + """
class Base:
    def model(self): return nn.Linear(self.width, 2)
class Mine(Base):
    width = 3
    loss = nn.functional.cross_entropy
    optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
    batch = 8
    lr = 0.5
    @staticmethod
    def data(): return torch.randn(10, 3), torch.zeros(10, dtype=torch.int64)
    def evaluate(self, model): return {"width": torch.tensor(self.width)}
"""
    )
    namespace = cell(source)
    for key in ("model", "data", "loss"):
        del namespace[key]
    recipe = recipes.from_namespace(namespace)
    assert (recipe.name, recipe.batch, recipe.lr) == ("Mine", 8, 0.5)
    assert first_loss(recipe).ndim == 0
    assert isinstance(recipe.optimizer(recipe.model().parameters()), torch.optim.SGD)
    assert recipe.evaluate is not None
    assert recipe.evaluate(recipe.model()) == {"width": 3.0}


def test_closures_lambdas_partials_and_local_classes_work():
    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.layer = nn.Linear(3, width)

        def forward(self, x):
            return self.layer(x)

    width = 2
    recipe = recipes.from_namespace(
        {
            "model": functools.partial(Net, width),
            "data": lambda: [(torch.randn(3), width - 1)] * 5,
            "loss": functools.partial(nn.functional.cross_entropy, label_smoothing=0.1),
        }
    )
    assert first_loss(recipe).ndim == 0


def test_batch_is_a_size_and_a_batch_function_has_a_name_of_its_own():
    source = """
    import torch
    from torch import nn
    model = lambda: nn.Linear(1, 1)
    loss = nn.functional.mse_loss
    batch = 7
    def batch_of(samples): return samples.float()[:, None], samples.float()[:, None] * 2
    """
    recipe = recipes.from_namespace(cell(source))
    assert recipe.batch == 7
    assert recipe.samples.fetch(5, 2)[1].tolist() == [[10.0], [12.0]]


def test_data_drawn_at_random_is_the_same_on_every_rank():
    drawn = []
    for rank in range(2):
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        drawn.append(recipes.from_namespace(cell(CELL)).samples.fetch(0, 10)[0])
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(*drawn)


def test_changed_takes_the_users_batch_and_seed():
    recipe = recipes.from_namespace(cell(CELL))
    changed = recipe.changed(batch=3, seed=5)
    assert (changed.batch, changed.seed) == (3, 5)
    first, other = (one.samples.indices(0, 10).tolist() for one in (recipe, changed))
    assert first != other
    assert recipe.changed().samples is recipe.samples


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("del model", "The cell has no model. Add one, such as: def model()"),
        ("del data", "The cell has no data. Add one"),
        ("del loss", "The cell has no loss. Add one"),
        ("modle = model\ndel model", "The cell has no model. 'modle' is there: name it 'model'."),
        ("model = nn.Linear(3, 2)", "model of the cell is a Linear already made"),
        ("model = 3", "model of the cell is 3, not a function"),
        ("data = 3", "data is int"),
        ("data = lambda: torch.zeros(3)", "data() gives Tensor"),
        ("data = lambda: (torch.zeros(3, 1), torch.zeros(2))", "as many targets as inputs"),
        ("data = lambda: []", "its length is 0"),
        ("batch = 0", "batch=0: use a whole number >= 1."),
        ("seed = -1", "seed=-1: use a whole number >= 0."),
        ("lr = 'high'", "lr='high': use a number >= 0"),
        ("unit = 'token'", "No unit named 'token'. Did you mean 'tokens'?"),
        ("class A:\n def model(self): ...\nclass B(A): ...\nclass C(A): ...\ndel model",
         "This cell has 2 recipes: B, C."),
        ("class A:\n def __init__(self, x): ...\n def model(self): ...\ndel model",
         "A() cannot be made without arguments"),
        ("class D(torch.utils.data.IterableDataset):\n def __iter__(self): ...\ndata = lambda: D()",
         "D, an IterableDataset"),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong_is_one_sentence(change, text):
    with pytest.raises(RecipeError) as caught:
        recipes.from_namespace(cell(CELL + change))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("model = lambda: 3", "model() returns int. Return a torch.nn.Module."),
        ("model = nn.ReLU", "model() returns ReLU, which has no parameter to train."),
        ("loss = lambda o, t: o", "loss() returns float32 [4, 2]. Return the mean"),
        ("loss = lambda o, t: o.detach().mean()", "no path back to the model"),
        ("data = lambda: [torch.zeros(3)] * 4", "The data gives Tensor a sample. Give pairs"),
    ],
)
def test_wrong_results_are_named_when_they_are_made(change, text):
    with pytest.raises(RecipeError) as caught:
        first_loss(recipes.from_namespace(cell(CELL + change)))
    assert text in str(caught.value)


def test_wrong_optimizers_and_metrics_are_named():
    recipe = recipes.from_namespace(
        cell(CELL + "optimizer = lambda params: 3\nevaluate = lambda model: 0.5")
    )
    with pytest.raises(RecipeError, match=r"optimizer\(\) returns int"):
        recipe.optimizer(recipe.model().parameters())
    assert recipe.evaluate is not None
    with pytest.raises(RecipeError, match=r"evaluate\(\) returns float"):
        recipe.evaluate(recipe.model())


def test_a_model_that_does_not_fit_the_loss_is_explained_with_both_shapes():
    recipe = recipes.from_namespace(cell(CELL))
    inputs, targets = recipe.samples.fetch(0, 4)
    with pytest.raises(ValueError, match="batch_size") as caught:
        recipe.loss(torch.zeros(3, 2, requires_grad=True), targets)
    text = str(recipes.explain(caught.value, recipe, (inputs, targets), torch.zeros(3, 2)))
    assert "float32 [3, 2], with targets int64 [4]" in text
    with pytest.raises(RuntimeError) as caught_model:
        recipe.model()(torch.zeros(4, 5))
    text = str(recipes.explain(caught_model.value, recipe, (torch.zeros(4, 5), targets)))
    assert "model() of cell does not take its inputs float32 [4, 5]" in text
    assert recipes.explain(KeyError("x"), recipe, (inputs, targets)) is None


def test_unknown_names_and_sizes_come_with_the_nearest():
    with pytest.raises(RecipeError, match="Did you mean 'digits'"):
        recipes.builtin("digit")
    with pytest.raises(RecipeError, match=r"No size of pytext named 'smal'\. Did you mean 'small'"):
        recipes.builtin("pytext", "smal")
    with pytest.raises(RecipeError, match=r"The cell has no sizes\. Leave out size='small'"):
        recipes.from_namespace(cell(CELL), size="small")

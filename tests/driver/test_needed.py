"""Which earlier cells a cell rests on."""

from __future__ import annotations

import pytest

from workbench.driver.needed import needed

CASES = {
    "nothing": ("x = 1", ["y = 2"], []),
    "a name": ("def model():\n    return width", ["width = 3", "other = 4"], [0]),
    "through another": ("f()", ["a = 1", "def f():\n    return a", "b = a"], [0, 1]),
    "bound again": ("print(x)", ["x = 1", "x = 2"], [0, 1]),
    "its own": ("import os\ndef f():\n    return os", ["import os; dist.barrier()"], []),
    "in a function": ("def f():\n    import os\n    return os", ["import os"], []),
    "read before bound": ("x = x + 1", ["x = 1"], [0]),
    "no Python": ("x", ["%matplotlib inline\nx = 1", "x = 2"], [1]),
    "a class": ("class A(Base):\n    y = z", ["Base = object", "z = 1", "y = 1"], [0, 1]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cells_that_bind_what_is_used(case):
    cell, before, expected = CASES[case]
    found = needed((9, cell), list(enumerate(before)))
    assert found == [*((n, before[n]) for n in expected), (9, cell)]

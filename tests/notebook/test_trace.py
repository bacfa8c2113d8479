"""%dist_trace in a real kernel."""

from __future__ import annotations

import pytest
from kernel import Kernel


@pytest.fixture
def trained(engines: Kernel) -> Kernel:
    """The kernel, with a training that has taken 60 steps."""
    reply = engines(
        "if 'run' not in globals():\n"
        "    run = %dist_train digits --steps 60 --wait ;\n"
        "recorded = [sample['step'] for sample in run.samples]\n"
        "between = next(step for step in range(1, 61) if step not in recorded)"
    )
    assert reply.status == "ok"
    return engines


def test_the_line_says_which_step_is_in_the_file(trained: Kernel):
    reply = trained("path = %dist_trace all.json --force\nprint(path)")
    assert reply.out.strip().endswith("/all.json")
    assert trained("%dist_trace all.json --force").text == "all.json: open it in ui.perfetto.dev"
    nearest = "min(recorded, key=lambda step: abs(step - between))"
    reply = trained("%dist_trace one.json --step {between} --force")
    says = f"f'one.json has step {{{nearest}}}, the recorded one nearest to {{between}}: '"
    told = trained(f"print({says} 'open it in ui.perfetto.dev')").out
    assert reply.text == told.strip()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%dist_trace --step -3 a.json", "InputError: step=-3: use a whole number from 1 to 60;"),
        ("%dist_trace a.json --step 100000", "InputError: step=100000: use a whole number from 1"),
        ("%dist_trace a", "InputError: a: name a file that ends in .json or .json.gz."),
        ("%dist_trace a.CSV", "InputError: a.CSV: name a file that ends in .json or .json.gz."),
        ("%dist_trace ''", "InputError: '' names no file. Name one that ends in .json or"),
        ("%dist_trace a.txt --profile", "InputError: a.txt: name a file that ends in .json or"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(trained: Kernel, line: str, says: str):
    reply = trained(line)
    assert reply.status == "error"
    assert says in reply.error
    assert len(reply.error.splitlines()) == 1

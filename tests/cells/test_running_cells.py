"""Cells on real ranks: errors, interrupts, and what stays."""

from __future__ import annotations

import time

import pytest

from workbench.errors import InputError, RankError


@pytest.fixture(autouse=True)
def still_together(run):
    """Whatever a test does, the next cell and collective on all ranks work."""
    yield
    run("t = torch.ones(1); dist.all_reduce(t); int(t)")
    assert run.out == ["[ranks 0-2] 3"]


def raised(run, source, **how) -> list[str]:
    with pytest.raises(RankError) as caught:
        run(source, **how)
    return [str(caught.value), *getattr(caught.value, "__notes__", [])]


def test_names_stay_from_cell_to_cell(run):
    run("a = rank + 1")
    assert run("a * 10").values == {0: "10", 1: "20", 2: "30"}


def test_an_error_of_all_ranks_is_told_once(run):
    report = raised(run, "def f(x):\n    return 1 / x\n\nf(0)")
    assert report[0] == "ranks 0-2: ZeroDivisionError: division by zero (line 2 of the cell)"
    assert len(report) == 3
    assert report[-1].endswith("line 2, in f: return 1 / x")


def test_an_error_of_one_rank_keeps_what_the_others_gave(run):
    report = raised(run, "if rank == 1:\n    raise ValueError('no')\nrank")
    assert report[0] == "rank 1: ValueError: no (line 2 of the cell)"
    assert run.out == ["[rank 0] 0", "[rank 2] 2"]


def test_ranks_that_wait_for_one_that_raised_are_brought_back(run):
    run("kept = rank")
    report = raised(run, "if rank == 0:\n    raise ValueError('no')\ndist.barrier()")
    assert report[0] == "rank 0: ValueError: no (line 2 of the cell)"
    assert "ranks 1-2: waited in a collective (line 3 of the cell)" in report
    assert "new process group" in report[-1]
    assert run("kept").values == {0: "0", 1: "1", 2: "2"}


@pytest.mark.parametrize("source", ["exit()", "raise SystemExit(3)", "quit"])
def test_exit_does_not_end_a_rank(run, source):
    if source == "quit":
        run(source)
    else:
        assert "the rank and its variables stay" in raised(run, source)[0]


def test_a_syntax_error_is_told_once(run):
    assert raised(run, "a = 1\nb = = 2")[0].startswith("ranks 0-2: SyntaxError: ")


def test_an_interrupt_ends_the_cell_and_the_next_runs_at_once(run):
    began_s = time.monotonic()
    source = "import time\nkept = 1\nprint('now', flush=True)\ntime.sleep(60)"
    report = raised(run, source, interrupt_at="now")
    assert report == ["ranks 0-2: interrupted (line 4 of the cell); variables stay"]
    assert run("kept").values == {0: "1", 1: "1", 2: "1"}
    assert time.monotonic() - began_s < 30


def test_an_interrupt_ends_a_collective_that_hangs(run):
    report = raised(run, "print('now')\nif rank == 0:\n    dist.barrier()", interrupt_at="now")
    assert report[0] == "rank 0: interrupted (line 3 of the cell); variables stay"


def test_classes_of_a_cell_have_their_source_and_pickle(run):
    run("class Net(torch.nn.Module):\n    size = 3")
    result = run(
        "import inspect, pickle\n"
        "assert type(pickle.loads(pickle.dumps(Net()))) is Net\n"
        "inspect.getsource(Net)"
    )
    assert set(result.values.values()) == {repr("class Net(torch.nn.Module):\n    size = 3\n")}


def test_functions_lambdas_and_closures_have_their_source(run):
    run("def outer(k):\n    return lambda x: x + k\nadd = outer(2)\ntwice = lambda x: 2 * x")
    result = run("[inspect.getsource(f) for f in (outer, add, twice)]", ranks=[0])
    assert "twice = lambda x: 2 * x" in result.values[0]
    assert result.values[0].count("return lambda x: x + k") == 2


def test_every_rank_reads_a_dataset_of_the_cell_with_processes(run):
    result = run(
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n        return 8\n"
        "    def __getitem__(self, i):\n        return i * i\n"
        "loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2)\n"
        "[batch.tolist() for batch in loader]"
    )
    assert set(result.values.values()) == {"[[0, 1, 4, 9], [16, 25, 36, 49]]"}


@pytest.mark.parametrize("ranks", [[3], [-1], [], [0, 7]])
def test_ranks_that_do_not_exist_are_refused(run, ranks):
    with pytest.raises(InputError, match="use ranks from 0 to 2"):
        run("1", ranks=ranks)

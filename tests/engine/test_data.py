import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from workbench.engine.data import Samples, shares
from workbench.errors import InputError, RecipeError


def pair(length):
    return torch.arange(length)[:, None].float(), torch.arange(length)


class Noisy(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        noise = [torch.rand(()).item(), random.random(), np.random.rand()]
        return torch.tensor([index, *noise], dtype=torch.float64), index


def noisy_batch(samples):
    x = samples[:, None] + torch.rand(len(samples), 3)
    return x, {"sum": x.sum(1), "also": (samples,)}


@pytest.mark.parametrize("batch", [1, 3, 7, 10, 25])
def test_each_epoch_has_each_sample_once_however_batches_straddle_it(batch):
    samples = Samples(pair(10), seed=1)
    seen = torch.cat([samples.fetch(first, batch)[1] for first in range(0, 10 * batch, batch)])
    epochs = seen.split(10)
    assert all(sorted(epoch.tolist()) == list(range(10)) for epoch in epochs)
    if len(epochs) > 1:
        assert epochs[0].tolist() != epochs[1].tolist()


def test_order_depends_on_seed_and_position_alone():
    one, other = Samples(pair(50), seed=3), Samples(pair(50), seed=3)
    other.fetch(400, 10)
    assert one.fetch(60, 30)[1].tolist() == other.fetch(60, 30)[1].tolist()
    assert one.seeded(4).fetch(60, 30)[1].tolist() != one.fetch(60, 30)[1].tolist()


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (2, 1), (3, 1), (4, 2), (2, 5)])
@pytest.mark.parametrize("source", [pair(9), TensorDataset(*pair(9)), Noisy(), noisy_batch])
def test_samples_are_the_same_at_any_number_of_ranks(source, ranks, accumulate):
    whole = Samples(source, seed=2).fetch(5, 11)
    each = Samples(source, seed=2)
    parts = [
        each.fetch(5 + offset, count)
        for rank in shares(11, ranks, accumulate)
        for offset, count in rank
    ]
    assert torch.equal(torch.cat([part[0] for part in parts]), whole[0])
    if isinstance(whole[1], dict):
        assert torch.equal(torch.cat([part[1]["sum"] for part in parts]), whole[1]["sum"])
        assert torch.equal(torch.cat([part[1]["also"][0] for part in parts]), whole[1]["also"][0])
    else:
        assert torch.equal(torch.cat([part[1] for part in parts]), whole[1])


def test_what_a_sample_draws_differs_by_epoch_and_leaves_the_other_streams_alone():
    samples = Samples(Noisy(), seed=0)
    torch.manual_seed(0)
    expected = torch.rand(3).tolist()
    torch.manual_seed(0)
    first, second = (samples.fetch(epoch * 6, 6)[0] for epoch in (0, 1))
    assert torch.rand(3).tolist() == expected
    by_index = [epoch[epoch[:, 0].argsort()] for epoch in (first, second)]
    assert not (by_index[0][:, 1:] == by_index[1][:, 1:]).any()


def test_a_batch_function_that_draws_nothing_is_called_once_a_batch():
    calls = []

    def batch_of(samples):
        calls.append(samples.tolist())
        return samples, samples

    Samples(batch_of).fetch(3, 4)
    assert calls == [[3, 4, 5, 6]]


def test_data_of_triples_is_refused():
    triples = [(1, 2, 3)] * 4
    with pytest.raises(RecipeError, match=r"gives 3 parts a sample"):
        Samples(triples).fetch(0, 2)


@pytest.mark.parametrize("batch", [8, 11, 64])
@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 1), (3, 1), (4, 2), (2, 4)])
def test_shares_are_contiguous_and_differ_by_one_at_most(batch, ranks, accumulate):
    cut = shares(batch, ranks, accumulate)
    assert [len(rank) for rank in cut] == [accumulate] * ranks
    flat = [micro for rank in cut for micro in rank]
    assert [offset for offset, _ in flat] == [
        sum(count for _, count in flat[:place]) for place in range(len(flat))
    ]
    counts = [count for _, count in flat]
    assert sum(counts) == batch
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= 1


def test_a_batch_too_small_says_what_works():
    with pytest.raises(InputError, match=r"Use batch >= 4 or at most 3 ranks"):
        shares(3, 4)
    with pytest.raises(InputError, match=r"Use batch >= 8 or accumulate <= 3"):
        shares(7, 2, 4)

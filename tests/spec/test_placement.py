"""Placement: which rank gets which device, with a table of devices instead of a machine."""

from __future__ import annotations

import pytest

from workbench.errors import InputError, StartError
from workbench.spec.placement import MAX_RANKS, Devices, place

FOUND = {"kind": "cuda", "count": 3, "names": ["A", "B", "C"]}


def test_any_list_of_devices_is_bound_one_a_rank():
    devices = Devices.seen(FOUND, {"CUDA_VISIBLE_DEVICES": "5,2,7"})
    places = place(2, devices, cores=8)
    shown = [p.environment["CUDA_VISIBLE_DEVICES"] for p in places]
    assert shown == ["5", "2"]
    assert [p.device for p in places] == ["cuda 5", "cuda 2"]


def test_without_a_list_devices_are_numbered():
    assert Devices.seen(FOUND, {}).ids == ("0", "1", "2")


def test_uuids_stay_what_they_are():
    listed = "GPU-aa,GPU-bb,GPU-cc"
    assert Devices.seen(FOUND, {"CUDA_VISIBLE_DEVICES": listed}).ids == tuple(listed.split(","))


def test_more_ranks_than_devices_is_refused_with_the_map():
    devices = Devices.seen(FOUND, {})
    with pytest.raises(StartError, match=r"rank 2 -> cuda 2.*Use -n 3"):
        place(4, devices, cores=8)


def test_the_cpu_may_be_asked_for_on_a_machine_with_devices():
    places = place(4, Devices.seen(FOUND, {}), cores=8, use_cpu=True)
    assert {p.device for p in places} == {"cpu"}
    assert all("CUDA_VISIBLE_DEVICES" not in p.environment for p in places)


def test_ranks_default_to_devices_and_on_cpu_to_cores_up_to_four():
    assert len(place(None, Devices.seen(FOUND, {}), cores=8)) == 3
    assert len(place(None, Devices(), cores=2)) == 2
    assert len(place(None, Devices(), cores=64)) == 4


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1)])
def test_threads_are_cores_over_ranks_and_at_least_one(cores, ranks, threads):
    assert {p.threads for p in place(ranks, Devices(), cores)} == {threads}


def test_a_kind_that_cannot_be_bound_counts_as_none():
    assert Devices.seen({"kind": "mps", "count": 1, "names": ["M"]}, {}) == Devices()


@pytest.mark.parametrize("n", [0, MAX_RANKS + 1, 2.0, True])
def test_numbers_that_are_none_are_refused(n):
    with pytest.raises(InputError, match=f"1 to {MAX_RANKS}"):
        place(n, Devices(), cores=2)

"""The sampler: each sample once an epoch over all ranks, in the same global batches everywhere."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from itertools import chain, islice

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import shoal
from shoal.errors import ClosedError

LENGTHS = st.integers(1, 60)
BATCHES = st.integers(1, 20)
RANKS = st.integers(1, 6)


@dataclass
class Place:
    """Stands in for a world."""

    rank: int
    size: int


def samplers(length, batch_size, size, **options):
    return [
        shoal.sampler(length, batch_size, world=Place(rank, size), **options)
        for rank in range(size)
    ]


def joined(lists):
    return list(chain.from_iterable(lists))


def global_batches(parts):
    """What all ranks together got, batch by batch."""
    return [joined(batch) for batch in zip(*parts, strict=True)]


@given(LENGTHS, BATCHES, RANKS, st.booleans(), st.integers(0, 3))
def test_each_sample_once_an_epoch(length, batch_size, size, shuffle, seed) -> None:
    assume(min(length, batch_size) >= size)
    ranks = samplers(length, batch_size, size, shuffle=shuffle, seed=seed)
    parts = [list(one) for one in ranks]
    assert all(len(part) == len(ranks[0]) for part in parts)
    assert all(batch for part in parts for batch in part)  # nobody is left without samples
    batches = global_batches(parts)
    assert sorted(joined(batches)) == list(range(length))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert len(batches[-1]) < batch_size + size


@given(LENGTHS, BATCHES, RANKS)
def test_global_batches_do_not_depend_on_the_ranks(length, batch_size, size) -> None:
    rest = length % batch_size
    assume(min(length, batch_size) >= size and (rest == 0 or rest >= size))
    (alone,) = samplers(length, batch_size, 1)
    together = samplers(length, batch_size, size)
    assert len(alone) == len(together[0]) == math.ceil(length / batch_size)
    assert global_batches([list(one) for one in together]) == list(alone)


@given(LENGTHS, BATCHES, RANKS)
def test_parts_are_contiguous_and_even(length, batch_size, size) -> None:
    assume(min(length, batch_size) >= size)
    for parts in zip(*samplers(length, batch_size, size, shuffle=False), strict=True):
        sizes = [len(part) for part in parts]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        whole = joined(parts)
        assert whole == list(range(whole[0], whole[0] + len(whole)))


@given(LENGTHS, BATCHES, RANKS)
def test_drop_last(length, batch_size, size) -> None:
    assume(min(length, batch_size) >= size)
    ranks = samplers(length, batch_size, size, drop_last=True)
    batches = global_batches([list(one) for one in ranks])
    assert [len(batch) for batch in batches] == [batch_size] * (length // batch_size)
    assert len(ranks[0]) == length // batch_size


@given(
    LENGTHS, BATCHES, BATCHES, RANKS, RANKS, st.integers(0, 20), st.integers(0, 3), st.booleans()
)
def test_resumed_at_another_world_size(
    length, batch_size, other_batch_size, size, other_size, stop, epoch, by_count
) -> None:
    assume(min(length, batch_size) >= size and min(length, other_batch_size) >= other_size)
    seen, state = [], None
    for one in samplers(length, batch_size, size, seed=5):
        one.set_epoch(epoch)
        mine = list(islice(one, stop))
        state = one.state_dict(num_batches=len(mine)) if by_count else one.state_dict()
        seen += joined(mine)
    assert state["position"] == len(seen)
    rest = []
    for one in samplers(length, other_batch_size, other_size):
        one.load_state_dict(state)
        one.set_epoch(epoch)  # as a loop over epochs does
        rest += joined(one)
    left = length - len(seen)
    if left >= other_size:
        assert sorted(seen + rest) == list(range(length))
    else:  # too few for everybody
        assert rest == []


def test_epochs_have_orders_of_their_own() -> None:
    (one,) = samplers(20, 5, 1)
    first, second = list(one), list(one)
    assert first != second
    one.set_epoch(0)
    assert list(one) == first
    assert list(one) == second
    (other,) = samplers(20, 5, 1, seed=1)
    assert list(other) != first


def test_an_iteration_that_was_left_begins_anew() -> None:
    (one,) = samplers(20, 5, 1)
    first = next(iter(one))
    assert next(iter(one)) == first
    assert one.state_dict()["position"] == 5


def resumed(state, size=1, **options):
    """Samplers that go on, one for each rank."""
    found = samplers(20, 5, size, **options)
    for one in found:
        one.load_state_dict(state)
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_resumed_at_the_end_of_an_epoch(size) -> None:
    """The next epoch follows, not an empty one."""
    (one,) = samplers(20, 5, 1)
    list(one)
    state = one.state_dict()
    assert (state["epoch"], state["position"]) == (0, 20)
    others = resumed(state, size)
    assert all(other.state_dict() == state for other in others)  # nothing has happened yet
    second, third = list(one), list(one)
    assert global_batches([list(other) for other in others]) == second
    assert global_batches([list(other) for other in others]) == third


@pytest.mark.parametrize("start", [0, 1])
def test_resumed_in_a_loop_over_epochs(start) -> None:
    """Whether it begins with the epoch that was saved or the one after: each is trained on once."""
    (one,) = samplers(20, 5, 1)
    epochs = [list(one) for _ in range(3)]
    one.set_epoch(0)
    list(one)
    (other,) = resumed(one.state_dict())
    seen = []
    for epoch in range(start, 3):
        other.set_epoch(epoch)
        seen += list(other)
    assert seen == epochs[1] + epochs[2]
    other.set_epoch(0)
    assert list(other) == epochs[0]  # asked for once more


@pytest.mark.parametrize("by_count", [False, True])
def test_the_end_of_an_epoch_with_a_rest_that_is_dropped(by_count) -> None:
    (one,) = samplers(22, 5, 1, drop_last=True)
    first = list(islice(one, 4))  # as a loop that saves after its last batch
    state = one.state_dict(num_batches=4) if by_count else one.state_dict()
    assert state["position"] == 22
    (other,) = samplers(22, 2, 1, drop_last=True)  # batches that the rest would be enough for
    other.load_state_dict(state)
    seen = list(other)
    assert other.epoch == 1
    assert len(seen) == 11
    assert joined(seen)[:20] != joined(first)


@pytest.mark.parametrize(("epoch", "stop"), [(1, 2), (0, 4), (3, 4), (2, 0)])
def test_epochs_that_are_left_out_or_repeated_are_warned_of(epoch, stop) -> None:
    (one,) = samplers(20, 5, 1)
    one.set_epoch(1)
    list(islice(one, stop))
    (other,) = resumed(one.state_dict())
    with (
        pytest.warns(UserWarning, match="left out or trained on again")
        if epoch != 1
        else (contextlib.nullcontext())
    ):
        other.set_epoch(epoch)
    list(other)
    other.set_epoch(7)  # the user's own choice, once training has gone on


def test_workers_at_the_end_of_an_epoch() -> None:
    (one,) = samplers(20, 5, 1)
    assert len(list(DataLoader(range(20), batch_sampler=one, num_workers=1))) == 4
    (other,) = resumed(one.state_dict())
    loader = DataLoader(range(20), batch_sampler=other, num_workers=1)
    assert [batch.tolist() for batch in loader] == list(one)


def test_saved_and_loaded_at_the_end_of_an_epoch(tmp_path) -> None:
    """By `shoal.save` and `shoal.load`, on other numbers of ranks."""

    def save() -> list[list[int]]:
        sampler = shoal.sampler(20, 5)
        list(sampler)
        shoal.save(tmp_path, torch.nn.Linear(1, 1), sampler=sampler)
        return list(sampler)

    def load() -> list[list[int]]:
        sampler = shoal.sampler(20, 5)
        shoal.load(tmp_path, torch.nn.Linear(1, 1), sampler=sampler)
        return list(sampler)

    saved = global_batches(shoal.run(save, 2, "memory"))
    assert saved == global_batches(shoal.run(load, 3, "memory"))


def test_a_loader_with_workers_is_ahead() -> None:
    """What workers have fetched was not trained on: the caller counts."""
    (one,) = samplers(40, 5, 1)
    loader = DataLoader(range(40), batch_sampler=one, num_workers=0)
    batches = [batch.tolist() for batch in loader]
    (other,) = samplers(40, 5, 1)
    other.load_state_dict(one.state_dict(num_batches=3))
    assert list(other) == batches[3:]


def test_saved_while_workers_are_ahead() -> None:
    """What they have fetched and nobody was given comes again."""
    (one,) = samplers(40, 5, 1)
    loader = iter(DataLoader(range(40), batch_sampler=one, num_workers=1, prefetch_factor=4))
    trained = [next(loader).tolist() for _ in range(2)]
    assert one._position > 10
    saved = one.state_dict()
    (other,) = samplers(40, 5, 1)
    other.load_state_dict(saved)
    rest = list(other)
    assert sorted(index for batch in trained + rest for index in batch) == list(range(40))
    assert [batch.tolist() for batch in loader] == rest
    assert one.state_dict()["position"] == 40
    one._reader = lambda: None  # the loader is gone
    assert one.state_dict()["position"] == 40
    one._is_over = False
    with pytest.raises(ValueError, match="num_batches=n"):
        one.state_dict()


def test_a_loader_on_ranks() -> None:
    def load():
        data = torch.arange(22) * 10
        loader = DataLoader(data, batch_sampler=shoal.sampler(data, 8, shuffle=False))
        return len(loader), [batch.tolist() for batch in loader]

    first, second, third = shoal.run(load, 3, "memory")
    assert first == (3, [[0, 10, 20], [80, 90, 100], [160, 170]])
    assert second == (3, [[30, 40, 50], [110, 120, 130], [180, 190]])
    assert third == (3, [[60, 70], [140, 150], [200, 210]])


def test_a_rest_too_small_for_all_is_joined() -> None:
    parts = [list(one) for one in samplers(10, 4, 3, shuffle=False)]
    assert parts == [[[0, 1], [4, 5]], [[2], [6, 7]], [[3], [8, 9]]]


@pytest.mark.parametrize(("length", "batch_size"), [(0, 4), (4, 0)])
def test_nothing_to_sample(length, batch_size) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        shoal.sampler(length, batch_size)


@pytest.mark.parametrize(("length", "batch_size"), [(10, 3), (3, 10)])
def test_too_few_for_all_ranks(length, batch_size) -> None:
    (one, *_) = samplers(length, batch_size, 4)
    with pytest.raises(ValueError, match="every rank needs a sample of each batch"):
        list(one)


def test_a_state_of_other_data() -> None:
    (one,), (other,) = samplers(10, 2, 1), samplers(11, 2, 1)
    with pytest.raises(ValueError, match="10 samples; this one has 11"):
        other.load_state_dict(one.state_dict())


def test_started_as_a_rank_but_no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank would train on everything, and nobody would notice."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ClosedError, match="one of 2 ranks"):
        list(shoal.sampler(10, 2))


def test_a_mesh_axis() -> None:
    def load():
        mesh = shoal.comm.Mesh(tensor=2)
        return list(shoal.sampler(8, 4, shuffle=False, world=mesh.group("data")))

    results = shoal.run(load, 4, "memory")
    assert results[0] == results[1] == [[0, 1], [4, 5]]
    assert results[2] == results[3] == [[2, 3], [6, 7]]

"""Loaders that are divided: all ranks together train on what one process would, batch by batch."""

from __future__ import annotations

import random
import warnings
from itertools import chain, islice

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import pools
import shoal
from shoal.data import DividedLoader
from shoal.errors import DeadlineError, MismatchError

NUMBERS = torch.arange(22)


class Stream(IterableDataset):
    """Numbers in an order that is drawn anew each time; workers share them out."""

    def __init__(self, length: int = 22, draw=torch.randperm) -> None:
        self.length, self.draw = length, draw

    def __iter__(self):
        worker = get_worker_info()
        if worker is not None:  # all workers share out one order
            torch.manual_seed(worker.seed - worker.id)
        order = [int(number) for number in self.draw(self.length)]
        yield from order[worker.id :: worker.num_workers] if worker else order

    def __len__(self) -> int:
        return self.length


class Lazy(Sampler):
    """Draws one index after the other, while others draw as well."""

    def __iter__(self):
        for _ in range(22):
            yield random.randrange(22)

    def __len__(self) -> int:
        return 22


class Buckets(Sampler):
    """Batches of different size, in an order from numpy."""

    def __iter__(self):
        yield from np.random.permutation(np.array([*range(18)])).reshape(6, 3).tolist()
        yield [18, 19, 20, 21]

    def __len__(self) -> int:
        return 7


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS = {
    "sequential": lambda: DataLoader(NUMBERS, 8),
    "shuffled": lambda: DataLoader(NUMBERS, 8, shuffle=True),
    "generator": lambda: DataLoader(NUMBERS, 8, shuffle=True, generator=generator()),
    "dropped": lambda: DataLoader(NUMBERS, 8, shuffle=True, drop_last=True),
    "weighted": lambda: DataLoader(NUMBERS, 6, sampler=WeightedRandomSampler([1.0] * 22, 24)),
    "replacement": lambda: DataLoader(
        NUMBERS, 6, sampler=RandomSampler(NUMBERS, True, 51, generator())
    ),
    "lazy": lambda: DataLoader(NUMBERS, 8, sampler=Lazy()),
    "buckets": lambda: DataLoader(NUMBERS, batch_sampler=Buckets()),
    "ready batches": lambda: DataLoader(
        NUMBERS, batch_size=None, sampler=BatchSampler(RandomSampler(NUMBERS), 8, False)
    ),
    "stream": lambda: DataLoader(Stream(), 8),
    "numpy stream": lambda: DataLoader(Stream(draw=np.random.permutation), 8),
    "dropped stream": lambda: DataLoader(Stream(), 8, drop_last=True),
}


def divide(loader: DataLoader, **options) -> DataLoader:
    return shoal.as_distributed(nn.Linear(1, 1), loader=loader, **options)[1]


def numbers(batch: Tensor) -> list[int]:
    return batch.tolist()


def epochs(loader: DataLoader, count: int = 2) -> list[list[list[int]]]:
    """Batches of each epoch, while others draw random numbers too."""
    seen = []
    for _ in range(count):
        seen.append([])
        for batch in loader:
            seen[-1].append(numbers(batch))
            torch.rand(1)
            random.random()
    return seen


def alone(name: str) -> list[list[list[int]]]:
    """What one process gets, with the seeds of rank 0."""

    def iterate():
        seed(0)
        nn.Linear(1, 1)  # draws as it does on ranks
        return epochs(LOADERS[name]())

    return shoal.run(iterate, 1, "memory")[0]


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def joined(lists) -> list:
    return list(chain.from_iterable(lists))


def put_together(ranks: list[list[list[list[int]]]]) -> list[list[list[int]]]:
    """Each epoch's global batches, from what the ranks got."""
    return [
        [joined(parts) for parts in zip(*of_ranks, strict=True)]
        for of_ranks in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_all_ranks_together_have_the_batches_of_one_process(name, size) -> None:
    def iterate():
        seed(shoal.world().rank)  # ranks that draw other numbers
        loader = divide(LOADERS[name]())
        return len(loader), epochs(loader)

    lengths, ranks = zip(*shoal.run(iterate, size, "memory"), strict=True)
    expected, found = alone(name), put_together(ranks)
    # One that draws while training draws as well gets other numbers than it would get alone.
    assert found[0] == expected[0] or name == "lazy"
    assert [len(batch) for batch in found[0]] == [len(batch) for batch in expected[0]]
    assert found[0] != found[1] or name == "sequential"
    assert set(lengths) == {len(found[0])}
    if name in ("generator", "replacement", "sequential"):
        assert found == expected  # in every epoch: nobody else draws from that generator


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_between_processes(backend) -> None:
    def iterate():
        seed(shoal.world().rank)
        found = [epochs(divide(LOADERS[name]())) for name in ("shuffled", "stream", "buckets")]
        workers = DataLoader(NUMBERS, 8, shuffle=True, num_workers=2, persistent_workers=True)
        return [*found, epochs(divide(workers))]

    *found, workers = zip(*pools.Team(backend, 2).run(iterate), strict=True)
    for name, ranks in zip(("shuffled", "stream", "buckets"), found, strict=True):
        whole = put_together(list(ranks))
        assert [len(batch) for batch in whole[0]] == [len(batch) for batch in alone(name)[0]]
        assert sorted(joined(whole[0])) == sorted(joined(whole[1])) == list(range(22))
    for epoch in put_together(list(workers)):
        assert sorted(joined(epoch)) == list(range(22))


def test_a_stream_with_workers() -> None:
    def iterate():
        seed(shoal.world().rank)
        return epochs(divide(DataLoader(Stream(24), 4, num_workers=2)))

    whole = put_together(shoal.run(iterate, 2, "memory"))
    for epoch in whole:
        assert sorted(joined(epoch)) == list(range(24))
    assert whole[0] != whole[1]


def test_a_last_batch_too_small_for_all() -> None:
    """Indices go with the batch before; a stream does not know that it ends."""

    def iterate(make):
        loader = divide(make())
        return len(loader), epochs(loader, 1)

    def run(make):
        lengths, ranks = zip(*shoal.run(iterate, 3, "memory", args=(make,)), strict=True)
        (whole,) = put_together(ranks)
        assert set(lengths) == {len(whole)}
        return [len(batch) for batch in whole]

    assert run(lambda: DataLoader(NUMBERS, 5)) == [5, 5, 5, 7]
    assert run(lambda: DataLoader(NUMBERS, 5, drop_last=True)) == [5, 5, 5, 5]
    assert run(lambda: DataLoader(Stream(), 5, drop_last=True)) == [5, 5, 5, 5]
    with pytest.warns(UserWarning, match="a last batch of 2 samples is left out"):
        assert run(lambda: DataLoader(Stream(), 5)) == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("strategy", "options", "places"),
    [
        ("zero3", {}, [0, 1, 2, 3]),
        ("fsdp", {"replica": 2}, [0, 1, 2, 3]),
        ("tensor", {"tensor": 2}, [0, 0, 1, 1]),
        ("tensor", {}, [0, 0, 0, 0]),
        ("pipeline", {"data": 2}, None),
        ("hybrid", {"tensor": 2, "pipeline": 2}, [0, 0, 0, 0]),
    ],
)
def test_the_right_axis(strategy, options, places) -> None:
    """Ranks that hold parts of one replica see the same."""

    def iterate():
        seed(shoal.world().rank)
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
        model, loader = shoal.as_distributed(
            module, loader=DataLoader(NUMBERS, 8, shuffle=True), strategy=strategy, **options
        )
        return model.data_group.rank, epochs(loader, 1)

    ranks, seen = zip(*shoal.run(iterate, 4, "memory"), strict=True)
    assert places is None or list(ranks) == places
    by_place = dict(zip(ranks, seen, strict=True))
    assert all(by_place[rank] == found for rank, found in zip(ranks, seen, strict=True))
    (whole,) = put_together([by_place[rank] for rank in sorted(by_place)])
    assert sorted(joined(whole)) == list(range(22))


def test_training_is_that_of_one_process() -> None:
    """The script as it was, with one line more."""

    def train(strategy):
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(20, 3), torch.randn(20, 2))
        model = nn.Linear(3, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(data, batch_size=7, shuffle=True, generator=generator())
        model, optimizer, loader = shoal.as_distributed(
            model, optimizer, loader, strategy=strategy or "ddp", enabled=bool(strategy)
        )
        for _ in range(3):
            for inputs, targets in loader:
                optimizer.zero_grad()
                if strategy:
                    model.train_step(inputs.double(), targets.double(), nn.functional.mse_loss)
                else:
                    nn.functional.mse_loss(model(inputs.double()), targets.double()).backward()
                optimizer.step()
        return model.state_dict()

    (expected,) = shoal.run(train, 1, "memory", args=("",))
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        for state in shoal.run(train, 3, "memory", args=(strategy,)):
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


# Going on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 1, 2, "end"])
@pytest.mark.parametrize(
    "name", ["shuffled", "generator", "replacement", "stream", "ready batches"]
)
def test_resumed(name, stop, tmp_path) -> None:
    """In the middle of an epoch, after its last batch, and after its end; with fewer ranks."""

    def begin():
        seed(shoal.world().rank)
        loader, model = divide(LOADERS[name]()), nn.Linear(1, 1)
        first = epochs(loader, 1)
        seen = []
        for number, batch in enumerate(loader):
            if number == stop:
                shoal.save(tmp_path, model, sampler=loader)
                stopped = len(seen)
            seen.append(numbers(batch))
        if stop == "end":
            shoal.save(tmp_path, model, sampler=loader)
            stopped, seen = 0, epochs(loader, 1)[0]
        return first, [seen[stopped:]]

    def go_on():
        seed(100 + shoal.world().rank)
        loader = divide(LOADERS[name]())
        shoal.load(tmp_path, nn.Linear(1, 1), sampler=loader, random_state=True)
        before = loader.state_dict()["batches"]
        assert before == (0 if stop == "end" else stop + 1)
        return epochs(loader, 1)

    first, rest = zip(*shoal.run(begin, 3, "memory"), strict=True)
    (expected,) = put_together(rest)
    (found,) = put_together(shoal.run(go_on, 2, "memory"))
    num_batches = len(put_together(first)[0])
    if stop == "end":
        assert found == expected
    elif stop + 1 < num_batches:  # it was saved inside of the loop, with the batch in hand
        assert found == expected[1:]
    else:
        assert len(found) == num_batches  # nothing was left: the next epoch


def test_a_resumed_epoch_that_is_left_at_once_lends_the_next_one_nothing() -> None:
    """It began with the draws of the epoch that was left, in the same order."""

    def second_epoch(*, is_resumed: bool) -> list[list[int]]:
        seed(0)
        loader = divide(LOADERS["shuffled"]())
        assert isinstance(loader, DividedLoader)
        if is_resumed:
            next(iter(loader))
            loader.load_state_dict(loader.state_dict())
        for epoch in loader.epochs(2):
            if epoch == 1:
                seed(7)
                return [numbers(batch) for batch in loader]
        raise AssertionError

    def both():
        return second_epoch(is_resumed=False), second_epoch(is_resumed=True)

    for fresh, resumed in shoal.run(both, 2, "memory"):
        assert fresh == resumed


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_resumed_after_a_batch_that_two_were_joined_to(ranks) -> None:
    """Samples that were trained on with the batch before do not come again."""

    def begin():
        loader = divide(DataLoader(NUMBERS, 5))
        list(islice(loader, 4))
        return loader.state_dict()

    def go_on(state):
        loader = divide(DataLoader(NUMBERS, 5))
        loader.load_state_dict(state)
        return epochs(loader, 1)

    state = shoal.run(begin, 3, "memory")[1]
    (found,) = put_together(shoal.run(go_on, ranks, "memory", args=(state,)))
    assert joined(found) == list(range(22))  # the next epoch


def test_what_workers_have_fetched_ahead_comes_again() -> None:
    def iterate():
        loader = divide(DataLoader(NUMBERS, 4, shuffle=True, num_workers=1, prefetch_factor=4))
        iterator = iter(loader)
        seen = [numbers(next(iterator)) for _ in range(2)]
        state = loader.state_dict()
        rest = [numbers(batch) for batch in iterator]
        loader.load_state_dict(state)
        assert loader.state_dict()["batches"] == 2
        assert [numbers(batch) for batch in loader] == rest
        return [seen + rest]

    (whole,) = put_together(shoal.run(iterate, 2, "memory"))
    assert sorted(joined(whole)) == list(range(22))


def test_another_batch_size() -> None:
    loader = divide(DataLoader(NUMBERS, 8))
    with pytest.raises(ValueError, match="batch_size=8, and this one has 4"):
        divide(DataLoader(NUMBERS, 4)).load_state_dict(loader.state_dict())
    shoal.world().shutdown()


# What is left alone -------------------------------------------------------------------------


class Noisy(Dataset):
    def __getitem__(self, index):
        return torch.rand(())

    def __len__(self):
        return 8


@pytest.mark.parametrize("num_workers", [0, 1])
def test_augmentation_is_as_the_ranks_are_seeded(num_workers) -> None:
    def draw(is_different):
        torch.manual_seed(shoal.world().rank if is_different else 0)
        loader = divide(DataLoader(Noisy(), 4, shuffle=True, num_workers=num_workers))
        return [batch.tolist() for batch in loader]

    first, second = shoal.run(draw, 2, "memory", args=(True,))
    assert first != second


def test_attributes_stay() -> None:
    class Special(DataLoader):
        """A user's own."""

        def __iter__(self):
            for batch in super().__iter__():
                yield batch + 100

    def look():
        loader = Special(NUMBERS, 8, collate_fn=lambda items: torch.stack(items) * 2)
        divided = divide(loader)
        assert divided.batch_size == 8
        assert divided.dataset is NUMBERS
        assert isinstance(divided, Special)
        assert isinstance(divided, DividedLoader)
        assert len(loader) == len(list(loader)) == 3  # the user's is as it was
        return next(iter(divided)).tolist()

    assert shoal.run(look, 2, "memory") == [[100, 102, 104, 106], [108, 110, 112, 114]]


def test_what_is_divided_already_comes_back() -> None:
    def look():
        world = shoal.world()
        ours = DataLoader(NUMBERS, batch_sampler=shoal.sampler(NUMBERS, 8))
        torchs = DataLoader(NUMBERS, 4, sampler=DistributedSampler(NUMBERS, 2, world.rank))
        divided = divide(DataLoader(NUMBERS, 8))
        loaders = [ours, torchs, divided]
        _, same = shoal.as_distributed(nn.Linear(1, 1), loader=loaders)
        assert all(one is other for one, other in zip(same, loaders, strict=True))
        assert isinstance(same, list)
        return True

    assert all(shoal.run(look, 2, "memory"))


def test_divided_over_the_wrong_axis() -> None:
    def look():
        loader = DataLoader(NUMBERS, batch_sampler=shoal.sampler(NUMBERS, 8))
        divide(loader, strategy="tensor")

    with pytest.raises(ValueError, match="into 2 parts, and 1 ranks see different data"):
        shoal.run(look, 2, "memory")


def test_not_enabled() -> None:
    model = nn.Linear(1, 1)
    optimizer, loader = torch.optim.SGD(model.parameters()), DataLoader(NUMBERS, 8)
    given = (model, optimizer, loader)
    assert shoal.as_distributed(*given, enabled=False) == given
    assert shoal.as_distributed(model, loader=loader, enabled=False) == (model, loader)
    assert shoal.as_distributed(model, enabled=False) is model


# What cannot be divided ---------------------------------------------------------------------


class RankDependent(Sampler):
    def __iter__(self):
        yield from range(shoal.world().rank, 22, 2)

    def __len__(self):
        return 11


class RankStream(IterableDataset):
    def __iter__(self):
        yield from range(shoal.world().rank, 22, 2)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: [1, 2], TypeError, "must be a torch DataLoader, or a list of them; got a int"),
        (lambda: DataLoader(NUMBERS, 1), ValueError, "has 1 for 2 ranks"),
        (lambda: DataLoader(NUMBERS, 4, sampler=RankDependent()), MismatchError, "different data"),
        (lambda: DataLoader(RankStream(), 4), MismatchError, "different data"),
        (lambda: DataLoader(NUMBERS[: 20 + shoal.world().rank], 4), MismatchError, "20 samples"),
        (lambda: DataLoader(torch.zeros(4, 2, 3), None), ValueError, None),
        (lambda: DataLoader(TensorDataset(NUMBERS, NUMBERS), None), ValueError, "got none"),
    ],
    ids=["no loader", "too small", "sampler", "stream", "lengths", "one row", "no rows"],
)
def test_what_cannot_be_divided(make, error, words) -> None:
    def iterate():
        for _ in divide(make()):
            pass

    if words is None:  # two rows for two ranks: it can
        shoal.run(iterate, 2, "memory")
        return
    with pytest.raises(error, match=words):
        shoal.run(iterate, 2, "memory")


def test_a_rank_that_iterates_alone() -> None:
    """It would see its part of the data only: waiting for the others says so."""

    def iterate():
        loader = divide(DataLoader(NUMBERS, 8))
        if shoal.world().rank == 0:
            list(loader)

    with pytest.raises((DeadlineError, shoal.errors.PeerError)):
        shoal.run(iterate, 2, "memory")


def train(make, *, weighted: bool = False, length: int = 12) -> None:
    """Two epochs."""
    data = TensorDataset(torch.randn(length, 3), torch.randn(length, 1))
    module = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    model, optimizer, loader = shoal.as_distributed(module, optimizer, make(data), strategy="ddp")
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            if weighted:
                model.train_step(inputs, targets, nn.functional.mse_loss)
            else:
                nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()


class Rows(IterableDataset):
    """Rows of a dataset, one after the other."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self):
        yield from (self.data[index] for index in range(len(self.data)))


@pytest.mark.parametrize(
    "make", [lambda data: DataLoader(data, 4), lambda data: DataLoader(Rows(data), 4)]
)
def test_a_plain_loop_over_uneven_parts_is_warned_of_once(make) -> None:
    """Ranks count alike in it, however many rows they have."""
    with pytest.warns(UserWarning, match="parts of different size") as warned:
        shoal.run(train, 3, "memory", args=(make,))
    (only,) = warned
    assert "a batch of 4 rows was divided over 3 ranks" in str(only.message)
    assert "model.train_step" in str(only.message)
    assert only.filename == __file__


def test_parts_that_are_even_or_weighted_are_not_warned_of() -> None:
    def even() -> None:
        train(lambda data: DataLoader(data, 6, drop_last=True), length=14)

    def weighted() -> None:
        train(lambda data: DataLoader(data, 4), weighted=True)

    shoal.run(even, 3, "memory")
    shoal.run(weighted, 3, "memory")


def test_a_pipeline_weights_its_parts_and_forgets_that_they_were_uneven() -> None:
    def rows_left() -> int:
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        data = TensorDataset(torch.randn(3, 3), torch.randn(3, 1))
        model, loader = shoal.as_distributed(
            module, loader=DataLoader(data, 3), strategy="pipeline", data=2, micro_batches=1
        )
        (batch,) = loader
        assert model.uneven_rows == 3
        model.train_step(*batch, nn.functional.mse_loss)
        return model.uneven_rows

    assert shoal.run(rows_left, 4, "memory") == [0] * 4


def test_evaluation_over_uneven_parts_is_not_warned_of() -> None:
    def evaluate() -> int:
        module = nn.Linear(3, 1)
        model, loader = shoal.as_distributed(
            module, loader=DataLoader(torch.randn(10, 3), 4), strategy="ddp"
        )
        with torch.no_grad():
            return sum(len(model(inputs)) for inputs in loader)

    assert sum(shoal.run(evaluate, 3, "memory")) == 10


def one_epoch(num_samples: int, *, is_training: bool) -> int:
    """Steps of an epoch of batches of five."""
    data = TensorDataset(torch.randn(num_samples, 3))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = shoal.as_distributed(
        model, optimizer, DataLoader(data, batch_size=5)
    )
    model.train(is_training)
    return sum(1 for _ in loader)


def test_a_step_less_than_in_one_process_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="one step less than in one process"):
        assert shoal.run(lambda: one_epoch(16, is_training=True), 3, "memory") == [3, 3, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shoal.run(lambda: one_epoch(16, is_training=False), 3, "memory") == [3, 3, 3]
        assert shoal.run(lambda: one_epoch(18, is_training=True), 3, "memory") == [4, 4, 4]

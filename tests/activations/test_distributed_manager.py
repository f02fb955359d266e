"""Activations that ranks keep for each other, on every backend."""

from __future__ import annotations

import gc

import pytest
import torch

import shoal
from pools import Team
from shoal.activations import DistributedCheckpointManager
from shoal.errors import ClosedError, MismatchError, NotHeldError


def value_of(rank: int, numel: int = 3) -> torch.Tensor:
    return torch.full((numel,), float(rank))


def managed(act):
    """Calls ``act(manager)``, and closes when all ranks are through."""
    gc.collect()  # a model of another test may still be counted
    with DistributedCheckpointManager() as manager:
        result = act(manager)
        shoal.world().barrier()
    return result


def register() -> object:
    def act(manager):
        manager.register_checkpoint(f"of {manager.rank}", value_of(manager.rank))
        kept = manager.retrieve_or_fetch(f"of {manager.rank}")
        return manager.rank, manager.world_size, manager.get_checkpoint_keys(), kept.tolist()

    return managed(act)


def test_registering_stores_locally(several: Team) -> None:
    for rank, result in enumerate(several.run(register)):
        assert result == (rank, several.size, [f"of {rank}"], [float(rank)] * 3)


def fetch_all() -> list[list[float]]:
    def act(manager):
        manager.register_checkpoint("x", value_of(manager.rank))
        shoal.world().barrier()
        found = [manager.retrieve_or_fetch("x", rank) for rank in range(manager.world_size)]
        found[1 - min(manager.rank, 1)].add_(100)  # a copy: the holder's stays as it is
        shoal.world().barrier()
        again = [manager.retrieve_or_fetch("x", rank) for rank in range(manager.world_size)]
        return [each.tolist() for each in again]

    return managed(act)


def test_remote_retrieval(several: Team) -> None:
    expected = [[float(rank)] * 3 for rank in range(several.size)]
    assert several.run(fetch_all) == [expected] * several.size


def fetch_while_the_holder_is_busy() -> float:
    """The holder runs no code of shoal's from its barrier to the file that ends its loop."""

    def act(manager):
        world = shoal.world()
        if manager.rank == 1:
            manager.register_checkpoint("x", value_of(7, 1 << 20))
        world.barrier()
        if manager.rank == 0:
            total = manager.retrieve_or_fetch("x", 1).sum().item()
            world.send(torch.tensor([total]), 1)
            return total
        return world.recv(src=0).item() if manager.rank == 1 else 0.0

    return managed(act)


def test_the_holders_code_takes_no_part(several: Team) -> None:
    assert several.run(fetch_while_the_holder_is_busy)[:2] == [7.0 * (1 << 20)] * 2


KINDS = {
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 4, dtype=torch.int16),
    "bfloat16": lambda: torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "bool": lambda: torch.tensor([True, False]),
    "one of many": lambda: torch.arange(6.0)[4::4],
    "a view": lambda: torch.arange(60.0).view(6, 10)[::2, 1::3],
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "conjugated": lambda: torch.tensor([1 + 2j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "float8": lambda: torch.arange(4.0).to(torch.float8_e4m3fn),
    "large": lambda: torch.arange(3_000_001, dtype=torch.float64),
    "with a graph": lambda: torch.arange(4.0, requires_grad=True) * 2,
}


def fetch_kinds() -> list[str]:
    def act(manager):
        if manager.rank == 0:
            for name, make in KINDS.items():
                manager.register_checkpoint(name, make())
        shoal.world().barrier()
        wrong = []
        for name, make in KINDS.items():
            expected, found = make().detach(), manager.retrieve_or_fetch(name, 0)
            pair = [t.resolve_conj().contiguous().reshape(-1) for t in (expected, found)]
            same = expected.shape == found.shape and expected.dtype is found.dtype
            if not same or found.requires_grad or pair[0].tolist() != pair[1].tolist():
                wrong.append(name)
        return wrong

    return managed(act)


def test_shapes_and_dtypes(several: Team) -> None:
    assert several.run(fetch_kinds) == [[]] * several.size


def broadcast() -> list[float]:
    def act(manager):
        source = manager.world_size - 1
        mine = value_of(9) if manager.rank == source else None
        manager.register_checkpoint_broadcast("x", mine, source)
        return manager.local_manager.find("x").tensor.tolist()

    return managed(act)


def test_broadcast_reaches_all_ranks(several: Team) -> None:
    assert several.run(broadcast) == [[9.0] * 3] * several.size


def broadcast_nothing() -> str:
    def act(manager):
        try:
            manager.register_checkpoint_broadcast("x", None, 0)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return managed(act)


def test_broadcast_of_nothing_is_an_error_everywhere(several: Team) -> None:
    first, *others = several.run(broadcast_nothing)
    assert first == "TypeError: an activation must be a tensor; got a NoneType"
    assert all(
        "rank 0 failed: TypeError: an activation must be a tensor" in each for each in others
    )


def synchronize(fill: bool) -> object:
    def act(manager):
        manager.register_checkpoint(f"of {manager.rank}", value_of(manager.rank))
        manager.register_checkpoint("all", value_of(manager.rank, 2 + (manager.rank == 1)))
        directory = manager.synchronize_checkpoints(fill=fill)
        values = {
            key: manager.local_manager.find(key).tensor.tolist()
            for key in sorted(manager.get_checkpoint_keys())
        }
        return (
            directory.holders,
            directory.disagreements,
            directory.missing(0),
            str(directory),
            values,
        )

    return managed(act)


def test_synchronize_makes_ranks_agree(several: Team) -> None:
    results = several.run(synchronize, False)
    holders, disagreements, missing, text, values = results[0]
    ranks = tuple(range(several.size))
    assert holders == {"all": ranks} | {f"of {rank}": (rank,) for rank in ranks}
    assert missing == [f"of {rank}" for rank in ranks[1:]]
    assert list(disagreements) == ["all"]
    assert "rank 0: torch.float32 (2,); rank 1: torch.float32 (3,)" in disagreements["all"]
    assert "'of 1': ranks [1]" in text
    assert list(values) == ["all", "of 0"]
    assert all(result[:4] == results[0][:4] for result in results)


def test_missing_ones_are_filled_in_on_request(several: Team) -> None:
    for holders, *_, values in several.run(synchronize, True):
        expected = {f"of {rank}": [float(rank)] * 3 for rank in range(several.size)}
        assert {key: value for key, value in values.items() if key != "all"} == expected
        assert set(holders.values()) == {tuple(range(several.size))}


def fill_disputed() -> str:
    def act(manager):
        if manager.rank < manager.world_size - 1:
            manager.register_checkpoint("x", value_of(0, 2 + manager.rank))
        try:
            manager.synchronize_checkpoints(fill=True)
        except shoal.errors.ShoalError as error:
            return f"{type(error).__name__}: {error}"

    return managed(act)


def test_what_ranks_disagree_about_is_not_filled_in() -> None:
    results = shoal.run(fill_disputed, 3, "memory")
    assert all("MismatchError: nothing was filled in" in result for result in results)
    assert all("the ranks hold different tensors as 'x'" in result for result in results)


def clear() -> list[list[object]]:
    def act(manager):
        manager.register_checkpoint("x", value_of(1))
        manager.clear_checkpoints_distributed()
        listed = [manager.list_checkpoints(rank) for rank in range(manager.world_size)]
        memory = shoal.world().stats().memory["activations"]
        return [*listed, memory.current, memory.peak >= 12]

    return managed(act)


def test_clear_clears_everywhere(several: Team) -> None:
    assert several.run(clear) == [[*[[]] * several.size, 0, True]] * several.size


def figures() -> object:
    def act(manager):
        for index in range(manager.rank + 1):
            manager.register_checkpoint(f"{index}", torch.zeros(256))
        manager.local_manager.release_checkpoint("0")
        return manager.get_aggregated_memory_stats()

    return managed(act)


def test_aggregated_figures(several: Team) -> None:
    results = several.run(figures)
    stats, size = results[0], several.size
    assert results == [stats] * size
    assert stats.per_rank_memory_used == tuple(1024 * rank for rank in range(size))
    assert stats.total_current_memory_used == 1024 * sum(range(size))
    assert stats.total_peak_memory_used == 1024 * sum(range(size + 1))
    assert stats.average_memory_per_rank == 1024 * sum(range(size)) / size
    assert stats.per_rank_checkpoint_count == tuple(range(size))
    assert (stats.max_memory_used, stats.min_memory_used) == (1024 * (size - 1), 0)


def send_and_receive() -> list[float]:
    def act(manager):
        if manager.rank == 0:
            for key in "ab":
                manager.register_checkpoint(key, value_of(ord(key)))
                manager.send_checkpoint(key, 1)
        elif manager.rank == 1:
            first = manager.receive_checkpoint("a", 0).tolist()
            return first + manager.receive_checkpoint("b", 0).tolist()
        return manager.get_checkpoint_keys()

    return managed(act)


def test_send_and_receive_by_layer(several: Team) -> None:
    sent, received, *_ = several.run(send_and_receive)
    assert sent == ["a", "b"]
    assert received == [97.0] * 3 + [98.0] * 3


def collectives() -> list[list[float]]:
    """Those of the backend that managers use: there is no second class for communication."""
    backend = DistributedCheckpointManager()._backend
    assert backend is shoal.world().backend
    return [backend.all_reduce(value_of(backend.rank)).tolist()]


def test_there_is_one_class_for_communication(several: Team) -> None:
    assert several.run(collectives) == [[[float(sum(range(several.size)))] * 3]] * several.size


def in_a_group() -> object:
    world = shoal.world()
    group = world.split(world.rank % 2)
    with DistributedCheckpointManager(group) as manager:
        manager.register_checkpoint("x", value_of(world.rank))
        group.barrier()
        found = [manager.retrieve_or_fetch("x", rank)[0].item() for rank in range(group.size)]
        group.barrier()
    world.barrier()
    return found


def test_a_group(several: Team) -> None:
    for rank, found in enumerate(several.run(in_a_group)):
        assert found == [float(each) for each in range(rank % 2, several.size, 2)]


def two_managers() -> list[float]:
    def act(first):
        with DistributedCheckpointManager() as second:
            first.register_checkpoint("x", value_of(first.rank))
            second.register_checkpoint("x", value_of(10 + first.rank))
            shoal.world().barrier()
            found = [each.retrieve_or_fetch("x", 0)[0].item() for each in (first, second)]
            shoal.world().barrier()
        return [*found, first.retrieve_or_fetch("x", 1)[0].item()]

    return managed(act)


def test_managers_do_not_mix(several: Team) -> None:
    assert several.run(two_managers) == [[0.0, 10.0, 1.0]] * several.size


def prefetch() -> object:
    def act(manager):
        if manager.rank == 0:
            manager.register_checkpoint("x", value_of(5))
        shoal.world().barrier()
        before = shoal.world().stats().get("fetch")
        calls = before.calls if before else 0
        if manager.rank:
            manager.prefetch("x", 0)
            manager.prefetch("x", 0)
        found = manager.retrieve_or_fetch("x", 0).tolist()
        after = shoal.world().stats().get("fetch")
        return found, (after.calls if after else 0) - calls

    return managed(act)


def test_a_fetch_goes_on_while_the_rank_computes(several: Team) -> None:
    first, *others = several.run(prefetch)
    assert first == ([5.0] * 3, 0)
    assert others == [([5.0] * 3, 1)] * (several.size - 1)


# Edge cases -------------------------------------------------------------------------------------


def errors() -> list[str]:
    def act(manager):
        other = (manager.rank + 1) % manager.world_size
        manager.register_checkpoint("y", value_of(0))
        shoal.world().barrier()
        texts = []
        for call in (
            lambda: manager.retrieve_or_fetch("x"),
            lambda: manager.retrieve_or_fetch("x", manager.rank),
            lambda: manager.retrieve_or_fetch("x", other),
            lambda: manager.retrieve_or_fetch("x", manager.world_size),
            lambda: manager.retrieve_or_fetch("x", -1),
            lambda: manager.retrieve_or_fetch("x", True),
            lambda: manager.retrieve_or_fetch(4),
            lambda: manager.send_checkpoint("x", other),
            lambda: manager.register_checkpoint_broadcast("x", value_of(0), manager.world_size),
        ):
            try:
                call()
                texts.append("no error")
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
        texts.append(str(manager.retrieve_or_fetch("x", recompute=lambda: value_of(8)).tolist()))
        texts.append(str(manager.retrieve_or_fetch("x", other, recompute=lambda: 8)))
        return texts

    return managed(act)


def test_missing_keys_and_invalid_ranks(several: Team) -> None:
    last = several.size - 1
    for rank, texts in enumerate(several.run(errors)):
        other = (rank + 1) % several.size
        assert "holds 'x'" in texts[0] or "does not hold 'x'" in texts[0]
        assert texts[1].startswith(f"NotHeldError: no rank that was asked by rank {rank} holds 'x'")
        assert texts[2] == f"NotHeldError: rank {other} does not hold 'x'; it holds 'y'"
        bad = f"ValueError: source_rank must be a rank from 0 to {last}; got "
        assert texts[3:5] == [f"{bad}{several.size}", f"{bad}-1"]
        assert texts[5] == "TypeError: source_rank must be a whole number; got True"
        assert texts[6] == "TypeError: layer_id must be a string; got 4"
        assert texts[7] == f"NotHeldError: rank {rank} does not hold 'x' and cannot send it"
        assert texts[8].startswith(bad)
        assert texts[9:] == ["[8.0, 8.0, 8.0]", "8"]


def one_rank() -> object:
    with DistributedCheckpointManager() as manager:
        directory = manager.synchronize_checkpoints(fill=True)
        manager.register_checkpoint_broadcast("x", value_of(1))
        found = manager.retrieve_or_fetch("x", 0).tolist()
        stats = manager.get_aggregated_memory_stats()
        with pytest.raises(NotHeldError):
            manager.retrieve_or_fetch("y")
        return directory.holders, found, stats.per_rank_memory_used


def test_one_rank(alone: Team) -> None:
    assert alone.run(one_rank) == [({}, [1.0] * 3, (12,))]


def nothing_registered() -> object:
    def act(manager):
        directory = manager.synchronize_checkpoints(fill=True)
        manager.clear_checkpoints_distributed()
        stats = manager.get_aggregated_memory_stats()
        return directory.holders, str(directory), stats.total_checkpoint_count, str(stats)

    return managed(act)


def test_nothing_registered(several: Team) -> None:
    for holders, text, count, _ in several.run(nothing_registered):
        assert (holders, text, count) == ({}, "no rank holds an activation", 0)


def closed() -> list[str]:
    world = shoal.world()
    manager = DistributedCheckpointManager()
    manager.register_checkpoint("x", value_of(1))
    world.barrier()
    if world.rank == 0:
        manager.close()
        manager.close()
    world.barrier()
    texts = []
    for call in (lambda: manager.retrieve_or_fetch("x", 0), manager.synchronize_checkpoints):
        if world.rank == 0 or call is not manager.synchronize_checkpoints:
            try:
                call()
            except shoal.errors.ShoalError as error:
                texts.append(f"{type(error).__name__}: {error}")
            if world.rank:
                break
    world.barrier()
    manager.close()
    texts.append(str(manager.local_manager.get_memory_stats().current_memory_used))
    return texts


def test_a_closed_manager(several: Team) -> None:
    first, *others = several.run(closed)
    assert first == [
        "ClosedError: this manager of activations was closed; make another one"
    ] * 2 + ["0"]
    for text, used in others:
        assert text.startswith("NotHeldError: rank 0 does not hold 'x': it has closed its manager")
        assert used == "0"


def different_broadcasts() -> str:
    def act(manager):
        try:
            manager.register_checkpoint_broadcast(f"x{manager.rank}", value_of(0))
        except MismatchError as error:
            return str(error)

    return managed(act)


def test_broadcasts_of_different_names_are_a_mismatch(several: Team) -> None:
    for text in several.run(different_broadcasts):
        assert text.startswith("the ranks broadcast different activations: ['x0', 'x1'")


def changed_in_place() -> str:
    def act(manager):
        activation = value_of(1)
        manager.register_checkpoint("x", activation)
        activation.add_(1)
        shoal.world().barrier()
        try:
            manager.retrieve_or_fetch("x", (manager.rank + 1) % manager.world_size)
        except shoal.errors.ShoalError as error:
            return str(error)

    return managed(act)


def test_what_the_holder_changed_in_place_is_not_given(several: Team) -> None:
    for text in several.run(changed_in_place):
        assert "'x' was changed in place after it was registered" in text


def many_ranks() -> list[int]:
    """Every other rank has let go of what all had: whom do they ask for it?"""
    asked: list[int] = []

    def act(manager):
        manager.register_checkpoint_broadcast("x", value_of(1))
        manager.synchronize_checkpoints()
        if manager.rank % 2:
            manager.local_manager.release_checkpoint("x")
        read = manager._peers.read
        manager._peers.read = lambda rank, *rest: (asked.append(rank), read(rank, *rest))[1]
        shoal.world().barrier()
        return manager.retrieve_or_fetch("x").tolist()

    assert managed(act) == [1.0] * 3
    return asked


def test_no_rank_is_asked_by_all() -> None:
    asked = shoal.run(many_ranks, 64, "memory")
    assert [len(each) for each in asked] == [0, 1] * 32
    assert sorted(rank for each in asked for rank in each) == list(range(0, 64, 2))


def wrong_arguments() -> None:
    for timeout in (0, -1, float("nan"), "1"):
        with pytest.raises(ValueError, match="timeout must be a number of seconds above 0; got"):
            DistributedCheckpointManager(timeout=timeout)
    with pytest.raises(TypeError, match="backend must be a world or a group of ranks; got 3"):
        DistributedCheckpointManager(3)


def test_wrong_arguments() -> None:
    shoal.run(wrong_arguments, 1, "memory")


def test_without_a_world() -> None:
    with pytest.raises(ClosedError, match=r"call shoal\.init"):
        DistributedCheckpointManager()

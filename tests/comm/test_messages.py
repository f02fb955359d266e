"""Messages between two ranks: tags, order, sizes, both directions."""

from __future__ import annotations

import threading

import pytest
import torch

import leaks
import shoal
from pools import Team
from shoal.errors import DeadlineError, DeadlockError, MismatchError
from shoal.launch.function.forkserver.forkserver import fork_server


def ring(count):
    """Sends and receives at once, many outstanding, in an order of the receiver's own."""
    backend = shoal.world().backend
    after, before = (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size
    sends = [
        backend.send(torch.full((tag + 1,), float(backend.rank)), after, tag, async_op=True)
        for tag in range(count)
    ]
    received = {tag: backend.recv(src=before, tag=tag) for tag in reversed(range(count))}
    assert all(send.wait() is None for send in sends)
    return [received[tag].tolist() for tag in range(count)]


@pytest.mark.parametrize("count", [1, 8, 30])
def test_tags_out_of_order(several: Team, count) -> None:
    for rank, received in enumerate(several.run(ring, count)):
        before = float((rank - 1) % several.size)
        assert received == [[before] * (tag + 1) for tag in range(count)]


def one_tag(count):
    backend = shoal.world().backend
    if backend.rank == 0:
        works = [backend.send(torch.tensor([i]), 1, async_op=True) for i in range(count)]
        return [work.wait() for work in works]
    if backend.rank == 1:
        works = [backend.recv(src=0, async_op=True) for _ in range(count)]
        return [work.wait().item() for work in works]
    return None


def test_messages_of_one_tag_keep_their_order(several: Team) -> None:
    results = several.run(one_tag, 100)
    assert results[0] == [None] * 100
    assert results[1] == list(range(100))


def both_directions(numel):
    backend = shoal.world().backend
    peer = backend.rank ^ 1
    if peer >= backend.size:
        return None
    mine = torch.full((numel,), float(backend.rank))
    into = torch.empty(numel)
    works = [backend.send(mine, peer, async_op=True), backend.recv(into, src=peer, async_op=True)]
    assert works[1].wait() is into
    assert works[0].wait() is None
    return into.unique().tolist()


@pytest.mark.parametrize("numel", [1, 1000003])
def test_both_directions_at_once(several: Team, numel) -> None:
    results = several.run(both_directions, numel)
    for rank, result in enumerate(results):
        assert result is None or result == [float(rank ^ 1)]


def all_pairs():
    backend = shoal.world().backend
    others = [peer for peer in range(backend.size) if peer != backend.rank]
    sends = [
        backend.send(torch.tensor([10 * backend.rank + peer]), peer, 5, async_op=True)
        for peer in others
    ]
    receives = [backend.recv(src=peer, tag=5, async_op=True) for peer in others]
    result = [receive.wait().item() for receive in receives]
    for send in sends:
        send.wait()
    return result


def test_everybody_with_everybody(several: Team) -> None:
    for rank, received in enumerate(several.run(all_pairs)):
        assert received == [10 * peer + rank for peer in range(several.size) if peer != rank]


def differ_in_size():
    backend = shoal.world().backend
    errors = []
    for into in (torch.zeros(4), torch.zeros(3, dtype=torch.float64), torch.zeros(3, 1)):
        try:
            if backend.rank == 0:
                backend.send(torch.ones(3), 1, 7)
            elif backend.rank == 1:
                backend.recv(into, src=0, tag=7)
        except MismatchError as error:
            errors.append(str(error))
        assert not into.any()
    # The channel is as good as before.
    if backend.rank == 0:
        backend.send(torch.ones(3), 1, 7)
    elif backend.rank == 1:
        assert backend.recv(src=0, tag=7).tolist() == [1.0] * 3
    return errors


def test_a_receive_of_another_size_is_an_error_on_both_sides(several: Team) -> None:
    results = several.run(differ_in_size)
    for errors in results[:2]:
        assert len(errors) == 3
        assert all("send(float32[3], dst=1, tag=7)" in error for error in errors)
        assert "recv(float32[4], src=0, tag=7)" in errors[0]
        assert "recv(float64[3], src=0, tag=7)" in errors[1]
        assert "recv(float32[3, 1], src=0, tag=7)" in errors[2]
    assert all(not errors for errors in results[2:])


def in_a_group():
    """Messages of a group and of the world, with the same tag, do not meet."""
    backend = shoal.world().backend
    group = backend.subgroup([0, 1])
    if group is None:
        return None
    peer = 1 - backend.rank
    sends = [
        backend.send(torch.tensor([1]), peer, async_op=True),
        group.send(torch.tensor([2]), peer, async_op=True),
    ]
    received = [group.recv(src=peer).item(), backend.recv(src=peer).item()]
    for send in sends:
        send.wait()
    return received


def test_groups_have_messages_of_their_own(several: Team) -> None:
    assert several.run(in_a_group)[:2] == [[2, 1], [2, 1]]


def beside_collectives():
    """A message may be under way while collectives pass."""
    backend = shoal.world().backend
    work = None
    if backend.rank == 1:
        work = backend.recv(src=0, tag=3, async_op=True)
    totals = [backend.all_reduce(torch.ones(1)).item() for _ in range(5)]
    if backend.rank == 0:
        backend.send(torch.tensor([42]), 1, 3)
    return totals, None if work is None else work.wait().item()


def test_messages_beside_collectives(several: Team) -> None:
    results = several.run(beside_collectives)
    assert [totals for totals, _ in results] == [[float(several.size)] * 5] * several.size
    assert results[1][1] == 42


def embrace():
    backend = shoal.world().backend
    backend.send(torch.ones(1), 1 - backend.rank)


def test_two_sends_that_wait_for_each_other_are_a_deadlock_known_at_once() -> None:
    with pytest.raises(DeadlockError, match=r"rank 0 waits for rank 1 in send\(float32\[1\]"):
        shoal.run(embrace, 2, "memory")


@pytest.mark.parametrize("backend", ["memory", "shm"])
def test_many_may_be_outstanding(backend) -> None:
    fork_server()
    leaks.baseline()
    results = shoal.run(ring, 2, backend, args=(50,), timeout=20)
    assert results[1] == [[0.0] * (tag + 1) for tag in range(50)]


def answer_beside_a_barrier():
    """A thread of rank 0 answers rank 1, which comes to the barrier only then."""
    backend = shoal.world().backend
    if backend.rank == 0:
        question = backend.recv(src=1, async_op=True)
        thread = threading.Thread(target=lambda: backend.send(question.wait() + 1, 1))
        thread.start()
        backend.barrier()
        thread.join()
        return None
    while "barrier()" not in backend._control.whereabouts(0):
        pass
    backend.send(torch.tensor([41]), 0)
    answer = backend.recv(src=0).item()
    backend.barrier()
    return answer


def test_a_thread_may_send_while_another_is_in_a_collective() -> None:
    fork_server()
    leaks.baseline()
    assert shoal.run(answer_beside_a_barrier, 2, "shm", timeout=20) == [None, 42]


def start_and_receive():
    """Sends that are only shown: several at once, one of another shape than is received."""
    backend = shoal.world().backend
    if backend.rank > 1:
        return None
    if backend.rank == 0:
        works = [backend.start_send(torch.full((3,), float(tag)), 1, tag) for tag in range(4)]
        late = backend.start_send(torch.ones(2), 1, 9)
        with pytest.raises(DeadlineError, match=r"send\(float32\[2\], dst=1, tag=9\)"):
            late.wait(timeout=0.05)
        backend.send(torch.zeros(1), 1, 10)  # only now does the other begin
        for work in works:
            work.wait()
        with pytest.raises(MismatchError, match="a receive differs"):
            late.wait()
        with pytest.raises(ValueError, match="a tag must be"):
            backend.start_send(torch.ones(1), 1, -1)
        return all(work.is_done() for work in works)
    backend.recv(src=0, tag=10)
    received = [backend.recv(src=0, tag=tag).tolist() for tag in (2, 0, 3, 1)]
    with pytest.raises(MismatchError, match="a receive differs"):
        backend.recv(torch.zeros(3), src=0, tag=9)
    return received


def test_pending_sends(several: Team) -> None:
    if several.backend == "memory":
        pytest.skip("threads that take turns have no time to run out of")
    first, second, *_ = several.run(start_and_receive)
    assert first is True
    assert second == [[2.0] * 3, [0.0] * 3, [3.0] * 3, [1.0] * 3]

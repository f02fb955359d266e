"""Lanes: groups of the same ranks, lent and used again."""

from __future__ import annotations

import gc

import torch

import shoal


class Owner:
    """Something that lives and dies."""


def test_lanes_have_an_order_of_their_own():
    def crossed():
        backend = shoal.world().backend
        owner = Owner()
        first, second = backend.lane(owner), backend.lane(owner)
        lanes = (first, second) if backend.rank else (second, first)
        works = [lane.all_reduce(torch.ones(2), async_op=True) for lane in lanes]
        return [work.wait().tolist() for work in works]

    assert shoal.run(crossed, ranks=2, backend="memory") == [[[2.0, 2.0]] * 2] * 2


def test_a_lane_is_used_again_when_its_owner_is_gone_everywhere():
    def borrow():
        backend = shoal.world().backend
        owner = Owner()
        first = backend.lane(owner)
        del owner
        gc.collect()
        again = backend.lane(kept := Owner())
        other = backend.lane(kept)
        return first is again, other is first

    assert shoal.run(borrow, ranks=3, backend="memory") == [(True, False)] * 3


def test_a_lane_that_one_rank_still_uses_is_not_lent():
    def borrow():
        backend = shoal.world().backend
        owner = Owner()
        first = backend.lane(owner)
        if backend.rank == 0:
            del owner
            gc.collect()
        return backend.lane(Owner()) is first

    assert shoal.run(borrow, ranks=2, backend="memory") == [False, False]

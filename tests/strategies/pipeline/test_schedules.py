"""Schedules as properties: complete, in order, never stuck, as much waiting as theory says."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.strategies.pipeline import (
    SCHEDULES,
    Pass,
    Tick,
    bubble,
    make_schedule,
    peak_in_flight,
    simulate,
)
from shoal.strategies.pipeline.schedules import choose_chunks, default_costs, make_ticks, needs

names = st.sampled_from(sorted(SCHEDULES))
stages = st.integers(1, 6)
micro_batches = st.integers(1, 20)
chunks = st.integers(1, 4)


def made(name, p, m, v):
    return make_schedule(name, p, m, v if SCHEDULES[name].default_chunks > 1 else 1)


@given(names, stages, micro_batches, chunks)
def test_every_micro_batch_passes_every_chunk_once_each_way(name, p, m, v) -> None:
    schedule = made(name, p, m, v)
    num_chunks = p * (v if SCHEDULES[name].default_chunks > 1 else 1)
    kinds = Pass if SCHEDULES[name].delays_weights else (Pass.FORWARD, Pass.BACKWARD)
    expected = {Tick(kind, n, c) for kind in kinds for n in range(m) for c in range(num_chunks)}
    done = [tick for ticks in schedule for tick in ticks]
    assert len(done) == len(expected)
    assert set(done) == expected
    for rank, ticks in enumerate(schedule):
        assert {tick.chunk % p for tick in ticks} == {rank}


@given(names, stages, micro_batches, chunks)
def test_nothing_is_done_before_what_it_needs(name, p, m, v) -> None:
    spans = simulate(made(name, p, m, v))
    stops = {span.tick: span.stop for span in spans}
    num_chunks = 1 + max(span.tick.chunk for span in spans)
    for span in spans:
        assert all(stops[need] <= span.start for need in needs(span.tick, num_chunks))


@given(names, stages, micro_batches, chunks)
def test_micro_batches_keep_their_order(name, p, m, v) -> None:
    """Messages between two chunks need no other name than their order."""
    for ticks in made(name, p, m, v):
        for kind in Pass:
            for chunk in {tick.chunk for tick in ticks}:
                order = [t.micro_batch for t in ticks if (t.kind, t.chunk) == (kind, chunk)]
                assert order == sorted(order)


@given(names, stages, micro_batches, chunks)
def test_never_stuck_even_if_sends_block(name, p, m, v) -> None:
    """A send returns once the receiver waits for the message, or takes it next."""
    assume(name != "interleaved" or m % p == 0)  # with uneven rounds sends must run ahead
    schedule = made(name, p, m, v)
    num_chunks = 1 + max(tick.chunk for ticks in schedule for tick in ticks)
    num_done, done = [0] * p, set()
    # A rank whose tick is done is blocked until the receiver has come to the tick before the one
    # that takes the message: it asks for it from there on.
    blocked: list[Tick | None] = [None] * p
    while any(count < len(ticks) for count, ticks in zip(num_done, schedule, strict=True)):
        moved = False
        for rank, ticks in enumerate(schedule):
            sent = blocked[rank]
            if sent is not None and (sent in done or _is_asked_for(sent, schedule, num_done, p)):
                blocked[rank], moved = None, True
            if blocked[rank] is None and num_done[rank] < len(ticks):
                tick = ticks[num_done[rank]]
                if all(need in done for need in needs(tick, num_chunks)):
                    done.add(tick)
                    num_done[rank] += 1
                    blocked[rank] = _receiver(tick, num_chunks)
                    moved = True
        assert moved, "all ranks wait"


def _receiver(tick, num_chunks):
    if tick.kind is Pass.FORWARD and tick.chunk + 1 < num_chunks:
        return tick._replace(chunk=tick.chunk + 1)
    if tick.kind is Pass.BACKWARD and tick.chunk:
        return tick._replace(chunk=tick.chunk - 1)
    return None


def _is_asked_for(tick, schedule, num_done, p) -> bool:
    rank = tick.chunk % p
    rest = [t for t in schedule[rank][num_done[rank] :] if t.kind is not Pass.WEIGHTS]
    # Receives of one kind are posted in order; both kinds may be open at once.
    return next((t for t in rest if (t.kind, t.chunk) == (tick.kind, tick.chunk)), None) == tick


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2), "one of gpipe, 1f1b"),
        (("1f1b", 2, 2, 2), "several chunks a rank"),
        (("interleaved", 2, 2, 0), "several chunks a rank"),
        (("1f1b", 0, 2), "at least one stage"),
        (("1f1b", 2, 0), "at least one"),
    ],
)
def test_what_there_is_not(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)


def test_ticks_are_made_once() -> None:
    assert make_ticks("1f1b", 0, 2, 4, 1) is make_ticks("1f1b", 0, 2, 4, 1)


def test_a_changed_schedule_does_not_change_later_ones() -> None:
    make_schedule("1f1b", 2, 4)[0].clear()
    assert len(make_schedule("1f1b", 2, 4)[0]) == 8


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_table_says_which_schedules_delay_weights(name) -> None:
    kinds = {tick.kind for ticks in make_schedule(name, 2, 2) for tick in ticks}
    assert SCHEDULES[name].delays_weights == (Pass.WEIGHTS in kinds)


@pytest.mark.parametrize("name", SCHEDULES)
def test_chunks_by_default(name) -> None:
    default = SCHEDULES[name].default_chunks
    assert choose_chunks(name) == default
    chunks = {tick.chunk for ticks in make_schedule(name, 3, 3) for tick in ticks}
    assert chunks == set(range(3 * default))


stages = st.integers(1, 6)
micro_batches = st.integers(1, 20)
chunks = st.integers(1, 4)


@given(stages, micro_batches)
def test_peak_of_activations(p, m) -> None:
    assert {peak_in_flight(ticks) for ticks in make_schedule("gpipe", p, m)} == {m}
    for rank, ticks in enumerate(make_schedule("1f1b", p, m)):
        assert peak_in_flight(ticks) == min(p - rank, m)
    assert all(peak_in_flight(ticks) <= min(p, m) for ticks in make_schedule("zero-bubble", p, m))


@given(st.sampled_from(["gpipe", "1f1b"]), stages, micro_batches)
def test_bubble_of_the_plain_ones(name, p, m) -> None:
    assert bubble(simulate(make_schedule(name, p, m))) == pytest.approx((p - 1) / (m + p - 1))


@given(stages, st.integers(1, 5), chunks)
def test_bubble_of_interleaved(p, rounds, v) -> None:
    m = p * rounds
    spans = simulate(make_schedule("interleaved", p, m, v))
    assert bubble(spans) == pytest.approx((p - 1) / (v * m + p - 1))


@given(stages, st.integers(0, 14))
def test_bubble_of_zero_bubble_is_a_third(p, more) -> None:
    """With F = B = W: (p-1)(F+B-W) of waiting instead of (p-1)(F+B+W)."""
    m = p + more
    spans = simulate(make_schedule("zero-bubble", p, m))
    assert bubble(spans) == pytest.approx((p - 1) / (3 * m + p - 1))


def test_a_schedule_that_cannot_end_is_known() -> None:
    stuck = [[Tick(Pass.BACKWARD, 0, 0), Tick(Pass.FORWARD, 0, 0)]]
    with pytest.raises(ValueError, match="never ends"):
        simulate(stuck)


def test_what_a_tick_needs() -> None:
    forward, backward, weights = (Tick(kind, 3, 1) for kind in Pass)
    assert needs(forward, 2) == [Tick(Pass.FORWARD, 3, 0)]
    assert needs(backward, 2) == [forward]
    assert needs(backward, 3) == [forward, Tick(Pass.BACKWARD, 3, 2)]
    assert needs(weights, 2) == [backward]


def test_backward_costs_half_where_weights_have_passes() -> None:
    assert default_costs(make_schedule("1f1b", 2, 2))[Pass.BACKWARD] == 2.0
    assert default_costs(make_schedule("zero-bubble", 2, 2))[Pass.BACKWARD] == 1.0

"""When passes happen: as much waiting and as many activations as theory says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.strategies.pipeline import (
    Pass,
    Tick,
    bubble,
    make_schedule,
    peak_in_flight,
    simulate,
)
from shoal.strategies.pipeline.schedule.simulation import default_costs, needs

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

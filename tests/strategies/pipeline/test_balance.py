"""Which micro-batches' activations lie on which other stage."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.strategies.pipeline.balance import plan_holders
from shoal.strategies.pipeline.schedules import Pass, make_schedule, peak_in_flight, simulate


def test_the_first_of_four_gives_to_the_last_two() -> None:
    plans = plan_holders("1f1b", 4, 8, 1)
    assert plans == ({(0, 3): 3, (0, 6): 2}, {}, {}, {})


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["1f1b", "interleaved", "gpipe", "zero-bubble"]),
    stages=st.integers(1, 8),
    micro_batches=st.integers(1, 20),
)
def test_no_stage_has_more_than_before_the_fullest_had(
    name: str, stages: int, micro_batches: int
) -> None:
    """Played in the order of simulated time, with what stages hold for others."""
    chunks = 2 if name == "interleaved" else 1
    schedule = make_schedule(name, stages, micro_batches, chunks)
    plans = plan_holders(name, stages, micro_batches, chunks)
    peaks = [peak_in_flight(ticks) for ticks in schedule]
    last = Pass.WEIGHTS if name == "zero-bubble" else Pass.BACKWARD
    if name in ("gpipe", "zero-bubble"):
        assert not any(plans)
    held = [0] * stages
    most = [0] * stages
    spans = sorted(simulate(schedule), key=lambda span: span.stop)
    for span in spans:
        key = (span.tick.chunk, span.tick.micro_batch)
        holder = plans[span.rank].get(key, span.rank)
        if span.tick.kind is Pass.FORWARD:
            held[holder] += 1
        elif span.tick.kind is last:
            # It is back while it is needed, which is a moment of its own.
            most[span.rank] = max(most[span.rank], held[span.rank] + (holder != span.rank))
            held[holder] -= 1
        most[holder] = max(most[holder], held[holder])
    assert held == [0] * stages
    if any(plans):
        assert max(most) < max(peaks)
    assert all(holder != rank for rank, plan in enumerate(plans) for holder in plan.values())

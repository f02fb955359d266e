"""Pipelines: each rank has some of a model's layers, and micro-batches go from rank to rank.

The words:

- A *unit* is a module that is never cut: it runs as a whole on one rank.
- A *chunk* is a series of units that run one after the other on one rank; the model is cut into
  chunks, and chunk ``c`` is on rank ``c % stages``.
- A *stage* is one rank's part of the pipeline: its chunks, its parameters and its neighbours.
- A *tick* is one pass (forward, backward, or the gradients of weights) of one micro-batch through
  one chunk; a *schedule* is the order of each rank's ticks, and a *span* is a tick with its times.
- A *route* says, for one kind of input, which units are called in which chunk and which of their
  values travel to which other chunks. Ranks learn it together from the first micro-batch.

To read, in this order:

1. `schedules`: which rank does which tick when, as pure functions; `drawing`: as pictures.
2. `units`: how a model is cut into units and chunks; `stage`: which rank has which parameters.
3. `learning`: how a chunk's forward is run inside the model's own, and how its route is learned.
4. `batch`: micro-batches and losses; `runner`: ticks and messages between stages;
   `split_backward`: backward in two halves; `borrowed_parameters`: what several stages use.
5. `pipeline` puts them together for one batch, and `pipeline_parallel` is what users see.
"""

from shoal.strategies.pipeline.drawing import ScheduleDrawing, draw
from shoal.strategies.pipeline.pipeline_parallel import PipelineParallelModel
from shoal.strategies.pipeline.schedules import (
    SCHEDULES,
    Pass,
    Schedule,
    Span,
    Tick,
    bubble,
    make_schedule,
    peak_in_flight,
    simulate,
)
from shoal.strategies.pipeline.units import measure_units

__all__ = [
    "SCHEDULES",
    "Pass",
    "PipelineParallelModel",
    "Schedule",
    "ScheduleDrawing",
    "Span",
    "Tick",
    "bubble",
    "draw",
    "make_schedule",
    "measure_units",
    "peak_in_flight",
    "simulate",
]

"""Pipelines: each rank has some of a model's layers, and micro-batches go from rank to rank."""

from shoal.strategies.pipeline.model import PipelineParallelModel
from shoal.strategies.pipeline.schedule.drawing import Drawing, draw
from shoal.strategies.pipeline.schedule.schedules import SCHEDULES, make_schedule
from shoal.strategies.pipeline.schedule.simulation import Span, bubble, peak_in_flight, simulate
from shoal.strategies.pipeline.schedule.tick import Pass, Schedule, Tick
from shoal.strategies.pipeline.stages.measurement import measure_units

__all__ = [
    "SCHEDULES",
    "Drawing",
    "Pass",
    "PipelineParallelModel",
    "Schedule",
    "Span",
    "Tick",
    "bubble",
    "draw",
    "make_schedule",
    "measure_units",
    "peak_in_flight",
    "simulate",
]

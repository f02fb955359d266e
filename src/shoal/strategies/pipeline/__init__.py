"""Pipelines: each rank has some of a model's layers, and micro-batches go from rank to rank."""

from shoal.strategies.pipeline.model import PipelineParallelModel
from shoal.strategies.pipeline.schedules import SCHEDULES, make_schedule
from shoal.strategies.pipeline.simulation import Span, bubble, peak_in_flight, simulate
from shoal.strategies.pipeline.tick import Pass, Schedule, Tick

__all__ = [
    "SCHEDULES",
    "Pass",
    "PipelineParallelModel",
    "Schedule",
    "Span",
    "Tick",
    "bubble",
    "make_schedule",
    "peak_in_flight",
    "simulate",
]

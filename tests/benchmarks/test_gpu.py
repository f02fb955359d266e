"""The contest on GPUs runs on CPUs too, and what is read from a trace is what was drawn there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def as_scripts() -> Iterator[None]:
    """They import each other as scripts do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


def span(name: str, begin: float, end: float, cat: str, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": end - begin, "args": args}


def kernel(name: str, begin: float, end: float, stream: int = 7) -> dict[str, Any]:
    return span(name, begin, end, "kernel", stream=stream)


TRACE = [
    {"ph": "M", "name": "process_name"},
    kernel("gemm", 50, 90),  # of the step before
    span("training step", 100, 180, "user_annotation"),
    span("cudaStreamSynchronize", 105, 106, "cuda_runtime"),  # before the first kernel
    kernel("gemm", 110, 130),
    span("cudaStreamSynchronize", 112, 130, "cuda_runtime"),
    span("cudaLaunchKernel", 131, 132, "cuda_runtime"),
    kernel("gemm", 140, 160),
    kernel("ncclDevKernel_AllGather", 150, 170, stream=20),
    kernel("ncclDevKernel_ReduceScatter", 165, 190, stream=24),
    span("cudaEventSynchronize", 172, 175, "cuda_runtime"),
    kernel("adam", 180, 200),
    span("cudaDeviceSynchronize", 181, 200, "cuda_runtime"),  # after the step
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": TRACE}))
    return path


def test_a_trace_tells_what_the_gpu_did(trace: Path) -> None:
    gpu_trace = import_module("gpu_trace")
    step = gpu_trace.Step.of(gpu_trace.load(trace))
    assert [each.begin for each in step.kernels] == [110, 140, 150, 165, 180]
    assert dict(step.waits) == {"cudaStreamSynchronize": 1, "cudaEventSynchronize": 1}
    assert (step.begin, step.host_end, step.end) == (100, 180, 200)
    assert step.busy == pytest.approx((20 + 60) / 100)
    assert step.nccl_time == 40
    assert step.overlap == pytest.approx((10 + 10) / 40)
    assert "80% of the step" in step.describe()
    assert "50% beside other kernels" in step.describe()


def test_a_trace_without_a_mark_or_nccl_is_read_as_a_whole() -> None:
    step = import_module("gpu_trace").Step.of([kernel("gemm", 10, 20), kernel("gemm", 30, 40)])
    assert (step.begin, step.end, step.overlap) == (10, 40, None)
    assert step.busy == pytest.approx(20 / 30)


def test_a_trace_is_drawn(trace: Path, tmp_path: Path) -> None:
    # Matplotlib keeps its fonts open.
    command = [sys.executable, BENCHMARKS / "gpu_trace.py", trace, tmp_path / "picture.svg"]
    subprocess.run(command, check=True, timeout=100)
    text = (tmp_path / "picture.svg").read_text()
    assert all(f"stream {number}" in text for number in (7, 20, 24))


def result(*step_s: float, loss: float = 2.0, peak: int | None = None) -> dict[str, Any]:
    half = [each / 2 for each in step_s]
    return {"step_s": list(step_s), "host_s": half, "peak_bytes": peak, "loss": loss}


def test_the_slowest_rank_of_every_step_counts() -> None:
    outcome = import_module("gpu_turn").Outcome
    entry = import_module("gpu_report").Entry("tiny", "zero3", 2)
    entry.add(outcome([result(1.0, 4.0, peak=5), result(2.0, 3.0, loss=4.0, peak=7)]))
    entry.add(outcome(errors=["rank 1 ended with 1"]))
    entry.add(outcome([result(6.0, 5.0, peak=6), result(1.0, 1.0, loss=4.0, peak=6)]))
    assert (entry.step_s, entry.host_s) == ([2.0, 4.0, 6.0, 5.0], [1.0, 2.0, 3.0, 2.5])
    assert (entry.step.median, entry.peak_bytes, entry.loss) == (4.5, 7, 3.0)
    assert entry.errors == ["rank 1 ended with 1"]


@pytest.mark.slow
@pytest.mark.full
def test_contenders_train_alike(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    options = ["--models", "tiny", "--contenders", "torch-ddp,zero3", "--steps", "2"]
    options += ["--rounds", "1", "--warm-up", "1", "--json", str(path)]
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["results"]
    assert [row["contender"] for row in rows] == ["torch-ddp", "zero3"]
    assert all(len(row["step_s"]) == 2 and not row["errors"] for row in rows)
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)
    assert "tiny, 2 ranks" in done.stdout

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


def copy(direction: str, begin: float, end: float, **args: Any) -> dict[str, Any]:
    return span(f"Memcpy {direction} (a -> b)", begin, end, "gpu_memcpy", **args)


def test_a_trace_tells_how_much_of_copies_is_hidden() -> None:
    copies = [
        copy("DtoH", 155, 175, stream=30, bytes=3 << 20),  # 5 beside gemm, none beside NCCL
        copy("DtoD", 176, 178, stream=7, bytes=5),  # no copy to or from the host
        copy("HtoD", 185, 210, stream=31, bytes=1 << 20),  # 15 beside adam
        copy("DtoH", 50, 60, stream=30, bytes=7),  # of the step before
    ]
    step = import_module("gpu_trace").Step.of([*TRACE, *copies])
    assert step.hidden("copies to the host") == pytest.approx(5 / 20)
    assert step.hidden("copies to the GPU") == pytest.approx(15 / 25)
    assert step.end == 210
    assert step.busy == pytest.approx((20 + 60) / 110)
    text = step.describe()
    assert "5 kernels" in text
    assert "copies to the host: 1, 3.0 MiB in 0.02 ms, 25% under kernels" in text
    assert "copies to the GPU: 1, 1.0 MiB in 0.03 ms, 60% under kernels" in text


def test_a_trace_without_a_mark_or_nccl_is_read_as_a_whole() -> None:
    step = import_module("gpu_trace").Step.of([kernel("gemm", 10, 20), kernel("gemm", 30, 40)])
    assert (step.begin, step.end, step.overlap) == (10, 40, None)
    assert step.busy == pytest.approx(20 / 30)


def test_a_trace_is_drawn(trace: Path, tmp_path: Path) -> None:
    # Matplotlib keeps its fonts open.
    copies = [copy("DtoH", 110, 120, stream=30)]
    trace.write_text(json.dumps({"traceEvents": TRACE + copies}))
    command = [sys.executable, BENCHMARKS / "gpu_trace.py", trace, tmp_path / "picture.svg"]
    subprocess.run(command, check=True, timeout=100)
    text = (tmp_path / "picture.svg").read_text()
    assert all(f"stream {number}" in text for number in (7, 20, 24, 30))
    assert "copies to the host" in text
    assert "copies to the GPU" not in text


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
    names = ["torch-ddp", "zero3", "zero3+full", "zero3+offload"]
    options = ["--models", "tiny", "--contenders", ",".join(names), "--steps", "2"]
    options += ["--rounds", "1", "--warm-up", "1", "--json", str(path)]
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["results"]
    assert [row["contender"] for row in rows] == names
    assert all(len(row["step_s"]) == 2 and not row["errors"] for row in rows)
    assert all(row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-5) for row in rows)
    assert "tiny, 2 ranks" in done.stdout

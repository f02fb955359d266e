"""What a GPU did in one training step: from a trace of torch's profiler, in figures and a picture.

Tells how often the host waited for the GPU, which share of the step's time the GPU was busy, and
which share of NCCL's time, and of the time of copies to and from host memory, other kernels ran as
well. A trace has the kernels of one process only.

    python benchmarks/gpu_trace.py trace.json [picture.svg]
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP = "training step"
"""What the step is called that `gpu.py` traces."""
COPIES = {"DtoH": "copies to the host", "HtoD": "copies to the GPU"}
"""What a copy is called in a trace, and here."""
_COLOURS = {"kernels": "tab:blue", "NCCL": "tab:orange"}
_COLOURS |= dict(zip(COPIES.values(), ("tab:green", "tab:red"), strict=True))
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")

Event = dict[str, Any]
Span = tuple[float, float]


@dataclass(frozen=True)
class Kernel:
    """One kernel on the GPU, or one copy; times are microseconds."""

    name: str
    stream: int
    begin: float
    end: float
    num_bytes: int = 0

    @property
    def kind(self) -> str:
        """What it does: computes, communicates, or copies."""
        if self.name.startswith("Memcpy"):
            return next(kind for short, kind in COPIES.items() if short in self.name)
        return "NCCL" if self.name.startswith("nccl") else "kernels"


@dataclass(frozen=True)
class Step:
    """One training step of a trace; times are microseconds.

    Attributes:
        begin: When the host began it.
        host_end: When the host's last call returned.
        kernels: All that began in it, in order, and copies between the GPU and the host.
        waits: How often the host waited for the GPU, from the first kernel on, by the call.
    """

    begin: float
    host_end: float
    kernels: tuple[Kernel, ...]
    waits: Counter[str]

    @staticmethod
    def of(events: Iterable[Event]) -> Step:
        """From all events of a trace.

        The step is that of the host's mark; without one it is all that there is.
        """
        spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
        begin, end = _marked(spans) or _extent(spans)
        kernels = sorted(
            (_kernel(each) for each in spans if _is_kernel(each) and each["ts"] >= begin),
            key=lambda kernel: kernel.begin,
        )
        first = kernels[0].begin if kernels else begin
        waits = Counter(
            each["name"] for each in spans if each["name"] in _WAITS and first <= each["ts"] < end
        )
        return Step(begin, end, tuple(kernels), waits)

    @property
    def end(self) -> float:
        """When host and GPU were done."""
        return max([self.host_end, *(kernel.end for kernel in self.kernels)])

    @property
    def busy(self) -> float:
        """The share of the step's time in which any kernel ran."""
        return _length(self._ran("kernels", "NCCL")) / (self.end - self.begin)

    @property
    def nccl_time(self) -> float:
        """In which any kernel of NCCL's ran."""
        return _length(self._ran("NCCL"))

    @property
    def overlap(self) -> float | None:
        """The share of NCCL's time in which other kernels ran; None if NCCL did nothing."""
        return self.hidden("NCCL")

    def hidden(self, kind: str) -> float | None:
        """The share of the time of one kind in which kernels computed; None if it did nothing."""
        ran = self._ran(kind)
        return _length(common(ran, self._ran("kernels"))) / _length(ran) if ran else None

    def _ran(self, *kinds: str) -> list[Span]:
        chosen = (kernel for kernel in self.kernels if kernel.kind in kinds)
        return merged((kernel.begin, kernel.end) for kernel in chosen)

    def _describe_copies(self, kind: str) -> str | None:
        chosen = [kernel for kernel in self.kernels if kernel.kind == kind]
        if not chosen:
            return None
        size, taken = sum(each.num_bytes for each in chosen), _length(self._ran(kind))
        return (
            f"{kind}: {len(chosen)}, {size / 2**20:.1f} MiB in {taken / 1e3:.2f} ms, "
            f"{self.hidden(kind):.0%} under kernels"
        )

    def describe(self) -> str:
        """In a few lines."""
        whole, host = (self.end - self.begin) / 1e3, (self.host_end - self.begin) / 1e3
        if not self.kernels:
            return f"traced: a step of {whole:.1f} ms without kernels on a GPU"
        waits = ", ".join(f"{count} {name}" for name, count in self.waits.items()) or "none"
        overlap = "NCCL ran no kernels"
        if self.overlap is not None:
            overlap = f"NCCL {self.nccl_time / 1e3:.1f} ms, {self.overlap:.0%} beside other kernels"
        count = sum(kernel.kind not in COPIES.values() for kernel in self.kernels)
        lines = [
            f"traced: a step of {whole:.1f} ms (host {host:.1f} ms), {count} kernels",
            f"waits of the host from the first kernel on: {waits}",
            f"the GPU was busy for {self.busy:.0%} of the step; {overlap}",
            *(self._describe_copies(kind) for kind in COPIES.values()),
        ]
        return "\n".join(filter(None, lines))


def _marked(spans: Sequence[Event]) -> Span | None:
    marks = [e for e in spans if e["name"] == STEP and e.get("cat") == "user_annotation"]
    return (marks[-1]["ts"], marks[-1]["ts"] + marks[-1]["dur"]) if marks else None


def _extent(spans: Sequence[Event]) -> Span:
    if not spans:
        raise ValueError("there is nothing in the trace")
    return min(e["ts"] for e in spans), max(e["ts"] + e["dur"] for e in spans)


def _is_kernel(event: Event) -> bool:
    if event.get("cat") == "gpu_memcpy":
        return any(short in event["name"] for short in COPIES)
    return event.get("cat") == "kernel"


def _kernel(event: Event) -> Kernel:
    arguments = event.get("args", {})
    stream, size = int(arguments.get("stream", event.get("tid", 0))), arguments.get("bytes", 0)
    return Kernel(event["name"], stream, event["ts"], event["ts"] + event["dur"], int(size))


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time in spans that do not touch, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def common(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """The time that is in both; each is in order, and its spans do not touch."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            found.append((begin, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def load(path: Path) -> list[Event]:
    """The events of a trace, which may be compressed."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    events: list[Event] = json.loads(text)["traceEvents"]
    return events


def draw(step: Step, path: Path) -> None:
    """A picture: a row for each stream, a bar for each kernel, a colour for what it does."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    streams = sorted({kernel.stream for kernel in step.kernels})
    kinds = [k for k in _COLOURS if k == "kernels" or any(each.kind == k for each in step.kernels)]
    figure, axes = plt.subplots(figsize=(14, 1.6 + 0.6 * len(streams)), layout="constrained")
    for row, stream in enumerate(streams):
        for kind in kinds:
            chosen = [k for k in step.kernels if (k.stream, k.kind) == (stream, kind)]
            bars = [((k.begin - step.begin) / 1e3, (k.end - k.begin) / 1e3) for k in chosen]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=_COLOURS[kind], linewidth=0)
    axes.axvline((step.host_end - step.begin) / 1e3, color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
    axes.set_xlim(0, (step.end - step.begin) / 1e3)
    axes.set_xlabel("ms since the host began the step; dotted: its last call returned")
    patches = [Patch(color=_COLOURS[kind], label=kind) for kind in kinds]
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": len(kinds)}
    axes.legend(handles=patches, frameon=False, **place)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path, nargs="?", help="an SVG or a PNG")
    options = parser.parse_args()
    step = Step.of(load(options.trace))
    print(step.describe())
    if options.picture is not None:
        draw(step, options.picture)


if __name__ == "__main__":
    main()

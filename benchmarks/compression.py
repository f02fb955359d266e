"""What compressed gradients send, what they cost, and when they pay; `losses.py` has the loss.

    python benchmarks/compression.py bytes         # counted, of a GPT of 15 M parameters
    python benchmarks/compression.py gathers       # the same for parameters that are gathered
    python benchmarks/compression.py codecs        # time and memory of each codec
    python benchmarks/compression.py link          # steps over a slow link; needs root, ip and tc
    python benchmarks/compression.py shm           # steps over shared memory, where it does not pay

`link` joins two network namespaces by a cable of limited speed in each direction (tc tbf), has Gloo
between them, and takes torch's own DDP, alone and with its PowerSGD hook, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compression_link import torch_steps
from gpt import GPT, VOCABULARY, Shape
from torch import nn

import shoal
from shoal.compression import parse

CODECS = ("fp16", "bf16", "int8", "int4", "sign", "topk:0.01", "randomk:0.01", "powersgd:2")
# 15 million parameters.
LARGE = Shape(layers=8, width=384, batch=1, length=16)
ADDRESSES = ("10.231.78.1", "10.231.78.2")
RATES = (10, 100, 1000)
PARTS = ("bytes", "gathers", "codecs", "link", "shm", "codec", "rank")
LINKED = (None, "bf16", "int8", "int4", "sign", "topk:0.01", "powersgd:2")


# Bytes ------------------------------------------------------------------------------------


def send_once(strategy: str, compression: str) -> tuple[int, int]:
    """What a rank would send in a step, and what it does send."""
    torch.manual_seed(0)
    model = shoal.as_distributed(GPT(LARGE), strategy=strategy, compression=compression)
    backward(model, 0)
    counted = shoal.world().stats().compression
    return counted.raw_bytes, counted.sent_bytes


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step * 100 + shoal.world().rank)
    tokens = torch.randint(VOCABULARY, (LARGE.batch, LARGE.length + 1), generator=generator)
    logits = model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


def show_bytes() -> None:
    count = sum(parameter.numel() for parameter in GPT(LARGE).parameters())
    print(f"{count:,} parameters; bytes sent by a rank, of those without compression")
    print("| codec | ddp, 2 ranks | ddp, 4 ranks | zero3, 2 ranks | zero3, 4 ranks |")
    print("|---|---|---|---|---|")
    for codec in CODECS:
        cells = []
        for strategy in ("ddp", "zero3"):
            for ranks in (2, 4):
                found = shoal.run(send_once, ranks, "memory", args=(strategy, codec))
                cells.append(f"{max(sent / raw for raw, sent in found):.4f}")
        print(f"| `{codec}` | {' | '.join(cells)} |", flush=True)


def gather_once(strategy: str, gather_compression: str | None) -> int:
    """Bytes that are gathered in a step, vectors included, once it is known what is used when."""
    torch.manual_seed(0)
    module = GPT(LARGE)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.01)
    model, optimizer = shoal.as_distributed(
        module, optimizer, strategy=strategy, gather_compression=gather_compression, check_every=0
    )
    world = shoal.world()
    for step in range(5):
        world.barrier()
        world.reset_stats()
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return world.stats()["all_gather"].num_bytes


def show_gathers() -> None:
    print("bytes gathered in a step, MiB, with and without gather_compression")
    print("| strategy | ranks | float32 | int8 | of float32 |")
    print("|---|---|---|---|---|")
    for strategy in ("zero1", "zero2", "zero3"):
        for ranks in (2, 4):
            plain, packed = (
                shoal.run(gather_once, ranks, "memory", args=(strategy, codec))[0]
                for codec in (None, "int8")
            )
            print(
                f"| `{strategy}` | {ranks} | {plain / 2**20:.2f} | {packed / 2**20:.2f} | "
                f"{packed / plain:.4f} |",
                flush=True,
            )


# Codecs -----------------------------------------------------------------------------------


def show_codecs() -> None:
    print("all gradients of the GPT, tensor by tensor, one thread, each codec in a fresh process")
    print("| codec | encode, ms | decode, ms | payload, MiB | most memory besides, MiB |")
    print("|---|---|---|---|---|", flush=True)
    for name in ("none", *CODECS):
        subprocess.run([sys.executable, str(Path(__file__)), "codec", name], check=True)


def show_codec(name: str) -> None:
    """A line of the table; memory is beyond gradients, payloads and results."""
    torch.set_num_threads(1)
    codec = parse(name)
    gradients = [torch.randn(parameter.shape) for parameter in GPT(LARGE).parameters()]
    outs = [torch.zeros_like(gradient) for gradient in gradients]
    encoding, decoding, payloads = [], [], []
    reset_peak()
    before = memory("VmRSS")
    for _ in range(5):
        payloads.clear()
        begin = time.perf_counter()
        payloads += [codec.encode(gradient) for gradient in gradients]
        middle = time.perf_counter()
        for payload, out in zip(payloads, outs, strict=True):
            codec.decode(payload, out)
        encoding.append(middle - begin)
        decoding.append(time.perf_counter() - middle)
    size = sum(payload.num_bytes for payload in payloads)
    most = max(memory("VmHWM") - before - size, 0)
    print(
        f"| `{name}` | {1e3 * min(encoding):.0f} | {1e3 * min(decoding):.0f} | "
        f"{size / 2**20:.2f} | {most / 2**20:.0f} |",
        flush=True,
    )


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise LookupError(what)


# A slow link ------------------------------------------------------------------------------


def shoal_steps(compression: str | None, steps: int) -> list[float]:
    """Seconds of each step."""
    torch.manual_seed(0)
    module = GPT(LARGE)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.01)
    model, optimizer = shoal.as_distributed(module, optimizer, compression=compression)
    times = []
    for step in range(steps + 1):
        shoal.world().barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return times[1:]


def linked_rank(contender: str, steps: int) -> None:
    """One of two ranks; rank 0 prints its times."""
    torch.set_num_threads(1)
    if contender.startswith("torch"):
        rank, times = torch_steps(contender, LARGE, steps)
    else:
        with shoal.init() as world:
            compression = None if contender == "uncompressed" else contender
            times, rank = shoal_steps(compression, steps), world.rank
    if rank == 0:
        print(f"TIMES {json.dumps([times, sent_bytes()])}")


def sent_bytes() -> int:
    """What has left this namespace so far, headers and retransmissions included."""
    return int(
        Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text()
    )


@contextmanager
def cable() -> Iterator[list[tuple[str, str]]]:
    """Two namespaces, each with its end of a cable."""
    number = os.getpid() % 10**6
    names = [f"shoal{number}{end}" for end in "ab"]
    ends = [f"sc{number}{end}" for end in "ab"]
    for name in names:
        ip("netns", "add", name)
    try:
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield list(zip(names, ends, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=20)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)


def limit(hosts: list[tuple[str, str]], rate: int) -> None:
    """Megabits a second in each direction."""
    for name, end in hosts:
        tbf = ("tbf", "rate", f"{rate}mbit", "burst", "256kb", "latency", "200ms")
        command = ("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", end, "root", *tbf)
        subprocess.run(command, check=True, timeout=20)


def step_seconds(hosts: list[tuple[str, str]], contender: str, steps: int) -> float:
    """The median step of a contender that has the link for itself."""
    script = [str(Path(__file__)), "rank", contender, "--steps", str(steps)]
    processes = []
    for node, (name, end) in enumerate(hosts):
        inside = ["ip", "netns", "exec", name]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": end}
        if contender.startswith("torch"):
            environment |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29533"}
            environment |= {"RANK": str(node), "WORLD_SIZE": "2"}
            command = [*inside, sys.executable, *script]
        else:
            launch = [str(Path(sys.executable).with_name("shoal")), "launch", "-n", "1"]
            where = ["--nodes", "2", "--node-rank", str(node), "--master", f"{ADDRESSES[0]}:29531"]
            command = [*inside, *launch, *where, *script]
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        )
    try:
        outputs = [process.communicate(timeout=540)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    (times,) = (line.split("TIMES")[1] for line in outputs[0].splitlines() if "TIMES" in line)
    seconds, sent = json.loads(times)
    print(contender, [round(each, 2) for each in seconds], f"{sent:,} bytes sent", file=sys.stderr)
    return statistics.median(seconds)


def show_link(rates: list[int], steps: int, contenders: list[str]) -> None:
    for program in ("ip", "tc"):
        if shutil.which(program) is None or os.geteuid():
            raise SystemExit("link needs root, ip and tc")
    print("seconds a step (times faster than uncompressed)")
    print(f"| contender | {' | '.join(f'{rate} Mbit/s' for rate in rates)} |")
    print(f"|---|{'---|' * len(rates)}")
    base: dict[int, float] = {}
    with cable() as hosts:
        for contender in contenders:
            cells = []
            for rate in rates:
                limit(hosts, rate)
                seconds = step_seconds(hosts, contender, 2 if rate < 50 else steps)
                base.setdefault(rate, seconds)
                cells.append(f"{seconds:.2f} ({base[rate] / seconds:.1f})")
            print(f"| {contender} | {' | '.join(cells)} |", flush=True)


def show_shm(steps: int) -> None:
    print("| codec | ms a step over shared memory, 2 ranks |")
    print("|---|---|")
    for name in LINKED:
        times = shoal.run(shoal_steps, 2, "shm", args=(name, steps))
        print(f"| {name or 'uncompressed'} | {1e3 * statistics.median(times[0]):.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("contender", nargs="?", default="")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES))
    linked = [name or "uncompressed" for name in LINKED]
    contenders = [*linked, "torch", "torch:powersgd:2"]
    parser.add_argument("--contenders", nargs="+", default=contenders)
    options = parser.parse_args()
    if options.part == "bytes":
        show_bytes()
    elif options.part == "gathers":
        show_gathers()
    elif options.part == "codecs":
        show_codecs()
    elif options.part == "link":
        show_link(options.rates, options.steps or 5, options.contenders)
    elif options.part == "shm":
        show_shm(options.steps or 10)
    elif options.part == "codec":
        show_codec(options.contender)
    else:
        linked_rank(options.contender, options.steps)


if __name__ == "__main__":
    main()

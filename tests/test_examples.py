"""The examples and the tour of `shoal demo` run as they say, and give what they promise."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import leaks
import shoal
from shoal.cli.demo.communication import _FAILURE, _MISMATCH
from shoal.cli.demo.tour import play, visit
from shoal.launch.function.forkserver.forkserver import fork_server
from shoal.launch.function.run import run_outcomes

EXAMPLES = Path(__file__).parent.parent / "examples"
SHOAL = str(Path(sys.executable).with_name("shoal"))
TIMEOUT_S = 150


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def output_of(*command):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(params=["memory", "shm"])
def backend(request):
    if request.param == "shm":
        fork_server()
        leaks.baseline()
    return request.param


@pytest.fixture(scope="session")
def first_use():
    """The first step of an optimizer sets a variable that stays; tiny tensors need one thread."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_activations(backend, capsys):
    results = shoal.run(load("activations").train, 2, backend, timeout=TIMEOUT_S)
    assert len({total for total, _ in results}) == 1
    assert [count for _, count in results] == [8, 8]


@pytest.mark.usefixtures("first_use")
def test_pipeline():
    train = load("pipeline").train
    losses = shoal.run(train, 4, "memory", args=("zero-bubble", 2), timeout=TIMEOUT_S)
    assert len(set(losses)) == 1
    assert losses[0] < 1.0


@pytest.mark.usefixtures("first_use")
@pytest.mark.parametrize("options", [{}, {"is_diloco": True, "every": 20, "compression": "int8"}])
def test_local(options):
    train = load("local").train
    losses = shoal.run(lambda: train(**options), 2, "memory", timeout=TIMEOUT_S)
    assert len(set(losses)) == 1
    assert losses[0] < 0.6


@pytest.mark.usefixtures("first_use")
@pytest.mark.parametrize("topology", ["server", "gossip"])
def test_asynchronous(topology):
    train = load("asynchronous").train
    results = shoal.run(lambda: train(topology), 3, "memory", timeout=TIMEOUT_S)
    assert len({loss for loss, _ in results}) == 1
    assert results[0][0] < 0.6
    assert all(sum(staleness.values()) for _, staleness in results)


def test_collectives(backend):
    talk = load("collectives").talk
    first, second = shoal.run(lambda: talk(shoal.world()), 2, backend, timeout=TIMEOUT_S)
    assert first["average"] == second["average"] == [0.5, 0.5, 0.5]
    assert second["settings"] == [7, 8, 9]
    assert first["everybody's rows"] == [0, 1, 1]
    assert [first["my rows of the sum"], second["my rows of the sum"]] == [[0, 2, 4], [6, 8]]
    assert first["asynchronous"] == [2000.0, [64, 64]]
    assert [each["rank"] for each in second["names"]] == [0, 1]
    assert [first["from the rank before"], second["from the rank before"]] == [1, 0]


def test_groups(backend):
    talk = load("groups").talk
    results = shoal.run(lambda: talk(shoal.world()), 4, backend, timeout=TIMEOUT_S)
    assert [result["tensor group"] for result in results] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [result["data group"] for result in results] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert {result["value"] for result in results} == {3.0}
    assert [result["even ranks"] for result in results] == [[0, 2], [], [0, 2], []]


def test_notebook_style(backend, capsys):
    for weight in load("notebook_style").main(backend):
        torch.testing.assert_close(weight, torch.tensor([2.0, -1.0]), rtol=1e-4, atol=1e-4)
    assert f"{backend}: " in capsys.readouterr().out


def test_collectives_launched():
    text = output_of(SHOAL, "launch", "-n", "2", str(EXAMPLES / "collectives.py"))
    assert "rank 0 of 2 over shm:" in text
    assert "rank 1 of 2 over shm:" in text
    assert text.count("average: [0.5, 0.5, 0.5]") == 2


def test_collectives_alone():
    text = output_of(sys.executable, str(EXAMPLES / "collectives.py"))
    assert "rank 0 of 1" in text
    assert "average: [0.0, 0.0, 0.0]" in text


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_train(strategy, capsys, first_use):
    train = load("train").train
    alone = shoal.run(lambda: train(strategy), 1, "memory")
    together = shoal.run(lambda: train(strategy), 3, "memory", timeout=TIMEOUT_S)
    assert together == alone * 3
    assert alone[0] > 0.8
    plain = shoal.run(lambda: train(strategy, is_plain=True), 3, "memory", timeout=TIMEOUT_S)
    assert plain == alone * 3  # batches divide by 3, so both loops are the same
    assert "epoch 9: loss 0." in capsys.readouterr().out


def test_train_in_mixed_precision_with_replicas(first_use):
    train = load("train").train
    options = {"mixed_precision": "bf16", "replica": 2}
    rights = shoal.run(lambda: train("fsdp", epochs=6, **options), 4, "memory", timeout=TIMEOUT_S)
    assert len(set(rights)) == 1
    assert rights[0] > 0.8


def test_train_launched():
    script = str(EXAMPLES / "train.py")
    text = output_of(SHOAL, "launch", "-n", "2", script, "--strategy", "zero3")
    assert "epoch 9: loss 0." in text
    assert "% right on 2 ranks over shm" in text


def test_train_verified(first_use):
    report = shoal.verify(load("train").build, "fsdp", 3)
    assert report.equal, report


@pytest.mark.parametrize("options", [{"tensor": 2, "zero": 1}, {"sequence_parallel": True}])
def test_tensor(options, capsys, first_use):
    train = load("tensor").train
    (alone,) = shoal.run(lambda: train(10), 1, "memory", timeout=TIMEOUT_S)
    ranks = 4 if options.get("tensor") else 2
    together = shoal.run(lambda: train(10, **options), ranks, "memory", timeout=TIMEOUT_S)
    for loss, share in together:
        assert loss == pytest.approx(alone[0], abs=1e-2)
        assert share < 0.53
    assert re.search(r"^head +column +outputs joined", capsys.readouterr().out, re.M)


def test_hybrid(capsys, first_use):
    train = load("hybrid").train
    (alone,) = shoal.run(lambda: train(8), 1, "memory", timeout=TIMEOUT_S)
    axes = {"tensor": 2, "pipeline": 2}
    together = shoal.run(lambda: train(8, **axes), 4, "memory", timeout=TIMEOUT_S)
    for loss, share in together:
        assert loss == pytest.approx(alone[0], abs=1e-2)
        assert share < 0.4
    assert "Mesh(pipeline=2, tensor=2)" in capsys.readouterr().out


@pytest.mark.full
def test_tensor_launched():
    text = output_of(SHOAL, "launch", "-n", "2", str(EXAMPLES / "tensor.py"))
    assert "tensor parallel over 2 ranks: 8 layers split" in text
    assert "each rank holds 51 % of the parameters" in text


def test_resume(tmp_path, first_use):
    """Killed on two processes, gone on with on three threads: as if nothing had been."""
    train, folder = load("resume").train, str(tmp_path / "run")
    script = str(EXAMPLES / "resume.py")
    command = (SHOAL, "launch", "-n", "2", script, folder, "--strategy", "zero3", "--die-at", "23")
    killed = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
    )
    assert killed.returncode != 0
    results = shoal.run(lambda: train(folder, "zero1"), 3, "memory", timeout=TIMEOUT_S)
    (begin, loss), *_ = results
    assert begin in (15, 20)  # the last one was still being written
    _, expected = shoal.run(lambda: train(str(tmp_path / "whole"), "ddp"), 1, "memory")[0]
    assert loss == pytest.approx(expected, rel=1e-4)


def test_elastic():
    """A rank is killed, and a spare takes its place: the same to the last bit."""
    command = (SHOAL, "launch", "--elastic", "-n", "3", "--min", "3", "--spares", "1")
    script = str(EXAMPLES / "elastic.py")
    undisturbed = output_of(*command, script)
    killed = output_of("sh", "-c", 'exec "$@" 2>&1', "sh", *command, script, "--kill", "1@20")
    assert "worker 1 (rank 1): killed by SIGKILL; worker 3 took its place" in killed
    assert "on 3 ranks: loss 0.0" in undisturbed
    assert undisturbed in killed
    fewer = output_of(*command[:5], script, "--kill", "0@7")
    found = re.search(r"on 2 ranks: loss (\S+)", fewer)
    assert found is not None
    assert float(found[1]) < 0.1


def test_elastic_alone():
    text = output_of(sys.executable, str(EXAMPLES / "elastic.py"))
    assert "on 1 ranks: loss 0.0" in text


def test_gpu(first_use):
    """The loop of the README, here on a CPU."""
    losses = shoal.run(load("gpu").train, 2, "memory", args=(20, 16))
    assert losses[0] == losses[1] < 33  # the variance of a sum of 32, at the beginning


def test_tour_shows_every_collective(backend):
    visits = shoal.run(visit, 4, backend, args=((4096,),), timeout=TIMEOUT_S)
    got = {shown.call: shown.got for shown in visits[1].shown}
    assert got["all_reduce(t)"] == "6 60"
    assert got["reduce(t, root=1)"] == "6 60"
    assert got["all_gather(t)"] == "0 1 1 2 3 3"
    assert got["scatter(t, root=0)"] == "2 3"
    assert got["send, recv: a ring"] == "0 0"
    assert min(visits[0].seconds.values()) > 0


def test_tour_names_the_failing_rank(backend):
    outcomes = run_outcomes(play, (_FAILURE,), 4, backend, TIMEOUT_S)
    assert [outcome.failed for outcome in outcomes] == [False, False, True, False]
    assert isinstance(outcomes[2].error, OSError)
    for rank in (0, 1, 3):
        assert outcomes[rank].value.kind == "PeerError"
        assert "rank 2 failed: OSError: no space left on device (train.py:7)" in (
            outcomes[rank].value.text
        )


def test_tour_catches_a_mismatch(backend):
    for outcome in run_outcomes(play, (_MISMATCH,), 4, backend, TIMEOUT_S):
        assert outcome.value.kind == "MismatchError"
        assert "rank 1: all_reduce(float32[8], op=max) at train.py:6" in outcome.value.text

"""What was saved can be loaded: each of these was once lost, refused or mixed up without a word."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import shoal
from checkpoint.training import assert_same, on_ranks, state, wrap
from shoal.checkpoint.disk import checkpoint_folder
from shoal.checkpoint.disk.checkpoint_folder import CheckpointFolder
from shoal.checkpoint.tools import export, open_any, verify
from shoal.errors import CheckpointError, CheckpointMismatchError


def moved(path: Path, extra: dict[str, Any]) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    shoal.save(path, model, extra=extra)
    return shoal.load(path, model)


# Values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [[[] for _ in range(2000)], [{} for _ in range(2000)], [[n % 9] for n in range(9000)]],
    ids=["lists", "dicts", "short lists"],
)
def test_many_short_lists(tmp_path: Path, value: Any) -> None:
    """A reader takes them for an attack, so a writer has to make up for them."""
    assert moved(tmp_path, {"history": value}) == {"history": value}


@pytest.mark.parametrize("value", [10**500, -(10**5000), 2**1024, 2**1024 - 1], ids=int.bit_length)
def test_large_integers(tmp_path: Path, value: int) -> None:
    assert moved(tmp_path, {"n": value})["n"] == value


def test_keys_that_make_one_path(tmp_path: Path) -> None:
    extra = {"a/b": torch.arange(100), "a": {"b": torch.ones(50), "b'": torch.zeros(30)}}
    found = moved(tmp_path, extra)
    assert torch.equal(found["a/b"], extra["a/b"])
    assert all(torch.equal(found["a"][key], extra["a"][key]) for key in extra["a"])


def test_numbers_of_numpy(tmp_path: Path) -> None:
    extra = {"epoch": np.int64(3), "best": np.float32(0.5), "done": np.bool_(True)}
    assert moved(tmp_path, extra) == {"epoch": 3, "best": 0.5, "done": True}


@pytest.mark.parametrize(
    "value",
    [torch.eye(9).to_sparse(), torch.empty(40, device="meta")],
    ids=["sparse", "meta"],
)
def test_tensors_that_are_no_plain_ones(tmp_path: Path, value: Tensor) -> None:
    with pytest.raises(TypeError, match="extra/odd is a tensor that is"):
        moved(tmp_path, {"odd": value})


def different_extras(path: Path) -> Any:
    model = wrap("ddp", nn.Linear(5, 3), None)
    extra = {"own": torch.ones(40 + shoal.world().rank)}
    shoal.save(path, model, extra=extra, wait=False).wait()
    return shoal.load(path, model)["own"].numel()


def test_the_first_ranks_extras_count(tmp_path: Path) -> None:
    assert on_ranks(different_extras, 3, tmp_path) == [40, 40, 40]


@pytest.mark.parametrize("step", [3.5, "3", 10**20, -1])
def test_steps_that_no_loader_would_find(tmp_path: Path, step: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="step must be"):
        shoal.save(tmp_path, nn.Linear(2, 2), step=step)


@pytest.mark.parametrize("step", [np.int64(7), torch.tensor(7), 7])
def test_steps_that_are_integers(tmp_path: Path, step: Any) -> None:
    model = nn.Linear(2, 2)
    shoal.save(tmp_path, model, step=step)
    assert shoal.load(tmp_path, model).step == 7


# Parameters without elements -----------------------------------------------------------------


class Hollow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(0))
        self.body = nn.Linear(6, 5)
        self.last = nn.Parameter(torch.empty(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x) + self.first.sum() + self.last.sum()
        return y


def hollow(strategy: str, path: Path, *, reads: bool) -> Any:
    torch.manual_seed(1)
    model: Any = Hollow()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = wrap(strategy, model, optimizer)
    if reads:
        shoal.load(path, model, optimizer)
    else:
        for _ in range(2):
            model(torch.ones(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        shoal.save(path, model, optimizer)
    return state(model, optimizer)


def test_state_of_parameters_without_elements(tmp_path: Path) -> None:
    saved = hollow("plain", tmp_path / "plain", reads=False)
    assert {f"0/{n}/step" for n in range(4)} < set(saved)
    for strategy, ranks in (("zero3", 3), ("ddp", 2), ("zero1", 5)):
        path = tmp_path / strategy
        for own in on_ranks(hollow_writer, ranks, strategy, path):
            assert_same(own, saved, tolerance=1e-6)
        for loaded in on_ranks(hollow_reader, ranks, strategy, tmp_path / "plain"):
            assert_same(loaded, saved)
        assert_same(hollow("plain", path, reads=True), saved, tolerance=1e-6)


def hollow_writer(strategy: str, path: Path) -> Any:
    return hollow(strategy, path, reads=False)


def hollow_reader(strategy: str, path: Path) -> Any:
    return hollow(strategy, path, reads=True)


# Models that differ --------------------------------------------------------------------------


def with_head(size: int) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def load_other_head(path: Path, strategy: str) -> None:
    model, optimizer = with_head(4)
    head = model[1].weight.detach().clone()  # type: ignore[index]
    model, optimizer = wrap(strategy, model, optimizer)
    loaded = shoal.load(path, model, optimizer, strict=False)
    assert loaded.misshapen == ["1.weight", "1.bias"]
    assert (loaded.missing, loaded.unexpected) == ([], [])
    assert torch.equal(model.state_dict()["1.weight"], head)
    assert optimizer.state_dict()["state"][0]["step"] == 3
    assert optimizer.state_dict()["state"][2]["step"] == 1


@pytest.mark.parametrize("strategy", ["plain", "zero3"])
def test_another_head(tmp_path: Path, strategy: str) -> None:
    """The new head keeps its values and its state; the body takes what was saved."""
    model, optimizer = with_head(3)
    optimizer.step()
    optimizer.step()
    shoal.save(tmp_path, model, optimizer)
    if strategy == "plain":
        load_other_head(tmp_path, strategy)
    else:
        on_ranks(load_other_head, 2, tmp_path, strategy)


def test_nothing_fits(tmp_path: Path) -> None:
    """Whoever loads nothing at all has named another file than was meant."""
    shoal.save(tmp_path, nn.Linear(2, 2))
    with pytest.raises(CheckpointMismatchError, match=r"missing .* 0\.weight.* not in the model"):
        shoal.load(tmp_path, nn.Sequential(nn.Linear(2, 2)), strict=False)


def test_no_memory_to_load_into(tmp_path: Path) -> None:
    shoal.save(tmp_path, nn.Linear(2, 2))
    with pytest.raises(CheckpointMismatchError, match="weight is on the meta device"):
        shoal.load(tmp_path, nn.Linear(2, 2, device="meta"))
    with pytest.raises(TypeError, match="weight is a tensor that is on the meta device"):
        shoal.save(tmp_path, nn.Linear(2, 2, device="meta"))


# Files and folders ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_links_of_a_cache(tmp_path: Path, name: str) -> None:
    """Hugging Face keeps files under other names, and links to them."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file(dict(model.state_dict()), tmp_path / "blobs" / "0123abcd")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0123abcd")
    shoal.load(tmp_path / "snapshot" / name, other)
    assert torch.equal(other.weight, model.weight)


def test_a_pickle_of_any_name(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "weights")
    with pytest.raises(CheckpointError, match="is a pickle"):
        shoal.load(tmp_path / "weights", nn.Linear(2, 2))


def test_what_others_call_new_stays(tmp_path: Path) -> None:
    (tmp_path / ".new-ideas").write_text("")
    (tmp_path / ".new-000007").mkdir()
    shoal.save(tmp_path, nn.Linear(2, 2))
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {".new-ideas", "000001", "LATEST"}


def test_the_working_folder_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saving = shoal.save("run", nn.Linear(2, 2), wait=False)
    monkeypatch.chdir("/")
    assert saving.wait() == tmp_path / "run" / "000001"


def test_an_export_others_could_not_read(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("phase", torch.ones(3, dtype=torch.complex64))
    shoal.save(tmp_path / "run", model)
    export(open_any(tmp_path / "run"), tmp_path / "hub")
    model.register_buffer("phase", torch.ones(3, dtype=torch.complex128))
    shoal.save(tmp_path / "run", model)
    with pytest.raises(CheckpointError, match=r"phase is of torch\.complex128"):
        export(open_any(tmp_path / "run"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


# Saves at once, and saves at the end -----------------------------------------------------------


def test_two_saves_at_once(tmp_path: Path) -> None:
    """One waits for the other; they would write into one unfinished folder."""
    unlock = CheckpointFolder(tmp_path).lock()
    model = nn.Linear(2, 2)
    second = threading.Thread(target=shoal.save, args=(tmp_path, model))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    assert list(tmp_path.iterdir()) == []
    unlock()
    second.join()
    verify(open_any(tmp_path))


def test_a_save_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "_LOCK_PATIENCE_S", 0.05)
    unlock = CheckpointFolder(tmp_path).lock()
    with pytest.raises(CheckpointError, match="another save to"):
        shoal.save(tmp_path, nn.Linear(2, 2))
    unlock()
    shoal.save(tmp_path, nn.Linear(2, 2))


LAST_SAVE = """
import sys, torch, shoal
from shoal.checkpoint.disk import filesystem
if sys.argv[2] == "full":
    def create(self, path): raise OSError(28, "No space left on device")
    filesystem.FileSystem.create = create
shoal.save(sys.argv[1], torch.nn.Linear(5000, 2000), wait=False)
"""


@pytest.mark.parametrize("disk", ["free", "full"])
def test_a_script_that_ends_before_its_save(tmp_path: Path, disk: str) -> None:
    """Large enough that the disk begins while more is written."""
    command = [sys.executable, "-c", LAST_SAVE, str(tmp_path), disk]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    if disk == "full":
        assert "was not saved" in ended.stderr
        assert "No space left" in ended.stderr
    else:
        assert ended.stderr == ""
        verify(open_any(tmp_path))

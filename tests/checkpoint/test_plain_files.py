"""Files of others: model.safetensors and state_dicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shoal
from checkpoint.training import Net, assert_same, build, on_ranks, state, wrap
from shoal.errors import CheckpointError, CheckpointMismatchError, CorruptCheckpointError


def load_model(source: Any, strategy: str) -> Any:
    model, _ = wrap(strategy, *build())
    shoal.load(source, model)
    return state(model)


def written(model: nn.Module) -> dict[str, torch.Tensor]:
    """As Hugging Face writes it: a tied weight once."""
    names = {name for name, _ in model.named_parameters()} | {"steps", "mean"}
    return {k: v.contiguous() for k, v in model.state_dict().items() if k in names}


@pytest.fixture
def model() -> Net:
    torch.manual_seed(11)
    return Net().double()


@pytest.mark.parametrize("strategy", ["plain", "ddp", "zero3"])
def test_import_of_one_file(tmp_path: Path, model: Net, strategy: str) -> None:
    save_file(written(model), tmp_path / "model.safetensors", metadata={"format": "pt"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        ranks = on_ranks(load_model, 3, path, strategy) if strategy != "plain" else []
        for loaded in ranks or [load_model(path, strategy)]:
            assert_same(loaded, state(model))


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_import_of_several_files(tmp_path: Path, model: Net, strategy: str) -> None:
    tensors = written(model)
    files = {f"model-{n:05d}-of-00003.safetensors": list(tensors)[n - 1 :: 3] for n in (1, 2, 3)}
    for name, keys in files.items():
        save_file({key: tensors[key] for key in keys}, tmp_path / name)
    index = {"weight_map": {key: name for name, keys in files.items() for key in keys}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for loaded in on_ranks(load_model, 2, tmp_path, strategy):
        assert_same(loaded, state(model))
    index["weight_map"]["scale"] = "../../model.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match="no name of a file beside it"):
        load_model(tmp_path, "plain")


@pytest.mark.parametrize("strategy", ["plain", "ddp", "zero3"])
def test_a_plain_state_dict(model: Net, strategy: str) -> None:
    if strategy == "plain":
        assert_same(load_model(model.state_dict(), strategy), state(model))
        return
    for loaded in on_ranks(load_model, 3, model.state_dict(), strategy):
        assert_same(loaded, state(model))
    with pytest.raises(TypeError, match="'epoch' is a int"):
        shoal.load({"epoch": 1}, model)


def test_what_does_not_fit_is_listed(tmp_path: Path, model: Net) -> None:
    tensors = written(model)
    tensors["surplus"] = torch.ones(2)
    tensors["middle.bias"] = torch.ones(8)
    del tensors["scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    before = state(model)
    with pytest.raises(CheckpointMismatchError) as error:
        shoal.load(tmp_path, model)
    text = str(error.value)
    assert "missing in the checkpoint: scale" in text
    assert "not in the model: surplus" in text
    assert "middle.bias ((8,) in the checkpoint, (7,) in the model)" in text
    assert_same(state(model), before)
    other = Net().double()
    shoal.load(tmp_path, other, strict=False)
    assert torch.equal(other.entry.weight, model.entry.weight)


def test_another_dtype_is_converted(tmp_path: Path, model: Net) -> None:
    save_file({k: v.float() if v.is_floating_point() else v for k, v in written(model).items()},
              tmp_path / "model.safetensors")  # fmt: skip
    loaded = load_model(tmp_path, "plain")
    assert torch.equal(loaded["model/entry.weight"], model.entry.weight.float().double())


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        shoal.load(tmp_path, nn.Linear(2, 2))

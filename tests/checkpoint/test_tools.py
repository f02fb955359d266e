"""Checkpoints without a model, on the command line: inspected, written again, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shoal
from checkpoint.training import assert_same, build, on_ranks, state, train_and_save, wrap
from shoal.cli import main


def load_model(source: Any, strategy: str) -> Any:
    model, _ = wrap(strategy, *build())
    shoal.load(source, model)
    return state(model)


def shoal_command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    on_ranks(train_and_save, 3, tmp_path / "run", "zero3", range(2))
    return tmp_path / "run"


def test_inspect(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shoal_command("inspect", run, "--verify", "--tensors") == 0
    text = capsys.readouterr().out
    for part in ("Net", "zero3", "AdamW, 3 parameter groups", "every checksum is right", "steps"):
        assert part in text
    file = run / "000001-step-2" / "data-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert shoal_command("inspect", run) == 0
    assert shoal_command("inspect", run, "--verify") == 2
    assert "data-00001.safetensors (tensor" in capsys.readouterr().err
    assert shoal_command("inspect", run / "nowhere") == 2


def load_all(path: Path, strategy: str) -> Any:
    model, optimizer = wrap(strategy, *build())
    extra = shoal.load(path, model, optimizer)
    return state(model, optimizer), dict(extra), extra.step


@pytest.mark.parametrize("num_files", [1, 2, 7])
def test_reshard(run: Path, tmp_path: Path, num_files: int) -> None:
    assert shoal_command("reshard", run, tmp_path / "other", "-n", num_files) == 0
    assert shoal_command("inspect", tmp_path / "other", "--verify") == 0
    folder = tmp_path / "other" / "000001-step-2"
    assert len(list(folder.glob("*.safetensors"))) == num_files
    expected = load_all(run, "plain")
    found = on_ranks(load_all, 2, tmp_path / "other", "zero2")[1]
    assert_same(found[0], expected[0])
    assert found[1:] == expected[1:] == ({"steps": [0, 1]}, 2)


def test_export(run: Path, tmp_path: Path) -> None:
    assert shoal_command("export", run, tmp_path / "hub") == 0
    exported = load_file(tmp_path / "hub" / "model.safetensors")
    full = load_all(run, "plain")[0]
    assert "exit.weight" not in exported  # tied to entry.weight
    assert "passing" not in exported
    for name, value in exported.items():
        assert torch.equal(value, full[f"model/{name}"])
    assert_same(load_model(tmp_path / "hub", "plain"),
                {k: v for k, v in full.items() if k.startswith("model/")})  # fmt: skip
    assert shoal_command("export", run, tmp_path / "hub") == 2  # never overwritten


def test_export_in_several_files(run: Path, tmp_path: Path) -> None:
    arguments = ("--dtype", "bfloat16", "--max-shard-size", "200B")
    assert shoal_command("export", run, tmp_path / "hub", *arguments) == 0
    index = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    loaded = load_model(tmp_path / "hub", "plain")
    full = load_all(run, "plain")[0]
    expected = full["model/entry.weight"].bfloat16().double()
    assert torch.equal(loaded["model/entry.weight"], expected)
    assert loaded["model/steps"] == full["model/steps"]


@pytest.mark.parametrize(
    "arguments", [("--dtype", "int3"), ("--max-shard-size", "big"), ("--max-shard-size", "0GB")]
)
def test_bad_options(run: Path, tmp_path: Path, arguments: tuple[str, str]) -> None:
    assert shoal_command("export", run, tmp_path / "hub", *arguments) == 2


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=37, n_positions=9))


def save_gpt2(path: Path) -> Any:
    model = gpt2()
    model, optimizer = wrap("zero3", model, torch.optim.AdamW(model.parameters()))
    shoal.save(path, model, optimizer)
    return model.state_dict()


def load_gpt2(path: Path) -> Any:
    model = shoal.as_distributed(gpt2(), strategy="fsdp")
    with torch.no_grad(), model.full_parameters():
        for parameter in model.parameters():
            parameter.zero_()
    shoal.load(path, model)
    return model.state_dict()


def test_hugging_face_reads_what_is_exported_and_is_read(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    saved = on_ranks(save_gpt2, 2, tmp_path / "run")[0]
    gpt2().config.save_pretrained(tmp_path / "hub")
    assert shoal_command("export", tmp_path / "run", tmp_path / "hub") == 0
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "hub")
    assert_same(dict(theirs.state_dict()), saved)
    theirs.save_pretrained(tmp_path / "back")
    ours = load_file(tmp_path / "hub" / "model.safetensors")
    assert ours.keys() == load_file(tmp_path / "back" / "model.safetensors").keys()
    for loaded in on_ranks(load_gpt2, 3, tmp_path / "back"):
        assert_same(loaded, saved)

"""Test `fewbits export`: transformers loads the folder and computes the same logits and tokens as the run."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from fewbits import cli
from fewbits.experiments.storage.finished_run import FinishedRun
from fewbits.experiments.trial import Runtime
from fewbits.models.quantize import unquantized
from tests.experiments.trial_inputs import TINY, train
from tests.messages import names

DATA = ("data=python", "data.size=200000", "training.steps=2", "training.length=64", "training.dtype=fp32")
TEXT = "def naïve(x):\n    return '\x7f' * x  # 日本\n"


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:512"])
def test_transformers_loads_the_same_logits_and_the_same_tokens(cache: Path, tmp_path: Path, tokenizer: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = train(cache, tmp_path / "runs", *DATA, "recipe=nvfp4", f"data.tokenizer={tokenizer}")
    out = tmp_path / "exported"
    words = ["export", str(folder.path), "--format", "huggingface", "--out", str(out), "--cache", str(cache)]
    assert cli.main(words) == 0
    assert cli.main(words) == 2, "the folder exists"
    run = FinishedRun.open(folder.path, cache=cache)
    model, quantization = run.model(Runtime(device="cpu"))
    tokens = torch.tensor([run.tokenizer.encode([TEXT])[0].tolist()])
    theirs = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad(), unquantized(quantization):
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=2e-5)
    their_tokenizer = AutoTokenizer.from_pretrained(out)
    assert their_tokenizer(TEXT, add_special_tokens=False)["input_ids"] == tokens[0].tolist()
    assert their_tokenizer.decode(tokens[0]) == TEXT
    assert their_tokenizer.eos_token_id == run.separator == theirs.generation_config.eos_token_id


def test_a_hybrid_is_refused_and_nothing_is_written(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {key: value for key, value in TINY.items() if key.startswith("model.")}
    small |= {"model.layers": 2, "model.pattern": "M*", "model.mamba_head_dim": 32}
    folder, _ = train(cache, tmp_path / "runs", *DATA, "model=hybrid-nano", *(f"{k}={v}" for k, v in small.items()))
    capsys.readouterr()
    out = tmp_path / "exported"
    words = ["--format", "huggingface", "--out", str(out), "--cache", str(cache)]
    assert cli.main(["export", str(folder.path), *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert names(error, "hybrid-nano", "Mamba-2")
    assert not out.exists()


def test_a_run_without_its_tokenizer_is_exported_without(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = train(cache, tmp_path / "runs", "training.steps=2", "model=gpt2-nano")
    capsys.readouterr()
    out = tmp_path / "exported"
    assert cli.main(["export", str(folder.path), "--format", "huggingface", "--out", str(out)]) == 0
    assert names(capsys.readouterr().err, "no tokenizer", "synthetic")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    assert json.loads((out / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    shutil.rmtree(out)

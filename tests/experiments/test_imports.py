"""Test `fewbits export` and `fewbits import`: others open what they write, or they write nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fewbits import cli
from fewbits.experiments.config import load_trial
from fewbits.experiments.evaluation.evaluate import evaluate
from fewbits.experiments.imports import import_run
from fewbits.experiments.probes.probe import probe
from fewbits.experiments.storage.finished_run import FinishedRun, export_run
from fewbits.experiments.storage.run_folder import RunFolder
from fewbits.experiments.training import run
from fewbits.experiments.trial import Runtime
from fewbits.kernels.packed import decode
from fewbits.models.importing.sources import read_published
from fewbits.models.quantize import unquantized
from tests.experiments.trial_inputs import overrides, tensors, train
from tests.messages import names

DATA = ("data=python", "data.size=200000", "training.length=64")
SETTINGS = (*DATA, "evaluation.windows=4", "training.batch=4")
TEXT = "def square(x):\n    return x * x  # 日本 1234\n" * 20


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Return a run of a small Llama with a BPE tokenizer of 512 tokens."""
    runs = tmp_path_factory.mktemp("runs")
    chosen = ("model=llama2-nano", "model.kv_heads=1", "data.tokenizer=bpe:512", "training.steps=2")
    return train(cache, runs, *DATA, *chosen)[0]


def export(folder: RunFolder, out: Path, cache: Path) -> int:
    words = ["export", str(folder.path), "--format", "huggingface", "--out", str(out), "--cache", str(cache)]
    return cli.main(words)


@pytest.fixture(scope="module")
def published(trained: RunFolder, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder with the model and the tokenizer of the run `trained`."""
    out = tmp_path_factory.mktemp("published") / "tiny"
    assert export(trained, out, cache) == 0
    return out


@pytest.fixture(scope="module")
def imported(published: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    runs = tmp_path_factory.mktemp("runs")
    return import_run(str(published), runs, overrides=SETTINGS, cache=cache).folder


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:512"])
def test_transformers_loads_the_same_logits_and_the_same_tokens(cache: Path, tmp_path: Path, tokenizer: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = ("training.steps=2", "training.length=64", "training.dtype=fp32", "recipe=nvfp4")
    folder, _ = train(cache, tmp_path / "runs", *DATA, *settings, f"data.tokenizer={tokenizer}")
    out, text = tmp_path / "exported", "def naïve(x):\n    return '\x7f' * x  # 日本\n"
    assert export(folder, out, cache) == 0
    assert export(folder, out, cache) == 2, "the folder exists"
    run = FinishedRun.open(folder.path, cache=cache)
    model, quantization = run.model(Runtime(device="cpu"))
    tokens = torch.tensor([run.tokenizer.encode([text])[0].tolist()])
    theirs = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad(), unquantized(quantization):
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=2e-5)
    their_tokenizer = AutoTokenizer.from_pretrained(out)
    assert their_tokenizer(text, add_special_tokens=False)["input_ids"] == tokens[0].tolist()
    assert their_tokenizer.decode(tokens[0]) == text
    assert their_tokenizer.eos_token_id == run.separator == theirs.generation_config.eos_token_id


@pytest.mark.parametrize("model", ["llama2-nano", "gpt2-nano", "nemotron-nano"])
def test_a_packed_export_is_imported_with_the_bits_that_fprop_reads(cache: Path, tmp_path: Path, model: str) -> None:
    chosen = (f"model={model}", "data.tokenizer=bytes", "training.steps=2", "recipe=nvfp4")
    folder = train(cache, tmp_path / "runs", *DATA, *chosen)[0]
    run, out = FinishedRun.open(folder.path, cache=cache), tmp_path / "packed"
    lines = export_run(run, out, "compressed-tensors")
    assert any("inputs are not quantized" in line for line in lines)
    imported = import_run(str(out), tmp_path / "imported", overrides=SETTINGS, cache=cache).folder
    after = FinishedRun.open(imported.path, cache=cache).model(Runtime(device="cpu"))[0].state_dict()
    before, packed = run.model(Runtime(device="cpu"))[0].state_dict(), run.packed_weights()
    assert packed
    for name, value in before.items():
        expected = decode(packed[name]).float() if name in packed else value
        assert torch.equal(after[name], expected), name
    assert any("inputs are not quantized" in line for line in export_run(run, tmp_path / "gguf", "gguf"))
    assert {"model.gguf", "tokenizer.json"} <= {path.name for path in (tmp_path / "gguf").iterdir()}
    read = read_published(str(tmp_path / "gguf" / "model.gguf")).state()
    for name in packed:
        assert torch.equal(read[name].bfloat16(), decode(packed[name])), name


def test_export_and_import_keep_a_run(trained: RunFolder, imported: RunFolder, published: Path, cache: Path) -> None:
    before, after = (FinishedRun.open(folder.path, cache=cache) for folder in (trained, imported))
    assert after.step == 0
    tokens = after.tokenizer.encode([TEXT])[0].tolist()
    assert tokens == before.tokenizer.encode([TEXT])[0].tolist()
    assert after.corpus.fingerprint == before.corpus.fingerprint
    inputs = torch.tensor([tokens[:60]])
    with torch.no_grad():
        logits = [one.model(Runtime(device="cpu"))[0](inputs) for one in (before, after)]
    assert torch.equal(*logits)
    facts = (imported.provenance() or {})["imported"]
    assert facts["files"].keys() == {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_probe_and_an_evaluation_read_it_like_any_run(imported: RunFolder, cache: Path, tmp_path: Path) -> None:
    runtime = Runtime(device="cpu", cache=str(cache))
    result = probe(imported.path, ["bf16", "mxfp8"], batches=2, runtime=runtime)
    increases = result.rows.query("layer == 'whole'").groupby("recipe")["increase"]
    assert increases.get_group("bf16").eq(0).all()
    assert increases.get_group("mxfp8").ne(0).all()
    (tmp_path / "notes.txt").write_text(TEXT)
    found = evaluate(imported.path, texts=[tmp_path / "notes.txt"], runtime=runtime)
    assert found["texts"]["notes.txt"]["bits_per_byte"] > 0
    assert found["validation_loss"] > 0


def test_a_branch_chooses_its_own_seed_and_length(imported: RunFolder, cache: Path, tmp_path: Path) -> None:
    model, tokenizer = imported.path / "model.yaml", imported.path / "tokenizer.json"
    chosen = overrides(cache, tmp_path, *DATA, f"data.tokenizer=file:{tokenizer}", f"model={model}")
    chosen = [text for text in chosen if not text.startswith("model.")]
    chosen += [f"branch.parent={imported.path}", "branch.step=0", "training.steps=1", "schedule=constant"]
    chosen += ["training.length=32", "evaluation.windows=2"]
    chosen += ["optimizer.lr=0", "optimizer.kind=adam-mini"]
    losses, weights = set(), tensors(imported.path)
    for seed in (0, 7):
        folder, result = run(*load_trial([*chosen, f"seed={seed}"]))
        losses.add(result["loss"])
        own = {name: value for name, value in tensors(folder.path).items() if name.startswith("model.")}
        assert own
        assert all(torch.equal(value, weights[name]) for name, value in own.items())
    assert len(losses) == 2, "each seed reads the data in its own order"


# ------------------------------------------------------------------------------------------------ errors


def _without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _truncated(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:2000])


def _unknown(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "falcon"}))


# Case: a function that damages the folder, further overrides, and the words that the error message must contain.
REFUSED: dict[str, tuple[Callable[[Path], object], tuple[str, ...], tuple[str, ...]]] = {
    "unknown architecture": (_unknown, (), ("falcon", "llama")),
    "truncated weights": (_truncated("model.safetensors"), (), ("model.safetensors",)),
    "truncated tokenizer": (_truncated("tokenizer.json"), (), ("tokenizer.json",)),
    "no tokenizer": (_without("tokenizer.json"), (), ("tokenizer.json", "data=bin")),
    "a model of its own": (lambda folder: None, ("model.width=8",), ("model.width", "training")),
    "unknown setting": (lambda folder: None, ("training.stepps=8",), ("training.stepps", "steps")),
    "too long": (lambda folder: None, ("training.length=4096",), ("training.length", "256")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_source_is_one_line(
    case: str, published: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(published, tmp_path / "source")
    spoil, more, named = REFUSED[case]
    spoil(folder)
    words = ["import", str(folder), "--runs", str(tmp_path / "runs"), "--cache", str(cache), *SETTINGS, *more]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert names(error, *named), error
    assert not (tmp_path / "runs").exists()

"""Test data in phases: each part of training reads its own folder of tokens."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fewbits.experiments.data.corpus import DataConfig, Phase
from fewbits.experiments.data.load import load
from tests.experiments.trial_inputs import left, metric, only_run, train, train_until
from tests.sweeps.sweep_inputs import planned, tiny_file


def write(folder: Path, value: int, tokens: int = 20_000, vocab: int = 256) -> str:
    """Write a folder of tokens: a sequence in which `value` and other tokens alternate."""
    folder.mkdir()
    text = np.random.default_rng(value).integers(0, 200, tokens).astype(np.uint16)
    text[::2] = value
    text.tofile(folder / "train.bin")
    text[: tokens // 4].tofile(folder / "val.bin")
    (folder / "meta.json").write_text(json.dumps({"dtype": "uint16", "vocab": vocab}))
    return str(folder)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    return [write(tmp_path / name, value) for name, value in (("a", 201), ("b", 202), ("c", 203))]


def config(folders: list[str], **more: object) -> DataConfig:
    phases = (Phase(folders[0], 0.5), Phase(folders[1], 0.75), Phase(folders[2]))
    return DataConfig(kind="bin", phases=phases, **more)  # type: ignore[arg-type]


def overridden(folders: list[str], ends: tuple[float, ...]) -> tuple[str, ...]:
    phases = ",".join(f"{{path: {folder}, until: {end}}}" for folder, end in zip(folders, ends, strict=True))
    return "data=bin", "data.size=null", f"data.phases=[{phases}]"


def test_each_step_reads_the_text_of_its_phase_from_the_start(folders: list[str], tmp_path: Path) -> None:
    corpus = load(config(folders), tmp_path)
    marks, firsts = [], []
    for step in range(8):
        text, first = corpus.phase_at(step, 8)
        inputs, _ = text.batch("train", 0, 1, 64, 0)
        marks.append(int(inputs.max()))
        firsts.append(first)
    assert marks == [201] * 4 + [202] * 2 + [203] * 2
    assert firsts == [0] * 4 + [4] * 2 + [6] * 2
    assert [corpus.phase_at(step, 7)[1] for step in range(7)] == [0] * 4 + [4] + [5] * 2  # 3.5 and 5.25 are rounded


def test_phases_change_the_fingerprint_and_held_out_text_is_that_of_path_or_the_first(
    folders: list[str], tmp_path: Path
) -> None:
    plain = load(DataConfig(kind="bin", path=folders[0]), tmp_path)
    phased, other = load(config(folders), tmp_path), load(config(folders, path=folders[2]), tmp_path)
    swapped = load(config([folders[1], folders[0], folders[2]]), tmp_path)
    later = load(replace(config(folders), phases=(Phase(folders[0], 0.6), *config(folders).phases[1:])), tmp_path)
    assert len({corpus.fingerprint for corpus in (plain, phased, other, swapped, later)}) == 5
    assert [int(corpus.windows("validation", 1, 64)[0].max()) for corpus in (phased, other)] == [201, 203]
    assert phased.fresh_tokens(100) == 40_000  # the first half of training reads 20,000 tokens
    assert plain.fresh_tokens(100) == 20_000
    again = load(config([folders[0], folders[1], folders[0]]), tmp_path)
    assert again.fresh_tokens(100) == 20_000 * 100 // 75  # the first folder is read in three quarters of the steps
    by_step = DataConfig(kind="bin", phases=(Phase(folders[0], 30), Phase(folders[1])))
    assert [load(by_step, tmp_path).fresh_tokens(steps) for steps in (20, 60)] == [20_000, 40_000]


def test_a_branch_counts_the_steps_of_phases_from_its_parents_start(
    folders: list[str], cache: Path, tmp_path: Path
) -> None:
    """Check that a trial of 8 steps and a branch from its step 4 read the same text: equal losses at rate 0."""
    still = ("optimizer.lr=0", "schedule=constant", "evaluation.every=4", "training.checkpoint_every=4")
    asked = (*still, *overridden(folders, (3, 6, 1)))
    parent, _ = train(cache, tmp_path, *asked, "training.steps=8", "runtime.keep_steps=[4]")
    branch = (*asked, "training.steps=4", f"branch.parent={parent.path}", "branch.step=4")
    assert metric(train(cache, tmp_path, *branch)[0], "loss") == metric(parent, "loss")[4:]
    with pytest.raises(ValueError, match=r"training\.batch 2, not 4"):
        train(cache, tmp_path, *branch, "training.batch=2")


@pytest.mark.parametrize(
    ("ends", "override", "message"),
    [
        ((0.5, 0.75, 1), "recipe=nvfp4", "data.phases with branch"),
        ((2, 6, 1), "training.batch=8", "training.batch 8, not 4"),
    ],
)
def test_such_branches_of_a_sweep_are_refused_when_it_is_planned(
    folders: list[str], cache: Path, tmp_path: Path, ends: tuple[float, ...], override: str, message: str
) -> None:
    arms = {"t": {"overrides": ["recipe=bf16"]}, "b": {"parent": "t", "overrides": [override]}}
    with pytest.raises(ValueError, match=f"arm b, seed 0: .*{message}"):
        planned(tiny_file(tmp_path, cache, {"arms": arms, "overrides": overridden(folders, ends)}))


@pytest.mark.parametrize("ends", [(0.5, 0.9), (0.5, 0.4, 1.0), (0.0, 1.0), (1.2, 1.0), (0.5, 7, 1), (-1, 1)])
def test_phases_must_end_at_increasing_fractions_up_to_1(ends: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"data\.phases"):
        DataConfig(kind="bin", phases=tuple(Phase("x", end) for end in ends))


@pytest.mark.parametrize(
    ("steps", "ends", "empty"), [(4, (0.5, 0.55, 1), "b"), (3, (100, 200, 1), "b.*c"), (10, (0.01, 0.5, 1), "a")]
)
def test_a_phase_that_no_step_reads_is_refused_by_its_name(
    folders: list[str], cache: Path, tmp_path: Path, steps: int, ends: tuple[float, ...], empty: str
) -> None:
    with pytest.raises(ValueError, match=f"no step of {steps} reads [^ ]*/{empty}: "):
        train(cache, tmp_path / "runs", *overridden(folders, ends), f"training.steps={steps}")
    assert not (tmp_path / "runs").exists()


def test_phases_of_another_vocabulary_or_tokenizer_are_refused(folders: list[str], tmp_path: Path) -> None:
    wide = write(tmp_path / "wide", 100, vocab=300)
    with pytest.raises(ValueError, match="300 and 256 tokens"):
        load(config([folders[0], folders[1], wide]), tmp_path)
    meta = json.loads((Path(folders[2]) / "meta.json").read_text())
    (Path(folders[2]) / "meta.json").write_text(json.dumps(meta | {"tokenizer_sha256": "1" * 64}))
    with pytest.raises(ValueError, match="another vocabulary or tokenizer"):
        load(config(folders), tmp_path)


def test_a_trial_that_is_killed_in_each_phase_has_the_bytes_of_an_uninterrupted_one(
    folders: list[str], cache: Path, tmp_path: Path
) -> None:
    asked = (*overridden(folders, (0.5, 0.75, 1.0)), "training.checkpoint_every=1")
    whole, result = train(cache, tmp_path / "whole", *asked)
    assert result["status"] == "done"
    for stop in (2, 7, 10):  # of 12 steps: one in each phase
        train_until(stop, cache, tmp_path / "runs", *asked)
    train(cache, tmp_path / "runs", *asked)
    assert left(only_run(tmp_path / "runs")) == left(whole.path)

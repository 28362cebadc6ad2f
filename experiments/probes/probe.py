"""Compare recipes at one checkpoint, on the same batches (`fewbits probe`).

Each recipe is measured by a probe trial (probe_trial.py), whose run folder is in the store of the probed run: a recipe
that was measured before is not measured again, and an interrupted probe continues. The differences from the model
without quantization, on the same batch, have almost no noise, whereas a comparison of trained models needs many seeds.

This reference computes in the trial's dtype, so all differences come from the recipe, and a recipe that leaves all
operands in high precision gives differences of exactly 0. Every batch is one that the trial would have read next, and
has the size of a micro-batch, because the scale of a quantized tensor may depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from fewbits.experiments.config import load_recipe
from fewbits.experiments.optimization.schedules import ScheduleConfig
from fewbits.experiments.probes.errors import Probe
from fewbits.experiments.probes.probe_trial import SUMS, TABLE
from fewbits.experiments.session import Events, Progress
from fewbits.experiments.setup import check
from fewbits.experiments.storage import checkpoints, run_folder
from fewbits.experiments.training import run as run_trial
from fewbits.experiments.trial import Branch, ProbeConfig, Runtime, Trial
from fewbits.models.networks.registry import on_meta
from fewbits.models.quantize import quantize
from fewbits.models.recipe import Recipe

FILES = {"rows": TABLE, "operands": "numerics.parquet", "sums": SUMS}  # of a probe trial
OPERAND = ["layer", "block", "part", "slot", "quantizer", "error"]  # the columns that the table `operands` always has

ReportProgress = Callable[[int, int], None]  # called with the number of batches done and of all batches


def probe(
    run: Path,
    recipes: Sequence[str | Recipe],
    *,
    batches: int = 4,
    seeds: int = 1,
    step: int | None = None,
    accumulators: Sequence[str] = (),
    runtime: Runtime = Runtime(),  # noqa: B008, a frozen value
    report: ReportProgress = lambda done, total: None,
) -> Probe:
    """Compare recipes at a checkpoint; return tables of what was measured.

    run: a run folder, or the folder of one of its checkpoints.
    recipes: names of recipes, or Recipe values; their names must differ.
    batches: the number of batches; each has the size of a micro-batch of the trial.
    seeds: the number of seeds for a recipe that uses random numbers, to separate its mean effect from the noise.
    step: the step of the checkpoint, if `run` is a run folder; None: the newest checkpoint.
    accumulators: names of accumulators whose sums are compared with exact ones, such as hopper-fp8.
    report: called after each batch of each recipe, with the number of batches done and the number of all batches.

    >>> result = probe(Path("runs/nemotron-nano-bf16-python-s0-1a2b3c4d"), ["bf16", "mor/block", "nvfp4"], seeds=4)
    >>> result.summary()
    """
    for name, count in (("batches", batches), ("seeds", seeds)):
        if count < 1:
            raise ValueError(f"{name} {count}: 1 or more is expected")
    folder, at = _checkpoint(run, step)
    source = run_folder.saved_trial(folder.path)
    settings = ProbeConfig(seeds, "train", update=False, accumulators=tuple(accumulators))
    trials = [_trial(source, folder.path, at, recipe, batches, settings) for recipe in _checked(recipes, source)]
    runtime = replace(runtime, runs=str(folder.path.resolve().parent), keep_every=0, keep_steps=())
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in FILES}
    for number, trial in enumerate(trials):
        done, _ = run_trial(trial, runtime, _Counting(number * batches, len(trials) * batches, report))
        found = {name: pd.read_parquet(done.path / file) for name, file in FILES.items() if (done.path / file).exists()}
        found["operands"] = _of_both_slots(found["operands"], trial, at / source.training.steps)
        for name, table in found.items():
            table.insert(0, "recipe", trial.recipe.name)
            tables[name].append(table)
    return Probe(
        run=folder.path.resolve().name,
        step=at,
        split=settings.split,
        batches=batches,
        seeds=seeds,
        sequences=source.training.micro_batch,
        length=source.training.length,
        dtype=source.training.dtype,
        reference=source.training.dtype,
        rows=pd.concat(tables["rows"], ignore_index=True),
        operands=_joined(tables["operands"]),
        sums=_joined(tables["sums"]) if accumulators else None,
    )


def _joined(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of all tables; pandas advises against joining empty tables."""
    return pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)


class _Counting(Events):
    """Reports batches of all recipes together."""

    def __init__(self, before: int, total: int, report: ReportProgress) -> None:
        self._before, self._total, self._report = before, total, report

    def step(self, progress: Progress) -> None:
        self._report(self._before + progress.step, self._total)


def _checkpoint(path: Path, step: int | None) -> tuple[run_folder.RunFolder, int]:
    """Return the run folder and the step of the checkpoint that a path names; the path may also be a checkpoint's."""
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; a run folder or one of its checkpoints is expected")
    above = path.resolve().parent.parent
    if not path.name.startswith("step-") or not (above / "provenance.json").is_file():
        folder = run_folder.opened(path)
        return folder, folder.checkpoint(step).step
    if step is not None:
        raise ValueError(f"step {step} of {path}: the path is a checkpoint; name the run folder, or omit the step")
    return run_folder.opened(above), checkpoints.load(path).step


def _checked(recipes: Sequence[str | Recipe], trial: Trial) -> list[Recipe]:
    checked = [load_recipe(recipe) if isinstance(recipe, str) else recipe for recipe in recipes]
    names = [recipe.name for recipe in checked]
    if not checked or len(set(names)) < len(names):
        raise ValueError(f"recipes {', '.join(names) or '(none)'}: one or more with different names are expected")
    for recipe in checked:
        check(replace(trial, recipe=recipe))
    return checked


def _trial(source: Trial, run: Path, step: int, recipe: Recipe, batches: int, settings: ProbeConfig) -> Trial:
    t = source.training
    training = replace(t, steps=batches, batch=t.micro_batch, compile=False, recompute=False)
    return replace(
        source,
        recipe=recipe,
        training=training,
        schedule=ScheduleConfig("constant"),
        branch=Branch(str(run.resolve()), step),
        probe=settings,
    )


def _of_both_slots(operands: pd.DataFrame, trial: Trial, progress: float) -> pd.DataFrame:
    """Return the table of operands with a row for both slots where a tensor is quantized once for two slots.

    progress: of the probed trial at the checkpoint, on which a recipe that switches depends.
    """
    quantization = quantize(on_meta(trial.model), trial.recipe)
    quantization.begin(0, progress=progress)
    rows: dict[tuple[str, str], Any] = {(row["layer"], row["slot"]): row for row in operands.to_dict("records")}
    found = []
    for layer in quantization.layers:
        plan = layer.plans[quantization.context.switched]
        for pair in (plan.x, plan.w, plan.dy):
            for slot in pair.names:
                if row := rows.get((layer.name, pair.names[0] if pair.shared else slot)):
                    found.append({**row, "slot": slot})
    table = pd.DataFrame(found)
    return table.reindex(columns=[*OPERAND, *(column for column in table if column not in OPERAND)])

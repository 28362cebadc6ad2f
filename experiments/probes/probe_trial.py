"""Run a probe trial: measure a recipe at a checkpoint, batch by batch, against the same weights without quantization.

A probe trial is planned, scheduled, cached and resumed like a trial that trains, and has a run folder. It writes

    probe.parquet      for each batch and variant (variants.py), a row with the losses and the measures of the whole
                       gradient (errors.py); for the recipe itself (variant `all`), also a row with the
                       measures of each layer's weight gradient. Columns: docs/columns.md
    sums.parquet       with probe.accumulators: a row for each batch, seed, layer and accumulator, with the relative
                       `error` of the layer's forward product if this accumulator computed its sums
    numerics.parquet   statistics of each operand, as a training trial writes them, over all batches together
    result.json        means over batches (tables.py)

Until the end, each measured batch is stored in a file in `batches/`, so that an interrupted probe continues with the
next batch and gives the same files as an uninterrupted one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fewbits.common.atomic import checked_json, remove_folder, write_json, write_parquet
from fewbits.experiments.optimization.precision import DTYPES
from fewbits.experiments.probes.bench import (
    Bench,
    UpdateEffect,
    backward,
    batches,
    draws_noise,
    layer_labels,
    make_bench,
)
from fewbits.experiments.probes.errors import GradientErrors, check_accumulators, measured_sums
from fewbits.experiments.probes.tables import WHOLE, numerics_table, summarize
from fewbits.experiments.probes.variants import ALL, Variant, variants
from fewbits.experiments.session import Progress, Session
from fewbits.experiments.storage import run_folder
from fewbits.experiments.storage.lease import Lost
from fewbits.experiments.storage.results import decisions
from fewbits.experiments.trial import Trial
from fewbits.kernels.seeds import derive_seed

FOLDER, TABLE, SUMS = "batches", "probe.parquet", "sums.parquet"

Row = dict[str, Any]
Vector = Mapping[str, Tensor]  # a gradient, or a difference of gradients, by parameter name


def check_inputs(session: Session) -> None:
    """Raise ValueError if the probe's settings do not fit together, or do not fit the checkpoint that it probes."""
    trial, parent = session.trial, session.parent
    if session.world.ranks > 1:
        raise ValueError("a probe (probe.seeds above 0) runs on one rank: remove resources.ranks")
    if parent is None:
        raise ValueError("probe.seeds: a probe needs a checkpoint: set branch.parent to a run")
    parent.check(trial, session.corpus)
    check_accumulators(trial.probe.accumulators)
    length = run_folder.saved_trial(parent.folder.path).training.length
    if trial.probe.split == "train" and parent.checkpoint.state["position"] and trial.training.length != length:
        raise ValueError(
            f"training.length {trial.training.length}: probe.split=train needs the parent's value, {length}"
        )


def run(session: Session) -> dict[str, Any]:
    """Measure all batches that are not stored yet; write the tables and result.json; return the result."""
    trial, folder, device, t = session.trial, session.folder, session.world.device, session.trial.training
    assert session.parent is not None
    checkpoint, source = session.parent.checkpoint, run_folder.saved_trial(session.parent.folder.path)
    own = replace(source, model=replace(source.model, dropout=0.0), training=replace(source.training, dtype=t.dtype))
    bench = make_bench(own, checkpoint, device, DTYPES[trial.probe.reference or t.dtype])
    begin = _finished(folder.path)
    session.add_segment(begin)
    _file(folder.path, 0).parent.mkdir(exist_ok=True)
    read = list(batches(session.corpus, trial, source, checkpoint.state["position"]))
    probe = _Probe(trial, bench, UpdateEffect(source, checkpoint, bench.exact), device, read)
    if begin:
        probe.measure(begin - 1)  # for `_across`, which compares the next batch with the batch before
    for number in range(begin, t.steps):
        began = time.perf_counter()
        rows = probe.measure(number)
        if session.lost():
            raise Lost
        write_json(_file(folder.path, number), rows)
        seconds = time.perf_counter() - began
        speed = t.micro_batch * t.length / seconds
        loss = rows["rows"][0]["loss"]
        session.events.step(Progress(number + 1, t.steps, math.nan if loss is None else loss, speed, seconds))
        if session.stopping() and number + 1 < t.steps:
            raise KeyboardInterrupt
    session.corpus.check_unchanged()
    result = _write(trial, checkpoint.step, folder, t.steps)
    session.events.saved(folder)
    return result


def _write(trial: Trial, step: int, folder: run_folder.RunFolder, count: int) -> dict[str, Any]:
    """Merge the files of single batches into the trial's tables, write and return its result, and remove these files.

    step: the checkpoint's step. count: the number of batches.
    """
    stored = [checked_json(_file(folder.path, number)) or {} for number in range(count)]
    table = pd.DataFrame([row for batch in stored for row in batch["rows"]])
    texts = ("variant", "layer", "part")
    table = table.astype(
        {name: "Int64" if name in ("batch", "block") else float for name in table if name not in texts}
    )
    write_parquet(folder.path / TABLE, table)
    numerics = numerics_table([row for batch in stored for row in batch["numerics"]], step)
    write_parquet(folder.path / "numerics.parquet", numerics)
    if trial.probe.accumulators:
        write_parquet(folder.path / SUMS, pd.DataFrame([row for batch in stored for row in batch["sums"]]))
    result: dict[str, Any] = {"id": folder.id, "name": trial.name, "status": "done", "step": count}
    result |= {**summarize(table), **decisions(numerics)}
    write_json(folder.path / "result.json", result)
    remove_folder(folder.path / FOLDER)
    return result


class _Probe:
    """Measures batches with a trial's recipe at a checkpoint.

    It keeps the gradients of the batch measured last, for their scalar products with those of the next batch.
    """

    def __init__(
        self,
        trial: Trial,
        bench: Bench,
        effect: UpdateEffect,
        device: torch.device,
        read: list[tuple[Tensor, Tensor]],
    ) -> None:
        self._trial, self._bench, self._effect, self._device = trial, bench, effect, device
        self._batches = read
        _, quantization = bench.quantized(trial.recipe, 0, 0)
        self._random = draws_noise(quantization)
        self._variants = [Variant(ALL), *variants(trial.probe.parts, quantization)]
        # Of the batch measured last: the exact gradient, and the quantized gradient's mean difference from it.
        self._last: tuple[Vector, Vector] | None = None

    def measure(self, number: int) -> dict[str, list[Row]]:
        """Measure the batch with this number, from 0; return its rows in lists: `rows`, `numerics`, `sums`.

        `numerics` has a row of statistics for each seed, layer and operand slot, from which numerics.parquet is made.
        """
        inputs, targets = self._tokens(number)
        reference, exact = backward(self._bench.exact, inputs, targets)
        accumulators = self._trial.probe.accumulators
        rows: list[Row] = []
        numerics: list[Row] = []
        sums: list[Row] = []
        for variant in self._variants:
            whole = variant.name == ALL
            passes = self._trial.probe.seeds if whole and self._random else 1
            errors, losses = GradientErrors(exact, random=self._random), []
            mean: dict[str, Tensor] = {}
            for draw in range(passes):
                seed = derive_seed(self._trial.seed, number, draw)
                model, quantization = self._bench.quantized(self._trial.recipe, number, seed)
                variant.apply(quantization)
                with measured_sums(quantization, accumulators if whole else ()) as of_sums:
                    loss, gradient = backward(model, inputs, targets)
                sums += [{"batch": number, "seed": draw, **row} for row in of_sums]
                errors.add(gradient)
                losses.append(loss)
                if whole:
                    for name, value in gradient.items():
                        difference = (value.float() - exact[name]) / passes
                        mean[name] = mean[name] + difference if name in mean else difference
                    observer = quantization.observer
                    assert observer is not None
                    measured = observer.rows(number, quantization.layers, weights=False)
                    numerics += [{"batch": number, **row} for row in measured]
            labels = {"batch": number, "variant": variant.name}
            loss = sum(losses) / len(losses)
            whole_row = labels | {"layer": WHOLE, "block": None, "part": None, "loss": loss, "reference": reference}
            whole_row |= {"increase": loss - reference, **errors.measures(list(exact)), **_zeros(gradient, exact)}
            if whole:
                whole_row |= self._across(exact, mean) | self._update(number, exact, gradient)
                self._last = exact, mean
            rows.append(whole_row)
            if whole:
                for layer in quantization.layers:
                    name = f"{layer.name}.weight"
                    of_layer = errors.measures([name]) | _zeros({name: gradient[name]}, {name: exact[name]})
                    rows.append(labels | layer_labels(layer) | of_layer)
        tables = {"rows": rows, "numerics": numerics} | ({"sums": sums} if accumulators else {})
        return {name: [_finite(row) for row in table] for name, table in tables.items()}

    def _tokens(self, number: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._batches[number % len(self._batches)]
        return inputs.to(self._device), targets.to(self._device)

    def _across(self, exact: Vector, mean: Vector) -> dict[str, float]:
        """Return scalar products of this batch's gradients and the previous batch's; an empty dict for the first batch.

        exact: this batch's exact gradient. mean: this batch's error, the recipe's gradient minus the exact one,
        averaged over seeds. The noise of two batches is independent, so the mean of `cross_error` over pairs of batches
        is an unbiased estimate of the squared norm of the error that averaging over batches and seeds does not remove.
        """
        if self._last is None:
            return {}
        before, error_before = self._last
        return {"cross_gradient": _product(exact, before), "cross_error": _product(mean, error_before)}

    def _update(self, number: int, exact: Vector, quantized: Vector) -> dict[str, float]:
        """Return how much the optimizer's next update decreases the unquantized loss, as `decrease_PLACE_GRADIENT`.

        PLACE: the loss is computed on this batch (`own`) or on the next batch (`next`; after the last one, the first).
        GRADIENT: the update uses the gradient `exact` or `quantized`. The result is empty if `probe.update` is false or
        the checkpoint has no optimizer state.
        """
        if not (self._trial.probe.update and self._effect.known):
            return {}
        places = {"own": self._tokens(number)}
        if len(self._batches) > 1:
            places["next"] = self._tokens(number + 1)
        before = {place: self._effect.loss(*tokens) for place, tokens in places.items()}
        decreases = {}
        for name, gradient in (("exact", exact), ("quantized", quantized)):
            with self._effect.applied(gradient):
                for place, tokens in places.items():
                    decreases[f"decrease_{place}_{name}"] = before[place] - self._effect.loss(*tokens)
        return decreases


def _finite(row: Row) -> Row:
    """Return the row with None in place of infinities and NaN, which JSON cannot represent."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}


def _zeros(quantized: Vector, exact: Vector) -> dict[str, float]:
    """Return the shares of elements that are 0: `zeros` in the quantized gradient, `zeros_exact` in the exact one."""
    size = sum(value.numel() for value in exact.values())
    shares = {"zeros": quantized, "zeros_exact": exact}
    return {name: sum(int((v == 0).sum()) for v in vector.values()) / size for name, vector in shares.items()}


def _product(a: Vector, b: Vector) -> float:
    """Return the scalar product of two gradients over all parameters."""
    return float(sum(torch.dot(a[name].flatten().double(), b[name].flatten().double()) for name in a))


def _file(path: Path, number: int) -> Path:
    """Return the file in a run folder that stores the measurements of a batch until the end of the probe."""
    return path / FOLDER / f"{number:05}.json"


def _finished(path: Path) -> int:
    """Return how many batches are stored in the run folder `path`."""
    number = 0
    while _file(path, number).is_file():
        number += 1
    return number

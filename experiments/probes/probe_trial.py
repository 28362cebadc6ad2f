"""Run a probe trial: measure a recipe at a checkpoint, batch by batch, against the same weights without quantization.

A probe trial is planned, scheduled, cached and resumed like a trial that trains, and has a run folder. It writes

    probe.parquet      a row for each batch, variant (bench.py) and layer; docs/columns.md lists the columns
    sums.parquet       with probe.accumulators: a row for each batch, seed, layer and accumulator, with the relative
                       `error` of the layer's forward product if this accumulator computed its sums
    numerics.parquet   statistics of each operand, as a training trial writes them, over all batches together
    result.json        means over batches

An interrupted probe starts again: it takes minutes, and some of its sums need the gradients of all batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fewbits.common.atomic import write_json, write_parquet
from fewbits.experiments.optimization.precision import DTYPES
from fewbits.experiments.probes.bench import (
    ALL,
    Bench,
    UpdateEffect,
    Variant,
    backward,
    batches,
    draws_noise,
    layer_labels,
    make_bench,
    variants,
)
from fewbits.experiments.probes.errors import (
    WHOLE,
    GradientErrors,
    check_accumulators,
    measured_sums,
    numerics_table,
    summarize,
)
from fewbits.experiments.session import Progress, Session
from fewbits.experiments.storage import run_folder
from fewbits.experiments.storage.lease import Lost
from fewbits.experiments.storage.results import decisions
from fewbits.experiments.trial import Trial
from fewbits.kernels.seeds import derive_seed

TABLE, SUMS = "probe.parquet", "sums.parquet"

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
    session.add_segment(0)
    read = list(batches(session.corpus, trial, source, checkpoint.state["position"]))
    probe = _Probe(trial, bench, UpdateEffect(source, checkpoint, bench.exact), device, read)
    measured: dict[str, list[Row]] = {"rows": [], "numerics": [], "sums": []}
    for number in range(t.steps):
        began = time.perf_counter()
        for name, rows in probe.measure(number).items():
            measured[name] += rows
        if session.lost():
            raise Lost
        seconds = time.perf_counter() - began
        speed = t.micro_batch * t.length / seconds
        session.events.step(Progress(number + 1, t.steps, probe.loss, speed, seconds))
        if session.stopping() and number + 1 < t.steps:
            raise KeyboardInterrupt
    session.corpus.check_unchanged()
    result = _write(trial, checkpoint.step, folder, measured)
    session.events.saved(folder)
    return result


def _write(trial: Trial, step: int, folder: run_folder.RunFolder, measured: dict[str, list[Row]]) -> dict[str, Any]:
    """Write the trial's tables and its result, and return the result. step: the checkpoint's step."""
    table = pd.DataFrame(measured["rows"])
    texts = ("variant", "layer", "part")
    table = table.astype(
        {name: "Int64" if name in ("batch", "block") else float for name in table if name not in texts}
    )
    write_parquet(folder.path / TABLE, table)
    numerics = numerics_table(measured["numerics"], step)
    write_parquet(folder.path / "numerics.parquet", numerics)
    if trial.probe.accumulators:
        write_parquet(folder.path / SUMS, pd.DataFrame(measured["sums"]))
    result: dict[str, Any] = {"id": folder.id, "name": trial.name, "status": "done", "step": trial.training.steps}
    result |= {**summarize(table), **decisions(numerics)}
    write_json(folder.path / "result.json", result)
    return result


class _Probe:
    """Measures batches with a trial's recipe at a checkpoint, one after the other."""

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
        self._pairs = Pairs()
        self.loss = math.nan  # with the recipe, of the batch measured last

    def measure(self, number: int) -> dict[str, list[Row]]:
        """Measure the batch with this number, from 0; return its rows in lists: `rows`, `numerics`, `sums`."""
        inputs, targets = self._tokens(number)
        reference, exact = backward(self._bench.exact, inputs, targets)
        accumulators = self._trial.probe.accumulators
        update = self._update(number)
        rows: list[Row] = []
        numerics: list[Row] = []
        sums: list[Row] = []
        for variant in self._variants:
            whole = variant.name == ALL
            passes = self._trial.probe.seeds if whole and self._random else 1
            errors, losses = GradientErrors(exact, random=self._random), []
            mean: dict[str, Tensor] = {}
            decreases: list[dict[str, float]] = []
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
                    _add(mean, {name: (value.float() - exact[name]) / passes for name, value in gradient.items()})
                    decreases.append(update.decreases(gradient))
                    observer = quantization.observer
                    assert observer is not None
                    measured = observer.rows(number, quantization.layers, weights=False)
                    numerics += [{"batch": number, **row} for row in measured]
            labels = {"batch": number, "variant": variant.name}
            loss = sum(losses) / len(losses)
            whole_row = labels | {"layer": WHOLE, "block": None, "part": None, "loss": loss, "reference": reference}
            whole_row |= {"increase": loss - reference, **errors.measures(list(exact)), **_zeros(gradient, exact)}
            if whole:
                self.loss = loss
                whole_row |= self._pairs.products(exact, mean)
                for place, of_exact in update.decreases(exact).items():
                    whole_row |= {
                        f"decrease_{place}_exact": of_exact,
                        f"decrease_{place}_quantized": sum(of[place] for of in decreases) / passes,
                    }
            rows.append(whole_row)
            if whole:
                for layer in quantization.layers:
                    name = f"{layer.name}.weight"
                    of_layer = errors.measures([name]) | _zeros({name: gradient[name]}, {name: exact[name]})
                    rows.append(labels | layer_labels(layer) | of_layer)
        tables = {"rows": rows, "numerics": numerics, "sums": sums}
        return {name: [_finite(row) for row in table] for name, table in tables.items()}

    def _tokens(self, number: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._batches[number % len(self._batches)]
        return inputs.to(self._device), targets.to(self._device)

    def _update(self, number: int) -> _Update:
        """Return the effect of the optimizer's next update on the unquantized loss of this batch and the next one.

        After the last batch, the first is the next. Nothing is measured if `probe.update` is false or the checkpoint
        has no optimizer state.
        """
        places = {}
        if self._trial.probe.update and self._effect.known:
            places["own"] = self._tokens(number)
            if len(self._batches) > 1:
                places["next"] = self._tokens(number + 1)
        return _Update(self._effect, places)


class Pairs:
    """Scalar products of gradients over all pairs of different batches, from sums over the batches seen so far.

    The noise of two batches is independent, so the products estimate without bias what averaging over batches and
    seeds does not remove: `cross_error` the squared norm of the error, and `cross_progress` by how much the error
    changes the expected decrease of the loss of other batches, to first order.
    """

    def __init__(self) -> None:
        self._exact: dict[str, Tensor] = {}
        self._error: dict[str, Tensor] = {}

    def products(self, exact: Vector, error: Vector) -> dict[str, float]:
        """Return the products of one more batch with the sums over the earlier ones; empty for the first batch.

        exact: the batch's exact gradient. error: the recipe's gradient minus the exact one, averaged over seeds.
        """
        products = {}
        if self._exact:
            products = {
                "cross_gradient": _product(exact, self._exact),
                "cross_error": _product(error, self._error),
                "cross_progress": (_product(error, self._exact) + _product(exact, self._error)) / 2,
            }
        _add(self._exact, exact)
        _add(self._error, error)
        return products


class _Update:
    """Measures how much an update decreases the unquantized loss in several places, which are batches by name."""

    def __init__(self, effect: UpdateEffect, places: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self._effect, self._places = effect, places
        self._before = {place: effect.loss(*tokens) for place, tokens in places.items()}

    def decreases(self, gradient: Vector) -> dict[str, float]:
        if not self._places:
            return {}
        with self._effect.applied(gradient):
            return {place: self._before[place] - self._effect.loss(*tokens) for place, tokens in self._places.items()}


def _add(sums: dict[str, Tensor], vector: Vector) -> None:
    for name, value in vector.items():
        sums[name] = sums[name].add_(value) if name in sums else value.float().clone()


def _finite(row: Row) -> Row:
    """Return the row with None in place of infinities and NaN, which JSON cannot represent."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}


def _zeros(quantized: Vector, exact: Vector) -> dict[str, float]:
    """Return the shares of elements that are 0: `zeros` in the quantized gradient, `zeros_exact` in the exact one."""
    size = sum(value.numel() for value in exact.values())
    shares = {"zeros": quantized, "zeros_exact": exact}
    return {name: sum(int((v == 0).sum()) for v in vector.values()) / size for name, vector in shares.items()}


def _product(a: Vector, b: Vector) -> float:
    return float(sum(torch.dot(a[name].flatten().double(), b[name].flatten().double()) for name in a))

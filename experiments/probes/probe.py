"""Compare recipes at one checkpoint, on the same batches (`fewbits probe`).

For every batch, the model with the checkpoint's weights computes a forward and a backward pass without quantization,
and one with each recipe (several with different seeds, if the recipe uses random numbers). Each result is compared with
the unquantized reference on the same batch. These differences have almost no noise, whereas a comparison of trained
models needs many seeds. The result is four tables:

    table       a row for each              columns
    loss        recipe, batch, seed         `loss`, `reference` (the unquantized loss), `increase` (their difference),
                                            in nats per token; `bits`: the mean bit width b_t of sampled weights
    gradients   recipe, batch, layer        errors of the weight's gradient (gradient_errors.py);
                                            layer `whole`: the gradient of all parameters
    operands    recipe, batch, seed,        `error` (relative), shares of `flushed`, `saturated` and `capped` values,
                layer, slot                 number of `lost` values; `share_i`: share of blocks for which a mixture
                                            chose its i-th quantizer, from 0. A mixture's `error` is that of its first
                                            quantizer, whatever it chose. Operands in high precision have no row
    sums        recipe, batch, seed,        `error` (relative) of the layer's forward product, if this accumulator
                layer, accumulator          computed its sums (sum_errors.py); only with `accumulators`

kernels/README.md (Statistics) defines flushed, saturated, capped and lost values.

By default the reference computes in the trial's dtype. Then all differences come from the recipe, and a recipe that
leaves all operands in high precision gives differences of exactly 0. With `reference="fp32"` the reference computes in
FP32, so the differences also contain the error of BF16; for the recipe bf16, they contain nothing else.

The batches of the split `train` are the ones that the trial would read after the checkpoint, and seed 0 gives the
random numbers of the trial's first rank. For a trial on one rank, the trial's own recipe therefore gives exactly the
losses of the micro-batches of its next step. Batches of the other splits are windows spread evenly over held-out text.
Every batch has the size of a micro-batch, because the scale of a quantized tensor may depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from fewbits.common.from_dict import one_of
from fewbits.experiments import devices
from fewbits.experiments.config import load_recipe
from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.data.load import load
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.optimization.precision import DTYPES
from fewbits.experiments.probes import sum_errors
from fewbits.experiments.probes.bench import backward, layer_labels, make_bench, mean_bits, operand_pairs
from fewbits.experiments.probes.config import SPLITS
from fewbits.experiments.probes.gradient_errors import GradientErrors
from fewbits.experiments.probes.tables import KEYS, WHOLE, Probe
from fewbits.experiments.setup import check
from fewbits.experiments.storage import checkpoints, run_folder
from fewbits.experiments.trial import ORDER, Runtime, Trial
from fewbits.models.quantize import Quantization
from fewbits.models.recipe import Recipe

_SUM = ["recipe", "batch", "seed", "layer", "block", "part", "accumulator"]
_OPERAND = [key for key in KEYS if key != "accumulator"]
_STATISTICS = ["error", "flushed", "saturated", "capped", "lost"]

ReportProgress = Callable[[int, int], None]  # called with the number of passes done and of all passes


def probe(
    run: Path,
    recipes: Sequence[str | Recipe],
    *,
    batches: int = 4,
    seeds: int = 1,
    step: int | None = None,
    split: str = "train",
    reference: str | None = None,
    accumulators: Sequence[str] = (),
    runtime: Runtime = Runtime(),  # noqa: B008, a frozen value
    report: ReportProgress = lambda done, total: None,
) -> Probe:
    """Compare recipes at a checkpoint; return the tables that the module's docstring describes.

    run: a run folder, or the folder of one of its checkpoints.
    recipes: names of recipes, or Recipe values; their names must differ.
    batches: the number of batches; each has the size of a micro-batch of the trial.
    seeds: the number of seeds for a recipe that uses random numbers, to separate its mean effect from the noise.
    step: the step of the checkpoint, if `run` is a run folder; None: the newest checkpoint.
    split: train, validation or ood.
    reference: the dtype of the unquantized model, one of bf16, fp16 and fp32; None: the trial's dtype.
    accumulators: names of accumulators whose sums are compared with exact ones, such as hopper-fp8.
    report: called after each forward and backward pass, with the number of passes done and the number of all passes.

    >>> result = probe(Path("runs/nemotron-nano-bf16-python-s0-1a2b3c4d"), ["bf16", "mor/block", "nvfp4"], seeds=4)
    >>> result.summary()
    """
    for name, count in (("batches", batches), ("seeds", seeds)):
        if count < 1:
            raise ValueError(f"{name} {count}: 1 or more is expected")
    one_of("split", split, SPLITS)
    sum_errors.check(accumulators)
    folder, checkpoint = _open_checkpoint(run, step)
    trial = run_folder.saved_trial(folder.path)
    checked = _checked_recipes(recipes, trial)
    precision = trial.training.dtype if reference is None else reference
    one_of("reference", precision, DTYPES)
    device = devices.choose(runtime).device
    for recipe in checked:
        devices.check_products(recipe, device)
    corpus = load(trial.data, Path(runtime.cache).expanduser() if runtime.cache else default_cache())
    corpus.check(checkpoint.state["data"]["fingerprint"], checkpoint.state["data"])
    bench = make_bench(trial, checkpoint, device, DTYPES[precision])

    passes = {recipe.name: seeds if bench.draws_noise(recipe) else 1 for recipe in checked}
    done, total = 0, batches * (1 + sum(passes.values()))
    losses: list[dict[str, Any]] = []
    gradients: list[dict[str, Any]] = []
    operands: list[dict[str, Any]] = []
    sums: list[dict[str, Any]] = []
    for batch, tokens in enumerate(_batches(corpus, trial, checkpoint, split, batches)):
        inputs, targets = (part.to(device) for part in tokens)
        exact_loss, exact = backward(bench.exact, inputs, targets)
        report(done := done + 1, total)
        for recipe in checked:
            errors = GradientErrors(exact, random=bench.draws_noise(recipe))
            for seed in range(passes[recipe.name]):
                model, quantization = bench.quantized(recipe, batch, seed)
                with sum_errors.measured(quantization, accumulators) as of_sums:
                    loss, quantized = backward(model, inputs, targets)
                errors.add(quantized)
                labels = {"recipe": recipe.name, "batch": batch, "seed": seed}
                row = {"loss": loss, "reference": exact_loss, "increase": loss - exact_loss}
                losses.append(labels | row | {"bits": mean_bits(quantization)})
                operands += [labels | row for row in _operand_rows(quantization)]
                sums += [labels | row for row in of_sums]
                report(done := done + 1, total)
            labels = {"recipe": recipe.name, "batch": batch}
            gradients += [labels | row for row in _gradient_rows(errors, exact, quantization)]
    return Probe(
        run=folder.path.resolve().name,
        step=checkpoint.step,
        split=split,
        batches=batches,
        sequences=trial.training.micro_batch,
        length=trial.training.length,
        dtype=trial.training.dtype,
        reference=precision,
        loss=pd.DataFrame(losses),
        gradients=pd.DataFrame(gradients).astype({"block": "Int64"}),
        operands=_with_columns(operands, [*_OPERAND, *_STATISTICS]),
        sums=_with_columns(sums, [*_SUM, "error"]),
    )


# ------------------------------------------------------------------------------------------------ inputs


def _open_checkpoint(path: Path, step: int | None) -> tuple[run_folder.RunFolder, checkpoints.Checkpoint]:
    """Return the run folder and the checkpoint that a path names.

    path: a run folder, whose checkpoint at `step` is returned (None: the newest), or the folder of a checkpoint, for
        which `step` must be None.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; a run folder or one of its checkpoints is expected")
    above = path.resolve().parent.parent
    if not path.name.startswith("step-") or not (above / "provenance.json").is_file():
        folder = run_folder.opened(path)
        return folder, folder.checkpoint(step)
    if step is not None:
        raise ValueError(
            f"step {step} of {path}: the path is already a checkpoint; name the run folder, or omit the step"
        )
    return run_folder.opened(above), checkpoints.load(path)


def _checked_recipes(recipes: Sequence[str | Recipe], trial: Trial) -> list[Recipe]:
    """Return the recipes, loading those given by name.

    Raise ValueError for equal names, or for a recipe that cannot be combined with the trial's other settings.
    """
    checked = [load_recipe(recipe) if isinstance(recipe, str) else recipe for recipe in recipes]
    names = [recipe.name for recipe in checked]
    if not checked or len(set(names)) < len(names):
        raise ValueError(
            f"recipes {', '.join(names) or '(none)'}: one or more recipes with different names are expected"
        )
    for recipe in checked:
        check(replace(trial, recipe=recipe))
    return checked


def _batches(
    corpus: Corpus, trial: Trial, checkpoint: checkpoints.Checkpoint, split: str, count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `count` batches of a split, each as inputs and targets, [training.micro_batch, training.length].

    Batches of the split `train` are those that `trial`, which saved the checkpoint, reads after it. For another split,
    the batches are windows spread evenly over the split.
    """
    t = trial.training
    if split != "train":
        inputs, targets = corpus.windows(split, count * t.micro_batch, t.length)
        yield from zip(inputs.split(t.micro_batch), targets.split(t.micro_batch), strict=True)
        return
    for batch in range(count):
        first = checkpoint.state["position"] + batch * t.micro_batch
        yield corpus.batch("train", first, t.micro_batch, t.length, trial.seed_for(ORDER))


# ------------------------------------------------------------------------------------------------ results


def _gradient_rows(
    errors: GradientErrors, names: Iterable[str], quantization: Quantization
) -> Iterator[dict[str, Any]]:
    """Yield a row for each quantized layer's weight gradient, and one for the gradient of all parameters.

    The columns of a row are `layer`, `block`, `part`, and the measures of the gradient (gradient_errors.py).
    errors: the errors of one recipe's gradients on one batch, over all seeds.
    names: the names of all parameters of the model.
    quantization: the Quantization of the model; its layers are the quantized layers.
    """
    for layer in quantization.layers:
        yield layer_labels(layer) | errors.measures([f"{layer.name}.weight"])
    yield {"layer": WHOLE, "block": None, "part": None} | errors.measures(list(names))


def _operand_rows(quantization: Quantization) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table `operands` for the forward and backward pass that the model has just computed.

    There is a row for each layer and quantized slot, without the columns `recipe`, `batch` and `seed`. If a tensor is
    quantized once for two slots, both slots get a row with the same statistics.
    """
    observer = quantization.observer
    assert observer is not None
    rows = {(row["layer"], row["slot"]): row for row in observer.rows(quantization.context.step, quantization.layers)}
    for layer in quantization.layers:
        for pair in operand_pairs(quantization, layer):
            for slot in pair.names:
                if row := rows.get((layer.name, pair.names[0] if pair.shared else slot)):
                    shares = {key: value for key, value in row.items() if key.startswith("share_")}
                    statistics = {key: row[key] for key in ("quantizer", *_STATISTICS)}
                    yield layer_labels(layer) | {"slot": slot} | statistics | shares


def _with_columns(rows: Sequence[Mapping[str, Any]], first: Sequence[str]) -> pd.DataFrame:
    """Return the rows as a table that begins with the columns `first`, which exist even if there are no rows."""
    frame = pd.DataFrame(rows)
    return frame.reindex(columns=[*first, *(column for column in frame if column not in first)])

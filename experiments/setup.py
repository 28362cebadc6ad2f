"""Check, before a trial starts, that its settings fit together: model and corpus, batch and ranks, recipe and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.data.tokenizing import saved_tokenizer
from fewbits.experiments.evaluation.loss import evaluated_windows
from fewbits.experiments.evaluation.tasks import check_tasks
from fewbits.experiments.optimization.schedules import phases
from fewbits.experiments.storage.results import read_text
from fewbits.experiments.trial import Trial
from fewbits.kernels.quantizer import Block
from fewbits.models.execution import check_tokens
from fewbits.models.hooks import quantizers_of
from fewbits.models.networks.registry import on_meta, with_vocab
from fewbits.models.observer import Observer
from fewbits.models.quantize import keep, quantize, rule_of
from fewbits.models.recipe import Slot
from fewbits.models.weights import BlockLinear, linear_layers


def corpus_model(trial: Trial, corpus: Corpus) -> Trial:
    """Return the trial with a vocabulary that is large enough for its data; raise ValueError if it is fixed."""
    if model := with_vocab(trial.model, corpus.vocab):
        return replace(trial, model=model)
    raise ValueError(f"model.vocab {trial.model.vocab}: the data have {corpus.vocab} tokens; set this number or more")


def check(trial: Trial, ranks: int = 1) -> None:
    """Raise ValueError if the trial's settings do not fit together on this number of ranks."""
    t = trial.training
    if t.batch % (t.micro_batch * ranks):
        raise ValueError(
            f"training.batch {t.batch}: {ranks} ranks of training.micro_batch {t.micro_batch} need a multiple of "
            f"{ranks * t.micro_batch}"
        )
    if t.compile and (ranks > 1 or t.recompute):
        raise ValueError("training.compile=true needs one rank and training.recompute=false")
    if t.compile and trial.model.experts:
        raise ValueError(f"training.compile=true: model {trial.model.name} has experts, whose tokens differ by step")
    if trial.model.positions != "none" and t.length > trial.model.context:
        raise ValueError(
            f"training.length {t.length}: model {trial.model.name} has {trial.model.context} positions (model.context)"
        )
    phases(trial.schedule, t.steps)
    trial.precision.check_ranks(ranks)
    if not 2.0**-126 <= trial.precision.loss_scale <= 2.0**126:
        raise ValueError(f"precision.loss_scale {trial.precision.loss_scale}: powers of two 2^-126 to 2^126 are valid")
    model = on_meta(trial.model)
    layers = list(linear_layers(model))  # before `quantize`, which replaces them in the model
    quantize(model, trial.recipe, observer=Observer(trial.observer))
    check_tokens(trial.recipe, t.micro_batch * t.length)
    for problem in coincidences(trial, layers):
        raise ValueError(problem)


def coincidences(trial: Trial, layers: Sequence[BlockLinear]) -> Iterator[str]:
    """Yield a message for each block of the recipe that covers a whole operand, and so acts like the block `tensor`."""
    recipe = trial.recipe
    kept = keep(recipe, layers, trial.model.layers)
    tokens = trial.training.micro_batch * trial.training.length
    seen: set[tuple[Any, ...]] = set()
    for layer in layers:
        if layer.name in kept:
            continue
        out, inner = layer.shape
        read = tokens * trial.model.active_experts // trial.model.experts if layer.is_expert else tokens  # on average
        shapes = {"x": (read, inner), "w": (out, inner), "dy": (read, out)}
        for name, slot in recipe.operands_by(rule_of(recipe, layer, trial.model.layers)).items():
            rows, cols = shape = shapes[name.partition(".")[2]]
            for block in _blocks(slot):
                if (shape, block, slot.axis) in seen or block in (Block(), Block(1, None)):
                    continue
                seen.add((shape, block, slot.axis))
                r, c = block.resolve((rows, cols), slot.axis)
                if r >= rows and c >= cols:
                    yield (
                        f"recipe {recipe.name} is not what its name says at this size: one {block} block covers all of "
                        f"{name} of {layer.name} ({rows}x{cols}), as block `tensor` does; use a wider model, more "
                        "tokens or smaller blocks"
                    )


def check_data(trial: Trial, corpus: Corpus) -> None:
    """Raise ValueError before training if the corpus is too small to train on or to evaluate."""
    t, e = trial.training, trial.evaluation
    fractions = any(0 < phase.until < 1 for phase in trial.data.phases)
    if fractions and trial.branch.parent is not None and not trial.is_probe:
        raise ValueError(
            "data.phases with branch.parent: fractions of the steps have no meaning for a branch: give the ends of "
            "phases as steps, counted from the start of the parent, in the parent and here"
        )
    empty = [str(folder.path) for count, folder in corpus.steps_of_phases(t.steps) if not count]
    if empty and trial.branch.parent is None:
        raise ValueError(
            f"data.phases: no step of {t.steps} reads {', '.join(empty)}: change `until` or training.steps"
        )
    for folder in corpus.folders:
        Corpus(corpus.kind, folder).batch("train", 0, 1, t.length, 0)
    for split, count in evaluated_windows(trial, corpus).items():
        try:
            corpus.windows(split, count, t.length)
        except ValueError as error:
            name = "ood_windows" if split == "ood" and e.ood_windows is not None else "windows"
            fitting = (corpus.tokens_in(split) - 1) // t.length
            way = f"set evaluation.{name}={fitting}" if fitting else "set a shorter training.length"
            raise ValueError(f"evaluation.{name}: {error} in split {split}: {way}, or use more data") from None
    check_evaluation(trial, corpus)


def check_evaluation(trial: Trial, corpus: Corpus) -> None:
    """Raise ValueError if the lm-eval tasks and texts that the trial requests could not be evaluated."""
    e = trial.evaluation
    texts = {path: read_text(Path(path)) for path in e.texts}
    if e.tasks or e.texts:
        if (tokenizer := saved_tokenizer(corpus.folder)) is None:
            raise ValueError(
                "evaluation.tasks and evaluation.texts need a tokenizer, but the tokenizer of "
                f"data.kind={corpus.kind} is unknown: use data with a known tokenizer, such as data=python or "
                "data=text, or remove the tasks and texts"
            )
        for path, text in texts.items():
            if tokenizer.encode([text])[0].size + (corpus.folder.meta.separator is not None) < 2:
                raise ValueError(f"evaluation.texts: {path} has no token to predict; use a longer text")
        if e.tasks:
            check_tasks(e.tasks, e.tasks_path, e.run_code)


def _blocks(slot: Slot) -> Iterator[Block]:
    """Yield the blocks of a slot's quantizers, except of quantizers without scales."""
    return (q.block for q in quantizers_of(slot.spec) if q.scaling != "none")

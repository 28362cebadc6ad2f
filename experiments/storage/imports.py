"""Write a published checkpoint as a finished run, whose only checkpoint is at step 0.

    RUNS/<slug>-<hash8>/  config.yaml  model.yaml  tokenizer.json  provenance.json  checkpoints/  result.json

So `fewbits probe`, `evaluate` and `export` open it like any run, and `branch.parent=RUN branch.step=0` branches from
it. Its config says which data and which batches probes read. model.yaml is a model for `model=PATH`. The id contains
the hash of the weights, and provenance.json those of the source's files. The folder appears by a rename when it is
complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from fewbits.common.atomic import folder_atomically, write_atomically, write_json
from fewbits.experiments.config import load_trial
from fewbits.experiments.data.config import DataConfig
from fewbits.experiments.data.corpus import Corpus, describe
from fewbits.experiments.data.load import KINDS, load
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.data.tokenizing import FILE, Bytes, saved_tokenizer
from fewbits.experiments.identity import imported_identity, machine, trial_id
from fewbits.experiments.setup import check, check_data
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.huggingface import bytes_tokenizer
from fewbits.experiments.storage.run_folder import HASH, RunFolder, existing, plain
from fewbits.experiments.trial import Trial
from fewbits.models.importing.packages import PREFIX, packaged_model
from fewbits.models.importing.published import Published
from fewbits.models.importing.sources import read_published

MODEL = "model.yaml"
LONGEST = 512  # tokens of a probe's sequence, unless `training.length` is set
_NOT_OVERRIDDEN = ("model", "branch", "runtime")


@dataclass(frozen=True)
class Imported:
    """An imported run. `new` is False if it was in the store already."""

    folder: RunFolder
    trial: Trial
    notes: tuple[str, ...]
    new: bool


def import_run(
    source: str,
    runs: Path,
    *,
    name: str | None = None,
    overrides: Sequence[str] = (),
    cache: str | Path | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Imported:
    """Import a published model into the store `runs`, unless it is there; raise ValueError if it is not ours.

    source: a Hugging Face folder, a GGUF file, or `package:smollm2`. name: the model's name; None: that of the source.
    overrides: config overrides for what probes and evaluations read, such as `data=text` or `training.length=1024`.
    report: called with a line before each long step.

    >>> imported = import_run("package:smollm2", Path("runs"))
    >>> probe(imported.folder.path, ["nvfp4"], batches=2)
    """
    published = read_published(source, name)
    trial = _trial(published, source, overrides)
    report("reading the data")
    corpus = load(trial.data, Path(cache).expanduser() if cache else default_cache())
    if corpus.vocab > trial.model.vocab:
        raise ValueError(
            f"{source}: its model has {trial.model.vocab} tokens, but the vocabulary of the data has {corpus.vocab}"
        )
    check(trial)
    check_data(trial, corpus)
    report("reading the weights")
    state = published.state()
    made_of = imported_identity(trial, corpus.fingerprint, weights_digest(state))
    run_id = trial_id(made_of)
    if (folder := existing(runs, run_id)) is not None:
        return Imported(folder, trial, published.notes, new=False)
    folder = RunFolder(runs / f"{trial.name}-{run_id[:HASH]}", run_id)
    facts = {"source": source, "files": published.digests(), "notes": list(published.notes)}
    provenance = {"identity": made_of, **machine(), "imported": facts, "data": describe(corpus), "parent": None}
    report(f"writing {folder.path}")
    runs.mkdir(parents=True, exist_ok=True)
    with folder_atomically(folder.path) as partial:
        _write(RunFolder(partial, run_id), trial, corpus, state, provenance)
    return Imported(folder, trial, published.notes, new=True)


def _trial(published: Published, source: str, overrides: Sequence[str]) -> Trial:
    """Return the trial of the imported run: the model of the source, unquantized, with the data that probes read."""
    for override in overrides:
        if (key := override.lstrip("+~").partition("=")[0]).partition(".")[0] in _NOT_OVERRIDDEN:
            raise ValueError(f"{key}: an imported run takes overrides of data, training, evaluation, recipe and seed")
    model = published.config
    defaults = [f"training.length={min(LONGEST, model.context)}", "training.micro_batch=2"]
    trial, _ = load_trial([*defaults, *overrides])
    data = trial.data
    if "tokenizer" in _takes(data) and not any(override.startswith("data.tokenizer=") for override in overrides):
        data = replace(data, tokenizer=_tokenizer(published, source))
    return replace(trial, model=model, data=data)


def _takes(data: DataConfig) -> Sequence[str]:
    return KINDS[data.kind].takes if data.kind in KINDS else ()


def _tokenizer(published: Published, source: str) -> str:
    """Return the spelling of the source's tokenizer."""
    path = published.tokenizer
    if path is None:
        raise ValueError(
            f"{source} has no tokenizer: add its {FILE}, or choose the data of its tokens, such as data=bin "
            "data.path=FOLDER, or another data.tokenizer"
        )
    if packaged_model(source) is not None:
        return f"{PREFIX}{source.removeprefix(PREFIX)}"
    if path.name == FILE and _is_of_bytes(path):
        return Bytes.spelling
    return f"file:{path.resolve()}"


def _is_of_bytes(path: Path) -> bool:
    """Tell whether a tokenizer.json is the one that `fewbits export` writes for bytes."""
    try:
        return bool(json.loads(path.read_text("utf-8")) == bytes_tokenizer())
    except ValueError:
        return False  # loading it raises the error


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a state_dict: of all names, shapes and values, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\0".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write(
    folder: RunFolder, trial: Trial, corpus: Corpus, state: Mapping[str, Tensor], provenance: Mapping[str, Any]
) -> None:
    """Write all files of the run; the result comes last, as in every run folder."""
    folder.begin(trial, provenance)
    model = yaml.safe_dump(plain(asdict(trial.model)), sort_keys=False, allow_unicode=True)
    write_atomically(folder.path / MODEL, model.encode())
    tokenizer = saved_tokenizer(corpus.folder)
    if tokenizer is not None:
        tokenizer.save(folder.path)
    # The optimizer has no state before the first update, and no data have been read.
    content = {
        "model": dict(state),
        "optimizer": {},
        "observer": {},
        "precision": {},
        "rng": torch.get_rng_state(),
        "step": 0,
        "position": 0,
        "origin": 0,
        "metrics": {},
        "numerics": [],
        "data": describe(corpus),
    }
    tensors, rest = checkpoints.flatten(content)
    checkpoints.save(folder.checkpoints, 0, tensors, rest)
    write_json(folder.path / "result.json", {"id": folder.id, "name": trial.name, "status": "done", "step": 0})

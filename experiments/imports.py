"""Write a published model into a store as a finished run, whose only checkpoint is at step 0.

    RUNS/<slug>-<hash8>/  config.yaml  model.yaml  tokenizer.json  provenance.json  checkpoints/  result.json

`fewbits probe`, `evaluate` and `export` open this run like any other run, and `branch.parent=RUN branch.step=0` starts
a branch from it. config.yaml has the settings of the data and batches that probes read, model.yaml is a model config
for `model=PATH`, and provenance.json has the hashes of the source's files. The trial's id depends on those of the
weights.
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
from fewbits.experiments.data.corpus import Corpus, describe
from fewbits.experiments.data.load import KINDS, load
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.data.tokenizing import FILE, Bytes, bytes_tokenizer, saved_tokenizer
from fewbits.experiments.environment import process_facts
from fewbits.experiments.identity import imported_identity, trial_id
from fewbits.experiments.setup import check, check_data
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.run_folder import HASH, RunFolder, existing, plain
from fewbits.experiments.trial import Trial
from fewbits.models.importing.layouts import Published
from fewbits.models.importing.sources import PREFIX, packaged_model, read_published

MODEL = "model.yaml"
LONGEST = 512  # default of training.length, the tokens of a probe's sequences; less if the model's context is shorter
_NOT_OVERRIDDEN = ("model", "branch", "runtime")  # config groups that an import does not accept as overrides


@dataclass(frozen=True)
class Imported:
    """An imported run. notes: sentences on how the loaded model differs from the published one."""

    folder: RunFolder
    trial: Trial
    notes: tuple[str, ...]
    new: bool  # False if the run was stored already


def import_run(
    source: str,
    runs: Path,
    *,
    name: str | None = None,
    overrides: Sequence[str] = (),
    cache: str | Path | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Imported:
    """Import a published model into the store `runs`; an equal run that is there already is returned unchanged.

    Raise ValueError if fewbits does not support the model.
    source: a Hugging Face folder, a GGUF file, or `package:smollm2`. name: of the model; None: the source's name.
    overrides: of the config of the data that probes and evaluations read, such as `training.length=1024`.
    cache: the folder of prepared data; None: the default one. report: called with a message before each long step.

    >>> imported = import_run("package:smollm2", Path("runs"))
    >>> probe(imported.folder.path, ["nvfp4"], batches=2)
    """
    published = read_published(source, name)
    trial = _trial(published, source, overrides)
    report("reading the data")
    corpus = load(trial.data, Path(cache).expanduser() if cache else default_cache())
    if corpus.vocab > trial.model.vocab:
        raise ValueError(
            f"{source}: the vocabulary of the data has {corpus.vocab} tokens, more than the model's "
            f"{trial.model.vocab}: choose other data or another data.tokenizer"
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
    provenance = {"identity": made_of, **process_facts(), "imported": facts, "data": describe(corpus), "parent": None}
    report(f"writing {folder.path}")
    runs.mkdir(parents=True, exist_ok=True)
    with folder_atomically(folder.path) as partial:
        _write(RunFolder(partial, run_id), trial, corpus, state, provenance)
    return Imported(folder, trial, published.notes, new=True)


def _trial(published: Published, source: str, overrides: Sequence[str]) -> Trial:
    """Return the trial of the imported run: the published model, with data by the default config and the overrides.

    The default tokenizer is the source's.
    """
    for override in overrides:
        if (key := override.lstrip("+~").partition("=")[0]).partition(".")[0] in _NOT_OVERRIDDEN:
            raise ValueError(
                f"{key}: valid overrides of an imported run are those of data, training, evaluation, recipe and seed"
            )
    model = published.config
    defaults = [f"training.length={min(LONGEST, model.context)}", "training.micro_batch=2"]
    trial, _ = load_trial([*defaults, *overrides])
    data = trial.data
    takes = KINDS[data.kind].takes if data.kind in KINDS else ()
    if "tokenizer" in takes and not any(override.startswith("data.tokenizer=") for override in overrides):
        data = replace(data, tokenizer=_tokenizer(published, source))
    return replace(trial, model=model, data=data)


def _tokenizer(published: Published, source: str) -> str:
    """Return the source's tokenizer in the form of `data.tokenizer`: `bytes`, `file:PATH` or `package:NAME`."""
    path = published.tokenizer
    if path is None:
        remedy = f"add its {FILE} to the folder, set data.tokenizer, or choose data of tokens (data=bin)"
        raise ValueError(f"{source} has no tokenizer: {remedy}")
    if packaged_model(source) is not None:
        return f"{PREFIX}{source.removeprefix(PREFIX)}"
    if path.name == FILE and _is_of_bytes(path):
        return Bytes.spelling
    return f"file:{path.resolve()}"


def _is_of_bytes(path: Path) -> bool:
    """Tell whether a tokenizer.json is the byte tokenizer, as `fewbits export` writes it."""
    try:
        return bool(json.loads(path.read_text("utf-8")) == bytes_tokenizer())
    except ValueError:
        return False  # not JSON: the error is raised later, when the tokenizer is loaded


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a state_dict: of all names, shapes, dtypes and values, sorted by name."""
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

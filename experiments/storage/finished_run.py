"""Open a finished run's model with the weights of a checkpoint, the recipe and the trial's noise; export the model.

The exported folder has configuration, weights and tokenizer, and Hugging Face's transformers can load it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fewbits.common.atomic import folder_atomically
from fewbits.experiments import devices
from fewbits.experiments.data.corpus import Corpus
from fewbits.experiments.data.load import load
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.data.tokenizing import FILE, Bytes, Tokenizer, bytes_tokenizer, saved_tokenizer
from fewbits.experiments.optimization.precision import DTYPES
from fewbits.experiments.storage import checkpoints
from fewbits.experiments.storage.run_folder import RunFolder, opened, saved_trial
from fewbits.experiments.trial import ROUNDING, Runtime, Trial
from fewbits.kernels.packed import Packed
from fewbits.models.importing.families import to_huggingface
from fewbits.models.importing.gguf import write_gguf
from fewbits.models.importing.packed_tensors import file_metadata, packed_weight, to_packed
from fewbits.models.importing.safetensors_files import SINGLE
from fewbits.models.networks.decoder import Decoder
from fewbits.models.quantize import Quantization, quantize

HUGGINGFACE, GGUF = "huggingface", "gguf"


@dataclass(frozen=True)
class FinishedRun:
    """A finished run at one of its checkpoints; checkpoint and corpus are read when they are first needed."""

    folder: RunFolder
    trial: Trial
    step: int
    cache: Path  # folder of corpora

    @staticmethod
    def open(path: Path, step: int | None = None, cache: str | Path | None = None) -> FinishedRun:
        """Open the run in the folder `path` at a step, by default the last one, for which the run must have ended."""
        folder, corpora = opened(path), Path(cache).expanduser() if cache else default_cache()
        if step is None:
            result = folder.result()
            if result is None:
                raise ValueError(
                    f"{path} has not ended: train it to its end, or choose one of its checkpoints by its step (option "
                    "--step, in Python and lm-eval step=N)"
                )
            step = int(result["step"])
        return FinishedRun(folder, saved_trial(path), step, corpora)

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name

    @cached_property
    def checkpoint(self) -> checkpoints.Checkpoint:
        return self.folder.checkpoint(self.step)

    @cached_property
    def corpus(self) -> Corpus:
        """The corpus of the run; raises ValueError if its data are not those that the checkpoint was trained on."""
        corpus, saved = load(self.trial.data, self.cache), self.checkpoint.state["data"]
        corpus.check(saved)
        return corpus

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run's data; raises ValueError if it is unknown."""
        if self.checkpoint.state["data"].get("tokenizer") == Bytes.spelling:
            return Bytes()
        tokenizer = saved_tokenizer(self.corpus.folder)
        if tokenizer is None:
            raise ValueError(
                f"{self.name} was trained on data.kind={self.trial.data.kind}, whose tokenizer is unknown; if "
                "data.path is a folder of your own tokens, add their tokenizer.json to it"
            )
        return tokenizer

    @property
    def separator(self) -> int | None:
        """The token between documents in the run's data; None if the data have no known separator."""
        return self.checkpoint.state["data"].get("separator")

    def model(self, runtime: Runtime) -> tuple[Decoder, Quantization]:
        """Return the model with the checkpoint's weights, and its quantization, as the trial itself evaluates them.

        Operands and noise are those of the update that follows the checkpoint: a recipe can change its operands during
        training, and the step seeds the noise.
        """
        device = devices.choose(runtime).device
        t, state = self.trial.training, self.checkpoint.state
        with torch.device(device):
            model = Decoder(self.trial.model, DTYPES[t.dtype])
        quantization = quantize(model, self.trial.recipe, seed=self.trial.seed_for(ROUNDING))
        model.load_state_dict(checkpoints.unflatten(self.checkpoint.tensors(device, under="model."), state["model"]))
        quantization.begin(state["origin"] + state["step"], progress=state["step"] / t.steps)
        return model, quantization

    def packed_weights(self) -> dict[str, Packed]:
        """Return the quantized weights as fprop reads them, by their names in the model's state_dict."""
        _, quantization = self.model(Runtime(device="cpu"))
        dtype, context = DTYPES[self.trial.training.dtype], quantization.context
        packed = {f"{layer.name}.weight": packed_weight(layer, context, dtype) for layer in quantization.layers}
        return {name: weight for name, weight in packed.items() if weight is not None}


def export_run(run: FinishedRun, folder: Path, format_: str = HUGGINGFACE) -> list[str]:
    """Write a run's model to `folder`, which must not exist; return messages on what the folder does not contain.

    Raise ValueError if transformers has no model that computes the same function, or the format cannot store the
    recipe's weights. format_: `huggingface` for the master weights in FP32, or one of packed_tensors.FORMATS for the
    weights as the forward product reads them, or `gguf`.
    """
    trial, sampler = run.trial, run.trial.recipe.sampler
    if sampler.kind != "none" and sampler.in_evaluation:
        raise ValueError(
            f"recipe {trial.recipe.name} evaluates with noise on its weights (sampler.in_evaluation), which "
            "transformers cannot do: only runs without this setting can be exported"
        )
    if folder.exists():
        raise ValueError(f"{folder} exists already: choose another folder with --out, or remove it")
    state = checkpoints.unflatten(run.checkpoint.tensors(under="model."), run.checkpoint.state["model"])
    packed = {} if format_ == HUGGINGFACE else run.packed_weights()
    if format_ in (HUGGINGFACE, GGUF):
        config, weights = to_huggingface(trial.model, state, run.separator)
        lines = [f"the recipe {trial.recipe.name} was not exported: transformers computes with unquantized operands"]
    else:
        config, weights, lines = to_packed(trial.model, state, packed, format_, run.separator)
    if packed:
        lines = [] if format_ == GGUF else lines
        lines.append(f"of the recipe {trial.recipe.name} only fprop.w was exported: inputs are not quantized")
    tokenizer = None
    try:
        tokenizer = run.tokenizer
    except ValueError as error:
        lines.append(f"no tokenizer was written: {error}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_atomically(folder) as partial:
        if format_ == GGUF:
            write_gguf(partial / "model.gguf", trial.model, state, packed)
        else:
            _write_json(partial / "config.json", config)
            tokens = {key: value for key, value in config.items() if key.endswith("_token_id")}
            _write_json(partial / "generation_config.json", tokens)
            metadata = file_metadata(format_, weights, config["dtype"])
            checkpoints.write_tensors(partial / SINGLE, weights, metadata)
        if tokenizer is not None:
            _write_tokenizer(partial, tokenizer, trial.model.context)
    return lines


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, length: int) -> None:
    if isinstance(tokenizer, Bytes):
        _write_json(folder / FILE, bytes_tokenizer())
    else:
        tokenizer.save(folder)
    content = json.loads((folder / FILE).read_text("utf-8"))
    names = {token["id"]: token["content"] for token in content["added_tokens"]}
    end = names[tokenizer.separator]  # the token between documents never occurs in text, so it is an added token
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, "eos_token": end}
    _write_json(folder / "tokenizer_config.json", facts | {"bos_token": end, "clean_up_tokenization_spaces": False})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")

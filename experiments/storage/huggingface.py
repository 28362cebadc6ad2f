"""Write a run's model as a folder that Hugging Face's transformers loads: configuration, weights and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from fewbits.common.atomic import folder_atomically
from fewbits.experiments.data.tokenizing import FILE, Bytes, Tokenizer
from fewbits.experiments.evaluation.finished_run import FinishedRun
from fewbits.experiments.storage.checkpoints import unflatten
from fewbits.models.networks.huggingface import to_huggingface


def export_huggingface(run: FinishedRun, folder: Path) -> list[str]:
    """Write a run's model to `folder`, which must not exist; return messages on what the folder does not contain.

    Raise ValueError if transformers has no model that computes the same function.
    """
    trial, sampler = run.trial, run.trial.recipe.sampler
    if sampler.kind != "none" and sampler.in_evaluation:
        raise ValueError(
            f"recipe {trial.recipe.name} evaluates with noise on its weights (sampler.in_evaluation), which "
            "transformers cannot do: only runs without this setting can be exported"
        )
    if folder.exists():
        raise ValueError(f"{folder} exists already: choose another folder with --out, or remove it")
    state = unflatten(run.checkpoint.tensors(under="model."), run.checkpoint.state["model"])
    config, weights = to_huggingface(trial.model, state, run.separator)
    lines = [f"the recipe {trial.recipe.name} was not exported: transformers computes with unquantized operands"]
    try:
        tokenizer: Tokenizer | None = run.tokenizer.corpus
    except ValueError as error:
        tokenizer = None
        lines.append(f"no tokenizer was written: {error}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder_atomically(folder) as partial:
        _write_json(partial / "config.json", config)
        _write_json(partial / "generation_config.json", {k: v for k, v in config.items() if k.endswith("_token_id")})
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        if tokenizer is not None:
            _write_tokenizer(partial, tokenizer, trial.model.context)
    return lines


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json. length: the model's context in tokens."""
    if isinstance(tokenizer, Bytes):
        _write_json(folder / FILE, bytes_tokenizer())
    else:
        tokenizer.save(folder)
    content = json.loads((folder / FILE).read_text("utf-8"))
    names = {token["id"]: token["content"] for token in content["added_tokens"]}
    end = names[tokenizer.separator]  # the token between documents never occurs in text, so it is an added token
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length, "eos_token": end}
    _write_json(folder / "tokenizer_config.json", facts | {"bos_token": end, "clean_up_tokenization_spaces": False})


def bytes_tokenizer() -> dict[str, Any]:
    """Return the content of tokenizer.json for the byte tokenizer: byte-level BPE without merges.

    The id of a token is the value of its byte.
    """
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": Bytes.separator, "content": _spelling(Bytes.separator), "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | flags],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {_spelling(byte): byte for byte in range(Bytes.vocab)},
            "merges": [],
        },
    }


def _spelling(byte: int) -> str:
    """Return the character by which byte-level BPE writes a byte.

    It is the byte's own Latin-1 character if that is visible, else a character from U+0100 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in visible:
        return chr(byte)
    return chr(0x100 + [other for other in range(0x100) if other not in visible].index(byte))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")

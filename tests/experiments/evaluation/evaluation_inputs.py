"""Models with known predictions, a tokenizer of bytes, corpora and lm-eval tasks, for tests of evaluation."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fewbits.models.networks.decoder import Decoder, DecoderConfig
from fewbits.models.networks.registry import build


class LanguageModel(nn.Module):
    """The base class of test models: it computes the loss from logits[B, T, V], which `forward` returns."""

    def loss(self, tokens: Tensor, targets: Tensor, reduction: Literal["mean", "none"] = "mean") -> Tensor:
        logits = self(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


class Bigram(LanguageModel):
    """A model whose logits for the token after token t are row t of a table."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table.double())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


def successor(vocab: int = 256) -> Bigram:
    """Return a model for which t + 1 is the likeliest token after t (0 after the last); others are equally likely."""
    return Bigram(3.0 * torch.eye(vocab).roll(1, dims=1))


class Recurrent(LanguageModel):
    """A model whose predictions depend on all earlier tokens; in float64, so the batch size hardly changes them."""

    def __init__(self, vocab: int = 256, width: int = 12) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embedding = nn.Embedding(vocab, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.memory(self.embedding(tokens))[0])


def decoder() -> Decoder:
    """Return a tiny model of our own class Decoder."""
    config = DecoderConfig("tiny", vocab=256, width=16, layers=1, heads=2, kv_heads=2, head_dim=8, ffn=32, context=64)
    return build(config, seed=0, compute_dtype=torch.float32)


class Text:
    """A corpus of documents (lists of tokens) by split; windows are consecutive parts of the joined documents."""

    def __init__(self, **splits: Sequence[Sequence[int]]) -> None:
        self.splits = {
            split: [np.array(tokens, dtype=np.uint16) for tokens in texts] for split, texts in splits.items()
        }

    def documents(self, split: str) -> Iterator[np.ndarray[Any, Any]]:
        return iter(self.splits[split])

    def windows(self, split: str, count: int, length: int) -> tuple[Tensor, Tensor]:
        tokens = torch.from_numpy(np.concatenate(self.splits[split]).astype(np.int64))
        starts = torch.arange(count)[:, None] * length
        index = starts + torch.arange(length)
        return tokens[index], tokens[index + 1]


def toy_tasks(folder: Path) -> Path:
    """Write an lm-eval task `toy` of three questions, and a copy `toy_code` that runs code; return the folder."""
    folder.mkdir(parents=True)
    questions = [{"text": "import ", "choices": ["os", "q#"], "answer": answer} for answer in (0, 1, 0)]
    (folder / "toy.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (folder / "toy.yaml").write_text(
        f"""task: toy
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "toy.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: text
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    (folder / "toy_code.yaml").write_text((folder / "toy.yaml").read_text().replace("toy\n", "toy_code\n", 1))
    with (folder / "toy_code.yaml").open("a") as file:
        file.write("unsafe_code: true\n")
    return folder

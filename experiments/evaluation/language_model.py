"""Present fewbits' models to lm-eval, which has to be installed (extra `eval`) before this module can be imported.

lm-eval's command line and Python interface know finished runs as its model `fewbits`:

    lm_eval run --model fewbits --model_args run=1a2b3c4d --tasks piqa

lm-eval after 0.4.13 finds this module by itself (entry point `lm_eval.models`). With earlier versions, use
`python -m fewbits.lm_eval` in place of `lm_eval`, or import this module before an evaluation.

Every request is scored in windows: the tokens that the model reads, at most `length` of them, and targets for its last
positions, whose log-likelihood is requested. Windows are sorted by length and padded on the right. Padding does not
affect a causal model, but it affects quantizers: a scale of a whole tensor depends on all texts of the batch and on the
padding (not with batch=1). The composition of the batches depends only on the requests, so results repeat exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows
from torch import Tensor

from fewbits.common.store_folder import store_folder
from fewbits.experiments.data.tokenizing import Tokenizer
from fewbits.experiments.evaluation.loss import Model, check_count, evaluating
from fewbits.experiments.storage.finished_run import FinishedRun
from fewbits.experiments.storage.run_folder import HASH, find_run
from fewbits.experiments.trial import Runtime
from fewbits.models.quantize import unquantized as without_recipe

BATCH = 16  # used if lm-eval's --batch_size is not a number, as in `--batch_size auto`


class Window(NamedTuple):
    """The tokens that the model reads, and the targets: the tokens that it should predict at the last positions."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass
class Answer:
    """A text that is being generated."""

    tokens: list[int]  # the prompt's tokens, then the generated tokens
    prompt: int  # number of tokens of the prompt
    limit: int  # number of tokens to generate at most
    stops: list[str]  # strings that end the text


class FewbitsLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """An adapter that presents one of fewbits' models to lm-eval.

    length: number of tokens of the longest input; of a longer context, only the last tokens are read.
    end: the token between documents, which is put before a text without context and ends generated texts. None: a line
        break is put there, and only stop strings and limits end generated texts.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer, *, length: int, batch: int = 16, end: int | None = None
    ) -> None:
        super().__init__()
        check_count("length", length)
        check_count("batch", batch)
        self._model, self._tokenizer, self._length, self._batch, self._end = model, tokenizer, length, batch, end
        self._prefix = self.tok_encode("\n")[-1] if end is None else end

    @property
    def eot_token_id(self) -> int:
        return self._prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return list(self._tokenizer.encode([string])[0].tolist())

    # The interface that lm-eval calls

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood given its context, and whether greedy decoding would give it."""
        pairs = [request.args for request in requests]
        return self._loglikelihood_tokens([(pair, *self._encode(*pair)) for pair in pairs])

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._totals([self._windows(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each request's whole text; each token of the text is predicted once."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        return [total for total, _ in self._totals([self._rolling([self._prefix], text) for text in texts])]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return each request's greedily generated text, without the stop string that ended it.

        For each token, the model reads the last `length` tokens in one forward pass: it has no key-value cache.
        """
        answers = [self._start(*request.args) for request in requests]
        order = sorted(range(len(answers)), key=lambda i: (-len(answers[i].tokens), i))
        texts = [""] * len(answers)
        with evaluating(self._model) as device:
            for start in range(0, len(order), self._batch):
                active = order[start : start + self._batch]
                while active := [i for i in active if len(answers[i].tokens) - answers[i].prompt < answers[i].limit]:
                    windows = [tuple(answers[i].tokens[-self._length :]) for i in active]
                    going = []
                    for i, logits in zip(active, self._logits(windows, device), strict=True):
                        texts[i], done = self._extend(answers[i], int(logits[-1].argmax()))
                        going += [] if done else [i]
                    active = going
        return texts

    # Turn text into windows

    def _encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of both; as in lm-eval, the context's trailing spaces are moved to the continuation."""
        if not context:
            return [self._prefix], self.tok_encode(continuation)
        before, after = self._encode_pair(context, continuation)
        return before or [self._prefix], after

    def _windows(self, context: list[int], continuation: list[int]) -> list[Window]:
        """Return one window with as much context as fits, or several windows if the continuation alone is too long."""
        if not continuation or len(continuation) > self._length:
            return self._rolling(context, continuation)
        return [Window(tuple((context + continuation)[-self._length - 1 : -1]), tuple(continuation))]

    def _rolling(self, context: list[int], text: list[int]) -> list[Window]:
        """Return lm-eval's windows over a text, which together predict each token once, the first from the context."""
        pairs = get_rolling_token_windows(text, context[-1], max_seq_len=self._length, context_len=1)
        return [Window(tuple(inputs), tuple(targets)) for inputs, targets in pairs]

    def _start(self, context: str, settings: dict[str, Any]) -> Answer:
        wanted = normalize_gen_kwargs(settings)
        if wanted["do_sample"]:
            raise ValueError(f"generation settings {settings}: only greedy decoding is supported (do_sample: false)")
        tokens = self.tok_encode(context) or [self._prefix]
        return Answer(tokens, len(tokens), wanted["max_gen_toks"], [stop for stop in wanted["until"] if stop])

    def _extend(self, answer: Answer, token: int) -> tuple[str, bool]:
        """Add a token to the answer; return the generated text, cut before a stop string, and whether it ends."""
        if token != self._end:
            answer.tokens.append(token)
        text = self._tokenizer.decode(answer.tokens[answer.prompt :])
        stops = [at for stop in answer.stops if (at := text.find(stop)) >= 0]
        return text[: min(stops, default=len(text))], token == self._end or bool(stops)

    # Compute log-likelihoods of windows

    def _totals(self, texts: Sequence[list[Window]]) -> list[tuple[float, bool]]:
        scored = iter(self._score_windows([window for windows in texts for window in windows]))
        totals = []
        for windows in texts:
            parts = [next(scored) for _ in windows]
            totals.append((sum(total for total, _ in parts), all(greedy for _, greedy in parts)))
        return totals

    def _score_windows(self, windows: Sequence[Window]) -> list[tuple[float, bool]]:
        """Return, by window, the log-likelihood of its targets, and whether greedy decoding would give them.

        Windows with equal inputs share a forward pass: the choices of a question often differ only in the last token.
        """
        readers: dict[tuple[int, ...], list[int]] = {}
        for i, window in enumerate(windows):
            readers.setdefault(window.inputs, []).append(i)
        order = sorted(readers, key=lambda inputs: (-len(inputs), inputs))
        scores = [(0.0, True)] * len(windows)
        with evaluating(self._model) as device:
            for start in range(0, len(order), self._batch):
                batch = order[start : start + self._batch]
                for inputs, logits in zip(batch, self._logits(batch, device), strict=True):
                    for reader in readers[inputs]:
                        scores[reader] = _score(logits, windows[reader].targets)
        return scores

    def _logits(self, batch: Sequence[tuple[int, ...]], device: torch.device) -> Iterator[Tensor]:
        """Return the logits of each input, [tokens, V]; shorter inputs are padded by repeating their own tokens."""
        longest = max(map(len, batch))
        rows = [(inputs * -(-longest // len(inputs)))[:longest] for inputs in batch]
        logits = self._model(torch.tensor(rows, device=device))
        return (row[: len(inputs)] for row, inputs in zip(logits, batch, strict=True))


def _score(logits: Tensor, targets: tuple[int, ...]) -> tuple[float, bool]:
    """Return the targets' log-likelihood, summed in float64, and whether greedy decoding would give the targets."""
    last = logits[-len(targets) :]
    last = last.to(torch.promote_types(last.dtype, torch.float32))
    wanted = torch.tensor(targets, device=last.device)
    likelihoods = last.log_softmax(-1).gather(1, wanted[:, None])
    return float(likelihoods.double().sum()), bool((last.argmax(-1) == wanted).all())


@register_model("fewbits")
class FewbitsRun(FewbitsLM):
    """The model of a finished run, for lm-eval.

    run: the run's folder, or its name or hash in the store `runs`. step: step of the checkpoint; None: the last step.
    unquantized: compute with all operands in the compute dtype, not quantized by the recipe.
    max_length: number of tokens of the longest input; None: the length of the trial's sequences.
    """

    def __init__(
        self,
        run: str | int,
        runs: str = "runs",
        *,
        step: int | None = None,
        unquantized: bool = False,
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        threads: int = 1,
        cache: str | None = None,
    ) -> None:
        opened = FinishedRun.open(find_run(_name(run), store_folder(runs)), step, cache)
        context = opened.trial.model.context if opened.trial.model.positions != "none" else None
        length = opened.trial.training.length if max_length is None else max_length
        if context is not None and length > context:
            raise ValueError(f"max_length={length}: the model of {opened.name} has only {context} positions")
        kind = "cpu" if device == "cpu" else "auto"  # lm-eval requests cuda even where there is no GPU
        model, quantization = opened.model(Runtime(device=kind, threads=threads, cache=cache))
        self._operands = ExitStack()
        if unquantized:
            self._operands.enter_context(without_recipe(quantization))
        batch = int(str(batch_size)) if str(batch_size).isdecimal() else BATCH
        super().__init__(model, opened.tokenizer, length=length, batch=batch, end=opened.separator)
        self._info = {"fewbits_run": opened.name, "fewbits_step": opened.step, "fewbits_unquantized": unquantized}

    def get_model_info(self) -> dict[str, Any]:
        """Return the run's name and step, and `unquantized`, for lm-eval to add to its file of results."""
        return self._info


def _name(run: object) -> str:
    """Return lm-eval's model argument `run`, a run's folder, name or hash, as text.

    lm-eval converts a hash of digits to an int, and one of digits and a single e to a float, which cannot be restored.
    """
    if isinstance(run, int):
        return f"{run:0{HASH}d}"
    if not isinstance(run, str):
        raise ValueError(f"run={run!r}: lm-eval reads this hash as a number; name the run by its folder")
    return run

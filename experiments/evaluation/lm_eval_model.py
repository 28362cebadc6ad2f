"""Register finished runs with lm-eval as its model `fewbits`, for lm-eval's command line and Python interface.

    lm_eval run --model fewbits --model_args run=1a2b3c4d --tasks piqa

lm-eval after 0.4.13 finds this module by itself (entry point `lm_eval.models`). With earlier versions, use
`python -m fewbits.lm_eval` in place of `lm_eval`, or import this module before an evaluation.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from lm_eval.api.registry import register_model

from fewbits.common.store_folder import store_folder
from fewbits.experiments.evaluation.finished_run import FinishedRun
from fewbits.experiments.evaluation.language_model import FewbitsLM
from fewbits.experiments.storage.run_folder import HASH, find_run
from fewbits.experiments.trial import Runtime
from fewbits.models.quantize import unquantized as without_recipe

BATCH = 16  # used if lm-eval's --batch_size is not a number, as in `--batch_size auto`


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
            raise ValueError(
                f"max_length={length}: the model of {opened.name} has only {context} positions; set max_length to this "
                "number or less"
            )
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

    lm-eval converts a hash that consists of digits to an int, and one of digits and a single e to a float. For an int,
    return the hash, with its leading zeros. For a float, raise ValueError, because the hash cannot be restored.
    """
    if isinstance(run, int):
        return f"{run:0{HASH}d}"
    if not isinstance(run, str):
        raise ValueError(f"run={run!r}: lm-eval reads this hash as a number; name the run by its folder")
    return run

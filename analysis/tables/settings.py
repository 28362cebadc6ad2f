"""Describe settings for tables: our trials' hyper-parameters, read from their configs, beside the paper's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fewbits.analysis.engine.data import NotPlanned
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.places import ANYWHERE, Where, not_planned, trial_ids
from fewbits.analysis.report.items import Setting
from fewbits.analysis.views.numbers import number
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.trial import Trial
from fewbits.models.networks.registry import parameters
from fewbits.sweeps.planning.cost import tokens_of, work_of


@dataclass(frozen=True)
class Lineage:
    """The trials that lead to a result: the trunks, if there are any, then the arm's own trial."""

    trials: tuple[Trial, ...]

    @property
    def arm(self) -> Trial:
        return self.trials[-1]

    @staticmethod
    def of(results: Results, trial: str) -> Lineage:
        """Return the lineage of the trial with this id."""
        planned = results.plan.trials[trial]
        trials = [planned.trial]
        while planned.parent is not None:
            planned = results.plan.trials[planned.parent]
            trials.append(planned.trial)
        return Lineage(tuple(reversed(trials)))


Describe = Callable[[Lineage], str]


def setting(
    results: Results, arm: str, describe: Describe, where: Where = ANYWHERE, *, assumed: bool = False
) -> Setting | NotPlanned:
    """Return a setting of the arm, from the trial of its first seed. assumed: the paper does not state the setting."""
    ids = list(trial_ids(results, arm, where).values())
    if not ids:
        return not_planned(results)
    return Setting(describe(Lineage.of(results, ids[0])), tuple(ids), assumed)


def model(line: Lineage) -> str:
    """Return the name and size of the model."""
    return f"{line.arm.model.name}, {parameters(line.arm.model) / 1e6:,.1f} M parameters"


def flops(line: Lineage) -> str:
    """Return the floating-point operations of the arm and its trunks."""
    return number(float(f"{sum(map(work_of, line.trials)):.2g}"))


def _schedule(line: Lineage) -> str:
    return ", then ".join(f"{t.schedule.kind} for {t.training.steps:,} steps" for t in line.trials)


def _warmup(line: Lineage) -> str:
    first = line.trials[0]
    steps = first.schedule.warmup_steps or round(first.schedule.warmup_fraction * first.training.steps)
    return f"{steps:,} steps"


def _final_rate(line: Lineage) -> str:
    arm = line.arm
    return f"{arm.optimizer.lr * factor(arm.schedule, arm.training.steps - 1, arm.training.steps):.2g}"


def _optimizer(line: Lineage) -> str:
    o = line.arm.optimizer
    return f"{o.kind}, β {o.beta1:g} and {o.beta2:g}, weight decay {o.weight_decay:g}, gradients clipped at {o.clip:g}"


# Settings by the id of the row in a paper's table.
SETTINGS: dict[str, Describe] = {
    "data": lambda line: f"{line.arm.data.kind}, {line.arm.data.tokenizer}",
    "tokens": lambda line: number(sum(map(tokens_of, line.trials))),
    "schedule": _schedule,
    "peak": lambda line: f"{max(t.optimizer.lr for t in line.trials):.2g}",
    "final": _final_rate,
    "batch": lambda line: f"{line.arm.training.batch:,}",
}
# Settings that papers do not state, by the title of our row.
UNSTATED: dict[str, Describe] = {
    "Sequence": lambda line: f"{line.arm.training.length:,} tokens",
    "Warm-up": _warmup,
    "Optimizer": _optimizer,
}

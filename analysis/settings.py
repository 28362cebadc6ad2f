"""Tables of settings: a paper's hyper-parameters beside those of our trials, read from the trials' own configs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fewbits.analysis.arms import ANYWHERE, Where, ids
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.results import NotRun, Setting
from fewbits.analysis.show.markup import number
from fewbits.experiments.optimization.schedules import factor
from fewbits.experiments.trial import Trial
from fewbits.models.networks.registry import parameters
from fewbits.sweeps.planning.cost import tokens_of, work_of


@dataclass(frozen=True)
class Line:
    """The trials that lead to a result: a trunk, if there is one, and the arm."""

    trials: tuple[Trial, ...]

    @property
    def arm(self) -> Trial:
        return self.trials[-1]

    @staticmethod
    def of(results: Results, name: str) -> Line:
        found, at = [], results.plan.trials[name]
        found.append(at.trial)
        while at.parent is not None:
            at = results.plan.trials[at.parent]
            found.append(at.trial)
        return Line(tuple(reversed(found)))


Describe = Callable[[Line], str]


def setting(
    results: Results, arm: str, describe: Describe, where: Where = ANYWHERE, *, assumed: bool = False
) -> Setting | NotRun:
    """Of the arm's first seed. assumed: the paper does not say it."""
    found = list(ids(results, arm, where).values())
    if not found:
        return NotRun(results.scale_name)
    return Setting(describe(Line.of(results, found[0])), tuple(found), assumed)


def model(line: Line) -> str:
    return f"{line.arm.model.name}, {parameters(line.arm.model) / 1e6:,.1f} M parameters"


def flops(line: Line) -> str:
    return number(float(f"{sum(map(work_of, line.trials)):.2g}"))


def _schedule(line: Line) -> str:
    return ", then ".join(f"{t.schedule.kind} for {t.training.steps:,} steps" for t in line.trials)


def _warmup(line: Line) -> str:
    first = line.trials[0]
    steps = first.schedule.warmup_steps or round(first.schedule.warmup_fraction * first.training.steps)
    return f"{steps:,} steps"


def _final(line: Line) -> str:
    arm = line.arm
    return f"{arm.optimizer.lr * factor(arm.schedule, arm.training.steps - 1, arm.training.steps):.2g}"


def _optimizer(line: Line) -> str:
    o = line.arm.optimizer
    return f"{o.kind}, β {o.beta1:g} and {o.beta2:g}, weight decay {o.weight_decay:g}, gradients clipped at {o.clip:g}"


SETTINGS: dict[str, Describe] = {  # by the id of a paper's row
    "data": lambda line: f"{line.arm.data.kind}, {line.arm.data.tokenizer}",
    "tokens": lambda line: number(sum(map(tokens_of, line.trials))),
    "schedule": _schedule,
    "peak": lambda line: f"{max(t.optimizer.lr for t in line.trials):.2g}",
    "final": _final,
    "batch": lambda line: f"{line.arm.training.batch:,}",
}
SILENT: dict[str, Describe] = {  # what else a training run needs to be known
    "Sequence": lambda line: f"{line.arm.training.length:,} tokens",
    "Warm-up": _warmup,
    "Optimizer": _optimizer,
}

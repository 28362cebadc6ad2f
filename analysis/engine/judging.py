"""Judge a study: data of every claim and control, findings, and verdicts that are corrected for each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fewbits.analysis.engine.amounts import amount
from fewbits.analysis.engine.arms import arm_table
from fewbits.analysis.engine.claims import Claim, ControlClaim, comparisons, load_claims
from fewbits.analysis.engine.data import Measured, NotPlanned
from fewbits.analysis.engine.findings import ControlResult, Finding, Verdict
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.hooks import hooks_of
from fewbits.analysis.engine.loading import load_hooks
from fewbits.analysis.engine.pairs import Numbers, built_in, data_of
from fewbits.analysis.engine.seeds import shaping
from fewbits.analysis.engine.tests import judge, judge_exact
from fewbits.analysis.engine.verdicts import Evidence, conclude
from fewbits.sweeps.planning.cost import parameters_of, tokens_of

COVERED = 0.5  # of the parameters and of the tokens at which the paper saw an outcome: as many reach as far


def judge_study(study: str, results: Results) -> dict[str, Verdict]:
    """Return the verdict of every claim, in the order of the data file."""
    load_hooks(study)
    return conclude({claim.id: evidence_of(study, claim, results) for claim in load_claims(study).claims})


def evidence_of(study: str, claim: Claim, results: Results) -> Evidence:
    findings = find(study, claim, results)
    trials = tuple(dict.fromkeys(trial for one in findings for trial in one.trials))
    training = training_of(results, trials)
    controls = [load_claims(study).control(name) for name in claim.control]
    return Evidence(
        claim,
        findings,
        tuple(ControlResult(one.id, one.title, find(study, one, results)) for one in controls),
        covered(claim, training),
        str(training) if training else "",
        (*((claim.caveat,) if claim.caveat else ()), *_shaped(study, results, trials)),
    )


def _shaped(study: str, results: Results, trials: Iterable[str]) -> tuple[str, ...]:
    """Name the seeds behind a verdict that shaped its design: what they show again is no evidence."""
    chosen = set(trials)
    seeds = sorted({member.cell.seed for member in results.members if member.id in chosen})
    found = shaping(study, results.scale_name, seeds)
    return tuple(f"seed {seed} shaped this design ({by}) and should not judge it" for seed, by in found.items())


def find(study: str, claim: Claim | ControlClaim, results: Results) -> tuple[Finding, ...]:
    """Return the findings of all parts of a claim or a control."""
    name = f"findings {study} {claim.id}"
    return results.remembered(name, lambda: tuple(_findings(study, claim, results)))


def _findings(study: str, claim: Claim | ControlClaim, results: Results) -> Iterable[Finding]:
    measured: Mapping[str, Measured] | None = None
    for comparison in comparisons(claim, arm_table(study)):
        if comparison.test == "exact":
            yield from (judge_exact(name, one) for name, one in hooks_of(study).exact[claim.id]().items())
        elif comparison.part.out_of_reach:
            yield judge(comparison, NotPlanned(""))
        elif comparison.part.data:
            if measured is None:
                measured = hooks_of(study).measures[claim.id](results)
            yield judge(comparison, measured[comparison.part.data])
        else:
            yield judge(comparison, data_of(results, comparison, lambda of, name: resolve(study, of, name)))


def resolve(study: str, results: Results, name: str) -> Numbers:
    """Return a metric by name: the study's hooks come first."""
    hook = hooks_of(study).metrics.get(name)
    if hook is None:
        return built_in(results, name)
    found = results.remembered(f"metric {study} {name}", lambda: hook.compute(results))
    return Numbers(name, found, hook.bounds)


# -------------------------------------------------------------------------------- reach


@dataclass(frozen=True)
class Training:
    """How much was trained behind a verdict."""

    parameters: tuple[int, ...]  # of each size of model
    tokens: int  # of the longest line of training, from scratch
    quantized: float  # the greatest share of a line's tokens that an arm trained itself, after its trunk

    def __str__(self) -> str:
        sizes = " and ".join(dict.fromkeys(map(amount, self.parameters)))
        return f"{sizes} parameters, {amount(self.tokens)} tokens"


def training_of(results: Results, trials: Iterable[str]) -> Training | None:
    """Return what these trials trained; None of no trial."""
    planned = results.plan.trials
    chosen = [trial for trial in dict.fromkeys(trials) if trial in planned]
    if not chosen:
        return None
    lines = [
        (planned[trial].earlier_tokens + tokens_of(planned[trial].trial), tokens_of(planned[trial].trial))
        for trial in chosen
    ]
    return Training(
        tuple(sorted({parameters_of(planned[trial].trial.model) for trial in chosen})),
        max(whole for whole, _ in lines),
        max((own / whole for whole, own in lines if whole), default=0.0),
    )


def covered(claim: Claim, training: Training | None) -> bool:
    """Return whether the runs reach as far as the claim's absence would mean something."""
    if claim.stated is None:
        return True
    if training is None:
        return False
    sizes = min(training.parameters) >= COVERED * claim.stated.parameters
    return sizes and training.tokens >= COVERED * claim.stated.tokens

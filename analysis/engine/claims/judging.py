"""Compute the verdicts of a study: collect the data of every claim and control, test them, and combine the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fewbits.analysis.engine.claims.findings import ControlResult, Finding, Status, Verdict
from fewbits.analysis.engine.claims.formulas import evaluate
from fewbits.analysis.engine.claims.hooks import hooks_of, load_hooks
from fewbits.analysis.engine.claims.pairs import Numbers, built_in, data_of
from fewbits.analysis.engine.claims.probed import at_probes
from fewbits.analysis.engine.claims.schema import Claim, ControlClaim, Part, StudyClaims, comparisons, load_claims
from fewbits.analysis.engine.claims.seeds import pilots_of
from fewbits.analysis.engine.claims.tests import judge, judge_exact
from fewbits.analysis.engine.claims.verdicts import Evidence, conclude
from fewbits.analysis.engine.results.amounts import amount
from fewbits.analysis.engine.results.arms import arm_table
from fewbits.analysis.engine.results.data import Exact, Measured, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import Metric, combined
from fewbits.common.wording import enumeration
from fewbits.sweeps.planning.cost import parameters_of, tokens_of

# Runs can contradict a claim if they have at least this fraction of the parameters and of the tokens in `Claim.stated`.
COVERED = 0.5


def judge_study(study: str, results: Results) -> dict[str, Verdict]:
    """Return the verdicts of a study's claims by claim id, in the order of analysis/studies/STUDY/claims.yaml."""
    load_hooks(study)
    return judge_claims(load_claims(study), results)


def judge_claims(of: StudyClaims, results: Results) -> dict[str, Verdict]:
    """Return the verdicts of these claims by claim id; all their p values are corrected together for multiple tests."""
    return conclude({claim.id: evidence_of(of.study, claim, results, of) for claim in of.claims})


def evidence_of(study: str, claim: Claim, results: Results, of: StudyClaims | None = None) -> Evidence:
    """Return the findings on a claim and its controls, with the size of the claim's runs and notes for the reader.

    The notes are the claim's caveat, and warnings about seeds that no claim should use. of: the collection that
    contains the claim and its controls; None for the study's own file of claims.
    """
    findings, whole = find(study, claim, results), of or load_claims(study)
    if reason := whole.unfit_at(results.scale_name, claim):
        findings = tuple(
            finding if finding.status in (Status.OUT_OF_REACH, Status.NOT_RUN) else _unjudged(finding, reason)
            for finding in findings
        )
    trials = tuple(dict.fromkeys(trial for finding in findings for trial in finding.trials))
    training = training_of(results, trials)
    controls = [whole.control(name) for name in claim.control]
    return Evidence(
        claim,
        findings,
        tuple(ControlResult(control.id, control.title, find(study, control, results)) for control in controls),
        covered(claim, training),
        str(training) if training else "",
        (*((claim.caveat,) if claim.caveat else ()), *_used_seed_warnings(study, results, trials)),
        smoke=results.scale_name == "smoke" and bool(trials),
    )


def _unjudged(finding: Finding, reason: str) -> Finding:
    """Return the finding as `out of reach` for this reason; keep the effect and interval and remove the p values."""
    return replace(finding, status=Status.OUT_OF_REACH, reason=reason, p_for=None, p_against=None, p_absent=None)


def _used_seed_warnings(study: str, results: Results, trials: Iterable[str]) -> tuple[str, ...]:
    """Return a warning for each seed of the given trials that seeds.yaml lists for this study and scale.

    Results of the listed seeds in earlier runs influenced the study's design, so these seeds are no independent
    evidence. trials: the ids of the trials.
    """
    chosen = set(trials)
    seeds = sorted({member.cell.seed for member in results.members if member.id in chosen})
    pilots = pilots_of(study, results.scale_name, seeds)
    return tuple(f"seed {seed} influenced this design ({by}), so no claim should use it" for seed, by in pilots.items())


def find(study: str, claim: Claim | ControlClaim, results: Results) -> tuple[Finding, ...]:
    """Return the findings of all comparisons of a claim or control, in order; they are computed once and cached."""
    name = f"findings {study} {claim.id}"
    return results.remembered(name, lambda: tuple(_findings(study, claim, results)))


def _findings(study: str, claim: Claim | ControlClaim, results: Results) -> Iterable[Finding]:
    measured: Mapping[str, Measured] | None = None
    for comparison in comparisons(at_probes(claim, results), arm_table(study)):
        if comparison.test == "exact":
            if claim.id not in hooks_of(study).exact:
                raise ValueError(
                    f"claim {claim.id}: the test exact needs a function that @exact registers for this claim (hooks.py)"
                )
            result = hooks_of(study).exact[claim.id]()
            checks = {"": result} if isinstance(result, Exact) else result
            yield from (judge_exact(name, check) for name, check in checks.items())
        elif comparison.part.out_of_reach:
            yield judge(comparison, NotPlanned(""))
        elif comparison.part.data:
            if measured is None:
                measured = hooks_of(study).measures[claim.id](results)
            yield judge(comparison, measured[comparison.part.data])
        elif comparison.part.formula:
            yield judge(comparison, formula_data(study, results, comparison.part))
        else:
            yield judge(comparison, data_of(results, comparison, lambda scope, name: resolve(study, scope, name)))


def formula_data(study: str, results: Results, part: Part) -> Measured:
    """Return the jackknife pseudo-values of a part's formula, one for each seed (`pseudo_values`)."""

    arms: dict[str, tuple[str, str, Metric]] = {}
    for name, term in part.terms.items():
        metric = resolve(study, results, term.metric).values
        assert not callable(metric), f"{term.metric} is a function of two trials; a formula needs a number per trial"
        arms[name] = (term.sweep, term.arm, metric)
    return combined(results, arms, lambda values: evaluate(part.formula, values), relative=part.relative)


def resolve(study: str, results: Results, name: str) -> Numbers:
    """Return the metric of this name: the one that the study registers (hooks.py), or else the built-in metric."""
    hook = hooks_of(study).metrics.get(name)
    if hook is None:
        return built_in(results, name)
    values = results.remembered(f"metric {study} {name}", lambda: hook.compute(results))
    return Numbers(name, values, hook.bounds)


# -------------------------------------------------------------------------------- reach


@dataclass(frozen=True)
class Training:
    """The amount of training in a set of trials. A trial's tokens include its trunk's tokens before the branch."""

    parameters: tuple[int, ...]  # the different model sizes, sorted
    tokens: int  # the number of tokens of the longest trial
    quantized: float  # the fraction of a trial's tokens that come after its branch; the greatest of all trials

    def __str__(self) -> str:
        return f"{enumeration(map(amount, self.parameters))} parameters, {amount(self.tokens)} tokens"


def training_of(results: Results, trials: Iterable[str]) -> Training | None:
    """Return the sizes of the models of the trials with these ids, and the tokens of the longest trial.

    Return None if the plan has none of these trials.
    """
    planned = results.plan.trials
    chosen = [trial for trial in dict.fromkeys(trials) if trial in planned]
    if not chosen:
        return None
    tokens = [
        (planned[trial].earlier_tokens + tokens_of(planned[trial].trial), tokens_of(planned[trial].trial))
        for trial in chosen
    ]
    return Training(
        tuple(sorted({parameters_of(planned[trial].trial.model) for trial in chosen})),
        max(whole for whole, _ in tokens),
        max((own / whole for whole, own in tokens if whole), default=0.0),
    )


def covered(claim: Claim, training: Training | None) -> bool:
    """Tell whether the runs are large and long enough to contradict the claim.

    They need at least half (COVERED) of the paper's numbers of parameters and of tokens, which are in `claim.stated`.
    If the claim has no `stated`, all runs are large enough. training: the size of the runs; None if there are no runs.
    """
    if claim.stated is None:
        return True
    if training is None:
        return False
    large_enough = min(training.parameters) >= COVERED * claim.stated.parameters
    return large_enough and training.tokens >= COVERED * claim.stated.tokens

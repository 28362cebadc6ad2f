"""Compute the verdicts of a study: collect the data of every claim and control, test them, and combine the results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fewbits.analysis.engine.claims.findings import UNTESTED, ControlResult, Finding, Status, Verdict
from fewbits.analysis.engine.claims.hooks import hooks_of, load_hooks
from fewbits.analysis.engine.claims.pairs import Numbers, built_in, data_of
from fewbits.analysis.engine.claims.schema import (
    Claim,
    Comparison,
    ControlClaim,
    Kind,
    Needs,
    Part,
    Printed,
    StudyClaims,
    expand,
    load_claims,
    pilots_of,
)
from fewbits.analysis.engine.claims.tests import judge, judge_exact
from fewbits.analysis.engine.claims.verdicts import Evidence, conclude
from fewbits.analysis.engine.results.arms import arm_table
from fewbits.analysis.engine.results.data import Differences, Exact, Measured
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import STUDIES, Paper, Size, paper
from fewbits.analysis.engine.statistics import estimate
from fewbits.common.from_dict import one_of
from fewbits.common.wording import amount, enumeration, plural
from fewbits.sweeps.planning.cost import parameters_of, tokens_of
from fewbits.sweeps.planning.plan import Planned

ONE_RUN = "paper"  # the scale with the paper's own runs: one of each arm
WORDS = ("no seeds", "one seed", "two seeds", "three seeds", "four seeds", "five seeds", "six seeds", "seven seeds")


def judge_study(study: str, results: Results) -> dict[str, Verdict]:
    """Return the verdicts of a study's claims by claim id, in the order of analysis/studies/STUDY/claims.yaml."""
    load_hooks(study)
    return judge_claims(load_claims(study), results)


def judge_claims(of: StudyClaims, results: Results) -> dict[str, Verdict]:
    """Return the verdicts of these claims by claim id; all their p values are corrected together for multiple tests."""
    return conclude({claim.id: evidence_of(of, claim, results) for claim in of.claims})


def evidence_of(of: StudyClaims, claim: Claim, results: Results) -> Evidence:
    """Return the findings on a claim and its controls, with the size of the claim's runs and notes for the reader.

    The notes are warnings about seeds that no claim should use. of: the collection that contains the claim.
    """
    findings, known = find(of.study, claim, results), _paper(of.study)
    trials = tuple(dict.fromkeys(trial for finding in findings for trial in finding.trials))
    controls = [of.control(name) for name in claim.control]
    chosen = known.primary.get(claim.id, "")
    names = [part.name for part in claim.parts]
    if chosen:
        one_of(f"primary part of {claim.id}", chosen, names)
    # A claim that paper.yaml does not name has the first part that can be tested as its primary part.
    first = next((finding.part for finding in findings if finding.status not in UNTESTED), 0)
    size = known.sizes.get(claim.source.size) if claim.source else None
    return Evidence(
        claim,
        findings,
        tuple(ControlResult(one.id, one.title, find(of.study, one, results)) for one in controls),
        scale_words(results, trials, size) if claim.kind is not Kind.ARITHMETIC else "",
        names.index(chosen) if chosen else 0 if claim.id in known.primary else first,
        claim.id in known.primary and not claim.ours,
        results.scale_name == ONE_RUN,
        _used_seed_warnings(of.study, results, trials),
    )


def _paper(study: str) -> Paper:
    """Return the study's paper; for a sweep of the user's own, one without content."""
    return paper(study) if (STUDIES / study / "paper.yaml").is_file() else Paper(study, "", {}, (), ())


def _used_seed_warnings(study: str, results: Results, trials: Iterable[str]) -> tuple[str, ...]:
    """Return a warning for each seed of the given trials that seeds.yaml lists for this study and scale.

    Results of the listed seeds in earlier runs influenced the study's design, so these seeds are no independent
    evidence. trials: the ids of the trials.
    """
    chosen = set(trials)
    seeds = sorted({member.cell.seed for member in results.members if member.id in chosen})
    pilots = pilots_of(study, results.scale_name, seeds)
    return tuple(f"seed {seed} influenced this design ({by}), so no claim should use it" for seed, by in pilots.items())


# -------------------------------------------------------------------------------- findings


def find(study: str, claim: Claim | ControlClaim, results: Results) -> tuple[Finding, ...]:
    """Return the findings of all comparisons of a claim or control, in order; they are computed once and cached."""
    name = f"findings {study} {claim.id}"
    return results.remembered(
        name,
        lambda: tuple(
            replace(finding, part=place)
            for place, part in enumerate(claim.parts)
            for finding in _of_part(study, claim, part, results)
        ),
    )


def _of_part(study: str, claim: Claim | ControlClaim, part: Part, results: Results) -> Iterator[Finding]:
    if part.test == "exact":
        one_of(f"claim {claim.id}: the test exact needs a function in", claim.id, hooks_of(study).exact)
        result = hooks_of(study).exact[claim.id]()
        checks = {"": result} if isinstance(result, Exact) else result
        yield from (judge_exact(name, check) for name, check in checks.items())
        return
    needs = part.needs.and_also(claim.needs) if isinstance(claim, Claim) else part.needs
    for comparison in expand(claim, part, arm_table(study)):
        finding = _judged(study, claim, comparison, results)
        trials = finding.trials if finding.status is not Status.NOT_RUN else results.plan.trials
        if lacking := unmet(needs, results, trials, finding.status is Status.NOT_RUN):
            finding = replace(finding, status=Status.NOT_TESTABLE, reason=lacking, p_for=None, p_against=None)
        elif finding.status is Status.SUPPORTED and (passing := list(_passing(study, claim, comparison, results))):
            reason = f"{finding.reason}; {enumeration(passing)} {'pass' if len(passing) > 1 else 'passes'}, too"
            finding = replace(finding, status=Status.VACUOUS, reason=reason)
        yield finding


def _judged(study: str, claim: Claim | ControlClaim, comparison: Comparison, results: Results) -> Finding:
    part = comparison.part
    if not part.test:
        return Finding(comparison.name, Status.NOT_TESTABLE, part.needs.other, title=comparison.title)
    data = measured(study, claim, comparison, results)
    margin = margin_of(study, comparison, results)
    one_run = results.scale_name == ONE_RUN
    return replace(judge(comparison, data, margin, one_run=one_run), printed=printed_effect(study, comparison))


def measured(study: str, claim: Claim | ControlClaim, comparison: Comparison, results: Results) -> Measured:
    """Return the data of a comparison: from pairs of trials, or from the function that @measure registers."""
    if not comparison.part.data:
        return data_of(results, comparison, lambda scope, name: resolve(study, scope, name))
    made = results.remembered(f"data {study} {claim.id}", lambda: hooks_of(study).measures[claim.id](results))
    return made[comparison.part.data]


def _passing(study: str, claim: Claim | ControlClaim, comparison: Comparison, results: Results) -> Iterator[str]:
    """Yield those of the part's wrong arms that pass the same test, although they must not."""
    for arm in comparison.part.wrong:
        part = replace(comparison.part, arms=(arm,), wrong=(), sweep=(), printed=None)
        wrong = replace(comparison, part=part, arm=arm)
        if _judged(study, claim, wrong, results).status is Status.SUPPORTED:
            yield arm_table(study).label(arm)


def margin_of(study: str, comparison: Comparison, results: Results) -> float | None:
    """Return the margin of a comparison; None if it has none, or if the cost of which it is a third is not resolved."""
    margin, cost = comparison.margin, _paper(study).recipe_cost
    if margin is None or not margin.third:
        return None if margin is None else margin.value
    if cost is None:
        raise ValueError(f"{study}: a margin of a third needs `recipe_cost` in paper.yaml")
    own = tuple(sweep for sweep in cost.sweep if sweep in comparison.part.sweep)
    sweeps = tuple(dict.fromkeys((*own, *cost.sweep)))
    part = Part("higher", arms=(cost.arm,), baseline=cost.baseline, sweep=sweeps, where=cost.where)
    whole = Comparison("", part, "", cost.arm, cost.baseline, comparison.metric)
    data = data_of(results, whole, lambda scope, name: resolve(study, scope, name))
    if not isinstance(data, Differences) or not data.values:
        return None
    found = estimate(data.values, data.shared, data.noise)
    return found.mean / 3 if found and judge(whole, data).status is Status.SUPPORTED else None


def resolve(study: str, results: Results, name: str) -> Numbers:
    """Return the metric of this name: the one that the study registers (hooks.py), or else the built-in metric."""
    hook = hooks_of(study).metrics.get(name)
    if hook is None:
        return built_in(results, name)
    values = results.remembered(f"metric {study} {name}", lambda: hook.compute(results))
    return Numbers(name, values, hook.bounds)


def printed_effect(study: str, comparison: Comparison) -> float | None:
    """Return the effect that the paper prints for a comparison; None if it prints none.

    The effect is a fraction of the baseline's number if the comparison is relative, else it is in the metric's unit.
    """
    printed = comparison.part.printed
    return None if printed is None else _printed(paper(study), printed, comparison)


def _printed(source: Paper, printed: Printed, comparison: Comparison) -> float | None:
    names = {
        "arm": comparison.arm,
        "baseline": comparison.baseline,
        "metric": comparison.metric.partition("@")[0],
    }
    if printed.number or printed.value is not None:
        value = source.numbers[printed.number.format(**names)].value if printed.number else printed.value
        return -value if printed.negative and value is not None else value
    table, row, column = source.table(printed.table), printed.row.format(**names), printed.column.format(**names)
    value = table.value(row, column)
    if value is None or not printed.baseline:
        return value
    base = table.value(row, printed.baseline.format(**names))
    if base is None:
        return None
    return (value - base) / abs(base) if comparison.part.relative else value - base


# -------------------------------------------------------------------------------- the size of the runs


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
    chosen = _chosen(results, trials)
    if not chosen:
        return None
    tokens = [(one.earlier_tokens + tokens_of(one.trial), tokens_of(one.trial)) for one in chosen]
    return Training(
        tuple(sorted({parameters_of(one.trial.model) for one in chosen})),
        max(whole for whole, _ in tokens),
        max((own / whole for whole, own in tokens if whole), default=0.0),
    )


def unmet(needs: Needs, results: Results, trials: Iterable[str], unplanned: bool = False) -> str:
    """Return in words what the trials lack, `needs …; these runs have …`; "" if they meet the needs.

    unplanned: the compared arms are not planned, and `trials` are all trials of the plan. The needs are then unmet only
    if none of them is large and long enough.
    """
    training, wanted = training_of(results, trials), []
    size = max if unplanned else min
    if training is not None and size(training.parameters) < needs.parameters:
        wanted.append(f"{amount(needs.parameters)} parameters")
    if training is not None and training.tokens < needs.tokens:
        wanted.append(f"{amount(needs.tokens)} tokens")
    if unplanned:
        return f"needs {enumeration(wanted)}; these runs have {training}" if wanted else ""
    if needs.scores and not any(name.startswith(f"tasks.{needs.scores}.") for name in results.metrics()):
        return f"needs stored scores of {needs.scores} (`fewbits evaluate`); these runs have none"
    kinds = sorted({one.trial.data.kind for one in _chosen(results, trials)})
    if needs.data and kinds and kinds != [needs.data]:
        return f"needs {needs.other} (data={needs.data}); these runs read data={enumeration(kinds)}"
    if needs.trained and any(
        one.trial.is_probe and one.parent not in results.plan.trials for one in _chosen(results, trials)
    ):
        return "needs weights of our own training, in high precision; these runs probe published weights"
    return f"needs {enumeration(wanted)}; these runs have {training}" if wanted else ""


def scale_words(results: Results, trials: Iterable[str], size: Size | None) -> str:
    """Return the size of the runs in words, compared with the paper's.

    For example `3.3 M parameters, 1/2,600 of the paper's; quantized for 160 steps of 2,048 bytes; six seeds`.
    """
    chosen = [one for one in _chosen(results, trials) if not one.trial.is_probe]
    probes = [one for one in _chosen(results, trials) if one.trial.is_probe]
    if not chosen and not probes:
        return ""
    parameters = sorted({parameters_of(one.trial.model) for one in chosen or probes})
    words = f"{enumeration(map(amount, parameters))} parameters"
    if size is not None:
        ratio = size.parameters / parameters[-1]
        words += f", 1/{float(f'{ratio:.2g}'):,.0f} of the paper's" if ratio >= 1.5 else ", as many as the paper's"
    if chosen:
        longest = max(chosen, key=lambda one: (_is_quantized(one), tokens_of(one.trial)))
        training, kind = longest.trial.training, longest.trial.data
        unit = "bytes" if kind.tokenizer == "bytes" and kind.kind in ("python", "torch", "text") else "tokens"
        batch = training.batch * training.length
        words += (
            f"; {'quantized' if _is_quantized(longest) else 'trained'} for {training.steps:,} steps of {batch:,} {unit}"
        )
    else:
        words += "; probes of a checkpoint, nothing is trained"
    ids = {one.id for one in chosen or probes}
    seeds = len({member.cell.seed for member in results.members if member.id in ids})
    return f"{words}; {WORDS[seeds] if seeds < len(WORDS) else plural(seeds, 'seed')}"


def _is_quantized(planned: Planned) -> bool:
    recipe = planned.trial.recipe
    return any(slot.spec is not None for _, slot in recipe.operands.items()) or recipe.sampler.kind != "none"


def _chosen(results: Results, trials: Iterable[str]) -> list[Planned]:
    planned = results.plan.trials
    return [planned[trial] for trial in dict.fromkeys(trials) if trial in planned]

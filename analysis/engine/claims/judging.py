"""Compute the verdicts of a study: collect the data of every claim and control, test them, and combine the results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

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
SEEDS = ("no seeds", "one seed", "two seeds", "three seeds", "four seeds", "five seeds", "six seeds", "seven seeds")


def judge_study(study: str, results: Results) -> dict[str, Verdict]:
    """Return the verdicts of a study's claims by claim id, in the order of analysis/studies/STUDY/claims.yaml."""
    load_hooks(study)
    return judge_claims(load_claims(study), results)


def judge_claims(of: StudyClaims, results: Results) -> dict[str, Verdict]:
    """Return the verdicts of these claims by claim id; all their p values are corrected together for multiple tests."""
    return conclude({claim.id: evidence_of(of, claim, results) for claim in of.claims})


def evidence_of(of: StudyClaims, claim: Claim, results: Results) -> Evidence:
    """Return the findings on a claim and its controls, with the size of the claim's runs and warnings for the reader.

    The warnings are about seeds that no claim should use. of: the collection that contains the claim.
    """
    findings, known = find(of.study, claim, results), _paper(of.study)
    trials = {trial: None for finding in findings for trial in finding.trials}
    main, names = claim.id in known.primary, [part.name for part in claim.parts]
    if chosen := known.primary.get(claim.id, ""):
        one_of(f"primary part of {claim.id}", chosen, names)
    # A claim that paper.yaml does not name has the first part that can be tested as its primary part.
    first = 0 if main else next((finding.part for finding in findings if finding.status not in UNTESTED), 0)
    seeds = sorted({member.cell.seed for member in results.members if member.id in trials})
    pilots = pilots_of(of.study, results.scale_name, seeds)
    size = known.sizes.get(claim.source.size) if claim.source else None
    return Evidence(
        claim,
        findings,
        tuple(ControlResult(one.id, one.title, find(of.study, one, results)) for one in map(of.control, claim.control)),
        scale_words(results, trials, size) if claim.kind is not Kind.ARITHMETIC else "",
        names.index(chosen) if chosen else first,
        main and not claim.ours,
        results.scale_name == ONE_RUN,
        tuple(f"seed {seed} influenced this design ({by}), so no claim should use it" for seed, by in pilots.items()),
    )


def _paper(study: str) -> Paper:
    """Return the study's paper; for a sweep of the user's own, one without content."""
    return paper(study) if (STUDIES / study / "paper.yaml").is_file() else Paper(study, "", {}, (), ())


# -------------------------------------------------------------------------------- findings


def find(study: str, claim: Claim | ControlClaim, results: Results) -> tuple[Finding, ...]:
    """Return the findings of all comparisons of a claim or control, in order; they are computed once and cached."""
    return results.remembered(
        f"findings {study} {claim.id}",
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
    found = judge(comparison, data, margin_of(study, comparison, results), one_run=results.scale_name == ONE_RUN)
    return replace(found, printed=printed_effect(study, comparison))


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
    part = Part("higher", arms=(cost.arm,), baseline=cost.baseline, sweep=sweeps)
    whole = Comparison("", part, "", cost.arm, cost.baseline, comparison.metric)
    data = data_of(results, whole, lambda scope, name: resolve(study, scope, name))
    if not isinstance(data, Differences) or not data.values:
        return None
    found = estimate(data.values, data.shared, data.noise)
    return found.mean / 3 if found and judge(whole, data).status is Status.SUPPORTED else None


def resolve(study: str, results: Results, name: str) -> Numbers:
    """Return the metric of this name: the one that the study registers (hooks.py), or else the built-in metric."""
    if name not in hooks_of(study).metrics:
        return built_in(results, name)
    compute, bounds = hooks_of(study).metrics[name]
    return Numbers(name, results.remembered(f"metric {study} {name}", lambda: compute(results)), bounds)


def printed_effect(study: str, comparison: Comparison) -> float | None:
    """Return the effect that the paper prints for a comparison; None if it prints none.

    The effect is a fraction of the baseline's number if the comparison is relative, else it is in the metric's unit.
    """
    if (printed := comparison.part.printed) is None:
        return None
    source, names = paper(study), {"arm": comparison.arm, "baseline": comparison.baseline}
    names["metric"] = comparison.metric.partition("@")[0]
    if not printed.table:
        value = source.numbers[printed.number.format(**names)].value if printed.number else printed.value
        return -value if printed.negative and value is not None else value
    table, row = source.table(printed.table), printed.row.format(**names)
    value = table.value(row, printed.column.format(**names))
    if value is None or not printed.baseline:
        return value
    base = table.value(row, printed.baseline.format(**names))
    if base is None:
        return None
    return (value - base) / abs(base) if comparison.part.relative else value - base


# -------------------------------------------------------------------------------- the size of the runs


def unmet(needs: Needs, results: Results, trials: Iterable[str], unplanned: bool = False) -> str:
    """Return in words what the trials lack, `needs …; these runs have …`; "" if they meet the needs.

    unplanned: the compared arms are not planned, and `trials` are all trials of the plan. The needs are then unmet only
    if none of them is large and long enough.
    """
    chosen, lacking = _chosen(results, trials), ""
    if chosen:
        sizes = sorted({parameters_of(one.trial.model) for one in chosen})
        tokens = max(one.earlier_tokens + tokens_of(one.trial) for one in chosen)  # with those of a trunk
        large, long = sizes[-1 if unplanned else 0] >= needs.parameters, tokens >= needs.tokens
        wanted = [f"{amount(needs.parameters)} parameters"] * (not large) + [f"{amount(needs.tokens)} tokens"] * (
            not long
        )
        have = f"{enumeration(map(amount, sizes))} parameters, {amount(tokens)} tokens"
        lacking = f"needs {enumeration(wanted)}; these runs have {have}" if wanted else ""
    if unplanned:
        return lacking
    if needs.scores and not any(name.startswith(f"tasks.{needs.scores}.") for name in results.metrics()):
        return f"needs stored scores of {needs.scores} (`fewbits evaluate`); these runs have none"
    kinds = sorted({one.trial.data.kind for one in chosen})
    if needs.data and kinds and kinds != [needs.data]:
        return f"needs {needs.other} (data={needs.data}); these runs read data={enumeration(kinds)}"
    if needs.trained and any(one.trial.is_probe and one.parent not in results.plan.trials for one in chosen):
        return "needs weights of our own training, in high precision; these runs probe published weights"
    return lacking


def scale_words(results: Results, trials: Iterable[str], size: Size | None) -> str:
    """Return the size of the runs in words, compared with the paper's.

    For example `3.3 M parameters, 1/2,600 of the paper's; quantized for 160 steps of 2,048 bytes; six seeds`.
    """
    every = _chosen(results, trials)
    trained = [one for one in every if not one.trial.is_probe]
    if not every:
        return ""
    parameters = sorted({parameters_of(one.trial.model) for one in trained or every})
    words = f"{enumeration(map(amount, parameters))} parameters"
    if size is not None:
        ratio = size.parameters / parameters[-1]
        words += f", 1/{float(f'{ratio:.2g}'):,.0f} of the paper's" if ratio >= 1.5 else ", as many as the paper's"
    if trained:
        longest = max(trained, key=lambda one: (_is_quantized(one), tokens_of(one.trial)))
        training, data = longest.trial.training, longest.trial.data
        unit = "bytes" if data.tokenizer == "bytes" and data.kind in ("python", "torch", "text") else "tokens"
        verb, batch = "quantized" if _is_quantized(longest) else "trained", training.batch * training.length
        words += f"; {verb} for {training.steps:,} steps of {batch:,} {unit}"
    else:
        words += "; probes of a checkpoint, nothing is trained"
    ids = {one.id for one in trained or every}
    seeds = len({member.cell.seed for member in results.members if member.id in ids})
    return f"{words}; {SEEDS[seeds] if seeds < len(SEEDS) else plural(seeds, 'seed')}"


def _is_quantized(planned: Planned) -> bool:
    recipe = planned.trial.recipe
    return any(slot.spec is not None for _, slot in recipe.operands.items()) or recipe.sampler.kind != "none"


def _chosen(results: Results, trials: Iterable[str]) -> list[Planned]:
    planned = results.plan.trials
    return [planned[trial] for trial in dict.fromkeys(trials) if trial in planned]

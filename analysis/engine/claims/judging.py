"""Compute the verdicts of claims: collect the data of every claim and control, test them, and combine the results."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fewbits.analysis.engine.claims.findings import UNTESTED, ControlResult, Finding, Outcome, Status, Verdict
from fewbits.analysis.engine.claims.hooks import hooks_of
from fewbits.analysis.engine.claims.pairs import TASKS, Numbers, built_in, data_of
from fewbits.analysis.engine.claims.schema import (
    DIVERGED,
    EVENTS,
    Claim,
    Comparison,
    ControlClaim,
    Kind,
    Needs,
    Part,
    StudyClaims,
    claims_from,
    expand,
    load_claims,
    pilots_of,
)
from fewbits.analysis.engine.claims.tests import judge, judge_exact
from fewbits.analysis.engine.claims.verdicts import Evidence, conclude
from fewbits.analysis.engine.results.data import Differences, Exact, Measured
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import STUDIES, Paper, Size, paper
from fewbits.analysis.engine.results.places import PROBE, PROBES, arm_table
from fewbits.analysis.engine.results.rows import place_name
from fewbits.analysis.engine.statistics import estimate
from fewbits.common.from_dict import one_of
from fewbits.common.store_folder import runs_option
from fewbits.common.wording import amount, enumeration, plural
from fewbits.experiments.composition import nearest_first
from fewbits.sweeps.planning.cost import parameters_of, tokens_of
from fewbits.sweeps.planning.plan import Planned
from fewbits.sweeps.planning.store import OVER
from fewbits.sweeps.planning.stored_plans import RUNS

ONE_RUN = "paper"  # the scale with the paper's own runs: one of each arm
SEEDS = ("no seeds", "one seed", "two seeds", "three seeds", "four seeds", "five seeds", "six seeds", "seven seeds")


def judge_study(study: str, results: Results) -> dict[str, Verdict]:
    """Return the verdicts of a study's claims by claim id, in the order of analysis/studies/STUDY/claims.yaml."""
    return judge_claims(load_claims(study), results)


def judge_file(file: Path, results: Results, overrides: Sequence[str]) -> dict[str, Verdict]:
    """Return the verdicts of a user's own claims (docs/claims-file.md); raise ValueError for names the sweep lacks."""
    study = results.plan.sweeps[0].study
    of = claims_from(file, study)
    claims: tuple[Claim | ControlClaim, ...] = (*of.controls, *of.claims)
    for claim in claims:
        try:
            _check_names(of.study, claim, results)
            find(of.study, claim, results)
        except ValueError as error:
            raise ValueError(f"{file}: {claim.id}: {error}") from None
    more = f"; to run them: {sweep_command(results, overrides)}"
    verdicts = judge_claims(of, results)
    not_run = [(name, one) for name, one in verdicts.items() if one.outcome is Outcome.NOT_RUN]
    return verdicts | {name: replace(one, reason=one.reason + more) for name, one in not_run}


def sweep_command(results: Results, overrides: Sequence[str]) -> str:
    """Return the command that runs the missing trials of these results. overrides: those that selected the sweep."""
    chosen = shlex.join(text for text in overrides if not text.startswith(f"{RUNS}="))
    return f"fewbits sweep {chosen}{runs_option(results.plan.store)}"


def _check_names(study: str, claim: Claim | ControlClaim, results: Results) -> None:
    """Raise ValueError if a claim names a sweep, arm, axis value, metric or hook that these results do not have."""
    for part in claim.parts:
        hooks: Mapping[str, object] = hooks_of(study).measures if part.data else hooks_of(study).exact
        if (part.data or part.test == "exact") and claim.id not in hooks:
            key = "key data" if part.data else "test exact"
            raise ValueError(f"the {key} needs a Python function (engine/claims/hooks.py)")
        for sweep in part.sweep:
            one_of("sweep", sweep, dict.fromkeys(member.cell.sweep for member in results.members))
        for comparison in expand(claim, part, arm_table(study)):
            for arm in (comparison.arm, *part.wrong) if comparison.arm else ():
                _check_arm("arm", arm, part, part.where, results)
            if comparison.baseline:
                role = "baseline" if part.baseline else "baseline (which no key names)"
                _check_arm(role, comparison.baseline, part, part.baseline_where or {}, results)
            name, known = comparison.metric, results.metrics()
            unknown = known and name and part.test not in EVENTS and name not in (*known, DIVERGED)
            if unknown and not name.startswith(TASKS) and isinstance(resolve(study, results, name).values, str):
                raise ValueError(f"metric {name!r}: valid values are {nearest_first(name, known)}")


def _check_arm(role: str, arm: str, part: Part, where: Mapping[str, str], results: Results) -> None:
    """Raise ValueError if the sweeps of a part do not have the arm with these axis values."""
    cells = [one.cell for one in results.members if one.cell.sweep in (part.sweep or (one.cell.sweep,))]
    prefixes = ("", PROBE) if PROBES in part.sweep else ("",)
    names = [prefix + name for name in arm.split("|") for prefix in prefixes]
    places = [dict(cell.axes) for cell in cells if cell.arm in names]
    if not places:
        one_of(role, arm, dict.fromkeys(cell.arm for cell in cells))
    for axis, value in where.items():
        one_of(f"axis of {arm}", axis, dict.fromkeys(name for axes in places for name in axes))
        one_of(f"{axis} of {arm}", value, dict.fromkeys(axes[axis] for axes in places if axis in axes))


def judge_claims(of: StudyClaims, results: Results) -> dict[str, Verdict]:
    """Return the verdicts of these claims by claim id; all their p values are corrected together for multiple tests."""
    return conclude({claim.id: evidence_of(of, claim, results) for claim in of.claims})


def evidence_of(of: StudyClaims, claim: Claim, results: Results) -> Evidence:
    """Return the findings on a claim and its controls, the size of the claim's runs, and warnings for the reader."""
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
        _missing(findings, results),
    )


def _missing(findings: Iterable[Finding], results: Results) -> tuple[str, ...]:
    """Return the names of the unfinished trials of a claim if, without them, none of its comparisons has data.

    A hook may not say which trials it needs; they are missing for certain if no trial of the plan is finished.
    """
    without = [one for one in findings if not one.n and one.effect is None]
    if len(without) < len(tuple(findings)) or Status.UNDECIDED not in {one.status for one in without}:
        return ()
    used = {trial for one in without for trial in one.trials}
    rows = [row for row in results.rows if row["state"] not in OVER]
    if used or len(rows) < len(results.rows):
        rows = [row for row in rows if row["id"] in used]
    return tuple(dict.fromkeys(f"{place_name(row)} ({row['state']})" for row in rows))


def _paper(study: str) -> Paper:
    """Return the study's paper; for a sweep of the user's own, one without content."""
    return paper(study) if (STUDIES / study / "paper.yaml").is_file() else Paper(study, "", {}, (), ())


# -------------------------------------------------------------------------------- findings


def find(study: str, claim: Claim | ControlClaim, results: Results) -> tuple[Finding, ...]:
    """Return the findings of all comparisons of a claim or control, in order; they are computed once and cached."""
    return results.remembered(
        f"findings {study} {claim}",
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
    """Return the effect that the paper prints, a fraction if the comparison is relative; None if it prints none."""
    if (printed := comparison.part.printed) is None:
        return None
    source, names = _paper(study), {"arm": comparison.arm, "baseline": comparison.baseline}
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
        wanted = [f"{amount(needs.parameters)} parameters"] * (not large)
        wanted += [f"{amount(needs.tokens)} tokens"] * (not long)
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
    """Return, for example, `3.3 M parameters, 1/2,600 of the paper's; quantized for 160 steps of …; six seeds`."""
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
        trunks = {one.parent for one in every}
        recipes = [(one, one.trial.recipe) for one in trained if one.id not in trunks]
        quantized = [one for one, recipe in recipes if any(recipe.specs) or recipe.sampler.kind != "none"]
        lengths = Counter((one.trial.training.steps, _length(one)) for one in quantized or trained)
        steps, length = lengths.most_common(1)[0][0]
        words += f"; {'quantized' if quantized else 'trained'} for {length}"
        if (most := max(lengths)[0]) > steps:
            words += f", in some arms up to {most:,} steps"
    else:
        words += "; probes of a checkpoint, nothing is trained"
    ids = {one.id for one in trained or every}
    seeds = len({member.cell.seed for member in results.members if member.id in ids})
    return f"{words}; {SEEDS[seeds] if seeds < len(SEEDS) else plural(seeds, 'seed')}"


def _length(planned: Planned) -> str:
    training, data = planned.trial.training, planned.trial.data
    unit = "bytes" if data.tokenizer == "bytes" and data.kind in ("python", "torch", "text") else "tokens"
    return f"{training.steps:,} steps of {training.batch * training.length:,} {unit}"


def _chosen(results: Results, trials: Iterable[str]) -> list[Planned]:
    planned = results.plan.trials
    return [planned[trial] for trial in dict.fromkeys(trials) if trial in planned]

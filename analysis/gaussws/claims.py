"""What GaussWS says of training: G7 to G14. What needs tens of billions of tokens is out of reach, and the induced
instability stands beside it, labelled as ours.

Losses of validation are without noise. Training losses are means over the last tenth of the steps, in which all arms of
a seed see the same batches; those of sampled arms are with their noise, as the paper's are.
"""

from __future__ import annotations

from collections.abc import Mapping

from fewbits.analysis.arms import AGAIN, BASELINE, compared, decided, ids, seed_by_seed
from fewbits.analysis.engine.data import Data, Differences, NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.engine.statistics import summary
from fewbits.analysis.gaussws.arms import DIFFQ, MINI, MINI_DIFFQ, MINI_OURS, OURS, PARTS, TITLES, chosen
from fewbits.analysis.gaussws.stability import beside
from fewbits.analysis.noise import VALIDATION
from fewbits.analysis.registry import claim
from fewbits.analysis.results import NotRun
from fewbits.analysis.verdicts import Verdict, equivalent, every, higher, lower, no_worse, not_run, noted, out_of_reach

margin = paper("gaussws").margin
AT_END = "judged at the end of training, without noise; the paper speaks of training losses throughout"
LEAVES = "that samplers avoid divergence is judged by S1, of the induced protocol, alone"


def unreached(name: str, *notes: str) -> Verdict:
    return noted(out_of_reach(paper("gaussws").claim(name).out_of_reach), *notes)


@claim("gaussws", "G7")
def g7(results: Results) -> Verdict:
    return unreached("G7", *beside(results, BASELINE), *_rates(results))


def _rates(results: Results) -> tuple[str, ...]:
    """What the low rate costs here, where it does not diverge."""
    part = chosen(results, "gpt2")
    if isinstance(part, NotRun) or not part.has("bf16-low"):
        return ()
    return _words("at this scale BF16 at the low rate ends", compared(part, VALIDATION, "bf16-low", BASELINE), "BF16's")


def _words(start: str, found: Data | NotRun, of: str) -> tuple[str, ...]:
    if not isinstance(found, Differences) or not found.values:
        return ()
    one = summary(found.values)
    return (f"{start} {found.shown(one.mean)} from {of} ({one.n} seed{'s' if one.n > 1 else ''})",)


@claim("gaussws", "G8")
def g8(results: Results) -> Verdict:
    part = chosen(results, "gpt2")
    if isinstance(part, NotRun):
        return not_run(part.scale)
    parts = {
        "validation loss": compared(part, VALIDATION, OURS, DIFFQ),
        "validation loss, low rate": compared(part, VALIDATION, "gaussws-low", "diffq-low"),
    }
    judged = {name: decided(found, lambda data: lower(data, margin("G8"))) for name, found in parts.items()}
    return noted(every(judged), AT_END, LEAVES, *beside(results, BASELINE, OURS, DIFFQ))


@claim("gaussws", "G9")
def g9(results: Results) -> Verdict:
    part = chosen(results, "gpt2")
    if isinstance(part, NotRun):
        return not_run(part.scale)
    low = compared(part, VALIDATION, "bf16-low")
    best = "bf16-low" if isinstance(low, Differences) and low.values and summary(low.values).mean < 0 else BASELINE
    found = decided(compared(part, VALIDATION, OURS, best), lambda found: no_worse(found, margin("G9")))
    return noted(found, f"the best BF16 here is {TITLES[best]}")


@claim("gaussws", "G10")
def g10(results: Results) -> Verdict:
    part = chosen(results, "parts")
    words: list[str] = []
    if isinstance(part, Results):
        for arm in ("all", *PARTS):
            if part.has(arm):
                words += _words(f"{TITLES[arm]} ends", compared(part, VALIDATION, arm, "bf16-low"), "BF16's")
    small = (f"at this scale, at the low rate: {'; '.join(words)}",) if words else ()
    return unreached("G10", *beside(results, BASELINE, OURS, *PARTS), *small)


@claim("gaussws", "G11")
def g11(results: Results) -> Verdict:
    return unreached("G11", *beside(results, BASELINE, "qkv", "out", "up", "down"))


@claim("gaussws", "G12")
def g12(results: Results) -> Verdict:
    """Across optimizers there is no common trunk: the same initial weights and data, all else from nothing."""
    if any(isinstance(chosen(results, sweep), NotRun) for sweep in ("gpt2", "gpt2-mini")):
        return not_run(results.scale_name)
    numbers = _validation(results)
    parts = {
        "GaussWS the same": equivalent(_across(results, numbers, MINI_OURS, OURS, "gaussws-low"), margin("G12")),
        "DiffQ lower": lower(_across(results, numbers, MINI_DIFFQ, DIFFQ, "diffq-low")),
    }
    steadier = beside(results, BASELINE, MINI)
    return noted(every(parts), "that Adam-mini steadies BF16 is said of long runs", *steadier)


def _validation(results: Results) -> dict[str, float]:
    if VALIDATION not in results.trials:
        return {}
    rows = results.trials.dropna(subset=[VALIDATION])
    return {str(key): float(value) for key, value in zip(rows["id"], rows[VALIDATION], strict=True)}


def _across(results: Results, numbers: Mapping[str, float], ours: str, *theirs: str) -> Differences | NoData:
    """Ours under Adam-mini less that of theirs, under AdamW, which has the same learning rate."""
    alike = at_its_rate(results, ours, *theirs)
    if alike is None:
        return NoData(f"no arm of {', '.join(theirs)} has the learning rate of {ours}")
    both = [chosen(results, sweep) for sweep in ("gpt2-mini", "gpt2")]
    members = tuple(m for part in both if isinstance(part, Results) for m in part.members)
    return seed_by_seed(results.of_places(members), numbers, (ours, {}), (alike, {}), relative=True)


def at_its_rate(results: Results, ours: str, *theirs: str) -> str | None:
    """At the paper's scale Adam-mini has the low rate alone, at ours the high one."""

    def rate(sweep: str, arm: str) -> float | None:
        part = chosen(results, sweep)
        found = [] if isinstance(part, NotRun) else list(ids(part, arm).values())
        return results.plan.trials[found[0]].trial.optimizer.lr if found else None

    return next((arm for arm in theirs if rate("gpt2", arm) == rate("gpt2-mini", ours)), None)


@claim("gaussws", "G13")
def g13(results: Results) -> Verdict:
    part = chosen(results, "llama2")
    if isinstance(part, NotRun):
        return not_run(part.scale)
    parts = {}
    alike = part.of_places(tuple(m for m in part.members if m.cell.arm != AGAIN))  # its maximum is over fewer
    for name, metric, of in (("average", "loss", part), ("maximum", "loss_max", alike)):
        late = of.late(metric)
        for title, arm, other in (("BF16 above DiffQ", BASELINE, DIFFQ), ("DiffQ above GaussWS", DIFFQ, OURS)):
            found = compared(of, late, arm, other)
            parts[f"{name} loss: {title}"] = decided(found, lambda data: higher(data, margin("G13")))
    quiet = [
        one
        for arm in (DIFFQ, OURS)
        if part.has(arm)
        for one in _words(f"{TITLES[arm]} ends", compared(part, VALIDATION, arm), "BF16's")
    ]
    return noted(
        every(parts),
        "training losses, with noise where weights are sampled; the maximum is over micro-batches",
        *((f"by validation loss, without noise: {'; '.join(quiet)}",) if quiet else ()),
    )


@claim("gaussws", "G14")
def g14(results: Results) -> Verdict:
    notes: list[str] = []
    for sweep, name in (("llama2", "the small Llama 2"), ("large", "Llama 2 of 1B")):
        part = chosen(results, sweep)
        words: list[str] = []
        if isinstance(part, Results):
            for arm in (OURS, "gaussws-8-6"):
                if part.has(arm):
                    words += _words(f"{TITLES[arm]} ends", compared(part, VALIDATION, arm), "BF16's")
        notes += [f"on {name}: {'; '.join(words)}"] if words else []
    return unreached("G14", *notes)

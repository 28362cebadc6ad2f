"""What the NVFP4 paper says of outcomes: arm beside arm, seed by seed.

An effect that is shown to be smaller than its margin contradicts a claim of one, but where the paper itself says that
small models or short runs may not show it (N3, N4, N8, and N13's harm in Fprop and Dgrad).

Where arms branch from trunks in BF16 and decay to zero, all that is said of them is said of the decay. What is said of
a run from its beginning is judged in the sweep `scratch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from fewbits.analysis.arms import BAD, BASELINE, TRUNK, compared, decided, having, ids, own
from fewbits.analysis.engine.data import Data, Differences, NoData
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.noise import VALIDATION
from fewbits.analysis.nvfp4.arms import TITLES, families, part
from fewbits.analysis.nvfp4.gradient_errors import by_block
from fewbits.analysis.registry import claim, control
from fewbits.analysis.results import NotRun
from fewbits.analysis.verdicts import Verdict, equivalent, every, higher, lower, no_worse, not_run, noted

margin = paper("nvfp4").margin
DECAY = "arms branch where the decay begins, so that nothing is said of what is before it"
TAKEN_OUT = {"switch": ("nvfp4-long", "long-"), "large": ("full", "")}  # of what, and before the names of what is left
SWITCHES = {"switch": ("nvfp4-long", BASELINE), "large": ("nvfp4", "fp8")}  # with what stays, and what is restored


def beside(results: Results, sweep: str, arm: str, baseline: str = BASELINE) -> Data | NotRun:
    return compared(part(results, sweep), VALIDATION, arm, baseline)


def shown_apart(results: Results, sweep: str, arm: str, baseline: str = BASELINE) -> str | None:
    """By how much the arm's loss ends from the baseline's, on average; None where no pair has ended."""
    found = beside(results, sweep, arm, baseline)
    return found.shown(fmean(found.values)) if isinstance(found, Differences) and found.values else None


def of_the_decay(results: Results, sweep: str) -> tuple[str, ...]:
    """Said of arms that branch; the paper's own scale has none here."""
    of = part(results, sweep)
    return (DECAY,) if any(of.plan.trials[trial].parent for trial in ids(of, BASELINE).values()) else ()


def all_of(results: Results, parts: Mapping[str, Verdict]) -> Verdict:
    return every(parts) if parts else not_run(results.scale_name)


# -------------------------------------------------------------------------------- controls


def _found_bad(results: Results, sweep: str) -> Verdict:
    return decided(beside(results, sweep, BAD), higher)


@control("nvfp4", "bad-arm", "E2M1 with one scale for each whole tensor is found to be worse than BF16")
def bad_arm(results: Results) -> Verdict:
    """Of all sweeps whose arms branch from the same trunk."""
    return _found_bad(results, "recipe")


@control(
    "nvfp4", "bad-arm-20-blocks", "the same of 20 blocks, and plain NVFP4 in all of them costs more than the margin"
)
def bad_arm_20_blocks(results: Results) -> Verdict:
    """Else which blocks it is in could not make as much of a difference, whatever the paper's models do."""
    parts = {
        "E2M1 per tensor above BF16": _found_bad(results, "layers"),
        "plain NVFP4 above BF16": decided(
            beside(results, "layers", "nvfp4-base"), lambda data: higher(data, margin("N6"))
        ),
    }
    return every(parts)


@control("nvfp4", "bad-arm-families", "the same of each family")
def bad_arm_families(results: Results) -> Verdict:
    return all_of(
        results, {name: decided(compared(one, VALIDATION, BAD), higher) for name, one in families(results, BAD).items()}
    )


@control("nvfp4", "more-tokens", "half as many tokens again are found to lower MXFP4's loss")
def more_tokens(results: Results) -> Verdict:
    return decided(beside(results, "scratch", "mxfp4-1.50", "mxfp4-1.00"), lower)


# -------------------------------------------------------------------------------- the whole recipe


@claim("nvfp4", "N1")
def n1(results: Results) -> Verdict:
    """Before the decay, where there is no FP8 arm, beside BF16."""
    parts = {
        f"after the decay, beside FP8, {name}": decided(
            compared(one, VALIDATION, "nvfp4", "fp8"), lambda found: no_worse(found, margin("N1"))
        )
        for name, one in families(results, "nvfp4", "fp8").items()
    }
    before = _before_the_decay(part(results, "switch"))
    if parts and not isinstance(before, NotRun):
        parts["before the decay, beside BF16"] = no_worse(before, paper("nvfp4").numbers["gap-stable"].value)
    return noted(
        all_of(results, parts),
        "before the decay, ours is a run that has left BF16 on the way, not one from nothing",
    )


def _before_the_decay(switch: Results) -> Data | NotRun:
    """What has left BF16 on the way, at its end, beside the trunk after as many tokens."""
    arm = "nvfp4-trunk"
    if having(switch, arm, TRUNK) is None:
        return NotRun(switch.scale_name)
    judges = {
        switch.plan.trials[key].trial.evaluation.windows for name in (arm, TRUNK) for key in ids(switch, name).values()
    }
    if len(judges) > 1:
        return NoData(f"{arm} and {TRUNK} are evaluated on {' and '.join(map(str, sorted(judges)))} windows")
    curves = switch.curves(VALIDATION).drop_duplicates(["id", "tokens"])
    ours, trunk = (curves[curves["arm"] == name].set_index(["seed", "tokens"]) for name in (arm, TRUNK))
    ends = ours[ours["step"] == ours.groupby("id")["step"].transform("max")]
    numbers: dict[str, float] = {}
    for rows in (ends, trunk.loc[trunk.index.intersection(ends.index)]):
        numbers |= {str(key): float(value) for key, value in zip(rows["id"], rows["value"], strict=True)}
    return compared(switch, numbers, arm, TRUNK)


@claim("nvfp4", "N3")
def n3(results: Results) -> Verdict:
    """From nothing: a trunk in BF16 has the beginning behind it."""
    verdict = decided(beside(results, "scratch", "base-whole", "bf16-whole"), lambda f: higher(f, margin("N3")))
    branched = shown_apart(results, "recipe", "nvfp4-base")
    if of_the_decay(results, "recipe") and branched:
        verdict = noted(verdict, f"branched from a trunk in BF16 it is {branched} above BF16")
    return verdict


@claim("nvfp4", "N4")
def n4(results: Results) -> Verdict:
    verdicts = {}
    for sweep, (whole, prefix) in TAKEN_OUT.items():
        for arm in paper("nvfp4").claim("N4").arms:
            found = beside(results, sweep, prefix + arm, whole)
            if not isinstance(found, NotRun):
                of = ", 12B" if sweep == "large" else ""
                verdicts[f"{arm} above the whole recipe{of}"] = higher(found, margin("N4"))
    return noted(
        all_of(results, verdicts),
        "the paper's own words: smaller models and shorter runs may not need all",
        "taken out of a run in NVFP4, as the paper does at 12B",
        *_out_of_bf16(results),
        *of_the_decay(results, "switch"),
    )


def _out_of_bf16(results: Results) -> tuple[str, ...]:
    """N4's other question, which its first two designs asked."""
    found = {arm: shown_apart(results, "recipe", arm, "nvfp4") for arm in paper("nvfp4").claim("N4").arms}
    told = ", ".join(f"{arm} {apart}" for arm, apart in found.items() if apart)
    return (f"left out from where a run in BF16 branches, beside the whole recipe: {told}",) if told else ()


@claim("nvfp4", "N8")
def n8(results: Results) -> Verdict:
    """Each arm of the chain above the next."""
    chain = paper("nvfp4").claim("N8").arms
    parts = {}
    for arm, more in pairwise(chain):
        found = beside(results, "recipe", arm, more)
        if not isinstance(found, NotRun):
            parts[f"{arm} above {more}"] = higher(found, margin("N8"))
    return noted(
        all_of(results, parts),
        "the paper adds them in this order, and says that each one's gain depends on it",
        *of_the_decay(results, "recipe"),
    )


@claim("nvfp4", "N20")
def n20(results: Results) -> Verdict:
    parts = {
        f"NVFP4 below MXFP4, {name}": decided(
            compared(one, VALIDATION, "nvfp4", "mxfp4"),
            lambda found: lower(found, margin("N20"), absence_contradicts=True),
        )
        for name, one in families(results, "nvfp4", "mxfp4").items()
    }
    return noted(
        all_of(results, parts),
        "the paper's model is a hybrid; how far either is from BF16 is in the table of the recipe",
    )


@claim("nvfp4", "N21")
def n21(results: Results) -> Verdict:
    """Between the paper's own points: with 1.25 times the tokens MXFP4 is still above NVFP4, with 1.5 below."""
    fewer, more = (beside(results, "scratch", f"mxfp4-{times}", "nvfp4-whole") for times in ("1.25", "1.50"))
    if isinstance(fewer, NotRun) or isinstance(more, NotRun):
        return not_run(results.scale_name)
    return every({"1.25 times the tokens are too few": higher(fewer), "1.5 times are enough": lower(more)})


# -------------------------------------------------------------------------------- which blocks


@claim("nvfp4", "N6")
def n6(results: Results) -> Verdict:
    parts = {}
    for arm in ("last-4", "first-2-last-2"):
        found = beside(results, "layers", "first-4", arm)
        if not isinstance(found, NotRun):
            parts[f"first-4 above {arm}"] = higher(found, margin("N6"), absence_contradicts=True)
    return noted(all_of(results, parts), *of_the_decay(results, "layers"))


@claim("nvfp4", "N7")
def n7(results: Results) -> Verdict:
    """As many last blocks as four are of the paper's twenty."""
    layers = part(results, "layers")
    if having(layers, "nvfp4-base") is None:
        return not_run(results.scale_name)
    errors = by_block(layers)

    def above(blocks: Mapping[int, float]) -> float:
        *_, most = order = sorted(blocks)
        last = order[-max(1, round(len(order) / 5)) :]
        rest = [value for block, value in blocks.items() if block not in last]
        return fmean(blocks[block] for block in last) - fmean(rest) if rest else blocks[most]

    numbers = {trial: above(blocks) for trial, blocks in errors.items() if len(blocks) > 1}
    found = own(layers, numbers, "nvfp4-base")
    return noted(
        decided(found, lambda data: higher(data, margin("N7"), absence_contradicts=True)),
        "the last fifth of the blocks beside the others, by the mean over their linear layers, at the end of training",
    )


# -------------------------------------------------------------------------------- stochastic rounding


@claim("nvfp4", "N9")
def n9(results: Results) -> Verdict:
    if having(part(results, "rounding"), "sr-gradients", "kept") is None:
        return not_run(results.scale_name)
    parts = {
        f"{arm} above sr-gradients": decided(
            beside(results, "rounding", arm, "sr-gradients"),
            lambda found: higher(found, margin("N9"), absence_contradicts=True),
        )
        for arm in paper("nvfp4").claim("N9").arms
    }
    parts["sr-gradients no worse than none"] = decided(
        beside(results, "rounding", "sr-gradients", "kept"), lambda found: no_worse(found, margin("N9"))
    )
    return noted(every(parts), *of_the_decay(results, "rounding"))


@claim("nvfp4", "N10")
def n10(results: Results) -> Verdict:
    found = beside(results, "rounding", "sr-backward", "sr-gradients")
    verdict = decided(found, lambda data: equivalent(data, margin("N10")))
    return noted(verdict, *of_the_decay(results, "rounding"), *_at_all(results, "rounding", "kept", "sr-gradients"))


# -------------------------------------------------------------------------------- the Hadamard transform


@claim("nvfp4", "N13")
def n13(results: Results) -> Verdict:
    """Of Fprop and Dgrad the paper says elsewhere that there is no benefit: no harm does not contradict it."""
    found = {gemm: beside(results, "hadamard", f"rht-{gemm}", "rht-none") for gemm in ("wgrad", "fprop", "dgrad")}
    least = margin("N13")
    parts = {}
    for gemm, data in found.items():
        if isinstance(data, NotRun):
            continue
        if gemm == "wgrad":
            parts["below none in Wgrad"] = lower(data, least)
        else:
            parts[f"above none in {gemm.capitalize()}"] = higher(data, least)
    return noted(all_of(results, parts), *of_the_decay(results, "hadamard"))


def _equal(results: Results, name: str) -> Verdict:
    """Each arm of the claim as good as its baseline."""
    said = paper("nvfp4").claim(name)
    assert said.baseline is not None
    found = {arm: beside(results, "hadamard", arm, said.baseline) for arm in said.arms}
    verdict = all_of(
        results, {arm: equivalent(data, margin(name)) for arm, data in found.items() if not isinstance(data, NotRun)}
    )
    return noted(verdict, *of_the_decay(results, "hadamard"), *_at_all(results, "recipe", "no-rht", "nvfp4"))


def _at_all(results: Results, sweep: str, without: str, having_it: str) -> tuple[str, ...]:
    """What there is to be seen of what a null varies: its absence altogether."""
    apart = shown_apart(results, sweep, without, having_it)
    return (f"without it altogether, training ends {apart} from where it does with it",) if apart else ()


@claim("nvfp4", "N14")
def n14(results: Results) -> Verdict:
    return _equal(results, "N14")


@claim("nvfp4", "N16")
def n16(results: Results) -> Verdict:
    return _equal(results, "N16")


# -------------------------------------------------------------------------------- consistency


@claim("nvfp4", "N17")
def n17(results: Results) -> Verdict:
    found = {arm: beside(results, "consistency", arm, "weights-different") for arm in paper("nvfp4").claim("N17").arms}
    parts = {
        f"{arm} below weights-different": lower(data, margin("N17"), absence_contradicts=True)
        for arm, data in found.items()
        if not isinstance(data, NotRun)
    }
    return noted(all_of(results, parts), *of_the_decay(results, "consistency"))


@claim("nvfp4", "N18")
def n18(results: Results) -> Verdict:
    """That it matters by the end, where the decay is, is judged; that it does so there alone is not."""
    found = beside(results, "consistency", "activations-same", "activations-different")
    verdict = decided(found, lambda data: lower(data, margin("N18"), absence_contradicts=True))
    said = "that it matters by the end of the decay is judged, that it does not before is not"
    return noted(verdict, *of_the_decay(results, "consistency"), said)


# -------------------------------------------------------------------------------- late switches


def switched(results: Results, *arms: str) -> tuple[str, str, str] | None:
    """The sweep that this scale has these switches in, its arm that stays in NVFP4, and the one to be restored."""
    for sweep, (stays, reference) in SWITCHES.items():
        if having(part(results, sweep), *arms, stays, reference) is not None:
            return sweep, stays, reference
    return None


@claim("nvfp4", "N22")
def n22(results: Results) -> Verdict:
    """Restored: no worse than what never was in NVFP4, and below what stays in it, else there is nothing to restore."""
    found = switched(results, "switch-both", "switch-late")
    if found is None:
        return not_run(results.scale_name)
    sweep, stays, reference = found
    both = decided(beside(results, sweep, "switch-both", reference), lambda data: no_worse(data, margin("N22")))
    verdict = every(
        {
            f"switched early, no worse than {TITLES[reference]}": both,
            "switched early, below NVFP4 to the end": decided(beside(results, sweep, "switch-both", stays), lower),
            "switched late, below NVFP4 to the end": decided(beside(results, sweep, "switch-late", stays), lower),
        }
    )
    return noted(verdict, *_evaluated(results, sweep, stays))


def _evaluated(results: Results, sweep: str, stays: str) -> tuple[str, ...]:
    """What of a switch's gain is no training's: recipes are evaluated as they end."""
    gain = shown_apart(results, sweep, "switch-after", stays)
    said = f"the weights of NVFP4 to the end, evaluated in BF16, are {gain} from their own loss without a step more"
    return (said,) if gain else ()


@claim("nvfp4", "N23")
def n23(results: Results) -> Verdict:
    """Most: more than half of what switching both passes gains at the same point. None: less than the margin."""
    found = switched(results, "switch-forward", "switch-backward", "switch-both")
    if found is None:
        return not_run(results.scale_name)
    sweep, stays, _ = found
    switch = part(results, sweep)
    forward = beside(results, sweep, "switch-forward", stays)
    backward = beside(results, sweep, stays, "switch-backward")
    most = own(switch, _beyond_half(switch, "switch-forward", stays, "switch-both"), "switch-forward")
    if isinstance(most, Differences):
        most = replace(most, relative=True)
    verdict = every(
        {
            "forward, below NVFP4 to the end": decided(
                forward, lambda data: lower(data, margin("N23"), absence_contradicts=True)
            ),
            "forward, more than half of what both passes gain": decided(most, higher),
            "backward, no gain": decided(backward, lambda data: no_worse(data, margin("N23"))),
        }
    )
    narrow = "the backward switch's weights are in 1×16 blocks, as the paper's, and so from where the decay begins"
    if apart := shown_apart(results, sweep, "long-no-2d", stays):
        narrow += f"; without the switch, such blocks end {apart} from NVFP4's"
    return noted(verdict, narrow, *_evaluated(results, sweep, stays))


def _beyond_half(switch: Results, arm: str, from_arm: str, to_arm: str) -> dict[str, float]:
    """Of each of the arm's trials: how far below the middle between two other arms' losses, relative."""
    done = switch.trials[switch.trials["state"] == "done"]
    loss = {str(key): float(value) for key, value in zip(done["id"], done.get(VALIDATION, []), strict=True)}
    starts, ends = ids(switch, from_arm), ids(switch, to_arm)
    found = {}
    for seed, trial in ids(switch, arm).items():
        try:
            high, low = loss[starts[seed]], loss[ends[seed]]
            found[trial] = ((high + low) / 2 - loss[trial]) / low
        except KeyError:
            continue
    return found

"""Compute what GaussWS's claims compare: divergence and recovery of curves, and numbers of several arms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fewbits.analysis.engine.claims.hooks import measure, metric
from fewbits.analysis.engine.claims.pairs import formula, scope_of
from fewbits.analysis.engine.results.data import CannotFail, Differences, Measured, NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.pairing import AlsoDiverged
from fewbits.analysis.studies.gaussws.metrics_widths import finals
from fewbits.sweeps.planning.store import State

LOSS = "validation_loss"
FAMILIES = {"GPT-2": "gpt2", "Llama 2": "llama2"}
NEAR_NINE = 8.5  # bits; if the widths of no square exceed this, nothing could fail a claim about 9 bits


# -------------------------------------------------------------------------------- divergence and recovery

TENTHS = 10
LOST = 1e3  # the value of `unrecovered` for a run that stopped with infinite losses


def _unrecovered(end: float) -> Callable[[Results], Mapping[str, float]]:
    """Return the function that computes, by trial, how far a training loss has risen without recovering.

    It is the mean loss of the last tenth of a curve over the least mean of an earlier tenth, minus 1; above 0.02, we
    call the run diverged. end: the fraction of the training's steps at which the curve is cut.
    """

    def compute(results: Results) -> Mapping[str, float]:
        found = AlsoDiverged()
        for trial, curve in results.curves("loss").drop_duplicates(["id", "step"]).groupby("id"):
            if (curve["state"] == State.DIVERGED).any():
                found[str(trial)] = LOST
                continue
            steps = results.plan.trials[str(trial)].trial.training.steps * end
            own = curve[curve["step"] < steps]
            means = own["value"].groupby((own["step"] * TENTHS // steps).astype(int)).mean()
            if len(means) == TENTHS:
                found[str(trial)] = float(means.iloc[-1] / means.iloc[:-1].min() - 1)
        return found

    return compute


metric("gaussws", "unrecovered")(_unrecovered(1.0))
metric("gaussws", "unrecovered_at_half")(_unrecovered(0.5))


@metric("gaussws", f"{LOSS}_throughout")
def loss_throughout(results: Results) -> Mapping[str, float]:
    """Return by trial the mean validation loss over all evaluations."""
    curves = results.curves(LOSS).drop_duplicates(["id", "step"])
    return {str(trial): float(mean) for trial, mean in curves.groupby("id")["value"].mean().items()}


# -------------------------------------------------------------------------------- numbers of several arms

Values = Mapping[str, float]


@measure("gaussws", "G12")
def optimizers(results: Results) -> Mapping[str, Measured]:
    """Return comparisons of Adam-mini with AdamW: GaussWS's cost with both optimizers, and DiffQ's loss.

    AdamW's arms are those at the low learning rate if the arms with Adam-mini have that rate, as at scale paper.
    """
    rates = {_rate(results, "gpt2-mini", "adam-mini"), _rate(results, "gpt2", "bf16-low")}
    end = "-low" if len(rates) == 1 and None not in rates else ""
    arms = {name: (("gpt2",), f"{name}{end}", LOSS) for name in ("bf16", "gaussws", "diffq")}
    mini = {"bf16": "adam-mini", "gaussws": "adam-mini-gaussws", "diffq": "adam-mini-diffq"}
    arms |= {f"mini {name}": (("gpt2-mini",), arm, LOSS) for name, arm in mini.items()}

    def interaction(of: Values) -> float:
        return (of["mini gaussws"] / of["mini bf16"]) / (of["gaussws"] / of["bf16"]) - 1

    def chosen(*names: str) -> dict[str, tuple[tuple[str, ...], str, str]]:
        return {name: arms[name] for name in names}

    return {
        "no interaction": formula(results, chosen("mini gaussws", "mini bf16", "gaussws", "bf16"), interaction),
        "DiffQ improves": formula(
            results, chosen("mini diffq", "diffq"), lambda of: of["mini diffq"] / of["diffq"] - 1
        ),
    }


@measure("gaussws", "G20")
def adam_mini(results: Results) -> Mapping[str, Measured]:
    """Return by how much Adam-mini's loss over AdamW's is greater with GaussWS than with BF16, in Llama 2."""
    arms = {name: (("llama2",), name, LOSS) for name in ("bf16", "gaussws")}
    arms |= {
        f"mini {name}": (("llama2-mini",), f"adam-mini{end}", LOSS)
        for name, end in (("bf16", ""), ("gaussws", "-gaussws"))
    }

    def beside(of: Values) -> float:
        return (of["mini gaussws"] / of["gaussws"]) / (of["mini bf16"] / of["bf16"]) - 1

    return {"Adam-mini beside AdamW": formula(results, arms, beside)}


def _rate(results: Results, sweep: str, arm: str) -> float | None:
    """Return an arm's learning rate; None if the plan does not have the arm."""
    found = (m.id for m in results.members if (m.cell.sweep, m.cell.arm) == (sweep, arm))
    trial = next(found, None)
    return None if trial is None else results.plan.trials[trial].trial.optimizer.lr


@measure("gaussws", "G15")
def narrow(results: Results) -> Mapping[str, Measured]:
    """Return the difference of GPT-2's and Llama 2's mean bit widths, and the shares of widths up to 9 bits.

    GPT-2 is that with λ = 0, as Llama 2, if the scale has it. The shares have no value if no width comes near 9 bits.
    """
    ends = finals(results)
    widths = {trial: one.mean for trial, one in ends.items()}
    sweep, arm = ("widths", "lambda-0") if "widths" in {m.cell.sweep for m in results.members} else ("gpt2", "gaussws")
    arms = {"gpt2": ((sweep,), arm, widths), "llama2": (("llama2",), "gaussws", widths)}
    difference = formula(results, arms, lambda of: of["gpt2"] - of["llama2"], relative=False)
    made: dict[str, Measured] = {
        "GPT-2's mean width above Llama 2's": replace(difference, observed=True, noise=None)
        if isinstance(difference, Differences)
        else difference
    }
    for name, family in {"GPT-2": "gpt2", "Llama 2": "llama2"}.items():
        found = scope_of(results, ("gaussws",), (family,))
        if found is None:
            made[f"up to 9 bits in {name}"] = NotPlanned(f"not run at this scale ({results.scale_name})")
            continue
        trials = {m.id: ends[m.id] for m in found.results.members if m.cell.arm == "gaussws" and m.id in ends}
        if not trials:
            data: Measured = NoData("no learned widths")
        elif max(one.highest for one in trials.values()) < NEAR_NINE:
            data = CannotFail(
                f"no width came near 9 bits (the greatest: {max(o.highest for o in trials.values()):.2f})"
            )
        else:
            data = Differences(tuple(one.tiers[9] for one in trials.values()), trials=tuple(trials), observed=True)
        made[f"up to 9 bits in {name}"] = data
    return made


def _cast_cost(family: str, form: str) -> Callable[[Results], Measured]:
    """Return the function that computes the relative change of the loss by a cast of the weights."""
    arms = {"cast": ((family,), "gaussws", f"{LOSS}_{form}"), "uncast": ((family,), "gaussws", f"{LOSS}_unquantized")}
    return lambda results: formula(results, arms, lambda of: of["cast"] / of["uncast"] - 1)


@measure("gaussws", "G19")
def cast(results: Results) -> Mapping[str, Measured]:
    """Return the relative change of the loss if weights are cast to the formats of their learned widths."""
    return {f"learned widths, {name}": _cast_cost(of, "cast")(results) for name, of in FAMILIES.items()}


@measure("gaussws", "narrow-costs")
def narrow_gpt2(results: Results) -> Mapping[str, Measured]:
    return {"three bits, GPT-2": _cast_cost("gpt2", "narrow")(results)}


@measure("gaussws", "narrow-costs-llama2")
def narrow_llama2(results: Results) -> Mapping[str, Measured]:
    return {"three bits, Llama 2": _cast_cost("llama2", "narrow")(results)}

"""Make GaussWS's tables B.1 (properties of methods), C.1 (needed bits) and E.1 (settings); Table 1 is in timing.py."""

from __future__ import annotations

from collections.abc import Callable

from fewbits.analysis.engine.results.arms import BASELINE
from fewbits.analysis.engine.results.data import NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import Column, paper
from fewbits.analysis.engine.results.places import not_planned, sweep_places, trial_ids
from fewbits.analysis.report.items import Ours, OutOfReach, Setting, TableCell, TableResult, TableRow, Value
from fewbits.analysis.report.registry import table
from fewbits.analysis.studies.gaussws import benches, theory
from fewbits.analysis.studies.gaussws.stability import RATES, all_ended
from fewbits.analysis.studies.gaussws.widths import OURS
from fewbits.analysis.tables.cells import PERCENT, cell
from fewbits.analysis.tables.comparing import compare
from fewbits.analysis.tables.settings import Describe, Lineage, SettingsColumn, settings_table
from fewbits.analysis.views.numbers import number
from fewbits.sweeps.planning.cost import tokens_of

# -------------------------------------------------------------------------------- Table B.1

NOT_OURS = {
    "fqt": OutOfReach("the subject of the MoR and NVFP4 studies"),
    "nipq": OutOfReach("tested neither here nor in the paper"),
}
ARMS = {"bf16": BASELINE, "gaussws": OURS, "diffq": "diffq"}


@table("gaussws", "Table B.1")
def table_b1(results: Results) -> TableResult:
    """Return Table B.1: the paper rates methods in words such as `good`; our entries are measurements.

    The rated properties are throughput, stability, accuracy and flexibility. Our entry for flexibility is a
    description.
    """
    printed = paper("gaussws").table("Table B.1")
    measure: dict[str, Callable[[Results, str], Ours]] = {
        "throughput": _throughput,
        "stability": _stability,
        "accuracy": _accuracy,
        "flexibility": _flexibility,
    }
    rows = []
    for row in printed.rows:
        cells = []
        for column, words in zip(printed.columns, row.text, strict=True):
            ours = NOT_OURS.get(row.id) or measure[column.id](results, ARMS[row.id])
            cells.append(TableCell(ours, words, printed.source))
        rows.append(TableRow(row.title, tuple(cells)))
    notes = (
        "Throughput: the share of BF16's throughput that the timed models lose with AdamW",
        "Stability: seeds that leave the trunk's level at 3, 10 and 30 times the trunk's learning rate (Table A)",
        "Accuracy: the change of GPT-2's validation loss from BF16",
    )
    return TableResult(tuple(column.title for column in printed.columns), tuple(rows), notes)


def _throughput(results: Results, arm: str) -> Ours:
    found = benches.training(results)
    if found is None:
        return not_planned(results)
    if arm == BASELINE:
        return Setting("0 %, by definition")
    words = [
        f"{lost[0]:.1%} ({name})"
        for name, arms in found.timed.items()
        if (lost := benches.overhead(arms, "adamw", arm)) is not None
    ]
    return Setting(", ".join(words)) if words else not_planned(results)


def _stability(results: Results, arm: str) -> Ours:
    found = all_ended(results)
    there = [found[arm, rate] for rate in RATES if (arm, rate) in found]
    if not there:
        return not_planned(results)
    return Setting(", ".join(one.text for one in there), tuple(key for one in there for key in one.trials))


def _accuracy(results: Results, arm: str) -> Ours:
    part = sweep_places(results, "gpt2")
    if isinstance(part, NotPlanned):
        return part
    if arm == BASELINE:
        return Setting("0 %, by definition")
    ours = cell(compare(results, "validation_loss", arm, sweep="gpt2"), PERCENT).ours
    if not isinstance(ours, Value):
        return ours
    half = f" ± {(ours.interval.high - ours.interval.low) / 2:.3f}" if ours.interval else ""
    return Setting(f"{ours.mean:+.3f}{half} %", ours.trials)


def _flexibility(results: Results, arm: str) -> Ours:
    return Setting("none" if arm == BASELINE else "a learned width for each 32×32 square")


# -------------------------------------------------------------------------------- Table C.1

TIES = "Mantissa of ŵ that keeps ties, too (ours)"


@table("gaussws", "Table C.1")
def table_c1(results: Results) -> TableResult:
    """Return Table C.1: the exponent and mantissa bits that weights need at each bit width, and formats that have them.

    Our numbers of bits, beside the paper's, are found by a search with our kernels.
    """
    printed = paper("gaussws").table("Table C.1")
    found = theory.table_c1_rows()
    rows = [
        TableRow(row.title, tuple(_entry(ours, theirs, printed.source) for ours, theirs in found[row.id]), row.unit)
        for row in printed.rows
    ]
    ties = tuple(_entry(float(theory.least_mantissa_bits(bits, ties=True)), None, "") for bits in theory.WIDTHS)
    notes = (
        "Ours are found by search, not computed from Proposition 3: the fewest exponent bits with which a format has "
        "the least step needed, and the fewest mantissa bits with which a cast swallows no noise, for any weight and "
        "maximum",
        "With b − 2 mantissa bits, noise in a block whose maximum is a power of two is half a step, a tie; one more "
        "bit is needed to keep this noise",
    )
    return TableResult(tuple(column.title for column in printed.columns), (*rows, TableRow(TIES, ties, "bits")), notes)


def _entry(ours: float | str, theirs: float | str | None, source: str) -> TableCell:
    return TableCell(Setting(ours) if isinstance(ours, str) else Value(ours), theirs, source)


# -------------------------------------------------------------------------------- Table E.1

SWEEPS = {
    "gpt2-124m": "gpt2",
    "llama2-134m": "llama2",
    "llama2-1b": "large",
}  # by column of the paper's table, our sweep
SETTINGS: dict[str, Describe] = {
    "length": lambda line: f"{line.arm.training.length:,}",
    "local": lambda line: f"{line.arm.training.micro_batch:,}",
    "steps": lambda line: " + ".join(f"{t.training.steps:,}" for t in line.trials),
    "warmup": lambda line: f"{line.trials[0].schedule.warmup_steps:,}",
    "tokens": lambda line: number(sum(map(tokens_of, line.trials)) / 1e6),
    "lr": lambda line: f"{line.arm.optimizer.lr:.2g} to {line.arm.optimizer.lr * line.arm.schedule.final_ratio:.2g}",
    "decay": lambda line: f"{line.arm.optimizer.weight_decay:g}",
    "lambda": lambda line: f"{line.arm.recipe.sampler.penalty:g}",
}
UNSTATED: dict[str, Describe] = {
    "Learning rate of b_i": lambda line: f"{line.arm.optimizer.bits_lr_ratio:g} × the weights' rate",
    "Weight decay of b_i": lambda line: f"{_bits_decay(line):g}",
    "Optimizer": lambda line: (
        f"β {line.arm.optimizer.beta1:g} and {line.arm.optimizer.beta2:g}, ε "
        f"{line.arm.optimizer.eps:g}, gradients clipped at {line.arm.optimizer.clip}"
    ),
}


def _column(results: Results, column: Column) -> SettingsColumn:
    """Return the column with the settings of our GaussWS arm that is shown beside a column of the paper's Table E.1.

    column: the paper's column. Our settings come from the trials' configs, except the number of ranks, which is in the
    plan.
    """
    part = sweep_places(results, SWEEPS[column.id])
    trials = [] if isinstance(part, NotPlanned) else [part.plan.trials[name] for name in trial_ids(part, OURS).values()]
    ranks = max((planned.resources.ranks for planned in trials), default=1)
    settings = SETTINGS | {
        "accumulation": lambda line: f"{line.arm.training.batch // line.arm.training.micro_batch // ranks:,}",
        "ranks": lambda _: f"{ranks:,}",
    }
    return SettingsColumn(column.title, part, OURS, settings=settings)


def _bits_decay(line: Lineage) -> float:
    """Return the weight decay of bit widths in an arm's trial; if it is not set, that of the weights applies.

    line: the arm's trial and the trunks from which it branches.
    """
    own = line.arm.optimizer.bits_weight_decay
    return line.arm.optimizer.weight_decay if own is None else own


@table("gaussws", "Table E.1")
def table_e1(results: Results) -> TableResult:
    """Return a table of training settings: the paper's, and those in the configs of our GaussWS arms."""
    printed = paper("gaussws").table("Table E.1")
    columns = [_column(results, column) for column in printed.columns]
    return settings_table(
        printed, columns, UNSTATED, ("A sum of steps means the steps of the trunk plus the steps of the branch",)
    )

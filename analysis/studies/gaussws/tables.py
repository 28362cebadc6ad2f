"""GaussWS's tables B.1 (properties of methods), C.1 (needed bits) and E.1 (settings)."""

from __future__ import annotations

from fewbits.analysis.engine.results.data import NoData, NotPlanned
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.results.paper import Column, paper
from fewbits.analysis.engine.results.places import BASELINE, sweep_places, trial_ids
from fewbits.analysis.report.items import Ours, Setting, TableCell, TableResult, TableRow, Value
from fewbits.analysis.report.registry import table
from fewbits.analysis.studies.gaussws import metrics, metrics_timing, theory
from fewbits.analysis.studies.gaussws.metrics import OURS, bits_decay
from fewbits.analysis.tables.cells import PERCENT, Describe, SettingsColumn, cell, compare, settings_table
from fewbits.analysis.views.html import number
from fewbits.sweeps.planning.cost import tokens_of

# -------------------------------------------------------------------------------- Table B.1

NOT_OURS = {"fqt": "the subject of the MoR and NVFP4 studies", "nipq": "tested neither here nor in the paper"}


@table("gaussws", "Table B.1")
def table_b1(results: Results) -> TableResult:
    """Return Table B.1: the paper rates methods in words such as `good`; our entries are measurements."""
    printed = paper("gaussws").table("Table B.1")
    measure = {"throughput": _throughput, "stability": _stability, "accuracy": _accuracy}

    def ours(row: str, column: str) -> Ours:
        if row in NOT_OURS:
            return Setting(NOT_OURS[row])
        if column == "flexibility":
            return Setting("none" if row == BASELINE else "a learned width for each 32×32 square")
        if row == BASELINE and column != "stability":
            return Setting("0 %, by definition")
        return measure[column](results, row)

    rows = []
    for row in printed.rows:
        words = zip(printed.columns, row.text, strict=True)
        cells = (TableCell(ours(row.id, column.id), text, printed.source) for column, text in words)
        rows.append(TableRow(row.title, tuple(cells)))
    notes = (
        "Throughput: the share of BF16's throughput that the timed models lose with AdamW",
        "Stability: seeds that leave the trunk's level at 3, 10 and 30 times the trunk's learning rate (Table A)",
        "Accuracy: the change of GPT-2's validation loss from BF16, with half of its 95 % interval",
    )
    return TableResult(tuple(column.title for column in printed.columns), tuple(rows), notes)


def _throughput(results: Results, arm: str) -> Ours:
    found = metrics_timing.bench(results, "train")
    timed = {} if found is None else found.timed
    lost = {name: metrics_timing.overhead(arms, "adamw", arm) for name, arms in timed.items()}
    words = [f"{one[0]:.1%} ({name})" for name, one in lost.items() if one is not None]
    return Setting(", ".join(words)) if words else NoData("not measured")


def _stability(results: Results, arm: str) -> Ours:
    part = sweep_places(results, "stability")
    if isinstance(part, NotPlanned):
        return part
    left, words, used = metrics.left(part), [], []
    for rate in ("x3", "x10", "x30"):
        ended = [key for key in trial_ids(part, arm, {"rate": rate}).values() if key in left]
        words.append(f"{sum(left[key] for key in ended):g} of {len(ended)}")
        used += ended
    return Setting(", ".join(words), tuple(used))


def _accuracy(results: Results, arm: str) -> Ours:
    ours = cell(compare(results, "validation_loss", arm, sweep="gpt2"), PERCENT).ours
    if not isinstance(ours, Value):
        return ours
    half = f" ± {ours.interval.half:.3f}" if ours.interval else ""
    return Setting(f"{ours.mean:+.3f}{half} %", ours.trials)


# -------------------------------------------------------------------------------- Table C.1

TIES = "Mantissa of ŵ that keeps ties, too (ours)"


@table("gaussws", "Table C.1")
def table_c1(results: Results) -> TableResult:
    """Return Table C.1: the bits that weights need at each width, found by a search with our kernels."""
    printed, found = paper("gaussws").table("Table C.1"), theory.table_c1_rows()

    def entry(ours: float | str, theirs: float | str | None) -> TableCell:
        return TableCell(Setting(ours) if isinstance(ours, str) else Value(ours), theirs, printed.source)

    rows = [TableRow(row.title, tuple(entry(*pair) for pair in found[row.id]), row.unit) for row in printed.rows]
    ties = tuple(TableCell(Value(float(theory.least_mantissa_bits(bits, ties=True)))) for bits in theory.WIDTHS)
    notes = (
        "Ours are found by search, not computed from Proposition 3: the fewest exponent bits with which a format has "
        "the least step needed, and the fewest mantissa bits with which a cast swallows no noise, for any weight and "
        "maximum, ties aside",
        "With b − 2 mantissa bits, noise in a block whose maximum is a power of two is half a step, a tie; one more "
        "bit is needed to keep this noise",
    )
    return TableResult(tuple(column.title for column in printed.columns), (*rows, TableRow(TIES, ties, "bits")), notes)


# -------------------------------------------------------------------------------- Table E.1

SWEEPS = {"gpt2-124m": "gpt2", "llama2-134m": "llama2", "llama2-1b": "large"}  # by column of the paper's table
SETTINGS: dict[str, Describe] = {
    "length": lambda line: f"{line[-1].training.length:,}",
    "local": lambda line: f"{line[-1].training.micro_batch:,}",
    "steps": lambda line: " + ".join(f"{t.training.steps:,}" for t in line),
    "warmup": lambda line: f"{line[0].schedule.warmup_steps:,}",
    "tokens": lambda line: number(sum(map(tokens_of, line)) / 1e6),
    "lr": lambda line: f"{line[-1].optimizer.lr:.2g} to {line[-1].optimizer.lr * line[-1].schedule.final_ratio:.2g}",
    "decay": lambda line: f"{line[-1].optimizer.weight_decay:g}",
    "lambda": lambda line: f"{line[-1].recipe.sampler.penalty:g}",
}
UNSTATED: dict[str, Describe] = {
    "Learning rate of b_i": lambda line: f"{line[-1].optimizer.bits_lr_ratio:g} × the weights' rate",
    "Weight decay of b_i": lambda line: f"{bits_decay(line[-1]):g}",
    "Optimizer": lambda line: (
        f"β {line[-1].optimizer.beta1:g} and {line[-1].optimizer.beta2:g}, ε "
        f"{line[-1].optimizer.eps:g}, gradients clipped at {line[-1].optimizer.clip}"
    ),
}


def _column(results: Results, column: Column) -> SettingsColumn:
    """Return the column of our GaussWS arm: settings from the trials' configs, the number of ranks from the plan."""
    part = sweep_places(results, SWEEPS[column.id])
    trials = [] if isinstance(part, NotPlanned) else [part.plan.trials[name] for name in trial_ids(part, OURS).values()]
    ranks = max((planned.resources.ranks for planned in trials), default=1)
    settings = SETTINGS | {
        "accumulation": lambda line: f"{line[-1].training.batch // line[-1].training.micro_batch // ranks:,}",
        "ranks": lambda _: f"{ranks:,}",
    }
    return SettingsColumn(column.title, part, OURS, settings=settings)


@table("gaussws", "Table E.1")
def table_e1(results: Results) -> TableResult:
    printed = paper("gaussws").table("Table E.1")
    columns = [_column(results, column) for column in printed.columns]
    notes = ("A sum of steps means the steps of the trunk plus the steps of the branch",)
    return settings_table(printed, columns, UNSTATED, notes)

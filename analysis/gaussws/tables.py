"""GaussWS's Tables B.1, C.1 and E.1; Table 1 is among what was timed (speed.py)."""

from __future__ import annotations

from collections.abc import Callable

from fewbits.analysis.arms import BASELINE, compared, ids
from fewbits.analysis.cells import PERCENT, cell
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.gaussws import benches, theory
from fewbits.analysis.gaussws.arms import DIFFQ, OURS, chosen
from fewbits.analysis.gaussws.stability import RATES, all_ended
from fewbits.analysis.noise import VALIDATION
from fewbits.analysis.registry import table
from fewbits.analysis.results import NotRun, Ours, OutOfReach, Setting, TableCell, TableResult, TableRow, Value
from fewbits.analysis.settings import Line, model, setting
from fewbits.analysis.show.markup import number
from fewbits.analysis.studies.gaussws.exact import table_c1_rows
from fewbits.sweeps.planning.cost import tokens_of

# -------------------------------------------------------------------------------- Table B.1

ELSEWHERE = {
    "fqt": OutOfReach("the MoR and NVFP4 studies are of it"),
    "nipq": OutOfReach("not tested, nor by the paper"),
}
ARMS = {"bf16": BASELINE, "gaussws": OURS, "diffq": DIFFQ}


@table("gaussws", "Table B.1")
def table_b1(results: Results) -> TableResult:
    """The paper's words beside what was measured of each."""
    said = paper("gaussws").table("Table B.1")
    columns: dict[str, Callable[[Results, str], Ours]] = {
        "throughput": _throughput,
        "stability": _stability,
        "accuracy": _accuracy,
        "flexibility": _flexibility,
    }
    rows = []
    for row in said.rows:
        cells = []
        for column, words in zip(said.columns, row.text, strict=True):
            ours = ELSEWHERE.get(row.id) or columns[column.id](results, ARMS[row.id])
            cells.append(TableCell(ours, words, said.source))
        rows.append(TableRow(row.title, tuple(cells)))
    notes = (
        "Throughput: the share of BF16's that is lost, of the models timed, under AdamW",
        "Stability: seeds that leave their way under induced instability, ours, at 3, 10 and 30 times the rate",
        "Accuracy: GPT-2's change of validation loss from BF16",
    )
    return TableResult(tuple(column.title for column in said.columns), tuple(rows), notes)


def _throughput(results: Results, arm: str) -> Ours:
    found = benches.training(results)
    if found is None:
        return NotRun(results.scale_name)
    if arm == BASELINE:
        return Setting("0 %, by definition", ())
    words = []
    for name, of in found.models.items():
        timed, plain = of.get(("adamw", arm)), of.get(("adamw", benches.PLAIN))
        if timed is not None and plain is not None:
            words.append(f"{benches.overhead(timed, plain)[0]:.1%} ({name})")
    return Setting(", ".join(words), ()) if words else NotRun(results.scale_name)


def _stability(results: Results, arm: str) -> Ours:
    found = all_ended(results)
    there = [found[arm, rate] for rate in RATES if (arm, rate) in found]
    if not there:
        return NotRun(results.scale_name)
    return Setting(", ".join(one.words for one in there), tuple(key for one in there for key in one.trials))


def _accuracy(results: Results, arm: str) -> Ours:
    part = chosen(results, "gpt2")
    if isinstance(part, NotRun):
        return part
    if arm == BASELINE:
        return Setting("0 %, by definition", ())
    ours = cell(compared(part, VALIDATION, arm), PERCENT).ours
    if not isinstance(ours, Value):
        return ours
    half = f" ± {(ours.interval.high - ours.interval.low) / 2:.3f}" if ours.interval else ""
    return Setting(f"{ours.mean:+.3f}{half} %", ours.trials)


def _flexibility(results: Results, arm: str) -> Ours:
    return Setting("none" if arm == BASELINE else "a width learned for each 32×32", ())


# -------------------------------------------------------------------------------- Table C.1

TIES = "Mantissa of ŵ, ties kept too (ours)"


@table("gaussws", "Table C.1")
def table_c1(results: Results) -> TableResult:
    said = paper("gaussws").table("Table C.1")
    found = table_c1_rows()
    rows = [
        TableRow(row.title, tuple(_entry(ours, theirs, said.source) for ours, theirs in found[row.id]), row.unit)
        for row in said.rows
    ]
    ties = tuple(_entry(float(theory.least_mantissa_bits(bits, ties=True)), None, "") for bits in theory.widths())
    notes = (
        "Ours are found, not computed from Proposition 3: the fewest bits of exponent whose least step is the one "
        "needed, and the fewest of mantissa with which a cast swallows no noise, whatever the weight and the maximum",
        "Noise on a maximum that is a power of two is half a step at b − 2 bits, a tie: keeping it takes one bit more",
    )
    return TableResult(tuple(column.title for column in said.columns), (*rows, TableRow(TIES, ties, "bits")), notes)


def _entry(ours: float | str, theirs: float | str | None, source: str) -> TableCell:
    return TableCell(Setting(ours, ()) if isinstance(ours, str) else Value(ours, None, 0, ()), theirs, source)


# -------------------------------------------------------------------------------- Table E.1

MODELS = {"gpt2-124m": "gpt2", "llama2-134m": "llama2", "llama2-1b": "large"}  # columns, with the sweeps of ours
SETTINGS: dict[str, Callable[[Line], str]] = {
    "length": lambda line: f"{line.arm.training.length:,}",
    "local": lambda line: f"{line.arm.training.micro_batch:,}",
    "steps": lambda line: " + ".join(f"{t.training.steps:,}" for t in line.trials),
    "warmup": lambda line: f"{line.trials[0].schedule.warmup_steps:,}",
    "tokens": lambda line: number(sum(map(tokens_of, line.trials)) / 1e6),
    "lr": lambda line: f"{line.arm.optimizer.lr:.2g} to {line.arm.optimizer.lr * line.arm.schedule.final_ratio:.2g}",
    "decay": lambda line: f"{line.arm.optimizer.weight_decay:g}",
    "lambda": lambda line: f"{line.arm.recipe.sampler.penalty:g}",
}
SILENT: dict[str, Callable[[Line], str]] = {  # what the paper does not state
    "Learning rate of b_i": lambda line: f"{line.arm.optimizer.bits_lr_ratio:g} × that of weights",
    "Weight decay of b_i": lambda line: f"{_bits_decay(line):g}",
    "Optimizer": lambda line: (
        f"β {line.arm.optimizer.beta1:g} and {line.arm.optimizer.beta2:g}, ε "
        f"{line.arm.optimizer.eps:g}, gradients clipped at {line.arm.optimizer.clip}"
    ),
}


def _settings(part: Results | NotRun) -> dict[str, Callable[[Line], str]]:
    """A batch is shared out to as many processes as the plan gives a trial."""
    trials = [] if isinstance(part, NotRun) else [part.plan.trials[name] for name in ids(part, OURS).values()]
    ranks = max((planned.resources.ranks for planned in trials), default=1)
    return SETTINGS | {
        "accumulation": lambda line: f"{line.arm.training.batch // line.arm.training.micro_batch // ranks:,}",
        "ranks": lambda _: f"{ranks:,}",
    }


def _bits_decay(line: Line) -> float:
    own = line.arm.optimizer.bits_weight_decay
    return line.arm.optimizer.weight_decay if own is None else own


@table("gaussws", "Table E.1")
def table_e1(results: Results) -> TableResult:
    """Ours from the trials' own configs: those of the GaussWS arms."""
    said = paper("gaussws").table("Table E.1")
    parts = {column.id: chosen(results, MODELS[column.id]) for column in said.columns}

    settings = {name: _settings(part) for name, part in parts.items()}

    def ours(column: str, describe: Callable[[Line], str], *, assumed: bool = False) -> Ours:
        part = parts[column]
        return part if isinstance(part, NotRun) else setting(part, OURS, describe, assumed=assumed)

    rows = [TableRow("Model", tuple(TableCell(ours(c.id, model), c.title, said.source) for c in said.columns))]
    for row in said.rows:
        values = row.values or row.text
        cells = (
            TableCell(ours(column.id, settings[column.id][row.id]), value, said.source, comparable=False)
            for column, value in zip(said.columns, values, strict=True)
        )
        rows.append(TableRow(row.title, tuple(cells), row.unit))
    for title, describe in SILENT.items():
        cells = (TableCell(ours(column.id, describe, assumed=True)) for column in said.columns)
        rows.append(TableRow(title, tuple(cells)))
    notes = ("Steps of a trunk and of a branch are shown as a sum", "Assumed: what the paper does not state")
    return TableResult(tuple(column.title for column in said.columns), tuple(rows), notes)

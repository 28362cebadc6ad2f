"""Tables of our own: noise, power, every arm from BF16 and from the whole recipe, and gradient errors by block.

Changes are in percent, paired by seed, with 95 % intervals.
"""

from __future__ import annotations

from collections.abc import Mapping

from fewbits.analysis.arms import AGAIN, BAD, BASELINE, TRUNK, compared, having, ids, own
from fewbits.analysis.cells import BLANK, PERCENT, cell, change
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.noise import LOSSES, VALIDATION, Comparison, losses, noise_table, power_table
from fewbits.analysis.nvfp4.arms import SAME_MODEL, TITLES, part
from fewbits.analysis.nvfp4.gradient_errors import by_block
from fewbits.analysis.registry import table
from fewbits.analysis.results import NotRun, Table, TableCell, TableResult, TableRow

TRUNKS = (TRUNK, "nvfp4-trunk", "mxfp4-trunk")


@table("nvfp4", "Noise", "How far trials are apart that should be the same")
def noise(results: Results) -> TableResult:
    return noise_table(part(results, "recipe"), [(AGAIN, BASELINE)], TITLES)


# -------------------------------------------------------------------------------- power

PAIRS = (  # claims, sweep, arm, baseline
    ("N1", "recipe", "nvfp4", "fp8"),
    ("N1", "hybrid", "nvfp4", "fp8"),
    ("N3", "scratch", "base-whole", "bf16-whole"),
    ("N4", "switch", "long-no-sr", "nvfp4-long"),
    ("N4", "switch", "long-no-rht", "nvfp4-long"),
    ("N4", "switch", "long-no-2d", "nvfp4-long"),
    ("N6", "layers", "first-4", "last-4"),
    ("N6", "layers", "first-4", "first-2-last-2"),
    ("N8", "recipe", "kept", "with-2d"),
    ("N8", "recipe", "with-2d", "with-rht"),
    ("N8", "recipe", "with-rht", "with-sr"),
    ("N9", "rounding", "sr-activations", "sr-gradients"),
    ("N9", "rounding", "sr-weights", "sr-gradients"),
    ("N9", "rounding", "sr-gradients", "kept"),
    ("N10", "rounding", "sr-backward", "sr-gradients"),
    ("N13", "hadamard", "rht-wgrad", "rht-none"),
    ("N13", "hadamard", "rht-fprop", "rht-none"),
    ("N13", "hadamard", "rht-dgrad", "rht-none"),
    ("N14", "hadamard", "rht-2", "rht-16"),
    ("N14", "hadamard", "rht-4", "rht-16"),
    ("N14", "hadamard", "rht-128", "rht-16"),
    ("N16", "hadamard", "signs-none", "signs-one"),
    ("N16", "hadamard", "signs-each", "signs-one"),
    ("N17", "consistency", "weights-same", "weights-different"),
    ("N17", "consistency", "weights-squares", "weights-different"),
    ("N18", "consistency", "activations-same", "activations-different"),
    ("N20", "recipe", "nvfp4", "mxfp4"),
    ("N20", "hybrid", "nvfp4", "mxfp4"),
    ("N22", "switch", "switch-both", BASELINE),
    ("N23", "switch", "switch-forward", "nvfp4-long"),
    ("N23", "switch", "nvfp4-long", "switch-backward"),
)
PLACES = {"hybrid": "hybrid", "layers": "20 blocks", "scratch": "from nothing"}


@table("nvfp4", "Power", "What each comparison of losses can tell")
def power(results: Results) -> TableResult:
    rows = (
        (
            Comparison(arm, baseline, paper("nvfp4").margin(name), (name,), PLACES.get(sweep, "")),
            compared(part(results, sweep), VALIDATION, arm, baseline),
        )
        for name, sweep, arm, baseline in PAIRS
    )
    return power_table(rows, TITLES)


# -------------------------------------------------------------------------------- every arm


@table("nvfp4", "Recipe", "Every arm of the same model, from BF16 and from the whole recipe")
def recipe(results: Results) -> Table:
    of = part(results, "recipe")
    arms = [arm for sweep in SAME_MODEL if sweep != "outlook" for arm in _arms(results, sweep)]
    return _arms_table(of, list(dict.fromkeys(arms)), BASELINE, "nvfp4")


@table("nvfp4", "Blocks", "Which blocks stay in BF16, of 20")
def blocks(results: Results) -> Table:
    return _arms_table(part(results, "layers"), _arms(results, "layers"), BASELINE, "nvfp4-base")


@table("nvfp4", "Hybrids", "The hybrid's arms")
def hybrids(results: Results) -> Table:
    return _arms_table(part(results, "hybrid"), _arms(results, "hybrid"), BASELINE, "nvfp4")


@table("nvfp4", "From nothing", "Trained from the beginning in the arm's own formats")
def from_nothing(results: Results) -> Table:
    return _arms_table(part(results, "scratch"), _arms(results, "scratch"), "bf16-whole", "nvfp4-whole")


@table("nvfp4", "Outlook", "What came after the paper (not its own arms), beside its recipe")
def outlook(results: Results) -> Table:
    return _arms_table(part(results, "recipe"), _arms(results, "outlook"), BASELINE, "nvfp4")


def _arms(results: Results, sweep: str) -> list[str]:
    """In the order of the sweep; without what arms branch from."""
    found = dict.fromkeys(str(m.cell.arm) for m in results.members if m.cell.sweep == sweep)
    return [arm for arm in found if arm not in TRUNKS]


def _arms_table(of: Results, arms: list[str], baseline: str, whole: str) -> Table:
    """Changes of every loss from the baseline, and of validation loss from the whole recipe. Of arms that are the same
    trials the first stands for all."""
    if having(of, baseline) is None:
        return NotRun(of.scale_name)
    rows, names = [], {tuple(ids(of, baseline).values()): baseline}
    for arm in arms:
        if names.setdefault(tuple(ids(of, arm).values()), arm) != arm or arm == baseline:
            continue
        cells = [change(of, metric, arm, baseline) for metric in losses(of)]
        if _steps(of, arm) != _steps(of, baseline):
            cells[0] = BLANK
        cells.append(BLANK if arm == whole else change(of, VALIDATION, arm, whole))
        rows.append(TableRow(TITLES.get(arm, arm), tuple(cells), "%"))
    title = f"Validation loss, from {'NVFP4' if whole.startswith('nvfp4') and whole != 'nvfp4-base' else 'plain NVFP4'}"
    columns = (*(f"{name}, from BF16" for name in LOSSES), title)
    notes = [f"{TITLES[BAD]}: the control"] if BAD in arms else []
    if any(_steps(of, arm) != _steps(of, baseline) for arm in arms):
        notes.append(
            "Training loss, a mean of a run's last tenth, four steps at least, is blank where runs are not as long"
        )
    return TableResult(columns, tuple(rows), tuple(notes))


def _steps(of: Results, arm: str) -> set[int]:
    return {of.plan.trials[trial].trial.training.steps for trial in ids(of, arm).values()}


# -------------------------------------------------------------------------------- gradients

KINDS = {"All": None, "QKV": "qkv", "Projection": "out", "FC1": "up", "FC2": "down"}


@table("nvfp4", "Gradient errors", "Relative error of weight gradients by block, of 20, in plain NVFP4 (N7)")
def gradient_errors(results: Results) -> Table:
    of, arm = part(results, "layers"), "nvfp4-base"
    if having(of, arm) is None:
        return NotRun(results.scale_name)
    found = {title: by_block(of, kind) for title, kind in KINDS.items()}
    count = max((block for trial in found["All"].values() for block in trial), default=0)
    rows = tuple(
        TableRow(f"Block {block}", tuple(_error(of, by_trial, arm, block) for by_trial in found.values()), "%")
        for block in range(1, count + 1)
    )
    notes = ("The norm of the error over that of the gradient, one layer's own operands quantized and not",)
    return TableResult(tuple(KINDS), rows, notes)


def _error(of: Results, by_trial: Mapping[str, Mapping[int, float]], arm: str, block: int) -> TableCell:
    numbers = {trial: blocks[block] for trial, blocks in by_trial.items() if block in blocks}
    return cell(own(of, numbers, arm), PERCENT)

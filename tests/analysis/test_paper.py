"""Test the papers' YAML files: complete, consistent in themselves, and equal to values that were derived by hand."""

import math

import pytest

from fewbits.analysis.engine.results.paper import STUDIES as FOLDER
from fewbits.analysis.engine.results.paper import paper
from fewbits.sweeps.planning.studies import STUDIES

PAPERS = sorted(path.parent.name for path in FOLDER.glob("*/paper.yaml"))
COUNTS = {"mor": (4, 21), "nvfp4": (5, 14), "gaussws": (4, 8), "primer": (3, 0)}  # tables, figures


@pytest.mark.parametrize("study", PAPERS)
def test_a_paper_is_complete_and_in_order(study: str) -> None:
    found = paper(study)
    assert (len(found.tables), len(found.figures)) == COUNTS[study]
    assert (found.study, found.arxiv) == (study, STUDIES[study].arxiv)


# (table, column) → change of training and of validation loss from BF16 in percent, computed by hand from the paper.
CHANGES = {
    ("Table 2", "c1-block"): (0.19, 0.13),
    ("Table 2", "c1-tensor"): (0.14, 0.03),
    ("Table 2", "c1-channel"): (0.21, 0.12),
    ("Table 2", "c2-block"): (0.32, 0.41),
    ("Table 2", "c2-tensor"): (0.25, 0.16),
    ("Table 2", "c2-channel"): (0.30, 0.21),
    ("Table 3", "block"): (0.19, 0.13),
    ("Table 3", "block-64"): (0.23, 0.34),
    ("Table 3", "threshold-5"): (0.18, 0.16),
    ("Table 3", "amax"): (0.18, 0.08),
    ("Table 3", "e8m0"): (-0.43, -0.43),
    ("Table 4", "two-way"): (-0.27, -0.37),
    ("Table 4", "three-way"): (-1.23, -1.37),
}


@pytest.mark.parametrize(("place", "expected"), CHANGES.items(), ids=lambda value: " ".join(map(str, value)))
def test_mors_losses_change_as_was_derived_by_hand(place: tuple[str, str], expected: tuple[float, float]) -> None:
    table, column = paper("mor").table(place[0]), place[1]
    for row, percent in zip(("loss", "validation_loss"), expected, strict=True):
        change = table.change(row, column)
        assert change is not None
        assert 100 * change == pytest.approx(percent, abs=0.0051)


def test_mors_own_numbers_agree_with_its_tables() -> None:
    mor = paper("mor")
    assert mor.numbers["e4m3-best"].value + mor.numbers["fallback-channel-c1"].value == pytest.approx(1)
    assert mor.table("Table 3").change("mmlu", "amax") == pytest.approx(mor.numbers["amax-mmlu"].value, abs=5e-5)
    changes = [
        (table.id, column.id, table.change("validation_loss", column.id))
        for table in mor.tables[1:]
        for column in table.columns
    ]
    beyond = [place for *place, change in changes if change is not None and abs(change) > 0.005]
    assert beyond == [["Table 4", "three-way"]], "M3's bound of 0.5 % does not apply to three-way"


def test_nvfp4s_categories_are_the_means_of_their_tasks() -> None:
    table = paper("nvfp4").table("Table 2")
    categories = {
        "general": ("mmlu", "mmlu_pro", "agieval_en"),
        "math_all": ("gsm8k", "math"),
        "multilingual": ("global_mmlu", "mgsm"),
        "code": ("humaneval", "mbpp"),
        "commonsense": ("arc_challenge", "hellaswag", "openbookqa", "piqa", "winogrande"),
    }
    assert sum(map(len, categories.values())) + len(categories) == len(table.rows)
    for category, tasks in categories.items():
        for column in ("fp8", "nvfp4"):
            values = [table.value(task, column) or 0 for task in tasks]
            assert table.value(category, column) == pytest.approx(sum(values) / len(values), abs=0.0101)


def test_gaussws_overheads_are_those_of_its_throughputs() -> None:
    table = paper("gaussws").table("Table 1")
    for column in table.columns:
        if column.baseline is None:
            continue
        changes = [table.change(f"speed-{size}", column.id) or 0 for size in ("134m", "1b", "3b", "70b")]
        for size, change in zip(("134m", "1b", "3b", "70b"), changes, strict=True):
            printed = table.value(f"overhead-{size}", column.id)
            ours, base = (table.value(f"speed-{size}", c) or 0 for c in (column.id, column.baseline))
            rounding = 100 * sum((0.05 if value > 10 else 0.005) / base for value in (ours, base))
            assert -100 * change == pytest.approx(printed, abs=rounding + 0.005)
        printed_ones = [table.value(f"overhead-{size}", column.id) or 0 for size in ("134m", "1b", "3b", "70b")]
        ratio = math.prod(1 - one / 100 for one in printed_ones) ** (1 / 4)
        assert 100 * (1 - ratio) == pytest.approx(table.value("overhead", column.id), abs=0.0051)

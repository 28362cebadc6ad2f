"""Test the table of studies and `fewbits list studies`: each study is listed, and its recipes exist."""

import json
import re
from pathlib import Path

import pytest

from fewbits.commands.list import main
from fewbits.experiments.config_files import names
from fewbits.sweeps.planning.studies import STUDIES, Study


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_a_study_names_recipes_of_the_tree_and_its_baseline(study: Study) -> None:
    assert set(study.recipes) <= set(names("recipe"))
    assert len(set(study.recipes)) == len(study.recipes)
    assert study.recipes[0] == "bf16"


def test_a_study_names_the_recipes_of_its_sweeps() -> None:
    assert {"mor/tensor", "mor/three-way", "e2m1-tensor"} < set(STUDIES["mor"].recipes)
    assert {"gaussws", "diffq"} < set(STUDIES["gaussws"].recipes)


def test_studies_are_told_apart() -> None:
    studies = list(STUDIES.values())
    for field in ("name", "arxiv", "title"):
        assert len({getattr(study, field) for study in studies}) == len(studies)
    assert [study.name for study in studies] == list(STUDIES) == ["mor", "nvfp4", "gaussws", "primer"]


def test_sweeps_name_neither_claims_nor_figures() -> None:
    """Files of `sweeps` name no claims (such as M9) and no figures: analysis depends on sweeps, not vice versa."""
    root = Path(__file__).parents[3] / "sweeps"
    files = [*root.rglob("*.py"), *root.rglob("*.yaml")]
    assert len(files) > 50
    for file in files:
        assert not re.search(r"\b[MNG]\d{1,2}\b|\bFigs?\b|\bfigure \d", file.read_text("utf-8")), file


def test_people_and_programs_are_told_of_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["studies"]) == 0
    text = capsys.readouterr().out
    assert main(["studies", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(STUDIES)
    for row in rows:
        assert tuple(row["recipes"]) == STUDIES[row["name"]].recipes
        assert row["title"] in text
        assert not row["arxiv"] or f"arXiv {row['arxiv']}" in text
        assert all(recipe in text for recipe in row["recipes"])

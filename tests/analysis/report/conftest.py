"""A fixture with a report of the tiny trials of ../conftest.py, which serve as trials of the study MoR."""

import shutil
from pathlib import Path

import pytest

from fewbits.analysis.report.study_report import read_study
from fewbits.sweeps.planning.stored_plans import save_plan
from tests.analysis.conftest import SWEEP
from tests.analysis.report.report_inputs import Made, stand_in


@pytest.fixture(scope="session")
def original(trained: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return the report of the tiny trials, which tests must not change.

    The tables, figures and claims of `stand_in` replace those of MoR.
    """
    runs, cache = trained
    folder = tmp_path_factory.mktemp("report")
    where = f"overrides:\n  - runtime.cache={cache}\n  - runtime.device=cpu"
    (folder / "tiny.yaml").write_text("study: mor\n" + SWEEP.replace("overrides:", where, 1))
    shutil.copytree(runs / "runs", folder / "runs")
    made = Made(folder / "tiny.yaml", folder / "runs", folder / "reports")
    words = [str(made.file), f"runtime.runs={made.store}"]
    save_plan(read_study(words).results.plan, words)
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in(monkeypatch)
        assert made.report() == 0
    return made

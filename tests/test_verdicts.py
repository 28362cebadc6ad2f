"""The table of verdicts in README.md holds what is stored in docs/verdicts, and nothing else."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
REPORT = {
    "study": "mor",
    "scale": "cpu",
    "size": "3.3 M parameters, 1 M tokens; up to 20% of a quantized run's tokens in its own recipe",
    "flags": [],
    "notices": [],
    "claims": {"M1": {"outcome": "reproduced"}, "M2": {"outcome": "reproduced"}, "M3": {"outcome": "not run"}},
}


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("verdicts", ROOT / "docs" / "verdicts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_has_the_stored_verdicts(script: Any) -> None:
    text = (ROOT / "README.md").read_text()
    assert script.with_table(text, script.table(script.records(ROOT / "docs" / "verdicts"))) == text


def test_a_row_lists_the_claims_of_each_outcome(script: Any) -> None:
    head, _, mor, *others = script.table([script.stored(REPORT, "x")]).splitlines()
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    cells = dict(zip(columns, (cell.strip() for cell in mor.strip("|").split("|")), strict=True))
    assert cells["reproduced"] == "2: M1 M2"
    assert (cells["contradicted"], cells["not run"]) == ("0", "1: M3")
    assert "out of reach" not in cells
    assert re.search(r"`cpu`: 3.3 M parameters, 1 M tokens \(\w+\)", cells["runs"])
    assert all("make reproduce-" in line for line in others)


def test_a_report_with_warnings_is_refused(script: Any, tmp_path: Path) -> None:
    report = tmp_path / "verdicts.json"
    report.write_text(json.dumps(REPORT | {"flags": ["bf16, seed 0: missing"]}))
    before = (ROOT / "README.md").read_text()
    with pytest.raises(SystemExit, match="missing"):
        script.main([str(report)])
    assert (ROOT / "README.md").read_text() == before

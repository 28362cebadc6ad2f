"""Test docs/findings.py, which writes the page of findings, and that published labels follow from published runs."""

import json
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from fewbits.analysis.engine.claims.judging import judge_claims
from fewbits.analysis.engine.claims.schema import load_claims
from fewbits.analysis.engine.results.archive import read_archive
from fewbits.analysis.engine.results.frames import Results

DOCS = Path(__file__).parents[1] / "docs"
HEADING = "transformer"


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        return SourceFileLoader("findings", str(DOCS / "findings.py")).load_module()


def record(scale: str, verdict: str, shown: str = "+1 %", **changed: Any) -> dict[str, Any]:
    part = {"name": HEADING, "status": "supported", "shown": shown, "printed": "+2 %", "effect": 0.01, "repeats": 6}
    claim = {"verdict": verdict, "judged_at": "pretrained", "parts": [part | {"interval": [0, 1, 0.9], "margin": None}]}
    return {"study": "nvfp4", "scale": scale, "claims": {"N20": claim | changed}}


def judged(script: Any, *records: dict[str, Any]) -> Any:
    return script.judge("nvfp4", load_claims("nvfp4").claim("N20"), records)


def test_the_page_is_that_of_the_published_reports(script: Any) -> None:
    page = script.findings(script.records(script.GALLERY))
    assert (DOCS / "findings.md").read_text() == page
    assert len(page.split()) <= 900


@pytest.mark.parametrize("folder", [path.parent for path in sorted(DOCS.glob("gallery/*/verdicts.json"))], ids=str)
def test_the_published_labels_follow_from_the_published_runs(script: Any, folder: Path) -> None:
    archive = read_archive(folder / "results.parquet")
    (study,) = {sweep.study for sweep in archive.plan.sweeps}
    verdicts = judge_claims(script.empirical(study), Results(archive.plan, archive))
    published = json.loads((folder / "verdicts.json").read_text())["claims"]
    assert {name: published[name]["verdict"] for name in verdicts} == {
        name: verdict.outcome for name, verdict in verdicts.items()
    }


def test_the_label_on_the_claims_own_scale_counts(script: Any) -> None:
    one = judged(script, record("cpu-full", "reproduced"), record("pretrained", "cannot tell", "+3 %"))
    assert (one.label, one.scale, one.leading["shown"]) == ("cannot tell", "pretrained", "+3 %")
    row = script.effect_row("nvfp4", one)
    assert row == ("NVFP4 N20", HEADING, "+2 %", "+3 %", 6, "pretrained", "cannot tell")

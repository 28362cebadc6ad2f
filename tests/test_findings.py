"""Test docs/findings.py, which writes the pages of findings and evidence from committed results."""

from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from fewbits.analysis.engine.claims.schema import load_claims

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


def test_the_pages_are_those_of_the_results(script: Any) -> None:
    archives = list(script.archived(script.EVIDENCE))
    assert script.EVIDENCE.with_suffix(".md").read_text() == script.evidence(archives)
    page = script.findings([*archives, *script.records(script.GALLERY)])
    assert (DOCS / "findings.md").read_text() == page
    assert len(page.split()) <= 900


def test_the_label_on_the_claims_own_scale_counts(script: Any) -> None:
    one = judged(script, record("cpu-full", "reproduced"), record("pretrained", "cannot tell", "+3 %"))
    assert (one.label, one.scale, one.leading["shown"]) == ("cannot tell", "pretrained", "+3 %")
    row = script.effect_row("nvfp4", one)
    assert row == ("NVFP4 N20", HEADING, "+2 %", "+3 %", 6, "pretrained", "cannot tell")


def test_records_of_other_rules_do_not_count(script: Any) -> None:
    old = record("pretrained", "reproduced")
    del old["claims"]["N20"]["judged_at"]
    one = judged(script, old)
    assert (one.label, one.leading) == ("not run", None)
    assert script.effect_row("nvfp4", one) is None

"""Test docs/gallery.py, which publishes reports in docs/gallery with a table of their verdicts."""

import json
import re
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FINDING = {"name": "block above bf16", "status": "supported", "reason": "x", "effect": 0.01, "n": 3, "relative": True}
PASSED = {"id": "graded", "title": "E5M2 is worse", "findings": [FINDING]}
FAILED = {"id": "moves", "title": "moves the norm", "findings": [FINDING | {"status": "undecided", "p_for": 0.4}]}


def verdict(name: str, outcome: str, **record: Any) -> dict[str, Any]:
    claim = {"id": name, "statement": f"what {name} says", "parts": [{"test": "exact"}]}
    source = {"place": "1", "sentence": "s"}
    return {"claim": claim | {"source": source}, "outcome": outcome, "reason": "because", **record}


REPORT = {
    "study": "mor",
    "scale": "cpu",
    "size": "3.3 M parameters, 1 M tokens; up to 20% of a quantized run's tokens in its own recipe",
    "overrides": ["study=mor", "scale=cpu"],
    "flags": [],
    "notices": [],
    "claims": {
        "M1": verdict("M1", "reproduced"),
        "M2": verdict("M2", "reproduced", findings=[FINDING], controls=[PASSED, FAILED]),
        "M3": verdict("M3", "not run"),
    },
}


@pytest.fixture(scope="module")
def script() -> Any:
    return SourceFileLoader("gallery", str(ROOT / "docs" / "gallery.py")).load_module()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "index.html").write_text("<html>")
    (tmp_path / "verdicts.json").write_text(json.dumps(REPORT))
    return tmp_path


def test_the_tables_are_those_of_the_gallery(script: Any) -> None:
    published = script.records(script.GALLERY)
    assert (script.GALLERY / "index.md").read_text() == f"{script.HEAD}\n{script.by_scale(published)}"
    readme = script.README.read_text()
    assert readme == script.with_findings(readme, published)
    assert len(readme.split()) <= 1200


@pytest.mark.parametrize("change", [{"flags": ["bf16, seed 0: missing"]}, {"notices": ["other sources: missing"]}])
def test_a_report_with_warnings_is_refused(script: Any, folder: Path, change: dict[str, Any]) -> None:
    (folder / "verdicts.json").write_text(json.dumps(REPORT | change))
    before = (script.GALLERY / "index.md").read_text()
    with pytest.raises(SystemExit, match="missing"):
        script.main([str(folder)])
    assert (script.GALLERY / "index.md").read_text() == before


def test_relative_links_of_published_pages_lead_to_files(script: Any) -> None:
    pages = list(script.GALLERY.glob("*/index.html"))
    links = [(page, link) for page in pages for link in re.findall(r'href="([^"#:]+)"', page.read_text("utf-8"))]
    assert len(links) >= len(pages)
    assert [(page.parent.name, link) for page, link in links if not (page.parent / link).exists()] == []

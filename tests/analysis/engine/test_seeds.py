"""Test that no scale plans seeds whose earlier results influenced the design (analysis/engine/claims/seeds.yaml)."""

import re
from pathlib import Path

import pytest
import yaml

from fewbits.analysis.engine.claims.schema import pilots_of
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.views.provenance import Provenance
from fewbits.sweeps.planning.plan import plan
from fewbits.sweeps.planning.studies import load_sweeps

CONFIG = Path(__file__).parents[3] / "sweeps" / "config"
SCALES = sorted(CONFIG.glob("*/scale/*.yaml"))


@pytest.mark.parametrize("path", SCALES, ids=lambda path: f"{path.parents[1].name}, {path.stem}")
def test_planned_seeds_did_not_shape_their_design(path: Path) -> None:
    scale = yaml.safe_load(path.read_text("utf-8")) or {}
    sweeps = {sweep.stem for sweep in path.parents[1].glob("*.yaml")}
    assert {*scale.get("seeds_of", {}), *scale.get("arms_of", {})} <= sweeps
    for seeds in (scale.get("seeds", [0]), *scale.get("seeds_of", {}).values()):
        assert pilots_of(path.parents[1].name, path.stem, seeds) == {}


@pytest.mark.parametrize(("seeds", "named"), [("20,28", "20"), ("28,29", "")])
def test_a_report_of_seeds_that_shaped_its_design_has_a_warning(tmp_path: Path, seeds: str, named: str) -> None:
    """Check that a report has a warning if and only if some of its seeds influenced the design.

    docs/gallery.py refuses to publish a report with this warning. named: the seeds that the warning must list.
    """
    small = ("data=synthetic", "data.size=65536", "data.repeat=1000000000", "runtime.device=cpu")
    words = ("study=primer", "scale=cpu", f"seeds=[{seeds}]", f"runtime.runs={tmp_path}", *small)
    notices = Provenance(Results(plan(*load_sweeps(words))), words).notices
    assert len(notices) == bool(named)
    assert all(re.search(rf"\({named}\)", notice) for notice in notices)

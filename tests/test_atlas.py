"""Test docs/atlas.py, the page with the errors and costs of every recipe, and the sweep that measures them."""

import json
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fewbits.commands import list as listing
from fewbits.experiments.config import load_recipe
from fewbits.experiments.config_files import names
from fewbits.kernels.quantizer import Mixture
from fewbits.models.costs import mean_bits, product_rates
from fewbits.sweeps.planning.expand import expand
from fewbits.sweeps.planning.studies import ATLAS, load_sweeps

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> Any:
    return SourceFileLoader("atlas", str(ROOT / "docs" / "atlas.py")).load_module()


@pytest.mark.parametrize("scale", ATLAS.scales)
def test_a_sweep_measures_every_recipe_or_says_why_not(scale: str) -> None:
    (sweep,), extra = load_sweeps(("study=atlas", f"scale={scale}"))
    unmeasured = sweep.values["unmeasured"]
    probed = {dict(cell.axes)["recipe"] for cell in expand(sweep, extra) if cell.arm == "probe"}
    assert sorted([*probed, *unmeasured]) == sorted(names("recipe"))
    assert all(unmeasured.values())
    assert scale == "smoke" or len(sweep.seeds) >= 6


def test_recipes_of_scale_pretrained_can_leave_weights_in_high_precision() -> None:
    (sweep,), _ = load_sweeps(("study=atlas", "scale=pretrained"))
    assert all(load_recipe(name, {"fprop.w": "high", "dgrad.w": "high"}).operands for name in sweep.axes["recipe"])


def test_recipes_are_compared_on_equal_weights_batches_and_seeds() -> None:
    (sweep,), extra = load_sweeps(("study=atlas", "scale=cpu"))
    others = {
        tuple(text for text in cell.overrides if not text.startswith("recipe="))
        for cell in expand(sweep, extra)
        if cell.arm == "probe" and cell.seed == 38
    }
    assert len(others) == len(sweep.values["models"])


def results(*rows: tuple[str, int, dict[str, float]]) -> Any:
    """Return what `add` reads of results: rows of a recipe's name, a seed and measured numbers."""
    (sweep,), _ = load_sweeps(("study=atlas", "scale=smoke", "seeds=[0,1]"))
    members, numbers = [], {}
    for name, seed, measured in rows:
        axes = (("recipe", name), ("model", "nemotron-nano"))
        members.append(SimpleNamespace(cell=SimpleNamespace(axes=axes, overrides=()), id=(name, seed)))
        numbers[name, seed] = measured
    trial = SimpleNamespace(training=SimpleNamespace(steps=2, micro_batch=4, length=128))
    trials = {key: SimpleNamespace(trial=trial, key=key) for key in numbers}
    files = SimpleNamespace(standing=lambda planned: SimpleNamespace(numbers=numbers[planned.key]))
    return SimpleNamespace(members=members, plan=SimpleNamespace(trials=trials, sweeps=(sweep,)), files=files)


def probe(error: float, **more: float) -> dict[str, float]:
    numbers = {"increase_relative": 0.01, "gradient_systematic": error, "gradient_noise": 0.0, **more}
    return {**numbers, "gradient_error": error}


def test_the_table_has_means_with_intervals_and_reasons(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = {name: script.described(name) for name in ("nvfp4", "mor/two-way", "fp8-current")}
    for name in ("diffq", "gaussws", "gaussws-mor", "nemotron-3"):
        recipes[name] = recipes["nvfp4"] | {"measured": {}, "why": {}}
    models: dict[str, str] = {}
    shares = {"decisions.e4m3": 0.75, "decisions.bf16": 0.25}
    rows = [("nvfp4", 0, probe(0.2)), ("nvfp4", 1, probe(0.3)), ("mor/two-way", 0, probe(0.02, **shares))]
    script.add(recipes, models, results(*rows, ("fp8-current", 0, probe(0.04))))
    of_nvfp4 = recipes["nvfp4"]["measured"]["nemotron-nano"]
    assert of_nvfp4["error"] == [pytest.approx(25), pytest.approx(31.57, rel=1e-3)]  # t(1 df, 95 %) is 6.314
    assert recipes["mor/two-way"]["measured"]["nemotron-nano"]["bits"] == pytest.approx(0.75 * 8 + 0.25 * 16, abs=1e-2)
    assert (recipes["nvfp4"]["H100"], recipes["nvfp4"]["B200"]) == (1, 0.25)
    assert 4.2 < recipes["nvfp4"]["bits"] < 4.5
    page = script.page({"date": "2026-01-02", "commit": "abc", "archives": [], "models": models, "recipes": recipes})
    assert page.count("<tr>") == 1 + len(recipes)
    assert page.count("learned during training") >= 3
    assert 'data-key="25">25.0<small> ± 32</small>' in page
    svg = script.picture(recipes, "nemotron-nano")
    assert all(f">{name}</text>" in svg for name in ("nvfp4", "mor/two-way", "fp8-current"))
    assert ">diffq<" not in svg
    monkeypatch.setattr(listing, "_atlas", lambda: json.loads(json.dumps(recipes)))
    lines = list(listing._atlas_lines(listing._atlas()["nvfp4"]))
    assert lines[0].endswith("gradient error 25 % (bias 25 %, noise 0 %)")
    assert list(listing._atlas_lines({})) == []


def test_labels_of_equal_points_do_not_overlap(script: Any) -> None:
    points = [(f"a-recipe-of-{i}", 300.0 + i % 3, 200.0 + i) for i in range(48)]
    boxes = list(script.placed(points).values())
    assert len(boxes) == 48
    assert not any(script.overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize(("name", "rates"), [("deepseek-v3", {9: 2, 10: 1}), ("mxfp8", {9: 1, 10: 2})])
def test_products_are_fast_where_a_gpu_has_them(script: Any, name: str, rates: dict[int, float]) -> None:
    assert {major: product_rates(script.of(name).operands, major)["fprop"] for major in rates} == rates


def test_mixtures_have_the_bits_of_their_decisions() -> None:
    mixture = Mixture.parse("e4m3:1x32:e8m0 @ error<0.1 | bf16")
    assert mean_bits(mixture, {"e4m3": 0.5, "bf16": 0.5}) == (8.25 + 16) / 2
    assert mean_bits(mixture, {}) == 8.25
    assert mean_bits(None, {}) == 16

"""Test docs/atlas.py, the page with the errors and costs of every recipe, and the sweep that measures them."""

import json
import math
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fewbits.commands import list as listing
from fewbits.experiments.config_files import names
from fewbits.kernels.quantizer import Mixture
from fewbits.models.layer_table import mean_bits, product_rates
from fewbits.sweeps.planning.plan import plan
from fewbits.sweeps.planning.studies import ATLAS, load_sweeps
from fewbits.sweeps.planning.sweep import expand

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> Any:
    return SourceFileLoader("atlas", str(ROOT / "docs" / "atlas.py")).load_module()


@pytest.mark.parametrize("scale", ATLAS.scales)
def test_a_sweep_measures_every_recipe_or_says_why_not(scale: str) -> None:
    sweeps, extra = load_sweeps(("study=atlas", f"scale={scale}"))
    assert [sweep.name for sweep in sweeps] == ["probes", "training"][: len(sweeps)]
    for sweep in sweeps:
        unmeasured = sweep.values["unmeasured"]
        measured = {dict(cell.axes)["recipe"] for cell in expand(sweep, extra) if cell.arm in ("probe", "trained")}
        assert sorted([*measured, *unmeasured]) == sorted(names("recipe"))
        assert all(unmeasured.values())
        assert scale == "smoke" or len(sweep.seeds) >= (6 if sweep.name == "probes" else 3)


def test_recipes_are_trained_from_the_trunks_that_are_probed() -> None:
    made = plan(*load_sweeps(("study=atlas", "scale=smoke", "axes.recipe=[bf16,nvfp4]")))
    found: dict[tuple[str, str], set[str]] = {}
    for member in made.members:
        found.setdefault((member.cell.sweep, member.cell.arm), set()).add(member.id)
    assert found["training", "trunk"] < found["probes", "trunk"]
    trained = [made.trials[key] for key in (*found["training", "trained"], *found["training", "short"])]
    assert sorted(planned.trial.training.steps for planned in trained) == [2, 4, 4]
    assert not any(planned.trial.is_probe for planned in trained)
    assert {planned.parent for planned in trained} == found["training", "trunk"]


def test_recipes_are_compared_on_equal_weights_batches_and_seeds() -> None:
    (sweep,), extra = load_sweeps(("study=atlas", "sweep=probes", "scale=cpu"))
    others = {
        tuple(text for text in cell.overrides if not text.startswith("recipe="))
        for cell in expand(sweep, extra)
        if cell.arm == "probe" and cell.seed == 38
    }
    assert len(others) == len(sweep.values["models"])


def results(sweep: str, *rows: tuple[str, int, dict[str, float]]) -> Any:
    """Return what `add` reads of results: rows of the name of a recipe or an arm, a seed and measured numbers."""
    (loaded,), _ = load_sweeps(("study=atlas", f"sweep={sweep}", "scale=smoke", "seeds=[0,1]"))
    members, trials, numbers = [], {}, {}
    for name, seed, measured in rows:
        axes = (("model", "nemotron-nano"), *([] if name in loaded.arms else [("recipe", name)]))
        arm = name if name in loaded.arms else "measured"
        cell = SimpleNamespace(sweep=sweep, arm=arm, axes=axes, overrides=())
        members.append(SimpleNamespace(cell=cell, id=(name, seed)))
        training = SimpleNamespace(steps=8 if name == "short" else 10, micro_batch=4, length=128)
        trials[name, seed] = SimpleNamespace(trial=SimpleNamespace(training=training), key=(name, seed))
        numbers[name, seed] = measured
    files = SimpleNamespace(standing=lambda planned: SimpleNamespace(numbers=numbers[planned.key]))
    return SimpleNamespace(members=members, plan=SimpleNamespace(trials=trials, sweeps=(loaded,)), files=files)


def probe(error: float, **more: float) -> dict[str, float]:
    numbers = {"increase_relative": 0.01, "gradient_systematic": error, "gradient_noise": 0.0, **more}
    return {**numbers, "gradient_error": error}


def test_the_table_has_means_with_intervals_and_reasons(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = {name: script.described(name) for name in ("nvfp4", "mor/two-way", "fp8-current")}
    for name in ("diffq", "gaussws", "gaussws-mor", "nemotron-3"):
        recipes[name] = recipes["nvfp4"] | {"measured": {}, "why": {}, "untrained": {}}
    models: dict[str, str] = {}
    shares = {"decisions.e4m3": 0.75, "decisions.bf16": 0.25}
    rows = [("nvfp4", 0, probe(0.2)), ("nvfp4", 1, probe(0.3)), ("mor/two-way", 0, probe(0.02, **shares))]
    script.add(recipes, models, results("probes", *rows, ("fp8-current", 0, probe(0.04))))
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
    assert lines[0].endswith("gradient error 25 %, its bias 25 %, its noise 0 %")
    assert list(listing._atlas_lines({})) == []


def test_changes_of_the_loss_are_also_extra_tokens_unless_the_slope_is_unknown(script: Any) -> None:
    def table(short: tuple[float, float], change: float) -> dict[str, Any]:
        recipes: dict[str, Any] = {name: {"measured": {}, "why": {}, "untrained": {}} for name in names("recipe")}
        loss = {"bf16": (2.0, 2.2), "short": short, "nvfp4": (2.0 * (1 + change), 2.2 * (1 + change))}
        rows = [(name, seed, {"validation_loss": pair[seed]}) for name, pair in loss.items() for seed in (0, 1)]
        script.add(recipes, {"nemotron-nano": ""}, results("training", *rows))
        return recipes["nvfp4"] | recipes["nvfp4"]["measured"]["nemotron-nano"]

    falling = (2.0 * 1.01, 2.2 * 1.01)
    slope = 0.01 / math.log(10 / 8)
    zero = pytest.approx(0, abs=1e-9)
    assert table(falling, 0.005)["trained"] == [pytest.approx(0.5), zero]
    assert table(falling, 0.005)["tokens"] == [pytest.approx(100 * math.expm1(0.005 / slope)), zero]
    assert "more than 100" in table(falling, 0.05)["untrained"]["tokens"]
    assert "slope" in table((2.0 * 1.01, 2.2 * 0.99), 0.005)["untrained"]["tokens"]
    assert "diverges" in table(falling, math.inf)["untrained"]["trained"]


@pytest.mark.parametrize(("name", "rates"), [("deepseek-v3", {9: 2, 10: 1}), ("mxfp8", {9: 1, 10: 2})])
def test_products_are_fast_where_a_gpu_has_them(script: Any, name: str, rates: dict[int, float]) -> None:
    assert {major: product_rates(script.of(name).operands, major)["fprop"] for major in rates} == rates


def test_mixtures_have_the_bits_of_their_decisions() -> None:
    mixture = Mixture.parse("e4m3:1x32:e8m0 @ error<0.1 | bf16")
    assert mean_bits(mixture, {"e4m3": 0.5, "bf16": 0.5}) == (8.25 + 16) / 2
    assert mean_bits(mixture, {}) == 8.25
    assert mean_bits(None, {}) == 16

"""Test runs as DataFrames: typed axis values, equal columns of all long frames, and exports."""

import shutil
from pathlib import Path

import pandas as pd
import pytest

import fewbits
from fewbits.analysis.tidy.runs import COLUMNS, LABELS, Runs
from fewbits.sweeps.planning.stored_plans import find_plan, save_plan
from tests.messages import names


@pytest.fixture(scope="module")
def project(trained: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sweep file tiny.yaml and its finished store `runs`."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(trained[0] / "runs", folder / "runs")
    where = f"overrides:\n  - runtime.cache={trained[1]}\n  - runtime.device=cpu"
    text = (trained[0] / "tiny.yaml").read_text()
    (folder / "tiny.yaml").write_text("study: mor\n" + text.replace("overrides:", where, 1))
    words = [str(folder / "tiny.yaml"), f"runtime.runs={folder / 'runs'}"]
    save_plan(find_plan(words), words)
    return folder


@pytest.fixture(scope="module")
def sweep(project: Path) -> Runs:
    return fewbits.read(project / "tiny.yaml", runs=project / "runs")


def test_the_frame_of_trials_has_axes_results_and_settings(sweep: Runs, project: Path) -> None:
    trials = sweep.trials
    assert sweep.store == project / "runs"
    assert list(trials)[: len(LABELS) + 1] == ["run", "recipe.threshold", *list(LABELS)[1:]]
    assert trials["recipe.threshold"].dtype == float
    assert len(trials) == 8
    assert set(trials["training.steps"]) == {4}
    assert set(trials["scale"]) == {"smoke"}
    assert set(trials[trials["arm"] == "wild"]["state"]) == {"diverged"}
    done = trials[trials["state"] == "done"]
    assert done["validation_loss"].between(0, 10).all()
    assert done.groupby(["arm", "recipe.threshold"], dropna=False, sort=False)["loss"].count().to_list() == [2, 2, 2]


def test_long_frames_share_one_schema(sweep: Runs) -> None:
    frames = [sweep.metrics, sweep.numerics, sweep.evaluation, sweep.timing]
    for frame in frames:
        assert list(frame) == [*LABELS, *COLUMNS, "recipe.threshold"]
        assert len(frame)
        assert frame["value"].notna().all()
    together = sweep.long()
    assert len(together) == sum(map(len, frames))
    assert pd.concat(frames)["value"].sum() == pytest.approx(together["value"].sum())


def test_a_long_frame_has_the_numbers_of_the_run_folders(sweep: Runs) -> None:
    trial = sweep.trials[sweep.trials["arm"] == "mor"].iloc[0]
    of_run = sweep.metrics[(sweep.metrics["run"] == trial["run"]) & (sweep.metrics["metric"] == "loss")]
    written = pd.read_parquet(Path(trial["folder"]) / "metrics.parquet")
    assert of_run["value"].to_list() == written["loss"].to_list()
    assert of_run["step"].to_list() == written["step"].to_list()
    bins = sweep.numerics[sweep.numerics["metric"].astype(str).str.startswith("histogram.")]
    assert set(bins["slot"]) <= {"fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"}
    assert (bins["value"] >= 0).all()


def test_the_runs_of_a_store_are_read_without_a_sweep(project: Path) -> None:
    runs = fewbits.runs(project / "runs")
    assert len(runs.trials) == 8
    assert set(runs.trials["arm"]) == {""}
    assert set(runs.trials["data.size"]) == {65536}
    assert set(runs.metrics["run"]) == {path.parent.name for path in runs.store.glob("*/metrics.parquet")}
    with pytest.raises(ValueError, match=r"fewbits\.read"):
        runs.report  # noqa: B018


def test_the_nearest_store_is_used(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    below = project / "notebooks" / "deep"
    (below / "runs").mkdir(parents=True)  # a folder `runs` that is no store, as TensorBoard makes, for example
    monkeypatch.chdir(below)
    assert fewbits.runs().store == project / "runs"
    assert fewbits.read("../../tiny.yaml").store == project / "runs"
    named = (project / "tiny.yaml").read_text().replace("overrides:", f"overrides:\n  - runtime.runs={tmp_path}", 1)
    (tmp_path / "named.yaml").write_text(named)
    assert fewbits.read(tmp_path / "named.yaml").store == tmp_path, "the sweep file names another store"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no store"):
        fewbits.runs()
    with pytest.raises(ValueError, match=r"no store.*elsewhere"):
        fewbits.runs("elsewhere")


def test_places_without_a_run_are_planned(project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "more.yaml").write_text((project / "tiny.yaml").read_text().replace("[0, 1]", "[0, 1, 2]"))
    sweep = fewbits.read(tmp_path / "more.yaml", runs=project / "runs")
    assert names(capsys.readouterr().err, "no plan", "fewbits sweep more.yaml")
    assert sweep.trials["state"].value_counts()["planned"] == 4
    assert names(repr(sweep), "more", "recipe.threshold", "8 of 12")


def test_a_run_that_cannot_be_read_is_named_and_left_out(project: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(project / "runs", tmp_path / "runs"))
    damaged, other = sorted(path.parent for path in store.glob("*/provenance.json"))[:2]
    (damaged / "provenance.json").write_text("{")
    (other / "config.yaml").unlink()
    with pytest.warns(UserWarning, match="missing from the frames") as warned:
        runs = fewbits.runs(store)
    assert len(runs.trials) == 6
    texts = sorted(str(warning.message) for warning in warned)
    assert names(texts[0], str(damaged / "provenance.json"))
    assert names(texts[1], str(other), "config.yaml")


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_an_axis_may_be_a_label_and_an_export_holds_the_frames(project: Path, tmp_path: Path, form: str) -> None:
    text = (project / "tiny.yaml").read_text().partition("axes:")[0]
    (project / "recipes.yaml").write_text(f"{text}axes: {{recipe: [bf16, mor/tensor], data: [synthetic]}}\n")
    sweep = fewbits.read(project / "recipes.yaml", runs=project / "runs")
    assert list(sweep.trials)[:3] == ["run", "recipe", "data"]
    assert list(sweep.trials["recipe"]) == ["bf16", "bf16", "mor/tensor", "mor/tensor"]
    assert list(sweep.metrics) == [*LABELS, *COLUMNS]
    folder = sweep.export(tmp_path / "out", form)
    load = pd.read_csv if form == "csv" else pd.read_parquet
    metrics = load(folder / f"metrics.{form}")
    assert list(metrics) == list(sweep.metrics)
    assert set(metrics["recipe"]) >= {"bf16"}
    assert metrics["value"].to_list() == pytest.approx(sweep.metrics["value"].to_list())
    assert list(load(folder / f"trials.{form}")) == list(sweep.trials)
    with pytest.raises(ValueError, match="new folder"):
        sweep.export(folder)
    with pytest.raises(ValueError, match=r"'xlsx'.*csv"):
        sweep.export(tmp_path / "other", "xlsx")

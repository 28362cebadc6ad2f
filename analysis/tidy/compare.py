"""Compare runs by their losses: runs of a store, arms of a sweep, and logs of other programs.

Runs that differ only in their seed are one arm, and the first arm is the baseline. Where two arms have seeds in common,
the differences of these pairs are tested (Student's t); else the arms are independent samples (Welch). One run of each
has a difference, but no interval: the noise between seeds is unknown.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure
from statsmodels.stats.power import TTestIndPower, TTestPower

from fewbits.analysis.engine.statistics import (
    Error,
    Estimate,
    Interval,
    Side,
    estimate,
    extra_interval,
    extra_tokens,
    relative_slope,
)
from fewbits.analysis.figures.panels import Line, Panel, curve_figure
from fewbits.analysis.figures.theme import BASELINE, STYLES, draw_figure, in_both_themes, svg
from fewbits.analysis.report.items import FigureResult
from fewbits.analysis.views.html import document
from fewbits.common.wording import flat
from fewbits.experiments.identity import all_settings
from fewbits.experiments.storage.run_folder import saved_trial

Points = list[tuple[float, float]]

LEVEL = 0.95
SEEN = 0.01  # nats: the difference for which the number of seeds is given
POWER = 0.8
MOST_SEEDS = 100_000
LAST = 0.05  # without held-out losses, a run's loss is the mean over this last part of its training losses
STEPS = ("tokens", "step", "_step", "global_step", "iter", "iteration", "steps")
TRAINING = (
    "loss",
    "train_loss",
    "train/loss",
    "training_loss",
    "loss/train",
    "lm loss",
    "loss_metrics/global_avg_loss",
)
HELD_OUT = ("validation_loss", "val_loss", "valid_loss", "eval_loss", "val/loss", "eval/loss", "validation/loss")
_SEED = re.compile(r"[-_./ ]*\b(?:seed|s)[-_=]?(\d+)\b|[-_]s(\d+)(?=$|[-_.])", re.IGNORECASE)
_WANDB = re.compile(r"(?P<run>.+) - (?P<metric>[^-]+(?:-[^ ]+)*)$")


@dataclass(frozen=True)
class Run:
    """A run with its losses as points (tokens or steps, loss in nats)."""

    name: str
    arm: str  # runs of one arm differ only in their seed
    seed: int | None
    training: Points
    held_out: Points = field(default_factory=list)
    speed: float | None = None  # tokens per second
    settings: Mapping[str, str] = field(default_factory=dict)  # without the seed
    diverged: bool = False  # it has losses that are no finite numbers

    @property
    def end(self) -> float:
        return max(points[-1][0] for points in (self.training, self.held_out) if points)


@dataclass(frozen=True)
class Difference:
    """An arm's loss minus the baseline's, in nats."""

    arm: str
    seeds: int
    loss: float
    speed: float | None
    mean: float | None = None  # None for the baseline itself
    interval: Interval | None = None
    p: float | None = None
    paired: bool = False
    extra: float | None = None  # tokens that the baseline would need more, as a fraction
    extra_interval: Interval | None = None
    needed: int | None = None  # seeds of each arm to see SEEN with this power


@dataclass(frozen=True)
class Comparison:
    runs: Sequence[Run]
    measure: str  # what a run's loss is
    rows: Sequence[Difference]
    settings: pd.DataFrame  # the settings that differ, a column for each arm
    remarks: Sequence[str]


# ------------------------------------------------------------------------------------------------ reading


def of_folder(path: Path, arm: str | None = None) -> Run:
    """Return a finished or running trial of a store. arm: its name; None: all settings but the seed."""
    trial = saved_trial(path)
    metrics = pd.read_parquet(path / "metrics.parquet")
    if metrics.empty:
        raise ValueError(f"{path} has no losses yet")
    settings = {key: str(value) for key, value in flat(all_settings(trial)) if key not in ("seed", "recipe.about")}
    settings = {"recipe": trial.recipe.label, "model": trial.model.name, "data": trial.data.kind, **settings}
    timing = path / "timing.parquet"
    speed = float(pd.read_parquet(timing)["tokens_per_second"].median()) if timing.is_file() else None
    name = arm or repr(sorted(settings.items()))
    training, held_out = (_points(metrics, "tokens", key) for key in ("loss", "validation_loss"))
    diverged = not np.isfinite(metrics["loss"]).all()
    return Run(path.name, name, trial.seed, training, held_out, speed, settings, diverged)


def of_log(path: Path, arm: str | None = None, loss: str | None = None) -> list[Run]:
    """Return the runs of a CSV file, of a CSV export of W&B's charts, or of a folder of TensorBoard's event files."""
    return [_of_columns(name, table, arm, loss) for name, table in _tables(path)]


def _tables(path: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the name of each run in a log, and its table: columns with the step and the losses."""
    if path.is_dir():
        yield from _tensorboard(path)
        return
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, na_values=[""])  # `nan` is no empty cell
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"{path} is no CSV file: {error}") from None
    means = [name for name in map(str, table) if not name.endswith(("MIN", "MAX"))]
    of_wandb = [one for one in map(_WANDB.fullmatch, means) if one]
    if not of_wandb:
        yield str(path.with_suffix("")), table
    step = next((name for name in map(str, table) if name.lower() in STEPS), table.columns[0])
    for run in dict.fromkeys(one["run"] for one in of_wandb):
        columns = {one[0]: one["metric"] for one in of_wandb if one["run"] == run}
        yield run, table.rename(columns={step: "step"} | columns)


def _of_columns(name: str, table: pd.DataFrame, arm: str | None, loss: str | None) -> Run:
    names = {column.lower(): column for column in map(str, table)}
    if loss is not None and loss not in table:
        raise ValueError(f"{name} has no column or tag {loss!r}; it has {', '.join(map(str, table))}")
    step = next((names[key] for key in STEPS if key in names), None)
    x = table[step] if step else pd.Series(range(1, len(table) + 1))
    points, diverged = {}, False
    for kind, known in (("training", TRAINING), ("held_out", HELD_OUT)):
        column = next((names[key] for key in known if key in names), None)
        chosen = column if loss is None else loss if kind == "training" else None
        points[kind] = _points(pd.DataFrame({"x": x, "y": table[chosen]}), "x", "y") if chosen else []
        if chosen:  # a table of TensorBoard's scalars has numbers, and NaN where a tag has none at this step
            texts = table[chosen].dropna().astype(str).str.strip().str.lower()
            diverged |= bool(texts.isin(("nan", "inf", "-inf", "+inf")).any())
    if not any(points.values()):
        raise ValueError(
            f"{name}: which column or tag is the loss? Pass --loss with one of {', '.join(map(str, table))}"
        )
    found = _SEED.search(Path(name).name)
    seed = int(found[1] or found[2]) if found else None
    stem = _SEED.sub("", Path(name).name) or name
    return Run(name, arm or stem, seed, points["training"], points["held_out"], diverged=diverged)


def _tensorboard(folder: Path) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each folder with TensorBoard's event files and its scalars: a column for each tag, and `step`."""
    folders = sorted({path.parent for path in folder.rglob("events.out.tfevents.*")})
    if not folders:
        raise ValueError(f"{folder} is neither a run nor a folder of TensorBoard's event files")
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ModuleNotFoundError:
        raise ValueError(f"{folder}: event files are read by TensorBoard: pip install tensorboard") from None
    for each in folders:
        events = EventAccumulator(str(each), size_guidance={"scalars": 0})  # 0: all of them
        events.Reload()
        scalars = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
        yield str(each), pd.DataFrame(scalars).rename_axis("step").sort_index().reset_index()


def _points(table: pd.DataFrame, x: str, y: str) -> Points:
    if y not in table:
        return []
    kept = table[[x, y]].apply(pd.to_numeric, errors="coerce").replace([math.inf, -math.inf], math.nan).dropna()
    kept = kept.sort_values(x, kind="stable")
    return list(zip(kept[x].astype(float), kept[y].astype(float), strict=True))


# ------------------------------------------------------------------------------------------------ comparing


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare the arms of the runs with the first arm; raise ValueError for fewer than two runs, or one arm."""
    runs = _named(runs)
    arms = list(dict.fromkeys(run.arm for run in runs))
    if len(arms) < 2:
        raise ValueError(f"{len(runs)} run(s) of one arm: nothing differs but the seed; name runs of two arms or more")
    held_out = all(run.held_out for run in runs)
    measure = "held-out loss" if held_out else f"training loss, mean of the last {LAST:.0%}"
    final = {id(run): run.held_out[-1][1] if held_out else _tail(run.training) for run in runs}
    remarks = [f"{run.name} diverged: its last finite losses are compared" for run in runs if run.diverged]
    ends = {run.end for run in runs}
    if max(ends) > 1.01 * min(ends):
        remarks.append(f"the runs are not equally long: their curves end at {min(ends):,.0f} to {max(ends):,.0f}")
    members = {arm: [run for run in runs if run.arm == arm] for arm in arms}
    for arm, own in members.items():
        seeds = [run.seed for run in own if run.seed is not None]
        if len({*seeds}) < len(seeds):
            remarks.append(f"{arm} has two runs with one seed; they are treated as an independent sample")
    slope = relative_slope([run.held_out if held_out else run.training for run in members[arms[0]]])
    for arm in arms[1:]:
        common = {run.seed for run in members[arm]} & {run.seed for run in members[arms[0]]}
        if 0 < len(common) < max(len(members[arm]), len(members[arms[0]])):
            remarks.append(f"{arm} and {arms[0]} have {len(common)} seeds in common; others are not compared")
    rows = [_difference(members[arms[0]], members[arm], final, slope) for arm in arms]
    return Comparison(runs, measure, rows, _settings(members), remarks)


def _difference(
    baseline: Sequence[Run], arm: Sequence[Run], final: Mapping[int, float], slope: float | None
) -> Difference:
    xs, ys = ([final[id(run)] for run in runs] for runs in (baseline, arm))
    speeds = [run.speed for run in arm if run.speed]
    row = Difference(arm[0].arm, len(arm), float(np.mean(ys)), float(np.median(speeds)) if speeds else None)
    if arm is baseline:
        return row
    one, other = ({run.seed: final[id(run)] for run in runs if run.seed is not None} for runs in (baseline, arm))
    common = sorted(one.keys() & other.keys()) if len(one) == len(baseline) and len(other) == len(arm) else []
    paired, base = len(common) >= 2 or len(common) == len(xs) == len(ys) == 1, float(np.mean(xs))
    if paired:
        values = [other[seed] - one[seed] for seed in common]
        row, found = replace(row, seeds=len(common), mean=float(np.mean(values)), paired=True), estimate(values)
        sd = float(np.std(values, ddof=1)) if found else 0.0
    else:
        row, found = replace(row, mean=row.loss - base), welch(xs, ys)
        sd = math.sqrt((np.var(xs, ddof=1) + np.var(ys, ddof=1)) / 2) if found else 0.0
    assert row.mean is not None
    if slope and base > 0:
        row = replace(row, extra=extra_tokens(row.mean / base, slope))
    if found is None:
        return row
    p, interval = min(1.0, 2 * min(found.p(0.0, side) for side in Side)), found.interval(LEVEL)
    row = replace(row, interval=interval, p=p, needed=seeds_needed(sd, paired) if sd else None)
    if row.extra is None or slope is None:
        return row
    return replace(
        row, extra_interval=extra_interval(Interval(interval.low / base, interval.high / base, LEVEL), slope)
    )


def welch(xs: Sequence[float], ys: Sequence[float]) -> Estimate | None:
    """Return the mean of ys minus that of xs, as of two independent samples; None if one has a single value."""
    if min(len(xs), len(ys)) < 2:
        return None
    found = estimate(ys, shared=Error(float(np.std(xs, ddof=1)) / math.sqrt(len(xs)), len(xs) - 1))
    return found and replace(found, mean=found.mean - float(np.mean(xs)))


def seeds_needed(sd: float, paired: bool) -> int | None:
    """Return with how many seeds a difference of SEEN nats is found (two-sided, 5 %); None: more than MOST_SEEDS."""
    power: Any = TTestPower() if paired else TTestIndPower()
    counts = range(2, MOST_SEEDS + 1)
    place = bisect_left(counts, POWER, key=lambda seeds: float(power.power(SEEN / sd, seeds, 1 - LEVEL)))
    return counts[place] if place < len(counts) else None


def _tail(points: Points) -> float:
    losses = [loss for _, loss in points]
    return float(np.mean(losses[-max(1, round(LAST * len(losses))) :]))


def _settings(members: Mapping[str, Sequence[Run]]) -> pd.DataFrame:
    columns = {arm: dict(runs[0].settings) for arm, runs in members.items()}
    table = pd.DataFrame(columns).fillna("")
    return table[table.nunique(axis=1) > 1] if len(table) else table


def _named(runs: Sequence[Run]) -> list[Run]:
    """Give arms that are named by all their settings (`of_folder`) the shortest names that tell them apart."""
    unnamed = {run.arm: run.settings for run in runs if run.settings and run.arm == repr(sorted(run.settings.items()))}
    names = {arm: settings["recipe"] for arm, settings in unnamed.items()}
    if len({*names.values()}) < len(names):
        every = list(unnamed.values())
        differing = [key for key in every[0] if len({settings.get(key) for settings in every}) > 1]
        few = [key for key in differing if not key.startswith("recipe.")][:3] or differing[:3]
        texts = {arm: " ".join(f"{key}={settings.get(key)}" for key in few) for arm, settings in unnamed.items()}
        names = {
            arm: f"{text} #{n}" if [*texts.values()].count(text) > 1 else text
            for n, (arm, text) in enumerate(texts.items(), 1)
        }
    return [replace(run, arm=names.get(run.arm, run.arm)) for run in runs]


# ------------------------------------------------------------------------------------------------ showing


def texts(row: Difference) -> tuple[str, ...]:
    """Return a row of the table: arm, seeds, loss, difference, interval, p, extra tokens, seeds needed, speed."""
    speed = f"{row.speed:,.0f}" if row.speed else ""
    if row.mean is None:
        return (row.arm, str(row.seeds), f"{row.loss:.4f}", "", "", "", "", "", speed)
    interval = f"{row.interval.low:+.4f} to {row.interval.high:+.4f}" if row.interval else "one run: no interval"
    extra = "" if row.extra is None else _share(row.extra)
    if row.extra_interval:
        extra += f" ({_share(row.extra_interval.low)} to {_share(row.extra_interval.high)})"
    kind = f"{row.seeds} pairs" if row.paired else f"{row.seeds}, unpaired"
    p = "" if row.p is None else f"{row.p:.2g}"
    needed = "" if row.needed is None else str(row.needed)
    return (row.arm, kind, f"{row.loss:.4f}", f"{row.mean:+.4f}", interval, p, extra, needed, speed)


def _share(tokens: float) -> str:
    return f"{tokens:+.1%}" if tokens <= 10 else "> 1000%"


HEADER = ("arm", "seeds", "loss", "difference", "95 % interval", "p", "extra tokens", "seeds for 0.01", "tokens/s")


def figure(comparison: Comparison) -> Figure:
    return draw_figure(FigureResult(partial(_draw, comparison)))


def _draw(comparison: Comparison) -> Figure:
    held_out = comparison.measure == "held-out loss"
    levels, differences = list[Line](), list[Line]()
    for row, style in zip(comparison.rows, cycle((BASELINE, *STYLES)), strict=False):
        runs = [run for run in comparison.runs if run.arm == row.arm]
        grids = [np.array(run.held_out if held_out else _smooth(run.training)) for run in runs]
        x = grids[0][:, 0]
        curves = np.array([np.interp(x, grid[:, 0], grid[:, 1]) for grid in grids])
        label = f"{row.arm} ({len(runs)})".replace("$", r"\$")
        levels.append(Line(x, curves.mean(0), style, label, (curves.min(0), curves.max(0))))
        first = levels[0]
        differences.append(Line(x, levels[-1].y - np.interp(x, first.x, first.y), style))
    later = np.concatenate([line.y[line.x >= 0.05 * line.x.max()] for line in levels])  # not the steep beginning
    top = float(later.max() + 0.05 * np.ptp(later))
    steps = "tokens" if all(run.settings for run in comparison.runs) else "tokens or steps"
    panels = (
        Panel("shaded: range of the seeds", tuple(levels), y_label="loss, nats", y_limits=(None, top)),
        Panel("", tuple(differences), x_label=steps, y_label="difference, nats"),
    )
    return curve_figure([[panel] for panel in panels], height=4.5, sharex="col")


def _smooth(points: Points) -> Points:
    """Return at most 200 points, each the mean of its neighbours, so that a noisy training loss can be read."""
    groups = np.array_split(np.array(points), min(len(points), 200))
    return [(float(group[:, 0].mean()), float(group[:, 1].mean())) for group in groups]


def page(comparison: Comparison) -> str:
    """Return a page that stands alone, with the table, the figure and the settings that differ."""
    rows = pd.DataFrame([texts(row) for row in comparison.rows], columns=list(HEADER))
    settings = comparison.settings.rename_axis("setting").reset_index()
    with pd.option_context("display.max_colwidth", None):  # else pandas cuts long settings
        tables = [Markup(each.to_html(index=False, border=0)) for each in (rows, settings)]
    names = [row.arm for row in comparison.rows]
    title, scrolled = " against ".join(reversed(names)), Markup('<div class="scroll">{}</div>')
    about = Markup("<h1>{}</h1><p>{}. Differences and intervals in nats, against {}.</p>")
    body = about.format(title, comparison.measure, names[0])
    body += Markup().join(Markup("<p><b>{}</b></p>").format(remark) for remark in comparison.remarks)
    body += scrolled.format(tables[0]) + Markup(in_both_themes(svg(figure(comparison))))
    if len(settings):
        body += Markup("<h2>Settings that differ</h2>") + scrolled.format(tables[1])
    return document(title, body, [])

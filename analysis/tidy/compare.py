"""Compare runs by their losses: runs of a store, arms of a sweep, and logs of other programs.

Runs that differ only in their seed are one arm, and the first arm is the baseline. Where two arms have seeds in common,
the differences of these pairs are tested (Student's t); else the arms are independent samples (Welch). One run of each
has a difference, but no interval: the noise between seeds is unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from statsmodels.stats.power import TTestIndPower, TTestPower

from fewbits.analysis.engine.statistics import (
    Estimate,
    Interval,
    Side,
    estimate,
    extra_interval,
    extra_tokens,
    relative_slope,
)
from fewbits.analysis.figures.theme import BASELINE, STYLES, draw_figure, in_both_themes, svg
from fewbits.analysis.report.items import FigureResult
from fewbits.common.wording import flat
from fewbits.experiments.identity import all_settings
from fewbits.experiments.storage.run_folder import saved_trial

Points = list[tuple[float, float]]

LEVEL = 0.95
SEEN = 0.01  # nats: the difference for which the number of seeds is given
POWER = 0.8
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
    """Return the runs of a CSV file, of a CSV export of W&B's charts, or of a folder of TensorBoard's event files.

    arm: their arm; None: the runs' names without their seeds. loss: the name of the column or tag with the loss.
    """
    if path.is_dir():
        return [_of_columns(str(folder), table, arm, loss) for folder, table in _tensorboard(path)]
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, na_values=[""])  # `nan` is no empty cell
    except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"{path} is no CSV file: {error}") from None
    table.columns = table.columns.map(str)
    columns: list[str] = list(table.columns)
    own = {name: found for name in columns if (found := _WANDB.fullmatch(name)) and not name.endswith(("MIN", "MAX"))}
    if not own:
        return [_of_columns(str(path.with_suffix("")), table, arm, loss)]
    step = next((name for name in columns if name.lower() in STEPS), table.columns[0])
    frames: dict[str, pd.DataFrame] = {}
    for name, found in own.items():
        frame = frames.setdefault(found["run"], pd.DataFrame({"step": table[step]}))
        frame[found["metric"]] = table[name]
    return [_of_columns(run, frame, arm, loss) for run, frame in frames.items()]


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


def _tensorboard(folder: Path) -> Iterator[tuple[Path, pd.DataFrame]]:
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
        yield each, pd.DataFrame(scalars).rename_axis("step").sort_index().reset_index()


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
    loss = float(np.mean([final[id(run)] for run in arm]))
    speeds = [run.speed for run in arm if run.speed]
    speed = float(np.median(speeds)) if speeds else None
    if arm is baseline:
        return Difference(arm[0].arm, len(arm), loss, speed)
    one, other = ({run.seed: final[id(run)] for run in runs if run.seed is not None} for runs in (baseline, arm))
    common = sorted(one.keys() & other.keys()) if len(one) == len(baseline) and len(other) == len(arm) else []
    xs, ys = [final[id(run)] for run in baseline], [final[id(run)] for run in arm]
    paired = len(common) >= 2 or (len(common) == 1 and len(xs) == len(ys) == 1)
    sd: float | None = None
    if paired:
        differences = [other[seed] - one[seed] for seed in common]
        found, mean = estimate(differences), float(np.mean(differences))
        sd = float(np.std(differences, ddof=1)) if len(common) > 1 else None
    else:
        found, mean = welch(xs, ys), float(np.mean(ys) - np.mean(xs))
        if found is not None:
            sd = math.sqrt((np.var(xs, ddof=1) + np.var(ys, ddof=1)) / 2)
    interval = found.interval(LEVEL) if found else None
    base = float(np.mean(xs))
    slope = slope if base > 0 else None
    relative = Interval(interval.low / base, interval.high / base, LEVEL) if interval else None
    return Difference(
        arm[0].arm,
        len(common) if paired else len(arm),
        loss,
        speed,
        mean,
        interval,
        min(1.0, 2 * min(found.p(0.0, side) for side in Side)) if found else None,
        paired,
        extra_tokens(mean / base, slope) if slope else None,
        extra_interval(relative, slope) if slope and relative else None,
        seeds_needed(sd, paired) if sd else None,
    )


def welch(xs: Sequence[float], ys: Sequence[float]) -> Estimate | None:
    """Return the mean of ys minus that of xs, as of two independent samples; None if one has a single value."""
    if min(len(xs), len(ys)) < 2:
        return None
    parts = [np.var(values, ddof=1) / len(values) for values in (xs, ys)]
    spread = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (xs, ys), strict=True))
    df = sum(parts) ** 2 / spread if spread else len(xs) + len(ys) - 2
    return Estimate(len(ys), float(np.mean(ys) - np.mean(xs)), math.sqrt(sum(parts)), float(df))


def seeds_needed(sd: float, paired: bool) -> int | None:
    """Return with how many seeds a difference of SEEN nats is found (two-sided, 5 %) with probability POWER.

    sd: the standard deviation of paired differences, or of the runs of an arm. None: more than 100,000.
    """
    power: Any = TTestPower() if paired else TTestIndPower()

    def enough(seeds: int) -> bool:
        return seeds >= 2 and float(power.power(SEEN / sd, seeds, 1 - LEVEL)) >= POWER

    low, high = 1, 2
    while not enough(high):
        low, high = high, 2 * high
        if high > 100_000:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _tail(points: Points) -> float:
    losses = [loss for _, loss in points]
    return float(np.mean(losses[-max(1, round(LAST * len(losses))) :]))


def _settings(members: Mapping[str, Sequence[Run]]) -> pd.DataFrame:
    """Return the settings that differ between the arms, with a column for each arm."""
    columns = {arm: dict(runs[0].settings) for arm, runs in members.items()}
    table = pd.DataFrame(columns).fillna("")
    return table[table.nunique(axis=1) > 1] if len(table) else table


def _named(runs: Sequence[Run]) -> list[Run]:
    """Give arms that are named by all their settings (`of_folder`) the shortest names that tell them apart."""
    unnamed = {run.arm: run.settings for run in runs if run.settings and run.arm == repr(sorted(run.settings.items()))}
    if not unnamed:
        return list(runs)
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
    """Draw the losses of the arms and, below, their differences from the baseline, with the range of the seeds."""
    return draw_figure(FigureResult(partial(_draw, comparison)))


def _draw(comparison: Comparison) -> Figure:
    drawn = Figure(figsize=(7.5, 6), layout="constrained")
    upper, lower = drawn.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    colours = cycle(style.shade for style in (BASELINE, *STYLES))
    held_out = comparison.measure == "held-out loss"
    base: tuple[Any, Any] | None = None
    for row, colour in zip(comparison.rows, colours, strict=False):
        runs = [run for run in comparison.runs if run.arm == row.arm]
        grids = [np.array(run.held_out if held_out else _smooth(run.training)) for run in runs]
        x = grids[0][:, 0]
        curves = np.array([np.interp(x, grid[:, 0], grid[:, 1]) for grid in grids])
        mean = curves.mean(axis=0)
        upper.plot(
            x,
            mean,
            color=colour,
            label=f"{row.arm} ({len(runs)})".replace("$", r"\$"),
            marker="o" if len(x) < 12 else None,
        )
        upper.fill_between(x, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        if base is None:
            base = (x, mean)
            lower.axhline(0, color=colour, linewidth=1)
        else:
            lower.plot(x, mean - np.interp(x, *base), color=colour, marker="o" if len(x) < 12 else None)
    shown = [point for line in upper.lines for point in zip(*line.get_data(), strict=True)]
    later = [loss for at, loss in shown if at >= 0.05 * max(at for at, _ in shown)]  # not the steep beginning
    upper.set_ylim(top=max(later) + 0.05 * (max(later) - min(later)))
    upper.set_ylabel(comparison.measure.split(",")[0] + ", nats")
    lower.set_ylabel("difference, nats")
    lower.set_xlabel("tokens" if all(run.settings for run in comparison.runs) else "tokens or steps")
    upper.legend(frameon=False, title="arm (runs); shaded: range of the seeds")
    return drawn


def _smooth(points: Points) -> Points:
    """Return at most 200 points, each the mean of its neighbours, so that a noisy training loss can be read."""
    groups = np.array_split(np.array(points), min(len(points), 200))
    return [(float(group[:, 0].mean()), float(group[:, 1].mean())) for group in groups]


def page(comparison: Comparison) -> str:
    """Return a page that stands alone, with the table, the figure and the settings that differ."""
    image = in_both_themes(svg(figure(comparison)))
    rows = pd.DataFrame([texts(row) for row in comparison.rows], columns=list(HEADER))
    settings = comparison.settings.rename_axis("setting").reset_index()
    with pd.option_context("display.max_colwidth", None):  # else pandas cuts long settings
        table, differing = (each.to_html(index=False, border=0) for each in (rows, settings))
    names = [row.arm for row in comparison.rows]
    parts = [
        f"<h1>{escape(' against '.join(reversed(names)))}</h1>",
        f"<p>{escape(comparison.measure)}. Differences and intervals in nats, against {escape(names[0])}.</p>",
        *(f"<p><b>{escape(remark)}</b></p>" for remark in comparison.remarks),
        table,
        image,
        *([f"<h2>Settings that differ</h2>{differing}"] if len(settings) else []),
    ]
    style = "body{font:15px system-ui;max-width:60em;margin:2em auto;padding:0 1em}:root{color-scheme:light dark}"
    style += "svg{width:100%;height:auto}"
    style += "table{border-collapse:collapse;display:block;overflow-x:auto}td,th{padding:.2em .7em;text-align:left}"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{style}</style>'
    body = "".join(parts)
    return f"<!doctype html><html lang='en'><head>{head}<title>comparison</title></head><body>{body}</body></html>"

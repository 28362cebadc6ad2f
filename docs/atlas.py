"""Write docs/atlas, one page with what every recipe changes and costs, from results of the sweeps of `study=atlas`.

    fewbits sweep study=atlas scale=cpu --backend local          # then the same with scale=pretrained
    python docs/atlas.py cpu pretrained                          # from the store runs/, or from --runs STORE
    python docs/atlas.py docs/atlas/results-cpu.parquet          # from an archive that this command has left

--time also measures the seconds of emulation on this machine; otherwise they are those of the page before.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from markupsafe import Markup, escape

from fewbits import build, load_recipe, quantize, read
from fewbits.analysis.engine.results.archive import archived
from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.engine.statistics import estimate, extra_tokens, pseudo_values
from fewbits.analysis.views.html import document
from fewbits.common.atomic import write_atomically
from fewbits.common.wording import plural
from fewbits.experiments.config_files import FOLDER as CONFIG
from fewbits.experiments.config_files import names
from fewbits.experiments.environment import commit
from fewbits.models.layer_table import layer_rate, mean_bits
from fewbits.models.networks.presets import MODELS
from fewbits.models.networks.registry import on_meta
from fewbits.models.quantize import Quantization
from fewbits.models.recipe import Operands, Recipe

FOLDER = Path(__file__).with_name("atlas")
NUMBERS = CONFIG / "atlas.json"  # in the package, for `fewbits list recipes`
MEASURES = {"loss": "increase_relative", "error": "gradient_error", "bias": "gradient_systematic"}
MEASURES |= {"noise": "gradient_noise"}
TRAINED = ("trained", "tokens")  # measured by training
OF_MODELS = (*MEASURES, *TRAINED, "bits")  # columns that each model has
SHARE = "decisions."
GPUS = {"H100": 9, "B200": 10}  # compute capabilities
MODEL = "nemotron-nano"  # whose layers the costs are those of
LEVEL = 0.9
MOST = 1.0  # the largest fraction of extra tokens that the slope between two lengths is used for
HEADS = {
    "loss": "change of the loss, %",
    "error": "gradient error, %",
    "bias": "its bias, %",
    "noise": "its noise, %",
    "trained": "change of the loss by training, %",
    "tokens": "extra tokens, %",
    "bits": "bits per operand",
    "H100": "product time, H100",
    "B200": "product time, B200",
    "seconds": "emulation, ms",
}
INTRO = """\
Each recipe quantizes all blocks of the same models, with the same weights, batches and seeds. The gradient
error is ‖ĝ − g‖ / ‖g‖ with the recipe's gradient ĝ and BF16's g. Its bias is the part that stays when it is
averaged over rounding seeds, its noise the part that changes with them; error² ≈ bias² + noise². Numbers after
± are half of the 90 % interval over seeds, each of which reads other documents. Two columns are of a short
training with the recipe, from the end of a BF16 trunk, in which the learning rate falls to zero: the change of
the final loss against BF16's, and how many more tokens of this training make up for it: exp(g / s) − 1, with g
the relative change and s = (L′ − L) / (L ln(T / T′)) BF16's slope from L′ after T′ tokens to L after T. There
is no number beyond 100 %, or if s does not differ from zero over seeds. Bits are means over the six operands of
a linear layer, with their shares of block scales; of a mixture with the decisions made, of a chain those of its
last quantizer. Product time is that of a layer's three GEMMs at peak rates, in those of BF16: 1 if torch has no
product of these operands on that GPU. Emulation is the time of a forward and backward pass over 1,024 tokens of
nemotron-nano on two CPU threads. Delayed scales are current ones here, as in a first step."""
SORT = """
document.querySelectorAll("table.sorts thead th").forEach((head, column) => head.onclick = () => {
  const body = document.querySelector("table.sorts tbody"), up = head.ariaSort !== "ascending";
  document.querySelectorAll("table.sorts thead th").forEach(other => other.removeAttribute("aria-sort"));
  head.ariaSort = up ? "ascending" : "descending";
  const key = row => row.cells[column].dataset.key ?? row.cells[column].textContent;
  const missing = row => row.cells[column].dataset.key === "";
  const order = (a, b) => missing(a) - missing(b) || (up ? 1 : -1) *
    (column ? key(a) - key(b) : key(a).localeCompare(key(b)));
  body.append(...[...body.rows].sort(order));
});"""
STYLE = """
body { display: block; }
main { max-width: 90rem; }
table.sorts thead th { cursor: pointer; max-width: 6.5rem; white-space: normal; }
table.sorts thead th[aria-sort=ascending]::after { content: " ▲"; }
table.sorts thead th[aria-sort=descending]::after { content: " ▼"; }
table.sorts tbody th { position: sticky; left: 0; background: var(--paper); font-weight: 600; }
table.sorts tbody tr { border-top: 1px solid var(--line); }
table.sorts td.about { min-width: 30rem; }
table.sorts td code { overflow-wrap: normal; white-space: nowrap; display: block; }
.picture img { display: block; width: 100%; min-width: 50rem; }
.choice label { display: block; }
@media (max-width: 40rem) { table.sorts tbody th { min-width: 6.5rem; overflow-wrap: anywhere; } }
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="SCALE|FILE")
    parser.add_argument("--runs", default="runs")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--time", action="store_true")
    chosen = parser.parse_args(argv)
    recipes: dict[str, dict[str, Any]] = {name: described(name) for name in names("recipe")}
    file = NUMBERS if chosen.out == FOLDER else chosen.out / "atlas.json"
    before = json.loads(file.read_text("utf-8"))["recipes"] if file.is_file() else {}
    models: dict[str, str] = {}
    chosen.out.mkdir(parents=True, exist_ok=True)
    for source in chosen.sources:
        found = read(source) if source.endswith(".parquet") else read("atlas", scale=source, runs=chosen.runs)
        assert found.results is not None
        if missing := found.results.flags:
            raise SystemExit(f"{source}: {len(missing)} places have no result; the first: {missing[0]}")
        add(recipes, models, found.results)
        name = f"results-{found.results.scale_name}.parquet"
        write_atomically(chosen.out / name, archived(found.results, found.overrides))
    for name, row in recipes.items():
        row["seconds"] = seconds(name) if chosen.time and row["measured"] else before.get(name, {}).get("seconds")
    head: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": (commit() or "unknown")[:10],
        "models": models,
    }
    head["archives"] = sorted(path.name for path in chosen.out.glob("results-*.parquet"))
    write_atomically(file, (json.dumps({**head, "recipes": recipes}, indent=1, ensure_ascii=False) + "\n").encode())
    write_atomically(chosen.out / "errors.svg", picture(recipes, next(iter(models))).encode())
    write_atomically(chosen.out / "index.html", page({**head, "recipes": recipes}).encode())


# ------------------------------------------------------------------------------------------------ numbers


def of(name: str) -> Recipe:
    """Return a recipe as the sweep measures it: it quantizes all blocks."""
    return load_recipe(name, {"keep.first": 0, "keep.last": 0})


def described(name: str) -> dict[str, Any]:
    """Return the texts of a recipe, and what its operands cost; the model has no layer for some recipes' rules."""
    recipe = of(name)
    row: dict[str, Any] = {key: getattr(recipe, key) for key in ("about", "source", "differs")}
    row["operands"] = {slot: str(its.spec or "high") for slot, its in recipe.operands.items()}
    row["measured"], row["why"], row["untrained"] = {}, {}, {}
    try:
        layers = quantize(on_meta(MODELS[MODEL]), recipe)
    except ValueError:
        return row
    row["bits"] = _over_layers(layers, lambda operands: _bits(operands, {}))
    for gpu, major in GPUS.items():
        row[gpu] = _over_layers(layers, lambda operands, major=major: 1 / layer_rate(operands, major))  # type: ignore[misc]
    return row


def _over_layers(quantization: Quantization, measure: Callable[[Operands], float]) -> float:
    """Return the mean of what `measure` says of the operands of each linear layer, weighted by the layers' sizes."""
    sizes = [layer.in_features * layer.out_features for layer in quantization.layers]
    values = [measure(layer.plans[0].operands) for layer in quantization.layers]
    return sum(size * value for size, value in zip(sizes, values, strict=True)) / sum(sizes)


def _bits(operands: Mapping[str, Any], shares: Mapping[str, float]) -> float:
    return statistics.fmean(mean_bits(slot.spec, shares) for slot in operands.values())


Rows = Mapping[str, Sequence[Mapping[str, float]]]  # the numbers of each seed, by recipe, or by arm without one


def add(recipes: Mapping[str, dict[str, Any]], models: dict[str, str], results: Results) -> None:
    """Add what sweeps have measured to the recipes' rows, and their models, each with a text about its numbers."""
    for sweep in results.plan.sweeps:
        found: dict[str, dict[str, list[Mapping[str, float]]]] = {}
        about = {}
        for member in results.members:
            place, planned = dict(member.cell.axes), results.plan.trials[member.id]
            if member.cell.sweep != sweep.name or member.cell.arm == "trunk":
                continue
            t, numbers = planned.trial.training, results.files.standing(planned).numbers
            of_recipe = found.setdefault(place["model"], {}).setdefault(place.get("recipe", member.cell.arm), [])
            of_recipe.append({**numbers, "steps": t.steps})
            if "recipe" in place:
                reads = f"{t.steps} × {t.micro_batch} windows of {t.length} tokens"
                high = "; weights stay in BF16" if "recipe.fprop.w=high" in member.cell.overrides else ""
                about[place["model"]] = f"{plural(len(sweep.seeds), 'seed')}, {reads} each{high}"
        trains = sweep.name == "training"
        for model, rows in found.items():
            (add_training if trains else add_probes)(recipes, model, rows)
            models[model] = f"{models[model]}; training: {about[model]}" if trains else about[model]
        for name, why in sweep.values["unmeasured"].items():
            if trains:
                recipes[name]["untrained"] |= dict.fromkeys(TRAINED, why)
            else:
                recipes[name]["why"] |= dict.fromkeys(sweep.values["models"], why)


def percent(numbers: Sequence[float]) -> list[float | None]:
    """Return the mean over seeds in percent, and half of its interval."""
    found = estimate(numbers)
    return [100 * found.mean, 100 * found.interval(LEVEL).half] if found else [100 * numbers[0], None]


def add_probes(recipes: Mapping[str, dict[str, Any]], model: str, found: Rows) -> None:
    for name, rows in found.items():
        values: dict[str, Any] = {}
        for key, metric in MEASURES.items():
            if numbers := [row[metric] for row in rows if metric in row and math.isfinite(row[metric])]:
                values[key] = percent(numbers)
        shares = {
            key.removeprefix(SHARE): statistics.fmean(row[key] for row in rows)
            for key in rows[0]
            if key.startswith(SHARE)
        }
        if shares:
            layers = quantize(on_meta(MODELS[MODEL]), of(name))
            values["bits"] = _over_layers(layers, lambda operands, own=shares: _bits(operands, own))  # type: ignore[misc]
        recipes[name]["measured"][model] = values


def add_training(recipes: Mapping[str, dict[str, Any]], model: str, found: Rows) -> None:
    """Add the change of the final loss that training with each recipe makes, and the tokens that it is worth."""
    losses = {name: [row.get("validation_loss", math.nan) for row in rows] for name, rows in found.items()}
    whole, short = losses.pop("bf16"), losses.pop("short")
    recipes["bf16"]["untrained"] |= dict.fromkeys(TRAINED, "the others are compared with it")
    span = math.log(found["bf16"][0]["steps"] / found["short"][0]["steps"])
    slopes = [(less / loss - 1) / span for less, loss in zip(short, whole, strict=True)]
    slope = estimate(slopes)
    interval = slope and slope.interval(LEVEL)
    for name, of_recipe in losses.items():
        changes = [loss / base - 1 for loss, base in zip(of_recipe, whole, strict=True)]
        why, values = recipes[name]["untrained"], recipes[name]["measured"].setdefault(model, {})
        if not all(map(math.isfinite, changes)):
            why |= dict.fromkeys(TRAINED, "the training diverges")
            continue
        values["trained"] = percent(changes)
        if interval is None or interval.low <= 0:
            why["tokens"] = "BF16's slope over tokens does not differ from zero over seeds"
        elif extra_tokens(statistics.fmean(changes), statistics.fmean(slopes)) > MOST:
            why["tokens"] = f"more than {MOST:.0%}, too far from the two lengths that give the slope"
        else:
            pairs = [{"change": c, "slope": s} for c, s in zip(changes, slopes, strict=True)]
            values["tokens"] = percent(pseudo_values(pairs, lambda mean: extra_tokens(mean["change"], mean["slope"])))


def seconds(name: str, windows: int = 4) -> float:
    """Return the seconds of a forward and backward pass of a small model, the median of three after a first one."""
    torch.set_num_threads(2)
    model = build(MODEL, seed=0)
    quantization = quantize(model, of(name), seed=0)
    tokens = torch.randint(0, 256, (windows, 257), generator=torch.Generator().manual_seed(0))
    times = []
    for step in range(4):
        quantization.begin(step)
        began = time.perf_counter()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


# ------------------------------------------------------------------------------------------------ picture

WIDTH, HEIGHT, LEFT, BOTTOM, GREY = 1000, 640, 60, 46, "#808080"
LINE, LETTER = 14, 6.3  # the height of a label and the largest mean width of its letters, in a font of 11 pixels
COLORS = {"noise": "#c8641e", "bias": "#2a7fd4"}  # dots of recipes with and without random numbers
Box = tuple[float, float, float, float]


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def placed(points: Sequence[tuple[str, float, float]]) -> dict[str, Box]:
    """Return a box for each point's label, near its point, so that no box overlaps another or a point."""
    taken: list[Box] = [(x - 5, y - 5, x + 5, y + 5) for _, x, y in points]
    gaps = [sign * gap for gap in (7, 22, 45, 80, 120, 170, 230, 300, 380) for sign in (1, -1)]
    moves = sorted(
        ((gap, 0.5 * LINE * step) for gap in gaps for step in range(-70, 71)),
        key=lambda move: abs(move[0]) + 1.5 * abs(move[1]) + (3 if move[0] < 0 else 0),
    )
    boxes = {}
    for name, x, y in sorted(points, key=lambda point: (point[2], point[1])):
        width = LETTER * len(name)
        for right, down in moves:
            left, top = (x + right if right > 0 else x + right - width), y + down - LINE / 2
            box = (left, top, left + width, top + LINE)
            inside = left > LEFT + 4 and box[2] < WIDTH and top > 2 and box[3] < HEIGHT - BOTTOM
            if inside and not any(overlap(box, other) for other in taken):
                boxes[name] = box
                taken.append(box)
                break
        else:
            raise ValueError(f"no room for the label {name}: make the picture larger")
    return boxes


def picture(recipes: Mapping[str, Mapping[str, Any]], model: str) -> str:
    """Return an SVG: the gradient error of each recipe that has one by its bits per operand, both axes logarithmic."""
    dots = []
    for name, row in recipes.items():
        values = row["measured"].get(model, {})
        if values.get("error", [0])[0] > 0:
            dots.append((name, values.get("bits", row["bits"]), values["error"][0], values["noise"][0] > 0))
    low, high = (bound(math.log10(dot[2]) for dot in dots) for bound in (min, max))
    low, high = low - 0.08, high + 0.08

    def at_x(bits: float) -> float:
        return LEFT + 20 + math.log2(bits / 3.9) / math.log2(16.4 / 3.9) * (WIDTH - LEFT - 40)

    def at_y(error: float) -> float:
        return (HEIGHT - BOTTOM) * (high - math.log10(error)) / (high - low)

    marks = [10.0**power * digit for power in range(-3, 6) for digit in (1, 2, 5)]
    parts = []
    for error in marks:
        if low < math.log10(error) < high:
            y = at_y(error)
            parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH}" stroke="{GREY}" stroke-opacity=".25"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{error:g} %</text>')
    for bits in (4, 5, 6, 8, 10, 12, 16):
        text = f'<text x="{at_x(bits):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{bits}</text>'
        parts.append(f'<path d="M{at_x(bits):.1f} {HEIGHT - BOTTOM}v4" stroke="{GREY}"/>{text}')
    base = HEIGHT - BOTTOM
    parts.append(f'<path d="M{LEFT} 0V{base}H{WIDTH}" stroke="{GREY}" fill="none"/>')
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT - 8}" text-anchor="end">bits per operand</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">gradient error at {escape(model)}</text>')
    for place, (key, text) in enumerate({"bias": "to nearest", "noise": "with random numbers"}.items()):
        x = 330 + 130 * place
        parts.append(f'<circle cx="{x}" cy="{HEIGHT - 12}" r="4" fill="{COLORS[key]}"/>')
        parts.append(f'<text x="{x + 8}" y="{HEIGHT - 8}">{text}</text>')
    points = [(name, at_x(bits), at_y(error)) for name, bits, error, _ in dots]
    boxes = placed(points)
    for (name, x, y), (*_, noisy) in zip(points, dots, strict=True):
        left, top, right, _ = boxes[name]
        near = left - 1 if left > x else right + 1
        parts.append(
            f'<path d="M{x:.1f} {y:.1f}L{near:.1f} {top + LINE / 2:.1f}" stroke="{GREY}" stroke-opacity=".6"/>'
        )
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLORS["noise" if noisy else "bias"]}"/>')
        parts.append(f'<text x="{left:.1f}" y="{top + 11:.1f}">{escape(name)}</text>')
    font = 'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica Neue, Arial, sans-serif" font-size="11"'
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} fill="{GREY}">\n' + "\n".join(parts) + "\n</svg>\n"


# ------------------------------------------------------------------------------------------------ page


def page(atlas: Mapping[str, Any]) -> str:
    """Return the page: texts, the picture, and a table that its heads sort, with the numbers of one model at a time."""
    models: Mapping[str, str] = atlas["models"]
    hidden = "".join(
        f".choice:has(#m{i}:not(:checked)) ~ .scroll .m{i} {{ display: none; }}" for i in range(len(models))
    )
    choice = Markup().join(
        Markup('<label><input type="radio" name="m" id="m{}"{}> {} <small>({})</small></label>').format(
            i, Markup(" checked") if i == 0 else "", model, about
        )
        for i, (model, about) in enumerate(models.items())
    )
    heads = [Markup("<th>recipe</th>"), *_heads(models), Markup("<th>about</th><th>source</th><th>operands</th>")]
    rows = Markup().join(_row(name, row, models) for name, row in atlas["recipes"].items())
    files = Markup(", ").join(Markup('<a href="{0}">{0}</a>').format(file) for file in atlas["archives"])
    body = Markup(
        "<style>{}{}</style><h1>The atlas: every recipe on the same weights</h1>"
        '<p class="under">{}, commit {}</p><div class="prose"><p>{}</p></div>'
        '<div class="scroll picture" tabindex="0">'
        '<img src="errors.svg" alt="Gradient error of each recipe by its bits per operand">'
        '</div><p class="choice">{}</p><div class="scroll" tabindex="0"><table class="sorts"><thead><tr>{}</tr></thead>'
        "<tbody>{}</tbody></table></div><script>{}</script>"
    ).format(
        Markup(STYLE),
        Markup(hidden),
        atlas["date"],
        atlas["commit"],
        INTRO,
        choice,
        Markup().join(heads),
        rows,
        Markup(SORT),
    )
    return document(
        "The atlas of recipes", body, [], Markup("The numbers: {}. docs/atlas.py writes this page.").format(files)
    )


def _heads(models: Mapping[str, str]) -> Iterable[Markup]:
    for key, text in HEADS.items():
        several = range(len(models)) if key in OF_MODELS else (None,)
        yield from (Markup('<th class="number{}">{}</th>').format("" if i is None else f" m{i}", text) for i in several)


def _row(name: str, row: Mapping[str, Any], models: Mapping[str, str]) -> Markup:
    """Return a recipe's row; cells without a number have a dash, and the reason as a tooltip."""
    cells = [Markup('<th scope="row">{}</th>').format(name)]
    for key in HEADS:
        if key in OF_MODELS:
            for i, model in enumerate(models):
                values = row["measured"].get(model, {})
                value = values.get("bits", row.get("bits")) if key == "bits" else values.get(key)
                why = row["why"].get(model, "")
                if key in TRAINED:
                    why = row["untrained"].get(key, why) if model == MODEL else f"training is of {MODEL} alone"
                cells.append(_cell(value, f" m{i}", why, sign=key in ("loss", *TRAINED)))
        else:
            value = row.get(key)
            cells.append(_cell(value and value * (1000 if key == "seconds" else 1), "", "not timed"))
    reasons = [f"Not measured on {model}: {why}." for model, why in row["why"].items()]
    if len({*row["why"].values()}) == 1 and len(reasons) == len(models):
        reasons = [f"Not measured: {next(iter(row['why'].values()))}."]
    about = " ".join([f"{row['about']}.", *([f"Differs: {row['differs']}."] if row["differs"] else [])])
    operands: dict[str, list[str]] = {}
    for slot, text in row["operands"].items():
        operands.setdefault(text, []).append(slot)
    codes = Markup().join(
        Markup("<code>{} {}</code>").format("all" if len(slots) == 6 else ", ".join(slots), text)
        for text, slots in operands.items()
    )
    cells.append(Markup('<td class="about">{} <em>{}</em></td>').format(about, " ".join(reasons)))
    cells.append(Markup("<td>{}</td><td>{}</td>").format(row["source"], codes))
    return Markup("<tr>{}</tr>\n").format(Markup().join(cells))


def _cell(value: Any, classes: str, why: str, *, sign: bool = False) -> Markup:
    """Return a cell for a number, or for a list of a number and the half width of its interval."""
    number, half = value if isinstance(value, list) else (value, None)
    if number is None:
        return Markup('<td class="number{}" data-key="" title="{}">–</td>').format(classes, why)
    text = f"{number:{'+' if sign else ''}.{_places(number)}f}"
    small = "" if half is None else Markup("<small> ± {}</small>").format(f"{half:.2g}")
    return Markup('<td class="number{}" data-key="{}">{}{}</td>').format(classes, f"{number:.6g}", text, small)


def _places(number: float) -> int:
    return 1 if abs(number) >= 20 else 2 if abs(number) >= 0.1 or number == 0 else 3


if __name__ == "__main__":
    main()

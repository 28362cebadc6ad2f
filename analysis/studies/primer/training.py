"""Figures and a table of FP8 training: the casts in a linear layer, the modules in high precision, and memory."""

from __future__ import annotations

from functools import cache

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fewbits.analysis.engine.results.frames import Results
from fewbits.analysis.figures.gemm_flow import draw_flow, products, scalings_text
from fewbits.analysis.figures.panels import legend, panels, rows_of_labels
from fewbits.analysis.figures.theme import theme
from fewbits.analysis.report.items import FigureResult, Picture, Setting, TableCell, TableResult, TableRow
from fewbits.analysis.report.registry import figure, table
from fewbits.experiments.config import load_recipe, load_trial
from fewbits.experiments.distributed.memory import Memory, estimate
from fewbits.models.networks.registry import parameters

# The modules that DeepSeek-V3 keeps in higher precision (its section 3.3.1), as the second text (002) quotes it.
KEPT = ("the embedding", "the output head", "MoE gating", "normalization", "attention")


@figure("primer", "Figure F", title="The fine-grained cast flow: blocks of 1x128 and 128x128")
def flow(results: Results) -> Picture:
    """Draw the three products of a linear layer with the recipe `fp8`, which casts operands as DeepSeek-V3 does."""
    recipe = load_recipe("fp8")
    shown = products(recipe, "bf16")
    notes = (
        f"Drawn from the recipe {recipe.name}, with scales {scalings_text(recipe)}.",
        f"Kept in BF16 or FP32 by DeepSeek-V3, as the text quotes: {', '.join(KEPT)}. Master weights and sums of "
        "gradients are FP32; sums of products move to FP32 every 128 elements (Figure K).",
        "Recipes here quantize only linear layers inside blocks, so embedding, output head, norms and the products of "
        "attention stay in high precision; our models have no MoE gating.",
    )
    return FigureResult(lambda: draw_flow(shown), (), notes)


# -------------------------------------------------------------------------------- memory

PRESETS = ("gpt2-124m", "llama2-134m", "llama2-1b", "nvfp4-1.2b", "llama2-3b", "nemotron3-8b")
COMPONENTS = {
    "weights": "weights (FP32 master)",
    "gradients": "gradients (FP32)",
    "states": "optimizer states (FP32)",
    "activations": "activations",
    "quantized": "BF16 copies of weights",
}
TOKENS = 1024


@cache
def memory(model: str, *changes: str) -> Memory:
    """Return the estimated memory of training a model in BF16 on one device with AdamW.

    The batch is one sequence of TOKENS tokens. model: a name that `fewbits list models` lists. changes: overrides that
    change this training, for example `training.dtype=fp32`.
    """
    training = ["training.batch=1", "training.micro_batch=1", f"training.length={TOKENS}"]
    trial, _ = load_trial([f"model={model}", "recipe=bf16", *training, *changes])
    return estimate(trial)


@cache
def size(model: str) -> int:
    """Return the number of parameters of a model. model: a name that `fewbits list models` lists."""
    trial, _ = load_trial([f"model={model}"])
    return parameters(trial.model)


@table("primer", "Table M", title="Memory by component, in GB")
def memory_table(results: Results) -> TableResult:
    rows = []
    for model in PRESETS:
        parts = memory(model)
        values = [getattr(parts, name) for name in COMPONENTS] + [parts.total]
        cells = [*(f"{value / 1e9:.3g}" for value in values), f"{parts.total / size(model):.3g}"]
        rows.append(TableRow(model, tuple(TableCell(Setting(text), "", "") for text in cells)))
    columns = ("weights", "gradients", "states", "activations", "BF16 copies", "together", "bytes a parameter")
    return TableResult(columns, tuple(rows), MEMORY_NOTES)


MEMORY_NOTES = (
    f"One device, one sequence of {TOKENS:,} tokens, AdamW, BF16 products, no recomputation of activations. The "
    "numbers are the estimate of `fewbits sweep --dry-run`, without temporary tensors and the allocator's "
    "fragmentation.",
    "The text announces five components and lists four: weights, gradients, optimizer states and activations. With "
    "master weights there is a fifth: copies of the weights in low precision (for the forward and the backward pass).",
)


@figure("primer", "Figure M", title="Bytes a parameter by component")
def memory_figure(results: Results) -> Picture:
    """Draw for each model of PRESETS a stacked bar of the bytes per parameter that training needs.

    The stacked parts are the memory of weights, gradients and so on (COMPONENTS).
    """
    found = {model: memory(model) for model in PRESETS}

    def draw() -> Figure:
        figure, [[axes]] = panels(1, 1, 2.6)
        for y, (model, parts) in enumerate(found.items()):
            left = 0.0
            for i, name in enumerate(COMPONENTS):
                width = getattr(parts, name) / size(model)
                axes.barh(y, width, 0.62, left, color=theme().series[i], edgecolor=theme().background, linewidth=0.8)
                left += width
        rows_of_labels(axes, list(found))
        axes.set_ylim(len(found) - 0.4, -0.6)
        axes.set_xlabel("bytes a parameter")
        axes.grid(visible=True, axis="x")
        legend(figure, [Patch(color=theme().series[i], label=title) for i, title in enumerate(COMPONENTS.values())])
        return figure

    return FigureResult(draw, (), MEMORY_NOTES)

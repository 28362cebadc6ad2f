"""Print what a trial's recipe does to each linear layer of its model (`fewbits train … --layers`)."""

from __future__ import annotations

from fewbits.common.tables import print_table
from fewbits.experiments.trial import Trial
from fewbits.models.layer_table import layer_table
from fewbits.models.networks.registry import on_meta
from fewbits.models.quantize import quantize
from fewbits.models.recipe import HIGH, SLOTS


def print_layers(trial: Trial) -> None:
    """Print a table of the linear layers, then the quantizers of the six operand slots, once for each kind of layer.

    Layers of one kind have the same quantizers and sampler. The table shows the kind as a number, such as [1], and
    shows unquantized layers as `high`.
    """
    model = on_meta(trial.model)
    quantize(model, trial.recipe)
    kinds: dict[tuple[str, ...], str] = {}
    rows = []
    for row in layer_table(model).to_dict("records"):
        slots = (*(str(row[slot]) for slot in SLOTS), str(row["sampler"]))
        name = HIGH if {*slots[:-1]} == {HIGH} and not slots[-1] else kinds.setdefault(slots, f"[{len(kinds) + 1}]")
        rows.append((str(row["layer"]), f"{row['out']}x{row['in']}", str(row["part"] or ""), name, str(row["why"])))
    print_table(("layer", "out x in", "part", "operands", "why"), rows, right=("out x in",))
    for slots, name in kinds.items():
        print(f"\n{name}{f'  {slots[-1]} on the weight' if slots[-1] else ''}")
        print_table(("", ""), [(f"  {slot}", text) for slot, text in zip(SLOTS, slots, strict=False)])

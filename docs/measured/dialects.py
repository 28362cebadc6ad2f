"""Print the page of dialects: which implementations agree, and the steps that separate the others.

python docs/measured/dialects.py > docs/measured/dialects.md
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fewbits.kernels.conformance import NEAR, cases
from fewbits.kernels.dialects import DIALECTS, Dialect, TwoLevel, evaluate

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "oracles.safetensors"
ORDINARY = ("normal", "ties", "powers", *NEAR)
TOP = """\
# Dialects

Projects that share the name of a format round differently. A *dialect* (`kernels/dialects.py`) is a quantizer with an
order of float32 operations, as data. Each was compared with its package, run on a CPU, on three seeds of the cases of
`fewbits conform`, bit for bit in codes, scales, tensor scales and (where the package decodes) values. All are equal.
Results that depend on a NaN's bits are not compared.

    make test-deep                                    # runs the packages
    python -m tests.kernels.oracles                   # records their results for `make test`
    python docs/measured/dialects.py > docs/measured/dialects.md

Compared: {versions}. `te-mxfp8` and `cublas` follow published source and documentation, and were not run. ggml's
NVFP4 quantizer is C: its scales were compared through gguf's function, its elements through gguf's table.

Tables compare each dialect with the first of its format: the share of decoded values that differ, on normal data and
within two float32 numbers of ties, and a smallest set of steps that separates the two. Put into
the first, they give all codes and scales of the other. Special cases are zeros, range limits and signs of zero.
"""


def main() -> None:
    with safe_open(GOLDEN, "pt") as file:
        versions = sorted(set(file.metadata().values()))
    print(TOP.format(versions=", ".join(versions)))
    print("## NVFP4\n")
    _table([row for row in DIALECTS.values() if isinstance(row.steps, TwoLevel)])
    for format_ in ("e4m3", "e2m1"):
        print(f"\n## MX{'FP8' if format_ == 'e4m3' else 'FP4'}\n")
        same = [row for row in DIALECTS.values() if row.quantizer == f"{format_}:1x32:mx"]
        _table(sorted(same, key=lambda row: not row.name.startswith("ocp")))


def _table(rows: list[Dialect]) -> None:
    first = rows[0]
    finite = {name: x for name, x in cases(first).items() if torch.isfinite(x).all() and name != "ragged"}
    print(f"Against `{first.name}`:\n\n| dialect | normal, % | near ties, % | order of operations | special cases |")
    print("|---|---|---|---|---|")
    for row in rows[1:]:
        inputs = [x for name, x in finite.items() if name not in row.undefined]
        steps = _separating(first, row, inputs)
        ordinary = _separating(first, row, [finite[name] for name in ORDINARY])
        order = "; ".join(f"{name} `{getattr(row.steps, name)}`".replace("|", "\\|") for name in ordinary)
        special = ", ".join(name for name in steps if name not in ordinary)
        shares = " | ".join(f"{_share(first, row, finite[name]):.3g}" for name in ("normal", "near ties"))
        print(f"| `{row.name}` | {shares} | {order or 'the same'} | {special} |")


def _separating(a: Dialect, b: Dialect, inputs: list[Tensor]) -> tuple[str, ...]:
    """Return the names of a smallest set of steps of b that, put into a, give b's codes and scales on all inputs."""
    wanted = [evaluate(x, b) for x in inputs]
    changed = {name: value for name, value in asdict(b.steps).items() if getattr(a.steps, name) != value}

    def gives(changes: dict[str, Any]) -> bool:
        results = (evaluate(x, a, replace(a.steps, **changes)) for x in inputs)
        return all(
            torch.equal(got.codes, want.codes) and torch.equal(got.scales, want.scales)
            for got, want in zip(results, wanted, strict=True)
        )

    for name in list(changed):
        fewer = {key: value for key, value in changed.items() if key != name}
        if gives(fewer):
            changed = fewer
    return tuple(changed)


def _share(a: Dialect, b: Dialect, x: Tensor) -> float:
    """Return the share of values, in percent, that differ by more than rounding errors of the decoding."""
    one, other = evaluate(x, a).values, evaluate(x, b).values
    return 100 * float(((one - other).abs() > 1e-5 * one.abs()).float().mean())


if __name__ == "__main__":
    main()

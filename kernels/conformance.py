"""Compare a function that quantizes with a dialect, and name the rounding step that explains a difference.

`cases` makes tensors on which implementations have differed. A function gets a float32 matrix and returns values, or
codes and scales as the dialect's project stores them. If a result differs, `explain` searches the dialects in which one
step, or two, differ from the expected one, and keeps those that reproduce every result of the function, on tensors
that the search has not seen, too. So an explanation is exact, or there is none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor

from fewbits.kernels.dialects import DIALECTS, Dialect, Encoded, Float, Power, Steps, TwoLevel, evaluate
from fewbits.kernels.formats import TABLE, Format
from fewbits.kernels.packing import pack, swizzle, unpack
from fewbits.kernels.reference.elements import values_of
from fewbits.version import __version__

Function = Callable[[Tensor], Any]
ROWS, COLS = 16, 256
NEAR = ("near ties", "scale ties", *(f"{kind} {i}" for kind in ("near ties", "scale ties") for i in (2, 3, 4)))
COMPLETE = ("ties", *NEAR)  # the cases in which each row has the tensor's amax
QUANTITIES = ("tensor", "scales", "codes", "values")  # in the order in which an implementation computes them
_SHOWN = ("codes", "values", "scales", "tensor")  # the first that there is gives the share on normal data
_E4M3 = TABLE["e4m3"]
RAGGED = "ragged"  # the case whose rows are no whole number of blocks


@dataclass(frozen=True)
class Difference:
    """The first element that differs, in the first case that does: its index, block, and both numbers."""

    case: str
    quantity: str
    index: tuple[int, ...]
    block: tuple[int, int] | None
    got: float
    want: float
    count: int
    of: int


@dataclass(frozen=True)
class Report:
    """The result of `conform`.

    cases: for each kind of tensor `equal`, `differs`, `undefined` (the dialect states no result) or the error that the
        function raised. steps: the explanations that hold, each a tuple of changed steps; none: unknown, if they were
        `searched`. normal: the share of codes (or values) that differ on normal data.
    """

    dialect: str
    cases: dict[str, str]
    compared: tuple[str, ...]
    first: Difference | None
    steps: tuple[tuple[str, ...], ...]
    normal: float
    searched: bool = True

    @property
    def raised(self) -> dict[str, str]:
        no_error = ("equal", "differs", "undefined")  # many kernels refuse ragged matrices
        return {name: state for name, state in self.cases.items() if state not in no_error and name != RAGGED}

    @property
    def equal(self) -> bool:
        return self.first is None and not self.raised

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        quantities = ", ".join(self.compared)
        lines = [f"the function raised an error: {name}: {state}" for name, state in self.raised.items()]
        if self.first is None:
            count = sum(state == "equal" for state in self.cases.values())
            if lines:
                return [f"not equal to {self.dialect}: {len(lines)} cases raised errors, {count} are equal", *lines]
            state = self.cases.get(RAGGED, "equal")
            refused = [] if state in ("equal", "undefined") else [f"the function refuses ragged matrices: {state}"]
            return [f"equal to {self.dialect} on {count} cases ({quantities})", *refused]
        at = self.first
        where = f" of block {list(at.block)}" if at.block else ""
        lines += [
            f"differs from {self.dialect} in {', '.join(n for n, state in self.cases.items() if state == 'differs')}",
            f"first: case {at.case!r}, {at.quantity} {list(at.index)}{where}: got {at.got!r}, expected {at.want!r} "
            f"({at.count} of {at.of} differ)",
            f"on normal data {100 * self.normal:.3g} % of {'codes' if 'codes' in self.compared else 'values'} differ",
        ]
        if not self.searched:
            return lines
        if not self.steps:
            return [*lines, "explanation: unknown; no change of one or two steps gives these results"]
        either = " | ".join(" and ".join(steps) for steps in self.steps)
        return [*lines, f"explanation{'s that all hold' if len(self.steps) > 1 else ''}: {either}"]


def conform(function: Function, dialect: str | Dialect, *, seed: int = 0, explained: bool = True) -> Report:
    """Call the function on all cases and compare its results with the dialect's, bit for bit.

    function: gets a float32 matrix on the CPU. It returns a tensor of values of that shape, or codes, block scales and,
        if the dialect stores one, the tensor scale: as a tuple in this order, or as a dictionary with some of the keys
        `codes`, `scales`, `tensor` and `values`.
    """
    expected = dialect if isinstance(dialect, Dialect) else find_dialect(dialect)
    inputs = cases(expected, seed)
    states: dict[str, str] = {}
    outputs: dict[str, dict[str, Tensor]] = {}
    first: Difference | None = None
    for name, x in inputs.items():
        if name in expected.undefined:
            states[name] = "undefined"
            continue
        try:
            returned = function(x.clone())
        except Exception as error:
            states[name] = one_line(error)
            continue
        outputs[name] = read(returned, expected, x)
        difference = _first_difference(name, x, outputs[name], expected)
        states[name] = "differs" if difference else "equal"
        first = first or difference
    if not outputs:
        raise ValueError(f"the function raised errors in all cases; the first: {next(iter(states.values()))}")
    compared = tuple(q for q in QUANTITIES if any(q in output for output in outputs.values()))
    results = {name: (inputs[name], output) for name, output in outputs.items()}
    steps = explain(results, function, expected, seed) if first and explained else ()
    x, got = inputs["normal"], outputs.get("normal", {})
    share = next(
        (float(_differ(getattr(evaluate(x, expected), q), got[q]).float().mean()) for q in _SHOWN if q in got), math.nan
    )
    return Report(expected.name, states, compared, first, steps, share, searched=bool(first) and explained)


def one_line(error: Exception) -> str:
    """Return the type and the message of an error that the function under test raised."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def find_dialect(name: str) -> Dialect:
    if name not in DIALECTS:
        raise ValueError(f"unknown dialect {name!r}: valid dialects are {', '.join(DIALECTS)}")
    return DIALECTS[name]


def explain(
    results: Mapping[str, tuple[Tensor, dict[str, Tensor]]], function: Function, dialect: Dialect, seed: int = 0
) -> tuple[tuple[str, ...], ...]:
    """Return all changes of one step, or else of two, that reproduce the results; empty if none does."""
    differing = [name for name, (x, got) in results.items() if _first_difference(name, x, got, dialect)]
    ordered = sorted(results, key=lambda name: name not in differing)
    rows = (_two_rows(*results[name], dialect) for name in differing if name in COMPLETE)
    tested = [*rows, *(results[name] for name in ordered)]
    mine = dialect.steps

    def reproduces(steps: Steps) -> bool:
        return all(_same(evaluate(x, dialect, steps), got) for x, got in tested)

    def confirmed(steps: Steps) -> bool:
        others = ((x, function(x.clone())) for name, x in cases(dialect, seed + 1).items() if name in results)
        try:
            return all(_same(evaluate(x, dialect, steps), read(returned, dialect, x)) for x, returned in others)
        except Exception:  # of the function
            return False

    singles = list(mine.variants())
    found = [steps for _, steps in singles if reproduces(steps)]
    if not found:
        pairs = (
            replace(one, **{name: getattr(other, name)})
            for (first, one), (name, other) in itertools.combinations(singles, 2)
            if name != first
        )
        found = [steps for steps in pairs if reproduces(steps)]
    return tuple(mine.changed(steps) for steps in found if confirmed(steps))


def _two_rows(x: Tensor, got: Mapping[str, Tensor], dialect: Dialect) -> tuple[Tensor, dict[str, Tensor]]:
    """Return two rows that differ, which reject most candidates quickly; each row has the tensor's amax."""
    want, rows = evaluate(x, dialect), torch.zeros(len(x), dtype=torch.bool)
    parts = {name: tensor for name, tensor in got.items() if name != "tensor"}
    for name, tensor in parts.items():
        rows |= _differ(getattr(want, name), tensor).any(1)
    chosen = (rows if bool(rows.any()) else ~rows).nonzero().flatten()[:2]
    return x[chosen], {name: tensor[chosen] for name, tensor in parts.items()}


def read(returned: Any, dialect: Dialect, x: Tensor) -> dict[str, Tensor]:
    """Return what a function returned as integers [rows, columns] (codes), [blocks] (scales) and float32 tensors."""
    if isinstance(returned, Tensor):
        returned = {"values": returned}
    elif isinstance(returned, tuple | list) and len(returned) in (2, 3):
        returned = dict(zip(("codes", "scales", "tensor"), returned, strict=False))
    if not isinstance(returned, Mapping) or set(returned) - set(QUANTITIES):
        raise ValueError(
            "the function must return a tensor of values, a tuple (codes, scales[, tensor scale]), or a dictionary "
            f"with keys from {', '.join(QUANTITIES)}; it returned {type(returned).__name__}"
        )
    returned = {name: plain(value, name) for name, value in returned.items() if value is not None}
    if not returned:
        raise ValueError("the function returned nothing that can be compared: all results are None")
    readers = {"codes": _read_codes, "scales": _read_scales, "tensor": lambda value, *_: value.float().flatten()}
    if "values" in returned:
        _check("shape of values", list(returned["values"].shape), list(x.shape))
    return {
        name: readers.get(name, lambda value, *_: value.float())(value, dialect, x) for name, value in returned.items()
    }


def plain(value: Any, what: str) -> Tensor:
    """Return a result of the function as a dense tensor on the CPU; ValueError if it is none."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        pairs = what not in ("codes", "scales") and value.dtype == torch.float4_e2m1fn_x2  # not convertible
        if value.layout == torch.strided and not (value.is_meta or value.is_quantized or value.is_complex() or pairs):
            return value.detach().cpu()
        kind = f"tensor of {value.dtype}, layout {value.layout}, device {value.device}"
    raise ValueError(f"the function must return dense tensors of real numbers: its {what!r} is a {kind}")


def _read_codes(codes: Tensor, dialect: Dialect, x: Tensor) -> Tensor:
    (rows, cols), bits = x.shape, dialect.format.bits
    codes = _bytes("codes", codes)
    _check("shape of codes", list(codes.shape), [rows, dialect.format.row_bytes(cols)])
    if bits == 8:
        return torch.where(values_of(codes, dialect.format).isnan(), dialect.format.code_of(math.nan), codes.int())
    codes = unpack(codes, bits, cols)
    if dialect.layout.nibbles == "halves":
        block = dialect.block((rows, cols))[1]
        codes = codes.view(rows, -1, block // 2, 2).transpose(2, 3).reshape(rows, cols)
    return codes


def _read_scales(scales: Tensor, dialect: Dialect, x: Tensor) -> Tensor:
    rows, cols = x.shape
    height, width = dialect.block((rows, cols))
    down, across = -(-rows // height), -(-cols // width)
    scales = scales.view(torch.int32) if scales.dtype == torch.float32 else _bytes("scales", scales).int()
    if isinstance(dialect.steps, TwoLevel):
        scales = torch.where(scales == 0xFF, 0x7F, scales)  # a NaN of either sign
    swizzled = dialect.layout.swizzled
    _check("number of scales", scales.numel(), -(-rows // 128) * 512 * -(-across // 4) if swizzled else down * across)
    return scales.flatten()[swizzle(rows, across, scales.device)] if swizzled else scales.reshape(down, across)


def stored(encoded: Encoded, dialect: Dialect, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Return codes, scales, tensor scale and values as the dialect's project stores them; the inverse of `read`."""
    (rows, cols), bits, layout = shape, dialect.format.bits, dialect.layout
    codes, scales = encoded.codes, encoded.scales
    if layout.nibbles == "halves":
        half = dialect.block(shape)[1] // 2
        codes = codes.view(rows, -1, 2, half).transpose(2, 3).reshape(rows, cols)
    scales = scales.view(torch.float32) if isinstance(dialect.steps, Float) else scales.to(torch.uint8)
    if layout.swizzled:
        flat = torch.zeros(-(-rows // 128) * 512 * -(-scales.shape[1] // 4), dtype=torch.uint8)
        flat[swizzle(rows, scales.shape[1], scales.device)] = scales
        scales = flat
    result = {"codes": pack(codes, bits), "scales": scales.contiguous(), "values": encoded.values.contiguous()}
    return {**result, "tensor": encoded.tensor} if layout.tensor != "none" else result


def golden(dialect: Dialect, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return test vectors, `CASE.x` and the results `CASE.codes` …, and metadata that describe them."""
    tensors: dict[str, Tensor] = {}
    for name, x in cases(dialect, seed).items():
        if name not in dialect.undefined:
            results = {"x": x, **stored(evaluate(x, dialect), dialect, (x.shape[0], x.shape[1]))}
            tensors |= {f"{name}.{key}": value.contiguous() for key, value in results.items()}
    described = {
        "dialect": dialect.name,
        "quantizer": dialect.quantizer,
        "source": dialect.source,
        **{f"layout.{key}": str(value) for key, value in asdict(dialect.layout).items()},
        **{f"step.{key}": str(value) for key, value in asdict(dialect.steps).items()},
        "made by": f"fewbits {__version__}: fewbits conform --golden {dialect.name} --seed {seed}",
    }
    return tensors, described


def _bytes(what: str, tensor: Tensor) -> Tensor:
    _check(f"size in bytes of {what} of type {tensor.dtype}", tensor.element_size(), 1)
    return tensor.view(torch.uint8)


def _check(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise ValueError(f"the function returned a wrong {what}: {got}; expected {expected}")


def _differ(a: Tensor, b: Tensor) -> Tensor:
    return _bits(a) != _bits(b)


def _bits(tensor: Tensor) -> Tensor:
    """Return floats as integers, one for all NaN; leave integers as they are."""
    if not tensor.is_floating_point():
        return tensor
    return torch.where(tensor.isnan(), -1, tensor.float().view(torch.int32))


def _same(want: Encoded, got: Mapping[str, Tensor]) -> bool:
    return all(
        getattr(want, name).shape == tensor.shape and not bool(_differ(getattr(want, name), tensor).any())
        for name, tensor in got.items()
    )


def _first_difference(case: str, x: Tensor, got: Mapping[str, Tensor], dialect: Dialect) -> Difference | None:
    encoded = evaluate(x, dialect)
    for quantity in (name for name in QUANTITIES if name in got):
        want, mine = getattr(encoded, quantity), got[quantity]
        _check(f"number of {quantity} values", mine.numel(), want.numel())
        differ = _differ(want, mine)
        if bool(differ.any()):
            index = tuple(differ.nonzero()[0].tolist())
            sizes = dialect.block((x.shape[0], x.shape[1]))
            at = (index[0] // sizes[0], index[1] // sizes[1]) if quantity in ("codes", "values") else None
            numbers = (mine[index].item(), want[index].item())
            return Difference(case, quantity, index, at, *numbers, int(differ.sum()), differ.numel())
    return None


# Cases. In `near ties` and `scale ties`, values are beside the points at which results change.


def cases(dialect: Dialect, seed: int = 0) -> dict[str, Tensor]:
    """Return adversarial matrices by name: of whole blocks, and a ragged one if the dialect accepts it."""
    g = torch.Generator().manual_seed(seed)
    grid, steps = dialect.format, dialect.steps
    width = dialect.block((ROWS, COLS))[1]
    normal = torch.randn(ROWS, COLS, generator=g)
    signs = _choose([-1.0, 1.0], (ROWS, COLS), g)
    block_powers = _per_block(_choose([2.0**-k for k in range(48)], (ROWS, COLS // width), g), width)
    kept = _per_block(torch.rand(ROWS, COLS // width, generator=g) < 0.5, width)
    made = {
        "normal": normal,
        "ties": _ties(grid, steps, width, g),
        **{name: (_near_ties if "near" in name else _scale_ties)(grid, steps, width, g) for name in NEAR},
        "powers": _nudged(_choose([2.0**k for k in range(-12, 13)], (ROWS, COLS), g) * signs, 1, g),
        "heavy tails": normal * torch.exp(3 * torch.randn(ROWS, COLS, generator=g)),
        "small blocks": normal * block_powers,
        "zero blocks": torch.where(kept, normal, 0.0),
        "signed zeros": torch.where(kept, 0.0, normal * 0.1) * signs,
        "zeros": torch.zeros(ROWS, COLS),
        "large": normal * 1e5,
        "huge": (normal.double().clamp(-3, 3) / 3 * torch.finfo(torch.float32).max).float(),
        "tiny": normal * 2.0**-122,
        "subnormal": (normal.double() * 2.0**-136).float(),
        "infinite": _with(normal, [math.inf, -math.inf], g),
        "nan": _with(normal, [math.nan], g),
    }
    if dialect.partial_blocks:
        made[RAGGED] = torch.randn(7, COLS - width // 2, generator=g)
    return made


def _choose(values: Sequence[float], shape: tuple[int, ...], g: Generator) -> Tensor:
    return torch.tensor(values)[torch.randint(len(values), shape, generator=g)]


def _per_block(blocks: Tensor, width: int) -> Tensor:
    return blocks.repeat_interleave(width, 1)


def _with(x: Tensor, values: Sequence[float], g: Generator) -> Tensor:
    x = x.clone()
    x.view(-1)[torch.randint(x.numel(), (4,), generator=g)] = _choose(values, (4,), g)
    return x


def _nudged(x: Tensor, ulps: int, g: Generator) -> Tensor:
    """Return x with each value moved by up to `ulps` float32 numbers."""
    moved = x.view(torch.int32) + torch.randint(-ulps, ulps + 1, x.shape, generator=g, dtype=torch.int32)
    return torch.where(x == 0, x, moved.view(torch.float32))


def _midpoints(grid: Format) -> list[float]:
    values = [grid.decode(code) for code in range(grid.max_code + 1)]
    return [(a + b) / 2 for a, b in itertools.pairwise(values)]


def _with_amax(elements: Tensor, amax: Tensor, tensor_amax: float | None, width: int) -> Tensor:
    """Make the first element of each block its amax, and that of the first block of each row the tensor's."""
    limit = _per_block(amax, width)
    x = torch.where(elements.abs() < limit, elements, limit.copysign(elements))
    x[:, ::width] = amax
    if tensor_amax is not None:
        x[:, 0] = tensor_amax
    return x


def _ties(grid: Format, steps: Steps, width: int, g: Generator) -> Tensor:
    """Return exact midpoints: scales are powers of two, and the tensor's scale is 1."""
    powers = _choose([2.0**k for k in range(-5, 7)], (ROWS, COLS // width), g)
    elements = _choose(_midpoints(grid), (ROWS, COLS), g) * _choose([-1.0, 1.0], (ROWS, COLS), g)
    tensor = steps.target * grid.max if isinstance(steps, TwoLevel) else None
    return _with_amax(elements * _per_block(powers, width), powers * grid.max, tensor, width)


def _near_ties(grid: Format, steps: Steps, width: int, g: Generator) -> Tensor:
    d = float(torch.rand((), generator=g)) + 0.5
    size = (ROWS, COLS // width)
    if isinstance(steps, TwoLevel):
        d = 1.0 if steps.tensor_scale == "none" else d / 64
        scales = _choose([_E4M3.decode(code) for code in range(8, int(_E4M3.code_of(steps.target)))], size, g) * d
    elif isinstance(steps, Power):
        scales = _choose([2.0**k for k in range(-20, 20)], size, g)
    else:
        scales = torch.exp(torch.randn(size, generator=g))
    elements = _choose(_midpoints(grid), (ROWS, COLS), g) * _choose([-1.0, 1.0], (ROWS, COLS), g)
    x = _nudged(elements * _per_block(scales, width), 2, g)
    tensor = steps.target * grid.max * d if isinstance(steps, TwoLevel) else None
    return _with_amax(x, scales * grid.max, tensor, width)


def _scale_ties(grid: Format, steps: Steps, width: int, g: Generator) -> Tensor:
    """Return blocks whose amax is beside a point at which the stored scale changes."""
    size, d = (ROWS, COLS // width), float(torch.rand((), generator=g)) + 0.5
    tensor = None
    if isinstance(steps, TwoLevel):
        d = 1.0 if steps.tensor_scale == "none" else d / 64
        tensor = steps.target * grid.max * d
        limit = int(_E4M3.code_of(steps.target)) - 1
        amax = _choose(_midpoints(_E4M3)[:limit], size, g) * grid.max * d
    else:
        last = 2 - 2.0 ** -(grid.mantissa_bits + 1)
        tops = [1.0, 1.5, 1.75, last, 2.0, grid.max * 2.0**-grid.emax]
        amax = _choose(tops, size, g) * _choose([2.0**k for k in range(-20, 20)], size, g)
    amax = _nudged(amax, 2, g)
    share = torch.rand(ROWS, COLS, generator=g) * 2 - 1
    return _with_amax(share * _per_block(amax, width), amax, tensor, width)

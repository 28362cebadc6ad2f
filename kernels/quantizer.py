"""Describe quantization as frozen values: Block, Quantizer and Mixture, each with a readable string form.

A quantizer is `format[:block:scaling]`, then any of `nearest|stochastic`, `rhtN`, `signs=te|none|SEED|each`,
`overflow=saturate|nan|inf`, `group=tensor|row|N`, `factor=F`, `target=T`, `select=mse|mae|max`:

    bf16                                naive cast: no scales, and so no blocks
    e4m3:128x128:gam                    one GAM scale per 128x128 block
    e2m1:1x16:nvfp4:stochastic:rht16    NVFP4, rounded stochastically after a random Hadamard transform of size 16
    e2m1:1x16:eden:rht128               MS-EDEN: a transform, elements rounded to nearest, scales stochastically
    e2m1:1x16:nvfp4:group=row           NVFP4 with a float32 scale for each row
    e2m1:1x32:mx:stochastic:factor=3/4  MXFP4 of 3/4 of each value, which does not saturate
    e2m1:1x16:fouroversix:target=448:select=mae     Four Over Six by the mean absolute error, up to 448

A mixture lists quantizers in order of preference. Every entry except the last has a test that decides
whether it is used; the last entry is used where all tests fail. `per` is the part of the tensor that one decision
covers: `tensor`, `block` (the block of the first entry that has blocks), `channel` or `RxC`:

    e4m3:128x128:gam @ error<0.045 | bf16 ; per=tensor
    e4m3:128x128:gam @ error<e5m2:128x128:gam | e5m2:128x128:gam @ spread<normal | bf16 ; per=block
    int4:1x16:nvfp4 @ mse<e2m1:1x16:nvfp4 | e2m1:1x16:nvfp4 ; per=block        IF4

`str()` returns the shortest string form, and parsing it returns an equal value.
Quantizers and mixtures together are called specs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Literal, get_args

from fewbits.kernels.formats import TABLE, Format, Overflow
from fewbits.kernels.scalings import (
    FACTORS,
    GROUP_SIZES,
    ROUNDINGS,
    SCALINGS,
    SELECTS,
    Group,
    Rounding,
    Scaling,
    Select,
    scaling,
)

Signs = Literal["te", "none", "each"]

HADAMARD_SIZES = (2, 4, 8, 16, 32, 64, 128)

_BLOCKS = "tensor, channel or RxC such as 128x128"
_OPTIONS = (
    "nearest, stochastic, rhtN, signs=te|none|SEED|each, overflow=saturate|nan|inf, group=tensor|row|N, factor=F, "
    "target=T, select=mse|mae|max"
)
_ROW = 1 << 30  # `group_blocks` for a whole row
_MOST_ENTRIES = 128  # a block's choice of an entry is an int8
_TESTS = "error<NUMBER, error|mse|mae|max<QUANTIZER, spread<normal, spread<NUMBER"


@dataclass(frozen=True, slots=True)
class Block:
    """The part of a tensor that shares one scale: rows × cols, where None means the whole dimension."""

    rows: int | None = None
    cols: int | None = None

    def __post_init__(self) -> None:
        sides = (self.rows, self.cols)
        if sides not in ((None, None), (1, None)) and not all(type(n) is int and 1 <= n < 1 << 31 for n in sides):
            raise ValueError(
                f"block of {self.rows} rows and {self.cols} columns: valid blocks are {_BLOCKS} with R, C ≥ 1"
            )

    def __str__(self) -> str:
        if self.cols is None:
            return "tensor" if self.rows is None else "channel"
        return f"{self.rows}x{self.cols}"

    @staticmethod
    def parse(text: str) -> Block:
        """Parse `tensor`, `channel` (a whole vector along the dot-product axis) or `RxC`."""
        if text in ("tensor", "channel"):
            return Block(None if text == "tensor" else 1, None)
        match = re.fullmatch(r"([1-9][0-9]{0,9})x([1-9][0-9]{0,9})", text)
        if not match:
            raise ValueError(f"unknown block {text!r}: valid blocks are {_BLOCKS} with R, C ≥ 1")
        return Block(int(match[1]), int(match[2]))

    def resolve(self, shape: Sequence[int], axis: int = -1) -> tuple[int, int]:
        """Return (rows, columns) of a block in a matrix of this shape; axis=0 swaps them, so that 1x16 has 16 rows."""
        if axis not in (-1, 0):
            raise ValueError(f"axis {axis!r}: valid values are -1 (along the rows) and 0 (down the columns)")
        rows, cols = shape
        r, c = (self.rows, self.cols) if axis == -1 else (self.cols, self.rows)
        return (max(rows, 1) if r is None else r, max(cols, 1) if c is None else c)


def parts_of(shape: Sequence[int], part: tuple[int, int]) -> tuple[int, int]:
    """Return (parts down, parts across) of a matrix of this shape, divided into parts of `part` = (rows, columns).

    Parts at the lower and right edges may be smaller.
    """
    (rows, cols), (r, c) = shape, part
    return (rows + r - 1) // r, (cols + c - 1) // c


@dataclass(frozen=True, slots=True, init=False)
class Quantizer:
    """A format, block, scaling and rounding, and optionally a Hadamard transform of the values before quantization.

    scaling: the name of a record in `scalings.py`; `none` is the naive cast.
    hadamard: the size of the random Hadamard transform along the axis, or None.
    signs: the random signs of the transform: `te` (TransformerEngine's 16 signs; valid and the default only for size
        16), `none` (no signs), a seed (the default for other sizes is 0), or `each` (the caller draws a new seed for
        every GEMM and inserts it by `with_signs`).
    overflow: what a value beyond the format's maximum becomes: `saturate` (±maximum), `nan` or `inf`.
    group: the set of blocks that share a second-level value, such as a tensor scale: `tensor` (all blocks), `row` (one
        row of blocks), or the number of neighbouring values along the axis. scalings.py lists what a scaling supports.
    factor: with power-of-two and two-level scalings: elements are multiplied by it before rounding, and results divided
        by it. Below 1 it leaves room for stochastic rounding.
    target: with two-level scalings: the block scale of the block that contains the group's amax; None: the scaling's.
    select: with fouroversix: the error by which scales are chosen (scalings.py).
    """

    format: Format
    block: Block
    scaling: str
    rounding: Rounding
    hadamard: int | None
    signs: Signs | int | None
    overflow: Overflow
    group: Group
    # The string form, computed once, so that torch.compile reads an attribute and does not trace code.
    spelling: str = field(init=False, compare=False, repr=False)
    factor: float
    target: float | None
    select: Select | None

    def __init__(
        self,
        format: Format | str = "e4m3",  # noqa: A002, the name of the field
        block: Block | str | tuple[int, int] = "tensor",
        scaling: str = "none",
        rounding: Rounding = "nearest",
        hadamard: int | None = None,
        signs: Signs | int | None = None,
        overflow: Overflow = "saturate",
        group: Group = "tensor",
        factor: float = 1.0,
        target: float | None = None,
        select: Select | None = None,
    ) -> None:
        if hadamard is not None and signs is None:
            signs = "te" if hadamard == 16 else 0
        fields = {
            "format": _element_format(format),
            "block": _block(block),
            "scaling": scaling,
            "rounding": rounding,
            "hadamard": hadamard,
            "signs": signs,
            "overflow": overflow,
            "group": group,
            "factor": factor,
            "target": target,
            "select": select,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._check()
        if self.target == SCALINGS[self.scaling].target:
            object.__setattr__(self, "target", None)
        object.__setattr__(self, "spelling", self._spell())

    def _check(self) -> None:
        _check_choice("scaling", self.scaling, SCALINGS)
        _check_choice("rounding", self.rounding, ROUNDINGS)
        if type(self.group) is not int or self.group not in GROUP_SIZES:
            _check_choice("group", self.group, ("tensor", "row", *map(str, GROUP_SIZES)))
        _check_choice(f"overflow with format {self.format}", self.overflow, self.format.overflows)
        if self.scaling == "none" and self.block != Block():
            raise ValueError(
                f"block {self.block} needs a scaling: {', '.join(list(SCALINGS)[1:])}; or remove the block, because a "
                "naive cast has no blocks"
            )
        if self.format.name == "fp32" and self.scaling != "none":
            raise ValueError(
                f"cannot combine scaling {self.scaling!r} with format fp32, which takes no scaling: write fp32 alone"
            )
        kind = self.group if isinstance(self.group, str) else "N"
        if kind != "tensor" and kind not in SCALINGS[self.scaling].groups:
            valid = ", ".join(name for name, row in SCALINGS.items() if kind in row.groups)
            raise ValueError(
                f"cannot combine group {self.group!r} with scaling {self.scaling!r}: valid only with scaling {valid}"
            )
        if isinstance(self.group, int) and (self.block.cols is None or self.group % self.block.cols):
            raise ValueError(f"group {self.group} with block {self.block}: valid groups consist of whole blocks")
        self._check_options()
        self.traits.check(self.format.name, str(self.block), self.rounding, self.hadamard)
        if self.hadamard is None:
            if self.signs is not None:
                raise ValueError(f"signs {self.signs!r} without hadamard: add a size such as rht16, or remove signs")
            return
        if type(self.hadamard) is not int or self.hadamard not in HADAMARD_SIZES:
            raise ValueError(f"hadamard {self.hadamard!r}: valid values are {', '.join(map(str, HADAMARD_SIZES))}")
        seeded = type(self.signs) is int and 0 <= self.signs < 1 << 63
        if not seeded and (self.signs not in get_args(Signs) or (self.signs == "te" and self.hadamard != 16)):
            te = "te, " if self.hadamard == 16 else ""
            raise ValueError(
                f"signs {self.signs!r} with hadamard {self.hadamard}: valid values are {te}none, each or a seed "
                "from 0 to 2^63 - 1"
            )

    def _check_options(self) -> None:
        record, (low, high) = SCALINGS[self.scaling], FACTORS
        set_to = {"factor": self.factor != 1, "target": self.target is not None, "select": self.select is not None}
        for name, is_set in set_to.items():
            if is_set and name not in record.options:
                valid = ", ".join(other for other, row in SCALINGS.items() if name in row.options)
                raise ValueError(
                    f"cannot combine {name}={getattr(self, name)} with scaling {self.scaling!r}: valid only with "
                    f"scaling {valid}"
                )
        if not isinstance(self.factor, (int, float)) or not low <= self.factor < high:
            raise ValueError(f"factor {self.factor!r}: valid are numbers from {low:g} to below {high:g}, such as 16/17")
        if self.factor > 1 and self.format.max * self.factor > TABLE["fp32"].max:
            raise ValueError(f"factor {self.factor!r} times {self.format}'s largest value is beyond FP32's")
        most = record.stored.max if record.stored else 0
        if self.target is not None and not (isinstance(self.target, (int, float)) and 1 <= self.target <= most):
            raise ValueError(f"target {self.target!r}: valid are numbers from 1 to {most:g}, such as 256 or 448")
        if self.select is not None:
            _check_choice("select", self.select, SELECTS)

    def __str__(self) -> str:
        return self.spelling

    def _spell(self) -> str:
        default_signs = "te" if self.hadamard == 16 else 0
        parts = [
            self.format.name,
            f"{self.block}:{self.scaling}" if self.scaling != "none" else "",
            "stochastic" if self.rounding == "stochastic" else "",
            f"rht{self.hadamard}" if self.hadamard else "",
            f"signs={self.signs}" if self.hadamard and self.signs != default_signs else "",
            f"overflow={self.overflow}" if self.overflow != "saturate" else "",
            f"group={self.group}" if self.group != "tensor" else "",
            f"factor={_spell_ratio(self.factor)}" if self.factor != 1 else "",
            f"target={_spell(float(self.target))}" if self.target is not None else "",
            f"select={self.select}" if self.select else "",
        ]
        return ":".join(part for part in parts if part)

    @staticmethod
    def parse(text: str) -> Quantizer:
        """Parse the string form `format[:block:scaling]` with options; the result is cached.

        format: e4m3, e5m2, e2m1, e3m2, e2m3, e3m4, bf16, fp16, fp32 or any eXmY.
        block: tensor, channel or RxC. A format without a block and a scaling is the naive cast.
        scaling: a name in the table of `scalings.py`, such as amax, gam, mx or nvfp4.
        options, in any order: stochastic, rhtN, signs=te|none|SEED|each, overflow=saturate|nan|inf,
            group=tensor|row|N, factor=F, target=T, select=mse|mae|max.

        >>> Quantizer.parse("e2m1:1x16:nvfp4:stochastic:rht16")
        """
        if not isinstance(text, str):
            raise ValueError(f"expected a quantizer as a string, such as e4m3:128x128:gam, not {type(text).__name__}")
        return _parse_quantizer(text)

    @property
    def traits(self) -> Scaling:
        """The record of this quantizer's scaling in `scalings.py`, with the options of the quantizer."""
        return scaling(self.scaling, self.factor, self.target, self.select)

    @property
    def group_blocks(self) -> int:
        """The number of blocks along the axis that share a second-level value; 0: all blocks of the tensor do."""
        if self.group == "tensor":
            return 0
        return _ROW if self.group == "row" else int(self.group) // (self.block.cols or 1)

    def group_grid(self, grid: tuple[int, int], axis: int) -> tuple[int, int]:
        """Return (groups down, groups across) for a grid of (blocks down, blocks across).

        A group is the set of blocks that share a second-level value, such as a tensor scale. With group=row, it is one
        row of blocks along the axis; for axis=0, one column of blocks.
        """
        n, (down, across) = self.group_blocks, grid
        if not n:
            return (1, 1)
        if n == _ROW:
            return (down, 1) if axis == -1 else (1, across)
        return parts_of(grid, (1, n) if axis == -1 else (n, 1))

    def groups(self, grid: tuple[int, int], axis: int) -> int:
        """Return the number of groups in a grid of (blocks down, blocks across); 0 if the scaling has no groups."""
        return math.prod(self.group_grid(grid, axis)) if self.traits.groups else 0

    @property
    def needs_seed(self) -> bool:
        return self.rounding == "stochastic" or self.traits.corrects

    @property
    def draws_signs(self) -> bool:
        """True for `signs=each`: the caller has to draw new signs of the Hadamard transform for every GEMM."""
        return self.signs == "each"


@dataclass(frozen=True, slots=True)
class ErrorBelow:
    """A test that passes if the mean relative error of the non-zero elements is below the threshold (MoR eq. 2)."""

    threshold: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", _positive("error threshold", self.threshold))
        if self.threshold > 1:
            hint = f"; did you mean {self.threshold / 100:g}?" if self.threshold <= 100 else ""
            raise ValueError(f"error threshold {_spell(self.threshold)}: relative errors are fractions up to 1{hint}")

    def __str__(self) -> str:
        return f"error<{_spell(self.threshold)}"


@dataclass(frozen=True, slots=True)
class ErrorBelowOther:
    """A test that passes if an error is below that of the quantizer `other`.

    by: the error that is compared: the mean relative error (`error`, MoR eq. 3), the mean squared error (`mse`), the
        mean absolute error (`mae`) or the largest error (`max`).
    """

    other: Quantizer
    by: Literal["error"] | Select = "error"

    def __post_init__(self) -> None:
        _check_choice("error", self.by, ("error", *SELECTS))

    def __str__(self) -> str:
        return f"{self.by}<{self.other}"


@dataclass(frozen=True, slots=True)
class SpreadBelow:
    """A test that passes if (largest magnitude) / (smallest non-zero magnitude) is below the limit (MoR eq. 4).

    The limit None means the spread of the entry's own format: its largest value / its smallest normal value.
    """

    limit: float | None = None

    def __post_init__(self) -> None:
        if self.limit is not None:
            object.__setattr__(self, "limit", _positive("spread limit", self.limit))

    def __str__(self) -> str:
        return f"spread<{'normal' if self.limit is None else _spell(self.limit)}"

    def limit_for(self, quantizer: Quantizer) -> float:
        return quantizer.format.spread if self.limit is None else self.limit


Test = ErrorBelow | ErrorBelowOther | SpreadBelow


@dataclass(frozen=True, slots=True)
class Entry:
    """A quantizer of a mixture, and the test that decides where it is used; only the last entry has no test."""

    quantizer: Quantizer
    test: Test | None = None

    def __str__(self) -> str:
        return f"{self.quantizer} @ {self.test}" if self.test else f"{self.quantizer}"


@dataclass(frozen=True, slots=True)
class Mixture:
    """A list of entries in order of preference; `per` is the part of a tensor for which one entry is chosen.

    Valid values of `per` are tensor, block (the block of the first entry that has a scaling), channel and RxC.
    """

    entries: tuple[Entry, ...]
    per: str = "tensor"
    # Computed once, because every call on a tensor needs them.
    spelling: str = field(init=False, compare=False, repr=False)
    quantizers: tuple[Quantizer, ...] = field(init=False, compare=False, repr=False)
    decision_block: Block = field(init=False, compare=False, repr=False)  # the Block that `per` stands for

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(self.entries))
        if not self.entries:
            raise ValueError("a mixture needs at least one entry")
        if len(self.entries) > _MOST_ENTRIES:
            raise ValueError(f"{len(self.entries)} entries: a mixture has at most {_MOST_ENTRIES}")
        for entry in self.entries:
            if not isinstance(entry, Entry) or not isinstance(entry.quantizer, Quantizer):
                raise ValueError(f"expected Entry(quantizer, test) as an entry of a mixture, not {entry!r}")
        for i, entry in enumerate(self.entries[:-1], start=1):
            if entry.test is None:
                raise ValueError(
                    f"entry {i}, {str(entry)!r}, has no test: every entry except the last needs one of {_TESTS}"
                )
        if self.entries[-1].test is not None:
            raise ValueError(
                f"the last entry, {str(self.entries[-1])!r}, is used where all tests fail: remove its own test"
            )
        object.__setattr__(self, "quantizers", self._quantizers())
        first, *others = self.quantizers
        for other in others:
            if (other.hadamard, other.signs) != (first.hadamard, first.signs):
                raise ValueError(
                    f"{str(other)!r} and {str(first)!r} differ in their Hadamard transform (rhtN) or its signs: values "
                    "in different bases can be neither mixed nor compared, so use the same transform and signs in "
                    "every entry and test"
                )
        object.__setattr__(self, "decision_block", self._decision_block())
        object.__setattr__(self, "spelling", self._spell())

    def __str__(self) -> str:
        return self.spelling

    def _spell(self) -> str:
        entries = " | ".join(map(str, self.entries))
        return entries if self.per == "tensor" else f"{entries} ; per={self.per}"

    @staticmethod
    def parse(text: str) -> Mixture:
        """Parse the string form `QUANTIZER @ TEST | … | QUANTIZER ; per=…`; the result is cached.

        per: the part of a tensor for which one entry is chosen: tensor (the default), block, channel or RxC.
        Tests: error<NUMBER passes if the mean relative error is below the number, error<QUANTIZER if it is below the
        error of another quantizer; mse<, mae< and max<QUANTIZER compare other errors (`ErrorBelowOther`). spread<NUMBER
        passes if (largest / smallest non-zero magnitude) is below the number, spread<normal if it is below (largest /
        smallest normal value) of the entry's own format.

        >>> Mixture.parse("e4m3:128x128:gam @ error<0.045 | bf16 ; per=tensor")
        """
        if not isinstance(text, str):
            raise ValueError(
                f"expected a mixture as a string, such as 'e4m3 @ error<0.045 | bf16', not {type(text).__name__}"
            )
        return _parse_mixture(text)

    def _quantizers(self) -> tuple[Quantizer, ...]:
        """Return all quantizers of the entries and of their tests, without duplicates, in order of appearance."""
        quantizers: dict[Quantizer, None] = {}
        for entry in self.entries:
            quantizers[entry.quantizer] = None
            if isinstance(entry.test, ErrorBelowOther):
                quantizers[entry.test.other] = None
        return tuple(quantizers)

    def _decision_block(self) -> Block:
        if self.per != "block":
            try:
                return Block.parse(self.per)
            except ValueError:
                raise ValueError(f"unknown per={self.per!r}: valid values are block, {_BLOCKS}") from None
        for entry in self.entries:
            if entry.quantizer.scaling != "none":
                return entry.quantizer.block
        raise ValueError(f"per='block', but no quantizer of the mixture has blocks: valid values are {_BLOCKS}")

    @property
    def needs_seed(self) -> bool:
        return any(q.needs_seed for q in self.quantizers)

    @property
    def draws_signs(self) -> bool:
        return self.quantizers[0].draws_signs  # all quantizers have the same signs


def with_signs(spec: Quantizer | Mixture, seed: int) -> str:
    """Return the string form of `spec` with `signs=each` replaced by `signs=<seed>`.

    Both operands of a GEMM need the same seed, so that their rotations cancel.
    """
    return spec.spelling.replace("signs=each", f"signs={seed}")


# Parsing. An option is a plain name or key=value. Error messages quote the text that was parsed.


@lru_cache(maxsize=1024)
def _parse_quantizer(text: str) -> Quantizer:
    with _quote_in_errors("quantizer", text):
        name, *rest = (part.strip() for part in text.split(":"))
        fields: dict[str, str | float] = {}
        if rest and _option(rest[0]) is None:
            fields["block"] = block = rest.pop(0)
            try:
                Block.parse(block)
            except ValueError:
                raise ValueError(f"{block!r} is neither a block ({_BLOCKS}) nor an option ({_OPTIONS})") from None
            if not rest or rest[0] not in SCALINGS:
                actual = f"found {rest[0]!r}" if rest else "found the end"
                raise ValueError(
                    f"expected a scaling after block {block!r}, {actual}: valid scalings are "
                    f"{', '.join(name for name in SCALINGS if name != 'none')}"
                )
            fields["scaling"] = rest.pop(0)
        for part in rest:
            option = _option(part)
            if option is None:
                raise ValueError(f"unknown option {part!r}: valid options are {_OPTIONS}")
            field, value = option
            if field in fields:
                raise ValueError(f"{part!r} sets {field} a second time: remove one of the two")
            fields[field] = value
        return Quantizer(name, **fields)  # type: ignore[arg-type]  # the constructor checks every value


def _option(part: str) -> tuple[str, str | float] | None:
    """Return (field, value) for `part`, an option in a quantizer's string form; None if `part` is not an option."""
    if part in ROUNDINGS:
        return "rounding", part
    if match := re.fullmatch(r"rht([0-9]{1,4})", part):
        return "hadamard", int(match[1])
    if match := re.fullmatch(r"signs=([0-9]{1,20})", part):
        return "signs", int(match[1])
    if match := re.fullmatch(r"group=([0-9]{1,10})", part):
        return "group", int(match[1])
    if match := re.fullmatch(r"(factor|target)=(.*)", part):
        return match[1], _ratio(match[2])
    if match := re.fullmatch(r"(signs|overflow|group|select)=(.*)", part):
        return match[1], match[2]
    return None


def _ratio(text: str) -> float | str:
    """Return the number that `text` spells as a decimal or as N/M; any other text is returned."""
    above, slash, below = text.partition("/")
    if slash and above.isdecimal() and below.isdecimal() and int(below):
        return int(above) / int(below)
    number = _number(text)
    return text if number is None else number


@lru_cache(maxsize=1024)
def _parse_mixture(text: str) -> Mixture:
    with _quote_in_errors("mixture", text):
        listed, *options = text.split(";")
        key, _, per = (part.strip() for part in "".join(options).partition("="))
        if options and (len(options) > 1 or key != "per"):
            raise ValueError(f"unknown {';'.join(options)!r} after ';': expected per= with one of block, {_BLOCKS}")
        entries = tuple(_parse_entry(entry) for entry in listed.split("|"))
        return Mixture(entries, per if options else "tensor")


def _parse_entry(text: str) -> Entry:
    quantizer, at, test = (part.strip() for part in text.partition("@"))
    return Entry(Quantizer.parse(quantizer), _parse_test(test) if at else None)


def _parse_test(text: str) -> Test:
    kind, _, limit = (part.strip() for part in text.partition("<"))
    number = _number(limit)
    if kind == "error" and limit:
        return ErrorBelowOther(Quantizer.parse(limit)) if number is None else ErrorBelow(number)
    if kind in SELECTS and limit and number is None:
        return ErrorBelowOther(Quantizer.parse(limit), kind)
    if kind == "spread" and (number is not None or limit == "normal"):
        return SpreadBelow(number)
    raise ValueError(f"unknown test {text!r}: valid tests are {_TESTS}")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _spell(number: float) -> str:
    return repr(number).removesuffix(".0")


def _spell_ratio(number: float) -> str:
    short, ratio = _spell(float(number)), Fraction(number).limit_denominator(99)
    return short if len(short) <= 6 or float(ratio) != number else str(ratio)


@contextmanager
def _quote_in_errors(what: str, text: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error} (in {what} {text!r})") from None


# Checks


def _element_format(value: Format | str) -> Format:
    named = Format.parse(str(value))
    if isinstance(value, Format) and named != value:
        raise ValueError(
            f"{value!r} has the name of {named!r} but differs from it: pass a format that Format.parse returns"
        )
    if not named.signed:
        valid = ", ".join(name for name, row in TABLE.items() if row.signed)
        raise ValueError(f"{named} is a format for scales: valid formats of elements are {valid}, or any eXmY")
    return named


def _block(value: Block | str | tuple[int, int]) -> Block:
    if isinstance(value, tuple) and len(value) == 2:
        return Block(*value)
    return value if isinstance(value, Block) else Block.parse(str(value))


def _check_choice(what: str, value: object, valid: Collection[str]) -> None:
    if value not in valid:
        raise ValueError(
            f"unknown {what} {value!r}: valid values are {', '.join(valid)}"
            f"{' (`none` is valid only without a block)' if what == 'scaling' else ''}"
        )


def _positive(what: str, value: float) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{what} {value!r}: valid values are finite numbers > 0")
    return number

"""Define the scalings as one table: how blocks get their scales, what is stored, and which quantizers may use them.

The reference, the C++ kernels, the parser and the site's table read these records. For a new scaling the code needs
only a record here, if the arithmetic of the scaling's kind supports the fields that the record sets; CONTRIBUTING.md
lists what else names the scalings, and docs/arithmetic.md defines the arithmetic of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal, get_args

from fewbits.kernels.formats import TABLE, Format

Kind = Literal["none", "float", "mantissa", "power", "two-level", "affine"]
ScaleRounding = Literal["nearest", "up", "floor", "stochastic"]
Rounding = Literal["nearest", "stochastic"]
Group = Literal["tensor", "row"] | int
Select = Literal["mse", "mae", "max"]

# csrc/scale.h numbers kinds and roundings in this order; only the reference implements the last kind.
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
SCALE_ROUNDINGS: Final[tuple[ScaleRounding, ...]] = get_args(ScaleRounding)
ROUNDINGS: Final[tuple[Rounding, ...]] = get_args(Rounding)
SELECTS: Final[tuple[Select, ...]] = get_args(Select)
FACTORS: Final = (0.5, 2.0)  # the range of factors, without its end: 2^127 times a factor is finite
GROUP_SIZES: Final = tuple(1 << k for k in range(4, 21))  # a thread of csrc/quantize.cu has 8 values of a group


_E4M3, _E8M0, _UE5M3, _FP32 = (TABLE[name] for name in ("e4m3", "e8m0", "ue5m3", "fp32"))

# kind -> (the format in which block scales must be stored, None: any; the scale roundings that the kind implements)
_OF_KIND: Final[dict[Kind, tuple[Format | None, tuple[ScaleRounding, ...]]]] = {
    "none": (None, ("nearest",)),
    "float": (_FP32, ("nearest",)),
    "mantissa": (_E8M0, ("up",)),
    "power": (_E8M0, ("up", "floor")),
    "two-level": (None, ("nearest", "stochastic")),
    "affine": (_FP32, ("nearest",)),
}


@dataclass(frozen=True, slots=True)
class Scaling:
    """A rule by which blocks get their scales; the fields after `expansion` restrict the quantizers that may use it.

    kind: the arithmetic. `none`: no scales; `float`: a float32 per block; `mantissa`: powers of two times a mantissa
        that the blocks of a group share; `power`: powers of two; `two-level`: a block scale in a narrow format times a
        float32 for the tensor; `affine`: a float32 and an integer zero point per block.
    stored: the format in which a block's scale is stored.
    rounding: how the exact scale of a block is rounded to the stored scale. `up`: nothing saturates; `floor`:
        OCP MX's rule; `stochastic`: MS-EDEN, which first corrects the scale for the rounding of the block's elements.
    groups: the valid values of a quantizer's `group`, the set of blocks that share a second-level value such as a
        tensor scale; N: any of GROUP_SIZES; empty: there is no second-level value.
    target: only two-level: the block scale, before rounding and `expansion`, of the block that contains the tensor's
        amax; the float32 for the tensor is chosen accordingly.
    top: only two-level: the value to which a block's amax is mapped; None: the format's largest value.
    expansion: only two-level: the ratio of a second candidate for a block's scale to the first candidate; the candidate
        with the smaller error is used. 1: there is no second candidate.
    factor: only power and two-level: elements are multiplied by it before rounding, and results divided by it. With two
        levels this changes only `top`.
    select: how two candidates are compared, by the mean squared, the mean absolute or the largest error, with block
        scales computed as Four Over Six's authors do; None: by the squared error, with block scales as in NVFP4.
    """

    name: str
    kind: Kind
    stored: Format | None = None
    rounding: ScaleRounding = "nearest"
    groups: tuple[str, ...] = ()
    target: float = 0.0
    top: float | None = None
    expansion: float = 1.0
    factor: float = 1.0
    select: Select | None = None
    formats: tuple[str, ...] = ()  # valid formats; here and below, an empty tuple means all
    blocks: tuple[str, ...] = ()
    roundings: tuple[Rounding, ...] = ()
    hadamards: tuple[int, ...] = ()
    because: str = "of its definition"  # the reason for these restrictions, which messages quote

    def __post_init__(self) -> None:
        """Raise ValueError if the arithmetic of this kind does not implement the value of a field."""
        stored, roundings = _OF_KIND[self.kind]
        two_levels = self.kind == "two-level"
        wrong = {
            "stored": stored is not None and self.stored is not stored,
            "rounding": self.rounding not in roundings,
            "target": bool(self.target) != two_levels,
            "top": self.top is not None and not two_levels,
            "expansion": self.expansion != 1 and not two_levels,
            "factor": self.factor != 1 and "factor" not in self.options,
            "select": self.select is not None and "select" not in self.options,
        }
        for field, is_wrong in wrong.items():
            if is_wrong:
                raise ValueError(
                    f"scaling {self.name!r} of kind {self.kind!r}: {field}={getattr(self, field)} has no arithmetic in "
                    "reference/scales.py and csrc/scale.h; add it there, and to _OF_KIND"
                )
        if not two_levels:
            return
        if self.stored is None or self.stored.bits > 8 or not self.stored.has_nan:
            raise ValueError(f"scaling {self.name!r}: stored={self.stored}: valid are formats of up to 8 bits with NaN")
        if not 0 < self.target <= self.stored.max:
            largest = f"{self.stored.max:g}, the largest value of {self.stored}"
            raise ValueError(f"scaling {self.name!r}: target={self.target:g}: valid are numbers > 0 up to {largest}")

    @property
    def corrects(self) -> bool:
        """True if block scales are corrected and then rounded stochastically, with their own random bits (MS-EDEN)."""
        return self.rounding == "stochastic"

    @property
    def compares(self) -> bool:
        """True if two candidates for each block scale are compared (Four Over Six)."""
        return self.expansion != 1

    @property
    def options(self) -> tuple[str, ...]:
        """The fields that a quantizer may change."""
        two_levels = ("target",) if self.kind == "two-level" else ()
        if self.corrects or self.kind not in ("power", "two-level"):
            return ()
        return ("factor", *two_levels, *(("select",) if self.compares else ()))

    def check(self, format_: str, block: str, rounding: str, hadamard: int | None) -> None:
        """Raise ValueError if a quantizer with these fields cannot use this scaling."""
        restrictions: tuple[tuple[str, object, tuple[object, ...]], ...] = (
            ("format", format_, self.formats),
            ("block", block, self.blocks),
            ("rounding", rounding, self.roundings),
            ("hadamard", hadamard, self.hadamards),
        )
        for field, value, valid in restrictions:
            if valid and value not in valid:
                listed = f"{'is' if len(valid) == 1 else 'are'} {', '.join(map(str, valid))}"
                raise ValueError(
                    f"cannot combine scaling {self.name!r} with {field} {value}: "
                    f"{'the only valid value' if len(valid) == 1 else 'valid values'} {listed}, because {self.because}"
                )


_ROWS = (
    Scaling("none", "none"),
    Scaling("amax", "float", _FP32),
    Scaling("gam", "mantissa", _E8M0, "up", groups=("tensor", "row")),  # MoR, algorithm 1
    Scaling("e8m0", "power", _E8M0, "up"),
    Scaling("mx", "power", _E8M0, "floor"),  # OCP MX v1.0
    Scaling("affine", "affine", _FP32, formats=("int8", "int4"), because="its zero points are integers"),
    Scaling("nvfp4", "two-level", _E4M3, groups=("tensor", "row", "N"), target=_E4M3.max),
    Scaling("ue5m3", "two-level", _UE5M3, groups=("tensor", "row", "N"), target=_E4M3.max),  # arXiv 2609.02846
    Scaling(  # Four Over Six, arXiv 2512.02010
        "fouroversix",
        "two-level",
        _E4M3,
        groups=("tensor", "row", "N"),
        target=256.0,  # leaves headroom for the expansion
        expansion=1.5,  # maps the block's maximum to 4 instead of 6
        formats=("e2m1",),
        because="it compares that format's 4 and 6",
    ),
    Scaling(  # MS-EDEN, arXiv 2601.22813, algorithm 1
        "eden",
        "two-level",
        _E4M3,
        "stochastic",
        groups=("tensor",),
        target=256.0,
        top=96 / 15.81,  # 6 · 16/17 / 0.93: least error on Gaussian data
        formats=("e2m1",),
        blocks=("1x16",),
        roundings=("nearest",),
        hadamards=(16, 32, 64, 128),
        because="it is unbiased over rotations of whole blocks, through the draws of its scales",
    ),
)

SCALINGS: Final[Mapping[str, Scaling]] = MappingProxyType({row.name: row for row in _ROWS})


@lru_cache(maxsize=256)
def scaling(name: str, factor: float, target: float | None, select: Select | None) -> Scaling:
    """Return the record of a scaling with the options of a quantizer; target None: that of the record."""
    record = SCALINGS[name]
    return replace(record, factor=factor, target=record.target if target is None else target, select=select)

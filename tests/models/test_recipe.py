"""Test recipes: the slots that they define, errors for invalid values, and conversion to and from plain values."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fewbits.kernels.quantizer import Mixture, Quantizer
from fewbits.models.recipe import SLOTS, Operands, Recipe, Slot
from tests.models.quantized import NVFP4, recipe

E4M3 = Quantizer.parse("e4m3:1x128:amax")


def axes(operands: Operands) -> dict[str, int]:
    return {name: slot.axis for name, slot in operands.items()}


def test_blocks_lie_along_the_dimension_that_the_gemm_sums_over() -> None:
    """Check that the axis of each slot is the dimension that its GEMM sums over.

    x and dy are stored as tokens × features, w as out × in. fprop sums over in, dgrad over out, wgrad over tokens.
    """
    expected = {"fprop.x": -1, "fprop.w": -1, "dgrad.dy": -1, "dgrad.w": 0, "wgrad.dy": 0, "wgrad.x": 0}
    assert axes(recipe(str(E4M3)).operands) == expected
    assert tuple(expected) == SLOTS


def test_same_is_the_slot_of_the_other_gemm_blocks_and_all() -> None:
    """Check that `same` gives a slot the quantizer and the axis of the tensor's other slot, in an earlier GEMM."""
    o = recipe("e4m3:1x128:amax", "e5m2:1x64:gam", "e4m3", "same", "same", "same").operands
    assert (o["dgrad.w"], o["wgrad.dy"], o["wgrad.x"]) == (o["fprop.w"], o["dgrad.dy"], o["fprop.x"])
    assert o["dgrad.w"].axis == -1


# Quantizer or mixture: whether it gives the same values for blocks along both axes of a tensor.
ALIKE = {
    "e4m3:128x128:gam": True,
    "e4m3:tensor:amax": True,
    "e4m3": True,
    "e2m1:16x16:nvfp4": True,
    "e2m1:16x16:nvfp4:stochastic": True,
    "e4m3:1x1:amax": True,
    "e4m3:1x128:amax": False,
    "e4m3:channel:amax": False,
    "e4m3:64x128:amax": False,
    "e4m3:128x128:gam:group=row": False,
    "e4m3:16x16:amax:rht16": False,
    "e4m3:128x128:gam @ error<0.045 | bf16": True,
    "e4m3:128x128:gam @ error<0.045 | bf16 ; per=channel": False,
    "e4m3:128x128:gam @ error<0.045 | bf16 ; per=64x64": True,
    "e4m3:128x128:gam @ error<e5m2:128x128:gam | e5m2:128x128:gam @ spread<normal | bf16 ; per=block": True,
    "e4m3:128x128:gam @ error<e5m2:1x128:gam | bf16 ; per=block": False,
    "e4m3:128x128:gam @ error<0.045 | e4m3:1x32:amax": False,
}


@pytest.mark.parametrize("text", ALIKE)
def test_squares_look_alike_from_both_sides(text: str) -> None:
    """Check which quantizers and mixtures give equal values along both axes of a tensor (claim G5: square blocks do).

    ALIKE has the expected answers. This test compares slots; tests/models/test_quantized_linear.py compares values.
    """
    spec = Mixture.parse(text) if "|" in text else Quantizer.parse(text)
    assert Slot(spec, -1).equals(Slot(spec, 0)) == ALIKE[text]
    assert Slot(spec, -1).equals(Slot(spec, -1))
    assert not Slot(spec, -1).equals(Slot(None, -1))


def test_a_recipe_survives_json_and_equals_itself() -> None:
    full = {
        **NVFP4,
        "name": "nvfp4",
        "about": "of the paper",
        "keep": {"first": 2, "last": 8, "parts": ["qkv"], "names": ["*.3.*"], "by": "bf16"},
        "sampler": {"kind": "diffq", "parts": ["od"], "init": 8, "target": 6.5, "penalty": 1e-4, "block": 16},
        "switch": {"at": 0.82, "passes": "forward", "to": "high"},
    }
    spec = Recipe.from_dict(full)
    assert Recipe.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert Recipe.from_dict(spec.to_dict()) == spec
    assert spec != Recipe.from_dict({**full, "name": "other"})
    assert spec.sampler.init == 8.0
    assert spec.keep.parts == ("qkv",)
    assert hash(spec) == hash(Recipe.from_dict(full))


# ---- the switch


def specs(operands: Operands) -> dict[str, str]:
    return {name: str(slot.spec) for name, slot in operands.items()}


@pytest.mark.parametrize("passes", ["both", "forward", "backward"])
def test_a_switch_takes_the_operands_of_its_passes(passes: str) -> None:
    spec = Recipe.from_dict({**NVFP4, "switch": {"at": 0.82, "passes": passes, "to": "bf16"}})
    before, after = specs(spec.operands), specs(spec.switched)
    changed = {"both": SLOTS, "forward": SLOTS[:2], "backward": SLOTS[2:]}[passes]
    assert {slot: after[slot] for slot in changed} == dict.fromkeys(changed, "bf16")
    assert {slot: after[slot] for slot in after if slot not in changed} == {
        slot: before[slot] for slot in before if slot not in changed
    }
    assert spec.switches


def test_what_is_kept_is_taken_by_one_spelling_everywhere() -> None:
    """Check that layers selected by `keep` get the quantizer `keep.by` in all six slots, along each slot's own axis."""
    spec = recipe(str(E4M3), keep={"first": 1, "by": "bf16"})
    assert set(specs(spec.kept).values()) == {"bf16"}
    assert axes(spec.kept) == axes(spec.operands)


# ---- errors

RHT = "e4m3:1x16:amax:rht16"
PLAIN = "e4m3:1x16:amax"
ROTATED = "have different rotations, which changes their product: use the same rhtN and signs for both"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": (
        {"fprob": {}},
        "unknown key recipe.fprob: valid keys are name, about, source, differs, fprop, dgrad",
    ),
    "unknown slot": ({"fprop": {"dy": PLAIN}}, "unknown key recipe.fprop.dy: valid keys are x, w"),
    "unknown format": ({"fprop": {"x": "e9"}}, "fprop.x: unknown format 'e9'"),
    "which words there are": (
        {"dgrad": {"dy": "low"}},
        "`high` is valid too, and in dgrad.w, wgrad.dy and wgrad.x also `same`",
    ),
    "same where it is first": ({"fprop": {"w": "same"}}, "fprop.w: unknown format 'same'"),
    "bad output": ({"wgrad": {"output": "fp16"}}, "wgrad.output 'fp16': valid values are compute, bf16, fp32"),
    "one operand rotated": ({"wgrad": {"dy": RHT, "x": PLAIN}}, f"wgrad: {RHT} and {PLAIN} {ROTATED}"),
    "rotated beside high": ({"wgrad": {"dy": RHT}}, f"wgrad: {RHT} and high {ROTATED}"),
    "two signs": (
        {"wgrad": {"dy": "bf16:rht16", "x": "bf16:rht16:signs=none"}},
        f"wgrad: bf16:rht16 and bf16:rht16:signs=none {ROTATED}",
    ),
    "the same as a rotated one": (
        {"fprop": {"x": RHT, "w": RHT}, "dgrad": {"dy": RHT, "w": "same"}},
        "dgrad: a rotated operand cannot be `same`",
    ),
    "requantized where it is first": (
        {"fprop": {"x": f"same > {PLAIN}"}},
        "fprop.x: 'same > e4m3:1x16:amax': `same >` is valid only in dgrad.w, wgrad.dy, wgrad.x",
    ),
    "a chain rotated twice": (
        {"fprop": {"x": f"{RHT} > {RHT}"}},
        "fprop.x: only one stage of a chain can have a Hadamard transform (rhtN)",
    ),
    "a chain rotated beside none": ({"wgrad": {"x": f"same > {RHT}"}}, f"wgrad: high and same > {RHT} {ROTATED}"),
    "keep by requantized": ({"keep": {"by": "same > e4m3"}}, "keep.by: 'same > e4m3': `same >` is valid only in"),
    "switch of unknown passes": (
        {"switch": {"at": 0.5, "passes": "nowhere"}},
        "switch.passes 'nowhere': valid values are both, forward, backward",
    ),
    "switch out of range": ({"switch": {"at": 1.5}}, "switch.at 1.5: expected a fraction of training, from 0 to 1"),
    "switch to same": ({"switch": {"to": "same"}}, "switch.to: unknown format 'same'"),
    "keep fewer than none": ({"keep": {"first": -1}}, "keep.first -1: expected a number of blocks, 0 or more"),
    "keep unknown parts": (
        {"keep": {"parts": ["fc1"]}},
        "keep.parts 'fc1': valid values are qkv, out, up, down, in, all, od",
    ),
    "unknown sampler": ({"sampler": {"kind": "gauss"}}, "sampler.kind 'gauss': valid values are none, gaussws, diffq"),
    "sampler of odd squares": (
        {"sampler": {"block": 24}},
        "sampler.block 24: valid values are 1, 2, 4, 8, 16, 32, 64, 128",
    ),
    "reward for bits": ({"sampler": {"penalty": -1e-4}}, "sampler.penalty -0.0001: expected λ, a finite number ≥ 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_when_the_recipe_is_made(case: str) -> None:
    data, message = BAD[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        Recipe.from_dict(data)

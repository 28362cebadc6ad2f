"""Test quantizers and mixtures: their defaults, string forms and error messages."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fewbits.kernels.formats import TABLE, Format
from fewbits.kernels.quantizer import (
    HADAMARD_SIZES,
    Block,
    Entry,
    ErrorBelow,
    ErrorBelowOther,
    Mixture,
    Quantizer,
    SpreadBelow,
)
from fewbits.kernels.scalings import ROUNDINGS, SCALINGS
from tests.kernels.inputs import options
from tests.messages import naming

TENSOR_LEVEL = "e4m3:128x128:gam @ error<0.045 | bf16"
THREE_WAY = "e4m3:128x128:gam @ error<e5m2:128x128:gam | e5m2:128x128:gam @ spread<normal | bf16 ; per=block"

sizes = st.integers(1, 300)
blocks = st.sampled_from([Block(), Block(1)]) | st.builds(Block, sizes, sizes)
formats = st.sampled_from([*(f for f in TABLE.values() if f.signed), *map(Format.parse, ("e4m3ieee", "e5m3", "e3m1"))])
bases: st.SearchStrategy[tuple[Any, Any]] = st.one_of(
    st.just((None, None)),
    st.tuples(st.sampled_from(HADAMARD_SIZES), st.none() | st.just("none") | st.integers(0, 2**63 - 1)),
    st.just((16, "te")),
)


@st.composite
def quantizers(draw: st.DrawFn, basis: tuple[Any, Any] | None = None) -> Quantizer:
    element = draw(formats)
    scaling = draw(st.sampled_from(tuple(SCALINGS))) if element.name != "fp32" else "none"
    element = TABLE["int8"] if scaling == "affine" else TABLE["e2m1"] if SCALINGS[scaling].formats else element
    hadamard, signs = draw(bases) if basis is None else basis
    if scaling == "eden":  # fixes all other fields, and rotates whole blocks
        if hadamard is not None and hadamard >= 16:
            return Quantizer("e2m1", "1x16", "eden", hadamard=hadamard, signs=signs)
        scaling = "nvfp4"
    block = draw(blocks) if scaling != "none" else Block()
    return Quantizer(
        format=element,
        block=block,
        scaling=scaling,
        rounding=draw(st.sampled_from(ROUNDINGS)),
        hadamard=hadamard,
        signs=signs,
        overflow=draw(st.sampled_from(element.overflows)),
        **draw(options(scaling, block, element.max)),
    )


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    some = quantizers(basis=draw(bases))
    positive = st.floats(0, exclude_min=True, allow_nan=False, allow_infinity=False)
    fractions = st.floats(0, 1, exclude_min=True)
    errors = st.sampled_from(["error", "mse", "mae", "max"])
    others = st.builds(ErrorBelowOther, some, errors)
    tests = st.builds(ErrorBelow, fractions) | others | st.builds(SpreadBelow, positive)
    entries = draw(st.lists(st.builds(Entry, some, tests | st.just(SpreadBelow())), max_size=3))
    entries.append(Entry(draw(some)))
    scaled = any(entry.quantizer.scaling != "none" for entry in entries)
    return Mixture(tuple(entries), per=draw(blocks.map(str) | st.just("block" if scaled else "tensor")))


# Round trips


@given(quantizers())
def test_parsing_what_a_quantizer_prints_gives_it_back(q: Quantizer) -> None:
    assert Quantizer.parse(str(q)) == q


@given(mixtures())
def test_parsing_what_a_mixture_prints_gives_it_back(m: Mixture) -> None:
    assert Mixture.parse(str(m)) == m
    assert Mixture.parse(str(m).replace("|", "\n|  ").replace("@", "  @ ").replace("<", " < ")) == m


@pytest.mark.parametrize(
    ("spelled", "shortest"),
    [
        ("e4m3", "e4m3"),
        ("bfloat16", "bf16"),
        ("e4m3fn:tensor:none:nearest", "e4m3"),
        ("e4m3:overflow=saturate:group=tensor", "e4m3"),
        ("e2m1:1x16:nvfp4:signs=te:rht16:stochastic", "e2m1:1x16:nvfp4:stochastic:rht16"),
        (" e2m1 : 1x32 : mx : rht32 : signs=0 ", "e2m1:1x32:mx:rht32"),
        ("e4m3:channel:gam:group=row:overflow=nan", "e4m3:channel:gam:overflow=nan:group=row"),
        ("bf16:rht16:signs=none", "bf16:rht16:signs=none"),
        ("bf16:signs=each:rht16", "bf16:rht16:signs=each"),
        ("bf16:rht16:signs=0", "bf16:rht16:signs=0"),
        ("e2m1:1x16:nvfp4:group=128:target=448:factor=1", "e2m1:1x16:nvfp4:group=128"),
        ("e2m1:1x16:fouroversix:select=mae:target=448.0", "e2m1:1x16:fouroversix:target=448:select=mae"),
        ("e2m1:1x32:mx:factor=3/4", "e2m1:1x32:mx:factor=0.75"),
        ("e2m1:1x16:nvfp4:factor=0.9411764705882353", "e2m1:1x16:nvfp4:factor=16/17"),
    ],
)
def test_the_shortest_spelling_is_canonical(spelled: str, shortest: str) -> None:
    assert str(Quantizer.parse(spelled)) == shortest
    assert Quantizer.parse(shortest) == Quantizer.parse(spelled)


# Quantizer


def test_words_and_objects_give_equal_quantizers() -> None:
    quantizer = Quantizer(format="float16", block="1x16", scaling="amax")
    assert quantizer == Quantizer(Format.parse("fp16"), Block(1, 16), "amax") == Quantizer.parse("fp16:1x16:amax")
    assert quantizer == Quantizer("fp16", (1, 16), "amax")
    assert hash(quantizer) == hash(Quantizer.parse("fp16:1x16:amax"))


def test_signs_default_to_te_for_16_and_to_seed_0_for_other_sizes() -> None:
    assert Quantizer(hadamard=16).signs == "te"
    assert Quantizer(hadamard=32).signs == 0
    assert Quantizer(hadamard=16, signs=0) != Quantizer(hadamard=16)


def test_stochastic_rounding_alone_needs_a_seed() -> None:
    assert Quantizer.parse("e2m1:1x16:nvfp4:stochastic").needs_seed
    assert not Quantizer.parse("e2m1:1x16:nvfp4:rht16:signs=7").needs_seed


def test_specs_pickle_and_replace() -> None:
    m = Mixture.parse(THREE_WAY)
    assert pickle.loads(pickle.dumps(m)) == m
    assert str(replace(Quantizer.parse("e4m3:1x32:mx"), rounding="stochastic")) == "e4m3:1x32:mx:stochastic"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown format ''.* e4m3, e5m2, e2m1"),
        ("e8m0:1x32:mx", "e8m0 is a format for scales: valid formats of elements are e4m3, e5m2, .*or any eXmY"),
        ("e4m3:128x128", f"expected a scaling after block '128x128'.*are {', '.join([*SCALINGS][1:])} "),
        ("e4m3:128x128:gma", "found 'gma': valid scalings are amax, gam"),
        ("e4m3:128x128:none", "block 128x128 needs a scaling: amax, gam.*naive cast has no blocks"),
        ("e4m3:0x16:amax", "'0x16' is neither a block .tensor, channel or RxC.* nor an option"),
        ("e4m3:rth16", "'rth16' is neither a block .* nor an option .*rhtN"),
        ("e4m3:1x16:amax:rounded", "unknown option 'rounded': valid options are nearest, stochastic, rhtN"),
        ("e4m3:nearest:1x16:amax", "unknown option '1x16'"),
        ("e4m3:nearest:stochastic", "'stochastic' sets rounding a second time"),
        ("fp32:tensor:amax", "scaling 'amax' with format fp32, which takes no scaling"),
        ("e4m3:rht24", "hadamard 24: valid values are 2, 4, 8, 16, 32, 64, 128"),
        ("e4m3:signs=te", "signs 'te' without hadamard"),
        ("e4m3:rht32:signs=te", "signs 'te' with hadamard 32: valid values are none, each or a seed"),
        ("e4m3:rht16:signs=-1", "signs '-1' with hadamard 16: valid values are te, none, each or a seed"),
        ("e4m3:overflow=inf", "unknown overflow with format e4m3 'inf': valid values are saturate, nan"),
        ("e4m3:1x16:amax:group=row", "group 'row' with scaling 'amax': valid only with scaling gam, nvfp4"),
    ],
)
def test_a_bad_quantizer_is_told_what_where_and_what_would_be_right(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Quantizer.parse(text)
    assert f"(in quantizer {text!r})" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": None}, "unknown format 'None'"),
        ({"format": Format("e4m3", 4, 3, 11, "nan")}, "Format.parse"),
        ({"block": "128"}, "unknown block '128': valid blocks are tensor, channel or RxC"),
        ({"block": "1x16"}, "needs a scaling"),
        ({"scaling": "floor"}, "unknown scaling 'floor': valid values are none, amax"),
        ({"rounding": "up"}, "unknown rounding 'up': valid values are nearest, stochastic"),
        ({"hadamard": 16.0}, "hadamard 16.0: valid values are 2"),
        ({"hadamard": 16, "signs": True}, "signs True"),
        ({"signs": 3}, "signs 3 without hadamard"),
    ],
)
def test_the_constructor_checks_as_parse_does(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantizer(**fields)


# Block


@pytest.mark.parametrize(
    ("text", "along_rows", "down_rows"),
    [
        ("tensor", (100, 60), (100, 60)),
        ("channel", (1, 60), (100, 1)),
        ("128x128", (128, 128), (128, 128)),
        ("1x16", (1, 16), (16, 1)),
        ("3x5", (3, 5), (5, 3)),
    ],
)
def test_axis_0_lays_a_block_down_the_rows(text: str, along_rows: tuple[int, int], down_rows: tuple[int, int]) -> None:
    assert Block.parse(text).resolve((100, 60), axis=-1) == along_rows
    assert Block.parse(text).resolve((100, 60), axis=0) == down_rows


@pytest.mark.parametrize(
    "text", ["", "0x1", "1x0", "-1x4", "16", "16x", "axb", "1x1x1", "01x16", "1 x16", "99999999999x1"]
)
def test_an_unknown_block_is_told_the_valid_ones(text: str) -> None:
    with pytest.raises(ValueError, match="valid blocks are tensor, channel or RxC"):
        Block.parse(text)


@pytest.mark.parametrize("sides", [(None, 16), (2, None), (0, 1), (1, 2**31), (True, 4), (1.0, 4)])
def test_a_block_that_cannot_be_spelled_cannot_be_built(sides: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="valid blocks are tensor, channel or RxC"):
        Block(*sides)


# Mixture


def test_mixtures_parse_to_what_dataclasses_say() -> None:
    e4m3, e5m2 = Quantizer("e4m3", "128x128", "gam"), Quantizer("e5m2", "128x128", "gam")
    bf16 = Entry(Quantizer("bf16"))
    assert Mixture.parse(TENSOR_LEVEL) == Mixture((Entry(e4m3, ErrorBelow(0.045)), bf16))
    three_way = Mixture((Entry(e4m3, ErrorBelowOther(e5m2)), Entry(e5m2, SpreadBelow()), bf16), per="block")
    assert Mixture.parse(THREE_WAY) == three_way
    assert three_way.quantizers == (e4m3, e5m2, bf16.quantizer)


@pytest.mark.parametrize(
    ("per", "block"),
    [("tensor", Block()), ("block", Block(128, 128)), ("channel", Block(1)), ("64x64", Block(64, 64))],
)
def test_per_says_what_one_decision_covers(per: str, block: Block) -> None:
    assert Mixture.parse(f"{TENSOR_LEVEL} ; per={per}").decision_block == block


def test_per_block_is_that_of_the_first_entry_that_has_blocks() -> None:
    text = "e4m3 @ error<0.01 | e2m1:1x16:nvfp4 @ error<0.1 | e4m3:1x32:mx @ error<0.1 | bf16 ; per=block"
    assert Mixture.parse(text).decision_block == Block(1, 16)


def test_the_spread_limit_is_that_of_the_entrys_own_format() -> None:
    e5m2 = Quantizer("e5m2", "128x128", "gam")
    assert SpreadBelow().limit_for(e5m2) == 57344 * 2**14
    assert SpreadBelow(1e6).limit_for(e5m2) == 1e6


def test_a_mixture_needs_a_seed_if_any_of_its_quantizers_or_yardsticks_does() -> None:
    assert not Mixture.parse(THREE_WAY).needs_seed
    assert Mixture.parse(TENSOR_LEVEL + ":stochastic").needs_seed
    assert Mixture.parse("e4m3 @ error<e5m2:stochastic | bf16").needs_seed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown format ''"),
        ("e4m3 | bf16", "entry 1, 'e4m3', has no test: .*error<NUMBER"),
        ("e4m3 @ error<0.1", "last entry, 'e4m3 @ error<0.1'"),
        ("e4m3 @ err<0.1 | bf16", "unknown test 'err<0.1': valid tests are error<NUMBER"),
        ("e4m3 @ spread<wide | bf16", "unknown test 'spread<wide'"),
        ("e4m3 @ error<0 | bf16", "error threshold 0.0: valid values are finite numbers > 0"),
        ("e4m3 @ error<4.5 | bf16", "error threshold 4.5: relative errors are fractions up to 1; did you mean 0.045?"),
        ("e4m3 @ error<e5m2:1x16 | bf16", "expected a scaling after block '1x16'.*in quantizer 'e5m2:1x16'"),
        ("e4m3 @ error<0.1 | bf16 ; per=row", "unknown per='row': valid values are block, tensor, channel or RxC"),
        ("e4m3 @ error<0.1 | bf16 ; per=block ; per=block", "after ';': expected per="),
        (
            "e4m3 @ error<0.1 | bf16 ; per=block",
            "per='block', but no quantizer of the mixture has blocks: valid values are tensor",
        ),
        ("e4m3:rht16 @ error<0.1 | bf16", "'bf16' and 'e4m3:rht16' differ"),
        ("e4m3:rht16 @ error<0.1 | bf16:rht16:signs=each", "'bf16:rht16:signs=each' and 'e4m3:rht16' differ"),
        ("e4m3 @ error<e5m2:rht16 | bf16", "'e5m2:rht16' and 'e4m3' differ"),
    ],
)
def test_a_bad_mixture_is_told_what_where_and_what_would_be_right(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Mixture.parse(text)
    assert f"(in mixture {text!r})" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_choice_of_more_entries_than_an_int8_counts_is_refused() -> None:
    many = ["e2m1 @ error<1e-9"] * 127
    assert len(Mixture.parse(" | ".join([*many, "bf16"])).entries) == 128
    with pytest.raises(ValueError, match=naming("129", "128")):
        Mixture.parse(" | ".join([*many, "e4m3 @ error<1e-9", "bf16"]))

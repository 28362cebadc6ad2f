"""Test the expansion of a sweep to its cells: which cells, in which order, with which overrides."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fewbits.sweeps.planning.sweep import Arm, Cell, Sweep, expand


def places(cells: list[Cell]) -> list[str]:
    return [" ".join(f"{key}={value}" for key, value in cell.place.items()) for cell in cells]


values = st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True)


@given(first=values, second=values, pairs=st.integers(1, 3), seeds=values)
def test_there_is_each_combination_once(first: list[int], second: list[int], pairs: int, seeds: list[int]) -> None:
    """Check that a sweep has one cell for each combination of values of its axes and seeds.

    The axes `c` and `d` are zipped: they take their first values together, then their second values, and so on.
    """
    zipped = {"c": list(range(pairs)), "d": list(range(10, 10 + pairs))}
    sweep = Sweep("s", axes={"a": first, "b": second}, zipped=(zipped,), seeds=tuple(seeds))
    cells = expand(sweep)
    assert [(cell.axes, cell.seed) for cell in cells] == [
        ((("a", str(a)), ("b", str(b)), ("c", str(c)), ("d", str(10 + c))), seed)
        for a, b, c, seed in itertools.product(first, second, range(pairs), seeds)
    ]
    assert expand(sweep) == cells


def test_a_bundle_is_called_by_its_name_and_brings_its_words() -> None:
    """Check that a value of an axis may be a name for several overrides: the place shows the name."""
    sweep = Sweep("s", size=(), axes={"data": {"small": ["data=python", "data.size=9"], "large": ["data=torch"]}})
    small, large = expand(sweep)
    assert (small.axes, small.overrides) == ((("data", "small"),), ("data=python", "data.size=9", "seed=0"))
    assert (large.axes, large.overrides) == ((("data", "large"),), ("data=torch", "seed=0"))


def test_exclusions_take_out_the_cells_that_they_match_entirely() -> None:
    axes = {"a": [0.03, 0.5], "data": {"two words": ["data=python"], "8": ["data=torch"]}}
    arms = {"x": Arm(), "y z": Arm(axes=("a",))}
    all_places = places(expand(Sweep("s", axes=axes, arms=arms, seeds=(0, 1))))

    def without(*exclude: dict[str, object]) -> list[str]:
        left = places(expand(Sweep("s", axes=axes, arms=arms, seeds=(0, 1), exclude=exclude)))
        assert [place for place in all_places if place in left] == left
        return [place for place in all_places if place not in left]

    assert without({"arm": "y z", "a": 0.03, "seed": 1}) == ["arm=y z a=0.03 seed=1"]
    assert without({"data": "two words", "seed": 0, "a": 0.5}) == ["arm=x a=0.5 data=two words seed=0"]
    assert len(without({"data": 8})) == 4  # only arm x has the axis `data`: two values of a times two seeds
    assert len(without({"seed": 1})) == len(all_places) / 2
    assert without({"seed": 2}) == []
    assert without({"seed": [], "arm": "x"}) == []
    assert without({"a": [0.03, 0.5], "seed": [1], "arm": ["y z"]}) == ["arm=y z a=0.03 seed=1", "arm=y z a=0.5 seed=1"]
    assert len(without({"arm": "x"}, {"arm": "y z", "seed": 0})) == len(all_places) - 2


def test_only_chooses_arms_and_those_that_they_start_from() -> None:
    arms = {"t": Arm(axes=()), "x": Arm(parent="t"), "y": Arm(parent="x"), "z": Arm()}
    sweep = Sweep("s", axes={"a": [1, 2]}, arms=arms)
    chosen = places(expand(replace(sweep, only=("x",))))
    assert chosen == ["arm=t seed=0", "arm=x a=1 seed=0", "arm=x a=2 seed=0"]
    assert {place.split()[0] for place in places(expand(replace(sweep, only=("y",))))} == {"arm=t", "arm=x", "arm=y"}
    assert expand(replace(sweep, only=("elsewhere",))) == [], "another sweep of the study may have it"
    assert places(expand(sweep)) == places(expand(replace(sweep, only=("y", "z"))))


# ------------------------------------------------------------------------------------------------ parents


def test_a_branch_has_the_parent_of_its_own_seed_and_axes() -> None:
    sweep = Sweep(
        "s",
        arms={"trunk": Arm(axes=("a",)), "x": Arm(parent="trunk", at=0.5), "z": Arm(parent="x")},
        axes={"a": [1, 2], "b": [3, 4]},
        seeds=(0, 1),
    )
    cells = expand(sweep, ("training.steps=9",))
    there = {cell: cell for cell in cells}
    assert len(cells) == 4 + 8 + 8
    for cell in cells:
        if cell.arm == "trunk":
            assert cell.parent is None
            continue
        assert cell.parent in there
        assert cell.parent.arm == {"x": "trunk", "z": "x"}[cell.arm]
        assert cell.parent.seed == cell.seed
        assert dict(cell.parent.axes).items() <= dict(cell.axes).items()
        assert cell.at == {"x": 0.5, "z": None}[cell.arm]
        assert "training.steps=9" in cell.parent.overrides


@pytest.mark.parametrize(
    ("arms", "more", "message"),
    [
        ({"t": Arm(), "x": Arm(parent="t", axes=())}, {}, "arm x .* arm t, which has axes that arm x does not have: a"),
        ({"t": Arm(scales=("gpu",)), "x": Arm(parent="t")}, {}, "arm t, which is not trained at scale smoke"),
        ({"t": Arm(), "x": Arm(parent="t")}, {"exclude": ({"arm": "t", "a": 1},)}, "which is excluded .*'a': '1'"),
        ({"x": Arm(parent="y"), "y": Arm(parent="x")}, {}, "arms x, y .*a cycle"),
    ],
)
def test_a_parent_that_is_not_there_is_told(arms: dict[str, Arm], more: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand(Sweep("s", arms=arms, axes={"a": [1, 2]}, **more))  # type: ignore[arg-type]


def test_an_arm_and_a_sweep_are_run_at_their_scales_alone() -> None:
    def at(scale: str, scales: tuple[str, ...] | None = None) -> list[str]:
        arms = {"x": Arm(), "y": Arm(scales=("gpu", "cpu"))}
        return places(expand(Sweep("s", arms=arms, scale=scale, scales=scales)))

    assert at("smoke") == ["arm=x seed=0"]
    assert at("cpu") == ["arm=x seed=0", "arm=y seed=0"]
    assert at("cpu", scales=("gpu",)) == []
    assert at("gpu", scales=("gpu",)) == ["arm=x seed=0", "arm=y seed=0"]


def test_a_word_for_all_trials_may_not_undo_an_axis() -> None:
    """An override for all trials may not set an axis, since places would then show values that were not trained."""
    sweep = Sweep("one", axes={"optimizer.lr": [1, 2]})
    with pytest.raises(ValueError, match=r"optimizer\.lr: axis optimizer\.lr of sweep one"):
        expand(sweep, ("optimizer.lr=3",))
    assert len(expand(sweep, ("training.steps=3",))) == 2
    named = {"a": ["optimizer.lr=1"], "b": ["optimizer.lr=2"], "c": ["optimizer.lr=1", "data=torch"]}
    with pytest.raises(ValueError, match=r"optimizer\.lr: axis rate of sweep named"):
        expand(Sweep("named", axes={"rate": named}), ("optimizer.lr=3",))
    assert len(expand(Sweep("named", axes={"rate": named}), ("training.steps=3",))) == 3


def test_an_axis_says_where_branches_start() -> None:
    arms = {"trunk": Arm(axes=()), "a": Arm(parent="trunk", at=0.25)}
    axes = {"checkpoint": {"early": ["at=0.5", "training.steps=2"], "end": ["training.steps=3"]}}
    trunk, early, end = expand(Sweep("s", arms=arms, axes=axes, size=()))
    assert (trunk.at, early.at, end.at) == (None, 0.5, 0.25)  # the axis's `at=0.5` replaces the arm's 0.25
    assert early.overrides == ("training.steps=2", "seed=0")

"""Test the format of sweep files: valid contents, changes by the command line, and error messages.

Each mistake gives a message of one line with the wrong value and the valid choices.
"""

import re
from pathlib import Path

import pytest
import yaml

from fewbits import cli
from fewbits.sweeps.planning.studies import load_sweeps
from fewbits.sweeps.planning.sweep import Arm, Resources, Sweep
from tests.messages import naming
from tests.sweeps.sweep_inputs import sweep_file


def loaded(folder: Path, text: str, *overrides: str) -> Sweep:
    path = folder / "one.yaml"
    path.write_text(text)
    (sweep,), extra = load_sweeps([str(path), *overrides])
    assert extra == ()
    return sweep


def test_a_file_is_a_sweep_by_its_name_and_says_only_what_is_not_usual(tmp_path: Path) -> None:
    assert loaded(tmp_path, "seeds: [3]") == Sweep("one", study="one", seeds=(3,), size=("scale=smoke",))


FULL = """
study: mine
about: all that there is
scale: cpu
scales: [cpu, gpu]
overrides: [model=gpt2-nano, 'data=python']
size: []
seeds: [0, 7]
axes:
  recipe.threshold: [0.03, 0.045]
  data: {small: [data=python, data.size=1000], large: [data=torch]}
zipped:
  - {training.steps: [500, 1000], optimizer.lr: [1e-3, 5e-4]}
arms:
  trunk: {overrides: [recipe=bf16], axes: []}
  mor: {overrides: [recipe=mor/block], parent: trunk, at: 0.8, scales: [cpu], about: the paper's}
exclude:
  - {arm: mor, recipe.threshold: 0.03, seed: 7}
resources: {cpus: 2, gpus: 0.5, ranks: 2, attempts: 5}
"""


def test_everything_that_a_file_may_say_is_read(tmp_path: Path) -> None:
    sweep = loaded(tmp_path, FULL)
    assert (sweep.name, sweep.study, sweep.scale, sweep.scales) == ("one", "mine", "cpu", ("cpu", "gpu"))
    assert sweep.overrides == ("model=gpt2-nano", "data=python")
    assert (sweep.size, sweep.seeds) == ((), (0, 7))
    assert sweep.arms["trunk"] == Arm(overrides=("recipe=bf16",), axes=())
    assert sweep.arms["mor"].parent == "trunk"
    assert sweep.arms["mor"].at == 0.8
    assert sweep.resources == Resources(cpus=2.0, gpus=0.5, ranks=2, attempts=5)
    assert sweep.groups == [
        {"recipe.threshold": {"0.03": ("recipe.threshold=0.03",), "0.045": ("recipe.threshold=0.045",)}},
        {"data": {"small": ("data=python", "data.size=1000"), "large": ("data=torch",)}},
        {
            "training.steps": {"500": ("training.steps=500",), "1000": ("training.steps=1000",)},
            "optimizer.lr": {"0.001": ("optimizer.lr=0.001",), "0.0005": ("optimizer.lr=0.0005",)},
        },
    ]


def test_values_are_what_words_and_sizes_refer_to_and_a_scale_may_give_them(tmp_path: Path) -> None:
    """Check that overrides and `size` may refer to `values`, which the file of a scale or the command line sets."""
    text = (
        "size: ${values.small}\n"
        "arms: {a: {overrides: ['training.steps=${values.steps}']}, b: {overrides: '${values.whole}'}}"
    )
    (tmp_path / "scale").mkdir()
    for scale, steps in (("smoke", 5), ("cpu", 50)):
        values = {"small": ["model=gpt2-nano"], "steps": steps, "whole": ["recipe=bf16", "seed_of=it"]}
        (tmp_path / "scale" / f"{scale}.yaml").write_text(yaml.safe_dump({"values": values}))
    sweep = loaded(tmp_path, text, "scale=cpu")
    assert sweep.size == ("model=gpt2-nano",)
    assert sweep.arms["a"].overrides == ("training.steps=50",)
    assert sweep.arms["b"].overrides == ("recipe=bf16", "seed_of=it")
    assert loaded(tmp_path, text, "scale=cpu", "values.steps=7").arms["a"].overrides == ("training.steps=7",)
    with pytest.raises(ValueError, match=r"values\.stepz"):
        loaded(tmp_path, text.replace("values.steps", "values.stepz"), "scale=cpu")


# ------------------------------------------------------------------------------------------------ the command line


def test_words_of_a_command_line_change_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    sweep = loaded(tmp_path, FULL, "seeds=[1]", "seeds=[2,3]", "resources.attempts=1", "scale=gpu", "~exclude")
    assert (sweep.seeds, sweep.scale, sweep.exclude) == ((2, 3), "gpu", ())
    assert sweep.resources == Resources(cpus=2.0, gpus=0.5, ranks=2, attempts=1)


def test_words_of_trials_are_told_from_those_of_the_sweep(tmp_path: Path) -> None:
    """Check that a command line's overrides of the sweep are applied to it, and those of trials are returned."""
    path = sweep_file(tmp_path, {"seeds": [0]})
    (sweep,), extra = load_sweeps([str(path), "training.steps=5", "seeds=[1]", "recipe=mor/block", "+observer.x=1"])
    assert extra == ("training.steps=5", "recipe=mor/block", "+observer.x=1")
    assert sweep.seeds == (1,)


# ------------------------------------------------------------------------------------------------ scales


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    """Return a sweep file with a folder `scale/` beside it, which has smoke.yaml and cpu.yaml."""
    path = sweep_file(tmp_path, {"seeds": [0], "overrides": ["data=python"]})
    sweep_file(tmp_path / "scale", {"size": ["training.steps=3"]}, "smoke")
    sweep_file(tmp_path / "scale", {"seeds": [0, 1], "size": []}, "cpu")
    return path


def test_a_scale_beside_the_file_says_how_big_things_are(scaled: Path) -> None:
    (smoke,), _ = load_sweeps([str(scaled)])
    (cpu,), _ = load_sweeps([str(scaled), "scale=smoke", "scale=cpu"])
    assert (smoke.scale, smoke.size, smoke.seeds) == ("smoke", ("training.steps=3",), (0,))
    assert (cpu.scale, cpu.size, cpu.seeds, cpu.overrides) == ("cpu", (), (0, 1), ("data=python",))
    scaled.write_text("scale: cpu")
    assert load_sweeps([str(scaled)])[0][0].seeds == (0, 1)
    assert load_sweeps([str(scaled), "scale=smoke"])[0][0].seeds == (0,)
    with pytest.raises(ValueError, match=r"scale 'huge'.*cpu, smoke"):
        load_sweeps([str(scaled), "scale=huge"])


def test_a_scale_may_leave_out_arms_of_single_sweeps(scaled: Path) -> None:
    arms = "{a: {}, b: {parent: a}, c: {}}"
    (scaled.parent / "scale" / "cpu.yaml").write_text(f"arms: {arms}\narms_of: {{{scaled.stem}: [b], other: [c]}}")
    (sweep,), _ = load_sweeps([str(scaled), "scale=cpu"])
    assert [arm for arm in sweep.arms if sweep.runs_at(arm)] == ["a", "b"], "with the arm that it starts from"
    (chosen,), _ = load_sweeps([str(scaled), "scale=cpu", "only=[c]"])
    assert [arm for arm in chosen.arms if chosen.runs_at(arm)] == ["c"]
    scaled.rename(scaled.with_name("third.yaml"))
    (third,), _ = load_sweeps([str(scaled.with_name("third.yaml")), "scale=cpu"])
    assert all(map(third.runs_at, third.arms))
    (scaled.parent / "scale" / "cpu.yaml").write_text("arms: {there: {}}\narms_of: {third: [absent]}")
    with pytest.raises(ValueError, match=naming("absent", "there")):
        load_sweeps([str(scaled.with_name("third.yaml")), "scale=cpu"])


def test_a_trunk_is_the_parent_of_all_that_name_none(tmp_path: Path) -> None:
    arms = "{long: {}, mid: {at: 0.5}, far: {parent: mid}, alone: {scratch: true}}"
    sweep = loaded(tmp_path, f"trunk: long\narms: {arms}")
    parents = {"long": None, "mid": "long", "far": "mid", "alone": None}
    assert {name: arm.parent for name, arm in sweep.arms.items()} == parents
    for wrong in ("trunk: lon\narms: {long: {}}", "arms: {a: {at: 0.5}}", "trunk: a\narms: {a: {at: 0.5}}"):
        with pytest.raises(ValueError, match=r"trunk 'lon'.*long|no parent"):
            loaded(tmp_path, wrong)


# ------------------------------------------------------------------------------------------------ mistakes

MISTAKES = {
    "unknown key": ("seedz: [0]", "seedz: .*seeds"),
    "unknown key of an arm": ("arms: {a: {override: [x=1]}}", r"unknown key arms\.a\.override.*overrides, axes"),
    "unknown key of resources": ("resources: {cpu: 1}", r"unknown key resources\.cpu.*cpus, gpus"),
    "text for a list": ("overrides: model=gpt2-nano", "overrides: a list is expected, not 'model=gpt2-nano'"),
    "text for seeds": ("seeds: [a]", "seeds: int is expected, not 'a'"),
    "a seed below 0": ("seeds: [-1]", r"seeds \[-1\]: one or more different integers from 0"),
    "a seed twice": ("seeds: [1, 1]", r"seeds \[1, 1\]: one or more different integers"),
    "a list for arms": ("arms: [a, b]", "arms: a mapping is expected"),
    "an axis of one value": ("axes: {a: 1}", "axis a: a list of different values is expected"),
    "an axis with a value twice": ("axes: {a: [1, 1]}", "axis a: a list of different values is expected"),
    "a text as a named axis value": ("axes: {a: {x: 'data=python'}}", "a mapping of names to lists of overrides"),
    "unequal lengths": ("zipped: [{a: [1, 2], b: [1]}]", "need the same number of values, but a has 2, b has 1"),
    "zipped but no mapping": ("zipped: [[a, b]]", r"zipped: a mapping is expected, not \['a', 'b'\]"),
    "an axis twice": ("axes: {a: [1]}\nzipped: [{a: [1], b: [2]}]", "axis a: .* only once"),
    "seed as an axis": ("axes: {seed: [1]}", "axis seed: .*not allowed"),
    "an arm with an unknown axis": ("arms: {x: {axes: [b]}}\naxes: {a: [1]}", r"arms\.x\.axes: 'b'.*a"),
    "an exclusion of a value that the axis lacks": ("axes: {a: [1, 2]}\nexclude: [{a: 3}]", "exclude: a '3'.*1, 2"),
    "an unknown parent": ("arms: {x: {parent: z}, y: {}}", r"arms\.x\.parent: 'z'.*y"),
    "an arm as its own parent": ("arms: {x: {parent: x}, y: {}}", r"arms\.x\.parent: 'x'.*y"),
    "at without a parent": ("arms: {x: {at: 0.5}}", r"at 0\.5: .*no parent"),
    "at 0": ("arms: {x: {at: 0, parent: y}, y: {}}", r"at 0\.0: .*a fraction .* between 0 and 1"),
    "at one step and a half": ("arms: {x: {at: 1.5, parent: y}, y: {}}", r"at 1\.5: .*a step, 1 or more"),
    "an exclusion of an unknown axis": ("exclude: [{lr: 1}]", "exclude: 'lr'.*arm, seed"),
    "an exclusion of an unknown arm": ("arms: {a: {}}\nexclude: [{arm: b}]", "exclude: arm 'b'.*a"),
    "an empty exclusion": ("exclude: [{}]", "a mapping of axes to values is expected"),
    "an exclusion of nested values": ("exclude: [{seed: [[0]]}]", r"exclude: seed \[0\]: a value or a list of values"),
    "a list with an unknown arm in an exclusion": ("arms: {a: {}}\nexclude: [{arm: [a, b]}]", "exclude: arm 'b'.*a"),
    "axis values with the same name": ("axes: {a: {1: [x=1], '1': [x=2]}}", "a list of different values is expected"),
    "a name that MLflow refuses": ("study: it's", '"it\'s" is not valid'),
    "a relative path out of the folder as a study": ("study: ../../x", "'../../x' is not valid"),
    "NaN GPUs": ("resources: {gpus: .nan}", r"resources\.gpus nan: .*0 or more"),
    "less than one rank": ("resources: {ranks: 0}", r"resources\.ranks 0: .*1 or more"),
    "not YAML": ("axes: {a: [1", r"one\.yaml: .*expected"),
    "a list as a file": ("- a\n- b", r"one\.yaml"),
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_file_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        loaded(tmp_path, text)
    assert str(error.value).count("\n") == 0
    assert "one" in str(error.value)  # the file's name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), r"name a sweep: study=NAME .*FILE\.yaml.* mor, nvfp4, gaussws"),
        (("missing.yaml",), r"no sweep file missing\.yaml"),
        (("old.yml",), r"a file NAME\.yaml is expected"),
        (("study=none",), "study 'none'"),
        (("FILE", "seed=1"), "'seed=1': expected KEY=VALUE; valid keys are .*seeds"),
        (("FILE", "nonsense"), "'nonsense': expected KEY=VALUE, or a sweep file"),
        (("FILE", "seeds=0,1"), "takes one value"),
        (("FILE", "seeds=[0"), "is not KEY=VALUE"),
        (("FILE", "resources.cores=1"), "resources.*cores"),
        (("FILE", "name=x"), "'name=x': expected KEY=VALUE"),
        (("FILE", "x=1"), "valid keys are study, sweep, file, about,"),
        (("FILE", "study=mor"), r"tiny\.yaml and study=mor: .*not both"),
        (("FILE", "FILE"), "only one file"),
        (("study=mor", "only=[block, nvfp5]"), r"only: nvfp5|only.*'nvfp5'"),
        (("study=mor", "sweep=repeated", "scale=sizes"), "sweep=repeated: scale 'sizes': valid values are cpu-full"),
        (("study=gaussws", "sweep=gpt2", "scale=questions"), "scale 'questions': valid values are cpu, cpu-full, gpu"),
        (("study=mor", "study=nvfp4"), "'study=nvfp4' after 'mor': .*only one study"),
        (("FILE", "+axes.optimizer.lr=[1,2]"), r"write axes=\{optimizer\.lr:\[1,2\]\}"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_status_2(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.yml").write_text("seeds: [0]")
    path = sweep_file(tmp_path, {"seeds": [0]})
    argv = ["sweep", *(str(path) if word == "FILE" else word for word in arguments), "--dry-run"]
    assert cli.main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert re.search(message, shown.err)
    assert not (tmp_path / "runs").exists()

"""List the studies, and read the sweep files of studies and users, which Hydra composes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from fewbits.common.from_dict import from_dict, one_of
from fewbits.experiments.composition import compose_file, nearest_first
from fewbits.experiments.config_files import CONF, SWEEPS, Folders, folders, is_search_path, names
from fewbits.experiments.storage.run_folder import plain
from fewbits.experiments.trial import Trial
from fewbits.sweeps.planning.sweep import Sweep

CONFIG = Path(__file__).parents[1] / "config"
_RECIPE = re.compile(r"\brecipe=([\w/-]+)")
_WHICH = ("study", "sweep", "file")
_OF_TRIALS = (*(f.name for f in dataclasses.fields(Trial) if f.name != "seed"), "runtime")
# Keys of a sweep, and the keys of a scale file that set them for single sweeps: `seeds_of: {SWEEP: [1, 2]}`.
_OF_SINGLE_SWEEPS = {"seeds": "seeds_of", "only": "arms_of"}
_BASE = {**plain(dataclasses.asdict(Sweep(""))), "arms": {}, **{key: {} for key in _OF_SINGLE_SWEEPS.values()}}
del _BASE["name"]


@dataclass(frozen=True)
class Study:
    """A paper or text that fewbits reproduces."""

    name: str  # as in `study=NAME`; also the name of the study's folders
    title: str  # of the paper
    arxiv: str  # the paper's arXiv number; empty for texts without one
    about: str  # its subject in one line, for `fewbits list studies`

    @property
    def scales(self) -> tuple[str, ...]:
        """The names of the scales at which the study can run."""
        return tuple(sorted(path.stem for path in (CONFIG / self.name / "scale").glob("*.yaml")))

    @cached_property
    def recipes(self) -> tuple[str, ...]:
        """The names of the recipes in the study's sweep files: the baseline bf16, then the others alphabetically."""
        texts = (path.read_text("utf-8") for path in (CONFIG / self.name).rglob("*.yaml"))
        named = {name for text in texts for name in _RECIPE.findall(text)}
        return tuple(sorted(named, key=lambda name: (name != "bf16", name)))


_ALL = (
    Study(
        name="mor",
        title="MoR: Mixture of Representations for Mixed-Precision Training",
        arxiv="2512.22804",
        about="each tensor or block in FP8 where its relative error allows it, else in BF16",
    ),
    Study(
        name="nvfp4",
        title="Pretraining Large Language Models with NVFP4",
        arxiv="2509.25149",
        about="4-bit pre-training: two-level scales, 2-D weight blocks, stochastic rounding, Hadamard transforms",
    ),
    Study(
        name="gaussws",
        title="Gaussian Weight Sampling for Scalable, Efficient and Stable Pseudo-Quantization Training",
        arxiv="2505.11170",
        about="weights get rounded Gaussian noise with learned bit widths, instead of being quantized",
    ),
    Study(
        name="primer",
        title="Number formats and mixed precision: two primers",
        arxiv="",
        about="checks sentences of two introductory texts on casts, scales, blocks, sums and precision policies",
    ),
)
STUDIES = {study.name: study for study in _ALL}
ATLAS = Study(
    "atlas", "The atlas of recipes", "", "measures every recipe on the same weights, batches and seeds; no report"
)
SWEPT = STUDIES | {ATLAS.name: ATLAS}  # the valid names of `fewbits sweep study=NAME`
# In a sweep file, `${recipes:[A,B]}` is the list of all recipes of fewbits except A and B, so that new ones take part.
OmegaConf.register_new_resolver(
    "recipes", lambda left_out: [name for name in names("recipe") if name not in left_out], replace=True
)


def outline_of(study: Study) -> list[dict[str, Any]]:
    """Return for each sweep of a study its name, description, scales and, by name, the descriptions of its own arms.

    scales: those in the key `scales` of the sweep's file, or all of the study. At other scales the file is not
    composed, since the scale's file may lack the `values` that only this sweep uses.
    """
    files = {
        path.stem: yaml.safe_load(path.read_text("utf-8")) for path in sorted((CONFIG / study.name).glob("*.yaml"))
    }
    return [
        {
            "name": name,
            "about": data["about"],
            "scales": [scale for scale in study.scales if scale in data.get("scales", study.scales)],
            "arms": {arm: settings.get("about", "") for arm, settings in data["arms"].items()},
        }
        for name, data in files.items()
    ]


def load_sweeps(overrides: Sequence[str]) -> tuple[list[Sweep], tuple[str, ...]]:
    """Return the sweeps that the overrides select, and the overrides that apply to every trial of these sweeps.

    `study=NAME [sweep=NAME]` or the path of a sweep file selects sweeps. Overrides of keys of sweep files, such as
    `seeds=[0,1]`, change the returned sweeps. All others, such as `training.steps=20`, are returned as the second
    result. Raise ValueError for invalid overrides or files.

    >>> load_sweeps(("study=mor", "scale=cpu", "seeds=[0,1]", "training.steps=20"))
    """
    chosen: dict[str, str] = {}
    changes, extra = [], []
    for override in overrides:
        key, equals, value = override.partition("=")
        name = key.lstrip("+~").partition(".")[0]
        if override.endswith((".yaml", ".yml")) and (not equals or Path(override).is_file()):
            key, value = "file", override
        if key in _WHICH:
            if key in chosen:
                raise ValueError(f"{override!r} after {chosen[key]!r}: name only one {key}")
            chosen[key] = value
        elif name in _BASE:
            changes.append(override)
        elif name in _OF_TRIALS or is_search_path(override):
            extra.append(override)
        else:
            valid = nearest_first(name, [*dict.fromkeys((*_WHICH, *sorted(_BASE), *sorted(_OF_TRIALS)))])
            hint = _suggestion(override, folders([*filter(is_search_path, overrides)])) or f"valid keys are {valid}"
            expected = "KEY=VALUE" if equals else "KEY=VALUE, or a sweep file NAME.yaml"
            raise ValueError(f"{override!r}: expected {expected}; {hint}")
    sweeps = [_load(file, study, changes) for file, study in _files(chosen, changes, folders(extra))]
    for name in dict.fromkeys(name for sweep in sweeps for name in sweep.only):
        one_of("only", name, dict.fromkeys(arm for sweep in sweeps for arm in sweep.arms))
    return sweeps, tuple(extra)


def _files(chosen: dict[str, str], changes: Sequence[str], own: Folders) -> list[tuple[Path, str]]:
    """Return the paths of the sweep files that `study`, `sweep` or `file` choose, each with the name of its study."""
    study, sweep, file = map(chosen.get, _WHICH)
    if file is None and study is None and sweep is not None:  # a file of the user's own, such as conf/sweep/NAME.yaml
        if (path := own.file(SWEEPS, sweep)) is None:
            valid = nearest_first(sweep, names(SWEEPS, own)) or f"none, without a file {CONF}/{SWEEPS}/{sweep}.yaml"
            raise ValueError(f"sweep={sweep}: name its study, as in study=mor, or a sweep file of your own: {valid}")
        return [(path, sweep)]
    if file is not None:
        if others := [f"{key}={chosen[key]}" for key in ("study", "sweep") if key in chosen]:
            raise ValueError(f"{file} and {', '.join(others)}: name either a sweep file or a study, not both")
        path = Path(file).expanduser()
        if not path.is_file() and path == Path(path.name):
            path = own.file(SWEEPS, path.stem) or path
        if path.suffix != ".yaml" or not path.is_file():
            own_names = ", ".join(names(SWEEPS, own)) or "none"
            expected = f"the path of a file NAME.yaml is expected, or sweep=NAME of {CONF}/{SWEEPS} ({own_names})"
            raise ValueError(f"there is no sweep file {path}: {expected}")
        return [(path, path.stem)]
    if study is None:
        raise ValueError(f"name a sweep: study=NAME or a sweep file FILE.yaml; valid studies are {', '.join(SWEPT)}")
    one_of("study", study, SWEPT)
    scale = [Sweep("").scale, *(change.partition("=")[2] for change in changes if change.startswith("scale="))][-1]
    one_of("scale", scale, SWEPT[study].scales)
    at = {each["name"]: each["scales"] for each in outline_of(SWEPT[study])}
    files = {name: CONFIG / study / f"{name}.yaml" for name in at}
    if sweep is not None:
        one_of("sweep", sweep, files)
        one_of(f"sweep={sweep}: scale", scale, at[sweep])
        return [(files[sweep], study)]
    return [(files[name], study) for name, scales in at.items() if scale in scales]


def _suggestion(argument: str, own: Folders) -> str:
    """Return a hint such as `did you mean study=mor?` for an argument that is not valid; empty if nothing fits."""
    files = {f"study={argument}": argument in SWEPT, f"sweep={argument}": own.file(SWEEPS, argument)}
    files[f"{argument}.yaml"] = Path(f"{argument}.yaml").is_file()
    return next((f"did you mean {valid}?" for valid, exists in files.items() if exists), "")


def _load(file: Path, study: str, changes: Sequence[str]) -> Sweep:
    changed = set()
    for change in changes:
        key, equals, value = change.lstrip("+~").partition("=")
        changed.add(key)
        axis = key.removeprefix("axes.")
        if axis != key and equals and "." in axis and axis.partition(".")[0] in _OF_TRIALS:
            raise ValueError(
                f"{change!r}: Hydra reads the dots in {axis} as nested keys: write axes={{{axis}:{value}}}"
            )
    data = compose_file(file, _BASE, changes, group="scale")
    data["study"], data["arms"] = data["study"] or study, data["arms"] or {"": {}}
    for key, of_single_sweeps in _OF_SINGLE_SWEEPS.items():
        own = data.pop(of_single_sweeps, {}).get(file.stem)
        if own is not None and key not in changed:
            data[key] = own
    try:
        return _with_trunk(from_dict(Sweep, {"name": file.stem, **data}))
    except ValueError as error:
        raise ValueError(f"{' '.join([file.name, *changes])}: {error}") from None


def _with_trunk(sweep: Sweep) -> Sweep:
    """Return the sweep with the arm that its key `trunk` names as the parent of all other arms.

    Arms with a `parent` of their own or with `scratch: true` stay unchanged.
    """
    if sweep.trunk is None:
        return sweep
    one_of("trunk", sweep.trunk, sweep.arms)
    below = {n: arm for n, arm in sweep.arms.items() if n != sweep.trunk and not (arm.parent or arm.scratch)}
    return replace(sweep, arms=sweep.arms | {n: replace(arm, parent=sweep.trunk) for n, arm in below.items()})

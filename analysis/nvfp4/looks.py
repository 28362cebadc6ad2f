"""What the NVFP4 study's figures of curves show, as data: of each figure its sweeps, arms and baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fewbits.analysis import plots
from fewbits.analysis.arms import AGAIN, BAD, BASELINE, TRUNK
from fewbits.analysis.curves import LOSS, VALIDATION, Arm, Metric, Shown
from fewbits.analysis.engine.frames import Results
from fewbits.analysis.engine.paper import paper
from fewbits.analysis.nvfp4.arms import SAME_MODEL
from fewbits.analysis.plots import LOOKS
from fewbits.analysis.results import NotRun

LABELS = {
    BASELINE: "BF16",
    "bf16-fp32-wgrad": "BF16, dW in FP32",
    "fp8": "FP8",
    "nvfp4": "NVFP4",
    "nvfp4-long": "NVFP4",
    "nvfp4-base": "nothing added",
    "bf16-whole": "BF16",
    "nvfp4-whole": "NVFP4",
    "base-whole": "nothing added",
    "full": "NVFP4",
    "fewer-kept": "fewer blocks in BF16",
    "kept": "last blocks in BF16",
    "with-2d": "+ 2-D weights",
    "with-rht": "+ Hadamard",
    "with-sr": "+ stochastic",
    "no-sr": "no stochastic",
    "no-rht": "no Hadamard",
    "no-2d": "no 2-D weights",
    "long-no-sr": "no stochastic",
    "long-no-rht": "no Hadamard",
    "long-no-2d": "no 2-D weights",
    "mxfp4": "MXFP4",
    "mxfp4-ocp": "MXFP4 of OCP",
    "mxfp4-deterministic": "MXFP4, no chance",
    "four-over-six": "Four Over Six",
    "ue5m3": "UE5M3 scales",
    "ms-eden": "MS-EDEN",
    "sr-gradients": "gradients",
    "sr-backward": "all of backward",
    "sr-activations": "activations",
    "sr-weights": "weights",
    "rht-none": "no transform",
    "rht-wgrad": "Wgrad",
    "rht-fprop": "Fprop",
    "rht-dgrad": "Dgrad",
    "rht-2": "size 2",
    "rht-4": "size 4",
    "rht-16": "size 16",
    "rht-128": "size 128",
    "signs-none": "no random signs",
    "signs-one": "one vector for all",
    "signs-each": "a vector for each",
    "weights-different": "weights: two ways",
    "weights-same": "weights: one way",
    "weights-squares": "weights: squares",
    "activations-different": "activations: two ways",
    "activations-same": "activations: one way",
    "switch-both": "both passes",
    "switch-forward": "forward",
    "switch-backward": "backward",
    "switch-late": "both, at the end",
    "last-1": "last 1",
    "last-2": "last 2",
    "last-4": "last 4",
    "first-4": "first 4",
    "first-2-last-2": "first 2, last 2",
    BAD: "E2M1 per tensor",
}
TRUNKS = {TRUNK: "trunk, BF16", "nvfp4-trunk": "trunk, NVFP4"}


@dataclass(frozen=True)
class Group:
    """Arms of one sweep, a row of panels for each metric."""

    sweep: str
    arms: tuple[str, ...]
    baseline: str = BASELINE
    name: str = ""  # said beside the rows, where a figure has several groups
    metrics: tuple[Metric, ...] = (LOSS, VALIDATION)
    said: Mapping[str, str] = field(default_factory=dict)  # of arms: the paper's number of their last change
    labels: Mapping[str, str] = field(default_factory=dict)  # in place of LABELS

    def label(self, arm: str) -> str:
        return self.labels.get(arm, LABELS[arm])

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(arm for arm in self.arms if arm != self.baseline)

    def paper(self, metric: str, arm: str) -> float | None:
        """As a change: of a loss that is higher it is positive."""
        return paper("nvfp4").numbers[self.said[arm]].value if arm in self.said else None


def shown(group: Group, among: Sequence[Group]) -> Shown:
    """In a figure of these groups: what is called alike in them looks alike."""
    labels = list(dict.fromkeys(one.label(arm) for one in among for arm in one.others))
    arms = tuple(Arm(arm, group.label(arm), LOOKS[labels.index(group.label(arm))]) for arm in group.others)
    baseline = Arm(group.baseline, group.label(group.baseline), plots.BASELINE)
    return Shown((baseline, *arms), baseline, TRUNKS, group.paper)


BRANCHES = "The paper's are branches of its 12B run and compared with FP8; ours start from a trunk in BF16."


@dataclass(frozen=True)
class Curves:
    """A figure."""

    id: str
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()


FIGURES = (
    Curves(
        "Figure 2",
        (
            Group("large", ("nvfp4",), "fp8", "12B", said={"nvfp4": "gap-decayed"}),
            Group("scratch", ("nvfp4-whole", "base-whole"), "bf16-whole", "from nothing"),
            Group("recipe", ("nvfp4", "fp8"), name="6 blocks", metrics=(VALIDATION,)),
            Group("hybrid", ("nvfp4", "fp8"), name="hybrid", metrics=(VALIDATION,)),
        ),
        ("In the paper NVFP4 ends about 1.5 % above FP8, after 10 T tokens of the 12B model.",),
    ),
    Curves(
        "Figure 4",
        (
            Group("large", ("full", "no-sr", "no-rht", "no-2d", "fewer-kept"), "fp8", "12B"),
            Group("switch", ("nvfp4-long", "long-no-sr", "long-no-rht", "long-no-2d"), "fp8", "6 blocks"),
            Group(
                "switch",
                ("long-no-sr", "long-no-rht", "long-no-2d"),
                "nvfp4-long",
                "6 blocks",
                (VALIDATION,),
                labels={"nvfp4-long": "whole recipe"},
            ),
        ),
        (
            "All branch from a run in NVFP4, the paper's at a constant rate, ours as it decays; FP8 does not.",
            "The last row, beside the whole recipe, is what N4 is judged by.",
            "Fewer blocks in BF16 are about stability at 12B (N5).",
        ),
    ),
    Curves(
        "Figure 7",
        (
            Group(
                "large",
                ("nvfp4", "switch-both", "switch-forward", "switch-backward", "switch-late"),
                "fp8",
                "12B",
                said={"nvfp4": "gap-decayed", "switch-forward": "switch-forward"},
            ),
            Group(
                "switch",
                ("nvfp4-long", "switch-both", "switch-forward", "switch-backward", "switch-late"),
                name="6 blocks",
                said={"nvfp4-long": "gap-decayed", "switch-forward": "switch-forward"},
            ),
        ),
        (
            "Upright broken lines: where recipes switch; the solid ones: where arms branch.",
            "The paper's numbers are of its 12B model, beside FP8.",
        ),
    ),
    Curves(
        "Figure 8",
        (Group("recipe", ("kept", "with-2d", "with-rht", "with-sr")),),
        ("Each arm has what the arms before it have.",),
    ),
    Curves(
        "Figure 9",
        (Group("layers", ("nvfp4-base", "last-1", "last-2", "last-4", "first-4", "first-2-last-2")),),
        ("Of 20 blocks those named stay in BF16.",),
    ),
    Curves(
        "Figure 10",
        (Group("rounding", ("kept", "sr-gradients", "sr-backward", "sr-activations", "sr-weights")),),
        ("What is named is rounded stochastically, all else to nearest.",),
    ),
    Curves(
        "Figure 11",
        (Group("hadamard", ("rht-none", "rht-wgrad", "rht-fprop", "rht-dgrad")),),
        ("All with one vector of random signs; the paper has another curve of it.",),
    ),
    Curves(
        "Figure 12",
        (
            Group("large", ("rht-4", "full", "rht-128"), "fp8", "12B", labels={"full": "size 16"}),
            Group("hadamard", ("rht-4", "rht-16", "rht-128", "rht-2"), name="6 blocks"),
        ),
        (BRANCHES,),
    ),
    Curves(
        "Figure 13",
        (
            Group("large", ("signs-none", "full", "signs-each"), "fp8", "12B", labels={"full": "one vector for all"}),
            Group("hadamard", ("signs-none", "signs-one", "signs-each"), name="6 blocks"),
        ),
        (BRANCHES,),
    ),
    Curves(
        "Figure 14",
        (
            Group("consistency", ("weights-different", "weights-same", "weights-squares"), name="weights"),
            Group("consistency", ("activations-different", "activations-same"), name="activations"),
        ),
        ("Two ways: in blocks along the dimension that each product sums over. One way: along the forward pass's.",),
    ),
)


def chosen(results: Results, sweep: str) -> Results | NotRun:
    """Its places; arms' names are a sweep's own."""
    if sweep not in {one.name for one in results.plan.sweeps}:
        return NotRun(results.scale_name)
    one = results.of_sweep(sweep)
    return one if one.members else NotRun(results.scale_name)


def noise(results: Results, sweep: str) -> Results | None:
    """Where A/A is run of the model of that sweep."""
    found = chosen(results, "recipe") if sweep in SAME_MODEL else None
    return found if isinstance(found, Results) and found.has(AGAIN) else None

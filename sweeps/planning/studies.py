"""List the studies: the papers that this suite reproduces, each with the recipes that it needs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Study:
    """A paper that is reproduced."""

    name: str
    title: str  # of the paper
    arxiv: str
    about: str
    recipes: tuple[str, ...]  # names of recipes, including the paper's baselines


_ALL = (
    Study(
        name="mor",
        title="MoR: Mixture of Representations for Mixed-Precision Training",
        arxiv="2512.22804",
        about="each tensor or block in FP8 where its relative error allows it, else in BF16",
        recipes=(
            "bf16",
            "mor/tensor",
            "mor/block",
            "mor/block-64",
            "mor/channel",
            "mor/sub-channel",
            "mor/amax",
            "mor/e8m0",
            "mor/threshold-5",
            "mor/two-way",
            "mor/three-way",
            "mor/outlook",
        ),
    ),
    Study(
        name="nvfp4",
        title="Pretraining Large Language Models with NVFP4",
        arxiv="2509.25149",
        about="4-bit pre-training: two-level scales, 2-D weight blocks, stochastic rounding, Hadamard transforms",
        recipes=(
            "bf16",
            "fp8",
            "nvfp4",
            "nvfp4-base",
            "nvfp4-four-over-six",
            "nvfp4-ue5m3",
            "nvfp4-ms-eden",
            "mxfp4",
            "mxfp4-ocp",
        ),
    ),
    Study(
        name="gaussws",
        title="Gaussian Weight Sampling for Scalable, Efficient and Stable Pseudo-Quantization Training",
        arxiv="2505.11170",
        about="rounded Gaussian noise on the weights, its width learned, in place of quantizing them",
        recipes=("bf16", "gaussws", "diffq"),
    ),
)

STUDIES = {study.name: study for study in _ALL}

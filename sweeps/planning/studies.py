"""Define the table of studies: the papers and texts that fewbits reproduces, with their scales and recipes."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

CONFIG = Path(__file__).parents[1] / "config"
RECIPE = re.compile(r"\brecipe=([\w/-]+)")


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
        named = {name for text in texts for name in RECIPE.findall(text)}
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

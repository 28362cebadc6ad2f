"""List the downstream tasks in MoR's and NVFP4's tables as data: for every row, the lm-eval tasks that reproduce it.

Assumptions: if a paper gives no number of few-shot examples (`few_shot=None`), lm-eval's default is used. No paper
names the metric: it is accuracy normalised by length where lm-eval has this metric, as is usual. If lm-eval does not
have exactly the task that the paper names, `differs` says how the task that is run differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Task:
    """A row of a paper's table; its score is the mean of one metric over lm-eval tasks."""

    title: str  # the row's name in the paper
    names: tuple[str, ...]  # names of lm-eval's tasks
    metric: str  # lm-eval's key of the metric: METRIC,FILTER
    few_shot: int | None = None  # number of examples; None: not stated in the paper, lm-eval's default is assumed
    category: str = ""  # the paper's heading above several rows; a heading's score is the mean of its rows' scores
    differs: str = ""  # how lm-eval's task differs from the paper's; empty: not at all

    def score(self, results: Mapping[str, Mapping[str, float]]) -> float:
        """Return this row's score, between 0 and 1, from results: lm-eval task → metric → value."""
        return fmean(results[name][self.metric] for name in self.names)


ACC, ACC_NORM = "acc,none", "acc_norm,none"
LAST_NUMBER = "exact_match,flexible-extract"  # compares the last number in the answer, however it is phrased

# MGSM: the languages in the paper that introduced it. Global MMLU: the languages of lm-eval's set Global-MMLU-Lite.
MGSM_LANGUAGES = ("bn", "de", "en", "es", "fr", "ja", "ru", "sw", "te", "th", "zh")
GLOBAL_MMLU_LANGUAGES = ("ar", "bn", "de", "en", "es", "fr", "hi", "id", "it", "ja", "ko", "pt", "sw", "yo", "zh")

TASK_GROUPS: Mapping[str, tuple[Task, ...]] = {
    # MoR tables 2 to 4. The paper's text and figure 7 state the few-shot examples of MMLU, but of no other task.
    "mor": (
        Task("MMLU", ("mmlu",), ACC, few_shot=5),
        Task("WinoGrande", ("winogrande",), ACC),
        Task("PIQA", ("piqa",), ACC_NORM),
        Task("HellaSwag", ("hellaswag",), ACC_NORM),
        Task("Arc-Easy", ("arc_easy",), ACC_NORM),
        Task("Arc-Challenge", ("arc_challenge",), ACC_NORM),
        Task("OpenBookQA", ("openbookqa",), ACC_NORM),
        Task("SIQA", ("social_iqa",), ACC),
        Task("CommonSenseQA", ("commonsense_qa",), ACC),
    ),
    # NVFP4 table 2. It states only MMLU-Pro's number of few-shot examples.
    "nvfp4": (
        Task("MMLU", ("mmlu",), ACC, category="General"),
        Task("MMLU-Pro 5-shot", ("mmlu_pro",), "exact_match,custom-extract", few_shot=5, category="General"),
        Task(
            "AGIEval English CoT",
            ("agieval_en",),
            ACC,
            category="General",
            differs="the choices are scored at once; the paper lets the model reason first (CoT)",
        ),
        Task("GSM8k CoT", ("gsm8k_cot",), LAST_NUMBER, category="Math"),
        # Not lm-eval's minerva_math, in which the model reasons first: it needs antlr4 4.11, but OmegaConf needs 4.9.
        Task(
            "MATH",
            ("hendrycks_math",),
            "exact_match,none",
            category="Math",
            differs="the prompt asks for the answer alone, with no worked examples",
        ),
        Task(
            "Global MMLU",
            tuple(f"global_mmlu_{language}" for language in GLOBAL_MMLU_LANGUAGES),
            ACC,
            category="Multilingual",
            differs="Global-MMLU-Lite, all its languages; the paper says neither which set nor which languages",
        ),
        Task(
            "MGSM",
            tuple(f"mgsm_native_cot_{language}" for language in MGSM_LANGUAGES),
            LAST_NUMBER,
            category="Multilingual",
            differs="reasoning is asked for in the question's language; the paper does not say in which",
        ),
        Task("HumanEval+", ("humaneval_plus",), "pass@1,create_test", category="Code"),
        Task("MBPP+", ("mbpp_plus",), "pass_at_1,none", category="Code"),
        Task("ARC Challenge", ("arc_challenge",), ACC_NORM, category="Commonsense Understanding"),
        Task("HellaSwag", ("hellaswag",), ACC_NORM, category="Commonsense Understanding"),
        Task("OpenBookQA", ("openbookqa",), ACC_NORM, category="Commonsense Understanding"),
        Task("PIQA", ("piqa",), ACC_NORM, category="Commonsense Understanding"),
        Task("Winogrande", ("winogrande",), ACC, category="Commonsense Understanding"),
    ),
}


def shots(names: Sequence[str]) -> dict[str, int | None]:
    """Return the number of few-shot examples (None: lm-eval's default) by lm-eval task.

    names: keys of TASK_GROUPS, and names of lm-eval's tasks or groups. Raise ValueError if two of these names use one
    task with different numbers of examples: results are stored by task, so one would replace the other.
    """
    if not names:
        raise ValueError(f"no task is requested: valid tasks are {', '.join(TASK_GROUPS)} and lm-eval's tasks")
    wanted: dict[str, int | None] = {}
    for name in names:
        group = TASK_GROUPS.get(name, (Task(name, (name,), ""),))
        for task in group:
            for each in task.names:
                if wanted.setdefault(each, task.few_shot) != task.few_shot:
                    raise ValueError(
                        f"{', '.join(names)}: lm-eval's task {each} is requested with different numbers of few-shot "
                        f"examples ({_count(wanted[each])}, and {_count(task.few_shot)} by {name}), but a run stores "
                        "one result for each task: request the other number in a separate `fewbits evaluate`"
                    )
    return wanted


def _count(few_shot: int | None) -> str:
    return "lm-eval's default" if few_shot is None else str(few_shot)

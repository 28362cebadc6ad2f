"""Test that recipes and models of fewbits work with torchtitan's own trainer and checkpoints, on a CPU."""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fewbits.kernels.backends.processor import has_fast_bf16_products
from fewbits.sweeps.running.local import environments_at, meeting_place
from tests.effort import DEEP
from tests.forked_python import Program, WarmPython

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed: pip install 'fewbits[titan]'"
)

ROOT = Path(__file__).parents[2]
RANK = "from tests.experiments.titan_on_cpu import main; main()"
STEPS = 4
SAVED = 2  # the step of the checkpoint from which runs are resumed
NOISY = (
    "nvfp4",
    "keep.last=2",
    "sampler.kind=gaussws",
    "sampler.penalty=1.0",
)  # noise in forward, backward and weights


@dataclass(frozen=True)
class Job:
    arguments: tuple[str, ...]
    by_hand: int = 0  # number of ranks to simulate in one process without torchtitan's trainer; 0: use the trainer


def recipe(name: str, *settings: str, more: Sequence[str] = (), by_hand: int = 0) -> Job:
    arguments = ["--job.custom_config_module", "fewbits.experiments.titan"]
    arguments += ["--model.converters", "fewbits", "--fewbits.recipe", name]
    if settings:
        arguments += ["--fewbits.settings", ",".join(settings)]
    return Job((*arguments, *more), by_hand)


@dataclass
class Titan:
    """A runner of torchtitan jobs: the folder of their data and output, and the process from which they are forked."""

    folder: Path
    python: WarmPython  # has imported titan_on_cpu
    environment: dict[str, str]

    def run(self, jobs: Sequence[Job], *, ranks: int = 1, dump: str = "out") -> list[dict[str, Any]]:
        """Run the jobs one after the other; return, for each job, what rank 0 logged (`rows`) or the job's `error`."""
        common = {
            "job.dump_folder": self.folder / dump,
            "model.hf_assets_path": self.folder / "tokenizer",
            "training.dataset": "c4_test",
            "training.dataset_path": self.folder / "data",
            "training.local_batch_size": 2,
            "training.seq_len": 64,
            "training.steps": STEPS,
            "optimizer.lr": 0.003,  # a few steps lower the loss by more than the difference between batches
            "training.max_norm": 1e9,  # no clipping, because norms of shards are added in another order
            "lr_scheduler.warmup_steps": 0,
            "lr_scheduler.decay_ratio": 0.0,
            "activation_checkpoint.mode": "none",
            "metrics.log_freq": 1,
            "comm.trace_buf_size": 0,
            "debug.seed": 3,
        }
        arguments = [text for key, value in common.items() for text in (f"--{key}", str(value))]
        stores = [meeting_place() for _ in jobs]
        plan = [
            {
                "arguments": [*arguments, *(word.format(out=self.folder / "out") for word in job.arguments)],
                "by_hand": job.by_hand,
                "port": store.port,
            }
            for job, store in zip(jobs, stores, strict=True)
        ]
        environments = environments_at(stores[0], ranks)  # each job has its own port
        programs = [
            Program(["-c", RANK], ROOT, {**self.environment, **each}, json.dumps(plan)) for each in environments
        ]
        finished = self.python.run(programs)
        for rank in finished:
            assert rank.returncode == 0, rank.stderr[-3000:]
        results: list[dict[str, Any]] = json.loads(finished[0].stdout.splitlines()[-1])
        return results

    def keep_only(self, step: int, dump: str, copy: str) -> None:
        """Copy only this step's checkpoint from folder `dump` to `copy`, as if training had been killed soon after."""
        name = f"checkpoint/step-{step}"
        shutil.copytree(self.folder / dump / name, self.folder / copy / name)


@pytest.fixture(scope="module")
def titan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Titan]:
    folder = tmp_path_factory.mktemp("titan")
    (folder / "tokenizer").mkdir()
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "data").mkdir()
    texts = [(ROOT / name).read_text()[:1500] for name in ("README.md", "CONTRIBUTING.md", "LICENSE", "Makefile")]
    (folder / "data" / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    cache = {"HF_DATASETS_CACHE": str(folder / "cache")}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **cache}
    python = WarmPython("import tests.experiments.titan_on_cpu", environment, ROOT)
    with python.process:  # the process ends when its stdin is closed
        yield Titan(folder, python, environment)


ACCUMULATED = ("--training.global_batch_size", "4")
SAVING = ("--checkpoint.enable", "--checkpoint.interval", str(SAVED))
PER_OP = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op")
FULL = ("--activation_checkpoint.mode", "full")
DDP = ("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1")
IN_FP32 = ("--training.mixed_precision_param", "float32")
SHARDED = ("nvfp4", "wgrad.output=bf16")
FROM_NOISY = ("--checkpoint.enable", "--checkpoint.initial_load_path", f"{{out}}/checkpoint/step-{STEPS}")
OURS = ("--job.custom_config_module", "fewbits.experiments.titan")
HYBRID = ("--model.name", "fewbits", "--model.flavor", "hybrid-nano", "--checkpoint.folder", "hybrid")
TIED = ("--model.name", "fewbits", "--model.flavor", "gpt2-nano", "--checkpoint.folder", "tied")
FILE = (
    *("--job.config_file", "infra/torchtitan/llama3-8b-nvfp4.toml", "--checkpoint.folder", "file"),
    *("--model.flavor", "debugmodel", "--fewbits.settings", "keep.last=4,wgrad.output=bf16"),
)
# The job files with models of our own, run with a small model of the same family.
FLAVORS = {"hybrid-8b": "hybrid-nano", "nemotron3-8b": "nemotron-nano"}
SHIPPED = {
    file.stem: Job(
        (
            *("--job.config_file", str(file.relative_to(ROOT)), "--checkpoint.folder", file.stem),
            *("--model.flavor", FLAVORS.get(file.stem.rpartition("-")[0], "llama2-nano")),
            *(("--training.global_batch_size", "2") if "mor" in file.stem else ()),
        )
    )
    for file in sorted((ROOT / "infra" / "torchtitan").glob("*.toml"))
    if not file.stem.startswith("llama3")
}

ALONE = {
    "plain": Job(()),
    "bf16": recipe("bf16"),
    "mor": recipe("mor/block", "threshold=0.03", "block=32x32"),
    "mor by hand": recipe("mor/block", "threshold=0.03", "block=32x32", by_hand=1),
    "nvfp4": recipe("nvfp4", "keep.last=2", "stochastic=[dgrad.dy,wgrad.dy]"),
    "nvfp4 by hand": recipe("nvfp4", "keep.last=2", by_hand=1),
    "nvfp4, blocks recomputed": recipe("nvfp4", "keep.last=2", more=FULL),
    "nvfp4, operations recomputed": recipe("nvfp4", "keep.last=2", more=PER_OP),
    "noisy": recipe(*NOISY, more=(*ACCUMULATED, *SAVING)),
    "noisy by hand": recipe(*NOISY, more=ACCUMULATED, by_hand=1),
    "file": Job(FILE),
    **SHIPPED,
    "file by hand": Job(FILE, by_hand=1),
    "fsdp by hand": recipe(*SHARDED, more=FROM_NOISY, by_hand=2),
    "fsdp in FP32 by hand": recipe(*NOISY, more=(*IN_FP32, *FROM_NOISY), by_hand=2),
    "ddp by hand": recipe(*NOISY, more=DDP, by_hand=2),
    "hybrid by hand": recipe("nvfp4", more=HYBRID, by_hand=2),
    "tied by hand": recipe(*NOISY, more=TIED, by_hand=2),
}
REFUSED = {
    "no recipe 'nvfp5'": recipe("nvfp5"),
    "unknown key 'recipe.keep.lats': recipe.keep has the keys last, ": recipe("nvfp4", "keep.lats=2"),
    'set custom_config_module = "fewbits.experiments.titan" in [job], and recipe in [fewbits]': Job(
        ("--experimental.custom_import", "fewbits.experiments.titan", "--model.converters", "fewbits")
    ),
    "fewbits.recipe nvfp4: this recipe is not applied; add fewbits to model.converters": Job(
        ("--job.custom_config_module", "fewbits.experiments.titan", "--fewbits.recipe", "nvfp4")
    ),
    "compile.components includes model: ": recipe("nvfp4", more=("--compile.enable",)),
    "quantize.linear.float8 would quantize the layers of fewbits again": recipe(
        "nvfp4", more=("--model.converters", "fewbits,quantize.linear.float8")
    ),
    "training.dtype bfloat16: recipe gaussws adds its noise to FP32 weights; set training.dtype=float32": recipe(
        "gaussws", more=("--training.dtype", "bfloat16")
    ),
    "checkpoint.last_save_in_hf: Hugging Face's format cannot store the bit widths": recipe(
        "gaussws", more=("--checkpoint.last_save_in_hf",)
    ),
    "training.seq_len 512: model gpt2-nano has 256 positions": Job((*OURS, *TIED, "--training.seq_len", "512")),
    "training.dtype bfloat16: parameters and gradients of fewbits": Job(
        (*OURS, *HYBRID, "--training.dtype", "bfloat16")
    ),
    "experts.w1 holds the weights of experts": recipe(
        "nvfp4", more=("--model.name", "qwen3", "--model.flavor", "debugmodel_moe")
    ),
}
TOGETHER = {
    "fsdp": recipe(*SHARDED, more=(*FROM_NOISY, *SAVING, *PER_OP)),
    "fsdp, resumed": recipe(*SHARDED, more=(*SAVING, "--checkpoint.load_step", str(SAVED))),
    "fsdp in FP32": recipe(*NOISY, more=(*IN_FP32, *FROM_NOISY, "--checkpoint.folder", "fp32")),
    "ddp": recipe(*NOISY, more=DDP),
    "hybrid": recipe("nvfp4", more=(*HYBRID, *SAVING)),
    "hybrid, resumed": recipe("nvfp4", more=(*HYBRID, *SAVING, *FULL, "--checkpoint.load_step", str(SAVED))),
    "tied": recipe(*NOISY, more=(*TIED, *SAVING)),
}
REFUSED_TOGETHER = {
    "parallelism.tensor_parallel_degree 2: ": recipe("nvfp4", more=("--parallelism.tensor_parallel_degree", "2")),
    "parallelism.tensor_parallel_degree 2: fewbits needs whole weights": Job(
        (*OURS, *HYBRID, "--parallelism.tensor_parallel_degree", "2")
    ),
    "parallelism.pipeline_parallel_degree 2: ": recipe("nvfp4", more=("--parallelism.pipeline_parallel_degree", "2")),
    "set wgrad.output=bf16 in fewbits.settings, or training.mixed_precision_param=float32": recipe("nvfp4"),
    "training.mixed_precision_param bfloat16: recipe gaussws adds its noise to FP32 weights": recipe("gaussws"),
}

# Jobs that only `make test-deep` runs: other jobs test the same mechanisms, except the shipped job file.
DEEP_ALONE = {
    *SHIPPED,
    *("nvfp4, operations recomputed", "file", "file by hand", "fsdp in FP32 by hand", "ddp by hand", "tied by hand"),
}
DEEP_TOGETHER = {"fsdp in FP32", "ddp", "tied"}

Results = dict[str, dict[str, Any]]


def deep(*names: str) -> list[object]:
    """Return pytest parameters for jobs; the jobs in DEEP_ALONE and DEEP_TOGETHER run only in `make test-deep`."""
    return [pytest.param(name, marks=pytest.mark.deep if name in DEEP_ALONE | DEEP_TOGETHER else ()) for name in names]


@pytest.fixture(scope="module")
def alone(titan: Titan) -> Results:
    jobs = {name: job for name, job in ALONE.items() if DEEP or name not in DEEP_ALONE} | REFUSED
    return dict(zip(jobs, titan.run(list(jobs.values())), strict=True))


@pytest.fixture(scope="module")
def together(titan: Titan) -> Results:
    jobs = {name: job for name, job in TOGETHER.items() if DEEP or name not in DEEP_TOGETHER} | REFUSED_TOGETHER
    return dict(zip(jobs, titan.run(list(jobs.values()), ranks=2, dump="two"), strict=True))


def losses(result: dict[str, Any]) -> list[float]:
    assert "error" not in result, result["error"]
    return [row["loss"] for row in result["rows"]]


@pytest.mark.parametrize("name", deep(*SHIPPED))
def test_every_job_file_trains(alone: Results, name: str) -> None:
    first, *_, last = losses(alone[name])
    assert last < first


def test_recipe_bf16_is_torchtitan_without_fewbits(alone: Results) -> None:
    """Check that the recipe bf16 gives the losses and gradient norms of a job without fewbits.

    The bits are equal if the processor has fast BF16 products. On other processors fewbits multiplies BF16 matrices in
    FP32, with another order of sums, so some roundings to BF16 differ (by 2^-9 of an element).
    """
    assert len(losses(alone["plain"])) == STEPS
    loss, norm = (0.0, 0.0) if has_fast_bf16_products() else (1e-4, 2e-3)
    for plain, bf16 in zip(alone["plain"]["rows"], alone["bf16"]["rows"], strict=True):
        assert bf16["loss"] == pytest.approx(plain["loss"], rel=loss, abs=0)
        assert bf16["norm"] == pytest.approx(plain["norm"], rel=norm, abs=0)


@pytest.mark.parametrize("name", deep("mor", "nvfp4", "noisy", "file"))
def test_a_recipe_trains_as_quantize_does_by_hand_to_the_bit(alone: Results, name: str) -> None:
    """Check that torchtitan's trainer with a recipe gives the losses of a plain loop with `quantize`, bit for bit.

    The jobs have rounding noise, a sampler with a penalty, and gradients that are summed over micro-batches.
    """
    assert losses(alone[name]) == losses(alone[f"{name} by hand"])
    assert not set(losses(alone[name])) & set(losses(alone["bf16"]))
    assert losses(alone[name])[-1] < losses(alone[name])[0]


@pytest.mark.parametrize("name", deep("nvfp4, blocks recomputed", "nvfp4, operations recomputed"))
def test_activation_checkpointing_changes_neither_losses_nor_numerics(alone: Results, name: str) -> None:
    assert alone[name] == alone["nvfp4"]


def test_numerics_are_among_the_metrics(alone: Results) -> None:
    row = alone["mor"]["rows"][-1]
    for slot in ("fprop.x", "fprop.w", "dgrad.dy"):
        assert row[f"fewbits/share_0/{slot}"] + row[f"fewbits/share_1/{slot}"] == pytest.approx(1)
        assert 0 < row[f"fewbits/error/{slot}"] < row[f"fewbits/error_max/{slot}"] < 0.2
    bits = [row["fewbits/bits_mean"] for row in alone["noisy"]["rows"]]
    assert bits[0] == pytest.approx(6, abs=0.1)
    assert bits == sorted(bits, reverse=True)  # the penalty pulls bit widths towards 4
    assert not any(name.startswith("fewbits/") for name in alone["plain"]["rows"][-1])


def test_a_run_that_was_killed_and_resumed_has_the_bits_of_a_straight_one(titan: Titan, alone: Results) -> None:
    titan.keep_only(SAVED, "out", "killed")
    (resumed,) = titan.run([recipe(*NOISY, more=(*ACCUMULATED, *SAVING))], dump="killed")
    assert resumed["rows"] == alone["noisy"]["rows"][SAVED:]


@pytest.mark.parametrize("name", deep("fsdp", "fsdp in FP32", "ddp", "hybrid", "tied"))
def test_two_ranks_train_as_one_process_with_the_tokens_and_the_noise_of_both(
    alone: Results, together: Results, name: str
) -> None:
    assert losses(together[name]) == losses(alone[f"{name} by hand"])


def test_a_sharded_run_resumes_to_the_bit_with_activations_recomputed_or_not(together: Results) -> None:
    assert together["fsdp, resumed"]["rows"] == together["fsdp"]["rows"][SAVED:]


def test_a_model_of_ours_resumes_to_the_bit_and_logs_numerics_also_recomputed(together: Results) -> None:
    """Check that a resumed run of a Mamba-2 hybrid logs the losses and quantization errors of an uninterrupted run.

    The model is in NVFP4 and sharded over two ranks. Only the resumed run uses activation checkpointing.
    """
    assert together["hybrid, resumed"]["rows"] == together["hybrid"]["rows"][SAVED:]
    last = together["hybrid"]["rows"][-1]
    for slot in ("fprop.x", "fprop.w", "dgrad.dy", "wgrad.dy", "wgrad.x"):
        assert 0 < last[f"fewbits/error/{slot}"] < last[f"fewbits/error_max/{slot}"] < 1


@pytest.mark.parametrize("message", [*REFUSED, *REFUSED_TOGETHER])
def test_what_does_not_go_together_is_said_in_one_line(alone: Results, together: Results, message: str) -> None:
    error = (alone | together)[message].get("error", "none")
    assert message in error
    assert "\n" not in error


def test_another_version_of_torchtitan_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.3.0")
    message = "fewbits needs torchtitan 0.2.2, but 0.3.0 is installed: pip install 'fewbits[titan]'"
    with pytest.raises(ImportError, match=re.escape(message)):
        importlib.import_module("fewbits.experiments.titan")

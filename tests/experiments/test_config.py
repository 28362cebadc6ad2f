"""Test that every config file composes, that paper scales have the papers' values, and that errors are one line."""

import dataclasses
from pathlib import Path

import pytest

from fewbits import cli
from fewbits.experiments.config import load_recipe, load_trial, resolved
from fewbits.experiments.config_files import FOLDER, GROUPS, names
from fewbits.experiments.trial import Runtime, Trial
from fewbits.kernels.quantizer import Mixture, Quantizer
from fewbits.models.networks.presets import MODELS
from fewbits.models.recipe import SLOTS
from tests.messages import naming

# ------------------------------------------------------------------------------------------------ content


@pytest.mark.parametrize("choice", [f"{group}={name}" for group in GROUPS for name in names(group)])
def test_every_choice_of_a_group_composes(choice: str) -> None:
    trial, runtime = load_trial([choice])
    assert Trial.from_dict(trial.to_dict()) == trial
    device = {"scale=cpu": "cpu", "scale=smoke": "auto"}.get(choice, "cuda" if choice.startswith("scale=") else "auto")
    assert runtime == Runtime(device=device)


@pytest.mark.parametrize("name", ["../../elsewhere", "a/b", "", "..", "-", "long" * 100, "new\nline", "größe 2"])
def test_whatever_models_and_recipes_are_called_a_trials_name_is_one_folders(name: str) -> None:
    trial = load_trial()[0]
    model, recipe = dataclasses.replace(trial.model, name=name), dataclasses.replace(trial.recipe, name=name)
    full_name = dataclasses.replace(trial, model=model, recipe=recipe).name
    assert Path(full_name).name == full_name
    assert full_name.isprintable()
    assert not full_name.startswith(("-", "."))
    assert len(full_name.encode()) < 200


def test_a_recipe_is_loaded_by_name_with_settings() -> None:
    assert load_recipe("nvfp4") == load_trial(["recipe=nvfp4"])[0].recipe
    changed = load_recipe("nvfp4", {"rht": 32, "stochastic": ["fprop.x"], "keep": {"last": 3}, "about": "a 'b' \"c\""})
    overrides = ["recipe=nvfp4", "recipe.rht=32", "recipe.stochastic=[fprop.x]", "recipe.keep.last=3"]
    assert changed == load_trial([*overrides, 'recipe.about="a \'b\' \\"c\\""'])[0].recipe
    with pytest.raises(ValueError, match=naming("recipe 'nvfp5'", "nvfp4")):
        load_recipe("nvfp5")


def spellings(*overrides: str) -> dict[str, str]:
    recipe = load_trial(overrides)[0].recipe
    return {slot: str(resolved.spec or "high") for slot, resolved in recipe.operands.items()}


NVFP4 = {
    "fprop.x": "e2m1:1x16:nvfp4",
    "fprop.w": "e2m1:16x16:nvfp4",
    "dgrad.dy": "e2m1:1x16:nvfp4:stochastic",
    "dgrad.w": "e2m1:16x16:nvfp4",
    "wgrad.dy": "e2m1:1x16:nvfp4:stochastic:rht16",
    "wgrad.x": "e2m1:1x16:nvfp4:rht16",
}
# Overrides without their prefix `recipe.`, and the quantizer of all operands, or those that differ from NVFP4.
OPERANDS: dict[str, str | dict[str, str]] = {
    "mor/block threshold=0.03": "e4m3:128x128:gam @ error<0.03 | bf16 ; per=tensor",
    "mor/channel": "e4m3:channel:gam @ error<0.045 | bf16 ; per=tensor",
    "mor/tensor scaling=amax": "e4m3:tensor:amax @ error<0.045 | bf16 ; per=tensor",
    "mor/block-64": "e4m3:64x64:gam @ error<0.045 | bf16 ; per=tensor",
    "mor/sub-channel": "e4m3:1x128:gam @ error<0.045 | bf16 ; per=tensor",
    "mor/e8m0": "e4m3:128x128:e8m0 @ error<0.045 | bf16 ; per=tensor",
    "mor/amax": "e4m3:128x128:amax @ error<0.045 | bf16 ; per=tensor",
    "mor/threshold-5": "e4m3:128x128:gam @ error<0.05 | bf16 ; per=tensor",
    "mor/two-way": "e4m3:128x128:gam @ error<e5m2:128x128:gam | bf16 ; per=block",
    "mor/three-way block=64x64": (
        "e4m3:64x64:gam @ error<e5m2:64x64:gam | e5m2:64x64:gam @ spread<normal | bf16 ; per=block"
    ),
    "nvfp4": {},
    "nvfp4 weights=1x16": {"fprop.w": "e2m1:1x16:nvfp4", "dgrad.w": "e2m1:1x16:nvfp4"},
    "nvfp4 rht=32 signs=7": {
        "wgrad.dy": "e2m1:1x16:nvfp4:stochastic:rht32:signs=7",
        "wgrad.x": "e2m1:1x16:nvfp4:rht32:signs=7",
    },
    "nvfp4 signs=each": {
        "wgrad.dy": "e2m1:1x16:nvfp4:stochastic:rht16:signs=each",
        "wgrad.x": "e2m1:1x16:nvfp4:rht16:signs=each",
    },
    "nvfp4 rotated=[]": {"wgrad.dy": "e2m1:1x16:nvfp4:stochastic", "wgrad.x": "e2m1:1x16:nvfp4"},
    "nvfp4 stochastic=[fprop.x]": {
        "fprop.x": "e2m1:1x16:nvfp4:stochastic",
        "dgrad.dy": "e2m1:1x16:nvfp4",
        "wgrad.dy": "e2m1:1x16:nvfp4:rht16",
    },
    "nvfp4-ms-eden": dict.fromkeys(("dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"), "e2m1:1x16:eden:rht128:signs=each"),
    "nvfp4-base": "e2m1:1x16:nvfp4",
    "mxfp8": "e4m3:1x32:e8m0",
    "mxfp8-ocp": "e4m3:1x32:mx",
    "mxfp6": "e2m3:1x32:e8m0",
    "mxfp6-ocp": "e2m3:1x32:mx",
    "mxfp6 element=e3m2": "e3m2:1x32:e8m0",
    "mxfp4": {slot: text.replace("16", "32").replace("nvfp4", "e8m0") for slot, text in NVFP4.items()},
    "fp8": {slot: f"e4m3:{'128x128' if slot.endswith('w') else '1x128'}:amax" for slot in SLOTS},
    "bf16": "high",
    "gaussws": "high",
}


@pytest.mark.parametrize(("chosen", "expected"), OPERANDS.items(), ids=OPERANDS)
def test_what_each_operand_gets(chosen: str, expected: str | dict[str, str]) -> None:
    texts = dict.fromkeys(SLOTS, expected) if isinstance(expected, str) else NVFP4 | expected
    name, *settings = chosen.split()
    assert spellings(f"recipe={name}", *(f"recipe.{setting}" for setting in settings)) == {
        slot: text if text == "high" else str(Mixture.parse(text) if "|" in text else Quantizer.parse(text))
        for slot, text in texts.items()
    }


def test_samplers_and_what_is_kept_high() -> None:
    sampler = load_recipe("gaussws").sampler
    assert (sampler.kind, sampler.parts, sampler.init, sampler.target, sampler.block) == ("gaussws", ("all",), 6, 4, 32)
    assert sampler.penalty == 1e-4
    assert load_recipe("diffq").sampler.kind == "diffq"
    hybrid = load_recipe("gaussws-mor", {"sampler": {"parts": ["od"], "penalty": 0}})
    assert (hybrid.sampler.parts, hybrid.sampler.penalty) == (("od",), 0)
    assert hybrid.operands == load_recipe("mor/block").operands
    kept = {name: (load_recipe(name).keep.first, load_recipe(name).keep.last) for name in names("recipe")}
    assert {name: ends for name, ends in kept.items() if ends != (0, 0)} == {
        "nvfp4": (0, 1),
        "nvfp4-four-over-six": (0, 1),
        "nvfp4-ue5m3": (0, 1),
        "nvfp4-ms-eden": (0, 1),
        "mxfp4": (0, 1),
        "mxfp4-ocp": (0, 1),
        "nemotron-3": (0, 1),
        "fp8": (1, 2),
    }


# ------------------------------------------------------------------------------------------------ paper scales

# By scale: model; sequences per update; tokens per sequence; number of training tokens as the paper counts them;
# highest and lowest learning rate; schedule, its warm-up in updates, and the fraction of updates in which the rate
# decays. None: the paper does not state the value.
PAPERS = {
    # MoR's configurations: 1 T tokens, batches of 1024 and 1536; cosine. Rates and sequence length are not stated.
    "mor-config1": ("nemotron3-8b", 1024, 4096, 1e12, None, "cosine", None, None),
    "mor-config2": ("nemotron3-8b", 1536, 4096, 1e12, None, "cosine", None, None),
    # NVFP4: WSD; warm-up is not stated.
    "nvfp4-12b": ("hybrid-12b", 736, 8192, 10e12, (4.5e-4, 4.5e-6), "wsd", None, 0.20),
    "nvfp4-8b": ("hybrid-8b", 768, 8192, 1e12, (8.0e-4, 8.0e-6), "wsd", None, 0.15),
    "nvfp4-1.2b": ("nvfp4-1.2b", 768, 8192, 1e12, (1.2e-3, 1.2e-5), "wsd", None, 0.15),
    # GaussWS, table E.1: linear.
    "gaussws-gpt2-124m": ("gpt2-124m", 12 * 5 * 8, 1024, 294912e6, (6e-4, 6e-5), "linear", 2000, None),
    "gaussws-llama2-134m": ("llama2-134m", 12 * 1 * 8, 2048, 294912e6, (1e-5, 1e-6), "linear", 5000, None),
    "gaussws-llama2-1b": ("llama2-1b", 8 * 1 * 8, 2048, 275251.2e6, (1e-5, 1e-6), "linear", 7000, None),
}
GAUSSWS = {  # updates, sequences of a rank, data
    "gaussws-gpt2-124m": (600_000, 12, "openwebtext"),
    "gaussws-llama2-134m": (1_500_000, 12, "c4"),
    "gaussws-llama2-1b": (2_100_000, 8, "c4"),
}


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_scale_has_the_papers_hyper_parameters(name: str) -> None:
    model, batch, length, tokens, rates, kind, warmup, decay = PAPERS[name]
    trial, _ = load_trial([f"scale=paper/{name}"])
    t, optimizer, schedule = trial.training, trial.optimizer, trial.schedule
    assert trial.model == MODELS[model]
    assert (t.batch, t.length) == (batch, length)
    assert t.steps * t.batch * t.length == pytest.approx(tokens, rel=1e-5)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay, optimizer.clip) == (0.9, 0.95, 0.1, 1.0)
    assert schedule.kind == kind
    if rates is not None:
        assert (optimizer.lr, optimizer.lr * schedule.final_ratio) == pytest.approx(rates)
    if warmup is not None:
        assert (schedule.warmup_steps, schedule.warmup_fraction) == (warmup, 0)
    if decay is not None:
        assert schedule.decay_fraction == decay
    if name in GAUSSWS:
        assert (t.steps, t.micro_batch, trial.data.kind) == GAUSSWS[name]
        assert optimizer.decay_vectors == name.startswith("gaussws-llama2")  # nanoGPT decays only matrices
    if name.startswith("mor"):
        assert trial.observer.window == 6000


# ------------------------------------------------------------------------------------------------ mistakes

TINY = ["model.layers=2", "training.batch=2", "training.micro_batch=2", "training.steps=2", "evaluation.windows=2"]
MISTAKES = {  # arguments of `fewbits train`, and the parts of the message; … stands for any text between them
    # names
    "model=gpt5": "no model 'gpt5'… gpt2-124m,",
    "recipe=mor/blok": "no recipe 'mor/blok'… mor/block, mor/block-64,",
    "runtime.tracking=wandb": "runtime.tracking 'wandb'… none, mlflow",
    "precision.loss_scale=1000": "precision.loss_scale 1000.0: a power of two",
    "precision.weights=fp16": "precision.weights fp16: with training.dtype bf16",
    "precision=bf16-weights recipe=gaussws": "precision.weights bf16: sampler gaussws",
    "model=moe-nano training.compile=true": "training.compile=true: model moe-nano has experts",
    "model=moe-nano model.active_experts=5": "active_experts 5 of model 'moe-nano': …1 to experts, 4",
    "precision.every=1 training.compile=true": "precision.every 1: needs training.compile=false",
    # keys
    "modle=gpt2-nano": "unknown key 'modle': … model, ",
    "training.step=3": "unknown key 'training.step': training … steps, ",
    "+recipe.keeep.last=1": "unknown key recipe.keeep: …keep…",
    "recipe.threshold=0.1": "unknown key 'recipe.threshold': recipe has ",
    "recipe=mor/block recipe.thresold=0.1": "unknown key 'recipe.thresold': recipe … threshold, ",
    "hydra.run.dir=x": "hydra.run.dir…runtime.runs=DIR",
    "~training.steps": "training: missing keys: steps",
    # types and ranges
    "training.steps=abc": "training.steps: int is expected, not 'abc'",
    "training.steps=0": "training.steps 0: 1 or more is expected",
    # grammar
    "training.steps": "'training.steps' is not KEY=VALUE",
    "training.steps=1,2": "'training.steps=1,2': a trial takes one value… --multirun",
    "recipe.fprop.x=e4m3:tensor:amax@error<0.1|bf16": "a value that has special characters such as <: KEY='\"VALUE\"'",
    "training.steps=${nowhere}": "training.steps: Interpolation key 'nowhere' not found",
    "--steps": "train: unrecognized arguments: --steps",
    # operands
    "recipe=mor/block recipe.threshold=4.5": "did you mean 0.045?",
    "recipe=mor/block recipe.threshold=-1": "fprop.x: error threshold -1.0… finite numbers > 0",
    "recipe=mor/block recipe.block=64": "recipe.block 64: …128x128",
    "recipe=nvfp4 recipe.rht=24": "hadamard 24",
    "recipe=nvfp4 recipe.signs=plus": "signs 'plus' with hadamard 16… te, none, each or a seed",
    "recipe=nvfp4 recipe.stochastic=[dy]": "recipe.stochastic 'dy'… fprop.x, ",
    "recipe=nvfp4 recipe.rotated=[wgrad.dy]": "recipe.rotated 'wgrad.dy'… fprop, dgrad, wgrad",
    # invalid combinations
    "training.batch=5": "training.batch 5: not a multiple of training.micro_batch 2",
    "training.length=512": "training.length 512: model nemotron-nano has 256 positions",
    "recipe.keep.last=2": "recipe bf16 keeps the first 0 and last 2 of 2 blocks in high precision",
    "recipe=gaussws recipe.sampler.parts=[in]": "sampler.parts ['in']:…the model has only the parts down, out, qkv, up",
    "recipe=mor/block model.width=128 model.heads=2 model.kv_heads=2 training.length=32": (
        "recipe mor/block …128x128 block …fprop.x of"
    ),
    "schedule.warmup_steps=3": "schedule.warmup_steps=3 and schedule.warmup_fraction=0.05: set one of the two to 0",
    "schedule.warmup_steps=9 schedule.warmup_fraction=0": "warmup_steps…gives 9 warm-up updates in a trial of 2",
    "model.vocab=10": "model.vocab 10: …256 tokens",
    "data=bin data.path=/nowhere": "no folder /nowhere; …train.bin and val.bin",
    "data=text data.path=/nowhere.txt": "data.path=/nowhere.txt: No such file",
    "data=openwebtext": "make it by fewbits data openwebtext",
    "data.path=/nowhere": "data.path=/nowhere with data.kind=python, which takes only",
    "branch.parent=nowhere": "branch.parent: no run 'nowhere' has started in runs",
}


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "message"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    command: str, message: str, at_home: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = command.split(" ")
    keys = {override.partition("=")[0] for override in overrides}
    whole = keys & {"training", "~training.steps", "~model"}
    tiny = [] if whole else [setting for setting in TINY if setting.partition("=")[0] not in keys]
    data = [] if any(key.startswith("data") for key in keys) else ["data.size=65536"]
    assert cli.main(["train", f"runtime.cache={cache}", *tiny, *data, *overrides]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("fewbits: ")
    assert err.count("\n") == 1
    assert all(part in err for part in message.split("…"))
    assert "Traceback" not in err
    assert not list(at_home.iterdir())


@pytest.mark.parametrize("hash_", ["12345678", "12e45678", "1e234567", "0e000001", "abcdef12"])
def test_a_hash_that_looks_like_a_number_names_a_parent(hash_: str) -> None:
    for others in ([], ["+branch.step=4"], ["seed=3"]):
        assert resolved([f"branch.parent={hash_}", *others])["branch"]["parent"] == hash_
    assert load_trial([f"branch.parent={hash_}"])[0].branch.parent == hash_


def test_composing_leaves_hydra_as_it_was() -> None:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(FOLDER / "schedule"), version_base=None):
        load_trial(["recipe=nvfp4"])
        assert compose("cosine")["kind"] == "cosine"

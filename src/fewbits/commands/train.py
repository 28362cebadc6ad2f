"""Train one trial on this machine, with a progress line (`fewbits train`)."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fewbits.commands.sweep import add_where, in_store
from fewbits.common import terminal
from fewbits.common.arguments import CommandParser, warn_in_lines
from fewbits.common.process import handled
from fewbits.common.terminal import notice, print_table
from fewbits.common.wording import clock

if TYPE_CHECKING:
    from fewbits.experiments.session import Progress
    from fewbits.experiments.storage.run_folder import RunFolder
    from fewbits.experiments.trial import Runtime, Trial

SCORES = 12  # of tasks and texts in the last line
EXAMPLES = """\
examples:
  fewbits train model=nemotron-nano recipe=mor/block data=python scale=cpu seed=1
  fewbits train recipe=nvfp4 recipe.keep.last=2 recipe.rht=32 training.steps=500
  fewbits train branch.parent=nemotron-nano-bf16-python-s0-1a2b3c4d recipe=mxfp4 schedule=linear
  fewbits train recipe=fp8 precision=bf16-weights-stochastic precision.every=10
  torchrun --nproc-per-node 8 -m fewbits.cli train model=gpt2-124m scale=gpu runtime.device=cuda

  fewbits train -m recipe=mor/block recipe.threshold=0.03,0.045 seed=0,1
  fewbits train -m 'training.steps=range(10,50,10)' hydra.job.name=lengths    named, for `fewbits status lengths`
  fewbits train -m hydra/sweeper=optuna 'optimizer.lr=tag(log,interval(1e-4,1e-2))' hydra.sweeper.n_trials=20

Hydra overrides: GROUP=NAME chooses a config (GROUP: model, recipe, data, scale, optimizer, schedule or precision), and
KEY.FIELD=VALUE sets a field. GROUP=./mine.yaml chooses a file of your own. Configs in a folder ./conf, such as
conf/recipe/mine.yaml, are found without --config-dir.
precision=NAME chooses loss scaling and the formats of weights, states and gradients (`fewbits list precisions`).
runtime.tracking=mlflow sends the trial to MLflow; auto (the default) does, once `fewbits ui` made the store's database.
The same command resumes an interrupted trial; for a finished trial it prints the result.

With -m, the trials of a grid run as one sweep. Hydra's own sweeper runs all combinations of KEY=A,B, KEY=range(…) and
KEY=choice(…); another one, such as Optuna's, gets the validation loss of each trial (infinity if it diverged). After an
interruption, the same command runs the remaining trials; `fewbits status` lists the multiruns of a store."""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits train", __doc__, EXAMPLES)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="overrides of the config, see below")
    parser.add_argument("--config", action="store_true", help="print the resolved config and train nothing")
    parser.add_argument("--id", action="store_true", help="print the trial's id and train nothing")
    parser.add_argument("--layers", action="store_true", help="print the quantizers of each layer, train nothing")
    parser.add_store(new=True)
    group = parser.add_argument_group("options of Hydra")
    group.add_argument("-c", "--cfg", choices=("job", "hydra", "all"), help="print the composed config, train nothing")
    group.add_argument("--resolve", action="store_true", help="with --cfg: resolve interpolations")
    group.add_argument("-p", "--package", metavar="KEY", help="with --cfg: print this part, for example recipe")
    parser.add_config_dir()
    group = parser.add_argument_group("a grid of trials")
    group.add_argument("-m", "--multirun", action="store_true", help="train a grid of trials: KEY=A,B, and seed=0,1")
    add_where(group)
    options = parser.parse_intermixed_args(argv)
    for text in options.overrides:
        if text.startswith(("study=", "sweep=")):
            raise ValueError(f"train: {text} selects a sweep, not a trial: `fewbits sweep {text}` runs it")
    if options.multirun or "hydra.mode=MULTIRUN" in options.overrides:
        from fewbits.commands.multirun import run_multirun

        return run_multirun(options)
    if given := [name for name in ("address", "parallel", "env") if getattr(options, name)]:
        raise ValueError(f"train: --{given[0]} needs --multirun: a single trial runs in this process")

    from fewbits.experiments.config import load_trial
    from fewbits.experiments.config_files import with_config_dir

    overrides = with_config_dir([text for text in options.overrides if text != "hydra.mode=RUN"], options.config_dir)
    overrides = in_store(overrides, options.runs)
    if options.cfg:
        from fewbits.commands.multirun import run_hydra

        package = ["--package", options.package] if options.package else []
        run_hydra(["--cfg", options.cfg, *["--resolve"] * options.resolve, *package], overrides)
        return 0
    if options.resolve or options.package:
        raise ValueError("train: --resolve and --package need --cfg, as in --cfg job --resolve")
    trial, runtime = load_trial(overrides)
    if options.config:
        import yaml

        from fewbits.experiments.storage.run_folder import plain

        settings = trial.to_dict() | {"runtime": asdict(runtime)}
        print(yaml.safe_dump(plain(settings), sort_keys=False, allow_unicode=True), end="")
    elif options.layers:
        _print_layers(trial)
    elif options.id:
        from fewbits.experiments.session import find_folder

        print(find_folder(trial, runtime).id)
    else:
        return _train(trial, runtime)
    return 0


def _train(trial: Trial, runtime: Runtime) -> int:
    from fewbits.experiments.session import Events
    from fewbits.experiments.storage.lease import Lost
    from fewbits.experiments.training import run
    from fewbits.sweeps.tracking.mirror import Tracker

    tracker, stop = Tracker(runtime), Stop()

    class Reporter(Events):
        validation, part = "", -1  # part: a twentieth of the steps

        def saved(self, folder: RunFolder) -> None:
            tracker.saved(folder)

        def step(self, progress: Progress) -> None:
            stop.training = True
            if progress.evaluated is not None:
                self.validation = f"  validation {progress.evaluated:.4f}"
            left = clock(progress.seconds_a_step * (progress.steps - progress.step))
            text = f"step {progress.step}/{progress.steps}  loss {progress.loss:.4f}{self.validation}"
            text += f"  {progress.tokens_per_second:,.0f} tokens/s  {left} left"
            terminal.show(text)
            before, self.part = self.part, 20 * progress.step // progress.steps
            if self.part != before and not sys.stderr.isatty():
                print(text, file=sys.stderr, flush=True)

        def stopping(self) -> bool:
            stop.training = True  # on every rank
            return stop.asked

        def message(self, text: str) -> None:
            terminal.clear()
            print(text, file=sys.stderr, flush=True)

    warn_in_lines()
    try:
        with handled(stop.interrupt, signal.SIGINT):
            folder, result = run(trial, runtime, Reporter())
    except (OSError, Lost) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.strerror:
            reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        notice(f"{reason}; the same command resumes from the last checkpoint")
        return 1
    except (MemoryError, RuntimeError) as error:
        by_class = type(error).__name__ in ("MemoryError", "OutOfMemoryError")
        if not by_class and "can't allocate memory" not in str(error):  # the message of torch on a CPU
            raise
        reason = str(error).strip().partition("\n")[0]
        notice(f"out of memory, reduce training.micro_batch or choose a smaller model: {reason}")
        return 1
    except KeyboardInterrupt:
        notice("stopped; the same command resumes from the last checkpoint")
        return 130
    finally:
        terminal.clear()
        tracker.close()
    if result:
        from fewbits.experiments.storage.results import with_stored

        print(f"{folder.path}\n{summary(with_stored(folder.path, folder.result() or result))}")
    return 0


def _print_layers(trial: Trial) -> None:
    """Print a table of the weights, where `[1]` refers to the first list of quantizers and other settings below."""
    from fewbits.models.layer_table import OPERANDS, bits_per_element, layer_rate, layer_table, product_rates
    from fewbits.models.networks.registry import on_meta
    from fewbits.models.quantize import quantize
    from fewbits.models.recipe import AXES, HIGH, SLOTS, Slot, parse_operand
    from fewbits.models.weights import active_share, weights

    model = on_meta(trial.model)
    quantization = quantize(model, trial.recipe)
    kinds: dict[tuple[str, ...], str] = {}
    work: dict[str, float] = {}
    experts = {weight.name.rpartition(".")[0]: active_share(model, weight) for weight in weights(model)}
    own = {weight.name: active_share(model, weight) for weight in weights(model)}
    rows = []
    for row in layer_table(model).to_dict("records"):
        settings = tuple(str(row[key]) for key in OPERANDS)
        is_high = {*settings[: len(SLOTS)]} == {HIGH} and not row["sampler"] and not row["switch"]
        name = HIGH if is_high else kinds.setdefault(settings, f"[{len(kinds) + 1}]")
        first = re.sub(r"\.(\d+)-\d+\b", r".\1", str(row["layer"]))  # a row may stand for several experts
        active = own[first] if first in own else experts[first.rpartition(".")[0]]
        work[name] = work.get(name, 0) + row["out"] * row["in"] * row["matrices"] * active
        rows.append(
            (
                str(row["layer"]),
                f"{row['out']}x{row['in']}",
                row["part"] if isinstance(row["part"], str) else "",
                name,
                str(row["why"]),
            )
        )
    print_table(("layer", "out x in", "part", "operands", "why"), rows, right=("out x in",))
    total, seconds = sum(work.values()), work.get(HIGH, 0.0)
    for settings, name in kinds.items():
        specs = {slot: parse_operand(text, slot) for slot, text in zip(SLOTS, settings, strict=False)}
        operands = {slot: Slot(spec, AXES[slot]) for slot, spec in specs.items()}
        bits = {slot: "-".join(f"{n:g}" for n in dict.fromkeys(bits_per_element(spec))) for slot, spec in specs.items()}
        rates = ", ".join(f"{gemm} {rate:g}" for gemm, rate in product_rates(operands).items())
        seconds += work[name] / layer_rate(operands)
        print(f"\n{name}: {work[name] / total:.0%} of the FLOPs of linear layers")
        texts = [(key, text, bits.get(key, "")) for key, text in zip(OPERANDS, settings, strict=True) if text]
        print_table(("", "", "bits"), [(f"  {key}", text, n) for key, text, n in texts], right=("bits",))
        print(f"  peak rate on Blackwell, as a multiple of BF16's: {rates}")
    print(f"\n{HIGH}: {work.get(HIGH, 0) / total:.0%} of the FLOPs; all products at peak rates: {total / seconds:.2f}")
    print(f"\n{quantization.recipe.name}: {quantization.summary}")


class Stop:
    """The first Ctrl-C ends training at a checkpoint; a second, or one before training, raises KeyboardInterrupt."""

    asked = training = False

    def interrupt(self, *_: object) -> None:
        if self.asked or not self.training:
            raise KeyboardInterrupt
        self.asked = True


def summary(result: dict[str, Any]) -> str:
    """Return a result in one line: status, losses, scores of tasks and texts, share of decisions for BF16."""
    from fewbits.experiments.storage.results import numbers

    parts = [f"{result['status']} at step {result['step']}"]
    names = (("loss", "loss"), ("validation_loss", "validation"), ("ood_loss", "out of domain"))
    parts += [f"{name} {result[key]:.4f}" for key, name in names if result.get(key) is not None]
    scores = [(f"{name}.loss", measured["loss"]) for name, measured in result.get("texts", {}).items()]
    scores += [each for each in numbers(result.get("tasks", {})) if not re.search("_stderr|sample_len", each[0])]
    parts += [f"{name.removesuffix(',none')} {value:.4f}" for name, value in scores[:SCORES] if value is not None]
    parts += [f"{len(scores) - SCORES} further scores"] if len(scores) > SCORES else []
    if (share := result.get("decisions", {}).get("bf16")) is not None:
        parts.append(f"BF16 in {100 * share:.1f} % of decisions")
    return ", ".join(parts)

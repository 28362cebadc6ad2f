"""Print golden digests as a JSON object: of the results of kernels, or of the numbers of tiny trials.

    python tests/golden/digests.py kernels            those of the backend that FEWBITS_BACKEND names
    python tests/golden/digests.py cuda               a part of them, by the CUDA sources on the emulator of the tests
    python tests/golden/digests.py tiles              products and attention by the code for AMX, on emulated tiles
    python tests/golden/digests.py trials             trials of three steps

`tests.record_numerics` runs it with the sources of the checkout and, for `kernels` and `trials`, with those of an older
commit. Therefore these two use the public API, the command line, and few names that hardly change. The kernels' tensors
contain NaN, infinities, signed zeros, subnormals, midpoints, values beyond the range of every format, and blocks of
very different magnitudes.
"""

import contextlib
import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from fewbits import (
    Mixture,
    cli,
    decode,
    encode,
    fake_quantize,
    gaussian_noise,
    mix,
    product,
    sample_weight,
    uniform_noise,
)
from fewbits.experiments.optimization.schedules import KINDS, SHAPES, ScheduleConfig, factor
from fewbits.kernels.accumulators import ACCUMULATORS

FORMATS = ("e4m3", "e5m2", "e2m1", "e3m2", "e2m3", "e3m4")
BLOCKS = ("tensor", "channel", "16x16", "1x16", "1x32")
SCALINGS = ("amax", "gam", "e8m0", "mx", "nvfp4", "ue5m3", "fouroversix", "eden")
OPTIONS = ("", ":stochastic", ":rht16", ":stochastic:rht16:signs=each")
PLAIN = (
    "",
    ":stochastic",
    ":overflow=saturate",
    ":overflow=nan",
    ":overflow=inf",
)  # of quantizers without scaling
OF_SCALINGS = (
    "e2m1:1x16:nvfp4:group=row",
    "e2m1:16x16:nvfp4:group=32:factor=16/17:target=256",
    "e2m1:1x32:mx:factor=0.75",
    "e2m1:1x16:fouroversix:group=row:select=mae",
    "e2m1:16x16:fouroversix:target=448:select=max",
)
BASES = (
    dict.fromkeys((*FORMATS, "bf16", "fp16"), PLAIN)
    | {":".join(parts): OPTIONS for parts in itertools.product(FORMATS, BLOCKS, SCALINGS)}
    | dict.fromkeys(OF_SCALINGS, OPTIONS)
)
MIXTURES = (
    "e4m3:16x16:gam @ error<0.045 | bf16 ; per=tensor",
    "e4m3:16x16:gam @ error<e5m2:16x16:gam | e5m2:16x16:gam @ spread<normal | bf16 ; per=block",
)
BY_ERRORS = "int4:1x16:nvfp4 @ mse<e2m1:1x16:nvfp4 | e2m1:1x16:nvfp4 ; per=block"

ON_CUDA = (
    "e4m3",
    "bf16",
    *OF_SCALINGS,
    *(f"{f}:{b}:{s}" for f, b, s in zip(FORMATS * 2, BLOCKS * 3, SCALINGS * 2, strict=False)),
)
SPECIAL = (0.0, -0.0, 1e-40, 2.0**-9, 6.0, 6.5, 448.0, 464.0, 480.0, 57344.0, 65520.0, 1e38)
NOT_FINITE = (float("nan"), float("inf"), -float("inf"))

TINY = (
    *("model.layers=2", "data=synthetic", "data.size=65536", "runtime.device=cpu", "training.checkpoint_every=2"),
    *("training.steps=3", "training.batch=4", "training.micro_batch=2", "training.length=128", "evaluation.every=2"),
    *("evaluation.windows=2", "observer.window=2", "observer.every=1", "observer.gradients_every=2", "scale=smoke"),
)
ALL_LAYERS = ("recipe.keep.first=0", "recipe.keep.last=0")
EXECUTED = ("recipe.execute=fp8", "precision=bf16-pure", "model=llama2-nano")
TRIALS = {
    "quantizer": ("recipe=nvfp4", *ALL_LAYERS, "model=llama2-nano", "schedule=wsd"),
    "mixture": ("recipe=mor/block", "recipe.block=32x32", "model=gpt2-nano", "optimizer=adam-mini"),
    "sampler": ("recipe=gaussws", "recipe.sampler.penalty=0.01"),
    "stochastic": ("recipe=bf16", "precision=bf16-weights-stochastic"),
    "fp16": ("recipe=bf16", "precision=fp16"),
    "executed": (*("recipe=fp8", *ALL_LAYERS, "recipe.weights=channel", "recipe.block=channel"), *EXECUTED),
    "hybrid": ("recipe=mxfp8", "model=hybrid-nano", "model.layers=4", "model.pattern=M-*-", "schedule=linear"),
    "experts": ("recipe=nvfp4", *ALL_LAYERS, "model=moe-nano", "optimizer=muon"),
    "requantized": ("recipe=quartet-ii", "model=gpt2-nano"),
    "hooked": ("recipe=averis", "recipe.delayed.slots=[fprop.w,dgrad.w]", "recipe.delayed.hold=2", "model=llama2-nano"),
    "branch": ("recipe=mxfp4", *ALL_LAYERS, "model=llama2-nano", "branch.parent={quantizer}", "branch.step=3"),
    "probe": (
        *("recipe=nvfp4", *ALL_LAYERS, "model=llama2-nano", "branch.parent={quantizer}", "branch.step=3"),
        *("probe.seeds=2", "probe.parts=[gemms]", "training.batch=2"),
    ),
}

# The columns of a trial's tables whose numbers count.
COLUMNS = (
    *("loss", "loss_max", "gradient_norm", "validation_loss", "ood_loss", "parameter_norm", "increase", "reference"),
    *("error", "error_max", "flushed", "saturated", "lost", "gradient_error", "gradient_cosine", "bias", "noise"),
    *("cross_gradient", "cross_error", "cross_progress", "decrease_own_exact", "decrease_own_quantized"),
)


def tensors() -> dict[str, torch.Tensor]:
    """Return two FP32 operands by name: `finite`, and `wild`, which also contains NaN and infinities."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-20, 12, (64, 6), generator=generator).float()).repeat_interleave(16, dim=1)
    finite = torch.randn(64, 96, generator=generator) * sizes
    finite[3, : len(SPECIAL)] = torch.tensor(SPECIAL)
    finite[4, : len(SPECIAL)] = -torch.tensor(SPECIAL)
    finite[16:32, 16:32] = 0
    wild = finite.clone()
    wild[5, : len(NOT_FINITE)] = torch.tensor(NOT_FINITE)
    return {"finite": finite, "wild": wild}


def digest(*values: torch.Tensor | None) -> str:
    """Return a digest of the bits of these tensors, in which every NaN is the same."""
    result = hashlib.sha256()
    for value in values:
        if value is not None:
            value = value.detach().reshape(-1)
            value = torch.where(value.isnan(), torch.nan, value) if value.is_floating_point() else value
            result.update(str(value.dtype).encode() + value.view(torch.uint8).numpy().tobytes())
    return result.hexdigest()[:16]


def attempts(compute: Callable[..., str]) -> Iterator[str]:
    """Yield the result of `compute` with a seed or, if that is refused, without one; nothing if both are refused."""
    for seed in (7, None):
        try:
            yield compute(seed=seed)
            return
        except ValueError:
            continue


def rounded(x: torch.Tensor, name: str, axis: int, seed: int | None) -> str:
    return digest(fake_quantize(x, name, axis=axis, seed=seed))


def packed(x: torch.Tensor, name: str, axis: int, seed: int | None) -> str:
    parts = encode(x, name, axis=axis, seed=seed)
    return digest(parts.codes, parts.scales, parts.group_scales, decode(parts))


def quantized(base: str, options: tuple[str, ...]) -> str | None:
    """Return a digest of all results of a quantizer with these options; None if it accepts no call."""
    results = []
    for (kind, x), dtype in itertools.product(tensors().items(), (torch.bfloat16, torch.float32)):
        for option, axis in itertools.product(options, (0, 1)):
            for compute in (rounded, packed)[: 1 + (dtype == torch.bfloat16 and option in OPTIONS[:2])]:
                for text in attempts(partial(compute, x.to(dtype), f"{base}{option}", axis)):
                    results.append(f"{compute.__name__} {kind} {dtype} {option} {axis} {text}")
    return hashlib.sha256("\n".join(results).encode()).hexdigest()[:16] if results else None


def kernels(bases: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    rows = {base: text for base, options in bases.items() if (text := quantized(base, options)) is not None}
    for text in (*MIXTURES, BY_ERRORS):
        with contextlib.suppress(ValueError):  # older sources lack a test
            mixture = Mixture.parse(text)
            parts = [mix(x.to(t), mixture) for x in tensors().values() for t in (torch.bfloat16, torch.float32)]
            rows[text] = digest(*(part for pair in parts for part in pair))
    rows["noise"] = digest(gaussian_noise(4096, seed=7), uniform_noise(4096, seed=7))
    weight, bits = tensors()["finite"][32:].clone(), torch.linspace(3, 8, 2 * 6).reshape(2, 6)
    rows["sampled weight"] = digest(sample_weight(weight, bits, seed=7, block=16))
    return rows | products()


def products() -> dict[str, str]:
    """Return a digest of products by each accumulator, whose operands have very different magnitudes."""
    values = fake_quantize(tensors()["finite"][:, :64], "e2m1:1x16:nvfp4")
    a, b = values.clamp(-448, 448), values.T.contiguous().clamp(-448, 448)
    scales = torch.full((64, 4), 0.5).to(torch.float8_e4m3fn), torch.full((4, 64), 2.0).to(torch.float8_e4m3fn)
    four = (fake_quantize(a, "e2m1:tensor:none"), fake_quantize(b, "e2m1:tensor:none"))
    rows = {}
    for name in (name for name, row in ACCUMULATORS.items() if row.kind != "integer"):
        if name == "blackwell-fp4":
            result = product(*four, name, scales=scales)
        elif name in ("fp32", "fp16", "bf16"):
            result = product(a, b, name)
        else:
            kind = torch.bfloat16 if name == "hopper-bf16" else torch.float8_e4m3fn
            result = product(a.to(kind), b.to(kind), name)
        rows[f"product {name}"] = digest(result)
    return rows


def schedules() -> str:
    """Return a digest of the learning rates of all schedules and shapes of their decay."""
    kinds = [(kind, "linear") for kind in KINDS] + [("wsd", shape) for shape in SHAPES]
    configs = [ScheduleConfig(kind, warmup_steps=3, decay_shape=shape, final_ratio=0.1) for kind, shape in kinds]
    factors = [[factor(config, step, 40) for step in range(40)] for config in configs]
    return digest(torch.tensor(factors, dtype=torch.float64))


def tiles() -> dict[str, str]:
    from fewbits.kernels.backends import cpu
    from fewbits.kernels.layers import attention
    from fewbits.kernels.products import matmul_fp32
    from tests.kernels.emulation import library_with_tiles

    compiled, generator = cpu.library(), torch.Generator().manual_seed(0)
    gemm, own = library_with_tiles("cpu_gemm.cpp"), library_with_tiles("cpu_attention.cpp")
    gemm.fb_matmul_fp32.argtypes = compiled.fb_matmul_fp32.argtypes
    cpu.library = lambda: gemm  # type: ignore[assignment]
    pairs = [
        [torch.randn(shape, generator=generator).bfloat16() for shape in ((m, k), (k, n))]
        for m, k, n in ((64, 128, 96), (33, 513, 47), (5, 5, 1))
    ]
    products = digest(*(matmul_fp32(a, b) for a, b in pairs))
    attention.__dict__.update(library=lambda: own, threads=lambda elements: 1)
    q, k, v = (torch.randn(2, 40, n, 32, generator=generator).bfloat16().requires_grad_() for n in (4, 2, 2))
    result = attention.causal_attention(q, k, v)
    result.backward(torch.randn(result.shape, generator=generator).bfloat16())
    return {"products on AMX tiles": products, "attention on AMX tiles": digest(result, q.grad, k.grad, v.grad)}


def trials() -> dict[str, str]:
    """Train the trials of TRIALS; return a digest of the numbers that each wrote."""
    import pandas as pd
    from safetensors.torch import load_file

    rows: dict[str, str] = {}
    folders: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, chosen in TRIALS.items():
            runs = Path(folder, name)
            overrides = [text.format(**folders) for text in (*TINY, *chosen)]
            if status := cli.main(["train", *overrides, f"runtime.runs={runs}"]):
                raise SystemExit(status)
            (folders[name],) = runs.iterdir()
            numbers = []
            for file in folders[name].rglob("*.safetensors"):
                numbers += [digest(value) for key, value in load_file(file).items() if key.startswith("model.")]
            for file in folders[name].glob("*.parquet"):
                table = pd.read_parquet(file)
                numbers += [
                    digest(torch.tensor(table[key].astype(float).to_numpy())) for key in COLUMNS if key in table
                ]
            rows[name] = hashlib.sha256("\n".join(sorted(numbers)).encode()).hexdigest()[:16]
    return rows | {"schedules": schedules()}


def main(which: str) -> None:
    torch.set_num_threads(1)
    sys.stdout, out = sys.stderr, sys.stdout  # `fewbits train` prints, too
    if which == "kernels":
        rows = kernels(BASES)
    elif which == "cuda":
        from fewbits.kernels.backends.choice import replaced_by
        from tests.kernels.backends.gpu import emulated, stubbed

        bases = {base: BASES[base] for base in ON_CUDA}
        if stubbed.unavailable():
            with replaced_by(emulated.emulated_device()[0]):
                rows = kernels(bases)
        else:
            with (
                tempfile.TemporaryDirectory() as cache,
                pytest.MonkeyPatch.context() as patch,
                stubbed.stubbed(patch, Path(cache)) as stub,
                replaced_by(stub.device),
            ):
                rows = kernels(bases)
    else:
        rows = tiles() if which == "tiles" else trials()
    print(json.dumps(rows), file=out)


if __name__ == "__main__":
    sys.path.insert(0, os.fspath(Path(__file__).parents[2]))
    main(sys.argv[1])

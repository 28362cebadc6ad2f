"""Train a model in NVFP4 with TransformerEngine's reference and with fewbits, from equal weights on equal batches.

    pip download --no-deps transformer-engine==2.20.2
    python docs/measured/another-code.py transformer_engine-2.20.2-py3-none-any.whl > docs/measured/another-code.txt

TransformerEngine's file `reference_nvfp4.py` is plain torch code: a quantizer, and a product of FP4 codes block by
block. The rest of the package needs a GPU, so this script loads only that file and two files that it imports, with
replacements for its base classes. The reference rounds gradients to nearest; therefore fewbits does so here, too. All
blocks of the model are quantized. fewbits uses the same signs in the Hadamard transform as TransformerEngine.

The script first compares the operands and products of one layer, and then the losses of trainings. `te` is
TransformerEngine's module `reference_nvfp4`, `theirs` its results, and `ours` those of fewbits.
"""

import argparse
import importlib.util
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fewbits import fake_quantize, load_recipe, quantize
from fewbits.experiments.config import load_trial
from fewbits.experiments.data.load import load
from fewbits.experiments.data.once import default_cache
from fewbits.experiments.optimization.optimizers import OptimizerConfig, clip_gradients, make_optimizer
from fewbits.models.networks.decoder import Decoder
from fewbits.models.networks.registry import build
from fewbits.models.quantize import linear_layers

PACKAGE = "transformer_engine.pytorch.custom_recipes"
MODEL, BATCH, LENGTH, SHOWN = "nemotron-nano", 4, 128, 10  # SHOWN: steps whose mean loss is printed as one row
X, W, ROTATED = "e2m1:1x16:nvfp4", "e2m1:16x16:nvfp4", "e2m1:1x16:nvfp4:rht16"

Linear = Callable[[Tensor, Tensor], Tensor]  # a linear layer as a function: (input, weight) → output


# -------------------------------------------------------------------------------- TransformerEngine's reference


class Storage:
    """A replacement for the base class of TransformerEngine's quantized tensors, which does no arithmetic."""


class Quantizer:
    """A replacement for the base class of TransformerEngine's quantizers; the reference reads these settings."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


def reference(wheel: Path) -> Any:
    """Return TransformerEngine's module `reference_nvfp4`, loaded from the package's wheel."""
    names = (PACKAGE.split(".")[0], *(f"{PACKAGE.rsplit('.', 1)[0]}{end}" for end in ("", ".tensor")), PACKAGE)
    for name in names:
        sys.modules[name] = ModuleType(name)
    base = f"{PACKAGE.rsplit('.', 1)[0]}"
    _module(f"{base}.quantized_tensor", QuantizedTensorStorage=Storage, Quantizer=Quantizer)
    _module(f"{base}.tensor.utils", is_custom=lambda *_: True)
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        for name in ("reference_utils", "gemm", "reference_nvfp4"):
            source = Path(folder, *PACKAGE.split("."), f"{name}.py")
            spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", source)
            assert spec
            assert spec.loader
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            setattr(sys.modules[PACKAGE], name, module)
            spec.loader.exec_module(module)
    return sys.modules[f"{PACKAGE}.reference_nvfp4"]


def _module(name: str, **content: object) -> None:
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(content)


def quantizers(te: Any) -> tuple[Any, Any]:
    """Return TransformerEngine's quantizer for activations and gradients, and its quantizer for weights."""
    e2m1 = te.reference_utils.Fp4Formats.E2M1
    return te.NVFP4QuantizerRef(e2m1, with_rht=True), te.NVFP4QuantizerRef(e2m1, quant_tile_shape=(16, 16))


def values(te: Any, codes: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
    """Return the values of FP4 codes in FP32: (value of the code) · (scale of its block) · amax / (6 · 448).

    A block has 16 codes. amax: the largest magnitude of the whole tensor.
    """
    return te.cast_from_fp4x2(codes, torch.float32) * scales.float().repeat_interleave(16, 1) * (amax / (6 * 448))


class TheirLinear(torch.autograd.Function):
    """A linear layer whose three products (fprop, dgrad, wgrad) TransformerEngine's reference computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, te: Any) -> Tensor:
        activations, weights = quantizers(te)
        qx, qw = activations.quantize(x.flatten(0, -2)), weights.quantize(w.to(x.dtype))
        ctx.kept, ctx.shape = (te, activations, qx, qw), x.shape
        y = _product(te, activations, "FPROP", x.dtype, qx, qx.data, qx.scale, qw, qw.data, qw.scale)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        te, activations, qx, qw = ctx.kept
        q = activations.quantize(dy.flatten(0, -2))
        dx = _product(te, activations, "DGRAD", dy.dtype, q, q.data, q.scale, qw, qw.data_t, qw.scale_t)
        dw = _product(te, activations, "WGRAD", torch.float32, q, q.data_t, q.scale_t, qx, qx.data_t, qx.scale_t)
        return dx.view(ctx.shape), dw, None


def _product(
    te: Any, by: Any, gemm: str, dtype: torch.dtype, a: Any, a_codes: Tensor, a_scales: Tensor, b: Any, *of_b: Tensor
) -> Tensor:
    return by.qgemm(
        a_codes,
        of_b[0],
        te.gemm.MMParams(),
        dtype,
        a_scales,
        of_b[1],
        gemm_type=te.gemm.GEMMType[gemm],
        qresult_x=a,
        qresult_w=b,
    )


# -------------------------------------------------------------------------------- ours, without rounding operands


class UnroundedLinear(torch.autograd.Function):
    """A linear layer with fewbits' quantizers whose quantized operands are not rounded to BF16 before the product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.kept, ctx.shape = (x.flatten(0, -2), w.to(x.dtype)), x.shape
        rows, weight = ctx.kept
        return (_wide(rows, X) @ _wide(weight, W).t()).to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        (rows, weight), dy = ctx.kept, dy.flatten(0, -2)
        dx = (_wide(dy, X) @ _wide(weight, W)).to(dy.dtype)
        # As in TransformerEngine, the Hadamard transform is rounded to BF16; the quantized values are not.
        a, b = (_wide(rotated(tensor), X) for tensor in (dy, rows))
        return dx.view(ctx.shape), a @ b.t()


def _wide(x: Tensor, quantizer: str) -> Tensor:
    """Return x, quantized and not rounded to BF16 afterwards, in FP32."""
    return fake_quantize(x.float(), quantizer)


SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def rotated(x: Tensor) -> Tensor:
    """Apply the Hadamard transform to every 16 neighbouring rows (tokens) of x, and return the transpose.

    The result has the dtype of x (BF16).
    """
    h = torch.ones(1, 1)
    while len(h) < 16:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    h = torch.tensor(SIGNS).float()[:, None] * h / 4
    return (x.t().float().reshape(-1, 16) @ h).view(x.shape[1], -1).to(x.dtype)


# -------------------------------------------------------------------------------- comparisons


def compare_layer(te: Any) -> None:
    """Print how one linear layer's quantized operands and products differ between TransformerEngine and fewbits."""
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(512, n, generator=g).bfloat16() for n in (192, 384))
    x[torch.rand(512, 192, generator=g) < 0.01] *= 20  # 1 % of the inputs are outliers
    w = (0.02 * torch.randn(384, 192, generator=g)).bfloat16()
    activations, weights = quantizers(te)
    qx, qw, qdy = activations.quantize(x), weights.quantize(w), activations.quantize(dy)
    print("operands: the share of values that differ from ours, after theirs are rounded to BF16, and relative")
    print("differences of theirs from ours in BF16 and in FP32")
    for name, q, tensor in (("x", qx, x), ("w", qw, w), ("dy", qdy, dy)):
        across, along = (W, W) if name == "w" else (X, ROTATED)
        turned = tensor.t().contiguous() if name == "w" else rotated(tensor)
        theirs = values(te, q.data, q.scale, q.global_amax_row)
        _compare(f"{name} by rows", theirs, fake_quantize(tensor, across), _wide(tensor, across))
        theirs = values(te, q.data_t, q.scale_t, q.global_amax_col)
        _compare(f"{name} by columns", theirs, fake_quantize(tensor.t().contiguous(), along), _wide(turned, across))
    print("\nproducts: relative difference from theirs")
    layer = torch.nn.Parameter(w.float())
    for name, other in (("ours", OurLinear(w.shape)), ("ours, operands not rounded", UnroundedLinear.apply)):
        wants, gots = (_products(run, x, layer, dy) for run in (partial(_their, te), other))
        row = (f"{gemm} {float((a - b).norm() / b.norm()):.1e}" for gemm, a, b in zip(GEMMS, gots, wants, strict=True))
        print(f"  {name:28}", "  ".join(row))


GEMMS = ("fprop", "dgrad", "wgrad")


def _compare(name: str, theirs: Tensor, ours: Tensor, unrounded: Tensor) -> None:
    differ = (theirs.to(ours.dtype) != ours).float().mean()
    changes = [float((theirs - one.float()).norm() / theirs.norm()) for one in (ours, unrounded)]
    print(f"  {name:28} {float(differ):.2%}  {changes[0]:.1e}  {changes[1]:.1e}")


def _their(te: Any, x: Tensor, w: Tensor) -> Tensor:
    return TheirLinear.apply(x, w, te)


class OurLinear:
    """A linear layer that fewbits quantizes, as a function of its input and weight."""

    def __init__(self, shape: torch.Size) -> None:
        self.layer = torch.nn.Sequential(torch.nn.Linear(shape[1], shape[0], bias=False))
        quantize(self.layer, _recipe())

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.func.functional_call(self.layer, {"0.weight": w}, (x,))


def _recipe() -> Any:
    return load_recipe("nvfp4", {"stochastic": [], "keep.last": 0})


def _products(linear: Linear, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    y = linear(x, w)
    return tuple(one.detach().float() for one in (y, *torch.autograd.grad(y, (x, w), dy)))


def train(steps: int, change: Callable[[Decoder], None], seed: int) -> list[float]:
    """Train MODEL after `change`, for example a quantization, was applied to it; return the loss of each step."""
    trial, _ = load_trial([f"model={MODEL}", "data=python"])
    corpus = load(trial.data, default_cache())
    model = build(MODEL, seed=seed)
    change(model)
    optimizer = make_optimizer(model, OptimizerConfig(lr=1e-3))
    losses = []
    for step in range(steps):
        loss = model.loss(*corpus.batch("train", step * BATCH, BATCH, LENGTH, seed))
        loss.backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def with_linear(linear: Linear, model: Decoder) -> None:
    """Make the linear layers in the model's blocks return `linear(input, weight)`, each with its own weight."""
    for one in linear_layers(model):
        one.linear.forward = partial(_call, linear, one.linear)  # type: ignore[method-assign]


def _call(linear: Linear, layer: torch.nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight)


def with_recipe(model: Decoder) -> None:
    quantize(model, _recipe())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    te = reference(options.wheel)
    compare_layer(te)
    runs: dict[str, Callable[[Decoder], None]] = {
        "bf16": lambda model: None,
        "theirs": partial(with_linear, partial(_their, te)),
        "ours": with_recipe,
        "ours, not rounded": partial(with_linear, UnroundedLinear.apply),
    }
    for seed in range(options.seeds):
        curves = {name: train(options.steps, change, seed) for name, change in runs.items()}
        print(
            f"\n{MODEL}, seed {seed}, {BATCH * LENGTH} bytes a step: mean losses; of ours, the change from theirs in %"
        )
        print("  steps ", *(f"{name:>18}" for name in curves))
        for begin in range(0, options.steps, SHOWN):
            bf16, theirs, *others = (sum(curve[begin : begin + SHOWN]) / SHOWN for curve in curves.values())
            row = [f"{bf16:18.4f}", f"{theirs:18.4f}", *(f"{100 * (one / theirs - 1):+18.3f}" for one in others)]
            print(f"  {begin + SHOWN:5} ", *row, flush=True)


if __name__ == "__main__":
    main()

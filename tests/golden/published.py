"""Record what published NVFP4 quantizers return, in tests/golden/published.safetensors, which test_published.py reads.

    pip install --no-deps --target FOLDER transformer-engine==2.20.2
    python tests/golden/published.py FOLDER

The sdist of fouroversix 1.0.5 builds CUDA code, so its package (`src/fouroversix`) is copied to FOLDER as well. Only
the plain torch references of both packages run, on a CPU: `custom_recipes/reference_nvfp4.py` and
`quantize/pytorch/reference.py`. Stand-ins replace the modules that they import and that need a GPU.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FILE = Path(__file__).with_suffix(".safetensors")
VERSIONS = {"transformer-engine": "2.20.2", "fouroversix": "1.0.5"}
FOUR_OVER_SIX = {"nvfp4_use_4over6": True}


def inputs() -> dict[str, Tensor]:
    """Return BF16 matrices: Gaussian, with heavy tails, of midpoints of E2M1, and with very different rows."""
    generator = torch.Generator().manual_seed(62)
    normal = torch.randn(32, 256, generator=generator)
    tails = torch.randn(32, 256, generator=generator) / torch.rand(32, 256, generator=generator).clamp(min=0.02)
    midpoints = torch.randint(-24, 25, (32, 256), generator=generator) / 4 + 1e-3
    sizes = torch.exp2(torch.randint(-8, 8, (32, 1), generator=generator).float())
    midpoints[:, ::16] = torch.tensor([6.0, 4.0, 3.5, 7.0]).repeat(4)
    matrices = {"normal": normal, "tails": tails, "midpoints": midpoints, "rows": normal.flip(0) * sizes}
    return {name: x.bfloat16() for name, x in matrices.items()}


def module(name: str, file: Path, **stands_in: Any) -> Any:
    """Import one file of a package, with modules of these names that have these attributes in place of others."""
    for other, attributes in stands_in.items():
        made = ModuleType(other.replace("__", "."))
        made.__dict__.update(attributes, __path__=[])
        sys.modules[made.__name__] = made
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def transformer_engine(folder: Path) -> dict[str, Tensor]:
    base, own = folder / "transformer_engine" / "pytorch", "transformer_engine.pytorch.custom_recipes"

    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    gemm = SimpleNamespace(MMParams=None, GEMMType=SimpleNamespace(FPROP=0))
    utils = module(f"{own}.reference_utils", base / "custom_recipes" / "reference_utils.py")
    reference = module(
        f"{own}.reference_nvfp4",
        base / "custom_recipes" / "reference_nvfp4.py",
        transformer_engine={},
        transformer_engine__pytorch={},
        transformer_engine__pytorch__custom_recipes={"gemm": gemm, "reference_utils": utils},
        transformer_engine__pytorch__quantized_tensor={"QuantizedTensorStorage": object, "Quantizer": Quantizer},
    )
    cases: dict[str, dict[str, Any]] = {
        "e2m1:1x16:nvfp4": {},
        "e2m1:16x16:nvfp4": {"quant_tile_shape": (16, 16)},
        "e2m1:1x16:nvfp4:group=row": {"row_scaled_nvfp4": True},
    }
    for mode, bound in ((mode, bound) for mode in ("mae", "mse") for bound in (256, 448)):
        options = FOUR_OVER_SIX | {"nvfp4_4over6_err_mode": mode.upper(), "nvfp4_e4m3_max": bound}
        name = f"fouroversix:target={bound}:select={mode}"
        cases[f"e2m1:1x16:{name}"] = options
        cases[f"e2m1:16x16:{name}"] = options | {"quant_tile_shape": (16, 16)}
        cases[f"e2m1:1x16:{name}:group=row"] = options | {"row_scaled_nvfp4": True}
    rows = {}
    for (spec, options), (name, x) in ((case, matrix) for case in cases.items() for matrix in inputs().items()):
        q = reference.NVFP4QuantizerRef(utils.Fp4Formats.E2M1, columnwise=False, **options)
        codes, scales, *_ = q._quantize(x)
        scales = scales[::16] if "16x16" in spec else scales
        rows[f"transformer-engine {name} {spec}"] = torch.cat(
            [codes.flatten(), scales.contiguous().view(torch.uint8).flatten()]
        )
    return rows


def fouroversix(folder: Path) -> dict[str, Tensor]:
    base = folder / "fouroversix"
    utils = module("fouroversix.utils", base / "utils.py", fouroversix={}, fouroversix__quantize={})
    blocked = {"to_blocked": None}
    reference = module(
        "fouroversix.quantize.pytorch.reference",
        base / "quantize" / "pytorch" / "reference.py",
        fouroversix__quantize__utils=blocked,
    )
    cases: dict[str, dict[str, Any]] = {
        "int4:1x16:nvfp4": {"fp4_format": "nvint4", "scale_rule": "static_6"},
    }
    for own, rule in (("mse", "mse"), ("mae", "mae"), ("max", "abs_max")):
        cases[f"e2m1:1x16:fouroversix:select={own}"] = {"fp4_format": "nvfp4", "scale_rule": rule}
        cases[f"e2m1:16x16:fouroversix:select={own}"] = {
            "fp4_format": "nvfp4",
            "scale_rule": rule,
            "block_scale_2d": True,
        }
        cases[f"int4:1x16:nvfp4 @ {own}<e2m1:1x16:nvfp4 | e2m1:1x16:nvfp4 ; per=block"] = {
            "fp4_format": "if4",
            "scale_rule": rule,
        }
    rows = {}
    # In `rows`, scales of E4M3 are so small that scaled values exceed 7, for which this code makes no valid codes.
    matrices = {name: x for name, x in inputs().items() if name != "rows"}
    for (spec, options), (name, x) in ((case, matrix) for case in cases.items() for matrix in matrices.items()):
        rule, kind = utils.ScaleRule(options["scale_rule"]), utils.DataType(options["fp4_format"])
        q, scales, _ = reference.quantize_to_fp4(
            x,
            fp4_format=kind,
            scale_rule=rule,
            block_scale_2d=options.get("block_scale_2d", False),
            use_blackwell_scale_layout=False,
        )
        scales = scales.view(torch.uint8)
        if "16x16" in spec:
            scales = scales.view(32, 16)[::16].contiguous().flatten()
        rows[f"fouroversix {name} {spec}"] = torch.cat([q.flatten(), scales.flatten()])
    return rows


def main(folder: Path) -> None:
    rows = transformer_engine(folder) | fouroversix(folder)
    tensors = {f"input {name}": x for name, x in inputs().items()} | rows
    save_file(tensors, FILE, {"versions": json.dumps(VERSIONS), "torch": torch.__version__, "made by": __doc__ or ""})


if __name__ == "__main__":
    main(Path(sys.argv[1]))

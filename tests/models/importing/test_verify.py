"""`fewbits verify`: healthy checkpoints pass, planted defects are found, and hostile files are refused in one line."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import save_file
from torch import Tensor

from fewbits import cli
from fewbits.kernels.conformance import stored
from fewbits.kernels.dialects import DIALECTS, evaluate
from fewbits.kernels.packed import encode
from fewbits.kernels.packing import swizzle
from fewbits.kernels.quantizer import Quantizer
from fewbits.models.importing import verify
from fewbits.models.importing.gguf import _blocks
from fewbits.models.importing.verify import _matches
from tests.kernels.inputs import generator
from tests.models.importing.gguf_writer import write_gguf

Tensors = dict[str, Tensor]
ROWS, COLS = 128, 128
NAMES = ("layers.0.down", "layers.1.down")
SUFFIXES = {
    "compressed-tensors-nvfp4": {"codes": "weight_packed", "scales": "weight_scale", "tensor": "weight_global_scale"},
    "compressed-tensors-mxfp4": {"codes": "weight_packed", "scales": "weight_scale"},
    "modelopt-nvfp4": {"codes": "weight", "scales": "weight_scale", "tensor": "weight_scale_2"},
    "torchao-nvfp4": {"codes": "_weight_qdata", "scales": "_weight_scale", "tensor": "_weight_per_tensor_scale"},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "compressed-tensors-nvfp4": {"quant_method": "compressed-tensors", "ignore": ["re:.*lm_head"]},
    "compressed-tensors-mxfp4": {"quant_method": "compressed-tensors", "ignore": ["lm_head"]},
    "modelopt-nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_*"]},
    "torchao-nvfp4": {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "NVFP4WeightOnlyConfig"}},
        "modules_to_not_convert": ["lm_head"],
    },
}


def packed(name: str, weights: Tensors) -> Tensors:
    tensors = {"lm_head.weight": torch.ones(4, 8, dtype=torch.bfloat16)}
    for module, weight in weights.items():
        parts = stored(evaluate(weight, DIALECTS[name]), DIALECTS[name], (ROWS, COLS))
        if "nvfp4" in name:
            parts["scales"] = parts["scales"].view(torch.float8_e4m3fn)
        for part, suffix in SUFFIXES[name].items():
            tensors[f"{module.removesuffix('.weight')}.{suffix}"] = parts[part]
    return tensors


def write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def weights() -> Tensors:
    return {f"{name}.weight": torch.randn(ROWS, COLS, generator=generator(i)) / 8 for i, name in enumerate(NAMES)}


def swizzled(scales: Tensor) -> Tensor:
    flat = torch.empty(scales.numel(), dtype=torch.uint8)
    flat[swizzle(scales.shape[0], scales.shape[1], scales.device)] = scales.view(torch.uint8)
    return flat.view(scales.shape).view(scales.dtype)


@pytest.mark.parametrize("name", SUFFIXES)
def test_a_healthy_checkpoint_passes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "source", {**weights(), "rotary.inv_freq": torch.ones(4)}, {})
    folder = write(tmp_path / "packed", packed(name, weights()), CONFIGS[name])
    assert cli.main(["verify", str(folder), "--source", str(tmp_path / "source"), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["healthy"], verdict["findings"]) == (True, [])
    assert [row[0] for row in verdict["rows"]] == list(NAMES)
    assert all(0.05 < row[3] < 0.15 for row in verdict["rows"])


def test_swizzled_scales_of_torchao_are_healthy_and_inverted_ones_are_found(tmp_path: Path) -> None:
    source, tensors = write(tmp_path / "source", weights(), {}), packed("torchao-nvfp4", weights())
    for name in NAMES:
        tensors[f"{name}._weight_scale"] = swizzled(tensors[f"{name}._weight_scale"]).view(32, -1)
    verdict = verify.verify(write(tmp_path / "packed", tensors, CONFIGS["torchao-nvfp4"]), source)
    assert not verdict.findings
    assert all(row[3] and 0.05 < row[3] < 0.15 for row in verdict.rows)
    ragged = {"down.weight": torch.randn(130, 80, generator=generator(3))}
    parts = stored(evaluate(ragged["down.weight"], DIALECTS["torchao-nvfp4"]), DIALECTS["torchao-nvfp4"], (130, 80))
    scales = torch.zeros(2 * 2 * 512, dtype=torch.uint8)
    scales[swizzle(130, 5, scales.device)] = parts["scales"].view(torch.uint8)
    padded = {
        "down._weight_qdata": parts["codes"],
        "down._weight_scale": scales.view(64, 32).view(torch.float8_e4m3fn),
        "down._weight_per_tensor_scale": parts["tensor"],
    }
    verdict = verify.verify(
        write(tmp_path / "ragged", padded, CONFIGS["torchao-nvfp4"]), write(tmp_path / "wide", ragged, {})
    )
    assert not verdict.findings
    assert verdict.rows[0][3]
    assert 0.05 < verdict.rows[0][3] < 0.15
    tensors[f"{DOWN}._weight_per_tensor_scale"] = 1 / tensors[f"{DOWN}._weight_per_tensor_scale"]
    verdict = verify.verify(write(tmp_path / "packed", tensors, CONFIGS["torchao-nvfp4"]), source)
    assert {finding.name for finding in verdict.findings} == {DOWN}
    assert any("inverted" in finding.text for finding in verdict.findings)


def test_links_of_a_download_cache_are_followed_into_its_own_blobs_only(tmp_path: Path) -> None:
    folder = tmp_path / "models--a--b" / "snapshots" / "0123"
    folder.parent.mkdir(parents=True)
    write(folder, packed("modelopt-nvfp4", weights()), CONFIGS["modelopt-nvfp4"])
    (folder.parent.parent / "blobs").mkdir()
    blob = (folder / "model.safetensors").rename(folder.parent.parent / "blobs" / "4567")
    (folder / "model.safetensors").symlink_to(blob)
    assert len(verify.verify(folder).rows) == len(NAMES)
    blob.rename(tmp_path / "4567")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "4567")
    with pytest.raises(ValueError, match="outside"):
        verify.verify(folder)


@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4"])
def test_gguf_files_are_checked(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantization = GGMLQuantizationType[kind]
    weight = torch.randn(ROWS, COLS, generator=generator(1)).numpy()
    scale = np.ones(1, np.float32)
    if kind == "NVFP4":  # which the package only decodes
        stored = encode(torch.from_numpy(weight), Quantizer.parse("e2m1:1x16:nvfp4"))
        assert stored.group_scales is not None
        codes, scale = _blocks("w", stored)[0].numpy(), stored.group_scales.numpy()
    else:
        codes = quants.quantize(weight, quantization)
    plain = {"w.weight": (GGMLQuantizationType.F32.value, weight.shape, weight.tobytes())}
    source = write_gguf(tmp_path / "source.gguf", {}, plain)
    file = tmp_path / "packed.gguf"

    def verdict() -> str:
        tensors = {"w.weight": (quantization.value, weight.shape, codes.tobytes())}
        write_gguf(file, {}, tensors | {"w.scale": (GGMLQuantizationType.F32.value, scale.shape, scale.tobytes())})
        status = cli.main(["verify", str(file), "--source", str(source)])
        output = capsys.readouterr().out
        assert status == (0 if "healthy" in output else 1)
        return output

    assert "healthy" in verdict()
    healthy, healthy_scale, codes = codes, scale, codes.copy()
    codes[3, 0] = 0 if kind == "NVFP4" else 255
    assert ("block scales 0" if kind == "NVFP4" else "NaN") in verdict()
    codes, scale = healthy, np.full(1, 1e-12, np.float32)
    assert "inverted" in verdict()
    codes, scale = np.roll(healthy, 1, 0), healthy_scale
    assert "against the source" in verdict()


DOWN = NAMES[1]
DEFECTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing layer": (
        lambda t: [t.pop(f"{DOWN}.{suffix}") for suffix in SUFFIXES["compressed-tensors-nvfp4"].values()],
        "is in the source, but not here",
    ),
    "NaN in another tensor": (lambda t: t["lm_head.weight"].fill_(math.nan), "has infinite values or NaN"),
    "missing scale": (lambda t: t.pop(f"{DOWN}.weight_scale"), "no weight_scale"),
    "missing tensor scale": (lambda t: t.pop(f"{DOWN}.weight_global_scale"), "no tensor scale"),
    "zero tensor scale": (lambda t: t[f"{DOWN}.weight_global_scale"].zero_(), "tensor scale 0"),
    "inverted tensor scale": (lambda t: t[f"{DOWN}.weight_global_scale"].reciprocal_(), "looks inverted"),
    "half of the scales": (
        lambda t: t.update({f"{DOWN}.weight_scale": t[f"{DOWN}.weight_scale"][:, ::2].contiguous()}),
        "scales of shape [128, 4]",
    ),
    "NaN": (lambda t: t[f"{DOWN}.weight_scale"].view(torch.uint8)[3, 2:4].fill_(0x7F), "2 block scales that are NaN"),
    "zero scales": (lambda t: t[f"{DOWN}.weight_scale"].view(torch.uint8)[5].fill_(0), "8 of 1024 block scales 0"),
    "swapped nibbles": (
        lambda t: t.update(
            {f"{DOWN}.weight_packed": t[f"{DOWN}.weight_packed"] >> 4 | t[f"{DOWN}.weight_packed"] << 4}
        ),
        "nibbles of each byte are swapped",
    ),
    "swizzled": (
        lambda t: t.update({f"{DOWN}.weight_scale": swizzled(t[f"{DOWN}.weight_scale"])}),
        "block scales are swizzled",
    ),
    "left in BF16": (
        lambda t: (
            [t.pop(name) for name in list(t) if name.startswith(DOWN)],
            t.update({f"{DOWN}.weight": torch.ones(ROWS, COLS, dtype=torch.bfloat16)}),
        ),
        "stored in bfloat16",
    ),
    "kept layer": (
        lambda t: t.update({n.replace(DOWN, "lm_head"): x.clone() for n, x in list(t.items()) if DOWN in n}),
        "the config keeps it",
    ),
    "extra scale": (lambda t: t.update({"up.weight_scale": torch.ones(2)}), "scale without a quantized weight"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_found(defect: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant, message = DEFECTS[defect]
    # rows of unlike size, so that misplaced scales matter
    spread = {name: w * torch.logspace(-1, 1, ROWS)[:, None] for name, w in weights().items()}
    tensors = packed("compressed-tensors-nvfp4", spread)
    plant(tensors)
    write(tmp_path / "source", {**spread, "lm_head.weight": torch.ones(ROWS, COLS)}, {})
    folder = write(tmp_path / "packed", tensors, CONFIGS["compressed-tensors-nvfp4"])
    assert cli.main(["verify", str(folder), "--source", str(tmp_path / "source")]) == 1
    output = capsys.readouterr().out
    assert message in output
    assert "damaged" in output


def header(entries: object, data: int = 8) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x01\x00",
    "long header": struct.pack("<Q", 1 << 62) + b"{}",
    "no JSON": header(b"{]"),
    "nested": header(b"[" * 100_000),
    "list": header([]),
    "huge number": header(b'{"a": ' + b"9" * 5000 + b"}"),
    "two keys": header(b'{"a": {}, "a": {}}'),
    "no offsets": header({"a": {"dtype": "F32", "shape": [2]}}),
    "negative": header({"a": {**ENTRY, "data_offsets": [-8, 0]}}),
    "beyond the end": header({"a": {**ENTRY, "data_offsets": [8, 16]}}),
    "wrong size": header({"a": {**ENTRY, "shape": [3]}}),
    "absurd shape": header({"a": {**ENTRY, "shape": [1 << 62, 1 << 62]}}),
    "many dimensions": header({"a": {**ENTRY, "shape": [1 << 60] * 100_000}}),
    "unknown type": header({"a": {**ENTRY, "dtype": "F3"}}),
    "type is a list": header({"a": {**ENTRY, "dtype": ["F32"]}}),
    "overlap": header({"a": ENTRY, "b": ENTRY}),
    "gap": header({"a": {**ENTRY, "data_offsets": [8, 16]}}, 16),
    "trailing bytes": header({"a": ENTRY}, 16),
    "control characters": header({"a\x1b[2J": ENTRY}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HOSTILE[name])
    assert cli.main(["verify", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.isprintable() or error[:-1].isprintable()
    assert len(error) < 600


def test_cut_and_changed_files_never_raise_tracebacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "packed", packed("modelopt-nvfp4", weights()), CONFIGS["modelopt-nvfp4"])
    path, g = folder / "model.safetensors", generator(3)
    whole = path.read_bytes()
    size = 8 + struct.unpack("<Q", whole[:8])[0]
    for i in range(200):
        data = bytearray(whole)
        for place in torch.randint(0, size, (1 + i % 4,), generator=g).tolist():
            data[place] = int(torch.randint(0, 256, (), generator=g))
        cut = i % 3 == 0
        path.write_bytes(bytes(data[: int(torch.randint(0, len(data), (), generator=g))] if cut else data))
        status = cli.main(["verify", str(folder)])  # raises what would be a traceback
        assert status == 2 if cut else status in (0, 1, 2), i
        output, error = capsys.readouterr()
        assert error.count("\n") == (status == 2), error
        assert ("damaged" in output, "healthy" in output) == (status == 1, status == 0)


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        (r"re:.*self_attn\.(q|k|v)_proj$", "model.layers.12.self_attn.k_proj"),
        (
            r"re:model\.layers\.({})\..*mlp.*(gate|up)_proj".format("|".join(map(str, range(40)))),
            "model.layers.7.mlp.up_proj",
        ),
        (r"re:^(?!.*experts)[a-z.]*\d+\.mlp\..*$", "model.layers.7.mlp.gate"),
    ],
)
def test_usual_ignore_patterns_are_matched(pattern: str, meant: str) -> None:
    assert _matches(meant, pattern)
    assert not _matches("model.layers.7.experts.0.w1", pattern)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_algo": "FP8"},
        {"quant_method": "e\x1b[2J\nvil" * 100},
        {},
    ],
)
def test_another_format_is_refused_not_called_damaged(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = {"a.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(8, 1)}
    assert cli.main(["verify", str(write(tmp_path, weight, config))]) == 2
    error = capsys.readouterr().err
    assert "checks only NVFP4 and MXFP4" in error
    assert error[:-1].isprintable()
    assert len(error) < 400


def test_large_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spread = {name: w * torch.logspace(-1, 1, ROWS)[:, None] for name, w in weights().items()}
    tensors = packed("compressed-tensors-nvfp4", spread)
    tensors[f"{DOWN}.weight_scale"] = swizzled(tensors[f"{DOWN}.weight_scale"])
    source = write(tmp_path / "source", {**spread, "lm_head.weight": torch.ones(ROWS, COLS)}, {})
    folder = write(tmp_path / "packed", tensors, CONFIGS["compressed-tensors-nvfp4"])
    whole = verify.verify(folder, source)
    monkeypatch.setattr(verify, "PART", 1024)
    parts = verify.verify(folder, source)
    assert (parts.findings, [row[:3] for row in parts.rows]) == (whole.findings, [row[:3] for row in whole.rows])
    assert [row[3] for row in parts.rows] == pytest.approx([row[3] for row in whole.rows])


def test_nothing_outside_of_the_folder_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = write(tmp_path / "other", weights(), {}) / "model.safetensors"
    folder = tmp_path / "packed"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(secret)
    assert cli.main(["verify", str(folder)]) == 2
    assert "outside of the folder" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    for name in ("../other/model.safetensors", str(secret), "model.bin"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        assert cli.main(["verify", str(folder)]) == 2
        assert "is not the name of a safetensors file" in capsys.readouterr().err

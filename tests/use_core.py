"""Use what `pip install fewbits` installs: cast, quantize a GPT-2 and train it for a step, import and export it.

    python tests/use_core.py FOLDER [MODEL]

Tests run this in environments without extras and without a compiler. FOLDER, which must exist, gets the files.
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from fewbits import Quantizer, build, decode, encode, fake_quantize, mix, quantize
from fewbits.cli import main
from fewbits.experiments.data.tokenizing import bytes_tokenizer
from fewbits.kernels.backends import build as libraries
from fewbits.models.importing.families import to_huggingface

os.chdir(sys.argv[1])
x = torch.linspace(-3, 3, 4096).view(64, 64)
q = Quantizer.parse("e2m1:1x16:nvfp4")
assert torch.equal(decode(encode(x, q)), fake_quantize(x, q))
mix(x, "e4m3:16x16:gam @ error<0.03 | bf16")
print("library", libraries.library_path())

model = build(sys.argv[2] if sys.argv[2:] else "gpt2-nano", seed=0)
folder = Path("published")
folder.mkdir()
config, weights = to_huggingface(model.config, model.state_dict())
(folder / "config.json").write_text(json.dumps(config))
(folder / "tokenizer.json").write_text(json.dumps(bytes_tokenizer()))
save_file(weights, folder / "model.safetensors")

quantization = quantize(model, "nvfp4")
quantization.begin(0)
tokens = torch.arange(128).view(2, 64)
model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
print(quantization)

assert main(["import", "published"]) == 0
(run,) = Path("runs").iterdir()
assert main(["export", str(run), "--format", "huggingface", "--out", "exported"]) == 0
for command in ("--help", "list recipes", "list models", "number -0.3 e4m3", "doctor"):
    assert main(command.split()) == 0

"""Export a run's model as a folder that Hugging Face's transformers can load (`fewbits export`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fewbits.common.arguments import CommandParser
from fewbits.common.terminal import notice

EXAMPLES = """\
examples:
  fewbits export 1a2b3c4d --format huggingface                    to ./RUN-huggingface, where RUN is the run's name
  fewbits export runs/RUN --format huggingface --out my-model --step 400
  fewbits export RUN --format compressed-tensors                  packed NVFP4 or MXFP4, for transformers and vLLM

  from transformers import AutoModelForCausalLM, AutoTokenizer
  model, tokenizer = AutoModelForCausalLM.from_pretrained("my-model"), AutoTokenizer.from_pretrained("my-model")

GPT-2, Llama and Nemotron become transformers' models of these names; the Transformer of NVFP4's ablations becomes
Arcee. The folder has the master weights in FP32, and transformers computes in FP32 by default. So the logits equal
those of our model computed in FP32; a run that computes in BF16 has rounded logits. Models with Mamba-2 layers are
refused.

compressed-tensors, modelopt and torchao have the codes and scales of the weights that the forward product reads, for
recipes whose fprop.w is NVFP4 (or 4/6) or, only compressed-tensors, MXFP4. Layers that the recipe keeps are in FP32,
and config.json names them. Inputs are not quantized. The packages of these names decode the bits of fprop.w in BF16.
transformers reads compressed-tensors and torchao, and `fewbits import` all; the command names readers that would not
decode these bits. gguf writes model.gguf with the same codes and scales, and tokenizer.json beside it."""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits export", __doc__, EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="a run: its folder, its name or its hash")
    formats = ("huggingface", "compressed-tensors", "modelopt", "torchao", "gguf")
    parser.add_argument("--format", choices=formats, required=True, help="the format of the weights")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the new folder (default: ./RUN-FORMAT)")
    parser.add_argument("--step", type=int, help="step of the checkpoint to export (default: the last step)")
    parser.add_store()
    parser.add_cache()
    options = parser.parse_intermixed_args(argv)

    from fewbits.experiments.storage.finished_run import FinishedRun, export_run
    from fewbits.experiments.storage.run_folder import find_run

    folder = find_run(options.run, options.runs)
    run = FinishedRun.open(folder, options.step, options.cache)
    out = options.out.expanduser() if options.out else Path(f"{run.name}-{options.format}")
    lines = export_run(run, out, options.format)
    print(out)
    for line in lines:
        notice(line)
    return 0

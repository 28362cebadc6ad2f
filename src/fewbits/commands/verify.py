"""Check a packed checkpoint: header, shapes and values of scales, kept layers, error against a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fewbits.common.arguments import CommandParser
from fewbits.common.terminal import print_json, print_table

EXAMPLES = """\
examples:
  fewbits verify my-model-nvfp4                        a folder, or one safetensors file
  fewbits verify my-model-nvfp4 --source my-model      also the error of each weight against the BF16 weights

It reads NVFP4 and MXFP4 as compressed-tensors, ModelOpt, torchao and GGUF store them. The exit status is 0 for a
healthy checkpoint, 1 for one with findings, and 2 for a file that is refused or a format that is not checked."""


def main(argv: Sequence[str]) -> int:
    parser = CommandParser("fewbits verify", __doc__, EXAMPLES)
    parser.add_argument("checkpoint", type=Path, help="a folder with safetensors files, or one file, also GGUF")
    parser.add_argument("--source", type=Path, help="the model before quantization, with the same tensor names")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)

    from fewbits.models.importing.verify import verify

    source = options.source.expanduser() if options.source else None
    verdict = verify(options.checkpoint.expanduser(), source)
    healthy = not verdict.findings
    if options.json:
        print_json({**asdict(verdict), "healthy": healthy})
        return 0 if healthy else 1
    rows = [(*row[:3], "" if row[3] is None else f"{100 * row[3]:.1f}") for row in verdict.rows]
    if rows:
        print_table(("module", "format", "shape", "error %"), rows, right=("shape", "error %"))
    for finding in verdict.findings:
        print(f"{finding.name} {finding.text}")
    state = "healthy" if healthy else f"damaged: {len(verdict.findings)} findings"
    print(f"{state}; {len(rows)} packed weights, config: {verdict.kind}")
    return 0 if healthy else 1

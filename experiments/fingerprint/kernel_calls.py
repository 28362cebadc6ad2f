"""Call the kernels with many quantizers and print a JSON object: a description of each call and a digest of its result.

`same_bits.py` runs this script with two versions of the kernels and compares the digests. The script imports only the
public API, so that it runs with any version. The tensors contain NaN, infinities, signed zeros, subnormals, midpoints
between representable values, values beyond the range of every format, and blocks of very different magnitudes.
"""

import hashlib
import itertools
import json

import torch

from fewbits import Mixture, Quantizer, fake_quantize, gaussian_noise, mix

FORMATS = ("e4m3", "e5m2", "e2m1", "e3m2", "e2m3", "e3m4", "bf16", "fp16")
BLOCKS = ("tensor", "channel", "16x16", "1x16", "1x32")
SCALINGS = ("amax", "gam", "e8m0", "mx", "nvfp4", "ue5m3", "fouroversix", "eden")
OPTIONS = ("", ":stochastic", ":rht16", ":stochastic:rht16:signs=each")
OVERFLOWS = ("saturate", "nan", "inf")
MIXTURES = (
    "e4m3:16x16:gam @ error<0.045 | bf16 ; per=tensor",
    "e4m3:16x16:gam @ error<e5m2:16x16:gam | e5m2:16x16:gam @ spread<normal | bf16 ; per=block",
)
SPECIAL = (0.0, -0.0, 1e-40, 2.0**-9, 6.0, 6.5, 448.0, 464.0, 480.0, 57344.0, 65520.0, 1e38)
NOT_FINITE = (float("nan"), float("inf"), -float("inf"))


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


def digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def call(x: torch.Tensor, quantizer: str, axis: int) -> str:
    """Return the digest of `fake_quantize(x, quantizer, axis=axis)`, or the class name of the error that it raises.

    The function is first called with a seed and, if it raises ValueError, without one. The class name is returned only
    if both calls fail.
    """
    for seed in (7, None):
        try:
            return digest(fake_quantize(x, quantizer, axis=axis, seed=seed))
        except ValueError as error:
            refused = type(error).__name__
    return refused


def is_known(scaling: str) -> bool:
    """Tell whether the installed version of the kernels has this scaling."""
    try:
        Quantizer.parse(f"e2m1:1x16:{scaling}:rht16")  # valid for every scaling
    except ValueError:
        return False
    return True


def main() -> None:
    quantizers = [f"{name}{option}" for name in FORMATS for option in OPTIONS[:2]]
    quantizers += [f"{name}:overflow={overflow}" for name in FORMATS for overflow in OVERFLOWS]
    known = [scaling for scaling in SCALINGS if is_known(scaling)]
    scaled = itertools.product(FORMATS[:6], BLOCKS, known, OPTIONS)
    quantizers += [f"{name}:{block}:{scaling}{option}" for name, block, scaling, option in scaled]
    digests = {}
    for (kind, x), dtype in itertools.product(tensors().items(), (torch.bfloat16, torch.float32)):
        for quantizer, axis in itertools.product(quantizers, (0, 1)):
            digests[f"{quantizer} of {kind} {dtype}, axis {axis}"] = call(x.to(dtype), quantizer, axis)
        for mixture in MIXTURES:
            values, choice = mix(x.to(dtype), Mixture.parse(mixture))
            digests[f"{mixture} of {kind} {dtype}"] = digest(values) + digest(choice)
    digests["gaussian_noise"] = digest(gaussian_noise(4096, seed=7))
    print(json.dumps(digests))


if __name__ == "__main__":
    main()

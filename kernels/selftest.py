"""Check the kernels on this machine, because kernels that were compiled wrongly must not be used for training.

Wrong results can remain unnoticed: in another library, stochastic rounding returned only zeros on one kind of device.
`run` returns a list of (rule, whether the rule holds on this machine, measured value).
"""

import torch

from fewbits.kernels.api import fake_quantize, mix
from fewbits.kernels.backends import reference
from fewbits.kernels.backends.choice import backend_for
from fewbits.kernels.noise import gaussian_noise, sample_weight, unpack_noise
from fewbits.kernels.packed import decode, encode
from fewbits.kernels.quantizer import Quantizer

SPECS = (
    "e4m3:128x128:gam",
    "e5m2:tensor:amax",
    "e4m3:1x32:e8m0",
    "e2m1:1x32:mx",
    "e2m1:1x16:nvfp4",
    "e2m1:16x16:nvfp4:stochastic",
    "e2m1:1x16:ue5m3",
    "e2m1:1x16:fouroversix",
    "e2m1:1x16:eden:rht128",
    "e2m1:1x16:nvfp4:stochastic:rht16",
    "bf16",
)


def run(device: str = "cpu") -> list[tuple[str, bool, str]]:
    backend = backend_for(device)
    generator = torch.Generator().manual_seed(0)
    x = (
        (torch.randn(256, 384, generator=generator) * torch.randn(256, 1, generator=generator).exp())
        .bfloat16()
        .to(device)
    )
    results = []
    for spec in SPECS:
        q = Quantizer.parse(spec)
        result, expected = fake_quantize(x, q, seed=7), reference.quantize(x, q, -1, 7)[0]
        differ = int((result.view(torch.int16) != expected.view(torch.int16)).sum())
        results.append(
            (f"{backend.name} equals the reference: {spec}", differ == 0, f"{differ} of {x.numel()} elements differ")
        )
        same = bool((decode(encode(x, q, seed=7)) == result).all())
        results.append((f"decode(encode(x)) equals fake quantization: {spec}", same, ""))

    small = torch.full((1 << 16,), 0.1, device=device)  # a fifth of e2m1's first step
    mean = float(fake_quantize(small, "e2m1:stochastic", seed=3).mean())
    results.append(("stochastic rounding keeps the mean", abs(mean - 0.1) < 0.005, f"0.1 became {mean:.4f}"))

    w = x[:64, :64].float().requires_grad_()
    bits = torch.full((2, 2), 5.0, device=device, requires_grad=True)
    sample_weight(w, bits, 11, dtype=torch.float32).square().sum().backward()
    nonzero = bits.grad is not None and bool((bits.grad != 0).all())
    results.append(
        ("the gradient of bit widths is not zero", nonzero, "" if bits.grad is None else f"{bits.grad.tolist()}")
    )

    share = float((unpack_noise(gaussian_noise(1 << 16, 5, device=device)) == 0).float().mean())
    results.append(
        ("Gaussian noise is zero with the expected frequency", abs(share - 46966 / 65536) < 0.01, f"{share:.4f}")
    )

    _, choice = mix(x, "e4m3:128x128:gam @ error<0.9 | bf16")
    results.append(("a mixture takes the first entry that passes its test", int(choice) == 0, f"entry {int(choice)}"))
    return results

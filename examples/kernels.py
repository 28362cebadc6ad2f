"""Quantize, mix and pack tensors with the kernels, without recipes and models: python kernels.py."""

import torch

from fewbits import Mixture, Quantizer, decode, encode, fake_quantize, fake_quantize_both, mix


def main() -> None:
    torch.manual_seed(1)
    x = torch.randn(512, 512, dtype=torch.bfloat16)
    x[0, :8] *= 100  # a few outliers, as in activations

    print(f"{'quantizer':28} {'error':>9} {'flushed to zero':>16}")
    for text in ("e4m3:tensor:amax", "e4m3:128x128:gam", "e4m3:1x32:e8m0", "e2m1:1x32:mx", "e2m1:1x16:nvfp4"):
        _, stats = fake_quantize(x, text, stats=True)
        print(f"{text:28} {float(stats.error):9.3%} {int(stats.flushed) / x.numel():16.3%}")

    # A training step needs a tensor quantized in blocks of rows and in blocks of columns: compute both in one pass
    rows, columns = fake_quantize_both(x, "e4m3:1x32:e8m0", "e4m3:1x32:e8m0")
    print("blocks of rows and of columns differ:", not torch.equal(rows, columns))

    # Stochastic rounding is unbiased, so the mean over many seeds is close to the tensor; rounding to nearest is not
    stochastic = [fake_quantize(x, "e2m1:1x16:nvfp4:stochastic", seed=seed).float() for seed in range(64)]
    nearest = fake_quantize(x, "e2m1:1x16:nvfp4").float()
    bias = (torch.stack(stochastic).mean(0) - x.float()).abs().mean()
    print(f"mean distance: stochastic {bias:.4f}, nearest {(nearest - x.float()).abs().mean():.4f}")

    _, choice = mix(x, Mixture.parse("e4m3:16x16:amax @ error<0.0225 | bf16 ; per=block"))
    print(f"share of blocks that stay in BF16: {float((choice == 1).float().mean()):.1%}")

    packed = encode(x, Quantizer.parse("e2m1:1x16:nvfp4"))
    assert torch.equal(decode(packed), fake_quantize(x, "e2m1:1x16:nvfp4"))
    print(f"packed: {8 * packed.nbytes / x.numel():.2f} bits per element")


if __name__ == "__main__":
    main()

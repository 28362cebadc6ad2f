"""Cast, scale and add numbers of few bits: code like that in the text "Understanding Mixed-Precision Training".

    python examples/casts_and_sums.py

Depending on its version, torch casts values beyond 464 to E4M3 as NaN or as 448, the largest value. fewbits returns
448, or NaN with the option `overflow=nan`.
"""

import torch

from fewbits import fake_quantize, product


def casts() -> None:
    """Print the text's examples of lost precision, overflow and underflow, cast to several formats."""
    for values in (
        (-1.51039, 0.412776, -0.348471, -1.17588),
        (2438.37, -440.6, 857.116, 129.765),
        (0.000719602, -0.000107368, 0.000573265, 0.00208493),
    ):
        x = torch.tensor(values)
        for name in ("bf16", "fp16", "e4m3", "e4m3:overflow=nan", "e4m3:tensor:amax"):
            print(f"{name:18}", " ".join(f"{v:12.6g}" for v in fake_quantize(x, name).tolist()))
        print()


def scaled_dot() -> None:
    """Scale two vectors to [-1, 1], cast them to E4M3, divide their dot product by both scales, and print its error."""
    x, w = torch.linspace(-3, 5, 64), torch.linspace(2, -1, 64)
    sx, sw = 1 / x.abs().max(), 1 / w.abs().max()
    exact = x @ w
    ours = fake_quantize(x * sx, "e4m3") @ fake_quantize(w * sw, "e4m3") / (sx * sw)
    print(f"dot product {exact:.4f}, in E4M3 {ours:.4f}, error {abs(ours / exact - 1):.2%}\n")


def sums() -> None:
    """Print the largest relative error of a product of E4M3 matrices, for accumulators of different precision."""
    torch.manual_seed(0)
    a, b = torch.rand(8, 4096).to(torch.float8_e4m3fn), torch.rand(4096, 8).to(torch.float8_e4m3fn)
    exact = a.double() @ b.double()
    for name in ("fp32", "fp16", "hopper-fp8", "hopper-fp8-promoted", "blackwell-fp8"):
        error = (product(a, b, name).double() / exact - 1).abs().max()
        print(f"sums of 4,096 products, {name:20} largest error {error:.3%}")


def main() -> None:
    casts()
    scaled_dot()
    sums()


if __name__ == "__main__":
    main()

"""Check that the results of a CUDA backend, emulated or on a GPU, equal the reference's results bit for bit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewbits.kernels.backends import reference
from fewbits.kernels.backends.protocol import LOST
from fewbits.kernels.mixing import mix_matrix
from fewbits.kernels.packing import layout
from fewbits.kernels.quantizer import Mixture, Quantizer
from fewbits.kernels.reference.elements import largest
from fewbits.kernels.reference.noise import uniform
from fewbits.kernels.reference.rounding import four_over_six, round_with
from fewbits.kernels.reference.scales import choose_scales
from fewbits.kernels.scaled_products import form_of
from tests.kernels.inputs import assert_same, generator

BESIDE = 16  # elements before and after a result whose values must not change


@dataclass(frozen=True)
class Checks:
    """Compare `backend` with the reference, which runs on the CPU. `place` moves inputs to the device of `backend`."""

    backend: Any
    place: Callable[[Tensor], Tensor]

    def quantizer(self, x: Tensor, q: Quantizer, axis: int, seed: int = 7, **parts: Any) -> None:
        """Check quantize(), encode() and decode() against the reference, quantize() with each combination of outputs.

        parts: the arguments `partition` and `skip` of quantize().
        """
        was = torch.full_like(x, 0.5)  # the values of `out` before the call, which skipped parts keep
        want = reference.quantize(x, q, axis, seed, out=was.clone(), want_stats=True, **parts)
        here = {name: self.place(part) if isinstance(part, Tensor) else part for name, part in parts.items()}
        case = f"{q} of {tuple(x.shape)} {x.dtype}, {axis=}, {seed=}, {parts}"

        def run(x: Tensor, **how: Any) -> tuple[Tensor, Tensor, Tensor]:
            got: tuple[Tensor, Tensor, Tensor] = self.backend.quantize(self.place(x), q, axis, seed, **how, **here)
            return got

        got = run(x, out=self.place(was.clone()), want_stats=True)
        for what, a, b in zip(("values", "counts", "amax"), got, want, strict=True):
            assert b is not None
            assert_same(a.cpu(), b, f"{what} of {case}")
        assert want[1] is not None
        assert_same(run(x, want_values=False, want_stats=True)[1].cpu(), want[1], f"counts alone of {case}")
        assert_same(run(x, out=self.place(was.clone()))[0].cpu(), want[0], f"values alone of {case}")
        if "skip" not in parts:
            in_place = self.place(x.clone())
            self.backend.quantize(in_place, q, axis, seed, out=in_place)
            assert_same(in_place.cpu(), want[0], f"in place, {case}")
        if q.format.bits <= 16 and not unstorable(x, q, axis):
            stored = reference.encode(x, q, axis, seed)
            there = self.backend.encode(self.place(x), q, axis, seed)
            for what, a, b in zip(("codes", "scales", "groups"), there, stored, strict=True):
                assert_same(a.cpu(), b, f"{what} of {case}")
            if form_of(q):
                of = ((q, axis, seed), (q, -1 - axis, seed))[: 1 + seed % 2]
                for one, other in zip(
                    self.backend.encode_operands(self.place(x), *of), reference.encode_operands(x, *of), strict=True
                ):
                    for what, a, b in zip(("codes", "scales", "groups"), one, other, strict=True):
                        assert_same(a.cpu(), b, f"{what} of the operand of {case}")
            self.decoding(stored, q, axis, x.shape[1], x.dtype)

    def decoding(
        self, stored: tuple[Tensor, Tensor, Tensor], q: Quantizer, axis: int, cols: int, dtype: torch.dtype
    ) -> None:
        got = self.backend.decode(*(self.place(t) for t in stored), q, axis, cols, dtype)
        want = reference.decode(*stored, q, axis, cols, dtype)
        assert_same(got.cpu(), want, f"what is stored of {tuple(want.shape)} {dtype} by {q}, {axis=}")

    def values(self, x: Tensor, q: Quantizer, axis: int, seed: int = 7) -> None:
        got = self.backend.quantize(self.place(x), q, axis, seed)[0]
        assert_same(got.cpu(), reference.quantize(x, q, axis, seed)[0], f"{q} of {tuple(x.shape)} {x.dtype}, {axis=}")

    def both(self, x: Tensor, row: Quantizer, column: Quantizer, seed: int) -> None:
        along, down = self.backend.quantize_both(self.place(x), row, column, seed, seed // 2)
        assert_same(along.cpu(), reference.quantize(x, row, -1, seed)[0], f"{row} along, beside {column}")
        assert_same(down.cpu(), reference.quantize(x, column, 0, seed // 2)[0], f"{column} down, beside {row}")

    def rotation(self, x: Tensor, q: Quantizer, axis: int) -> None:
        for inverse in (False, True):
            got = self.backend.rotate(self.place(x), q, axis, inverse)
            want = reference.rotate(x, q, axis, inverse)
            assert_same(got.cpu(), want, f"{q} of {tuple(x.shape)} {x.dtype}, {axis=}, {inverse=}")

    def extent(self, x: Tensor, partition: tuple[int, int]) -> None:
        want = reference.extent(x, partition)
        for got, expected in zip(self.backend.extent(self.place(x), partition), want, strict=True):
            assert_same(got.cpu(), expected, f"extent of {tuple(x.shape)} {x.dtype} by {partition}")

    def mixture(self, x: Tensor, mixture: Mixture, axis: int, seed: int = 5) -> None:
        want = mix_matrix(reference, x, mixture, axis, seed)
        got = mix_matrix(self.backend, self.place(x), mixture, axis, seed)
        for what, a, b in zip(("values", "choice", "counts", "amax"), got, want, strict=True):
            assert_same(a.cpu(), b, f"{what} of {mixture}, {tuple(x.shape)} {x.dtype}, {axis=}")

    def decision(self, blocks: int, index: int) -> None:
        """Compare decide() for entry `index` of a mixture and this number of decision blocks with the reference.

        Also check that the memory before and after the results `choice` and `decided` does not change.
        """
        random = generator(blocks)
        counts = torch.randint(1, 8, (blocks, 7), generator=random)
        counts[:, LOST] = torch.rand(blocks, generator=random) < 0.2
        before = torch.rand(blocks, generator=random) < 0.5
        results = []
        for backend, place in ((reference, torch.clone), (self.backend, self.place)):
            memory = place(torch.full((2, blocks + 2 * BESIDE), 77, dtype=torch.int8))
            choice, decided = memory[:, BESIDE : BESIDE + blocks]
            decided = decided.view(torch.bool)
            choice.fill_(2)
            decided.copy_(before)
            left = backend.decide(index, 2, place(counts), choice, decided, limit=1.0)
            assert left or not blocks or bool(decided.all())
            results.append(memory.cpu())
        assert_same(results[1], results[0], f"decisions of {blocks} blocks on entry {index}, and what is beside them")

    def noise(self, count: int, seed: int) -> None:
        device = self.place(torch.zeros(1)).device
        for draw in ("gaussian_noise", "uniform_noise"):
            got = getattr(self.backend, draw)(count, seed, device)
            assert_same(got.cpu(), getattr(reference, draw)(count, seed, "cpu"), f"{draw} of {count}")

    def sampled_weight(self, w: Tensor, grad: Tensor, bits: Tensor, noise: Any, block: int, dtype: torch.dtype) -> None:
        what = f"{noise} noise on {tuple(w.shape)} {w.dtype} by {block}"
        there = self.place(w), self.place(bits)
        got = self.backend.sample_weight(*there, 11, noise, block, dtype)
        assert_same(got.cpu(), reference.sample_weight(w, bits, 11, noise, block, dtype), what)
        back = self.backend.sample_weight_backward(self.place(grad), *there, 11, noise, block)
        assert_same(back.cpu(), reference.sample_weight_backward(grad, w, bits, 11, noise, block), f"gradient, {what}")


def any_bytes(q: Quantizer, axis: int, shape: tuple[int, int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, group scales) for decode(), made of random bytes, so that invalid values occur too."""
    g, random = generator(seed), []
    for size, dtype in layout(q, axis, *shape):
        bytes_ = torch.randint(256, (*size[:-1], size[-1] * dtype.itemsize), generator=g, dtype=torch.uint8)
        random.append(bytes_.view(dtype).view(size))
    codes, scales, groups = random
    return codes, scales, groups


def unstorable(x: Tensor, q: Quantizer, axis: int) -> bool:
    """Tell whether encode() cannot store x: rotated, x is not finite, and q has no scales and a format without NaN."""
    naive = q.scaling == "none" and not q.format.has_nan
    return naive and not bool(reference.rotate(x, q, axis).isfinite().all())


CONVERTED = ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2", "bf16", "fp16")  # formats that a GPU instruction converts to


def every_pattern(dtype: torch.dtype) -> Tensor:
    """Return all 65,536 numbers of a 16-bit dtype, NaNs and infinities included, as a matrix of 256 x 256."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).view(256, 256).roll(128, 0)


# Quantizers for all scalings that use random draws each in their own code. E2M1's values near 3 are 1 apart.
DRAWN = (
    "e2m1",
    "e2m1:1x16:amax",
    "e2m1:16x16:mx",
    "e2m1:1x16:nvfp4",
    "e2m1:16x16:nvfp4",
    "e2m1:1x16:fouroversix",
    "e2m1:16x16:fouroversix",
)


def undecided(q: Quantizer, axis: int, seed: int) -> Tensor:
    """Return a matrix of values whose stochastic rounding depends on the last 32 of the 48 bits of their draws.

    Block scales are powers of two. For Four Over Six, each block has one such value besides its maximum, and the
    rounding of this value decides whether the block's scale maps the maximum to 6 or to 4. In the first, third, … row
    of blocks, the rounding with the scale for 6 depends on the last 32 bits; in the other rows, that with the scale
    for 4.
    """
    n = 128
    down, place = axis == 0, torch.arange(n)
    high = (uniform(n * n, seed, "cpu") * 2**16).floor().view(n, n)
    away = (high + 0.5) / 2**16 * (1 - 2 * (place % 2))
    x = torch.where(high < 2**15, 3 + away, 3.0)  # every value is at most half a step from the nearest grid value
    if q.scaling != "none":
        x = x.mT if down else x
        height = min(q.block.resolve((n, n), axis))
        if q.traits.compares:
            x = x * torch.where(place // height % 2 == 0, 1, 1.5).view(-1, 1)
            x = torch.where((place % height == 0).view(-1, 1) & (place % 16 == 1), x, 0.0)
        x[::height, ::16] = 6
        sizes = 2.0 ** torch.randint(-3, 4, (n // height, n // 16), generator=generator(seed))
        x = x * sizes.repeat_interleave(height, 0).repeat_interleave(16, 1)
        if q.traits.kind == "two-level":
            x[0, 0] = 6 * q.traits.target  # makes the tensor scale 1
        x = x.mT if down else x
    return x.float().contiguous()


def decided_late(x: Tensor, q: Quantizer, axis: int, seed: int) -> int:
    """Count the values of `undecided` (for Four Over Six: the block scales) that depend on the last 32 bits of draws.

    Compare the results of the draws with the results if each draw is replaced by the next multiple of 2^-16.
    """
    draws = uniform(x.numel(), seed, "cpu").view(x.shape)
    amax = largest(x, q.block.resolve(x.shape, axis))
    results = []
    for d in (draws, ((draws * 2**16).floor() + 1) / 2**16):
        if q.traits.compares:
            results.append(four_over_six(x, amax, q, axis, d).scales.codes)
        else:
            results.append(round_with(choose_scales(amax, q, axis), x, q, axis, d).values)
    return int((results[0] != results[1]).sum())

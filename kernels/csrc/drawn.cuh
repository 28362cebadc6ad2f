// Draws random bits for eight elements at once, and rounds an element stochastically without a conversion to integers.
// The results have the same bits as `philox` in philox.h and `rounded_at_once` in element.h.
#pragma once
#include "tile.cuh"

namespace fb {

FB_D uint64_t wide_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__  // for a product of widened factors, the compiler also adds the product of the upper halves, 0
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return uint64_t(a) * b;
#endif
}
// Return the output of `philox`; one instruction computes both halves of a product.
FB_D Words wide_philox(uint64_t index, uint32_t stream, uint64_t seed) {
  uint32_t c[4] = {uint32_t(index), uint32_t(index >> 32), stream, 0}, k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma unroll
  for (int round = 0; round < PHILOX_ROUNDS; round++) {
    const uint64_t even = wide_product(PHILOX_FACTOR_0, c[0]), odd = wide_product(PHILOX_FACTOR_1, c[2]);
    c[0] = uint32_t(odd >> 32) ^ c[1] ^ k0, c[1] = uint32_t(odd);
    c[2] = uint32_t(even >> 32) ^ c[3] ^ k1, c[3] = uint32_t(even);
    k0 += PHILOX_STEP_0, k1 += PHILOX_STEP_1;
  }
  return Words{{c[0], c[1], c[2], c[3]}};
}

// Return 16 random bits for each of eight consecutive elements, two elements per word. If `first` is a multiple of
// eight, they are one output of Philox. Otherwise they come from two outputs, drawn in a loop to keep the code small.
FB_D Words eight_draws(uint64_t first, uint32_t stream, uint64_t seed) {
  uint32_t skew = uint32_t(first) & 7;
  if (skew == 0) return wide_philox(first >> 3, stream, seed);
  Words a{}, b{};
#pragma unroll 1
  for (int i = 0; i < 2; i++) {
    a = b;
    b = wide_philox((first >> 3) + uint64_t(i), stream, seed);
  }
  uint32_t w[8] = {a.w[0], a.w[1], a.w[2], a.w[3], b.w[0], b.w[1], b.w[2], b.w[3]};
#pragma unroll
  for (int i = 0; i < 6; i++) w[i] = skew & 4 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; i++) w[i] = skew & 2 ? w[i + 1] : w[i];
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = skew & 1 ? w[i] >> 16 | w[i + 1] << 16 : w[i];
  return Words{{w[0], w[1], w[2], w[3]}};
}

// Round a magnitude v to a grid that is not wide, with the 16 random bits in the upper or lower half of `draws`; *ask
// becomes true if these bits do not decide. The last place of `scale` is 2^-16 steps, so after adding |v - near|,
// rounded toward zero, the lower half of the sum's bits is the threshold.
template <bool UPPER> FB_D float drawn(float v, const Grid &g, uint32_t draws, bool *ask) {
  const Step step = step_at(v, g);
  const float constant = step.constant(g), near = (v + constant) - constant, gap = v - near;
  const uint32_t scale = step.exponent - ((23u - g.dropped) << 23) + (7u << 23) + 0x400000u;
  const uint32_t sum = bits(__fadd_rz(fabsf(gap), value(scale)));
  const uint32_t high = __byte_perm(scale, draws, UPPER ? 0x3276 : 0x3254);  // the lower half of scale is 0
  *ask |= high == sum;
  return high < sum ? near + value(bits(step.size(g)) | (bits(gap) & SIGN)) : near;
}

}  // namespace fb

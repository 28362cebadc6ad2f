// GaussWS noise (Ahn and Yoo 2025, eq. 10): eight values of approximately round(N(0,1)/2) from one Philox output. The
// operations act on whole words, in which nibble n belongs to element n. Also DiffQ's uniform noise, the scale of the
// noise and the gradient of bit widths (GaussWS eqs. 3 and 4).
#pragma once
#include "philox.h"

namespace fb {

// W is uint32_t or a vector of uint32_t. In each nibble of the result, the highest bit is the sign and the other bits
// are the magnitude.
template <class W> FB_HD W gaussian_word(const W &w0, const W &w1, const W &w2, const W &w3) {
  const uint32_t M = 0x11111111u;
  W two = w0 & (w0 >> 1) & (w0 >> 2) & (w0 >> 3) & w1 & (w1 >> 1) & (w1 >> 2) & (w1 >> 3) & (w2 | (w2 >> 1)) & M;
  W one = ((w2 >> 2) | (w2 >> 3)) & (w3 | (w3 >> 1)) & (w3 >> 2) & ~two & M;
  W sign = (w3 >> 3) & (one | two);
  return (sign << 3) | (two << 1) | one;
}
FB_HD uint32_t gaussian_word(uint64_t counter, uint64_t seed) {
  Words r = philox(counter, NOISE, seed);
  return gaussian_word(r.w[0], r.w[1], r.w[2], r.w[3]);
}
FB_HD float gaussian_value(uint32_t word, uint32_t n) {
  int32_t nibble = int32_t(word >> (4 * n)) & 15, size = nibble & 7;
  return float(nibble & 8 ? -size : size);
}

// DiffQ's uniform noise on (-1/2, 1/2), rounded to bf16.
FB_HD float uniform_value(uint32_t high) {
  return Bf16::widen(Bf16::narrow((float(int32_t(high)) + 0.5f) * 1.52587890625e-05f - 0.5f));
}

// Return 2^t in float32, computed by a fixed sequence of double operations, so that every backend gives the same bits:
// 2^n for the integer n nearest to t, times the Taylor polynomial of 2^(t - n).
FB_HD float exp2_fixed(double t) {
  const double inverse_factorial[14] = {
      1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
      1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};
  if (!(t - t == 0.0)) return value(NAN_BITS);
  if (t < -1000.0) return 0.0f;
  if (t > 1000.0) return value(INF);
  double n = (t + 6755399441055744.0) - 6755399441055744.0;  // 1.5 * 2^52: rounds to an integer, ties to even
  double x = (t - n) * 0.69314718055994530942, p = 0.0;
  for (int k = 13; k >= 0; k--) p = p * x + inverse_factorial[k];
  uint64_t power = uint64_t(int64_t(n) + 1023) << 52;
  double scale;
  memcpy(&scale, &power, 8);
  return float(p * scale);
}
// Return the factor of the noise in a square with this bit width and amax: 2^(1 - bits) * max|w|.
FB_HD float noise_scale(float bits, float amax) { return exp2_fixed(1.0 - double(bits)) * amax; }
// Return the gradient of a square's bit width; scale: its noise_scale; sum: Σ gradient · noise over the square.
FB_HD float bits_gradient(float scale, float sum) { return (-0.6931471805599453f * scale) * sum; }

}  // namespace fb

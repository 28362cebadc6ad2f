// GaussWS noise (Ahn and Yoo 2025, eq. 10): eight values of round(N(0,1)/2), nearly, from one Philox output, computed
// on whole words: bit n of a plane's nibble belongs to element n. And the weight that it perturbs (eqs. 3 and 4).
#pragma once
#include "philox.h"

namespace fb {

// W is uint32_t, or a vector of them. A nibble of the result is sign and magnitude.
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

// 2^t to float32 by a fixed sequence of double operations, so that every backend has the same bits.
FB_HD float exp2_fixed(float t) {
  double wide = t;
  if (!(wide > -1000.0)) return t == t ? 0.0f : t;
  if (wide > 1000.0) return value(INF);
  double shifted = wide + 6755399441055744.0;  // 1.5 * 2^52: rounds to an integer, ties to even
  double n = shifted - 6755399441055744.0, f = (wide - n) * 0.6931471805599453, p = 1.0;
  for (int k = 13; k > 0; k--) p = 1.0 + p * f / double(k);
  uint64_t power = uint64_t(int64_t(n) + 1023) << 52;
  double scale;
  memcpy(&scale, &power, 8);
  return float(p * scale);
}
// The noise's factor in a square: max|w| * 2^(1 - bits).
FB_HD float noise_scale(float bits, float amax) { return exp2_fixed(1.0f - bits) * amax; }

}  // namespace fb

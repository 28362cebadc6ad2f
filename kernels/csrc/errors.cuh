// Counts the statistics of eight ordinary elements at once. The errors are computed without a division, by an
// approximate reciprocal and a correction by the exact remainder; the bits are the same as in `error_units`
// (element.h).
#pragma once
#include "sums.cuh"

namespace fb {

template <class D> constexpr int PRECISION = 24;  // the number of bits of a dtype's significand
template <> constexpr int PRECISION<Bf16> = 8;
template <> constexpr int PRECISION<Fp16> = 11;

// Return 1 / x for 0 <= x < 2^125 with an error of less than one unit in the last place; infinity if x is subnormal.
FB_D float approximate_reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
#else  // in the emulator: wrong by one unit for about half of all x, so that tests show that these errors do not matter
  if (x < FLOAT_MIN_NORMAL) return value(INF);
  float nearest = 1.0f / x, rest = fused(-x, nearest, 1.0f);
  uint32_t odd = bits(x) * 0x9e3779b9u >> 31;
  return value(rest > 0.0f ? bits(nearest) + odd : rest < 0.0f ? bits(nearest) - odd : bits(nearest));
#endif
}

// True if error_bits is exact for a block: its returned values are zero, or so large that remainders are not subnormal.
// A remainder is a multiple of |x - y| * 2^-48, and |x - y| is 0 or at least x * 2^-PRECISION.
template <class D> FB_D bool countable(const Grid &g, float amax, const Scale &scale) {
  float least = value(g.min_exponent) * power_of_two(int(g.dropped) - 23) * scale.decode * scale.outer;
  return amax < power_of_two(125) && (least > power_of_two(PRECISION<D> - 98) || amax == 0.0f);
}

// Return the correctly rounded reciprocal of x, computed from `inverse`, a reciprocal with an error below one unit in
// the last place. The constant 2^-47 replaces the square of the remainder. It matters only if the sum would lie halfway
// between two floats, that is, if all bits of the significand of x are 1.
FB_D float refined(float x, float inverse) {
  return fused(inverse, fused(-x, inverse, 1.0f) + 7.105427357601002e-15f, inverse);
}
// Return gap / x, correctly rounded, where `inverse` is the approximate reciprocal of x > 0. If x has a significand of
// at most 11 bits, no quotient is closer than 2^-12 units to the middle of two floats, so the error of `inverse` has no
// effect; otherwise `inverse` is first replaced by the correctly rounded reciprocal (Markstein 1990).
template <class D> FB_D float ratio(float gap, float x, float inverse) {
  if (PRECISION<D> > 11) inverse = refined(x, inverse);
  float near = gap * inverse;
  return fused(fused(-x, near, gap), inverse, near);
}
// Return the bits of 1 + |gap| / x, at most 2, where both operations are rounded and x is the magnitude of an element
// of a countable block. If x is 0, or the reciprocal or the quotient overflows, the ratio is NaN, and the result is 2.
template <class D> FB_D uint32_t error_bits(float gap, float x, float inverse) {
  float r = magnitude(ratio<D>(gap, x, inverse));
  return bits((r < 1.0f ? r : 1.0f) + 1.0f);
}

// Add the counts of eight ordinary elements of a countable block. `was` and `back` are their magnitudes before and
// after quantization; `over` is 1 for elements whose rounding overflowed. Non-zero values are normal float32 numbers,
// so only fp16 can round them to zero.
template <class D>
FB_D void count_ordinary(const Vector<D> &was, const Vector<D> &back, const uint32_t (&over)[WIDTH], Counts *sum) {
  uint32_t errors = 0, nonzero = 0, kept = 0, saturated = 0, capped = 0;
#pragma unroll
  for (int j = 0; j < Vector<D>::WORDS; j++) nonzero += was.nonzero(j), kept += back.nonzero(j);
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    float x = D::widen(was.get(i)), y = D::widen(back.get(i));
    float gap = x - y;
    errors += error_bits<D>(gap, x, approximate_reciprocal(x));
    capped += bits(x - magnitude(gap)) >> 31;  // a ratio that is above 1 is also above 1 when it is rounded
    saturated += PRECISION<D> != 11 || y != 0.0f ? over[i] : 0u;
    sum->top = larger(sum->top, bits(x));
  }
  // error_bits is (bits of 1) + (units of the error) = (bits of 2) - 2^23 + (units of the error); for a zero element it
  // is the bits of 2. Eight times the bits of 2 are 2^33, which vanish in 32 bits. So `errors` is the sum of the units
  // less 2^23 for each non-zero element.
  const uint32_t some = nonzero + (nonzero >> 16) & 0xffffu;
  sum->error += errors + (some << 23);
  sum->nonzero += nonzero, sum->kept += kept;
  sum->saturated_capped += saturated + (capped << 16);
}

}  // namespace fb

// Sums of products as hardware accumulators compute them, bit for bit; arithmetic.md ("Accumulators") defines them.
//
// Every lane of a vector computes one element of the result, so the products are added in the order of the definition.
#pragma once
#include <math.h>
#include "numeric.h"
#include "vector.h"

namespace fb {

typedef float FloatLanes __attribute__((vector_size(4 * REGISTER)));
typedef int32_t IntLanes __attribute__((vector_size(4 * REGISTER)));

constexpr int LOWEST = -126;          // a sum is never aligned to a smaller exponent
constexpr int ZERO_EXPONENT = -4000;  // the exponent of zero: below every other exponent and every sum of two exponents

// A number as significand * 2^exponent, with 1 <= |significand| < 2. A subnormal of the number's format has the
// format's smallest exponent, emin, and a significand below 1. The significand of inf and NaN is the value itself.
struct Parted {
  float significand;
  int32_t exponent;
};
inline Parted parted(float v, int emin) {
  if (!finite(v)) return {v, 0};
  if (v == 0) return {v, ZERO_EXPONENT};
  int e;
  float s = frexpf(v, &e) * 2;
  return e - 1 < emin ? Parted{ldexpf(s, e - 1 - emin), emin} : Parted{s, e - 1};
}

FB_INLINE float with_exponent(int e) { return value(uint32_t(e + 127) << 23); }  // 2^e for -126 <= e <= 127
FB_INLINE double with_exponent_double(int e) {
  uint64_t u = uint64_t(e + 1023) << 52;
  double v;
  memcpy(&v, &u, 8);
  return v;
}

// Round toward zero to a float32 that has `kept` fraction bits; from 2^128 the result is inf.
FB_INLINE float truncated(double v, int kept) {
  uint64_t u;
  memcpy(&u, &v, 8);
  u &= ~((uint64_t(1) << (52 - kept)) - 1);
  double normal;
  memcpy(&normal, &u, 8);
  if (__builtin_fabs(v) >= 1.1754943508222875e-38) return float(normal);
  double steps = with_exponent_double(kept - LOWEST);
  return float(double(int32_t(v * steps)) / steps);
}

// The exponents and significands of finite float32 numbers, as `parted` returns them for emin = -126, except that the
// exponent of zero is LOWEST.
FB_INLINE IntLanes exponents(FloatLanes c) {
  IntLanes field = ((IntLanes)c >> 23) & 0xff;
  return (field == 0 ? field + 1 : field) - 127;
}
FB_INLINE FloatLanes significands(FloatLanes c) {
  IntLanes u = (IntLanes)c, normal = (u & int32_t(0x807fffff)) | int32_t(ONE);
  return (u & int32_t(INF)) == 0 ? c * 8.507059173023462e37f : (FloatLanes)normal;  // 2^126
}

// The parameters of an accumulator that adds `length` products to a sum at once: fields of Accumulator in
// kernels/accumulators.py.
struct Fused {
  int32_t length, fraction, kept, promote;
};

// Return c plus the products of `count` pairs (a, b): align the products and c to the largest exponent, truncate each
// to `fraction` bits after the binary point, add the resulting integers exactly, and truncate the sum. WIDE: the sum of
// the integers does not fit 32 bits.
template <bool WIDE>
inline FloatLanes fused_block(const Parted *a, const FloatLanes *b, const IntLanes *be, int count, FloatLanes c,
                              const Fused &how) {
  IntLanes top = exponents(c);
  for (int k = 0; k < count; k++) {
    IntLanes e = be[k] + a[k].exponent;
    top = e > top ? e : top;
  }
  IntLanes shift = how.fraction + 127 - top, low{}, high{};
  auto add = [&](FloatLanes significand, IntLanes e) FB_INLINED {
    IntLanes field = e + shift;
    field = field > 0 ? field : 0;  // the exponent field 0 makes the factor 0: the product loses all bits
    IntLanes steps = __builtin_convertvector(significand * (FloatLanes)(field << 23), IntLanes);
    low += WIDE ? steps & 0xffff : steps;
    if (WIDE) high += steps >> 16;
  };
  add(significands(c), exponents(c));
  for (int k = 0; k < count; k++) add(b[k] * a[k].significand, be[k] + a[k].exponent);
  for (int j = 0; j < REGISTER; j++) {
    double sum = double(low[j]) + (WIDE ? double(high[j]) * 65536.0 : 0.0);
    float next = truncated(sum * with_exponent_double(top[j] - how.fraction), how.kept);
    c[j] = finite(c[j]) ? next : c[j];
  }
  return c;
}

constexpr float TENSOR_CORE_NAN = __builtin_nanf("0x3fffff");  // 0x7fffffff, as the hardware returns it

// Return `next`, in which the lanes with inf or NaN among the products or in the earlier sum c are replaced by the
// result of ordinary arithmetic.
inline FloatLanes with_specials(const Parted *a, const FloatLanes *b, int count, FloatLanes c, FloatLanes next) {
  for (int j = 0; j < REGISTER; j++) {
    double sum = double(c[j]);
    for (int k = 0; k < count; k++) sum += double(a[k].significand) * double(b[k][j]);
    if (!(__builtin_fabs(sum) <= 1.7976931348623157e308)) next[j] = sum != sum ? TENSOR_CORE_NAN : float(sum);
  }
  return next;
}

// Compute the sum of K products. If `promote` is not 0, the sum is added to the float32 sum `outside` and set to 0
// after every `promote` products. special: there may be inf or NaN.
template <bool WIDE>
inline FloatLanes fused_sum(const Parted *a, const FloatLanes *b, const IntLanes *be, int64_t K, bool special,
                            const Fused &how) {
  FloatLanes c{}, outside{};
  for (int64_t k = 0; k < K; k += how.length) {
    int count = int(K - k < how.length ? K - k : how.length);
    FloatLanes next = fused_block<WIDE>(a + k, b + k, be + k, count, c, how);
    c = special ? with_specials(a + k, b + k, count, c, next) : next;
    if (how.promote && ((k + how.length) % how.promote == 0 || k + how.length >= K)) {
      outside += c;
      c = FloatLanes{};
    }
  }
  if (!how.promote) return c;
  for (int j = 0; j < REGISTER; j++) outside[j] = outside[j] == outside[j] ? outside[j] : TENSOR_CORE_NAN;
  return outside;
}

// Sums in a format: every product, rounded to float32, is added by one addition that is rounded once to the format.
enum SumFormat { SUM_FP32 = 0, SUM_FP16 = 1, SUM_BF16 = 2 };

// Return a + b rounded to odd: an inexact sum becomes the neighbour whose last bit is 1. Rounding the result to a
// format with fewer bits gives the same value as rounding the exact sum once.
FB_INLINE FloatLanes sum_to_odd(FloatLanes a, FloatLanes b) {
  FloatLanes s = a + b, from_b = s - a, error = (a - (s - from_b)) + (b - from_b);
  IntLanes u = (IntLanes)s, inexact = (error > 0) | (error < 0), opposite = ((IntLanes)error ^ u) < 0;
  return (FloatLanes)(inexact ? (u + (opposite ? IntLanes{} - 1 : IntLanes{})) | 1 : u);
}
template <SumFormat FORMAT> FB_INLINE FloatLanes added(FloatLanes a, FloatLanes b) {
  if (FORMAT == SUM_FP32) return a + b;
  FloatLanes v = sum_to_odd(a, b);
  IntLanes u = (IntLanes)v, magnitude = u & int32_t(MAGNITUDE), sign = u & int32_t(SIGN);
  if (FORMAT == SUM_BF16) {
    IntLanes near = (u + 0x7fff + ((u >> 16) & 1)) & int32_t(0xffff0000);
    return v == v ? (FloatLanes)near : v;
  }
  IntLanes near = (magnitude + 0xfff + ((magnitude >> 13) & 1)) & ~0x1fff;
  near = near >= 0x47800000 ? IntLanes{} + int32_t(INF) : near;  // from 2^16
  FloatLanes small = ((FloatLanes)magnitude + 0.75f) - 0.75f;    // a multiple of 2^-24
  near = magnitude < 0x38800000 ? (IntLanes)small : near;        // below 2^-14
  return v == v ? (FloatLanes)(near | sign) : v;
}
constexpr int AT_ONCE = 4;  // rows that are computed together, because each addition of a row waits for the one before
template <SumFormat FORMAT> inline void sums_in(const float *const *a, const FloatLanes *b, int64_t K, FloatLanes *c) {
  for (int i = 0; i < AT_ONCE; i++) c[i] = FloatLanes{};
  for (int64_t k = 0; k < K; k++)
    for (int i = 0; i < AT_ONCE; i++) c[i] = added<FORMAT>(c[i], b[k] * a[i][k]);
  for (int i = 0; i < AT_ONCE; i++)
    for (int j = 0; j < REGISTER; j++) c[i][j] = c[i][j] == c[i][j] ? c[i][j] : TENSOR_CORE_NAN;
}

// A group of 16 products of E2M1 values, whose sum p is exact. `grouped_block` adds up to four groups to c; a group is
// aligned by the sum of the exponents of its two block scales.
struct Group {
  float value;       // p times the significands of both block scales
  int32_t exponent;  // the sum of the exponents of both block scales
};
inline float grouped_block(const Group *groups, int count, float c, int fraction, int kept) {
  int top = LOWEST;
  bool special = !finite(c);
  for (int g = 0; g < count; g++) {
    special |= !finite(groups[g].value);
    if (groups[g].value != 0 && groups[g].exponent > top) top = groups[g].exponent;
  }
  if (special) return finite(c) ? TENSOR_CORE_NAN : c;
  Parted start = parted(c, LOWEST);
  if (start.exponent > top) top = start.exponent;
  auto steps = [&](float v, int e) FB_INLINED {
    int shift = fraction + e - top;
    return shift < -1000 ? int64_t(0) : int64_t(double(v) * with_exponent_double(shift));
  };
  int64_t sum = steps(start.significand, start.exponent);
  for (int g = 0; g < count; g++) sum += steps(groups[g].value, groups[g].exponent);
  return truncated(double(sum) * with_exponent_double(top - fraction), kept);
}

}  // namespace fb

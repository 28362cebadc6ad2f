// Compares the statistics' errors by reciprocal and correction (errors.cuh) with a true division, for every reciprocal
// that the instruction may return: all within one unit in the last place. The functions return the number of
// differences.
#include "simt.h"

#include "errors.cuh"

using namespace fb;

namespace {

// The reciprocals of x that differ by less than one unit from the true one; fewer than three are repeated.
struct Reciprocals {
  float of[3];
  explicit Reciprocals(float x) {
    float nearest = 1.0f / x;
    double exact = 1.0 / double(x), unit = double(value(bits(nearest) + 1)) - double(nearest);
    for (int i = 0; i < 3; i++) {
      float one = value(bits(nearest) + uint32_t(i) - 1u);
      of[i] = fabs(double(one) - exact) <= unit ? one : nearest;
    }
  }
};

uint32_t true_bits(float gap, float x) {
  float r = magnitude(gap) / x;
  return bits((r < 1.0f ? r : 1.0f) + 1.0f);
}

template <class D> int64_t of_halves(int first, int last) {
  int64_t wrong = 0;
  for (int i = first; i < last; i++) {
    const float x = D::widen(uint16_t(i));
    const Reciprocals inverse(x);
    const float small = x * power_of_two(-26);  // a smaller y does not change x - y; most y are at most 4 x
    for (int j = 0; j < D::inf; j++) {
      const float y = D::widen(uint16_t(j));
      if (y && (y < small || y > 4.0f * x)) continue;
      for (float one : inverse.of) wrong += error_bits<D>(x - y, x, one) != true_bits(x - y, x);
    }
  }
  return wrong;
}

}  // namespace

// All pairs of magnitudes, for x from one bit pattern up to another.
extern "C" int64_t bf16_pairs(int first, int last) { return of_halves<Bf16>(first, last); }
extern "C" int64_t fp16_pairs(int first, int last) { return of_halves<Fp16>(first, last); }

// All bf16 x that are rounded to zero: the gap is x. Reciprocals of subnormal x are infinite.
extern "C" int64_t bf16_zeros() {
  int64_t wrong = 0;
  for (int i = 1; i < 0x7e00; i++) {
    const float x = Bf16::widen(uint16_t(i));
    const Reciprocals inverse(x < FLOAT_MIN_NORMAL ? 1.0f : x);
    for (float one : inverse.of) wrong += error_bits<Bf16>(x, x, x < FLOAT_MIN_NORMAL ? value(INF) : one) != bits(2.0f);
  }
  return wrong;
}

// All float32 significands of x. One step gives the rounded reciprocal, so Markstein's theorem applies to all gaps;
// where it does not, all gaps are compared.
extern "C" int64_t fp32_reciprocals(int64_t *exceptions) {
  int64_t wrong = 0;
  *exceptions = 0;
  for (uint32_t m = 0; m < BINADE; m++) {
    const float x = value(ONE | m);
    for (float one : Reciprocals(x).of) {
      if (refined(x, one) == 1.0f / x) continue;
      ++*exceptions;
      for (uint32_t d = 0; d < BINADE; d++) wrong += ratio<Fp32>(value(ONE | d), x, one) != value(ONE | d) / x;
    }
  }
  return wrong;
}

// Pairs of float32 magnitudes.
extern "C" int64_t fp32_pairs(int64_t n, const float *x, const float *y) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < n; i++)
    for (float one : Reciprocals(x[i]).of)
      wrong += error_bits<Fp32>(x[i] - y[i], x[i], one) != true_bits(x[i] - y[i], x[i]);
  return wrong;
}

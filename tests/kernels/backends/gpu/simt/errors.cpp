// Compare relative errors |x - y| / x, which arithmetic.cuh computes by a reciprocal and a correction, with a true
// division. The GPU's instruction may return any reciprocal within one unit in the last place, so all of these are
// tried. The functions return the number of differences.
#include "simt.h"

#include "arithmetic.cuh"

using namespace fb;

namespace {

// The reciprocals of x that differ from the exact one by at most one unit in the last place: two or three numbers. The
// nearest one fills the array.
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
    const float small = x * power_of_two(-26);  // x - y is x for a smaller y; almost all y are at most 4 x
    for (int j = 0; j < D::inf; j++) {
      const float y = D::widen(uint16_t(j));
      if (y && (y < small || y > 4.0f * x)) continue;
      for (float one : inverse.of) wrong += error_bits<D>(x - y, x, one) != true_bits(x - y, x);
    }
  }
  return wrong;
}

}  // namespace

// Compare all pairs (x, y) of magnitudes with the bit pattern of x in [first, last).
extern "C" int64_t bf16_pairs(int first, int last) { return of_halves<Bf16>(first, last); }
extern "C" int64_t fp16_pairs(int first, int last) { return of_halves<Fp16>(first, last); }

// Compare the error of every bf16 x that is rounded to y = 0 with 1. The reciprocal of a subnormal x is infinity.
extern "C" int64_t bf16_zeros() {
  int64_t wrong = 0;
  for (int i = 1; i < 0x7e00; i++) {
    const float x = Bf16::widen(uint16_t(i));
    const Reciprocals inverse(x < FLOAT_MIN_NORMAL ? 1.0f : x);
    for (float one : inverse.of) wrong += error_bits<Bf16>(x, x, x < FLOAT_MIN_NORMAL ? value(INF) : one) != bits(2.0f);
  }
  return wrong;
}

// Compare the reciprocals of all float32 significands of x after one step of refinement with 1 / x rounded to nearest.
// If they are equal, Markstein's theorem says that all quotients are correct. Otherwise compare the quotients of all
// significands, and count the reciprocal in `exceptions`.
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

// Compare n pairs of float32 magnitudes.
extern "C" int64_t fp32_pairs(int64_t n, const float *x, const float *y) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < n; i++)
    for (float one : Reciprocals(x[i]).of)
      wrong += error_bits<Fp32>(x[i] - y[i], x[i], one) != true_bits(x[i] - y[i], x[i]);
  return wrong;
}

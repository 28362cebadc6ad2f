// Arithmetic of eight elements at once, where the instructions of a GPU allow a faster way than the definition with the
// same bits: random bits and stochastic rounding (as `philox` in philox.h and `rounded_at_once` in element.h), and
// statistics, whose relative errors need no division (as `error_units` in element.h). Also the types of values that
// threads accumulate for the parts of a matrix, for Gathering in tile.cuh.
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

struct Maximum {
  typedef uint32_t *Target;
  uint32_t top;  // float32 bits
  FB_D void join(const Maximum &m) { top = larger(top, m.top); }
  FB_D Maximum shuffled(int distance) const { return Maximum{__shfl_xor_sync(ALL, top, distance)}; }
  FB_D void hand_in(Target to, int64_t part) const { atomicMax(to + part, top); }
};

struct Extent {
  struct Target {
    uint32_t *top, *bottom;
  };
  // missing: (bits of infinity) - (bits of the smallest magnitude), so it is a maximum with neutral element 0, like
  // top.
  uint32_t top, missing;
  FB_D void take(uint32_t magnitude) {
    top = larger(top, magnitude);
    if (magnitude && magnitude < INF) missing = larger(missing, INF - magnitude);
  }
  FB_D void join(const Extent &e) { top = larger(top, e.top), missing = larger(missing, e.missing); }
  FB_D Extent shuffled(int distance) const {
    return Extent{__shfl_xor_sync(ALL, top, distance), __shfl_xor_sync(ALL, missing, distance)};
  }
  FB_D void hand_in(const Target &to, int64_t part) const {
    atomicMax(to.top + part, top);
    atomicMin(to.bottom + part, INF - missing);
  }
};

struct Weighed {  // a sum of `four_less_six` (element.h)
  typedef int64_t *Target;
  int64_t sum;
  FB_D void take(int64_t one) { sum += one; }
  FB_D void join(const Weighed &w) { sum += w.sum; }
  FB_D Weighed shuffled(int d) const {
    uint64_t high = __shfl_xor_sync(ALL, uint32_t(uint64_t(sum) >> 32), d),
             low = __shfl_xor_sync(ALL, uint32_t(sum), d);
    return Weighed{int64_t(high << 32 | low)};
  }
  FB_D void hand_in(Target to, int64_t part) const {
    atomicAdd((unsigned long long *)to + part, (unsigned long long)sum);
  }
};

struct WeighedMax {  // with Select::MAX, the two halves of `four_less_six`
  typedef int64_t *Target;
  uint32_t four, six;
  FB_D void take(int64_t one) { join(WeighedMax{uint32_t(uint64_t(one) >> 32), uint32_t(one)}); }
  FB_D void join(const WeighedMax &w) { four = larger(four, w.four), six = larger(six, w.six); }
  FB_D WeighedMax shuffled(int d) const {
    return WeighedMax{__shfl_xor_sync(ALL, four, d), __shfl_xor_sync(ALL, six, d)};
  }
  FB_D void hand_in(Target to, int64_t part) const {
    atomicMax((uint32_t *)(to + part), six), atomicMax((uint32_t *)(to + part) + 1, four);
  }
};

struct Counts {  // statistics of at most 2^15 elements, so that one word can contain two counts of 16 bits
  struct Target {
    int64_t *tally;
    uint32_t *amax;
  };
  uint64_t error;
  uint32_t nonzero, kept;  // the elements with x != 0, and with y != 0: each word has two counts, which are added later
  uint32_t saturated_capped, nonfinite_lost, top;

  FB_D void count(float was, float back, bool overflowed) {
    bool capped, some = was != 0.0f;
    uint32_t units = error_units(was, back, &capped);
    error += some ? units : 0;
    nonzero += some, kept += some && back != 0.0f;
    saturated_capped += uint32_t(overflowed && back != 0.0f) | uint32_t(capped) << 16;
    nonfinite_lost += uint32_t(!finite(was)) | uint32_t(!finite(back)) << 16;
    top = larger(top, bits(was) & MAGNITUDE);
  }
  FB_D void join(const Counts &c) {
    error += c.error, nonzero += c.nonzero, kept += c.kept, saturated_capped += c.saturated_capped;
    nonfinite_lost += c.nonfinite_lost, top = larger(top, c.top);
  }
  FB_D Counts shuffled(int d) const {
    uint64_t high = __shfl_xor_sync(ALL, uint32_t(error >> 32), d), low = __shfl_xor_sync(ALL, uint32_t(error), d);
    return Counts{high << 32 | low,
                  __shfl_xor_sync(ALL, nonzero, d),
                  __shfl_xor_sync(ALL, kept, d),
                  __shfl_xor_sync(ALL, saturated_capped, d),
                  __shfl_xor_sync(ALL, nonfinite_lost, d),
                  __shfl_xor_sync(ALL, top, d)};
  }
  FB_D void hand_in(const Target &to, int64_t part) const {
    const uint32_t some = (nonzero & 0xffffu) + (nonzero >> 16), left = (kept & 0xffffu) + (kept >> 16);
    uint64_t each[7] = {error,
                        some,
                        some - left,
                        saturated_capped & 0xffffu,
                        saturated_capped >> 16,
                        nonfinite_lost & 0xffffu,
                        nonfinite_lost >> 16};
#pragma unroll
    for (int i = 0; i < 7; i++)
      if (each[i]) atomicAdd((unsigned long long *)to.tally + 7 * part + i, (unsigned long long)each[i]);
    atomicMax(to.amax + part, top);
  }
};

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

// Number grids: rounds float32 values to an ExMy grid, to nearest or stochastically, and converts between float32 and
// the dtypes of tensors. The CPU and CUDA kernels both compile these functions.
//
// All arithmetic is IEEE float32 with subnormals, without contraction or reassociation (see the flags in compilation.py
// and variants.py).
#pragma once
#ifdef __CUDACC_RTC__  // NVRTC has no standard headers, and has memcpy built in
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef int int32_t;
typedef long long int64_t;
#else
#include <stdint.h>
#include <string.h>
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define FB_HD __host__ __device__ __forceinline__
#else
#define FB_HD inline __attribute__((always_inline))
#endif

namespace fb {

constexpr uint32_t SIGN = 0x80000000u, MAGNITUDE = 0x7fffffffu, INF = 0x7f800000u, NAN_BITS = 0x7fc00000u,
                   ONE = 0x3f800000u,
                   BINADE = 0x800000u;  // BINADE: the difference of the bits of two adjacent powers of two
constexpr float FLOAT_MAX = 3.4028234663852886e38f, FLOAT_MIN_NORMAL = 1.1754943508222875e-38f;

FB_HD uint32_t bits(float v) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(v);
#else
  uint32_t u;
  memcpy(&u, &v, 4);
  return u;
#endif
}
FB_HD float value(uint32_t u) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(u);
#else
  float v;
  memcpy(&v, &u, 4);
  return v;
#endif
}
FB_HD float magnitude(float v) { return value(bits(v) & MAGNITUDE); }
FB_HD float with_sign(float v, float sign) { return value((bits(v) & MAGNITUDE) | (bits(sign) & SIGN)); }
FB_HD float smaller(float a, float b) { return a < b ? a : b; }
FB_HD float fused(float a, float b, float c) {  // a * b + c, rounded once
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
FB_HD bool finite(float v) { return (bits(v) & MAGNITUDE) < INF; }
FB_HD int exponent(uint32_t normal) { return int((normal >> 23) & 0xff) - 127; }
FB_HD float power_of_two(int e) {  // 2^e for -149 <= e <= 127, subnormals included
  return e >= -126 ? value(uint32_t(e + 127) << 23) : value(1u << (e + 149));
}

// A dtype defines its storage, its exact widening and its nearest-even narrowing.
struct Bf16 {
  typedef uint16_t Storage;
  static constexpr float max = 3.3895313892515355e38f;
  static constexpr uint32_t magnitude_mask = 0x7fff, inf = 0x7f80;
  FB_HD static float widen(uint16_t s) { return value(uint32_t(s) << 16); }
  FB_HD static uint16_t narrow(float v) {
#ifdef __CUDA_ARCH__  // this is faster, and the code below would change the sign of the NaN that GPUs produce
    uint16_t s;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(s) : "f"(v));
    return s;
#else
    uint32_t u = bits(v);
    return uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
  }
};
struct Fp16 {
  typedef uint16_t Storage;
  static constexpr float max = 65504.0f;
  static constexpr uint32_t magnitude_mask = 0x7fff, inf = 0x7c00;
  FB_HD static float widen(uint16_t s) {
#ifdef __CUDA_ARCH__
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(s));
    return v;
#else
    uint32_t magnitude = s & 0x7fffu;
    float scaled = value(magnitude << 13) * 5.192296858534828e33f;  // 2^112 turns fp16's bias into float32's
    uint32_t u = magnitude >= inf ? INF | (magnitude << 13) : bits(scaled);
    return value(u | (uint32_t(s & 0x8000u) << 16));
#endif
  }
  FB_HD static uint16_t narrow(float v) {
#ifdef __CUDA_ARCH__
    uint16_t s;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(s) : "f"(v));
    return s;
#else
    uint32_t u = bits(v), sign = (u & SIGN) >> 16, mag = u & MAGNITUDE;
    uint32_t e = mag & INF, floor_e = uint32_t(-14 + 127) << 23;
    float step_up = value((e > floor_e ? e : floor_e) + (13u << 23) + 0x400000u);
    float rounded = (value(mag) + step_up) - step_up;              // onto the fp16 grid, subnormals included
    uint32_t code = bits(rounded * 1.925929944387236e-34f) >> 13;  // times 2^-112: exact
    return uint16_t(sign | (mag >= 0x477ff000u ? (mag > INF ? 0x7e00u : 0x7c00u) : code));  // from 65520 up: inf
#endif
  }
};
struct Fp32 {
  typedef uint32_t Storage;
  static constexpr float max = FLOAT_MAX;
  static constexpr uint32_t magnitude_mask = 0x7fffffff, inf = 0x7f800000;
  FB_HD static float widen(uint32_t s) { return value(s); }
  FB_HD static uint32_t narrow(float v) { return bits(v); }
};

// An element grid. `wide` grids share float32's exponent range and are rounded by bit operations. All others are
// rounded by adding and subtracting a constant whose unit in the last place is the grid's step.
struct Grid {
  uint32_t min_exponent;  // the float32 bits of the smallest normal value
  uint32_t dropped;       // 23 - (number of mantissa bits): the mantissa bits of float32 that the grid lacks
  float max;              // the largest finite value
  float overflow;         // the magnitude that replaces values beyond max: max, inf or NaN
  uint32_t wide;          // 1 if the grid has 8 exponent bits
  uint32_t inf;           // 1 if the grid has infinities
};
struct GridWords {  // a Grid with the bits of floats instead of floats, so that it can be a preprocessor constant
  uint32_t min_exponent, dropped, max, overflow, wide, inf;
  FB_HD Grid grid() const { return Grid{min_exponent, dropped, value(max), value(overflow), wide, inf}; }
};

struct Step {  // the grid's spacing around one value
  uint32_t exponent;
  FB_HD float constant(const Grid &g) const { return value(exponent + (g.dropped << 23) + 0x400000u); }
  FB_HD float size(const Grid &g) const { return value(exponent - ((23u - g.dropped) << 23)); }
};
FB_HD Step step_at(float v, const Grid &g) {
  uint32_t e = bits(v) & INF;
  return Step{e > g.min_exponent ? e : g.min_exponent};
}

// Round to nearest, ties to even, without an upper limit of the exponent. A zero result may lose its sign, which
// callers restore if they need it. On grids that are not wide, |v| must be below 4 * max, which `bounded` ensures.
template <bool WIDE> FB_HD float nearest(float v, const Grid &g) {
  if (WIDE) {
    uint32_t u = bits(v), mag = u & MAGNITUDE, rest = (1u << g.dropped) - 1u;
    uint32_t up = ((rest >> 1) + ((mag >> g.dropped) & 1u)) & rest;  // 0 where nothing is dropped
    return value((u & SIGN) | ((mag + up) & ~rest));
  }
  float c = step_at(v, g).constant(g);
  return (v + c) - c;
}
FB_HD float bounded(float v, const Grid &g) {
  if (g.wide) return v;
  float limit = 4.0f * g.max, mag = magnitude(v);
  return with_sign(mag < limit ? mag : limit, v);
}
// Return the code of the magnitude of a grid value: the number of steps from zero. For a value below the smallest
// normal value, the mantissa of (value + smallest normal value) is this number; for other values, their own bits are.
// The wrong one of the two numbers is always smaller, so the maximum is returned. No float32 subnormals occur, on which
// processors are slow.
template <bool WIDE> FB_HD uint32_t magnitude_code(float q, const Grid &g) {
  float size = magnitude(q), normal = value(g.min_exponent);
  if (WIDE) return bits(size) >> g.dropped;
  uint32_t below = bits(size + normal), above = bits(size) + BINADE;
  return ((below > above ? below : above) - g.min_exponent) >> g.dropped;
}
FB_HD uint32_t magnitude_code(float q, const Grid &g) {
  return g.wide ? magnitude_code<true>(q, g) : magnitude_code<false>(q, g);
}
// Return the grid value whose magnitude_code is `code`. If `special`, codes above the code of the largest value are
// NaN, except that the first of them is infinity if the grid has infinities.
template <bool WIDE> FB_HD float magnitude_value(uint32_t code, const Grid &g, bool special = true) {
  uint32_t steps = code << g.dropped;
  if (WIDE) return value(steps);
  float below = value(steps + g.min_exponent) - value(g.min_exponent), above = value(steps + g.min_exponent - BINADE);
  float size = smaller(below, above);
  if (!special) return size;
  uint32_t last = magnitude_code<false>(g.max, g);
  return code <= last ? size : value(g.inf && code == last + 1u ? INF : NAN_BITS);
}
FB_HD float magnitude_value(uint32_t code, const Grid &g) {
  return g.wide ? magnitude_value<true>(code, g) : magnitude_value<false>(code, g);
}
// Return the number of bits that a code occupies in packed storage: formats of 9 to 16 bits use two bytes.
FB_HD constexpr int stored_bits(int bits) { return bits <= 8 ? bits : 16; }
FB_HD float limited(float q, const Grid &g) { return magnitude(q) > g.max ? with_sign(g.overflow, q) : q; }

// Stochastic rounding starts at the nearest grid value and moves to the neighbour on the other side of v with
// probability |v - nearest| / step. The uniform variate has 48 bits. Its first 16 bits, `high` (eight elements share a
// Philox output), decide all but about one case in 65,536 (ASK), and only in this case 32 more bits, `low`, are drawn.
// So the probability is exact to 2^-48, and small values are not flushed more often than they should be.
enum Move { STAY = 0, GO = 1, ASK = 2 };

template <bool WIDE> struct Drawn {
  float near;
  float gap, step;  // if not wide: v - near, and the distance to the next value of the grid
  // If wide: |v - near| / step as a 32-bit fraction, and the bits of the grid value on the other side of v, less the
  // bits of near.
  uint32_t part, neighbour;
};
template <bool WIDE> FB_HD Drawn<WIDE> draw(float v, const Grid &g) {
  Drawn<WIDE> d{};
  d.near = nearest<WIDE>(v, g);
  if (WIDE) {
    uint32_t gap = bits(v) - bits(d.near), below = uint32_t(int32_t(gap) >> 31);  // all ones where |v| is below |near|
    d.part = ((gap ^ below) - below) << (-g.dropped & 31);
    d.neighbour = ((1u << g.dropped) ^ below) - below;
  } else {
    d.gap = v - d.near;
    d.step = step_at(v, g).size(g);
  }
  return d;
}
// Return the threshold with which the high bits are compared: the integer part of |gap| / step * 2^16, which is exact.
// If both are equal, the low bits decide. (If |gap| / step has no further bits, the low bits do not change the
// decision.)
FB_HD uint32_t threshold(const Drawn<false> &d) {
  float per_step = value((254u << 23) + (16u << 23) - bits(d.step));  // 2^16 / step
  return uint32_t(int32_t(magnitude(d.gap) * per_step));
}
FB_HD uint32_t threshold(const Drawn<true> &d) { return d.part >> 16; }
template <bool WIDE> FB_HD Move decide(const Drawn<WIDE> &d, uint32_t high) {
  uint32_t t = threshold(d);
  return high < t ? GO : high == t ? ASK : STAY;
}
FB_HD bool goes(const Drawn<false> &d, uint32_t high, uint32_t low) {
  double u = double((uint64_t(high) << 32) | low) * 3.552713678800501e-15;  // 2^-48
  return u * double(d.step) < double(magnitude(d.gap));
}
FB_HD bool goes(const Drawn<true> &d, uint32_t high, uint32_t low) {
  return ((uint64_t(high) << 32) | low) < (uint64_t(d.part) << 16);
}
FB_HD float moved(const Drawn<false> &d) { return d.near + with_sign(d.step, d.gap); }
FB_HD float moved(const Drawn<true> &d) { return value(bits(d.near) + d.neighbour); }

}  // namespace fb

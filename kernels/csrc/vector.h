// Vectors of 16 lanes: arithmetic, loads and stores of BF16 and float32, partial vectors at the end of a row, and sums.
//
// Every processor computes the same operations in the same order. A vector consists of one register of AVX-512, two of
// AVX2 or four of 128 bits, because g++ turns vectors that are longer than a register into scalar code. Products and
// sums are never fused (see the flags in compilation.py).
#pragma once
#include <stdint.h>
#include <string.h>
#include <type_traits>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace fb {

#if defined(__AVX512BW__)
constexpr int REGISTER = 16;  // the number of 32-bit lanes of a register
#elif defined(__AVX2__)
constexpr int REGISTER = 8;
#else
constexpr int REGISTER = 4;
#endif
constexpr int LANES = 16, PARTS = LANES / REGISTER;

typedef uint16_t bf16;  // the bits of a BF16 number
typedef uint16_t U16Part __attribute__((vector_size(2 * REGISTER)));
template <class T> struct Vector {
  typedef T Part __attribute__((vector_size(4 * REGISTER)));
  Part part[PARTS];
};
typedef Vector<float> F32x16;
typedef Vector<int32_t> I32x16;
typedef Vector<uint32_t> U32x16;
typedef uint64_t U64Part __attribute__((vector_size(4 * REGISTER)));

#define FB_INLINE inline __attribute__((always_inline))
#define FB_INLINED __attribute__((always_inline))  // after the parameters of a lambda
// Define a function of vectors by an expression for part p (one register) of the result.
#define FB_BY_PARTS(Result, function, parameters, expression)                            \
  FB_INLINE Result function parameters {                                                 \
    Result result;                                                                       \
    _Pragma("GCC unroll 4") for (int p = 0; p < PARTS; p++) result.part[p] = expression; \
    return result;                                                                       \
  }
#define FB_OPERATOR(T, op)                                                                              \
  FB_BY_PARTS(Vector<T>, operator op, (const Vector<T> &a, const Vector<T> &b), a.part[p] op b.part[p]) \
  FB_BY_PARTS(Vector<T>, operator op, (const Vector<T> &a, T b), a.part[p] op b)
#define FB_COMPARISON(op)                                                                      \
  FB_BY_PARTS(I32x16, operator op, (const F32x16 &a, const F32x16 &b), a.part[p] op b.part[p]) \
  FB_BY_PARTS(I32x16, operator op, (const F32x16 &a, float b), a.part[p] op b)

FB_OPERATOR(float, +)
FB_OPERATOR(float, -)
FB_OPERATOR(float, *)
FB_OPERATOR(int32_t, +)
FB_OPERATOR(int32_t, -)
FB_OPERATOR(int32_t, &)
FB_OPERATOR(int32_t, <)
FB_OPERATOR(int32_t, >>)
FB_OPERATOR(int32_t, <<)
FB_OPERATOR(uint32_t, +)
FB_OPERATOR(uint32_t, &)
FB_OPERATOR(uint32_t, |)
FB_OPERATOR(uint32_t, >>)
FB_OPERATOR(uint32_t, <<)
FB_COMPARISON(<)
FB_COMPARISON(>)
FB_COMPARISON(!=)
FB_BY_PARTS(F32x16, operator-, (const F32x16 &a), -a.part[p])
FB_BY_PARTS(F32x16, operator-, (float a, const F32x16 &b), a - b.part[p])
FB_BY_PARTS(F32x16, operator/, (float a, const F32x16 &b), a / b.part[p])
FB_BY_PARTS(F32x16, all, (float v), v - F32x16::Part{})  // v + 0 would turn -0 into 0
FB_BY_PARTS(U32x16, bits, (const F32x16 &v), U32x16::Part(v.part[p]))
FB_BY_PARTS(F32x16, number, (const U32x16 &v), __builtin_convertvector(I32x16::Part(v.part[p]), F32x16::Part))
FB_BY_PARTS(I32x16, signed_bits, (const F32x16 &v), I32x16::Part(v.part[p]))
FB_BY_PARTS(F32x16, value, (const U32x16 &v), F32x16::Part(v.part[p]))
FB_BY_PARTS(F32x16, value, (const I32x16 &v), F32x16::Part(v.part[p]))
template <class T>
FB_BY_PARTS(Vector<T>, select, (const I32x16 &which, const Vector<T> &a, const Vector<T> &b),
            which.part[p] ? a.part[p] : b.part[p])
// For the pairs of lanes (0, 1), (2, 3) and so on: the lanes of each pair exchanged, the first lane in both places, and
// the second lane in both places.
#ifdef __AVX512BW__
FB_BY_PARTS(F32x16, exchanged, (const F32x16 &v), F32x16::Part(_mm512_permute_ps((__m512)v.part[p], 0xb1)))
    FB_BY_PARTS(F32x16, firsts, (const F32x16 &v), F32x16::Part(_mm512_moveldup_ps((__m512)v.part[p])))
        FB_BY_PARTS(F32x16, seconds, (const F32x16 &v), F32x16::Part(_mm512_movehdup_ps((__m512)v.part[p])))
#else
FB_BY_PARTS(F32x16, exchanged, (const F32x16 &v), F32x16::Part(U64Part(v.part[p]) >> 32 | U64Part(v.part[p]) << 32))
    FB_BY_PARTS(F32x16, firsts, (const F32x16 &v),
                F32x16::Part((U64Part(v.part[p]) & 0xffffffffu) | U64Part(v.part[p]) << 32))
        FB_BY_PARTS(F32x16, seconds, (const F32x16 &v),
                    F32x16::Part(U64Part(v.part[p]) >> 32 | (U64Part(v.part[p]) & 0xffffffff00000000u)))
#endif
            FB_INLINE F32x16 &operator+=(F32x16 &a, const F32x16 &b) {
  return a = a + b;
}
// a > b ? a : b and a < b ? a : b; if a or b is NaN, the result is b. For AVX-512 g++ would compile such a selection to
// two instructions.
#ifdef __AVX512BW__
FB_BY_PARTS(F32x16, larger, (const F32x16 &a, const F32x16 &b),
            F32x16::Part(_mm512_max_ps((__m512)a.part[p], (__m512)b.part[p])))
FB_BY_PARTS(F32x16, lesser, (const F32x16 &a, const F32x16 &b),
            F32x16::Part(_mm512_min_ps((__m512)a.part[p], (__m512)b.part[p])))
#else
FB_INLINE F32x16 larger(const F32x16 &a, const F32x16 &b) { return select(a > b, a, b); }
FB_INLINE F32x16 lesser(const F32x16 &a, const F32x16 &b) { return select(a < b, a, b); }
#endif

// Return the bits of the nearest BF16 numbers, ties to even; NaN stays NaN.
FB_INLINE U32x16 narrow(const F32x16 &v) {
  U32x16 u = bits(v), nan = U32x16{} + 0x7fc0u;
  return select(v != v, nan, (u + ((u >> 16u) & 1u) + 0x7fffu) >> 16u);
}
FB_INLINE F32x16 widen(const U32x16 &bf16_bits) { return value(bf16_bits << 16u); }

// ------------------------------------------------------------------------------------------------ memory

// The lanes of a vector that are in memory: all lanes, or the first n.
struct Whole {};
struct First {
  int n;
};
FB_INLINE F32x16 load(const float *from, Whole = {}) {
  F32x16 v;
  for (int p = 0; p < PARTS; p++) memcpy(&v.part[p], from + p * REGISTER, sizeof v.part[p]);
  return v;
}
FB_INLINE U32x16 load_bits(const bf16 *from) {
  U32x16 v;
  for (int p = 0; p < PARTS; p++) {
#if defined(__AVX512BW__)  // g++ would widen each half of a register separately
    v.part[p] = U32x16::Part(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from + p * REGISTER))));
#elif defined(__AVX2__)
    v.part[p] = U32x16::Part(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + p * REGISTER))));
#else
    U16Part part;
    memcpy(&part, from + p * REGISTER, sizeof part);
    v.part[p] = __builtin_convertvector(part, U32x16::Part);
#endif
  }
  return v;
}
FB_INLINE F32x16 load(const bf16 *from, Whole = {}) { return widen(load_bits(from)); }
template <class T> FB_INLINE F32x16 load(const T *from, First lanes) {  // the other lanes are 0
  T some[LANES] = {};
  memcpy(some, from, size_t(lanes.n) * sizeof(T));
  return load(some);
}
FB_INLINE void store(float *to, const F32x16 &v, Whole = {}) {
  for (int p = 0; p < PARTS; p++) memcpy(to + p * REGISTER, &v.part[p], sizeof v.part[p]);
}
FB_INLINE void store(uint32_t *to, const U32x16 &v) {
  for (int p = 0; p < PARTS; p++) memcpy(to + p * REGISTER, &v.part[p], sizeof v.part[p]);
}
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
#define FB_CONVERTS_BF16
// True if the processor's conversions to BF16 round all lanes of x like `narrow` and Bf16::narrow. They replace
// subnormals by zeros and keep a part of a NaN's bits; lanes with such values are rare.
FB_INLINE bool converts(__m512 x) {
  constexpr int QUIET_NAN = 0x01, SUBNORMAL = 0x20, SIGNALING_NAN = 0x80;
  return __builtin_expect(_mm512_fpclass_ps_mask(x, QUIET_NAN | SUBNORMAL | SIGNALING_NAN) == 0, 1);
}
#endif
#ifdef __AVX512BW__
FB_INLINE __m256i narrow_bf16(const F32x16 &v) {  // `narrow` with 16 bits a lane
#ifdef FB_CONVERTS_BF16
  if (converts((__m512)v.part[0])) return (__m256i)_mm512_cvtneps_pbh((__m512)v.part[0]);
#endif
  return _mm512_cvtepi32_epi16((__m512i)narrow(v).part[0]);
}
FB_INLINE F32x16 widen_bf16(const __m256i &n) {
  return F32x16{{F32x16::Part(_mm512_slli_epi32(_mm512_cvtepu16_epi32(n), 16))}};
}
#endif
FB_INLINE void store(bf16 *to, const F32x16 &v, Whole = {}) {
#ifdef __AVX512BW__
  _mm256_storeu_si256((__m256i *)to, narrow_bf16(v));
#else
  U32x16 n = narrow(v);
#if defined(__AVX2__)  // g++ would narrow each register separately
  __m256i mixed = _mm256_packus_epi32((__m256i)n.part[0], (__m256i)n.part[1]);
  _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(mixed, 0xd8));
#else
  for (int p = 0; p < PARTS; p++) {
    U16Part part = __builtin_convertvector(n.part[p], U16Part);
    memcpy(to + p * REGISTER, &part, sizeof part);
  }
#endif
#endif
}
template <class T> FB_INLINE void store(T *to, const F32x16 &v, First lanes) {
  T some[LANES];
  store(some, v);
  memcpy(to, some, size_t(lanes.n) * sizeof(T));
}
// Return v as it would be after a store to this type and a load: rounded to BF16, or unchanged.
FB_INLINE F32x16 rounded(const F32x16 &v, const float *) { return v; }
FB_INLINE F32x16 rounded(const F32x16 &v, const bf16 *) {
#ifdef __AVX512BW__
  return widen_bf16(narrow_bf16(v));
#else
  return widen(narrow(v));
#endif
}
// Store v, and return what a load would return then.
template <class T, class Lanes> FB_INLINE F32x16 stored(T *to, const F32x16 &v, Lanes lanes) {
  const F32x16 result = rounded(v, to);
  store(to, result, lanes);
  return result;
}
#ifdef __AVX512BW__
FB_INLINE F32x16 stored(bf16 *to, const F32x16 &v, Whole) {  // converts v once
  const __m256i n = narrow_bf16(v);
  _mm256_storeu_si256((__m256i *)to, n);
  return widen_bf16(n);
}
#endif

FB_INLINE float first(const F32x16 &v) { return v.part[0][0]; }
FB_INLINE I32x16 lane_numbers() {
  constexpr int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  I32x16 v;
  memcpy(&v, numbers, sizeof v);
  return v;
}
// Return the lanes in another order: lane i of the result is lane i ^ H of v.
template <int H> FB_INLINE F32x16 crossed(const F32x16 &v) {
  F32x16 result;
  for (int p = 0; p < PARTS; p++) {
    if (H >= REGISTER) {
      result.part[p] = v.part[p ^ (H / REGISTER)];
    } else {
#ifdef __clang__
      for (int i = 0; i < REGISTER; i++) result.part[p][i] = v.part[p][i ^ H];
#else
      result.part[p] = __builtin_shuffle(v.part[p], lane_numbers().part[0] ^ H);
#endif
    }
  }
  return result;
}
FB_INLINE F32x16 keep(const F32x16 &v, Whole, float = 0.0f) { return v; }
FB_INLINE F32x16 keep(const F32x16 &v, First lanes, float other = 0.0f) {  // the other lanes become `other`
  return select(lane_numbers() < lanes.n, v, all(other));
}

// Call f(i, lanes) for each vector of a row of n elements; it starts at element i, and `lanes` says which lanes exist.
// f has to be FB_INLINED, because a real call would keep its variables in memory instead of registers.
template <class F> FB_INLINE void each_vector(int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(i, Whole{});
  if (i < n) f(i, First{int(n - i)});
}
inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

// Long computations of single vectors are slow, because each operation has to wait for the one before it. So they are
// done for TOGETHER vectors, and each step is done for all of them before the next step. Processors without AVX-512
// have too few registers for more than one vector.
constexpr int TOGETHER = REGISTER == 16 ? 4 : 1;
template <int N> using Count = std::integral_constant<int, N>;

// Call f(i, lanes, N) for groups of N = TOGETHER vectors of a row of n elements, and with N = 1 for each vector that
// remains. i: the first element of a group. N is a Count, so f can use it as a constant.
template <class F> FB_INLINE void each_group(int64_t n, F f) {
  int64_t i = 0;
  for (; i + TOGETHER * LANES <= n; i += TOGETHER * LANES) f(i, Whole{}, Count<TOGETHER>());
  each_vector(n - i, [&](int64_t k, auto lanes) FB_INLINED { f(i + k, lanes, Count<1>()); });
}
// Call f(i) for i = 0 … N - 1, without a loop.
template <int N, class F> FB_INLINE void each(F f) {
#pragma GCC unroll 8
  for (int i = 0; i < N; i++) f(i);
}
// Make the compiler finish a step for all vectors of x; by itself it computes one vector after the other.
template <int N> FB_INLINE void together(F32x16 (&x)[N]) {
#ifdef __AVX512BW__
  static_assert(N == 1 || N == 4, "the statement below has four operands");
  if (N == 4) __asm__("" : "+v"(x[0].part[0]), "+v"(x[1 % N].part[0]), "+v"(x[2 % N].part[0]), "+v"(x[3 % N].part[0]));
#else
  (void)x;
#endif
}

// ------------------------------------------------------------------------------------------------ functions

// Combine all lanes by f (`total`: the sum, `largest`: the maximum): first lanes i and i + 8, then i and i + 4, i and
// i + 2, i and i + 1. Lane 0 has the result.
template <class F> FB_INLINE float combined(F32x16 v, F f) {
  v = f(v, crossed<8>(v));
  v = f(v, crossed<4>(v));
  v = f(v, crossed<2>(v));
  return first(f(v, crossed<1>(v)));
}
FB_INLINE float total(const F32x16 &v) {
  return combined(v, [](const F32x16 &a, const F32x16 &b) FB_INLINED { return a + b; });
}
FB_INLINE float largest(const F32x16 &v) {
  return combined(v, [](const F32x16 &a, const F32x16 &b) FB_INLINED { return larger(a, b); });
}

// Return p·2^n, rounded once, for integers n from -151 to 129 and p between 1/2 and 2; shifted = n + 1.5 · 2^23.
FB_INLINE F32x16 times_power(const F32x16 &p, const F32x16 &n, const F32x16 &shifted) {
#ifdef __AVX512BW__
  (void)shifted;
  return F32x16{{F32x16::Part(_mm512_scalef_ps((__m512)p.part[0], (__m512)n.part[0]))}};
#else
  (void)n;
  I32x16 exponent = signed_bits(shifted) - 0x4b400000, first = exponent >> 1, second = exponent - first;
  return (p * value((first + 127) << 23)) * value((second + 127) << 23);
#endif
}

// Replace x by e^x, to about 2 units in the last place, also for subnormal results; beyond float32 0 or infinity. e^x
// is 2^n · e^r with x = n·ln 2 + r. ln 2 is split into two constants, so that n times the first constant is exact; 2^n
// is applied by `times_power`. reference/functions.py repeats the computation operation by operation.
template <int N> FB_INLINE void exponentials(F32x16 (&x)[N]) {
  constexpr float MAGIC = 12582912.0f;  // 1.5 · 2^23: adding it to a small number rounds the number to an integer
  F32x16 shifted[N], n[N], p[N];
  each<N>([&](int i) FB_INLINED { x[i] = lesser(all(89.0f), larger(all(-104.0f), x[i])); });
  each<N>([&](int i) FB_INLINED { shifted[i] = x[i] * 1.44269504f + MAGIC; });
  each<N>([&](int i) FB_INLINED { n[i] = shifted[i] - MAGIC; });
  each<N>([&](int i) FB_INLINED { x[i] = x[i] - n[i] * 0.693359375f; });
  each<N>([&](int i) FB_INLINED { x[i] = x[i] + n[i] * 2.12194440e-4f; });
  each<N>([&](int i) FB_INLINED { p[i] = x[i] * 1.9875691500e-4f + 1.3981999507e-3f; });
  auto add_term = [&](float coefficient) FB_INLINED {
    together(p);
    each<N>([&](int i) FB_INLINED { p[i] = p[i] * x[i] + coefficient; });
  };
  add_term(8.3334519073e-3f);
  add_term(4.1665795894e-2f);
  add_term(1.6666665459e-1f);
  add_term(5.0000001201e-1f);
  together(p);
  each<N>([&](int i) FB_INLINED { p[i] = p[i] * (x[i] * x[i]) + x[i]; });
  together(p);
  each<N>([&](int i) FB_INLINED { x[i] = times_power(p[i] + 1.0f, n[i], shifted[i]); });
}
FB_INLINE F32x16 exponential(const F32x16 &x) {
  F32x16 one[] = {x};
  exponentials(one);
  return one[0];
}

}  // namespace fb

// Loops over runs of elements, written so that g++ vectorises them: fixed trip counts, no branches, integer sums.
// `piece` quantizes up to 128 ordinary elements; `element` (element.h) quantizes one element in any case. Both call the
// functions of numeric.h, and tests check that they give the same bits.
#pragma once
#include <type_traits>
#include "element.h"
#include "random.h"

namespace fb {

constexpr int PIECE = 128;       // elements of a piece, few enough that their statistics fit 32-bit sums
constexpr int GROUP = 16;        // columns of a group, which share one scale in the layout BY_SIXTEEN
constexpr int64_t CHUNK = 1024;  // columns whose scales, random bits or codes are buffered at a time

#ifdef __AVX512BW__
// Return maxima of the magnitudes of 16 bits in N vectors, each of which has two groups of 16. A step combines two
// vectors into one that has half as many numbers of each group. With N = 16 one number per group remains: those of the
// first groups of vectors 0 to 7, then of their second groups, then both for vectors 8 to 15.
template <int N> FB_INLINE __m512i maxima(const uint16_t *x, __m512i mask) {
  if constexpr (N == 1) {
    return _mm512_and_si512(_mm512_loadu_si512(x), mask);
  } else {
    const __m512i a = maxima<N / 2>(x, mask), b = maxima<N / 2>(x + N * GROUP, mask);
    if (N == 2) return _mm512_max_epu16(_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b));
    if (N == 4) return _mm512_max_epu16(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    if (N == 8) return _mm512_max_epu16(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    return _mm512_max_epu16(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd));
  }
}
// Write the maxima of 32 groups of 16 magnitudes.
FB_INLINE void maxima_of_groups(const uint16_t *x, uint16_t mask, uint16_t *out) {
  const __m512i order = _mm512_set_epi16(31, 23, 30, 22, 29, 21, 28, 20, 27, 19, 26, 18, 25, 17, 24, 16,  //
                                         15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
  const __m512i all = maxima<16>(x, _mm512_set1_epi16(int16_t(mask)));
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(order, all));
}
#endif
// Write the largest magnitude of each group of 16 elements, as storage bits (which have the order of the magnitudes).
template <class D> inline void group_maxima(const typename D::Storage *x, int64_t n, typename D::Storage *out) {
  typedef typename D::Storage S;
  int64_t whole = n / GROUP, b = 0;
#ifdef __AVX512BW__
  if (sizeof(S) == 2)
    for (; b + 32 <= whole; b += 32)
      maxima_of_groups((const uint16_t *)x + b * GROUP, uint16_t(D::magnitude_mask), (uint16_t *)out + b);
#endif
  for (; b < whole; b++) {
    S m = 0;
    for (int i = 0; i < GROUP; i++) {
      S v = S(x[b * GROUP + i] & D::magnitude_mask);
      m = v > m ? v : m;
    }
    out[b] = m;
  }
  if (n % GROUP) {
    S m = 0;
    for (int64_t i = whole * GROUP; i < n; i++) {
      S v = S(x[i] & D::magnitude_mask);
      m = v > m ? v : m;
    }
    out[whole] = m;
  }
}
template <class D> inline void column_maxima(const typename D::Storage *x, int64_t n, typename D::Storage *out) {
  typedef typename D::Storage S;
  for (int64_t i = 0; i < n; i++) {
    S v = S(x[i] & D::magnitude_mask);
    out[i] = v > out[i] ? v : out[i];
  }
}

// Narrow n magnitudes to D and give them the signs of x. NORMAL: all magnitudes are zero or normal in float32.
template <class D, bool NORMAL>
inline __attribute__((always_inline)) void narrow_run(const float *__restrict v,
                                                      const typename D::Storage *__restrict x,
                                                      typename D::Storage *__restrict y, int n) {
  typedef typename D::Storage S;
  int i = 0;
#ifdef __AVX512BF16__  // the instruction flushes subnormals to zero
  if (NORMAL && std::is_same<D, Bf16>::value)
    for (; i + 32 <= n; i += 32) {
      __m512i size = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(v + i + 16), _mm512_loadu_ps(v + i));
      __m512i sign = _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi16(int16_t(0x8000)));
      _mm512_storeu_si512(y + i, _mm512_or_si512(size, sign));
    }
#endif
  for (; i < n; i++) y[i] = S(D::narrow(v[i]) | (x[i] & S(~D::magnitude_mask)));
}

// For each column: the two scales that Four Over Six compares, the amax of the block, its `inverse`, and the
// second-level value.
struct Candidates {
  const float *four_encode, *four_decode, *six_encode, *six_decode, *amax, *inverse, *outer;
  uint32_t select;

  FourOverSix at(int64_t i) const {
    return FourOverSix{Scale{six_encode[i], six_decode[i], outer[i], 0},
                       Scale{four_encode[i], four_decode[i], outer[i], 0}, amax[i], select};
  }
};

// Return the smaller of two magnitudes; NaN counts as larger than all numbers. The bits are compared, because g++
// compiles a minimum of floats to slower selections if their bits are used elsewhere.
FB_INLINE float smaller_magnitude(float a, float b) { return value(bits(a) < bits(b) ? bits(a) : bits(b)); }

// True if `quotient` is correctly rounded for all divisors of the dtype D that are `divisible`: their mantissas are so
// short that the distance of a quotient from the middle of two floats exceeds the error before the last rounding.
template <class D> constexpr bool DIVIDES_EXACTLY = sizeof(typename D::Storage) == 2;
// The reciprocal of an amax, with which `relative` divides. It is 0 for a block of zeros, whose errors are 0, and NaN
// where `quotient` would not be exact; then `four_less_six` of each element is computed with a division.
template <class D> FB_INLINE float inverse_amax(float amax) {
  const float inverse = divisible(amax) ? 1.0f / amax : value(NAN_BITS);
  return DIVIDES_EXACTLY<D> && amax != 0.0f ? inverse : 0.0f;
}
template <class D> FB_INLINE float relative(float error, float amax, float inverse) {
  return DIVIDES_EXACTLY<D> ? quotient(error, amax, inverse) : error / amax;
}

// `scaled` and `error_units` of element.h for E2M1, written so that they vectorise well. error_bits returns the bits of
// `offset` (`error_offset`) plus the units of the error.
FB_INLINE float scaled_magnitude(float size, const Grid &g, float encode) {
  return smaller_magnitude(size * encode, 4.0f * g.max);
}
template <class D>
FB_INLINE int32_t error_bits(float size, float q, const Grid &g, float decode, float outer, float amax, float inverse,
                             float offset) {
  const float y = smaller_magnitude((smaller(q, g.max) * decode) * outer, FLOAT_MAX);
  return int32_t(bits(smaller_magnitude(relative<D>(magnitude(size - y), amax, inverse), 1.0f) + offset));
}

// Compute `four_less_six` of n elements; `high` are the first 16 random bits of each element. *ask becomes nonzero if
// they do not decide the rounding of an element, or if its `inverse` is NaN. There are two loops so that the first has
// only 32-bit lanes.
template <class D, bool STOCHASTIC>
FB_INLINE void weigh_run(const typename D::Storage *__restrict x, int64_t n, const Grid &grid,
                         const Candidates &columns, const uint16_t *__restrict high, int64_t *__restrict out,
                         uint32_t *ask) {
  typedef typename D::Storage S;
  const Grid g = grid;
  const float *__restrict four_encode = columns.four_encode, *__restrict four_decode = columns.four_decode;
  const float *__restrict six_encode = columns.six_encode, *__restrict six_decode = columns.six_decode;
  const float *__restrict amax = columns.amax, *__restrict inverse = columns.inverse, *__restrict outer = columns.outer;
  const float offset = error_offset(columns.select);
  const int32_t none = int32_t(bits(offset));
  int32_t less[PIECE], sum[PIECE];
  uint32_t undecided = 0;
  for (int64_t i = 0; i < n; i++) {
    const float size = D::widen(S(x[i] & D::magnitude_mask));
    const uint32_t draw = STOCHASTIC ? high[i] : 0;
    const float by_four =
        rounded_at_once<false, STOCHASTIC>(scaled_magnitude(size, g, four_encode[i]), g, draw, &undecided);
    const float by_six =
        rounded_at_once<false, STOCHASTIC>(scaled_magnitude(size, g, six_encode[i]), g, draw, &undecided);
    const int32_t a = error_bits<D>(size, by_four, g, four_decode[i], outer[i], amax[i], inverse[i], offset);
    const int32_t b = error_bits<D>(size, by_six, g, six_decode[i], outer[i], amax[i], inverse[i], offset);
    less[i] = a - b, sum[i] = (a - none) + (b - none);
    undecided |= inverse[i] != inverse[i];
  }
  *ask |= undecided;
  if (columns.select > Select::MSE) {
    for (int64_t i = 0; i < n; i++) out[i] = compared(columns.select, (sum[i] + less[i]) >> 1, (sum[i] - less[i]) >> 1);
    return;
  }
  for (int64_t i = 0; i < n; i++) out[i] = int64_t(less[i]) * int64_t(sum[i]);
}

// Compute `four_less_six` of n elements, at most PIECE. index: the element index of the first element.
template <class D, bool STOCHASTIC>
inline void weigh_piece(const typename D::Storage *x, int64_t n, const Grid &g, const Candidates &columns,
                        const uint16_t *high, uint64_t index, uint64_t seed, int64_t *out) {
  uint32_t ask = 0;
  n == PIECE ? weigh_run<D, STOCHASTIC>(x, PIECE, g, columns, high, out, &ask)
             : weigh_run<D, STOCHASTIC>(x, n, g, columns, high, out, &ask);
  for (int64_t i = 0; ask && i < n; i++) {
    const float size = D::widen(typename D::Storage(x[i] & D::magnitude_mask));
    out[i] = four_less_six(size, g, columns.at(i), STOCHASTIC, STOCHASTIC ? high[i] : 0, index + uint64_t(i), seed);
  }
}

// Return Σ less[i] · sum[i], where |less[i]| ≤ sum[i] and only the products and their sum need 64 bits. Usually the
// errors are so small that sums of four products fit in 32 bits.
FB_INLINE int64_t sum_of_products(const int32_t (&less)[GROUP], const int32_t (&sum)[GROUP]) {
#ifdef __AVX512BW__
  const __m512i differences = _mm512_loadu_si512(less), sums = _mm512_loadu_si512(sum);
  if (__builtin_expect(!_mm512_cmpgt_epi32_mask(sums, _mm512_set1_epi32(23170)), 1)) {  // 4 · 23170^2 < 2^31
    const __m512i all = _mm512_mullo_epi32(differences, sums);
    const __m256i pairs = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    const __m128i fours = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    const int64_t low = _mm_cvtsi128_si64(fours), high = _mm_extract_epi64(fours, 1);
    return (int64_t(int32_t(low)) + (low >> 32)) + (int64_t(int32_t(high)) + (high >> 32));
  }
#endif
#if defined(__AVX2__)
  __m256i total = _mm256_setzero_si256();
  for (int i = 0; i < GROUP; i += 8) {
    const __m256i a = _mm256_loadu_si256((const __m256i *)(less + i));
    const __m256i b = _mm256_loadu_si256((const __m256i *)(sum + i));
    total = _mm256_add_epi64(total, _mm256_mul_epi32(a, b));
    total = _mm256_add_epi64(total, _mm256_mul_epi32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32)));
  }
  int64_t lanes[4];
  memcpy(lanes, &total, sizeof lanes);
  return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
#else
  int64_t total = 0;
  for (int i = 0; i < GROUP; i++) total += int64_t(less[i]) * int64_t(sum[i]);
  return total;
#endif
}

// Return the sum of `four_less_six` over n elements of one block, computed one by one. index: the element index of the
// first element.
template <class D, bool STOCHASTIC>
inline int64_t weigh_each(const typename D::Storage *x, int64_t n, const Grid &g, const FourOverSix &block,
                          const uint16_t *high, uint64_t index, uint64_t seed) {
  int64_t total = 0;
  for (int64_t i = 0; i < n; i++)
    total = joined(block.select, total,
                   four_less_six(D::widen(typename D::Storage(x[i] & D::magnitude_mask)), g, block, STOCHASTIC,
                                 STOCHASTIC ? high[i] : 0, index + uint64_t(i), seed));
  return total;
}

// Return what `weigh_each` returns for GROUP elements, computed in vectors. *ask becomes nonzero if the caller has to
// use `weigh_each`: 16 random bits do not decide the rounding of an element, or `inverse` is NaN.
template <class D, bool STOCHASTIC>
FB_INLINE int64_t weigh_group(const typename D::Storage *__restrict x, const Grid &grid, const FourOverSix &of_block,
                              float inverse, const uint16_t *__restrict high, uint32_t *ask) {
  typedef typename D::Storage S;
  const Grid g = grid;
  const FourOverSix block = of_block;
  // The main loop has only types of 32 bits, because 16 elements of 16 bits would make g++ use half registers.
  alignas(64) float sizes[GROUP];
  alignas(64) uint32_t draws[GROUP];
  alignas(64) int32_t less[GROUP], sum[GROUP];
  uint32_t undecided = inverse != inverse;
  const float offset = error_offset(block.select);
  const int32_t none = int32_t(bits(offset));
  for (int i = 0; i < GROUP; i++) sizes[i] = D::widen(S(x[i] & D::magnitude_mask));
  for (int i = 0; i < GROUP; i++) draws[i] = STOCHASTIC ? high[i] : 0;
  for (int i = 0; i < GROUP; i++) {
    const float size = sizes[i];
    const uint32_t draw = draws[i];
    const float by_four =
        rounded_at_once<false, STOCHASTIC>(scaled_magnitude(size, g, block.four.encode), g, draw, &undecided);
    const float by_six =
        rounded_at_once<false, STOCHASTIC>(scaled_magnitude(size, g, block.six.encode), g, draw, &undecided);
    const int32_t a = error_bits<D>(size, by_four, g, block.four.decode, block.four.outer, block.amax, inverse, offset);
    const int32_t b = error_bits<D>(size, by_six, g, block.six.decode, block.six.outer, block.amax, inverse, offset);
    less[i] = a - b, sum[i] = (a - none) + (b - none);
  }
  *ask = undecided;
  if (__builtin_expect(block.select <= Select::MSE, 1)) return sum_of_products(less, sum);
  int32_t four = 0, six = 0;  // for MAE: the sum and 0
  if (block.select == Select::MAE) {
    for (int i = 0; i < GROUP; i++) four += less[i];
  } else {
    for (int i = 0; i < GROUP; i++) {
      const int32_t a = (sum[i] + less[i]) >> 1, b = (sum[i] - less[i]) >> 1;
      four = a > four ? a : four, six = b > six ? b : six;
    }
  }
  return compared(block.select, four, six);
}

// Compute MS-EDEN's sums: `products_run` over n elements of one block; `products_each` adds each of n elements to the
// sums of its own block.
template <class D>
inline Products products_run(const typename D::Storage *__restrict x, int64_t n, const Grid &grid, float encode) {
  typedef typename D::Storage S;
  const Grid g = grid;
  Products sums{0, 0};
  for (int64_t i = 0; i < n; i++) {
    float v = bounded(D::widen(S(x[i] & D::magnitude_mask)) * encode, g);
    Products one = products(v, smaller(nearest<false>(v, g), g.max));
    sums.squares += one.squares, sums.products += one.products;
  }
  return sums;
}
template <class D>
inline void products_each(const typename D::Storage *__restrict x, int64_t n, const Grid &grid,
                          const float *__restrict encode, uint32_t *__restrict squares, uint32_t *__restrict sums) {
  typedef typename D::Storage S;
  const Grid g = grid;
  for (int64_t i = 0; i < n; i++) {
    float v = bounded(D::widen(S(x[i] & D::magnitude_mask)) * encode[i], g);
    Products one = products(v, smaller(nearest<false>(v, g), g.max));
    squares[i] += one.squares, sums[i] += one.products;
  }
}

// How many scales a piece has: one for all elements, one for every 16 columns, or one for each column. EACH_COLUMN:
// each column has its own second-level value, too.
enum Layout { UNIFORM, BY_SIXTEEN, BY_COLUMN, EACH_COLUMN };

struct Counts {                                       // the statistics of one piece
  uint32_t error, nonzero, zeros, saturated, capped;  // zeros: elements with y = 0
  uint32_t again;  // not 0: these loops cannot quantize an element, so the piece must be repeated element by element
};

#ifdef __AVX512BW__
#define FB_COUNTS_PIECES
// Count the errors of a piece in BF16: x are the elements, y the results. The sums do not depend on the order of their
// terms, so the elements of a vector are split into those with even and those with odd numbers, which is faster than a
// split into halves. Numbers of elements are counted in the processor's masks.
template <bool STOCHASTIC> FB_INLINE void count_errors(const uint16_t *x, const uint16_t *y, Counts *counts) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512i magnitudes = _mm512_set1_epi16(0x7fff), odd = _mm512_set1_epi32(int32_t(0xffff0000u));
  __m512i sum = _mm512_setzero_si512();
  uint32_t nonzero = 0, zeros = 0, capped = 0;
  __mmask16 above = 0;
  for (int i = 0; i < PIECE; i += 32) {
    const __m512i from = _mm512_and_si512(_mm512_loadu_si512(x + i), magnitudes);
    const __m512i to = _mm512_and_si512(_mm512_loadu_si512(y + i), magnitudes);
    nonzero += uint32_t(__builtin_popcount(_mm512_test_epi16_mask(from, from)));
    zeros += uint32_t(__builtin_popcount(_mm512_testn_epi16_mask(to, to)));
    auto count = [&](__m512i was, __m512i is) FB_INLINED {
      const __m512i zero_free = _mm512_max_epu32(was, _mm512_set1_epi32(1));  // as in `run`
      const __m512 error = _mm512_sub_ps(_mm512_castsi512_ps(was), _mm512_castsi512_ps(is));
      __m512 r = _mm512_div_ps(_mm512_abs_ps(error), _mm512_castsi512_ps(zero_free));
      const __mmask16 exceeds = _mm512_cmp_ps_mask(r, one, _CMP_GT_OQ);
      if (STOCHASTIC) {
        capped += uint32_t(__builtin_popcount(exceeds));
        r = _mm512_min_ps(r, one);
      } else {
        above = _kor_mask16(above, exceeds);
      }
      sum = _mm512_add_epi32(sum, _mm512_castps_si512(_mm512_add_ps(r, one)));
    };
    count(_mm512_slli_epi32(from, 16), _mm512_slli_epi32(to, 16));
    count(_mm512_and_si512(from, odd), _mm512_and_si512(to, odd));
  }
  counts->error = uint32_t(_mm512_reduce_add_epi32(sum)) - uint32_t(PIECE) * ONE;
  counts->nonzero = nonzero, counts->zeros = zeros, counts->capped = capped;
  counts->again |= above;
}
#endif

// Quantize up to 128 ordinary elements, which are finite and far from the ends of float32 and of the dtype. A WIDE grid
// is used only for naive casts. The loop works on magnitudes and restores the signs at the end, also for zeros. With
// DIVIDE (amax, gam) nearest rounding cannot overflow. Without stochastic rounding an error above 1 is rare, and the
// piece is then repeated (Counts::again).
template <class D, bool DIVIDE, bool STOCHASTIC, bool STATS, Layout LAYOUT, bool WIDE>
inline __attribute__((always_inline)) Counts run(const typename D::Storage *__restrict x,
                                                 typename D::Storage *__restrict y, int n,
                                                 const float *__restrict encode, const float *__restrict decode,
                                                 const float *__restrict outer, const Grid &grid,
                                                 const uint16_t *__restrict high) {
  typedef typename D::Storage S;
  constexpr bool LIMIT = STOCHASTIC || !DIVIDE;
  const Grid g = grid;
  alignas(64) float back_wide[PIECE];
  constexpr int STRIDE = 2 * GROUP;  // two groups at a time fill a vector of 16-bit elements
  const float whole = *outer;
  // Sums and `or` per column of a stride, because g++ would combine the lanes of a vector once per stride.
  alignas(64) uint32_t over[STRIDE] = {}, ask[STRIDE] = {};
  for (int start = 0; start < n; start += STRIDE) {
    int end = n == PIECE || n - start > STRIDE ? STRIDE : n - start;
    int left = LAYOUT == BY_SIXTEEN ? start / GROUP : 0, right = LAYOUT == BY_SIXTEEN && end > GROUP ? left + 1 : left;
    const float left_encode = encode[left], right_encode = encode[right];
    const float left_decode = decode[left], right_decode = decode[right];
    for (int k = 0; k < end; k++) {
      int i = start + k;
      float e = LAYOUT >= BY_COLUMN ? encode[i] : LAYOUT == UNIFORM || k < GROUP ? left_encode : right_encode;
      float d = LAYOUT >= BY_COLUMN ? decode[i] : LAYOUT == UNIFORM || k < GROUP ? left_decode : right_decode;
      float v = D::widen(S(x[i] & D::magnitude_mask)) * e, q;
      q = rounded_at_once<WIDE, STOCHASTIC>(v, g, STOCHASTIC ? high[i] : 0, &ask[k]);
      if (STATS && LIMIT) over[k] += q > g.max;
      if (LIMIT) q = smaller(q, g.max);
      back_wide[i] = DIVIDE ? quotient(q, e, d) : (q * d) * (LAYOUT == EACH_COLUMN ? outer[i] : whole);
    }
  }
  narrow_run<D, !WIDE>(back_wide, x, y, n);
  Counts counts{};
  for (int k = 0; STATS && LIMIT && k < STRIDE; k++) counts.saturated += over[k];
  for (int k = 0; STOCHASTIC && k < STRIDE; k++) counts.again |= ask[k];
#ifdef FB_COUNTS_PIECES
  if (STATS && std::is_same<D, Bf16>::value && n == PIECE) {
    count_errors<STOCHASTIC>((const uint16_t *)x, (const uint16_t *)y, &counts);
    return counts;
  }
#endif
  if (STATS) {
    uint32_t error = 0, capped = 0, worst = 0;
    S nonzero = 0, zeros = 0;
    for (int i = 0; i < n; i++) {
      S size = S(x[i] & D::magnitude_mask), to = S(y[i] & D::magnitude_mask);
      float from = D::widen(size), back = D::widen(to);
      uint32_t zero_free = bits(from) > 1u ? bits(from) : 1u;  // for a zero, the error is 0 / the smallest float = 0
      float r = magnitude(from - back) / value(zero_free);
      nonzero = S(nonzero + S(size != 0));
      zeros = S(zeros + S(to == 0));
      if (STOCHASTIC) {
        capped += r > 1.0f;
        r = smaller(r, 1.0f);
      } else {
        worst = bits(r) > worst ? bits(r) : worst;
      }
      error += bits(r + 1.0f);
    }
    counts.error = error - uint32_t(n) * ONE;  // wraps around like the sum, so the result is correct
    counts.nonzero = nonzero, counts.zeros = zeros, counts.capped = capped;
    counts.again |= worst > ONE;
  }
  return counts;
}
template <class D, bool DIVIDE, bool STOCHASTIC, bool STATS, Layout LAYOUT, bool WIDE>
inline Counts piece(const typename D::Storage *x, typename D::Storage *y, int n, const float *encode,
                    const float *decode, const float *outer, const Grid &g, const uint16_t *high) {
  if (n == PIECE) return run<D, DIVIDE, STOCHASTIC, STATS, LAYOUT, WIDE>(x, y, PIECE, encode, decode, outer, g, high);
  return run<D, DIVIDE, STOCHASTIC, STATS, LAYOUT, WIDE>(x, y, n, encode, decode, outer, g, high);
}

}  // namespace fb

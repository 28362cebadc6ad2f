// Philox's random bits for consecutive counters, on the vector units.
//
// Each of the four words of a counter is in the lower half of a lane of 64 bits: then the two halves of a product of
// words are where the next round needs them. Several sets of counters are computed together, because each round has to
// wait for its products.
#pragma once
#include "philox.h"
#include "vector.h"

namespace fb {

typedef U32x16::Part U32Part;
constexpr int WIDE = REGISTER / 2;            // counters in a register
constexpr int SETS = REGISTER == 16 ? 4 : 2;  // sets of counters that are computed together

// The even elements of a and b in turns (a0, b0, a2, b2, …), and the odd elements (a1, b1, a3, b3, …).
#if defined(__AVX512BW__)
#define FB_EVEN 0, 8, 2, 10, 4, 12, 6, 14
#define FB_ODD 1, 9, 3, 11, 5, 13, 7, 15
#elif defined(__AVX2__)
#define FB_EVEN 0, 4, 2, 6
#define FB_ODD 1, 5, 3, 7
#else
#define FB_EVEN 0, 2
#define FB_ODD 1, 3
#endif
#ifdef __clang__
FB_INLINE U64Part evens(U64Part a, U64Part b) { return __builtin_shufflevector(a, b, FB_EVEN); }
FB_INLINE U64Part odds(U64Part a, U64Part b) { return __builtin_shufflevector(a, b, FB_ODD); }
#else
FB_INLINE U64Part evens(U64Part a, U64Part b) { return __builtin_shuffle(a, b, (U64Part){FB_EVEN}); }
FB_INLINE U64Part odds(U64Part a, U64Part b) { return __builtin_shuffle(a, b, (U64Part){FB_ODD}); }
#endif

FB_INLINE U64Part product_of_lower_halves(U64Part a, U64Part b) {
#if defined(__AVX512BW__)
  return U64Part(_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b));
#elif defined(__AVX2__)
  return U64Part(_mm256_mul_epu32((__m256i)a, (__m256i)b));
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

struct Draws {
  U64Part word[4];
  Draws() {}
  Draws(U64Part counters, uint32_t stream) : word{counters, counters >> 32, U64Part{} + stream, U64Part{}} {}
  // Words 0 and 1, and words 2 and 3, of each counter as one number of 64 bits.
  U64Part first_two() const { return (word[0] & 0xffffffffu) | word[1] << 32; }
  U64Part last_two() const { return (word[2] & 0xffffffffu) | word[3] << 32; }
};

template <int N> FB_INLINE void philox(Draws (&sets)[N], uint64_t seed) {
  const U64Part factor0 = U64Part{} + PHILOX_FACTOR_0, factor1 = U64Part{} + PHILOX_FACTOR_1;
  U64Part key0 = U64Part{} + (seed & 0xffffffffu), key1 = U64Part{} + (seed >> 32);
#pragma GCC unroll 16
  for (int round = 0; round < PHILOX_ROUNDS; round++) {
#pragma GCC unroll 4
    for (auto &set : sets) {
      U64Part *c = set.word, p0 = product_of_lower_halves(c[0], factor0), p1 = product_of_lower_halves(c[2], factor1);
      c[0] = p1 >> 32 ^ c[1] ^ key0;
      c[1] = p1;
      c[2] = p0 >> 32 ^ c[3] ^ key1;
      c[3] = p0;
    }
    key0 += PHILOX_STEP_0;
    key1 += PHILOX_STEP_1;
  }
}

FB_INLINE U64Part numbers(int64_t (*number)(int64_t)) {
  U64Part n = {};
  for (int i = 0; i < WIDE; i++) n[i] = uint64_t(number(i));
  return n;
}

// Compute the four output words for each of the counters first, first + 1, … in GROUPS groups of REGISTER counters.
template <int GROUPS>
FB_INLINE void draw_words(uint64_t first, uint32_t stream, uint64_t seed, U32Part (&words)[GROUPS][4]) {
  const U64Part even = numbers([](int64_t i) { return 2 * i; }) + first;
  Draws sets[2 * GROUPS];
  for (int s = 0; s < 2 * GROUPS; s++) sets[s] = Draws(even + uint64_t(s / 2 * REGISTER + s % 2), stream);
  philox(sets, seed);
  for (int g = 0; g < GROUPS; g++)
    for (int k = 0; k < 4; k++)
      words[g][k] = U32Part((sets[2 * g].word[k] & 0xffffffffu) | sets[2 * g + 1].word[k] << 32);
}

// Write the 16 random bits of each of the 8 · WIDE · N elements from `first` on, a multiple of 8.
template <int N> FB_INLINE void put_high(uint64_t first, uint64_t seed, uint16_t *out, uint32_t stream) {
  // The counters are in the order for which `evens` and `odds` of their pairs of words return ascending counters.
  const U64Part order = numbers([](int64_t i) { return i / 2 + i % 2 * (WIDE / 2); }), counters = order + (first >> 3);
  Draws sets[N];
#pragma GCC unroll 4
  for (int s = 0; s < N; s++) sets[s] = Draws(counters + uint64_t(s * WIDE), stream);
  philox(sets, seed);
#pragma GCC unroll 4
  for (int s = 0; s < N; s++) {
    const U64Part x = sets[s].first_two(), y = sets[s].last_two(), lines[2] = {evens(x, y), odds(x, y)};
    memcpy(out + 8 * WIDE * s, lines, sizeof lines);
  }
}

// Compute the 16 random bits of each of the elements first … first + count - 1, where first is a multiple of 8. `out`
// has space for 128 values more than count, because whole vectors are written.
inline void fill_high(uint64_t first, int64_t count, uint64_t seed, uint16_t *out, uint32_t stream = ROUND_HIGH) {
  constexpr int64_t EACH = 8 * WIDE;  // elements of a set
  int64_t i = 0;
  for (; SETS > 2 && i + 2 * EACH < count; i += SETS * EACH) put_high<SETS>(first + uint64_t(i), seed, out + i, stream);
  for (; i < count; i += 2 * EACH) put_high<2>(first + uint64_t(i), seed, out + i, stream);
}

}  // namespace fb

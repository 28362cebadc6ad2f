// Emulates the tile instructions of AMX in C++, with the layouts and the order of sums that Intel's manual defines.
#pragma once
#include <stdint.h>
#include <string.h>

namespace fb {
namespace tiles {

constexpr int ROWS = 16, WORDS = 16;  // WORDS: words of 4 bytes in a row of a tile
struct Tile {
  uint32_t word[ROWS][WORDS];
};
inline thread_local Tile tile[8];
inline thread_local bool configured = false;

inline bool permitted() { return true; }
struct Session {
  Session() { configured = true; }
  ~Session() { configured = false; }
};

inline void load(int number, const void *from, int64_t stride) {
  for (int r = 0; r < ROWS; r++) memcpy(tile[number].word[r], (const char *)from + r * stride, 4 * WORDS);
}
inline void store(int number, void *to, int64_t stride) {
  for (int r = 0; r < ROWS; r++) memcpy((char *)to + r * stride, tile[number].word[r], 4 * WORDS);
}
inline float value(uint32_t bits) {  // subnormals are replaced by zeros
  if (!(bits & 0x7f800000u)) bits &= 0x80000000u;
  float v;
  memcpy(&v, &bits, 4);
  return v;
}
inline uint32_t bits(float v) {
  uint32_t u;
  memcpy(&u, &v, 4);
  return u;
}
// The instruction TDPBF16PS: sums the products of the even elements of all pairs (even), sums those of the odd elements
// (odd), and adds even + odd to each element of `sums`.
inline void dot(int sums, int a, int b) {
  if (!configured) __builtin_trap();
  for (int m = 0; m < ROWS; m++)
    for (int n = 0; n < WORDS; n++) {
      float even = 0, odd = 0;
      for (int p = 0; p < WORDS; p++) {
        uint32_t left = tile[a].word[m][p], right = tile[b].word[p][n];
        even = __builtin_fmaf(value(left << 16), value(right << 16), even);
        odd = __builtin_fmaf(value(left & 0xffff0000u), value(right & 0xffff0000u), odd);
      }
      tile[sums].word[m][n] = bits(value(tile[sums].word[m][n]) + (even + odd));
    }
}

inline void zero_sums() { memset(tile, 0, 4 * sizeof(Tile)); }
inline void load_sums(const float *c, int64_t stride) {
  for (int i = 0; i < 4; i++) load(i, c + i / 2 * 16 * stride + i % 2 * 16, stride * 4);
}
inline void store_sums(float *c, int64_t stride) {
  for (int i = 0; i < 4; i++) store(i, c + i / 2 * 16 * stride + i % 2 * 16, stride * 4);
}
inline void add_product(const void *a, int64_t stride, const void *b) {
  load(4, a, stride);
  load(5, (const char *)a + 16 * stride, stride);
  load(6, b, 64);
  load(7, (const char *)b + 1024, 64);
  for (int i = 0; i < 4; i++) dot(i, 4 + i / 2, 6 + i % 2);
}

template <int HALF> inline void zero_half() { memset(tile + 2 * HALF, 0, 2 * sizeof(Tile)); }
template <int HALF> inline void add_half(const void *a, int64_t stride, const void *b) {
  load(4 + HALF, a, stride);
  load(6, b, 64);
  load(7, (const char *)b + 1024, 64);
  for (int i = 0; i < 2; i++) dot(2 * HALF + i, 4 + HALF, 6 + i);
}
template <int HALF> inline void store_half(float *c, int64_t stride) {
  for (int i = 0; i < 2; i++) store(2 * HALF + i, c + i * 16, stride * 4);
}

}  // namespace tiles
}  // namespace fb

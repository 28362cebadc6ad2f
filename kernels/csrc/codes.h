// Packed storage on the CPU: converts runs of ordinary elements to codes and codes to bytes; and bytes to codes and
// codes to values. As in lanes.h, the loops are written so that g++ vectorises them.
#pragma once
#include <string.h>
#include "lanes.h"

namespace fb {

// Compute the codes of up to 128 ordinary elements, rounded as in `run` (lanes.h). Return false, with invalid codes, if
// the first 16 random bits of an element do not decide its rounding.
template <class D, bool STOCHASTIC, Layout LAYOUT, bool WIDE>
inline __attribute__((always_inline)) bool code_run(const typename D::Storage *__restrict x, uint16_t *__restrict codes,
                                                    int n, const float *__restrict encode, const Grid &grid,
                                                    uint32_t code_bits, const uint16_t *__restrict high) {
  typedef typename D::Storage S;
  const Grid g = grid;
  const uint32_t sign_shift = code_bits - 1;
  uint32_t undecided = 0;
  constexpr int STRIDE = 2 * GROUP;
  alignas(64) uint32_t ask[STRIDE] = {};  // per column, because g++ would combine them in each stride
  for (int start = 0; start < n; start += STRIDE) {
    int end = n == PIECE || n - start > STRIDE ? STRIDE : n - start;
    int left = LAYOUT == BY_SIXTEEN ? start / GROUP : 0, right = LAYOUT == BY_SIXTEEN && end > GROUP ? left + 1 : left;
    const float left_encode = encode[left], right_encode = encode[right];
    for (int k = 0; k < end; k++) {
      int i = start + k;
      float e = LAYOUT >= BY_COLUMN ? encode[i] : LAYOUT == UNIFORM || k < GROUP ? left_encode : right_encode;
      float v = D::widen(S(x[i] & D::magnitude_mask)) * e, q;
      q = rounded_at_once<WIDE, STOCHASTIC>(v, g, STOCHASTIC ? high[i] : 0, &ask[k]);
      codes[i] = uint16_t(magnitude_code<WIDE>(smaller(q, g.max), g));
    }
  }
  for (int i = 0; i < n; i++) codes[i] = uint16_t(codes[i] | (x[i] >> (8 * sizeof(S) - 1)) << sign_shift);
  for (int k = 0; STOCHASTIC && k < STRIDE; k++) undecided |= ask[k];
  return !undecided;
}
template <class D, bool STOCHASTIC, Layout LAYOUT, bool WIDE>
inline bool code_piece(const typename D::Storage *x, uint16_t *codes, int n, const float *encode, const Grid &g,
                       uint32_t code_bits, const uint16_t *high) {
  if (n == PIECE) return code_run<D, STOCHASTIC, LAYOUT, WIDE>(x, codes, PIECE, encode, g, code_bits, high);
  return code_run<D, STOCHASTIC, LAYOUT, WIDE>(x, codes, n, encode, g, code_bits, high);
}

// Move eight codes of `width` bits, which lie in the eight bytes of w, together into the lowest bits: first pairs of
// codes, then fours, then all eight. `apart` is the inverse; it ignores the bits above the codes.
inline uint64_t together(uint64_t w, int width) {
  w = (w & 0x00ff00ff00ff00ffu) | (w & 0xff00ff00ff00ff00u) >> (8 - width);
  w = (w & 0x0000ffff0000ffffu) | (w & 0xffff0000ffff0000u) >> (16 - 2 * width);
  return (w & 0xffffffffu) | w >> 32 << 4 * width;
}
inline uint64_t apart(uint64_t w, int width) {
  const uint64_t fours = (1ull << 4 * width) - 1, twos = ((1ull << 2 * width) - 1) * 0x0000000100000001u,
                 ones = ((1ull << width) - 1) * 0x0001000100010001u;
  w = (w & fours) | (w >> 4 * width & fours) << 32;
  w = (w & twos) | (w >> 2 * width & twos) << 16;
  return (w & ones) | (w >> width & ones) << 8;
}

// Pack up to CHUNK codes of a row into bytes. The first column is a multiple of 8, so its code starts at a byte.
inline void pack(const uint16_t *__restrict codes, int64_t n, int width, uint8_t *__restrict to) {
  if (width == 16) {
    memcpy(to, codes, size_t(n) * 2);
    return;
  }
  if (width == 8) {
    for (int64_t i = 0; i < n; i++) to[i] = uint8_t(codes[i]);
    return;
  }
  if (width == 4) {
    for (int64_t i = 0; i < n / 2; i++) to[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
    if (n % 2) to[n / 2] = uint8_t(codes[n - 1]);
    return;
  }
  const int64_t words = (n + 7) / 8;
  alignas(64) uint8_t each[CHUNK];
  alignas(64) uint64_t eights[CHUNK / 8];
  uint8_t packed[CHUNK + 8];
  memset(each + 8 * words - 8, 0, 8);
  for (int64_t i = 0; i < n; i++) each[i] = uint8_t(codes[i]);
  memcpy(eights, each, size_t(words) * 8);
  for (int64_t i = 0; i < words; i++) eights[i] = together(eights[i], width);
  for (int64_t i = 0; i < words; i++) memcpy(packed + i * width, &eights[i], 8);  // overwrites the previous padding
  memcpy(to, packed, size_t((n * width + 7) / 8));
}
// Pack the codes of n rows, CHUNK apart, as n codes of each of `columns` lines, which are `stride` bytes apart. Codes
// have 8 or 4 bits, and the first row's code starts at a byte.
inline void pack_transposed(const uint16_t *__restrict codes, int64_t n, int64_t columns, int width,
                            uint8_t *__restrict to, int64_t stride) {
  for (int64_t c = 0; c < columns; c++, to += stride) {
    const uint16_t *from = codes + c;
    if (width == 8) {
      for (int64_t i = 0; i < n; i++) to[i] = uint8_t(from[i * CHUNK]);
      continue;
    }
    for (int64_t i = 0; i < n / 2; i++) to[i] = uint8_t(from[2 * i * CHUNK] | from[(2 * i + 1) * CHUNK] << 4);
    if (n % 2) to[n / 2] = uint8_t(from[(n - 1) * CHUNK]);
  }
}
inline void unpack(const uint8_t *__restrict from, int64_t n, int width, uint16_t *__restrict codes) {
  if (width == 16) {
    memcpy(codes, from, size_t(n) * 2);
    return;
  }
  if (width == 8) {
    for (int64_t i = 0; i < n; i++) codes[i] = from[i];
    return;
  }
  if (width == 4) {
    for (int64_t i = 0; i < n / 2; i++) codes[2 * i] = from[i] & 15, codes[2 * i + 1] = from[i] >> 4;
    if (n % 2) codes[n - 1] = from[n / 2] & 15;
    return;
  }
  const int64_t words = (n + 7) / 8, bytes = (n * width + 7) / 8;
  alignas(64) uint8_t each[CHUNK];
  alignas(64) uint64_t eights[CHUNK / 8];
  uint8_t packed[CHUNK + 8];
  memcpy(packed, from, size_t(bytes));
  memset(packed + bytes, 0, 8);
  for (int64_t i = 0; i < words; i++) memcpy(&eights[i], packed + i * width, 8);
  for (int64_t i = 0; i < words; i++) eights[i] = apart(eights[i], width);
  memcpy(each, eights, size_t(words) * 8);
  for (int64_t i = 0; i < n; i++) codes[i] = each[i];
}

// Compute the values of up to CHUNK codes with the scale of each column: first the magnitudes, then the signs.
// SPECIAL: some codes are infinities or NaN. Way: how a scale is applied: q · scale, q / scale, (q · scale) · outer
// with one `outer`, or with one for each column.
enum Way { TIMES, OVER, BY_TWO_LEVELS, BY_GROUPS };
template <class D, Way WAY, bool WIDE, bool SPECIAL>
inline void restore_run(const uint16_t *__restrict codes, typename D::Storage *__restrict y, int64_t n,
                        const float *__restrict scale, const float *__restrict outer, const Grid &grid,
                        uint32_t code_bits) {
  typedef typename D::Storage S;
  const Grid g = grid;
  const uint32_t sign_shift = code_bits - 1, mask = (1u << sign_shift) - 1u;
  alignas(64) float back[CHUNK];
  const float whole = *outer;
  for (int64_t i = 0; i < n; i++) {
    float q = magnitude_value<WIDE>(codes[i] & mask, g, SPECIAL);
    float v = WAY == OVER    ? q / scale[i]
              : WAY == TIMES ? q * scale[i]
                             : by_two_levels(q, scale[i], WAY == BY_GROUPS ? outer[i] : whole);
    back[i] = within<D>(v, SPECIAL ? q : 0.0f);
  }
  for (int64_t i = 0; i < n; i++) y[i] = S(D::narrow(back[i]) ^ S(codes[i] >> sign_shift & 1) << (8 * sizeof(S) - 1));
}
template <class D, Way WAY, bool WIDE>
inline void value_run(const uint16_t *codes, typename D::Storage *y, int64_t n, const float *scale, const float *outer,
                      const Grid &g, uint32_t code_bits) {
  const uint16_t mask = uint16_t((1u << (code_bits - 1)) - 1u);
  uint16_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    uint16_t code = codes[i] & mask;
    most = code > most ? code : most;
  }
  if (most > magnitude_code(g.max, g)) return restore_run<D, WAY, WIDE, true>(codes, y, n, scale, outer, g, code_bits);
  return restore_run<D, WAY, WIDE, false>(codes, y, n, scale, outer, g, code_bits);
}

}  // namespace fb

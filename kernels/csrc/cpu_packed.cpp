// Decodes packed storage on the CPU. A unit of work is up to sixteen rows within one row of blocks.
#include <algorithm>
#include "codes.h"
#include "parallel.h"
#include "request.h"

namespace fb {

constexpr int64_t UNIT_ROWS = 16;

template <class D> struct Decoding {
  const Stored &from;
  const Quant &q;
  int64_t rows, cols, R, C, blocks_across, units_in_block;
  int width;
  Cell<D> *out;
  bool around;
  float of_byte[256];  // the value of each byte, if scales are bytes

  Decoding(const Stored &from, int64_t rows, int64_t cols, void *out)
      : from(from),
        q(from.quant),
        rows(rows),
        cols(cols),
        R(q.block_rows),
        C(q.block_cols),
        blocks_across((cols + C - 1) / C),
        units_in_block((R + UNIT_ROWS - 1) / UNIT_ROWS),
        width(stored_bits(int(from.code_bits))),
        out((Cell<D> *)out),
        around(exceeds_caches<D>(rows, cols)) {
    for (uint32_t code = 0; code < 256; code++)
      of_byte[code] = q.scaling.kind == FLOAT ? 0 : stored_scale(q.scaling, code);
  }
  int64_t units() const { return (rows + R - 1) / R * units_in_block; }

  float group(int64_t block_row, int64_t block_col) const {
    int64_t at = 0;
    if (q.group) {
      const int64_t across = q.down ? blocks_across : (blocks_across + q.group - 1) / q.group;
      at = (q.down ? block_row / q.group : block_row) * across + (q.down ? block_col : block_col / q.group);
    }
    return from.groups[at] == from.groups[at] ? from.groups[at] : value(NAN_BITS);
  }
  float outer(int64_t block_row, int64_t block_col) const {
    return q.scaling.two_levels() ? group(block_row, block_col) : 1.0f / value(q.scaling.factor);
  }
  float scale(int64_t block_row, int64_t block_col) const {
    if (q.scaling.kind == NONE) return 1.0f;
    int64_t at = block_row * blocks_across + block_col;
    if (q.scaling.kind == FLOAT) return stored_scale(q.scaling, ((const uint32_t *)from.scales)[at]);
    float s = of_byte[((const uint8_t *)from.scales)[at]];
    return q.scaling.kind == MANTISSA ? group(block_row, block_col) * s : s;
  }
  // Write the scale of each column of [c0, c1) to `to`, and if they have several second-level values these to `outers`.
  template <Way WAY> void spread_out(int64_t block_row, int64_t c0, int64_t c1, float *to, float *outers) const {
    for (int64_t b = c0 / C, c = c0; c < c1; b++) {
      int64_t end = std::min((b + 1) * C, c1);
      std::fill(to + (c - c0), to + (end - c0), scale(block_row, b));
      if (WAY == BY_GROUPS) std::fill(outers + (c - c0), outers + (end - c0), outer(block_row, b));
      c = end;
    }
  }
  template <Way WAY, bool WIDE> void unit(int64_t number) const {
    const int64_t block_row = number / units_in_block;
    const int64_t r0 = block_row * R + number % units_in_block * UNIT_ROWS;
    const int64_t r1 = std::min(std::min(r0 + UNIT_ROWS, (block_row + 1) * R), rows),
                  row_bytes = (cols * width + 7) / 8;
    alignas(64) float scales[CHUNK], outers[WAY == BY_GROUPS ? CHUNK : 1] = {outer(0, 0)};
    alignas(64) uint16_t codes[CHUNK];
    alignas(64) Cell<D> values[CHUNK];
    for (int64_t c0 = 0; c0 < cols; c0 += CHUNK) {
      const int64_t c1 = std::min(c0 + CHUNK, cols), n = c1 - c0;
      spread_out<WAY>(block_row, c0, c1, scales, outers);
      for (int64_t r = r0; r < r1; r++) {
        unpack(from.codes + r * row_bytes + c0 / 8 * width, n, width, codes);
        value_run<D, WAY, WIDE>(codes, values, n, scales, outers, q.grid, from.code_bits);
        put(out + r * cols + c0, values, size_t(n) * sizeof(Cell<D>), around);
      }
    }
  }
  typedef void (Decoding::*Unit)(int64_t) const;
  template <bool WIDE> Unit unit_for() const {
    if (q.scaling.two_levels() && q.group) return &Decoding::unit<BY_GROUPS, WIDE>;
    if (q.scaling.two_levels() || q.scaling.factor != ONE) return &Decoding::unit<BY_TWO_LEVELS, WIDE>;
    return q.scaling.divides() ? &Decoding::unit<OVER, WIDE> : &Decoding::unit<TIMES, WIDE>;
  }
  Unit chosen_unit() const { return q.grid.wide ? unit_for<true>() : unit_for<false>(); }
};

template <class D> void decode(const Stored &from, int64_t rows, int64_t cols, void *out, int threads) {
  Ieee ieee;
  const Decoding<D> work(from, rows, cols, out);
  const auto unit = work.chosen_unit();
  in_parallel(work.units(), threads, [&](int64_t count) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) (work.*unit)(i);
  });
}

}  // namespace fb

extern "C" {

// The caller ensures that rows and cols are not 0.
void fb_decode(const fb::Stored *from, int dtype, int64_t rows, int64_t cols, void *out, int threads) {
  fb::with_dtype(dtype, [&](auto d) { fb::decode<decltype(d)>(*from, rows, cols, out, threads); });
}
}

// Decodes packed storage on a GPU: a tile per CTA, as in quantization. For all bytes the operations are the same as in
// `restore` in reference/scales.py, except that three operations replace a division if they give the same bits.
#include "codes.cuh"

namespace fb {

struct DecodeCall {
  Packed codes;
  const void *scales;   // one per block: float32 (amax) or bytes; null: naive cast
  const float *groups;  // one per group; null: none
  void *out;
  int32_t rows, cols, across, aligned;  // across: number of blocks across; aligned: as in Call
};

struct StoredBlock {
  float scale, inverse, outer;
  bool plain;
};

// The block size in spec<0>() is that of the quantizer and a constant; it may exceed the size of the matrix.
FB_D StoredBlock stored_block(const Spec &s, const DecodeCall &call, int row, int col) {
  StoredBlock b{1.0f, 1.0f, 1.0f, false};
  if (s.scaling.kind == NONE) return b;
  const int block_row = row / s.block_rows, block_col = col / s.block_cols;
  const int64_t at = int64_t(block_row) * call.across + block_col;
  b.scale = stored_scale(
      s.scaling, s.scaling.kind == FLOAT ? ((const uint32_t *)call.scales)[at] : ((const uint8_t *)call.scales)[at]);
  if (s.scaling.grouped()) b.outer = call.groups[group_index(s, block_row, block_col, call.across)];
  if (s.scaling.kind == POWER) b.outer = 1.0f / value(s.scaling.factor);
  if (s.scaling.kind == MANTISSA) b.scale = b.outer * b.scale;
  if (s.scaling.divides()) {
    const float smallest = value(s.grid.min_exponent) * power_of_two(int(s.grid.dropped) - 23);
    b.inverse = 1.0f / b.scale;
    b.plain = !s.grid.wide && smallest > DIVISIBLE_ABOVE && divisible(b.scale);
  }
  return b;
}

FB_D float restored(const Spec &s, float q, const StoredBlock &b) {
  if (s.scaling.two_levels()) return by_two_levels(q, b.scale, b.outer);
  if (!s.scaling.divides()) return (q * b.scale) * b.outer;
  if (!b.plain) return q / b.scale;
  return finite(q) ? with_sign(quotient(magnitude(q), b.scale, b.inverse), q) : q;
}

template <class D> FB_D void decode(const DecodeCall &call) {
  const Spec s = spec<0>();
  const Grid g = s.grid.grid();
  const int width = stored_bits(s.encodes);
  const uint32_t mask = (1u << (s.encodes - 1)) - 1u;
  Tile t(call.rows, call.cols, call.aligned, false);
  Codes codes[SLOTS];
#pragma unroll
  for (int k = 0; k < SLOTS; k++)
    codes[k] = t.valid(k) ? load_codes(call.codes, t.row(k), t.col(k), t.valid(k), width) : Codes{0, 0};

  const bool rows_alike = s.block_rows % SLOTS == 0, columns_alike = s.block_cols % WIDTH == 0;
  StoredBlock b{};
  Vector<D> y[SLOTS];
#pragma unroll
  for (int k = 0; k < SLOTS; k++) {
    y[k] = Vector<D>{};
    const int valid = t.valid(k);
    if (columns_alike && valid && (k == 0 || !rows_alike)) b = stored_block(s, call, t.row(k), t.col(k));
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      if (i >= valid) continue;
      if (!columns_alike) b = stored_block(s, call, t.row(k), t.col(k) + i);
      const uint32_t code = codes[k].get(i, width);
      const float q = value(bits(magnitude_value(code & mask, g)) | (code >> (s.encodes - 1)) << 31);
      y[k].set(i, D::narrow(within<D>(restored(s, q, b), q)));
    }
  }
  store<D>(call.out, t, y, 0xffu);
}

}  // namespace fb

#ifndef FB_SIMT
extern "C" __global__ void __launch_bounds__(fb::shape().threads, fb::least_ctas())
    run(const __grid_constant__ fb::DecodeCall call) {
  fb::FB_KERNEL<fb::FB_DTYPE>(call);
}
#endif

// Causal attention of one head with rotary positions, forward and backward, on blocks of 32 x 32 scores.
//
// Operands of all products are BF16 values: the rotated queries, which are then multiplied by 1/√size, the rotated
// keys, the values, the exponentials of the scores, and the gradients of the scores. Sums, softmax and rotations are
// float32. Scores are computed again in the backward pass, so memory is linear in the number of tokens.
//
// Tokens and the size of heads are padded with zeros to multiples of 32. P is the implementation of the products
// (VectorBlocks or TileBlocks); "panels" are its packed right operands.
#pragma once
#include <math.h>
#include <algorithm>
#include <memory>
#include "blocks.h"

namespace fb {

struct HeadSize {
  int64_t tokens, size, rotated;  // rotated: how many of the `size` dimensions are rotated, an even number
  const float *turns;             // tokens x rotated / 2 x (cosine, sine)
  int64_t rows() const { return (tokens + BLOCK - 1) / BLOCK * BLOCK; }
  int64_t width() const { return (size + BLOCK - 1) / BLOCK * BLOCK; }
  int64_t area() const { return rows() * width(); }
  float scale() const { return float(1.0 / sqrt(double(size))); }
};
struct Rows {  // the rows of one head in a tensor, `stride` elements apart
  bf16 *data;
  int64_t stride;
  bf16 *operator[](int64_t token) const { return data + token * stride; }
};

// Memory of a thread. The thread keeps it for its next call, which then does not wait for new pages.
struct Arena {
  char *next;
  explicit Arena(int64_t bytes) {
    static thread_local std::unique_ptr<char[]> memory;
    static thread_local int64_t kept = 0;
    if (kept < bytes) memory.reset(), memory.reset(new char[size_t(bytes)]), kept = bytes;
    next = memory.get();
  }
  template <class T> T *take(int64_t count) {
    next += -uintptr_t(next) % 64;
    T *start = (T *)next;
    next += count * int64_t(sizeof(T));
    return start;
  }
};

// ------------------------------------------------------------------------------------------------ rotations

// Rotate pairs of neighbouring dimensions in v by the angles of a token. turns: their (cosine, sine) from the first
// lane on. n: the number of rotated dimensions from the first lane on. direction: 1, or -1 for the inverse rotation.
FB_INLINE F32x16 turned(const F32x16 &v, const float *turns, int64_t n, float direction) {
  const I32x16 odd = lane_numbers() & 1;
  F32x16 turn = n >= LANES ? load(turns) : load(turns, First{int(n)}), cosine = firsts(turn);
  if (n < LANES) cosine = keep(cosine, First{int(n)}, 1.0f);
  F32x16 sine = seconds(turn) * select(odd < 1, all(-direction), all(direction));
  return v * cosine + exchanged(v) * sine;
}

// Copy the rows of a head as operands of P: rotated, then rounded, then multiplied by `scale` and rounded.
template <class P> void prepare(const Rows &x, const HeadSize &h, bool rotates, float scale, typename P::Element *to) {
  const int64_t width = h.width(), rotated = rotates ? h.rotated : 0;
  for (int64_t t = 0; t < h.rows(); t++, to += width) {
    if (h.size % BLOCK || t >= h.tokens) std::fill(to, to + width, typename P::Element(0));
    if (t >= h.tokens) continue;
    // The rows of a head are far apart, so the processor's own prefetching does not recognise them.
    for (int64_t i = 0; i < h.size; i += 32) __builtin_prefetch(x[std::min(t + 16, h.tokens - 1)] + i);
    each_vector(h.size, [&](int64_t i, auto lanes) FB_INLINED {
      F32x16 v = load(x[t] + i, lanes);
      if (i < rotated) v = rounded(turned(v, h.turns + t * rotated + i, rotated - i, 1.0f), (const bf16 *)nullptr);
      P::put(to + i, v * scale);
    });
  }
}

// Write the gradient of row t of a head, times `scale`, with the rotation undone.
inline void put_gradient(const float *from, float scale, const HeadSize &h, bool rotates, int64_t t, bf16 *to) {
  const int64_t rotated = rotates ? h.rotated : 0;
  each_vector(h.size, [&](int64_t i, auto lanes) FB_INLINED {
    F32x16 v = load(from + i) * scale;
    if (i < rotated) v = turned(v, h.turns + t * rotated + i, rotated - i, -1.0f);
    store(to + i, v, lanes);
  });
}

// ------------------------------------------------------------------------------------------------ panels

template <class P> void pack_all_rows(const typename P::Element *x, const HeadSize &h, typename P::Element *panels) {
  for (int64_t e = 0; e < h.width(); e += BLOCK) P::pack_rows(x + e, h.width(), h.rows(), panels + e * h.rows());
}
template <class P> void pack_all_columns(const typename P::Element *x, const HeadSize &h, typename P::Element *panels) {
  for (int64_t t = 0; t < h.rows(); t += BLOCK)
    P::pack_columns(x + t * h.width(), h.width(), h.width(), panels + t * h.width());
}

// ------------------------------------------------------------------------------------------------ forward

// Write e^(score - largest score) of TOGETHER rows of scores to `to`, padded with zeros up to `end`. The first row has
// n scores, and each further row one more than the row before it; the last scores of all rows are in the same vector.
// stride: the distance between rows. tops, sums: for each row, the largest score and the sum of the exponentials.
template <class P>
void softmax(const float *scores, int64_t stride, int64_t n, int64_t end, typename P::Element *to, float *tops,
             float *sums) {
  const int64_t last = (n - 1) / LANES * LANES;
  F32x16 most[TOGETHER], sum[TOGETHER] = {}, x[TOGETHER];
  auto kept = [&](int row, const F32x16 &v, float other)
                  FB_INLINED { return keep(v, First{int(n - last) + row}, other); };
  each<TOGETHER>([&](int r) FB_INLINED { most[r] = kept(r, load(scores + r * stride + last), -INFINITY); });
  for (int64_t i = 0; i < last; i += LANES)
    each<TOGETHER>([&](int r) FB_INLINED { most[r] = larger(most[r], load(scores + r * stride + i)); });
  each<TOGETHER>([&](int r) FB_INLINED { tops[r] = largest(most[r]); });
  for (int64_t i = 0; i <= last; i += LANES) {
    each<TOGETHER>([&](int r) FB_INLINED { x[r] = load(scores + r * stride + i) - tops[r]; });
    exponentials(x);
    if (i == last) each<TOGETHER>([&](int r) FB_INLINED { x[r] = kept(r, x[r], 0.0f); });
    each<TOGETHER>([&](int r) FB_INLINED {
      sum[r] += x[r];
      P::put(to + r * stride + i, x[r]);
    });
  }
  for (int64_t i = last + LANES; i < end; i += LANES)
    each<TOGETHER>([&](int r) FB_INLINED { P::put(to + r * stride + i, F32x16{}); });
  each<TOGETHER>([&](int r) FB_INLINED { sums[r] = total(sum[r]); });
}

// Compute the attention of one head; log_sums: log Σ e^score for each token, which the backward pass needs.
template <class P>
void attend(const Rows &q, const Rows &k, const Rows &v, const HeadSize &h, const Rows &out, float *log_sums) {
  typedef typename P::Element T;
  const int64_t rows = h.rows(), width = h.width();
  Arena arena(int64_t(sizeof(T)) * (5 * h.area() + BLOCK * rows) + 4 * BLOCK * (2 * rows + BLOCK) + 64 * 9);
  T *queries = arena.take<T>(h.area()), *keys = arena.take<T>(h.area()), *values = arena.take<T>(h.area());
  T *key_panels = arena.take<T>(h.area()), *value_panels = arena.take<T>(h.area()), *p = arena.take<T>(BLOCK * rows);
  float *scores = arena.take<float>(BLOCK * rows), *next_scores = arena.take<float>(BLOCK * rows);
  float *sums = arena.take<float>(BLOCK * BLOCK), inverse[BLOCK];
  prepare<P>(q, h, true, h.scale(), queries);
  prepare<P>(k, h, true, 1.0f, keys);
  prepare<P>(v, h, false, 1.0f, values);
  pack_all_columns<P>(keys, h, key_panels);
  pack_all_rows<P>(values, h, value_panels);
  // Compute half i of the scores of the block of queries that starts at `first`; each block of keys has two halves.
  auto multiply_half = [&](int64_t first, int64_t i, float *to) {
    const T *left = queries + first * width;
    const int64_t key = i / 2 * BLOCK;
    i % 2 ? P::template multiply_half<1>(left, width, key_panels + key * width, width, to + key, rows)
          : P::template multiply_half<0>(left, width, key_panels + key * width, width, to + key, rows);
  };
  for (int64_t i = 0; i < 2; i++) multiply_half(0, i, scores);
  for (int64_t first = 0; first < rows; first += BLOCK, std::swap(scores, next_scores)) {
    const int64_t end = first + BLOCK, present = std::min(BLOCK, h.tokens - first);
    const int64_t halves = end < rows ? 2 * (end / BLOCK + 1) : 0;
    for (int64_t r = 0; r < BLOCK; r += TOGETHER) {
      // AMX multiplies for the next block while the vector units compute exponentials for this one.
      for (int64_t i = halves * r / BLOCK; i < halves * (r + TOGETHER) / BLOCK; i++) multiply_half(end, i, next_scores);
      float tops[TOGETHER], totals[TOGETHER];
      softmax<P>(scores + r * rows, rows, first + r + 1, end, p + r * rows, tops, totals);
      for (int64_t i = 0; i < TOGETHER; i++) {
        inverse[r + i] = 1.0f / totals[i];
        if (r + i < present) log_sums[first + r + i] = float(double(tops[i]) + log(double(totals[i])));
      }
    }
    for (int64_t e = 0; e < width; e += BLOCK) {
      P::template multiply<false>(p, rows, value_panels + e * rows, end, sums, BLOCK);
      for (int64_t r = 0; r < present; r++)
        each_vector(std::min(BLOCK, h.size - e), [&](int64_t i, auto lanes) FB_INLINED {
          store(out[first + r] + e + i, load(sums + r * BLOCK + i) * inverse[r], lanes);
        });
    }
  }
}

}  // namespace fb

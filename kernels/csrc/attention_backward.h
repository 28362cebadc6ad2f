// The gradients of causal attention, for the query heads that share one key and value head.
//
// Scores are transposed here, [key][query], so that the exponentials p and the gradients ds of the scores are the left
// operands of dv = pᵀ·dy and dk = dsᵀ·q without a transposition. p and ds are computed for KEYS keys and all later
// queries at a time. The gradient of the queries is summed over these groups of keys, transposed: dqᵀ = kᵀ·ds.
#pragma once
#include "attention.h"

namespace fb {

constexpr int64_t KEYS = 64;  // keys that are processed together

struct SharedHeads {
  const Rows *q, *out, *d_out, *dq;  // one for each query head
  const float *const *log_sums;      // one for each query head
  int64_t count;
  Rows k, v, dk, dv;
};

template <class P> struct AttentionBackward {
  typedef typename P::Element T;
  const HeadSize &h;
  const int64_t rows = h.rows(), width = h.width(), area = h.area();
  Arena arena{int64_t(sizeof(T)) * (9 * area + 2 * KEYS * rows + KEYS * BLOCK) +
              int64_t(sizeof(float)) * (3 * area + 2 * rows + 4 * BLOCK * BLOCK + BLOCK * width) + 64 * 24};
  T *queries = arena.take<T>(area), *keys = arena.take<T>(area), *values = arena.take<T>(area);
  T *gradients = arena.take<T>(area);                                               // the gradients of the output
  T *query_columns = arena.take<T>(area), *query_rows = arena.take<T>(area);        // panels
  T *gradient_columns = arena.take<T>(area), *gradient_rows = arena.take<T>(area);  // panels
  T *keys_transposed = arena.take<T>(area), *ds_panel = arena.take<T>(KEYS * BLOCK);
  T *p = arena.take<T>(KEYS * rows), *ds = arena.take<T>(KEYS * rows);  // [key][query]
  float *dq = arena.take<float>(area), *dk = arena.take<float>(area),
        *dv = arena.take<float>(area);                                          // dq: [size][query]
  float *log_sums = arena.take<float>(rows), *inner = arena.take<float>(rows);  // inner: Σ y·dy of each token
  struct Square {                                                               // 32 keys and 32 queries
    int64_t first, key, query;                                                  // the first key is first + key
    float *scores, *dp;                                                         // dp: the gradient of p
  };
  float *squares = arena.take<float>(4 * BLOCK * BLOCK);  // scores and dp of the current square and of the next one
  float *strip = arena.take<float>(BLOCK * width);

  explicit AttentionBackward(const HeadSize &size) : h(size) {}

  void run(const SharedHeads &heads) {
    prepare<P>(heads.k, h, true, 1.0f, keys);
    prepare<P>(heads.v, h, false, 1.0f, values);
    P::transpose(keys, width, rows, width, keys_transposed, rows);
    std::fill(dk, dk + area, 0.0f);
    std::fill(dv, dv + area, 0.0f);
    for (int64_t i = 0; i < heads.count; i++) {
      prepare_head(heads.q[i], heads.out[i], heads.d_out[i], heads.log_sums[i]);
      for (int64_t key = 0; key < rows; key += KEYS) add_keys(key, std::min(KEYS, rows - key));
      put_queries(heads.dq[i]);
    }
    for (int64_t t = 0; t < h.tokens; t++) {
      put_gradient(dk + t * width, 1.0f, h, true, t, heads.dk[t]);
      put_gradient(dv + t * width, 1.0f, h, false, t, heads.dv[t]);
    }
  }

  void prepare_head(const Rows &q, const Rows &out, const Rows &d_out, const float *sums) {
    prepare<P>(q, h, true, h.scale(), queries);
    prepare<P>(d_out, h, false, 1.0f, gradients);
    for (int64_t t = 0; t < rows; t++) {
      F32x16 sum = {};
      if (t < h.tokens)
        each_vector(h.size, [&](int64_t e, auto lanes)
                                FB_INLINED { sum += load(out[t] + e, lanes) * load(d_out[t] + e, lanes); });
      inner[t] = total(sum);
      log_sums[t] = t < h.tokens ? sums[t] : 0.0f;
    }
    pack_all_columns<P>(queries, h, query_columns);
    pack_all_columns<P>(gradients, h, gradient_columns);
    pack_all_rows<P>(queries, h, query_rows);
    pack_all_rows<P>(gradients, h, gradient_rows);
    std::fill(dq, dq + area, 0.0f);
  }

  // Add the contributions of the keys first … first + count - 1 to all gradients.
  void add_keys(int64_t first, int64_t count) {
    differentiate(first, count);
    for (int64_t key = 0; key < count; key += BLOCK) {
      const int64_t from = first + key;  // the first query that attends to these keys
      for (int64_t e = 0; e < width; e += BLOCK) {
        const int64_t panel = e * rows + from * BLOCK, sums = from * width + e;
        P::template multiply<true>(p + key * rows + from, rows, gradient_rows + panel, rows - from, dv + sums, width);
        P::template multiply<true>(ds + key * rows + from, rows, query_rows + panel, rows - from, dk + sums, width);
      }
    }
    for (int64_t query = first; query < rows; query += BLOCK) {
      const int64_t read = std::min(count, query + BLOCK - first);
      P::pack_rows(ds + query, rows, read, ds_panel);
      for (int64_t e = 0; e < width; e += BLOCK)
        P::template multiply<true>(keys_transposed + e * rows + first, rows, ds_panel, read, dq + e * rows + query,
                                   rows);
    }
  }

  // Compute the exponentials p and the gradients ds = p·(dp − Σ y·dy) of the scores, for `count` keys and the queries
  // that attend to them. AMX multiplies for the next square while the vector units compute the current square.
  void differentiate(int64_t first, int64_t count) {
    Square at{first, 0, first, squares, squares + BLOCK * BLOCK};
    for (int part = 0; part < 4; part++) multiply_part(at, part);
    while (at.query < rows) {
      Square next{first, at.key + BLOCK, at.query, squares + (squares == at.scores ? 2 : 0) * BLOCK * BLOCK, nullptr};
      next.dp = next.scores + BLOCK * BLOCK;
      if (next.key == count || first + next.key > next.query) next.key = 0, next.query += BLOCK;
      for (int part = 0; part < 4; part++) {
        if (next.query < rows) multiply_part(next, part);
        differentiate_rows(at, part * 8, part * 8 + 8);
      }
      at = next;
    }
  }

  // Compute part 0 to 3 of a square: the scores of its first or last 16 keys, or dp of its first or last 16 keys.
  void multiply_part(const Square &s, int part) {
    const int64_t left = (s.first + s.key) * width, right = s.query * width;
    if (part == 0) P::template multiply_half<0>(keys + left, width, query_columns + right, width, s.scores, BLOCK);
    if (part == 1) P::template multiply_half<1>(keys + left, width, query_columns + right, width, s.scores, BLOCK);
    if (part == 2) P::template multiply_half<0>(values + left, width, gradient_columns + right, width, s.dp, BLOCK);
    if (part == 3) P::template multiply_half<1>(values + left, width, gradient_columns + right, width, s.dp, BLOCK);
  }

  void differentiate_rows(const Square &s, int64_t begin, int64_t end) {
    const bool diagonal = s.query == s.first + s.key;
    for (int64_t c = 0; c < BLOCK; c += LANES) {
      const F32x16 log_sum = load(log_sums + s.query + c), product = load(inner + s.query + c);
      const I32x16 lane = lane_numbers() + int32_t(c);
      for (int64_t r = begin; r < end; r += TOGETHER) {
        F32x16 x[TOGETHER];
        each<TOGETHER>([&](int i) FB_INLINED { x[i] = load(s.scores + (r + i) * BLOCK + c) - log_sum; });
        exponentials(x);
        if (diagonal)  // 0 where the query is before the key
          each<TOGETHER>([&](int i) FB_INLINED { x[i] = select(lane < int32_t(r + i), F32x16{}, x[i]); });
        each<TOGETHER>([&](int i) FB_INLINED {
          const int64_t to = (s.key + r + i) * rows + s.query + c;
          P::put(p + to, x[i]);
          P::put(ds + to, x[i] * (load(s.dp + (r + i) * BLOCK + c) - product));
        });
      }
    }
  }

  void put_queries(const Rows &to) {
    for (int64_t first = 0; first < h.tokens; first += BLOCK) {
      transpose((const uint32_t *)(dq + first), rows, width, BLOCK, (uint32_t *)strip, width);
      for (int64_t t = first; t < std::min(first + BLOCK, h.tokens); t++)
        put_gradient(strip + (t - first) * width, h.scale(), h, true, t, to[t]);
    }
  }
};

}  // namespace fb

// The entry points of causal attention for the CPU backend.
#include <initializer_list>
#include "attention_backward.h"
#include "orders.h"
#include "pair_blocks.h"
#include "parallel.h"
#include "tile_blocks.h"

namespace fb {
namespace {

struct View {  // a tensor of batch x tokens x heads x size; the last dimension is contiguous
  bf16 *data;
  int64_t batch, token, head;  // strides
  Rows rows(int64_t b, int64_t h) const { return Rows{data + b * batch + h * head, token}; }
};
struct AttentionCall {  // as in layers/attention.py
  int64_t batch, tokens, heads, kv_heads, size, rotated;
  const float *turns;
  int64_t threads;
  View q, k, v, out;       // out: the result
  View d_out, dq, dk, dv;  // in the backward pass
  float *log_sums;         // batch x heads x tokens

  HeadSize head_size() const { return HeadSize{tokens, size, rotated, turns}; }
  int64_t shared() const { return heads / kv_heads; }
  float *sums(int64_t b, int64_t head) const { return log_sums + (b * heads + head) * tokens; }

  // Load the rows of all heads of a batch entry into the L2 cache, in the order of memory, if they fit. The processor
  // does not load them ahead of time, because the rows of one head are short and far apart.
  struct Tensor {
    const View &view;
    int64_t heads;
  };
  template <bool WRITTEN> void fetch(int64_t b, std::initializer_list<Tensor> tensors) const {
    constexpr int64_t LINE = 64 / sizeof(bf16), ROOM = (1 << 20) / sizeof(bf16);
    int64_t width = 0;
    for (const Tensor &x : tensors) width += x.heads * size;
    if (width * tokens > ROOM) return;
    for (int64_t t = 0; t < tokens; t++)
      for (const Tensor &x : tensors)
        for (int64_t head = 0; head < x.heads; head++)
          for (int64_t i = 0; i < size; i += LINE) {
            __builtin_prefetch(x.view.rows(b, head)[t] + i, WRITTEN, 2);
            asm volatile("");  // without it, g++ removes calls of this function, which has no result
          }
  }
};

template <class P> void forward(const AttentionCall &c) {
  in_parallel(c.batch * c.heads, int(c.threads), [&](int64_t count) {
    typename P::Session session;
    int64_t fetched = -1;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) {
      int64_t b = i / c.heads, head = i % c.heads, shared = head / c.shared();
      if (b != fetched) c.fetch<false>(b, {{c.q, c.heads}, {c.k, c.kv_heads}, {c.v, c.kv_heads}});
      fetched = b;
      attend<P>(c.q.rows(b, head), c.k.rows(b, shared), c.v.rows(b, shared), c.head_size(), c.out.rows(b, head),
                c.sums(b, head));
    }
  });
}

template <class P> void backward(const AttentionCall &c) {
  in_parallel(c.batch * c.kv_heads, int(c.threads), [&](int64_t count) {
    typename P::Session session;
    const HeadSize size = c.head_size();
    AttentionBackward<P> head(size);
    std::unique_ptr<Rows[]> q(new Rows[size_t(4 * c.shared())]);
    std::unique_ptr<const float *[]> sums(new const float *[size_t(c.shared())]);
    Rows *out = q.get() + c.shared(), *d_out = out + c.shared(), *dq = d_out + c.shared();
    int64_t fetched = -1;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) {
      int64_t b = i / c.kv_heads, shared = i % c.kv_heads;
      if (b != fetched) {
        c.fetch<false>(b, {{c.q, c.heads}, {c.k, c.kv_heads}, {c.v, c.kv_heads}, {c.out, c.heads}, {c.d_out, c.heads}});
        c.fetch<true>(b, {{c.dq, c.heads}, {c.dk, c.kv_heads}, {c.dv, c.kv_heads}});
        fetched = b;
      }
      for (int64_t j = 0; j < c.shared(); j++) {
        int64_t query = shared * c.shared() + j;
        q[size_t(j)] = c.q.rows(b, query), out[j] = c.out.rows(b, query);
        d_out[j] = c.d_out.rows(b, query), dq[j] = c.dq.rows(b, query), sums[size_t(j)] = c.sums(b, query);
      }
      head.run(SharedHeads{q.get(), out, d_out, dq, sums.get(), c.shared(), c.k.rows(b, shared), c.v.rows(b, shared),
                           c.dk.rows(b, shared), c.dv.rows(b, shared)});
    }
  });
}

// Return the order in which the block products of this library and processor add the products of a sum.
Order block_order() {
#ifdef FB_TILES
  if (tiles::permitted()) return TILES;
#endif
#ifdef __AVX512BF16__
  return PAIRS;
#else
  return ONE_BY_ONE;
#endif
}

template <class F> void with_blocks(F f) {
  switch (block_order()) {
#ifdef FB_TILES
    case TILES:
      return f(TileBlocks());
#endif
#ifdef __AVX512BF16__
    case PAIRS:
      return f(PairBlocks());
#endif
    default:
      return f(VectorBlocks());
  }
}

}  // namespace
}  // namespace fb

extern "C" {

// Return the order in which attention on this processor adds the products of a sum.
int fb_attention_order() { return fb::block_order(); }

void fb_attention(const fb::AttentionCall *c) {
  fb::with_blocks([&](auto blocks) { fb::forward<decltype(blocks)>(*c); });
}
void fb_attention_backward(const fb::AttentionCall *c) {
  fb::with_blocks([&](auto blocks) { fb::backward<decltype(blocks)>(*c); });
}
}

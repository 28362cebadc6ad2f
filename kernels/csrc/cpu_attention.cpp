// The entry points of causal attention for the CPU backend.
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
};

template <class P> void forward(const AttentionCall &c) {
  in_parallel(c.batch * c.heads, int(c.threads), [&](int64_t count) {
    typename P::Session session;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) {
      int64_t b = i / c.heads, head = i % c.heads, shared = head / c.shared();
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
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) {
      int64_t b = i / c.kv_heads, shared = i % c.kv_heads;
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

// Return the order in which the products of blocks are added here.
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

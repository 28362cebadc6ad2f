// The entry points of products of BF16 matrices with an FP32 result for the CPU backend.
#include "gemm_blocks.h"
#include "gemm_pairs.h"
#include "orders.h"
#include "tile_blocks.h"

namespace {

using namespace fb;

Order order() {
#ifdef FB_TILES
  if (tiles::permitted()) return TILES;
#endif
#ifdef __AVX512BW__
  return PAIRS;
#endif
  return ONE_BY_ONE;
}

}  // namespace

extern "C" {

// Return the order in which this processor adds the products of a sum.
int fb_matmul_order() { return order(); }

// Compute c (M x N, contiguous) = a (M x K) · b (K x N) for K > 0. a_m and a_k are the strides of a along M and K, b_n
// and b_k the strides of b along N and K.
void fb_matmul_fp32(const void *a, int64_t a_m, int64_t a_k, const void *b, int64_t b_n, int64_t b_k, int64_t M,
                    int64_t N, int64_t K, float *c, int threads) {
  const fb::Operand left{(const uint16_t *)a, a_m, a_k}, right{(const uint16_t *)b, b_n, b_k};
  switch (order()) {
#ifdef FB_TILES
    case TILES:
      return fb::matmul<fb::BlockKernel<fb::TileBlocks>>(left, right, M, N, K, c, threads);
#endif
#ifdef __AVX512BW__
    case PAIRS:
      return fb::matmul<fb::PairKernel>(left, right, M, N, K, c, threads);
#endif
    default:
      return fb::matmul<fb::BlockKernel<fb::VectorBlocks>>(left, right, M, N, K, c, threads);
  }
}
}

// Chooses on a GPU the entry of a mixture for each decision block. A thread processes one decision block.
#include "decisions.h"
#include "spec.cuh"

namespace fb {

template <class D> FB_D void decide(const DecideCall &call) {
  const int64_t block = int64_t(blockIdx.x) * shape().threads + threadIdx.x;
  if (block < call.blocks) decide_block(call, block);
}

}  // namespace fb

#ifndef FB_SIMT
extern "C" __global__ void __launch_bounds__(fb::shape().threads) run(const __grid_constant__ fb::DecideCall call) {
  fb::FB_KERNEL<fb::FB_DTYPE>(call);
}
#endif

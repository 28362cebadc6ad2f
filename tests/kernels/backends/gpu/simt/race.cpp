// Threads that write their number for the next thread to read, with or without a barrier in between.
#include "simt.h"

extern "C" void pass_on(uint64_t order, int barrier, int *read) {
  constexpr unsigned threads = 64;
  __shared__ int left[threads];
  memset(left, 0, sizeof(left));
  simt::shuffle = order;
  simt::run(1, threads, 0, [&] {
    const unsigned thread = threadIdx.x;
    left[thread] = int(thread) + 1;
    if (barrier) __syncthreads();
    read[thread] = thread ? left[thread - 1] : 0;
  });
}

// Let every CTA read what is in shared memory when it begins, and then leave its number there.
extern "C" void leave(unsigned blocks, int *seen) {
  __shared__ int left;
  simt::shuffle = 0;
  simt::run(blocks, 32, 0, [&] {
    if (threadIdx.x) return;
    seen[blockIdx.x] = left;
    left = int(blockIdx.x);
  });
}

// Run the kernel and record the order of CTAs and of the threads in them.
extern "C" void come(uint64_t order, unsigned blocks, unsigned threads, int *seen) {
  simt::shuffle = order;
  int count = 0;
  simt::run(blocks, int(threads), 0, [&] { seen[count++] = int(blockIdx.x * threads + threadIdx.x); });
}

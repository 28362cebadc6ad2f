// Small kernels that test the emulator.
#include "simt.h"

// Let every thread write its number plus 1 to shared memory, and read the number of the thread before it. Without a
// barrier in between, the result depends on the order of threads.
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

// Let every CTA store the initial content of its shared memory in `seen`, and then write its number to shared memory.
extern "C" void leave(unsigned blocks, int *seen) {
  __shared__ int left;
  simt::shuffle = 0;
  simt::run(blocks, 32, 0, [&] {
    if (threadIdx.x) return;
    seen[blockIdx.x] = left;
    left = int(blockIdx.x);
  });
}

// Record the order in which the threads of all CTAs run.
extern "C" void come(uint64_t order, unsigned blocks, unsigned threads, int *seen) {
  simt::shuffle = order;
  int count = 0;
  simt::run(blocks, int(threads), 0, [&] { seen[count++] = int(blockIdx.x * threads + threadIdx.x); });
}

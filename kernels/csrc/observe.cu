// Adds observations of quantized operands to a table of statistics on a GPU. A CTA processes one observation: the
// counts of all decision blocks of an operand, and the choices of its mixture.
#include "decisions.h"
#include "spec.cuh"

namespace fb {

// A row of the table: the sums of the seven counts; how often each of the first quantizers of a mixture was chosen, the
// last of these including all further ones; the sum of the mean errors in units of 2^-40; the largest mean error, as
// the bits of a double, which have the order of the numbers; how many mean errors are in each bin of the histogram.
constexpr int CHOICES = 4, BINS = 21, AT_CHOICES = COUNTS_EACH, AT_ERRORS = AT_CHOICES + CHOICES;
constexpr int AT_LARGEST = AT_ERRORS + 1, AT_BINS = AT_LARGEST + 1, ROW = AT_BINS + BINS;
constexpr double BIN = 0.005, ERROR_ONE = 8388608.0, MEAN_ONE = 1099511627776.0;

struct Observation {
  const int64_t *counts;  // seven per decision block
  const int8_t *choice;   // the chosen quantizer of each decision block; null: the quantizer is no mixture
  int64_t blocks, row;
};

struct ObserveCall {
  unsigned long long *table;
  Observation observations[96];
};

template <class D> FB_D void observe(const ObserveCall &call) {
  typedef unsigned long long Word;
  const Observation &o = call.observations[blockIdx.x];
  __shared__ Word sums[AT_ERRORS];
  if (threadIdx.x < AT_ERRORS) sums[threadIdx.x] = 0;
  __syncthreads();
  int64_t own[AT_ERRORS] = {};
  for (int64_t block = threadIdx.x; block < o.blocks; block += shape().threads) {
#pragma unroll
    for (int i = 0; i < COUNTS_EACH; i++) own[i] += o.counts[COUNTS_EACH * block + i];
    const int chosen = o.choice ? o.choice[block] : -1;
#pragma unroll
    for (int i = 0; i < CHOICES; i++) own[AT_CHOICES + i] += i < CHOICES - 1 ? chosen == i : chosen >= i;
  }
#pragma unroll
  for (int i = 0; i < AT_ERRORS; i++)
    if (own[i]) atomicAdd(&sums[i], Word(own[i]));
  __syncthreads();
  Word *row = call.table + o.row * ROW;
  if (threadIdx.x < AT_ERRORS && sums[threadIdx.x]) atomicAdd(row + threadIdx.x, sums[threadIdx.x]);
  if (threadIdx.x) return;
  const int64_t nonzero = int64_t(sums[NONZERO_COUNT]);
  const double error = double(int64_t(sums[ERROR_COUNT])) / ERROR_ONE / double(nonzero > 1 ? nonzero : 1);
  int bin = BINS - 1;
  while (bin > 0 && error < bin * BIN) bin--;
  union {
    double number;
    Word bits;
  } largest = {error};
  atomicAdd(row + AT_ERRORS, Word(int64_t(rint(error * MEAN_ONE))));
  atomicMax(row + AT_LARGEST, largest.bits);
  atomicAdd(row + AT_BINS + bin, Word(1));
}

}  // namespace fb

#ifndef FB_SIMT
extern "C" __global__ void __launch_bounds__(fb::shape().threads) run(const __grid_constant__ fb::ObserveCall call) {
  fb::FB_KERNEL<fb::FB_DTYPE>(call);
}
#endif

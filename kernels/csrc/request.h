// The requests to the CPU library. These structures mirror the ctypes structures of backends/cpu.py field by field.
#pragma once
#include "hadamard.h"
#include "memory.h"
#include "scale.h"

namespace fb {

// Call `f` with an object of the dtype's class. Dtypes are numbered in the order of DTYPES in protocol.py.
template <class F> void with_dtype(int dtype, F f) {
  switch (dtype) {
    case 0:
      return f(Bf16{});
    case 1:
      return f(Fp16{});
    default:
      return f(Fp32{});
  }
}

struct Quant {
  Grid grid;
  Scaling scaling;
  // group: the number of blocks along the axis that share a second-level value, 0: all blocks; down: 1 if the axis is 0
  int32_t stochastic, group, hadamard, down;
  Signs signs;
  int64_t block_rows, block_cols;  // the rows and columns that a block covers in the matrix in memory
  uint64_t seed;
};
struct Request {
  Quant quant;
  void *out;                       // null: statistics only
  Tally *tally;                    // null: none; one per tally block, a part for which statistics are counted
  uint32_t *amax;                  // null: none; float32 bits, one per tally block
  int64_t tally_rows, tally_cols;  // the partition for statistics and `skip`
  const uint8_t *skip;             // null: none; 1 for each tally block to leave unchanged
  uint8_t *codes;                  // null: none; otherwise packed codes are written instead of values
  void *scales;                    // with codes: one per block, float32 for amax, otherwise bytes; null: naive cast
  uint32_t *group_scales;          // with codes: float32 bits, one per group
  uint32_t code_bits, nan_code, inf_code;
  int32_t operand;                    // with codes: 1 if codes and scales are those of an operand (packing.py)
  int64_t line_stride, block_stride;  // with operand: the places of scales
};
struct Stored {  // the tensor to decode
  Quant quant;
  const uint8_t *codes;
  const void *scales;   // as in Request; null: naive cast
  const float *groups;  // null: none
  uint32_t code_bits, unused;
};

}  // namespace fb

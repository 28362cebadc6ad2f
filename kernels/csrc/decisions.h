// Decides which entry of a mixture each decision block keeps, for the CPU and CUDA kernels.
#pragma once
#include "numeric.h"

namespace fb {

struct DecideCall {
  const int64_t *counts;            // of the entry's values: seven per decision block, as in README.md, "Statistics"
  const int64_t *other;             // of the values of the quantizer to compare with; null: none
  const float *largest, *smallest;  // magnitudes per decision block; null: the test compares errors
  uint8_t *decided;                 // 1 for the blocks that have an entry; not read for entry 0
  int8_t *choice;                   // for an undecided block, the last entry
  double limit;                     // of the mean error in units of 2^-23, or of largest / smallest
  int64_t blocks;
  int32_t index, last;  // the entry, and the last one
};

constexpr int COUNTS_EACH = 7, ERROR_COUNT = 0, NONZERO_COUNT = 1, LOST_COUNT = 6;

FB_HD bool accepts(const DecideCall &call, int64_t block) {
  const int64_t *counts = call.counts + COUNTS_EACH * block;
  if (counts[LOST_COUNT]) return false;
  if (call.largest) return double(call.largest[block] / call.smallest[block]) < call.limit;
  const int64_t error = counts[ERROR_COUNT];
  if (error == 0) return true;
  if (call.other) return error < call.other[COUNTS_EACH * block + ERROR_COUNT];
  return double(error) < double(counts[NONZERO_COUNT]) * call.limit;
}

// Write the decision of a block, and return whether it has an entry now.
FB_HD bool decide_block(const DecideCall &call, int64_t block) {
  const bool before = call.index && call.decided[block], now = before || accepts(call, block);
  call.decided[block] = now;
  if (now ? !before : !call.index) call.choice[block] = int8_t(now ? call.index : call.last);
  return now;
}

}  // namespace fb

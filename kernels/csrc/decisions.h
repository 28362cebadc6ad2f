// Chooses the entry of a mixture for each decision block, on CPUs and GPUs. A call applies the test of one entry.
#pragma once
#include "numeric.h"

namespace fb {

struct DecideCall {
  const int64_t *counts;            // the statistics of the entry's values: seven per decision block (arithmetic.md)
  const int64_t *other;             // the statistics of the quantizer to compare with; null: none
  const float *largest, *smallest;  // non-zero magnitudes of each decision block; null: the test compares errors
  uint8_t *decided;                 // 1 for blocks for which an entry is chosen; not read if index is 0
  int8_t *choice;                   // the index of the chosen entry; for an undecided block, `last`
  double limit;                     // of the mean error in units of 2^-23, or of largest / smallest
  int64_t blocks;
  int32_t index, last;  // the indices of the entry whose test is applied, and of the mixture's last entry
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

// Write the decision of a block, and return whether an entry is chosen for the block now.
FB_HD bool decide_block(const DecideCall &call, int64_t block) {
  const bool before = call.index && call.decided[block], now = before || accepts(call, block);
  call.decided[block] = now;
  if (now ? !before : !call.index) call.choice[block] = int8_t(now ? call.index : call.last);
  return now;
}

}  // namespace fb

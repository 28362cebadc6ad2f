// Return where a thread's elements lie in a matrix, without accessing the matrix, so that it can have any size.
#include "simt.h"

#include "tile.cuh"

struct Question {  // tests/kernels/backends/gpu/test_places.py has the same fields
  fb::Shape shape;
  fb::Parts parts;
  int32_t rows, cols, backwards, thread, slot, width;
  uint32_t blocks, block, row_bytes;
};
struct Answer {
  int64_t row, col, valid, index, offset, part, byte;  // offset: bytes from the first slot to this one
};

extern "C" void place(const Question *q, Answer *a) {
  fb::variant.shape = q->shape;
  simt::grid.x = q->blocks, simt::block.x = q->block, simt::thread.x = unsigned(q->thread);
  const fb::Tile t(q->rows, q->cols, false, q->backwards);
  const int row = t.row(q->slot), col = t.col(q->slot);
  *a = Answer{row, col, t.valid(q->slot), int64_t(t.index(q->slot)), q->slot * t.step(2), q->parts.at(row, col), 0};
  a->byte = fb::Packed{nullptr, q->row_bytes, 0}.at(row, col, q->width) - (uint8_t *)nullptr;
}

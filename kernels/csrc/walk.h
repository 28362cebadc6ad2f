// Passes over a matrix in tiles; plan.h defines what each quantizer does in a pass. One or two quantizers share a pass,
// so a tensor that is quantized along both axes is read once.
#pragma once
#include <numeric>
#include "parallel.h"
#include "plan_rows.h"

namespace fb {

constexpr int64_t TILE_ROWS = 256, TILE_COLS = 16384, TILE_ELEMENTS = 1 << 21, ROTATED_ELEMENTS = 1 << 14, FEW = 256;

struct Walk {
  int64_t tile_rows = 1, tile_cols = GROUP;

  // Choose the size of tiles. A tile consists of whole transforms, and of whole blocks if they are small; the amaxes of
  // larger blocks are computed in a first pass (`lookup`).
  template <class D> Walk(std::vector<Plan<D>> &plans, int64_t rows, int64_t cols, int threads) {
    bool rotated = false;
    for (auto &p : plans)
      if (p.q.hadamard) {
        rotated = true;
        (p.q.down ? tile_rows : tile_cols) = std::lcm(p.q.down ? tile_rows : tile_cols, int64_t(p.q.hadamard));
      }
    int64_t unit_rows = tile_rows, unit_cols = tile_cols;
    for (auto &p : plans) {
      int64_t r = p.R >= rows ? (rows + tile_rows - 1) / tile_rows * tile_rows : std::lcm(tile_rows, p.R);
      int64_t c = p.C >= cols ? (cols + tile_cols - 1) / tile_cols * tile_cols : std::lcm(tile_cols, p.C);
      bool fits = r <= TILE_ROWS && c <= TILE_COLS;
      if (fits) tile_rows = unit_rows = r, tile_cols = unit_cols = c;
      // If a first pass is needed anyway, it also records the amaxes of blocks.
      p.lookup = !fits || (p.grouped && p.R * p.C >= FEW);
      p.apart = p.weighs() && !fits;
    }
    int64_t limit = rotated ? ROTATED_ELEMENTS : TILE_ELEMENTS;
    int64_t widest = std::max(unit_cols, std::min(TILE_COLS, limit / tile_rows) / unit_cols * unit_cols);
    tile_cols = std::min(widest, (cols + unit_cols - 1) / unit_cols * unit_cols);
    while (tile_rows < rows && tile_rows * tile_cols * 2 <= limit / 4 && tile_rows * 2 <= TILE_ROWS) tile_rows *= 2;
    while (count(rows, cols) < threads && tile_rows > unit_rows && tile_rows % (2 * unit_rows) == 0) tile_rows /= 2;
    while (count(rows, cols) < threads && tile_cols > unit_cols)
      tile_cols = (tile_cols / unit_cols + 1) / 2 * unit_cols;
  }
  int64_t count(int64_t rows, int64_t cols) const {
    return ((rows + tile_rows - 1) / tile_rows) * ((cols + tile_cols - 1) / tile_cols);
  }
  Tile tile(int64_t i, int64_t rows, int64_t cols) const {
    int64_t across = (cols + tile_cols - 1) / tile_cols, r = i / across * tile_rows, c = i % across * tile_cols;
    return Tile{r, std::min(rows, r + tile_rows), c, std::min(cols, c + tile_cols)};
  }
};

template <class D>
void quantize(const void *x, int64_t rows, int64_t cols, const Request *requests, int n, int threads) {
  Ieee ieee;
  std::vector<Plan<D>> plans;
  plans.reserve(size_t(n));
  for (int i = 0; i < n; i++) plans.emplace_back(requests[i], (const Cell<D> *)x, rows, cols);
  if (!rows || !cols) return;
  Walk walk(plans, rows, cols, threads);
  int64_t tiles = walk.count(rows, cols);
  threads = int(std::min<int64_t>(threads, tiles));
  bool first = false;
  for (auto &p : plans) p.allocate(), p.settle(), first = first || p.needs_first_walk();
  if (first) {
    in_parallel(tiles, threads, [&](int64_t count) {
      Scratch<D> s;
#pragma omp for schedule(static)
      for (int64_t i = 0; i < count; i++)
        for (auto &p : plans)
          if (p.needs_first_walk()) p.first_walk(walk.tile(i, rows, cols), s);
    });
    for (auto &p : plans) p.after_first_walk();
    for (auto &p : plans)
      if (p.apart)
        in_parallel(tiles, threads, [&](int64_t count) {
          Scratch<D> s;
#pragma omp for schedule(static)
          for (int64_t i = 0; i < count; i++) p.weigh_parts(walk.tile(i, rows, cols), s);
        });
  }
  in_parallel(tiles, threads, [&](int64_t count) {
    Scratch<D> s;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) {  // the last tile first, because the first pass left it in the cache
      Tile t = walk.tile(first ? count - 1 - i : i, rows, cols);
      Tile next = i + 1 < count ? walk.tile(first ? count - 2 - i : i + 1, rows, cols) : Tile{};
      for (auto &p : plans) p.second_walk(t, &p == &plans[0] ? next : Tile{}, s);
    }
  });
}

}  // namespace fb

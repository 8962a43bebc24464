// A linear layer with bfloat16 weights in panels of 32 columns, in the order in which they are read.
//
// One row of a panel is 16 words: word j has column j in its lower half and column 16 + j in its upper half, so a
// shift and a mask turn it into two vectors of floats. Every output is summed over k in order for any number of rows:
// a row gets the same bits in any batch.
#pragma once
#include <algorithm>

#include "threads.h"
#include "vectors.h"

namespace flambeau {

constexpr int64_t kPanel = 2 * kLanes, kRowsAtOnce = 8;
constexpr int64_t kLinesAhead = 32;  // prefetched from memory: a step of one row takes 0.42 ms instead of 0.50

// out [M, width] = x [M, size] times one panel, of which `count` columns are real; += with `adds`.
template <int rows>
inline void multiply_panel(const float* x, const uint32_t* panel, float* out, int64_t size, int64_t width,
                           int64_t count, bool adds) {
  Floats low[rows] = {}, high[rows] = {};
  for (int64_t k = 0; k < size; ++k) {
    Words words;
    std::memcpy(&words, panel + k * kLanes, sizeof words);
    __builtin_prefetch(panel + (k + kLinesAhead) * kLanes);  // beyond its end is the next panel
    const Floats first = reinterpret_cast<Floats>(words << 16), second = reinterpret_cast<Floats>(words & 0xffff0000u);
    for (int m = 0; m < rows; ++m) {
      low[m] += x[m * size + k] * first;
      high[m] += x[m * size + k] * second;
    }
  }
  for (int m = 0; m < rows; ++m) {
    float totals[kPanel];
    std::memcpy(totals, &low[m], sizeof low[m]);
    std::memcpy(totals + kLanes, &high[m], sizeof high[m]);
    float* to = out + m * width;
    for (int64_t n = 0; n < count; ++n) to[n] = adds ? to[n] + totals[n] : totals[n];
  }
}

// As multiply_panel, for up to `most` rows: a panel is read once for all of them.
template <int most>
inline void multiply_rows(int64_t num_rows, const float* x, const uint32_t* panel, float* out, int64_t size,
                          int64_t width, int64_t count, bool adds) {
  if constexpr (most > 1)
    if (num_rows < most) return multiply_rows<most - 1>(num_rows, x, panel, out, size, width, count, adds);
  multiply_panel<most>(x, panel, out, size, width, count, adds);
}

// out [M, width] = x [M, size] times the weights; += with `adds`.
inline void multiply_packed(const float* x, const uint32_t* weight, float* out, int64_t num_rows, int64_t size,
                            int64_t width, bool adds, int num_threads) {
  Threads::of_process().share((width + kPanel - 1) / kPanel, num_threads, [&](int64_t task) {
    const uint32_t* panel = weight + task * size * kLanes;
    const int64_t count = std::min(kPanel, width - task * kPanel);
    float* to = out + task * kPanel;
    for (int64_t m = 0; m < num_rows; m += kRowsAtOnce)
      multiply_rows<kRowsAtOnce>(std::min(kRowsAtOnce, num_rows - m), x + m * size, panel, to + m * width, size, width,
                                 count, adds);
  });
}

}  // namespace flambeau

// A linear layer whose bfloat16 weights lie in panels of 32 columns, in the order in which they are used.
//
// One row of a panel is 16 words: word j has column j in its lower half and column 16 + j in its upper half, so that a
// shift and a mask make two vectors of floats of it. Every output is summed over k in order, whatever the number of
// rows: a row gets the same bits alone and among others.
#pragma once
#include <algorithm>

#include "threads.h"
#include "vectors.h"

namespace flambeau {

constexpr int64_t kPanel = 2 * kLanes, kRowsAtOnce = 8;
constexpr int64_t kLinesAhead = 32;  // of the weights, which come from afar: a step of one row takes 0.42 ms, not 0.50

// Out [M, width] = (or, with `adds`, +=) x [M, size] times one panel, of which `count` columns are real.
template <int rows>
inline void multiply_panel(const float* x, const uint32_t* panel, float* out, int64_t size, int64_t width,
                           int64_t count, bool adds) {
  Floats low[rows] = {}, high[rows] = {};
  for (int64_t k = 0; k < size; ++k) {
    Words words;
    std::memcpy(&words, panel + k * kLanes, sizeof words);
    __builtin_prefetch(panel + (k + kLinesAhead) * kLanes);  // beyond its end lies the next panel
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

// As multiply_panel, for a number of rows up to `most`: a panel is read once for all of them.
template <int most>
inline void multiply_rows(int64_t num_rows, const float* x, const uint32_t* panel, float* out, int64_t size,
                          int64_t width, int64_t count, bool adds) {
  if constexpr (most > 1)
    if (num_rows < most) return multiply_rows<most - 1>(num_rows, x, panel, out, size, width, count, adds);
  multiply_panel<most>(x, panel, out, size, width, count, adds);
}

// Out [M, width] = (or +=) x [M, size] times the weights.
inline void multiply_packed(const float* x, const uint32_t* weight, float* out, int64_t num_rows, int64_t size,
                            int64_t width, bool adds, int num_threads) {
  Threads::of_process().share((width + kPanel - 1) / kPanel, num_threads, [&](int64_t piece) {
    const uint32_t* panel = weight + piece * size * kLanes;
    const int64_t count = std::min(kPanel, width - piece * kPanel);
    float* to = out + piece * kPanel;
    for (int64_t m = 0; m < num_rows; m += kRowsAtOnce)
      multiply_rows<kRowsAtOnce>(std::min(kRowsAtOnce, num_rows - m), x + m * size, panel, to + m * width, size, width,
                                 count, adds);
  });
}

}  // namespace flambeau

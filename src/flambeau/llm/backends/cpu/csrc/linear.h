// A linear layer for few rows with float32 weights in the layout of a checkpoint: [N, K].
//
// Every output is summed in the same order for any number of rows, so a row gets the same bits in any batch.
#pragma once
#include <algorithm>

#include "threads.h"
#include "vectors.h"

namespace flambeau {

constexpr int kRows = 4, kColumns = 4;  // of one tile: sixteen sums in registers
constexpr int64_t kColumnsPerTask = 32;

template <int rows, int columns>
inline void multiply_tile(const float* x, const float* weight, float* out, int64_t size,
                          int64_t width, bool adds) {
  Floats sums[rows][columns] = {};
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t k = 0; k < whole; k += kLanes) {
    Floats part[columns];
    for (int n = 0; n < columns; ++n) part[n] = load(weight + n * size + k);
    for (int m = 0; m < rows; ++m) {
      const Floats row = load(x + m * size + k);
      for (int n = 0; n < columns; ++n) sums[m][n] += row * part[n];
    }
  }
  for (int m = 0; m < rows; ++m) {
    float totals[kColumns];
    if constexpr (columns == kColumns) {
      const Quarter four = sums_of(sums[m]);
      std::memcpy(totals, &four, sizeof four);
    } else {
      for (int n = 0; n < columns; ++n) totals[n] = sum(sums[m][n]);
    }
    for (int n = 0; n < columns; ++n) {
      for (int64_t k = whole; k < size; ++k) totals[n] += x[m * size + k] * weight[n * size + k];
      out[m * width + n] = adds ? out[m * width + n] + totals[n] : totals[n];
    }
  }
}

template <int columns>
inline void multiply_columns(const float* x, const float* weight, float* out, int64_t num_rows,
                             int64_t size, int64_t width, bool adds) {
  int64_t m = 0;
  for (; m + kRows <= num_rows; m += kRows)
    multiply_tile<kRows, columns>(x + m * size, weight, out + m * width, size, width, adds);
  for (; m + 2 <= num_rows; m += 2)
    multiply_tile<2, columns>(x + m * size, weight, out + m * width, size, width, adds);
  for (; m < num_rows; ++m) multiply_tile<1, columns>(x + m * size, weight, out + m * width, size, width, adds);
}

// out [M, N], the first columns of [M, stride], = x [M, K] times weight [N, K]; += with `adds`.
inline void multiply(const float* x, const float* weight, float* out, int64_t num_rows, int64_t size,
                     int64_t width, int64_t stride, bool adds, int num_threads) {
  const int64_t num_tasks = (width + kColumnsPerTask - 1) / kColumnsPerTask;
  Threads::of_process().share(num_tasks, num_threads, [&](int64_t task) {
    int64_t n = task * kColumnsPerTask;
    const int64_t end = std::min(width, n + kColumnsPerTask);
    for (; n + kColumns <= end; n += kColumns)
      multiply_columns<kColumns>(x, weight + n * size, out + n, num_rows, size, stride, adds);
    for (; n < end; ++n) multiply_columns<1>(x, weight + n * size, out + n, num_rows, size, stride, adds);
  });
}

}  // namespace flambeau

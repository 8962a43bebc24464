// A linear layer for few rows, from weights as they lie in a checkpoint: [N, K], float32 or bfloat16.
//
// Every output is summed in the same order whatever the number of rows, so a row gets the same bits alone and among
// others. Weights of bfloat16 are widened as they are read: half the memory traffic, and no other result.
#pragma once
#include <algorithm>

#include "threads.h"
#include "vectors.h"

namespace flambeau {

constexpr int kRows = 4, kColumns = 4;  // of one tile: sixteen sums in registers
constexpr int64_t kColumnsOfPiece = 32;

template <int rows, int columns, typename scalar>
inline void multiply_tile(const float* x, const scalar* weight, const float* bias, float* out, int64_t size,
                          int64_t width) {
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
      for (int64_t k = whole; k < size; ++k) totals[n] += x[m * size + k] * widen(weight[n * size + k]);
      out[m * width + n] = totals[n] + (bias ? bias[n] : 0.0f);
    }
  }
}

template <int columns, typename scalar>
inline void multiply_columns(const float* x, const scalar* weight, const float* bias, float* out, int64_t num_rows,
                             int64_t size, int64_t width) {
  int64_t m = 0;
  for (; m + kRows <= num_rows; m += kRows)
    multiply_tile<kRows, columns>(x + m * size, weight, bias, out + m * width, size, width);
  for (; m + 2 <= num_rows; m += 2)
    multiply_tile<2, columns>(x + m * size, weight, bias, out + m * width, size, width);
  for (; m < num_rows; ++m) multiply_tile<1, columns>(x + m * size, weight, bias, out + m * width, size, width);
}

// x [M, K], weight [N, K], bias [N] or null, out [M, N].
template <typename scalar>
void multiply(const float* x, const scalar* weight, const float* bias, float* out, int64_t num_rows, int64_t size,
              int64_t width, int num_threads) {
  const int64_t num_pieces = (width + kColumnsOfPiece - 1) / kColumnsOfPiece;
  Threads::of_process().share(num_pieces, num_threads, [&](int64_t piece) {
    int64_t n = piece * kColumnsOfPiece;
    const int64_t end = std::min(width, n + kColumnsOfPiece);
    auto at = [&](int64_t column) { return bias ? bias + column : nullptr; };
    for (; n + kColumns <= end; n += kColumns)
      multiply_columns<kColumns>(x, weight + n * size, at(n), out + n, num_rows, size, width);
    for (; n < end; ++n) multiply_columns<1>(x, weight + n * size, at(n), out + n, num_rows, size, width);
  });
}

}  // namespace flambeau

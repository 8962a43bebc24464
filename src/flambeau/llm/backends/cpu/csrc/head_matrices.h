// A matrix for each head, which multiplies its own part of every row.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "matrix.h"
#include "threads.h"

namespace flambeau {

// Multiplies a part of every head of the rows x with a matrix of its own: out [T, H, …] = x [T, H, …].
inline void multiply_heads(const Matrix* matrices, int64_t heads, const float* x, int64_t x_stride, int64_t x_head,
                           float* out, int64_t out_stride, int64_t out_head, int64_t num_tokens, int num_threads) {
  Threads::of_process().share(heads, num_threads, [&](int64_t h) {
    static thread_local std::vector<float> rows, found;
    const Matrix& matrix = matrices[h];
    rows.resize(num_tokens * matrix.size), found.resize(num_tokens * matrix.width);
    for (int64_t t = 0; t < num_tokens; ++t)
      std::copy_n(x + t * x_stride + h * x_head, matrix.size, &rows[t * matrix.size]);
    matrix.multiply(rows.data(), found.data(), num_tokens, false, 1);
    for (int64_t t = 0; t < num_tokens; ++t)
      std::copy_n(&found[t * matrix.width], matrix.width, out + t * out_stride + h * out_head);
  });
}

}  // namespace flambeau

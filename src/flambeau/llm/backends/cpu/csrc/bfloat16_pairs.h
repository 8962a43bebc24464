// Linear layers with bfloat16 weights and inputs rounded to bfloat16; sums are in float32.
//
// A panel has 32 columns. For every two k there are 32 words, each with the two weights of a column, the first in the
// lower half.
#pragma once
#include <vector>

#include "bfloat16_tiles.h"
#include "panels.h"

namespace flambeau {

// Adds to each lane the products of two pairs; `pair` is the same for all lanes.
inline Floats add_pair(Floats sums, Words weights, uint32_t pair) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sums), reinterpret_cast<__m512bh>(weights),
                                                   reinterpret_cast<__m512bh>(Words{} + pair)));
#else
  const Words both = Words{} + pair;
  sums += as<Floats>(weights << 16) * as<Floats>(both << 16);
  return sums + as<Floats>(weights & 0xffff0000u) * as<Floats>(both & 0xffff0000u);
#endif
}

template <int rows>
inline void multiply_pair_panel(const uint32_t* x, const uint32_t* panel, int64_t pairs, int64_t first,
                                const Columns& columns) {
  Floats low[rows] = {}, high[rows] = {};
  x += first * pairs;
  for (int64_t k = 0; k < pairs; ++k, panel += 2 * kLine) {
    const Words left = read<Words>(panel), right = read<Words>(panel + kLine);
    for (int m = 0; m < rows; ++m) {
      low[m] = add_pair(low[m], left, x[m * pairs + k]);
      high[m] = add_pair(high[m], right, x[m * pairs + k]);
    }
  }
  for (int m = 0; m < rows; ++m) columns.store(first + m, low[m], high[m]);
}

inline void multiply_pairs(const float* x, const uint32_t* weights, const float* bias, float* out, int64_t num_rows,
                           int64_t size, int64_t width, int64_t stride, bool adds, int num_threads) {
#if defined(FLAMBEAU_TILES)
  if (may_use_tiles())
    return multiply_by_tiles(x, weights, bias, out, num_rows, size, width, stride, adds, num_threads);
#endif
  static thread_local std::vector<uint32_t> of_thread;
  std::vector<uint32_t>& rounded = of_thread;  // the caller's, also in the other threads
  const int64_t pairs = (size + 1) / 2, words = pairs * 2 * kLine, some = 8;
  if (static_cast<int64_t>(rounded.size()) < num_rows * pairs) rounded.resize(num_rows * pairs);
  Threads::of_process().share((num_rows + some - 1) / some, num_threads, [&](int64_t task) {
    for (int64_t m = task * some; m < std::min(num_rows, (task + 1) * some); ++m) {
      rounded[(m + 1) * pairs - 1] = 0;  // the last pair may have one number only
      narrow(x + m * size, size, reinterpret_cast<bfloat*>(&rounded[m * pairs]));
    }
  });
  share_panels(width, words * 4, num_threads, [&](int64_t panel) {
    const int64_t n = panel * kPanel;
    const Columns columns{out + n, bias ? bias + n : nullptr, stride, std::min(kPanel, width - n), adds};
    in_portions<kRowsAtOnce>(num_rows, [&](auto rows, int64_t first) {
      multiply_pair_panel<rows.value>(rounded.data(), weights + panel * words, pairs, first, columns);
    });
  });
}

}  // namespace flambeau

// Linear layers with weights of 32, 16 bits in panels of 32 columns, in the order in which they are read.
//
// One row of a bfloat16 panel is 16 words: word j has column j in its lower half and column 16 + j in its upper half, so
// a shift and a mask turn it into two vectors of floats. Rows of float32 and float16 are in the order of the columns.
// Every output is summed over k in order for any number of rows: a row gets the same bits in any batch.
#pragma once
#include <algorithm>
#include <type_traits>

#include "threads.h"
#include "vectors.h"

namespace flambeau {

constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kLine = kLanes;       // words of a cache line
constexpr int64_t kBytesPerTask = 1 << 18;
#if defined(__AVX512F__)
constexpr int kRowsAtOnce = 8;  // sums in 16 of 32 registers
#else
constexpr int kRowsAtOnce = 2;  // a vector takes two registers of AVX2, or four of NEON, which has 32
#endif

struct Float32 {
  static constexpr int64_t lines = 2;  // of one row of a panel
  static void load(const uint32_t* at, Floats& low, Floats& high) {
    low = flambeau::load(reinterpret_cast<const float*>(at));
    high = flambeau::load(reinterpret_cast<const float*>(at) + kLanes);
  }
};

struct Bfloat16 {
  static constexpr int64_t lines = 1;
  static void load(const uint32_t* at, Floats& low, Floats& high) {
    const Words words = read<Words>(at);
    low = as<Floats>(words << 16), high = as<Floats>(words & 0xffff0000u);
  }
};

struct Float16 {
  static constexpr int64_t lines = 1;
  static void load(const uint32_t* at, Floats& low, Floats& high) {
    low = flambeau::load(reinterpret_cast<const half*>(at));
    high = flambeau::load(reinterpret_cast<const half*>(at) + kLanes);
  }
};

// Where the results of a panel go: columns of out [M, stride].
struct Columns {
  float* out;
  const float* bias;  // or null
  int64_t stride, count;
  bool adds;

  void store(int64_t row, const Floats& low, const Floats& high) const {
    float* to = out + row * stride;
    if (count == kPanel) {
      Floats first = low, second = high;
      if (bias) first += load(bias), second += load(bias + kLanes);
      if (adds) first += load(to), second += load(to + kLanes);
      write(first, to), write(second, to + kLanes);
      return;
    }
    float totals[kPanel];
    write(low, totals), write(high, totals + kLanes);
    if (bias)
      for (int64_t n = 0; n < count; ++n) totals[n] += bias[n];
    for (int64_t n = 0; n < count; ++n) to[n] = adds ? to[n] + totals[n] : totals[n];
  }
};

template <typename Weights, int rows>
inline void multiply_float_panel(const float* x, const uint32_t* panel, int64_t size, int64_t first,
                                 const Columns& columns) {
  Floats low[rows] = {}, high[rows] = {};
  x += first * size;
  for (int64_t k = 0; k < size; ++k, panel += Weights::lines * kLine) {
    Floats left, right;
    Weights::load(panel, left, right);
    for (int m = 0; m < rows; ++m) {
      low[m] += x[m * size + k] * left;
      high[m] += x[m * size + k] * right;
    }
  }
  for (int m = 0; m < rows; ++m) columns.store(first + m, low[m], high[m]);
}

// Calls multiply(std::integral_constant<int, rows>, first) for portions of the rows.
template <int most, typename Multiply>
inline void in_portions(int64_t num_rows, const Multiply& multiply, int64_t first = 0) {
  for (; first + most <= num_rows; first += most) multiply(std::integral_constant<int, most>{}, first);
  if constexpr (most > 1) in_portions<most / 2>(num_rows, multiply, first);
}

// Calls work(panel) for each panel. Neighbors go to one thread as far as all threads stay busy.
template <typename Work>
inline void share_panels(int64_t width, int64_t panel_bytes, int num_threads, const Work& work) {
  const int64_t count = (width + kPanel - 1) / kPanel;
  const int64_t most = std::max<int64_t>(1, kBytesPerTask / panel_bytes);
  const int64_t together = std::clamp<int64_t>(count / (8 * num_threads), 1, most);
  Threads::of_process().share((count + together - 1) / together, num_threads, [&](int64_t task) {
    for (int64_t panel = task * together; panel < std::min(count, (task + 1) * together); ++panel) work(panel);
  });
}

template <typename Weights>
inline void multiply_floats(const float* x, const uint32_t* weights, const float* bias, float* out, int64_t num_rows,
                            int64_t size, int64_t width, int64_t stride, bool adds, int num_threads) {
  const int64_t words = size * Weights::lines * kLine;
  share_panels(width, words * 4, num_threads, [&](int64_t panel) {
    const int64_t n = panel * kPanel;
    const Columns columns{out + n, bias ? bias + n : nullptr, stride, std::min(kPanel, width - n), adds};
    in_portions<kRowsAtOnce>(num_rows, [&](auto rows, int64_t first) {
      multiply_float_panel<Weights, rows.value>(x, weights + panel * words, size, first, columns);
    });
  });
}

}  // namespace flambeau

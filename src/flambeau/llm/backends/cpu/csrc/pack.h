// Puts float weights [width, size] into the panels of panels.h and bfloat16_pairs.h. Nothing is rounded.
#pragma once
#include <atomic>

#include "matrix.h"

namespace flambeau {

constexpr int64_t kNumbersPerTask = 1 << 16;

inline bool fits_bfloat16(const Floats& x) { return sum(as<Words>(x) & 0xffff) == 0; }

// Infinite numbers and NaN are left to float32.
inline bool fits_float16(const Floats& x) {
  const Words bits = as<Words>(x), size = bits & 0x7fffffff;
  const Floats steps = magnitude(x) * 0x1p24f;  // of the smallest number
  const Floats whole = converted<Floats>(rounded(chosen(steps < 1024.0f, steps, Floats{})));
  const auto is_small = (size < 0x38800000) & (whole == steps);
  const auto is_normal = (size >= 0x38800000) & (size < 0x47800000) & ((bits & 0x1fff) == 0);
  return sum(as<Words>(is_small | is_normal) & 1) == kLanes;
}

// The smallest kind that represents all numbers exactly: bfloat16, else float16, else float32.
inline Kind narrowest(const float* numbers, int64_t count, int num_threads) {
  std::atomic<bool> is_bfloat16{true}, is_float16{true};
  Threads::of_process().share((count + kNumbersPerTask - 1) / kNumbersPerTask, num_threads, [&](int64_t task) {
    bool first = is_bfloat16, second = is_float16;
    const int64_t end = std::min(count, (task + 1) * kNumbersPerTask);
    for (int64_t i = task * kNumbersPerTask; i < end && (first || second); i += kLanes) {
      float some[kLanes] = {};
      std::copy_n(numbers + i, std::min<int64_t>(kLanes, end - i), some);
      const Floats x = load(some);
      first = first && fits_bfloat16(x), second = second && fits_float16(x);
    }
    if (!first) is_bfloat16 = false;
    if (!second) is_float16 = false;
  });
  return is_bfloat16 ? kBfloat16 : is_float16 ? kFloat16 : kFloat32;
}

// One row of a panel from the numbers of its 32 columns. Of bfloat16 pairs, a number is a pair.
template <Kind kind, typename stored>
inline uint32_t* write_row(const stored* numbers, uint32_t* out) {
  constexpr bool is_wide = sizeof(stored) == 4;
  if constexpr (kind == kFloat32 || kind == kBfloat16Pairs) {
    std::memcpy(out, numbers, 4 * kPanel);
    return out + 2 * kLine;
  } else if constexpr (kind == kBfloat16) {
    for (int64_t j = 0; j < kLanes; ++j) {
      const uint32_t low = numbers[j], high = numbers[kLanes + j];
      out[j] = is_wide ? low >> 16 | (high & 0xffff0000u) : low | high << 16;
    }
  } else if constexpr (is_wide) {
    half halves[kPanel];
    for (int64_t j = 0; j < kPanel; ++j) {
      float number;
      std::memcpy(&number, numbers + j, 4);
      narrow(number, halves + j);
    }
    std::memcpy(out, halves, sizeof halves);
  } else {
    std::memcpy(out, numbers, 2 * kPanel);
  }
  return out + kLine;
}

// `count` columns, each of `size` bytes in memory; the other columns of the panel are zeros.
template <Kind kind, typename stored>
inline void pack_panel(const char* weights, int64_t count, int64_t size, uint32_t* out) {
  constexpr int64_t kBytes = kLanes * sizeof(stored);
  for (int64_t start = 0; start < size; start += kBytes) {
    const int64_t there = std::min(kBytes, size - start);
    alignas(64) stored columns[kPanel][kLanes] = {}, rows[kLanes][kPanel];
    for (int64_t n = 0; n < count; ++n) std::memcpy(columns[n], weights + n * size + start, there);
    for (int64_t n = 0; n < kPanel; ++n)
      for (int64_t k = 0; k < kLanes; ++k) rows[k][n] = columns[n][k];
    for (int64_t k = 0; k * static_cast<int64_t>(sizeof(stored)) < there; ++k) out = write_row<kind>(rows[k], out);
  }
}

template <Kind kind, typename stored>
inline void pack_rows(const char* weights, int64_t width, int64_t size, uint32_t* panels, int num_threads) {
  constexpr int64_t kLines = kind == kFloat32 || kind == kBfloat16Pairs ? 2 : 1, kSize = sizeof(stored);
  const int64_t words = (size + kSize - 1) / kSize * kLines * kLine;
  Threads::of_process().share((width + kPanel - 1) / kPanel, num_threads, [&](int64_t panel) {
    const int64_t first = panel * kPanel;
    pack_panel<kind, stored>(weights + first * size, std::min(kPanel, width - first), size, panels + panel * words);
  });
}

inline void pack(const void* weights, int64_t weight_bytes, Kind kind, int64_t width, int64_t size, uint32_t* panels,
                 int num_threads) {
  const auto with = [&](auto pack_them) {
    pack_them(static_cast<const char*>(weights), width, size * weight_bytes, panels, num_threads);
  };
  const bool is_wide = weight_bytes == 4;
  switch (kind) {
    case kBfloat16: return is_wide ? with(pack_rows<kBfloat16, uint32_t>) : with(pack_rows<kBfloat16, uint16_t>);
    case kFloat16: return is_wide ? with(pack_rows<kFloat16, uint32_t>) : with(pack_rows<kFloat16, uint16_t>);
    case kBfloat16Pairs: return with(pack_rows<kBfloat16Pairs, uint32_t>);
    default: return with(pack_rows<kFloat32, uint32_t>);
  }
}

}  // namespace flambeau

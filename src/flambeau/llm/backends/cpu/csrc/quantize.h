// Rounds float weights [width, size] to integers, straight into the panels of integer_panels.h.
//
// The results are those of quantize_int8 and quantize_int4 in Python, except that sums of errors are added in another
// order, so that the two may choose another range for a group with almost equal errors.
#pragma once
#include "integer_panels.h"

namespace flambeau {

constexpr int64_t kMaxGroup = 128;
constexpr float kShrinks[] = {1.0f, 0.92f, 0.84f, 0.76f};  // fractions of a group's range to try
constexpr int kFits = 2;  // of the scale and the minimum to the levels that were chosen

inline float to_bfloat16(float x) {
  bfloat narrow_one;
  narrow(x, &narrow_one);
  const uint32_t bits = static_cast<uint32_t>(narrow_one) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

struct Levels {
  float scale, minimum;
};

inline Floats clamped(const Floats& x, float low, float high) {
  const Floats above = chosen(x < low, Floats{} + low, x);
  return chosen(above > high, Floats{} + high, above);
}

inline Floats nearest(const Floats& x) { return converted<Floats>(rounded(x)); }

inline Levels quantize_group8(const float* weights, int64_t group, uint8_t* levels) {
  Floats high{};
  for (int64_t i = 0; i < group; i += kLanes) {
    const Floats size = magnitude(load(weights + i));
    high = larger(size, high);
  }
  float scale = to_bfloat16(largest(high) / 127.0f);
  if (scale == 0) scale = 1;
  for (int64_t i = 0; i < group; i += kLanes) {
    store_bytes(rounded(clamped(load(weights + i) / scale, -127.0f, 127.0f)) + 128, levels + i);
  }
  return {scale, 0};
}

inline float error_of(const float* weights, int64_t group, const Levels& with) {
  const float inverse = 1.0f / with.scale;
  Floats total{};
  for (int64_t i = 0; i < group; i += kLanes) {
    const Floats steps = (load(weights + i) - with.minimum) * inverse;
    const Floats off = nearest(clamped(steps, 0.0f, 15.0f)) - steps;
    total += off * off;
  }
  return sum(total) * (with.scale * with.scale);
}

// The scale and minimum with the least squared error for the levels that these give.
inline Levels fitted(const float* weights, int64_t group, const Levels& with) {
  const float inverse = 1.0f / with.scale, size = static_cast<float>(group);
  Floats levels{}, squares{}, products{}, numbers{};
  for (int64_t i = 0; i < group; i += kLanes) {
    const Floats x = load(weights + i), level = nearest(clamped((x - with.minimum) * inverse, 0.0f, 15.0f));
    levels += level, squares += level * level, products += level * x, numbers += x;
  }
  const float of_levels = sum(levels), of_numbers = sum(numbers);
  const float variance = size * sum(squares) - of_levels * of_levels;
  const float scale = to_bfloat16((size * sum(products) - of_levels * of_numbers) / variance);
  const float slope = scale > 0 ? scale : with.scale;  // one level has none
  return {slope, to_bfloat16((of_numbers - slope * of_levels) / size)};
}

// The range with the least error.
inline Levels quantize_group4(const float* weights, int64_t group, uint8_t* levels) {
  Floats high = load(weights), low = high;
  for (int64_t i = kLanes; i < group; i += kLanes) {
    const Floats x = load(weights + i);
    high = larger(x, high), low = chosen(x < low, x, low);
  }
  const float most = largest(high), least = -largest(-low);
  Levels best{};
  float best_error = 0;
  for (const float shrink : kShrinks) {
    Levels some{to_bfloat16((most * shrink - least * shrink) / 15.0f), to_bfloat16(least * shrink)};
    if (some.scale == 0) some.scale = 1;
    const float error = error_of(weights, group, some);
    if (shrink == 1.0f || error < best_error) best = some, best_error = error;
  }
  Levels fit = best;
  for (int i = 0; i < kFits; ++i) fit = fitted(weights, group, fit);
  if (error_of(weights, group, fit) < best_error) best = fit;
  const float inverse = 1.0f / best.scale;
  for (int64_t i = 0; i < group; i += kLanes) {
    store_bytes(rounded(clamped((load(weights + i) - best.minimum) * inverse, 0.0f, 15.0f)), levels + i);
  }
  return best;
}

// Two bfloat16 in each word: of column j, and of column 16 + j.
inline void write_pairs(const float* numbers, uint32_t* line) {
  for (int64_t j = 0; j < kLanes; ++j) {
    uint32_t halves[2];
    std::memcpy(&halves[0], numbers + j, 4), std::memcpy(&halves[1], numbers + kLanes + j, 4);
    line[j] = halves[0] >> 16 | (halves[1] & 0xffff0000u);
  }
}

// `count` columns of weights, each of `size` numbers; the other columns of the panel are zeros.
template <int bits, typename stored>
inline void quantize_panel(const stored* weights, int64_t count, int64_t size, int64_t group, uint32_t* out) {
  for (int64_t start = 0; start < size; start += group) {
    alignas(64) uint8_t levels[kPanel][kMaxGroup] = {};
    float scales[kPanel] = {}, minimums[kPanel] = {};
    for (int64_t n = 0; n < count; ++n) {
      alignas(64) float numbers[kMaxGroup] = {};
      const int64_t there = std::min(group, size - start);
      for (int64_t i = 0; i < there; i += kLanes) {
        stored some[kLanes] = {};
        std::copy_n(weights + n * size + start + i, std::min<int64_t>(kLanes, there - i), some);
        write(load(some), numbers + i);
      }
      const Levels found = bits == 8 ? quantize_group8(numbers, group, levels[n]) : quantize_group4(numbers, group, levels[n]);
      scales[n] = found.scale, minimums[n] = found.minimum;
    }
    write_pairs(scales, out), out += kLine;
    if constexpr (bits == 4) write_pairs(minimums, out), out += kLine;
    for (int64_t k = 0; k < group; k += 4) {
      uint32_t words[kPanel];
      for (int64_t n = 0; n < kPanel; ++n) std::memcpy(&words[n], &levels[n][k], 4);
      if constexpr (bits == 8) {
        std::memcpy(out, words, sizeof words), out += 2 * kLine;
      } else {
        for (int64_t j = 0; j < kLanes; ++j) out[j] = words[j] | words[kLanes + j] << 4;
        out += kLine;
      }
    }
  }
}

template <int bits, typename stored>
inline void quantize_rows(const stored* weights, int64_t width, int64_t size, int64_t group, uint32_t* panels,
                          int num_threads) {
  const int64_t words = integer_panel_lines(bits, (size + group - 1) / group, group) * kLine;
  Threads::of_process().share((width + kPanel - 1) / kPanel, num_threads, [&](int64_t panel) {
    const int64_t first = panel * kPanel;
    quantize_panel<bits>(weights + first * size, std::min(kPanel, width - first), size, group, panels + panel * words);
  });
}

}  // namespace flambeau

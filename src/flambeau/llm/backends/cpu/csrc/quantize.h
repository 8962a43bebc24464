// Rounds float weights [width, size] to integers, straight into the panels of integer_panels.h.
//
// The results are those of quantize_int8 and quantize_int4 in Python, except that sums of errors are added in another
// order, so that the two may choose another range for a group with almost equal errors.
#pragma once
#include "integer_panels.h"

namespace flambeau {

constexpr int64_t kMaxGroup = 128;
constexpr float kShrinks[] = {1.0f, 0.93f, 0.86f};  // fractions of a group's range to try
constexpr float kMoves[] = {0.08f, 0.04f};  // then of each end alone, inwards and outwards
constexpr int kFits = 2;  // of the scale and the minimum to the levels that were chosen

inline Floats to_bfloat16(const Floats& x) {  // to the nearest, ties to even
  const Words bits = as<Words>(x);
  return as<Floats>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

inline Floats clamped(const Floats& x, float low, float high) {
  const Floats above = chosen(x < low, Floats{} + low, x);
  return chosen(above > high, Floats{} + high, above);
}

struct Levels {
  Floats scale, minimum;
};

// A group of each of sixteen columns, a column in each lane.
struct Groups {
  alignas(64) float numbers[kMaxGroup][kLanes];
  int64_t size;

  Floats at(int64_t k) const { return load(numbers[k]); }

  // `count` columns of weights; the others are zeros.
  template <typename stored>
  void fill(const stored* weights, int64_t count, int64_t stride, int64_t start) {
    for (int64_t i = 0; i < size; i += kLanes) {
      alignas(64) float columns[kLanes][kLanes] = {};
      const int64_t there = std::clamp<int64_t>(stride - start - i, 0, kLanes);
      for (int64_t n = 0; n < count; ++n) {
        const stored* from = weights + n * stride + start + i;
        stored some[kLanes] = {};
        if (there < kLanes) std::copy_n(from, there, some), from = some;
        write(load(from), columns[n]);
      }
      for (int64_t k = 0; k < kLanes; ++k)
        for (int64_t n = 0; n < kLanes; ++n) numbers[i + k][n] = columns[n][k];
    }
  }
};

// ---- 8 bits ----

// Scales; NaN for a group with a weight that is not finite.
inline Levels quantize_groups8(const Groups& groups) {
  Floats high{}, invalid{};
  for (int64_t k = 0; k < groups.size; ++k) {
    const Floats x = groups.at(k);
    high = larger(magnitude(x), high), invalid += x - x;
  }
  const Floats scale = to_bfloat16(high / 127.0f);
  return {chosen(scale == 0.0f, Floats{} + 1.0f, scale) + invalid, Floats{}};
}

// ---- 4 bits ----

inline Floats in_steps(const Floats& x, const Floats& minimum, const Floats& inverse) { return (x - minimum) * inverse; }

inline Floats nearest_level(const Floats& steps) {
  const Floats shifted = clamped(steps, 0.0f, 15.0f) + kRoundShift;
  return shifted - kRoundShift;
}

template <int count>
inline void errors_of(const Groups& groups, const Levels* with, Floats* errors) {
  Floats inverse[count], totals[count] = {};
  for (int i = 0; i < count; ++i) inverse[i] = 1.0f / with[i].scale;
  for (int64_t k = 0; k < groups.size; ++k) {
    const Floats x = groups.at(k);
    for (int i = 0; i < count; ++i) {
      const Floats steps = in_steps(x, with[i].minimum, inverse[i]), off = nearest_level(steps) - steps;
      totals[i] += off * off;
    }
  }
  for (int i = 0; i < count; ++i) errors[i] = totals[i] * (with[i].scale * with[i].scale);
}

// Searches the range of sixteen levels with the least squared error.
struct RangeSearch {
  const Groups& groups;
  Floats low, high;                                    // of the weights
  Floats from = Floats{} + 1.0f, to = Floats{} + 1.0f;  // the best range, in fractions of these
  Floats error = Floats{} + INFINITY;
  Levels best{};

  template <int count>
  void compare(const Floats (&lows)[count], const Floats (&highs)[count]) {
    Levels some[count];
    Floats errors[count];
    for (int i = 0; i < count; ++i) {
      const Floats scale = to_bfloat16((high * highs[i] - low * lows[i]) / 15.0f);
      some[i] = {chosen(scale == 0.0f, Floats{} + 1.0f, scale), to_bfloat16(low * lows[i])};
    }
    errors_of<count>(groups, some, errors);
    for (int i = 0; i < count; ++i) {
      const auto is_better = errors[i] < error;
      from = chosen(is_better, lows[i], from), to = chosen(is_better, highs[i], to);
      keep(is_better, some[i], errors[i]);
    }
  }

  template <typename Mask>
  void keep(const Mask& is_better, const Levels& other, const Floats& its_error) {
    best.scale = chosen(is_better, other.scale, best.scale);
    best.minimum = chosen(is_better, other.minimum, best.minimum);
    error = chosen(is_better, its_error, error);
  }
};

// The scale and minimum with the least squared error for the levels that these give.
inline Levels fitted(const Groups& groups, const Levels& with) {
  const Floats inverse = 1.0f / with.scale;
  const float size = static_cast<float>(groups.size);
  Floats levels{}, squares{}, products{}, numbers{};
  for (int64_t k = 0; k < groups.size; ++k) {
    const Floats x = groups.at(k), level = nearest_level(in_steps(x, with.minimum, inverse));
    levels += level, squares += level * level, products += level * x, numbers += x;
  }
  const Floats variance = squares * size - levels * levels;
  const Floats scale = to_bfloat16((products * size - levels * numbers) / variance);
  const Floats slope = chosen(scale > 0.0f, scale, with.scale);  // one level has none
  return {slope, to_bfloat16((numbers - slope * levels) / size)};
}

// The levels with the least error that the search finds; scales of groups with a weight that is not finite are NaN.
FLAMBEAU_ONCE inline Levels quantize_groups4(const Groups& groups) {
  Floats high = groups.at(0), low = high, invalid{};
  for (int64_t k = 0; k < groups.size; ++k) {
    const Floats x = groups.at(k);
    high = larger(x, high), low = chosen(x < low, x, low), invalid += x - x;
  }
  RangeSearch search{groups, low, high};
  const Floats shrinks[] = {Floats{} + kShrinks[0], Floats{} + kShrinks[1], Floats{} + kShrinks[2]};
  search.compare(shrinks, shrinks);
  for (const float move : kMoves) {
    const Floats lows[] = {search.from - move, search.from + move}, same_high[] = {search.to, search.to};
    search.compare(lows, same_high);
    const Floats highs[] = {search.to - move, search.to + move}, same_low[] = {search.from, search.from};
    search.compare(same_low, highs);
  }
  Levels fit = search.best;
  for (int i = 0; i < kFits; ++i) fit = fitted(groups, fit);
  Floats error;
  errors_of<1>(groups, &fit, &error);
  search.keep(error < search.error, fit, error);
  return {search.best.scale + invalid, search.best.minimum};
}

// Two bfloat16 in each word: of column j, and of column 16 + j.
inline void write_pairs(const float* numbers, uint32_t* line) {
  for (int64_t j = 0; j < kLanes; ++j) {
    uint32_t halves[2];
    std::memcpy(&halves[0], numbers + j, 4), std::memcpy(&halves[1], numbers + kLanes + j, 4);
    line[j] = halves[0] >> 16 | (halves[1] & 0xffff0000u);
  }
}

// ---- panels ----

// The levels of four weights of each column.
template <int bits>
inline Words four_levels(const Groups& groups, const Levels& with, int64_t k) {
  const Floats inverse = 1.0f / with.scale;
  Words four{};
  for (int i = 0; i < 4; ++i) {
    const Floats x = groups.at(k + i);
    const Ints level = bits == 8 ? rounded(clamped(x / with.scale, -127.0f, 127.0f)) + 128
                                 : rounded(clamped(in_steps(x, with.minimum, inverse), 0.0f, 15.0f));
    four = four | (as<Words>(level) & 0xff) << 8 * i;
  }
  return four;
}

// `count` columns of weights, each of `size` numbers; the other columns of the panel are zeros.
template <int bits, typename stored>
inline void quantize_panel(const stored* weights, int64_t count, int64_t size, int64_t group, uint32_t* out) {
  Groups halves[2];
  halves[0].size = halves[1].size = group;
  for (int64_t start = 0; start < size; start += group) {
    alignas(64) float scales[kPanel], minimums[kPanel];
    Levels found[2];
    for (int64_t i = 0; i < 2; ++i) {
      const int64_t first = i * kLanes, there = std::clamp<int64_t>(count - first, 0, kLanes);
      halves[i].fill(weights + first * size, there, size, start);
      found[i] = bits == 8 ? quantize_groups8(halves[i]) : quantize_groups4(halves[i]);
      write(found[i].scale, scales + first), write(found[i].minimum, minimums + first);
    }
    std::fill(scales + count, scales + kPanel, 0.0f);
    write_pairs(scales, out), out += kLine;
    if constexpr (bits == 4) write_pairs(minimums, out), out += kLine;
    for (int64_t k = 0; k < group; k += 4) {
      const Words low = four_levels<bits>(halves[0], found[0], k), high = four_levels<bits>(halves[1], found[1], k);
      if constexpr (bits == 8) {
        write(low, out), write(high, out + kLine);
        std::fill(out + count, out + kPanel, 0), out += 2 * kLine;
      } else {
        write(low | high << 4, out), out += kLine;
      }
    }
  }
}

template <int bits, typename stored>
inline void quantize_rows(const stored* weights, int64_t width, int64_t size, int64_t group, uint32_t* panels,
                          int num_threads) {
  const int64_t words = integer_panel_lines(bits, bits == 4, (size + group - 1) / group, group) * kLine;
  Threads::of_process().share((width + kPanel - 1) / kPanel, num_threads, [&](int64_t panel) {
    const int64_t first = panel * kPanel;
    quantize_panel<bits>(weights + first * size, std::min(kPanel, width - first), size, group, panels + panel * words);
  });
}

}  // namespace flambeau

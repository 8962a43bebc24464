// Linear layers with integer weights in panels of 32 columns; inputs are quantized to 8 bits in groups of a row.
//
// A weight is `scale * level + minimum` with a level of 4, 5, 6 or 8 bits. For a group of inputs `factor * q` with small
// integers q, the sum over the group is factor * (scale * sum(level * q) + minimum * sum(q)): the sums are exact.
// Without minimums, the middle level stands for zero: the minimum is -128 scales for 8 bits, -8 for 4 bits.
// For every group of a panel there are a line of scales, a line of minimums if there are any, and the levels. A line has
// one word for each of 16 columns, with the levels of four k.
//   8 bits: for every four k a line for columns 0 to 15 and one for the others.
//   4 bits: for every four k one line: the lower halves of its bytes belong to columns 0 to 15, the upper ones to the
//           others.
//   5 and 6 bits: the same for the lowest four bits, and before every four (5 bits) or two (6 bits) of these lines one
//           with the upper bits. From the lowest on, a byte of it has those of the first line, first of the column
//           below 16, then of the other one, then those of the second line, and so on.
// A line of scales or minimums has two bfloat16 in each word, as a row of a Bfloat16 panel has.
#pragma once
#include <vector>

#include "panels.h"
#include "tiles.h"

namespace flambeau {

constexpr int64_t integer_panel_lines(int bits, bool has_minimums, int64_t groups, int64_t group) {
  const int64_t lines = bits == 8 ? group / 2 : group / 4 + (bits - 4) * group / 16;
  return groups * (1 + has_minimums + lines);
}

// Levels of 5 and 6 bits: how many bits are above the lowest four, and of how many lines these are in one line.
constexpr int upper_bits(int bits) { return bits - 4; }
constexpr int lines_together(int bits) { return 4 / upper_bits(bits); }

// With instructions for signed bytes only, levels of 8 bits are made signed again; those of 4 bits fit anyway.
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kMultipliesSigned = true;
#else
constexpr bool kMultipliesSigned = false;
#endif

// Adds to each lane of the sums the products of four unsigned bytes with four signed bytes, the same for all lanes.
template <typename Sums, typename Levels>
inline Sums add_products(const Sums& sums, const Levels& levels, int32_t four) {
  if constexpr (is_pair<Sums>) {
    return {add_products(sums.low, levels.low, four), add_products(sums.high, levels.high, four)};
  } else {
#if defined(__AVX512VNNI__)
    return as<Sums>(_mm512_dpbusd_epi32(as<__m512i>(sums), as<__m512i>(levels), _mm512_set1_epi32(four)));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(sums, vreinterpretq_u8_u32(levels), vreinterpretq_s8_s32(vdupq_n_s32(four)));
#elif defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sums, vreinterpretq_s8_u32(levels), vreinterpretq_s8_s32(vdupq_n_s32(four)));
#else
    const Levels even = levels & 0x00ff00ff, odd = levels >> 8 & 0x00ff00ff;
#if defined(__AVX512BW__)
    const __m512i all = _mm512_set1_epi32(four);
    const __m512i low = _mm512_srai_epi16(_mm512_slli_epi16(all, 8), 8), high = _mm512_srai_epi16(all, 8);
    return sums + as<Sums>(_mm512_madd_epi16(as<__m512i>(even), low)) +
           as<Sums>(_mm512_madd_epi16(as<__m512i>(odd), high));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i all = _mm256_set1_epi32(four);
    const __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), high = _mm256_srai_epi16(all, 8);
    return sums + as<Sums>(_mm256_madd_epi16(as<__m256i>(even), low)) +
           as<Sums>(_mm256_madd_epi16(as<__m256i>(odd), high));
#else
    const auto part = [&](int i) { return static_cast<int32_t>(static_cast<int8_t>(four >> 8 * i)); };
    return sums + as<Sums>(even & 0xffff) * part(0) + as<Sums>(odd & 0xffff) * part(1) +
           as<Sums>(even >> 16) * part(2) + as<Sums>(odd >> 16) * part(3);
#endif
#endif
  }
}

// How many of the rows are multiplied as tiles. Few rows are faster without: reading the weights takes the time.
inline int64_t rows_in_tiles([[maybe_unused]] int64_t num_rows, [[maybe_unused]] int64_t group) {
#if defined(FLAMBEAU_TILES)
  if (num_rows >= 2 * kTileRows && group % (kTileBytes / 2) == 0 && may_use_tiles()) return num_rows / kTileRows * kTileRows;
#endif
  return 0;
}

// The rows of a step as small integers [M, padded]; for each group [M, groups] a factor, the sum of its numbers, and that
// sum times the factor.
struct QuantizedRows {
  // Of the first `tiled` rows: values [tiled / 16, groups, 16, group], factors and offsets [tiled / 16, groups, 16].
  std::vector<int8_t> values;
  std::vector<float> factors, offsets;
  std::vector<int32_t> sums;
  int64_t padded = 0, groups = 0, group = 0, tiled = 0;

  void resize(int64_t num_rows, int64_t size, int64_t group_size, int64_t num_tiled) {
    group = group_size, groups = (size + group - 1) / group, padded = groups * group, tiled = num_tiled;
    if (static_cast<int64_t>(values.size()) < num_rows * padded) values.resize(num_rows * padded);
    if (const int64_t count = num_rows * groups; static_cast<int64_t>(sums.size()) < count)
      factors.resize(count), offsets.resize(count), sums.resize(count);
  }

  // Rounds to 127 steps of each sign, ties to even. A group with a number that is not finite gets such a factor.
  void quantize(int64_t row, const float* x, int64_t size) {
    for (int64_t g = 0; g < groups; ++g, x += group, size -= group) {
      alignas(64) float part[128];
      if (size < group) std::copy_n(x, size, part), std::fill(part + size, part + group, 0.0f);
      const int64_t at = row < tiled ? (row / 16 * groups + g) * 16 + row % 16 : row * groups + g;
      const Quantized found = quantize_bytes(size < group ? part : x, group, &values[at * group]);
      factors[at] = found.scale, offsets[at] = found.scale * static_cast<float>(found.sum), sums[at] = found.sum;
    }
  }
};

// What the sum of products with levels starts at, times the sum of the inputs.
template <int bits, bool has_minimums>
constexpr int32_t kStart = (has_minimums ? 0 : -(1 << (bits - 1))) + (bits == 8 && kMultipliesSigned ? 128 : 0);

inline Words shifted(const Words& words, int to_left) { return to_left > 0 ? words << to_left : words >> -to_left; }

// Calls use(levels of columns 0 to 15, of the others) for every four k of a group; next() reads a line.
template <int bits, typename Next, typename Use>
inline void for_each_line(const Next& next, int64_t group, const Use& use) {
  static_assert(bits == 8 || (bits >= 4 && bits <= 6));
  if constexpr (bits == 8) {
    for (int64_t k = 0; k < group; k += 4) {
      const Words lower = next(), upper = next();
      use(lower, upper);
    }
  } else if constexpr (bits == 4) {
    for (int64_t k = 0; k < group; k += 4) {
      const Words both = next();
      use(both & 0x0f0f0f0f, both >> 4 & 0x0f0f0f0f);
    }
  } else {
    constexpr int count = upper_bits(bits);
    constexpr uint32_t mask = ((1u << count) - 1) * 0x10101010u;
    for (int64_t k = 0; k < group; k += 4 * lines_together(bits)) {
      const Words rest = next();
      for (int line = 0; line < lines_together(bits); ++line) {
        const Words both = next();
        const int to_left = 4 - 2 * count * line;
        use((both & 0x0f0f0f0f) | (shifted(rest, to_left) & mask),
            (both >> 4 & 0x0f0f0f0f) | (shifted(rest, to_left - count) & mask));
      }
    }
  }
}

template <int bits, bool has_minimums, int rows>
inline void multiply_integer_panel(const QuantizedRows& x, const uint32_t* panel, int64_t first,
                                   const Columns& columns) {
  Floats low[rows] = {}, high[rows] = {};
  const int8_t* values = x.values.data() + first * x.padded;
  const float* factors = x.factors.data() + first * x.groups;
  [[maybe_unused]] const float* offsets = x.offsets.data() + first * x.groups;
  [[maybe_unused]] const int32_t* sums = x.sums.data() + first * x.groups;
  const auto next = [&panel] {
    const Words words = read<Words>(panel);
    panel += kLine;
    return words;
  };
  [[maybe_unused]] Floats scale_low, scale_high, minimum_low, minimum_high;
  for (int64_t g = 0; g < x.groups; ++g) {
    Ints left[rows], right[rows];
    constexpr int32_t start = kStart<bits, has_minimums>;
    for (int m = 0; m < rows; ++m) left[m] = right[m] = Ints{} + (start ? start * sums[m * x.groups + g] : 0);
    Bfloat16::load(panel, scale_low, scale_high);
    panel += kLine;
    if constexpr (has_minimums) {
      Bfloat16::load(panel, minimum_low, minimum_high);
      panel += kLine;
    }
    const int8_t* at = values + g * x.group;
    const auto multiply = [&](Words lower, Words upper) {
      if constexpr (bits == 8 && kMultipliesSigned) lower ^= 0x80808080, upper ^= 0x80808080;
      for (int m = 0; m < rows; ++m) {
        int32_t four;
        std::memcpy(&four, at + m * x.padded, sizeof four);
        left[m] = add_products(left[m], lower, four);
        right[m] = add_products(right[m], upper, four);
      }
      at += 4;
    };
    for_each_line<bits>(next, x.group, multiply);
    for (int m = 0; m < rows; ++m) {
      const float factor = factors[m * x.groups + g];
      const Floats first_sum = converted<Floats>(left[m]) * factor;
      const Floats second_sum = converted<Floats>(right[m]) * factor;
      low[m] += first_sum * scale_low, high[m] += second_sum * scale_high;
      if constexpr (has_minimums) {
        const float offset = offsets[m * x.groups + g];
        low[m] += minimum_low * offset, high[m] += minimum_high * offset;
      }
    }
  }
  for (int m = 0; m < rows; ++m) columns.store(first + m, low[m], high[m]);
}

#if defined(FLAMBEAU_TILES)
// The levels of a panel as bytes: [2, groups, group / 4, 16, 4], and the scales, perhaps minimums of its groups.
// Without minimums, the middle level is zero.
struct PanelBytes {
  std::vector<uint8_t> values;
  std::vector<float> scales, minimums;  // [groups, 2, 16]

  template <int bits, bool has_minimums>
  void unpack(const uint32_t* panel, int64_t groups, int64_t group) {
    const int64_t half = groups * group * kLanes;
    if (static_cast<int64_t>(values.size()) < 2 * half + kTileBytes) values.resize(2 * half + kTileBytes);
    if (static_cast<int64_t>(scales.size()) < groups * kPanel) scales.resize(groups * kPanel), minimums.resize(groups * kPanel);
    uint8_t* to = values.data();
    const auto numbers = [&panel](float* line) {
      Floats low, high;
      Bfloat16::load(panel, low, high);
      write(low, line), write(high, line + kLanes);
      panel += kLine;
    };
    const auto next = [&panel] {
      const Words words = read<Words>(panel);
      panel += kLine;
      return words;
    };
    const auto put = [&to, half](const Words& lower, const Words& upper) {
      const __m512i middle = _mm512_set1_epi8(static_cast<char>(has_minimums ? 0 : 1 << (bits - 1)));
      _mm512_storeu_si512(to, _mm512_sub_epi8(as<__m512i>(lower), middle));
      _mm512_storeu_si512(to + half, _mm512_sub_epi8(as<__m512i>(upper), middle));
      to += kTileBytes;
    };
    for (int64_t g = 0; g < groups; ++g) {
      numbers(&scales[g * kPanel]);
      if constexpr (has_minimums) numbers(&minimums[g * kPanel]);
      for_each_line<bits>(next, group, put);
    }
  }
};

// Sixteen rows, from `first` on, with the lower or upper sixteen columns of a panel.
template <bool has_minimums>
inline void multiply_integer_tile(const QuantizedRows& x, const PanelBytes& panel, int64_t first, int upper, float* out,
                                  const uint32_t* fetched, int64_t group_lines) {
  const int64_t groups = x.groups, group = x.group, bytes = tile_bytes(group);
  const int8_t* rows = x.values.data() + first * x.padded;
  const uint8_t* columns = panel.values.data() + upper * x.padded * kLanes;
  const float *factors = x.factors.data() + first * groups, *offsets = x.offsets.data() + first * groups;
  const float *scales = panel.scales.data() + upper * kLanes, *minimums = panel.minimums.data() + upper * kLanes;
  alignas(64) int32_t parts[4][kTileRows * kLanes];
  const auto multiply = [&](int32_t* to) {
    _tile_zero(0);
    for (int64_t k = 0; k < group; k += bytes, columns += bytes * kLanes) {
      _tile_loadd(4, rows + k, group);
      _tile_loadd(6, columns, kTileBytes);
      if constexpr (has_minimums) {
        _tile_dpbsud(0, 4, 6);
      } else {
        _tile_dpbssd(0, 4, 6);
      }
    }
    rows += kTileRows * group;
    _tile_stored(0, to, kTileBytes);
  };
  Floats sums[kTileRows];
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) sums[m] = Floats{};
  const int64_t ahead = 2;  // a tile is read some time after it was written
  for (int64_t g = 0; g < std::min(ahead, groups); ++g) multiply(parts[g]);
  for (int64_t g = 0; g < groups; ++g, scales += kPanel, minimums += kPanel) {
    if (g + ahead < groups) multiply(parts[(g + ahead) % 4]);
    for (int64_t line = 0; fetched && line < group_lines; ++line, fetched += kLine)
      _mm_prefetch(reinterpret_cast<const char*>(fetched), _MM_HINT_T0);
    const int32_t* part = parts[g % 4];
    const Floats scale = load(scales);
    [[maybe_unused]] Floats minimum;
    if constexpr (has_minimums) minimum = load(minimums);
#pragma GCC unroll 16
    for (int m = 0; m < kTileRows; ++m) {
      const Floats sum = converted<Floats>(read<Ints>(part + m * kLanes)) * factors[g * kTileRows + m];
      sums[m] += sum * scale;
      if constexpr (has_minimums) sums[m] += minimum * offsets[g * kTileRows + m];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) write(sums[m], out + m * kPanel);
}

// All rows that are in tiles. The results have the bits that multiply_integer_panel gives.
template <int bits, bool has_minimums>
inline void multiply_tiled_rows(const QuantizedRows& x, const uint32_t* panel, const Columns& columns) {
  static thread_local PanelBytes of_thread;
  PanelBytes& bytes = of_thread;
  bytes.unpack<bits, has_minimums>(panel, x.groups, x.group);
  const TileShapes shapes(tile_bytes(x.group));
  const int64_t lines = integer_panel_lines(bits, has_minimums, 1, x.group);
  for (int64_t first = 0; first < x.tiled; first += kTileRows) {
    alignas(64) float sums[kTileRows * kPanel];
    multiply_integer_tile<has_minimums>(x, bytes, first, 0, sums, first ? nullptr : panel + x.groups * lines * kLine, lines);
    multiply_integer_tile<has_minimums>(x, bytes, first, 1, sums + kLanes, nullptr, 0);
    for (int64_t m = 0; m < kTileRows; ++m)
      columns.store(first + m, load(sums + m * kPanel), load(sums + m * kPanel + kLanes));
  }
}
#endif

template <int bits, bool has_minimums>
inline void multiply_integers(const float* x, const uint32_t* weights, const float* bias, float* out, int64_t num_rows,
                              int64_t size, int64_t width, int64_t group, int64_t stride, bool adds, int num_threads) {
  static thread_local QuantizedRows of_thread;
  QuantizedRows& quantized = of_thread;  // the caller's, also in the other threads
  quantized.resize(num_rows, size, group, rows_in_tiles(num_rows, group));
  const int64_t some = 8;
  Threads::of_process().share((num_rows + some - 1) / some, num_threads, [&](int64_t task) {
    for (int64_t m = task * some; m < std::min(num_rows, (task + 1) * some); ++m)
      quantized.quantize(m, x + m * size, size);
  });
  const int64_t words = integer_panel_lines(bits, has_minimums, quantized.groups, group) * kLine;
  share_panels(width, words * 4, num_threads, [&](int64_t panel) {
    const int64_t n = panel * kPanel;
    const Columns columns{out + n, bias ? bias + n : nullptr, stride, std::min(kPanel, width - n), adds};
#if defined(FLAMBEAU_TILES)
    if (quantized.tiled) multiply_tiled_rows<bits, has_minimums>(quantized, weights + panel * words, columns);
#endif
    in_portions<kRowsAtOnce>(num_rows, [&](auto rows, int64_t first) {
      multiply_integer_panel<bits, has_minimums, rows.value>(quantized, weights + panel * words, first, columns);
    }, quantized.tiled);
  });
}

// The weights of one column, as the products see them.
template <int bits, bool has_minimums>
inline void read_integer_column(const uint32_t* weights, int64_t column, int64_t size, int64_t group, float* out) {
  const int64_t groups = (size + group - 1) / group, lane = column % kLanes, is_upper = column % kPanel / kLanes;
  const uint32_t* panel = weights + column / kPanel * integer_panel_lines(bits, has_minimums, groups, group) * kLine;
  const auto number = [&] {  // a scale or a minimum
    const uint32_t word = panel[lane];
    panel += kLine;
    const uint32_t number_bits = is_upper ? word & 0xffff0000u : word << 16;
    float found;
    std::memcpy(&found, &number_bits, sizeof found);
    return found;
  };
  const auto next = [&] {  // the lowest four bits, or all eight, of four levels
    const uint32_t word = bits == 8 ? panel[is_upper * kLine + lane] : panel[lane] >> 4 * is_upper & 0x0f0f0f0f;
    panel += bits == 8 ? 2 * kLine : kLine;
    return word;
  };
  for (int64_t start = 0; start < size; start += group) {
    const float scale = number(), minimum = has_minimums ? number() : -static_cast<float>(1 << (bits - 1)) * scale;
    [[maybe_unused]] uint32_t rest = 0;
    for (int64_t k = start; k < start + group; k += 4) {
      uint32_t four;
      if constexpr (bits == 5 || bits == 6) {
        constexpr int count = upper_bits(bits), together = lines_together(bits);
        const int line = static_cast<int>((k - start) / 4 % together);
        if (line == 0) rest = panel[lane], panel += kLine;
        four = next() | (rest >> count * (2 * line + is_upper) & ((1u << count) - 1) * 0x01010101u) << 4;
      } else {
        four = next();
      }
      for (int64_t i = 0; i < 4 && k + i < size; ++i)
        out[k + i] = scale * static_cast<float>(four >> 8 * i & 0xff) + minimum;
    }
  }
}

// ---- packing ----

// Scales or minimums of 32 columns as bfloat16.
inline void write_line(const float* numbers, uint32_t* line) {
  bfloat halves[kPanel];
  for (int64_t n = 0; n < kPanel; ++n) narrow(numbers[n], halves + n);
  for (int64_t j = 0; j < kLanes; ++j)
    line[j] = static_cast<uint32_t>(halves[j]) | static_cast<uint32_t>(halves[kLanes + j]) << 16;
}

// `count` columns of levels [count, size], and the scales and minimums [count, groups] of their groups; the other
// columns are zeros. Scales are rounded to bfloat16; with minimums, the middle level stays what it is.
template <int bits, bool has_minimums>
inline void pack_integer_panel(const uint8_t* levels, const float* scales, const float* minimums, int64_t count,
                               int64_t size, int64_t group, uint32_t* out) {
  const int64_t groups = (size + group - 1) / group;
  for (int64_t g = 0; g < groups; ++g) {
    float some[kPanel] = {}, lowest[kPanel] = {};
    for (int64_t n = 0; n < count; ++n) {
      some[n] = scales[n * groups + g];
      if constexpr (has_minimums) {
        bfloat half;
        narrow(some[n], &half);
        const uint32_t rounded_bits = static_cast<uint32_t>(half) << 16;
        float rounded_scale;
        std::memcpy(&rounded_scale, &rounded_bits, sizeof rounded_scale);
        lowest[n] = minimums[n * groups + g] + (some[n] - rounded_scale) * (0.5f * ((1 << bits) - 1));
      }
    }
    write_line(some, out), out += kLine;
    if constexpr (has_minimums) write_line(lowest, out), out += kLine;
    [[maybe_unused]] uint32_t* rest = nullptr;
    for (int64_t k = g * group; k < (g + 1) * group; k += 4) {
      uint32_t fours[kPanel] = {};
      for (int64_t n = 0; n < count; ++n)
        std::memcpy(fours + n, levels + n * size + k, std::clamp<int64_t>(size - k, 0, 4));
      if constexpr (bits == 8) {
        std::copy_n(fours, kPanel, out), out += 2 * kLine;
        continue;
      }
      [[maybe_unused]] int line = 0;
      if constexpr (bits > 4) {
        line = static_cast<int>((k - g * group) / 4 % lines_together(bits));
        if (line == 0) rest = out, std::fill_n(out, kLine, 0u), out += kLine;
      }
      for (int64_t j = 0; j < kLanes; ++j) {
        const uint32_t lower = fours[j], upper = fours[kLanes + j];
        out[j] = (lower & 0x0f0f0f0f) | (upper & 0x0f0f0f0f) << 4;
        if constexpr (bits > 4 && bits < 8) {
          constexpr int bits_above = upper_bits(bits);
          rest[j] |= (lower >> 4 & 0x0f0f0f0f) << 2 * bits_above * line;
          rest[j] |= (upper >> 4 & 0x0f0f0f0f) << bits_above * (2 * line + 1);
        }
      }
      out += kLine;
    }
  }
}

template <int bits, bool has_minimums>
inline void pack_integers(const uint8_t* levels, const float* scales, const float* minimums, int64_t width, int64_t size,
                          int64_t group, uint32_t* panels, int num_threads) {
  const int64_t groups = (size + group - 1) / group;
  const int64_t words = integer_panel_lines(bits, has_minimums, groups, group) * kLine;
  Threads::of_process().share((width + kPanel - 1) / kPanel, num_threads, [&](int64_t panel) {
    const int64_t first = panel * kPanel;
    pack_integer_panel<bits, has_minimums>(levels + first * size, scales + first * groups,
                                           has_minimums ? minimums + first * groups : nullptr,
                                           std::min(kPanel, width - first), size, group, panels + panel * words);
  });
}

}  // namespace flambeau

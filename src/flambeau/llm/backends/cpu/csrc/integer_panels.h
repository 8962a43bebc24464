// Linear layers with integer weights in panels of 32 columns; inputs are quantized to 8 bits in groups of a row.
//
// A weight is `scale * level + minimum` with a level of 8 or 4 bits. For a group of inputs `factor * q` with small
// integers q, the sum over the group is factor * (scale * sum(level * q) + minimum * sum(q)): the sums are exact.
// A line of a panel has one word for each of 16 columns, with the levels of four k.
//   8 bits: for every group a line of scales, and for every four k a line for columns 0 to 15 and one for the others.
//           The level is the integer plus 128, so that the minimum is -128 scales.
//   4 bits: for every group a line of scales, a line of minimums, and for every four k one line: the lower halves of
//           its bytes belong to columns 0 to 15, the upper ones to the others.
// A line of scales or minimums has two bfloat16 in each word, as a row of a Bfloat16 panel has.
#pragma once
#include <vector>

#include "panels.h"

namespace flambeau {

constexpr int64_t integer_panel_lines(int bits, int64_t groups, int64_t group) {
  return groups * (bits == 8 ? 1 + group / 2 : 2 + group / 4);
}

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

// The rows of a step as small integers [M, padded]; for each group [M, groups] a factor, the sum of its numbers times
// the factor, and where the sums of products with levels of 8 bits start.
struct QuantizedRows {
  std::vector<int8_t> values;
  std::vector<float> factors, offsets;
  std::vector<int32_t> starts;
  int64_t padded = 0, groups = 0, group = 0;

  void resize(int64_t num_rows, int64_t size, int64_t group_size) {
    group = group_size, groups = (size + group - 1) / group, padded = groups * group;
    if (static_cast<int64_t>(values.size()) < num_rows * padded) values.resize(num_rows * padded);
    if (const int64_t count = num_rows * groups; static_cast<int64_t>(starts.size()) < count)
      factors.resize(count), offsets.resize(count), starts.resize(count);
  }

  // Rounds to 127 steps of each sign, ties to even. A group with a number that is not finite gets such a factor.
  void quantize(int64_t row, const float* x, int64_t size) {
    for (int64_t g = 0; g < groups; ++g, x += group, size -= group) {
      alignas(64) float part[128];
      if (size < group) std::copy_n(x, size, part), std::fill(part + size, part + group, 0.0f);
      int8_t* to = &values[row * padded + g * group];
      const Quantized found = quantize_bytes(size < group ? part : x, group, to);
      const int64_t at = row * groups + g;
      factors[at] = found.scale, offsets[at] = found.scale * static_cast<float>(found.sum);
      starts[at] = kMultipliesSigned ? 0 : -128 * found.sum;
    }
  }
};

template <int bits, int rows>
inline void multiply_integer_panel(const QuantizedRows& x, const uint32_t* panel, int64_t first,
                                   const Columns& columns) {
  static_assert(bits == 8 || bits == 4);
  Floats low[rows] = {}, high[rows] = {};
  const int8_t* values = x.values.data() + first * x.padded;
  const float* factors = x.factors.data() + first * x.groups;
  [[maybe_unused]] const float* offsets = x.offsets.data() + first * x.groups;
  [[maybe_unused]] const int32_t* starts = x.starts.data() + first * x.groups;
  const auto next = [&panel] {
    const Words words = read<Words>(panel);
    panel += kLine;
    return words;
  };
  [[maybe_unused]] Floats scale_low, scale_high, minimum_low, minimum_high;
  for (int64_t g = 0; g < x.groups; ++g) {
    Ints left[rows], right[rows];
    for (int m = 0; m < rows; ++m) left[m] = right[m] = Ints{} + (bits == 8 ? starts[m * x.groups + g] : 0);
    Bfloat16::load(panel, scale_low, scale_high);
    panel += kLine;
    if constexpr (bits == 4) {
      Bfloat16::load(panel, minimum_low, minimum_high);
      panel += kLine;
    }
    for (const int8_t *at = values + g * x.group, *end = at + x.group; at < end; at += 4) {
      Words lower = next(), upper;
      if constexpr (bits == 8) {
        upper = next();
        if constexpr (kMultipliesSigned) lower ^= 0x80808080, upper ^= 0x80808080;
      } else {
        upper = lower >> 4 & 0x0f0f0f0f;
        lower &= 0x0f0f0f0f;
      }
      for (int m = 0; m < rows; ++m) {
        int32_t four;
        std::memcpy(&four, at + m * x.padded, sizeof four);
        left[m] = add_products(left[m], lower, four);
        right[m] = add_products(right[m], upper, four);
      }
    }
    for (int m = 0; m < rows; ++m) {
      const float factor = factors[m * x.groups + g];
      const Floats first_sum = converted<Floats>(left[m]) * factor;
      const Floats second_sum = converted<Floats>(right[m]) * factor;
      low[m] += first_sum * scale_low, high[m] += second_sum * scale_high;
      if constexpr (bits == 4) {
        const float offset = offsets[m * x.groups + g];
        low[m] += minimum_low * offset, high[m] += minimum_high * offset;
      }
    }
  }
  for (int m = 0; m < rows; ++m) columns.store(first + m, low[m], high[m]);
}

template <int bits>
inline void multiply_integers(const float* x, const uint32_t* weights, const float* bias, float* out, int64_t num_rows,
                              int64_t size, int64_t width, int64_t group, bool adds, int num_threads) {
  static thread_local QuantizedRows of_thread;
  QuantizedRows& quantized = of_thread;  // the caller's, also in the other threads
  quantized.resize(num_rows, size, group);
  const int64_t some = 8;
  Threads::of_process().share((num_rows + some - 1) / some, num_threads, [&](int64_t task) {
    for (int64_t m = task * some; m < std::min(num_rows, (task + 1) * some); ++m)
      quantized.quantize(m, x + m * size, size);
  });
  const int64_t words = integer_panel_lines(bits, quantized.groups, group) * kLine;
  share_panels(width, words * 4, num_threads, [&](int64_t panel) {
    const int64_t n = panel * kPanel;
    const Columns columns{out + n, bias ? bias + n : nullptr, width, std::min(kPanel, width - n), adds};
    in_portions<kRowsAtOnce>(num_rows, [&](auto rows, int64_t first) {
      multiply_integer_panel<bits, rows.value>(quantized, weights + panel * words, first, columns);
    });
  });
}

}  // namespace flambeau

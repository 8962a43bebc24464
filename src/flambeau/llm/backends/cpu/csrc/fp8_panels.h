// Linear layers with 8-bit floating point weights (e4m3) in panels of 32 columns, and float32 scales for groups of k.
//
// Nothing is rounded but the sums: a weight is widened exactly, the sum over a group is multiplied with the scale of its
// column. For every group a panel has a line of scales for columns 0 to 15, one for the others, and for every k the 32
// bytes of the columns. A scale is stored 256 times as large: as float16, the bits of an e4m3 number are a 256th of it.
#pragma once
#include <limits>

#include "panels.h"

namespace flambeau {

constexpr int64_t kFp8Words = kPanel / 4;        // of one k
constexpr int64_t kFp8ScaleWords = 2 * kLine;    // of one group
constexpr float kFp8Factor = 256;

constexpr int64_t fp8_panel_words(int64_t size, int64_t group) {
  return (size + group - 1) / group * kFp8ScaleWords + size * kFp8Words;
}

// The weights of 32 columns, a 256th of their size. The sign is shifted out to bit 15, and its copy in bit 14 removed.
inline void load_fp8(const uint32_t* at, Floats& low, Floats& high) {
#if defined(__AVX512BW__)
  const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(static_cast<int16_t>(0xbfff)));
  low = as<Floats>(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)));
  high = as<Floats>(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)));
#elif defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__)
  const auto widened = [](const uint32_t* from) -> Floats {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i halves =
        _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  };
  low = widened(at), high = widened(at + kLanes / 4);
#else
  const auto widened = [](const uint32_t* from) {
    const Words bits = as<Words>(load_bytes(reinterpret_cast<const int8_t*>(from)));
    const Words size = as<Words>(as<Floats>((bits & 0x7f) << 20) * 0x1p112f);
    return as<Floats>(size | (bits & 0x80000000u));
  };
  low = widened(at), high = widened(at + kLanes / 4);
#endif
}

template <int rows>
inline void multiply_fp8_panel(const float* x, const uint32_t* panel, int64_t size, int64_t group, int64_t first,
                               const Columns& columns) {
  Floats low[rows] = {}, high[rows] = {};
  x += first * size;
  for (int64_t start = 0; start < size; start += group) {
    const uint32_t* scales = panel;
    panel += kFp8ScaleWords;
    Floats left[rows] = {}, right[rows] = {};
    for (int64_t k = start, end = std::min(size, start + group); k < end; ++k, panel += kFp8Words) {
      Floats first_half, second_half;
      load_fp8(panel, first_half, second_half);
      for (int m = 0; m < rows; ++m) {
        left[m] += x[m * size + k] * first_half;
        right[m] += x[m * size + k] * second_half;
      }
    }
    Floats scale_low, scale_high;
    Float32::load(scales, scale_low, scale_high);
    for (int m = 0; m < rows; ++m) low[m] += left[m] * scale_low, high[m] += right[m] * scale_high;
  }
  for (int m = 0; m < rows; ++m) columns.store(first + m, low[m], high[m]);
}

inline void multiply_fp8(const float* x, const uint32_t* weights, const float* bias, float* out, int64_t num_rows,
                         int64_t size, int64_t width, int64_t group, int64_t stride, bool adds, int num_threads) {
  const int64_t words = fp8_panel_words(size, group);
  share_panels(width, words * 4, num_threads, [&](int64_t panel) {
    const int64_t n = panel * kPanel;
    const Columns columns{out + n, bias ? bias + n : nullptr, stride, std::min(kPanel, width - n), adds};
    in_portions<kRowsAtOnce>(num_rows, [&](auto rows, int64_t first) {
      multiply_fp8_panel<rows.value>(x, weights + panel * words, size, group, first, columns);
    });
  });
}

// Puts weights [width, size] and scales [width, groups] into panels of zeros. A weight that is no number (0x7f, 0xff)
// makes the scale of its group no number: so is every sum with it.
inline void pack_fp8(const uint8_t* weights, const float* scales, int64_t width, int64_t size, int64_t group,
                     uint32_t* panels, int num_threads) {
  const int64_t words = fp8_panel_words(size, group), num_groups = (size + group - 1) / group;
  Threads::of_process().share((width + kPanel - 1) / kPanel, num_threads, [&](int64_t panel) {
    const int64_t first = panel * kPanel, count = std::min(kPanel, width - first);
    uint32_t* out = panels + panel * words;
    for (int64_t g = 0; g < num_groups; ++g) {
      const int64_t start = g * group, there = std::min(group, size - start);
      auto* numbers = reinterpret_cast<uint8_t*>(out + kFp8ScaleWords);
      for (int64_t n = 0; n < count; ++n) {
        const uint8_t* from = weights + (first + n) * size + start;
        bool is_number = true;
        for (int64_t k = 0; k < there; ++k) {
          numbers[k * kPanel + n] = from[k];
          is_number &= (from[k] & 0x7f) != 0x7f;
        }
        const float scale = scales[(first + n) * num_groups + g];
        const float stored = is_number ? scale * kFp8Factor : std::numeric_limits<float>::quiet_NaN();
        std::memcpy(out + n, &stored, sizeof stored);
      }
      out += kFp8ScaleWords + there * kFp8Words;
    }
  });
}

}  // namespace flambeau

// Linear layers with 4-bit floating point weights (e2m1) in panels of 32 columns, and scales for groups of k; or with
// other codes of 4 bits (nf4), whose panels begin with a line of the 16 numbers that they stand for, in float32.
//
// As in fp8_panels.h, nothing is rounded but the sums. For every group a panel has its scales, and for every k 16 bytes:
// byte j has column j in its lower half and column 16 + j in its upper half. Scales are a line of bfloat16, as a row of a
// Bfloat16 panel is, or two lines of float32.
#pragma once
#include <atomic>

#include "fp8_panels.h"

namespace flambeau {

constexpr int64_t kFp4Words = kPanel / 8;  // of one k
alignas(64) constexpr float kFp4Numbers[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};

template <typename Scales>
constexpr int64_t fp4_panel_words(int64_t size, int64_t group) {
  return (size + group - 1) / group * Scales::lines * kLine + size * kFp4Words;
}

// The numbers of one k, in registers if these are wide enough to look them up.
struct Fp4Table {
  static constexpr int64_t words = 0;  // before a panel
  explicit Fp4Table(const uint32_t*) {}
#if defined(__AVX512F__)
  const __m512 numbers = _mm512_load_ps(kFp4Numbers);
  void load(const uint32_t* at, Floats& low, Floats& high) const {
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    low = as<Floats>(_mm512_permutexvar_ps(codes, numbers));  // by the lowest four bits
    high = as<Floats>(_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), numbers));
  }
#elif defined(__AVX2__)
  const __m256 numbers = _mm256_load_ps(kFp4Numbers);
  // The lowest three bits say how large it is, the fourth is the sign.
  __m256 number(const __m256i& codes) const {
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(8)), 28);
    return _mm256_or_ps(_mm256_permutevar8x32_ps(numbers, codes), _mm256_castsi256_ps(sign));
  }
  void load(const uint32_t* at, Floats& low, Floats& high) const {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    const __m256i first = _mm256_cvtepu8_epi32(bytes);
    const __m256i second = _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes));
    low = {number(first), number(second)};
    high = {number(_mm256_srli_epi32(first, 4)), number(_mm256_srli_epi32(second, 4))};
  }
#else
  void load(const uint32_t* at, Floats& low, Floats& high) const {
    uint8_t codes[kLanes];
    std::memcpy(codes, at, sizeof codes);
    float first[kLanes], second[kLanes];
    for (int j = 0; j < kLanes; ++j) first[j] = kFp4Numbers[codes[j] & 15], second[j] = kFp4Numbers[codes[j] >> 4];
    low = flambeau::load(first), high = flambeau::load(second);
  }
#endif
};

// The same for any 16 numbers.
struct CodeTable {
  static constexpr int64_t words = kLine;
#if defined(__AVX512F__)
  const __m512 numbers;
  explicit CodeTable(const uint32_t* at) : numbers(_mm512_loadu_ps(at)) {}
  void load(const uint32_t* at, Floats& low, Floats& high) const {
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    low = as<Floats>(_mm512_permutexvar_ps(codes, numbers));
    high = as<Floats>(_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), numbers));
  }
#elif defined(__AVX2__)
  const __m256 first_numbers, second_numbers;
  explicit CodeTable(const uint32_t* at)
      : first_numbers(_mm256_loadu_ps(reinterpret_cast<const float*>(at))),
        second_numbers(_mm256_loadu_ps(reinterpret_cast<const float*>(at) + 8)) {}
  __m256 number(const __m256i& codes) const {  // the fourth bit chooses the half of the table
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(first_numbers, codes),
                            _mm256_permutevar8x32_ps(second_numbers, codes),
                            _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
  }
  void load(const uint32_t* at, Floats& low, Floats& high) const {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    const __m256i first = _mm256_cvtepu8_epi32(bytes);
    const __m256i second = _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes));
    low = {number(first), number(second)};
    high = {number(_mm256_srli_epi32(first, 4)), number(_mm256_srli_epi32(second, 4))};
  }
#else
  float numbers[kLanes];
  explicit CodeTable(const uint32_t* at) { std::memcpy(numbers, at, sizeof numbers); }
  void load(const uint32_t* at, Floats& low, Floats& high) const {
    uint8_t codes[kLanes];
    std::memcpy(codes, at, sizeof codes);
    float first[kLanes], second[kLanes];
    for (int j = 0; j < kLanes; ++j) first[j] = numbers[codes[j] & 15], second[j] = numbers[codes[j] >> 4];
    low = flambeau::load(first), high = flambeau::load(second);
  }
#endif
};

template <typename Scales, typename Table, int rows>
inline void multiply_fp4_panel(const float* x, const uint32_t* panel, int64_t size, int64_t group, int64_t first,
                               const Columns& columns) {
  const Table table(panel);
  panel += Table::words;
  Floats low[rows] = {}, high[rows] = {};
  x += first * size;
  for (int64_t start = 0; start < size; start += group) {
    const uint32_t* scales = panel;
    panel += Scales::lines * kLine;
    Floats left[rows] = {}, right[rows] = {};
    for (int64_t k = start, end = std::min(size, start + group); k < end; ++k, panel += kFp4Words) {
      Floats first_half, second_half;
      table.load(panel, first_half, second_half);
      for (int m = 0; m < rows; ++m) {
        left[m] += x[m * size + k] * first_half;
        right[m] += x[m * size + k] * second_half;
      }
    }
    Floats scale_low, scale_high;
    Scales::load(scales, scale_low, scale_high);
    for (int m = 0; m < rows; ++m) low[m] += left[m] * scale_low, high[m] += right[m] * scale_high;
  }
  for (int m = 0; m < rows; ++m) columns.store(first + m, low[m], high[m]);
}

template <typename Scales, typename Table = Fp4Table>
inline void multiply_fp4(const float* x, const uint32_t* weights, const float* bias, float* out, int64_t num_rows,
                         int64_t size, int64_t width, int64_t group, int64_t stride, bool adds, int num_threads) {
  const int64_t words = Table::words + fp4_panel_words<Scales>(size, group);
  share_panels(width, words * 4, num_threads, [&](int64_t panel) {
    const int64_t n = panel * kPanel;
    const Columns columns{out + n, bias ? bias + n : nullptr, stride, std::min(kPanel, width - n), adds};
    in_portions<kRowsAtOnce>(num_rows, [&](auto rows, int64_t first) {
      multiply_fp4_panel<Scales, Table, rows.value>(x, weights + panel * words, size, group, first, columns);
    });
  });
}

constexpr uint8_t kNoFp4 = 0xff;

// The number of 4 bits that is equal to one of fp8, or kNoFp4.
constexpr uint8_t fp4_code(uint8_t number) {
  constexpr uint8_t kSizes[8] = {0x00, 0x30, 0x38, 0x3c, 0x40, 0x44, 0x48, 0x4c};  // of kFp4Numbers, as e4m3
  for (uint8_t code = 0; code < 8; ++code)
    if ((number & 0x7f) == kSizes[code]) return static_cast<uint8_t>(code | (number & 0x80) >> 4);
  return kNoFp4;
}

// Whether all numbers of fp8 have an equal of 4 bits.
inline bool fits_fp4(const uint8_t* numbers, int64_t count, int num_threads) {
  bool fits[256];
  for (int number = 0; number < 256; ++number) fits[number] = fp4_code(static_cast<uint8_t>(number)) != kNoFp4;
  const int64_t some = 1 << 16;
  std::atomic<bool> all{true};
  Threads::of_process().share((count + some - 1) / some, num_threads, [&](int64_t task) {
    const int64_t end = std::min(count, (task + 1) * some);
    bool found = all;
    for (int64_t i = task * some; i < end && found; ++i) found = fits[numbers[i]];
    if (!found) all = false;
  });
  return all;
}

// Puts codes, code_of(column, k), and scales [width, groups] into panels of zeros, with a table of 16 numbers or none.
// Scales of bfloat16 must be exact.
template <typename Scales, typename CodeOf>
inline void pack_code_panels(const CodeOf& code_of, const float* scales, const float* table, int64_t width, int64_t size,
                             int64_t group, uint32_t* panels, int num_threads) {
  const int64_t start_words = table ? kLine : 0, num_groups = (size + group - 1) / group;
  const int64_t words = start_words + fp4_panel_words<Scales>(size, group);
  Threads::of_process().share((width + kPanel - 1) / kPanel, num_threads, [&](int64_t panel) {
    const int64_t first = panel * kPanel, count = std::min(kPanel, width - first);
    uint32_t* out = panels + panel * words;
    if (table) std::memcpy(out, table, kLine * sizeof *out);
    out += start_words;
    for (int64_t g = 0; g < num_groups; ++g) {
      const int64_t start = g * group, there = std::min(group, size - start);
      auto* bytes = reinterpret_cast<uint8_t*>(out + Scales::lines * kLine);
      for (int64_t n = 0; n < count; ++n) {
        const int shift = n < kLanes ? 0 : 4;
        for (int64_t k = 0; k < there; ++k)
          bytes[k * kLanes + n % kLanes] |= static_cast<uint8_t>(code_of(first + n, start + k) << shift);
        uint32_t scale;
        std::memcpy(&scale, scales + (first + n) * num_groups + g, sizeof scale);
        if constexpr (Scales::lines == 2)
          out[n] = scale;
        else
          out[n % kLanes] |= n < kLanes ? scale >> 16 : scale & 0xffff0000u;
      }
      out += Scales::lines * kLine + there * kFp4Words;
    }
  });
}

// The same for fp8 weights [width, size] that have equals of 4 bits.
template <typename Scales>
inline void pack_fp4(const uint8_t* weights, const float* scales, int64_t width, int64_t size, int64_t group,
                     uint32_t* panels, int num_threads) {
  uint8_t codes[256];
  for (int number = 0; number < 256; ++number) codes[number] = fp4_code(static_cast<uint8_t>(number)) & 15;
  const auto code_of = [&](int64_t n, int64_t k) { return codes[weights[n * size + k]]; };
  pack_code_panels<Scales>(code_of, scales, nullptr, width, size, group, panels, num_threads);
}

// The same for pairs of codes [width, size / 2], the first in the lower half of a byte.
template <typename Scales>
inline void pack_pairs(const uint8_t* pairs, const float* scales, const float* table, int64_t width, int64_t size,
                       int64_t group, uint32_t* panels, int num_threads) {
  const auto code_of = [&](int64_t n, int64_t k) { return pairs[(n * size + k) / 2] >> (k % 2 * 4) & 15; };
  pack_code_panels<Scales>(code_of, scales, table, width, size, group, panels, num_threads);
}

}  // namespace flambeau

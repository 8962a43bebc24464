// A test of the instructions that this library was compiled for: each product of small integers and of pairs against a
// plain loop. A processor without them ends the process, so another process calls it.
#pragma once
#include <vector>

#include "matrix.h"
#include "quantize.h"

namespace flambeau {

// A matrix [width, size] of this kind, whose weights are `weights` as the kernels see them.
struct TestMatrix {
  static constexpr int64_t size = 64, width = 40, group = 32, rows = 43;  // tiles and some more
  std::vector<uint32_t> panels = std::vector<uint32_t>(2 * size * kPanel);
  std::vector<float> weights = std::vector<float>(size * width), inputs = std::vector<float>(size * rows);

  TestMatrix() {  // multiples of 1/128 whose largest is 127/128 in every group: rounding to 8 bits is exact
    for (int64_t i = 0; i < size * width; ++i) weights[i] = static_cast<float>(i % group ? i * 37 % 255 - 127 : 127) / 128;
    for (int64_t i = 0; i < size * rows; ++i) inputs[i] = static_cast<float>(i % group ? i * 91 % 255 - 127 : -127) / 128;
  }

  Matrix matrix(Kind kind) const { return {kind, panels.data(), nullptr, size, width, group}; }

  // Whether all results are within a tolerance of those of plain loops with these weights.
  bool gives(Kind kind, const std::vector<float>& seen, float tolerance) const {
    std::vector<float> out(rows * width);
    matrix(kind).multiply(inputs.data(), out.data(), rows, false, 1);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t n = 0; n < width; ++n) {
        float expected = 0;
        for (int64_t k = 0; k < size; ++k) expected += inputs[m * size + k] * seen[n * size + k];
        if (!(std::fabs(out[m * width + n] - expected) <= tolerance)) return false;
      }
    return true;
  }

  // Whether panels of an integer kind, made of all its levels, give the results of plain loops.
  bool gives_levels(Kind kind) {
    std::vector<uint8_t> levels(size * width);
    std::vector<float> scales(size / group * width, 1.0f / 64), minimums(scales.size(), -0.25f), row(size);
    bool is_same = true;
    with_integers(kind, [&](auto bits, auto has_minimums) {
      const float lowest = has_minimums.value ? -0.25f : -static_cast<float>(1 << (bits.value - 1)) / 64;
      for (int64_t i = 0; i < size * width; ++i) levels[i] = static_cast<uint8_t>(i * 37 % (1 << bits.value));
      for (int64_t i = 0; i < size * width; ++i) weights[i] = static_cast<float>(levels[i]) / 64 + lowest;
      pack_integers<bits.value, has_minimums.value>(levels.data(), scales.data(), minimums.data(), width, size, group,
                                                    panels.data(), 1);
    });
    for (int64_t n = 0; n < width; ++n) {
      matrix(kind).read_row(n, row.data());
      is_same = is_same && std::equal(row.begin(), row.end(), weights.begin() + n * size);
    }
    return is_same && gives(kind, weights, 1e-3f);
  }
};

// 0, or the number of the part that fails.
inline int self_test() {
  TestMatrix test;
  quantize_rows<8>(test.weights.data(), test.width, test.size, test.group, test.panels.data(), 1);
  if (!test.gives(kInt8, test.weights, 1e-3f)) return 1;
  for (float& weight : test.weights) weight = std::floor((weight + 1) * 7.99f) / 16;  // sixteen levels
  for (int64_t i = 0; i < test.size * test.width; i += test.group) test.weights[i] = 0, test.weights[i + 1] = 15.0f / 16;
  quantize_rows<4>(test.weights.data(), test.width, test.size, test.group, test.panels.data(), 1);
  if (!test.gives(kInt4, test.weights, 1e-3f)) return 2;
  for (int64_t n = 0; n < test.width; ++n)
    for (int64_t k = 0; k < test.size; k += 2) {
      bfloat pair[2];
      narrow(test.weights[n * test.size + k], pair), narrow(test.weights[n * test.size + k + 1], pair + 1);
      uint32_t* line = &test.panels[n / kPanel * (test.size / 2 * kPanel) + k / 2 * kPanel];
      std::memcpy(line + n % kPanel, pair, sizeof pair);
    }
  if (!test.gives(kBfloat16Pairs, test.weights, 1e-3f)) return 3;
  for (const Kind kind : {kInt4Scaled, kInt5, kInt5Scaled, kInt6Scaled, kInt8Minimums})
    if (!test.gives_levels(kind)) return 4 + kind;
  std::vector<uint8_t> codes(test.size * test.width);  // every number of fp8 but NaN
  std::vector<float> scales(test.size / test.group * test.width, 0.0078125f);
  for (int64_t i = 0; i < test.size * test.width; ++i) {
    codes[i] = static_cast<uint8_t>(i % 127 | (i / 127 % 2) << 7);
    const int exponent = codes[i] >> 3 & 15, part = codes[i] & 7;
    const float size = exponent ? std::ldexp(8.0f + part, exponent - 10) : std::ldexp(1.0f * part, -9);
    test.weights[i] = (codes[i] & 0x80 ? -size : size) / 128;
  }
  std::fill(test.panels.begin(), test.panels.end(), 0);
  pack_fp8(codes.data(), scales.data(), test.width, test.size, test.group, test.panels.data(), 1);
  if (!test.gives(kFp8, test.weights, 1e-3f)) return 20;
  for (int64_t i = 0; i < test.size * test.width; ++i) {
    constexpr uint8_t kSizes[8] = {0x00, 0x30, 0x38, 0x3c, 0x40, 0x44, 0x48, 0x4c};
    codes[i] = static_cast<uint8_t>(kSizes[i % 7 + i / 64 % 2] | (i / 7 % 2) << 7);
    test.weights[i] = kFp4Numbers[fp4_code(codes[i])] / 128;
  }
  std::fill(test.panels.begin(), test.panels.end(), 0);
  pack_fp4<Bfloat16>(codes.data(), scales.data(), test.width, test.size, test.group, test.panels.data(), 1);
  if (!test.gives(kFp4, test.weights, 1e-3f)) return 21;
  float table[16];  // codes of any numbers
  for (int code = 0; code < 16; ++code) table[code] = (code - 6.5f) * (code - 6.5f) - 11;
  for (int64_t i = 0; i < test.size * test.width; ++i) {
    const int code = static_cast<int>((i * 7 + i / 64) % 16);
    codes[i / 2] = static_cast<uint8_t>(i % 2 ? codes[i / 2] | code << 4 : code);
    test.weights[i] = table[code] / 128;
  }
  std::fill(test.panels.begin(), test.panels.end(), 0);
  pack_pairs<Float32>(codes.data(), scales.data(), table, test.width, test.size, test.group, test.panels.data(), 1);
  return test.gives(kCodes, test.weights, 1e-3f) ? 0 : 22;
}

}  // namespace flambeau

// Matrix: the weights of a linear layer, of any kind.
#pragma once
#include "bfloat16_pairs.h"
#include "fp4_panels.h"
#include "fp8_panels.h"
#include "integer_panels.h"
#include "linear.h"

namespace flambeau {

// kPlain: float32 as in a checkpoint. int4 and int5 have minimums, int8 has none; the others say it.
// kFp4, kFp4Wide: with scales of bfloat16 and of float32. kCodes: codes of 4 bits with scales of float32.
enum Kind : int64_t {
  kPlain,
  kFloat32,
  kBfloat16,
  kFloat16,
  kInt8,
  kInt4,
  kBfloat16Pairs,
  kInt5,
  kInt4Scaled,
  kInt5Scaled,
  kInt6Scaled,
  kInt8Minimums,
  kFp8,
  kFp4,
  kFp4Wide,
  kCodes
};

// Calls use(bits, has_minimums), both as constants, for a kind of integers; false: it is another kind.
template <typename Use>
inline bool with_integers(int64_t kind, const Use& use) {
  using Yes = std::true_type;
  using No = std::false_type;
  switch (kind) {
    case kInt8: return use(std::integral_constant<int, 8>{}, No{}), true;
    case kInt8Minimums: return use(std::integral_constant<int, 8>{}, Yes{}), true;
    case kInt6Scaled: return use(std::integral_constant<int, 6>{}, No{}), true;
    case kInt5: return use(std::integral_constant<int, 5>{}, Yes{}), true;
    case kInt5Scaled: return use(std::integral_constant<int, 5>{}, No{}), true;
    case kInt4: return use(std::integral_constant<int, 4>{}, Yes{}), true;
    case kInt4Scaled: return use(std::integral_constant<int, 4>{}, No{}), true;
    default: return false;
  }
}

struct Matrix {  // [width, size]
  int64_t kind;
  const void* weights;
  const float* bias;  // or null
  int64_t size, width, group;
  const Matrix* next = nullptr;  // the outputs after these, of another kind; or null

  // Of this matrix and those after it.
  int64_t num_outputs() const {
    int64_t count = 0;
    for (const Matrix* part = this; part; part = part->next) count += part->width;
    return count;
  }

  FLAMBEAU_ONCE void multiply(const float* x, float* out, int64_t num_rows, bool adds, int num_threads) const {
    const int64_t stride = num_outputs();
    for (const Matrix* part = this; part; out += part->width, part = part->next)
      part->multiply_own(x, out, num_rows, stride, adds, num_threads);
  }

  // The weights of one output, of integers only.
  void read_row(int64_t row, float* out) const {
    with_integers(kind, [&](auto bits, auto has_minimums) {
      read_integer_column<bits.value, has_minimums.value>(static_cast<const uint32_t*>(weights), row, size, group, out);
    });
  }

 private:
  void multiply_own(const float* x, float* out, int64_t num_rows, int64_t stride, bool adds, int num_threads) const {
    const auto* words = static_cast<const uint32_t*>(weights);
    const auto with = [&](auto multiply_them) {
      multiply_them(x, words, bias, out, num_rows, size, width, stride, adds, num_threads);
    };
    const auto with_group = [&](auto multiply_them) {
      multiply_them(x, words, bias, out, num_rows, size, width, group, stride, adds, num_threads);
    };
    switch (kind) {
      case kFloat32: return with(multiply_floats<Float32>);
      case kBfloat16: return with(multiply_floats<Bfloat16>);
      case kFloat16: return with(multiply_floats<Float16>);
      case kBfloat16Pairs: return with(multiply_pairs);
      case kFp8: return with_group(multiply_fp8);
      case kFp4: return with_group(multiply_fp4<Bfloat16>);
      case kFp4Wide: return with_group(multiply_fp4<Float32>);
      case kCodes: return with_group(multiply_fp4<Float32, CodeTable>);
      case kPlain: {
        const auto* numbers = static_cast<const float*>(weights);
        flambeau::multiply(x, numbers, out, num_rows, size, width, stride, adds, num_threads);
        if (bias)
          for (int64_t m = 0; m < num_rows; ++m)
            for (int64_t n = 0; n < width; ++n) out[m * stride + n] += bias[n];
        return;
      }
      default:
        with_integers(kind, [&](auto bits, auto has_minimums) {
          multiply_integers<bits.value, has_minimums.value>(x, words, bias, out, num_rows, size, width, group, stride, adds,
                                                            num_threads);
        });
    }
  }
};

inline const char* instructions() {
#if defined(FLAMBEAU_TILES)
  if (may_use_tiles()) return "AVX-512 VNNI and AMX";
#endif
#if defined(__AVX512VNNI__)
  return "AVX-512 VNNI";
#elif defined(__AVX512BW__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return "NEON with usdot";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "NEON with sdot";
#elif defined(__aarch64__)
  return "NEON";
#else
  return "none";
#endif
}

}  // namespace flambeau

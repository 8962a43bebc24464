// Matrix: the weights of a linear layer, of any kind.
#pragma once
#include "bfloat16_pairs.h"
#include "fp4_panels.h"
#include "fp8_panels.h"
#include "integer_panels.h"
#include "linear.h"

namespace flambeau {

enum Kind : int64_t { kPlain, kFloat32, kBfloat16, kFloat16, kInt8, kInt4, kBfloat16Pairs, kFp8, kFp4, kFp4Wide };
// kPlain: float32 as in a checkpoint. kFp4, kFp4Wide: with scales of bfloat16 and of float32

struct Matrix {  // [width, size]
  int64_t kind;
  const void* weights;
  const float* bias;  // or null
  int64_t size, width, group;

  FLAMBEAU_ONCE void multiply(const float* x, float* out, int64_t num_rows, bool adds, int num_threads) const {
    const auto* words = static_cast<const uint32_t*>(weights);
    switch (kind) {
      case kFloat32: return multiply_floats<Float32>(x, words, bias, out, num_rows, size, width, adds, num_threads);
      case kBfloat16: return multiply_floats<Bfloat16>(x, words, bias, out, num_rows, size, width, adds, num_threads);
      case kFloat16: return multiply_floats<Float16>(x, words, bias, out, num_rows, size, width, adds, num_threads);
      case kInt8: return multiply_integers<8>(x, words, bias, out, num_rows, size, width, group, adds, num_threads);
      case kInt4: return multiply_integers<4>(x, words, bias, out, num_rows, size, width, group, adds, num_threads);
      case kBfloat16Pairs: return multiply_pairs(x, words, bias, out, num_rows, size, width, adds, num_threads);
      case kFp8: return multiply_fp8(x, words, bias, out, num_rows, size, width, group, adds, num_threads);
      case kFp4: return multiply_fp4<Bfloat16>(x, words, bias, out, num_rows, size, width, group, adds, num_threads);
      case kFp4Wide: return multiply_fp4<Float32>(x, words, bias, out, num_rows, size, width, group, adds, num_threads);
      default:
        flambeau::multiply(x, static_cast<const float*>(weights), out, num_rows, size, width, adds, num_threads);
        if (bias)
          for (int64_t m = 0; m < num_rows; ++m)
            for (int64_t n = 0; n < width; ++n) out[m * width + n] += bias[n];
    }
  }
};

inline const char* instructions() {
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

// The activations of feed-forward layers.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace flambeau {

enum Activation : int64_t { kSilu, kGeluTanh, kGelu, kRelu, kReluSquared, kXielu };

inline float silu(float x) { return x / (1.0f + exponential(-std::min(std::max(x, -87.0f), 87.0f))); }

inline float gelu_tanh(float x) {  // with tanh(y) = 1 - 2 / (exp(2 y) + 1)
  const float y = 0.7978845608f * (x + 0.044715f * x * x * x);
  return x * (1.0f - 1.0f / (1.0f + exponential(std::min(std::max(2.0f * y, -87.0f), 87.0f))));
}

// 1 - erf(y) is a polynomial times exp(-y * y), within 1.5e-7 (Abramowitz and Stegun, 7.1.26). A loop of it is vectors,
// unlike one of std::erf.
inline float gelu(float x) {
  const float y = std::fabs(x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * y);
  float series = 1.061405429f;
  for (float factor : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) series = series * t + factor;
  const float rest = 0.5f * series * t * exponential(-std::min(y * y, 87.0f));
  return x < 0 ? x * rest : x - x * rest;
}

// The activation of Apertus, whose parameters are those of a layer. For small numbers, expm1 is a series.
struct Xielu {
  float positive, negative, beta, epsilon;
};

inline float xielu(float x, const Xielu& of) {
  if (!(x <= 0)) return of.positive * x * x + of.beta * x;
  const float y = std::min(std::max(x, -87.0f), of.epsilon);
  const float below = y > -0.05f ? y * (1.0f + y * (0.5f + y * (0.16666667f + y * 0.041666668f))) : exponential(y) - 1.0f;
  return (below - x) * of.negative + of.beta * x;
}

// out[i] = activate(gate[i]), times up[i] unless that is null.
template <typename Activate>
inline void activate(const float* gate, const float* up, float* out, int64_t size, const Activate& function) {
  if (up) {
    for (int64_t i = 0; i < size; ++i) out[i] = function(gate[i]) * up[i];
  } else {
    for (int64_t i = 0; i < size; ++i) out[i] = function(gate[i]);
  }
}

inline void activate(int64_t kind, const float* gate, const float* up, float* out, int64_t size) {
  switch (kind) {
    case kSilu: return activate(gate, up, out, size, silu);
    case kGeluTanh: return activate(gate, up, out, size, gelu_tanh);
    case kGelu: return activate(gate, up, out, size, gelu);
    case kRelu: return activate(gate, up, out, size, [](float x) { return x < 0 ? 0 : x; });  // NaN stays
    default: return activate(gate, up, out, size, [](float x) { return x < 0 ? 0 : x * x; });
  }
}

}  // namespace flambeau

// The activations of feed-forward layers.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace flambeau {

enum Activation : int64_t { kSilu, kGeluTanh, kGelu, kRelu, kReluSquared };

inline float silu(float x) { return x / (1.0f + exponential(-std::min(std::max(x, -87.0f), 87.0f))); }

inline float gelu_tanh(float x) {  // with tanh(y) = 1 - 2 / (exp(2 y) + 1)
  const float y = 0.7978845608f * (x + 0.044715f * x * x * x);
  return x * (1.0f - 1.0f / (1.0f + exponential(std::min(std::max(2.0f * y, -87.0f), 87.0f))));
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
    case kGelu: return activate(gate, up, out, size, [](float x) { return 0.5f * x * (1 + std::erf(x * 0.70710678f)); });
    case kRelu: return activate(gate, up, out, size, [](float x) { return x < 0 ? 0 : x; });  // NaN stays
    default: return activate(gate, up, out, size, [](float x) { return x < 0 ? 0 : x * x; });
  }
}

}  // namespace flambeau

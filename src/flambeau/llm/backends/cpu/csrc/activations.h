// The activations of feed-forward layers.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace flambeau {

enum Activation : int64_t { kSilu, kGeluTanh, kGelu, kRelu, kReluSquared, kXielu };

// Each is a function of a number or of a vector of them.

template <typename X>
inline X silu(const X& x) {
  return x / (exponential(-at_most(at_least(x, -87.0f), 87.0f)) + 1.0f);
}

template <typename X>
inline X gelu_tanh(const X& x) {  // with tanh(y) = 1 - 2 / (exp(2 y) + 1)
  const X y = (x * x * x * 0.044715f + x) * 1.5957691216f;
  return x - x / (exponential(at_most(at_least(y, -87.0f), 87.0f)) + 1.0f);
}

// 1 - erf(y) is a polynomial times exp(-y * y), within 1.5e-7 (Abramowitz and Stegun, 7.1.26).
template <typename X>
inline X gelu(const X& x) {
  const X y = chosen(x < 0.0f, -x, x) * 0.70710678f, t = 1.0f / (y * 0.3275911f + 1.0f);
  X series = t * 1.061405429f - 1.453152027f;
  series = series * t + 1.421413741f;
  series = series * t - 0.284496736f;
  series = series * t + 0.254829592f;
  const X rest = x * (series * t * exponential(-at_most(y * y, 87.0f)) * 0.5f);
  return chosen(x < 0.0f, rest, x - rest);
}

// The activation of Apertus, whose parameters are those of a layer. For small numbers, expm1 is a series.
struct Xielu {
  float positive, negative, beta, epsilon;
};

template <typename X>
inline X xielu(const X& x, const Xielu& of) {
  const X y = at_most(at_least(x, -87.0f), of.epsilon);
  const X series = y * (y * (y * (y * 0.041666668f + 0.16666667f) + 0.5f) + 1.0f);
  const X below = chosen(y > -0.05f, series, exponential(y) - 1.0f);
  return chosen(x > 0.0f, x * x * of.positive, (below - x) * of.negative) + x * of.beta;
}

// out[i] = function(gate[i]), times up[i] unless that is null.
template <typename Activate>
inline void activate(const float* gate, const float* up, float* out, int64_t size, const Activate& function) {
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats y = function(load(gate + i));
    write(up ? y * load(up + i) : y, out + i);
  }
  for (int64_t i = whole; i < size; ++i) out[i] = up ? function(gate[i]) * up[i] : function(gate[i]);
}

inline void activate(int64_t kind, const float* gate, const float* up, float* out, int64_t size) {
  switch (kind) {
    case kSilu: return activate(gate, up, out, size, [](const auto& x) { return silu(x); });
    case kGeluTanh: return activate(gate, up, out, size, [](const auto& x) { return gelu_tanh(x); });
    case kGelu: return activate(gate, up, out, size, [](const auto& x) { return gelu(x); });
    case kRelu: return activate(gate, up, out, size, [](const auto& x) { return at_least(x, 0.0f); });
    default: return activate(gate, up, out, size, [](const auto& x) { return at_least(x, 0.0f) * x; });
  }
}

// The same where activated gates and what they gate are within a limit; 0: there is none. The output is another buffer.
inline void activate_within(float limit, int64_t kind, const float* gate, const float* up, float* out, int64_t size) {
  if (limit == 0 || !up) return activate(kind, gate, up, out, size);
  activate(kind, gate, nullptr, out, size);
  for (int64_t i = 0; i < size; ++i)
    out[i] = std::min(out[i], limit) * std::min(std::max(up[i], -limit), limit);
}

}  // namespace flambeau

// Norms: RMS norms and layer norms of a row of numbers.
//
// A row is summed in the same order whatever other rows there are: it gets the same bits in any batch.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace flambeau {

// The sum of function(x[i]).
template <typename Function>
inline float sum_of(const float* x, int64_t size, const Function& function) {
  float lanes[kLanes] = {}, total = 0;
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += function(x[i + lane]);
  for (int lane = 0; lane < kLanes; ++lane) total += lanes[lane];
  for (int64_t i = whole; i < size; ++i) total += function(x[i]);
  return total;
}

struct Norm {
  const float *weight, *bias;  // no weight: there is no norm; no bias: an RMS norm, else a layer norm

  explicit operator bool() const { return weight != nullptr; }

  // Of the numbers from `at` on, if the weights are those of several rows. The output may be the input.
  void apply(const float* x, float* out, int64_t size, float epsilon, int64_t at = 0) const {
    const float count = static_cast<float>(size), *factors = weight + at;
    if (!bias) {
      const float mean_square = sum_of(x, size, [](float number) { return number * number; }) / count;
      const float factor = 1.0f / std::sqrt(mean_square + epsilon);
      for (int64_t i = 0; i < size; ++i) out[i] = x[i] * factor * factors[i];
      return;
    }
    const float mean = sum_of(x, size, [](float number) { return number; }) / count;
    const float variance = sum_of(x, size, [&](float number) { return (number - mean) * (number - mean); }) / count;
    const float factor = 1.0f / std::sqrt(variance + epsilon);
    for (int64_t i = 0; i < size; ++i) out[i] = (x[i] - mean) * factor * factors[i] + bias[at + i];
  }
};

}  // namespace flambeau

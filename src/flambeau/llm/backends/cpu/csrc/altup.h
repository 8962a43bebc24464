// AltUp: layers read and change several streams of hidden states, of which they compute one (Gemma 3n).
//
// Shapes: S streams, E hidden, R rank.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "matrix.h"
#include "norms.h"

namespace flambeau {

struct AltUp {
  Matrix router;                     // [S, E]
  Matrix prediction, correction;     // [S * S, S], [S, S]
  Norm router_norm;                  // [E]
  const float* output_scale;         // [E], before the layer's own embeddings are added, or null
  Matrix laurel_left, laurel_right;  // [R, E], [E, R]: a residual connection of low rank
  Norm laurel_norm;                  // [E]
};

// What the streams of a token [S, E] are after a layer, by factors [S, S].
inline void predict_streams(float* streams, const float* factors, int64_t count, int64_t size) {
  const std::vector<float> before(streams, streams + count * size);
  for (int64_t s = 0; s < count; ++s)
    for (int64_t j = 0; j < count; ++j) {
      const float factor = factors[s * count + j];
      for (int64_t i = 0; i < size; ++i) streams[s * size + i] += factor * before[j * size + i];
    }
}

// The factor that gives x the mean square of another row.
inline float factor_to_size_of(const float* like, const float* x, int64_t size) {
  const auto mean_square = [&](const float* row) {
    return sum_of(row, size, [](float number) { return number * number; }) / static_cast<float>(size);
  };
  return std::sqrt(mean_square(like) / std::max(mean_square(x), 1e-5f));
}

// How far gates lie above a threshold, which is so many deviations from their mean.
inline void cut_gates(float* gates, int64_t size, float threshold) {
  const float count = static_cast<float>(size);
  const float mean = sum_of(gates, size, [](float x) { return x; }) / count;
  const float variance = sum_of(gates, size, [&](float x) { return (x - mean) * (x - mean); }) / count;
  const float least = mean + std::sqrt(variance) * threshold;
  for (int64_t i = 0; i < size; ++i) gates[i] = gates[i] - least < 0 ? 0 : gates[i] - least;  // NaN stays
}

}  // namespace flambeau

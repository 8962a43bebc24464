// The rows of a cache: a head, a latent or a key of an indexer, of any size.
//
// A cache of bytes has after the D numbers of a row their scale, a float: D + 4 bytes.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace flambeau {

// What a row takes in the cache, in numbers of its type.
template <typename stored>
constexpr int64_t room_of_head(int64_t size) {
  return std::is_same_v<stored, byte> ? size + static_cast<int64_t>(sizeof(float)) : size;
}

// The factor of a row's numbers.
template <typename stored>
inline float scale_of_row(const stored* row, int64_t size) {
  if constexpr (!std::is_same_v<stored, byte>) {
    return 1.0f;
  } else {
    float scale;
    std::memcpy(&scale, row + size, sizeof scale);
    return scale;
  }
}

// Numbers in float32.
template <typename stored>
inline void widen(const stored* from, float* to, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) write(load(from + i), to + i);
  stored rest[kLanes] = {};
  if (i == size) return;
  std::copy(from + i, from + size, rest);
  float wide[kLanes];
  write(load(rest), wide);
  std::copy_n(wide, size - i, to + i);
}

template <typename stored>
inline void read_row(const stored* from, int64_t size, float* to) {
  widen(from, to, size);
  if constexpr (std::is_same_v<stored, byte>) {
    const float scale = scale_of_row(from, size);
    for (int64_t i = 0; i < size; ++i) to[i] *= scale;
  }
}

template <typename stored>
inline void write_row(const float* from, int64_t size, stored* to) {
  if constexpr (!std::is_same_v<stored, byte>) {
    narrow(from, size, to);
  } else {
    float scale;
    if (size % kLanes == 0) {
      scale = quantize_bytes(from, size, reinterpret_cast<int8_t*>(to)).scale;
    } else {  // whole vectors are quantized
      static thread_local std::vector<float> padded;
      static thread_local std::vector<int8_t> bytes;
      padded.assign((size + kLanes - 1) / kLanes * kLanes, 0.0f), bytes.resize(padded.size());
      std::copy_n(from, size, padded.data());
      scale = quantize_bytes(padded.data(), padded.size(), bytes.data()).scale;
      std::memcpy(to, bytes.data(), size);
    }
    std::memcpy(to + size, &scale, sizeof scale);
  }
}

}  // namespace flambeau

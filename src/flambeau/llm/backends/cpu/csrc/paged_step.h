// One step of attention over the blocks of a KV cache: what is read and written, and scores that become weights.
//
// Shapes: T tokens of the step, S sequences, P blocks, K tokens of a block, H heads, G key-value heads, D head size.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cached_rows.h"
#include "vectors.h"

namespace flambeau {

// `stored` is the type of the cache; all sums are in float32.
template <typename stored>
struct PagedStep {
  const float *q, *k, *v;   // [T, H, D], [T, G, D] twice, or null: they are in the cache
  stored *keys, *values;    // [P, K, G, D]
  float* out;               // [T, H, D]
  // From one token to the next; the heads of a token are contiguous.
  int64_t q_stride, k_stride, v_stride;
  const int64_t *positions, *slots, *starts, *tables;  // [T], [T], [S + 1], [S, table_width]
  int64_t num_tokens, num_sequences, heads, kv_heads, block_size, table_width, window;
  float scale, softcap;  // a softcap of 0: none
  const float* sinks = nullptr;   // [H]: scores that take part in the softmax and have no value, or null
  const float* biases = nullptr;  // [H, num_places]: added to scores, or null
  int64_t num_places = 0;
  int64_t chunk = 0;  // tokens attend to those of their own chunk only, so many at a time; 0: to all

  template <typename other>
  PagedStep<other> with() const {
    return {q, k, v, static_cast<other*>(keys), static_cast<other*>(values), out, q_stride, k_stride, v_stride, positions,
            slots, starts, tables, num_tokens, num_sequences, heads, kv_heads, block_size, table_width, window, scale,
            softcap, sinks, biases, num_places, chunk};
  }

  int64_t first_seen(int64_t place) const {
    const int64_t first = window > 0 ? std::max<int64_t>(0, place + 1 - window) : 0;
    return chunk > 0 ? std::max(first, place - place % chunk) : first;
  }
};

// The factor of a head's numbers in the cache.
template <int64_t size, typename stored>
inline float scale_of(const stored* head) {
  return scale_of_row(head, size);
}

// Writes the heads of a token to the cache.
template <typename stored>
inline void write_heads(const float* from, int64_t heads, int64_t size, stored* to) {
  if constexpr (std::is_same_v<stored, byte>) {
    for (int64_t h = 0; h < heads; ++h, from += size, to += room_of_head<stored>(size)) write_row(from, size, to);
  } else {
    narrow(from, heads * size, to);
  }
}

// Turns scores into weights that sum to one, with that of the sink if there is one. Nothing beyond them is read.
FLAMBEAU_ONCE inline void softmax(float* scores, int64_t length, const float* sink) {
  alignas(64) float rest[kLanes];
  const int64_t whole = length / kLanes * kLanes, more = length - whole;
  Floats high = Floats{} + scores[0];
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats x = load(scores + i);
    high = larger(x, high);
  }
  float highest = largest(high);
  for (int64_t i = whole; i < length; ++i) highest = std::max(highest, scores[i]);
  if (sink) highest = std::max(highest, *sink);
  for (int64_t i = 0; i < kLanes; ++i) rest[i] = i < more ? scores[whole + i] : highest;
  Floats total{};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats weights = exponential(at_least(load(scores + i) - highest, -87.0f));
    write(weights, scores + i);
    total += weights;
  }
  write(exponential(at_least(load(rest) - highest, -87.0f)), rest);
  for (int64_t i = more; i < kLanes; ++i) rest[i] = 0;
  total += load(rest);
  const float share = 1.0f / (sum(total) + (sink ? exponential(std::max(*sink - highest, -87.0f)) : 0.0f));
  for (int64_t i = 0; i < whole; ++i) scores[i] *= share;
  for (int64_t i = 0; i < more; ++i) scores[whole + i] = rest[i] * share;
}

// Turns the scores of a head for the places from `begin` on into weights.
template <typename stored>
inline void weigh(const PagedStep<stored>& step, int64_t head, int64_t begin, float* scores, int64_t length) {
  if (step.softcap > 0)
    for (int64_t i = 0; i < length; ++i) scores[i] = step.softcap * std::tanh(scores[i] / step.softcap);
  if (step.biases) {
    const float* biases = step.biases + head * step.num_places + begin;
    for (int64_t i = 0; i < length; ++i) scores[i] += biases[i];
  }
  softmax(scores, length, step.sinks ? step.sinks + head : nullptr);
}

}  // namespace flambeau

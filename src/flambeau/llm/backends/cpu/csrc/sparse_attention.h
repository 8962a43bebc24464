// Sparse attention: an indexer, a few small heads with one key for all of them, scores the cached tokens; attention is to
// those with the best scores only.
//
// Scores of a place do not depend on other tokens of a step: a sequence has the same choice in any batch.
//
// Shapes: T tokens of the step, S sequences, I heads of the indexer, K size of one, C cached tokens.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "matrix.h"
#include "norms.h"
#include "paged_attention.h"
#include "threads.h"
#include "vectors.h"

namespace flambeau {

struct Indexer {
  Matrix query_up;  // [I * K, latent of queries]
  Matrix key;       // [K, hidden]
  Matrix weights;   // [I, hidden]: of the heads
  Norm key_norm;    // [K]
  void* keys;       // the cache [blocks, block_size, K], with a scale in a cache of bytes
  int64_t heads, size, num_chosen;
  int64_t is_paired;  // the two coordinates of a rotation lie side by side
  float epsilon;      // of the norm
};

template <typename stored>
struct IndexStep {
  const float *q, *weights;  // [T, I, K], [T, I]
  const stored* keys;
  const int64_t *positions, *starts, *tables;  // [T], [S + 1], [S, table_width]
  int64_t num_tokens, num_sequences, table_width, block_size, heads, size, num_chosen;
};

// Some heads and sixteen places, whose keys are transposed [K, 16]: each head adds its product, if that is positive.
template <int rows>
FLAMBEAU_ONCE Floats score_of_heads(const float* q, int64_t size, const float* keys, const float* weights) {
  Floats sums[rows] = {}, total{};
  for (int64_t d = 0; d < size; ++d) {
    const Floats key = load(keys + d * kLanes);
    for (int m = 0; m < rows; ++m) sums[m] += q[m * size + d] * key;
  }
  for (int m = 0; m < rows; ++m) total += chosen(sums[m] < 0.0f, Floats{}, sums[m]) * weights[m];  // NaN stays
  return total;
}

// The scores of places for some tokens of a sequence; each has `room` of them.
template <typename stored>
void score_keys(const IndexStep<stored>& step, int64_t first, int64_t last, const int64_t* table, int64_t begin,
                int64_t end, float* scores, int64_t room) {
  static thread_local std::vector<float> row, keys;
  const int64_t size = step.size, stride = room_of_head<stored>(size);
  row.resize(size), keys.resize(size * kLanes);
  for (int64_t place = begin; place < end; place += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t at = std::min(place + i, end - 1);
      read_row(step.keys + (table[at / step.block_size] * step.block_size + at % step.block_size) * stride, size, row.data());
      for (int64_t d = 0; d < size; ++d) keys[d * kLanes + i] = row[d];
    }
    for (int64_t t = first; t < last; ++t) {
      Floats total{};
      in_portions<kRowsAtOnce>(step.heads, [&](auto some, int64_t h) {
        const int64_t head = t * step.heads + h;
        total += score_of_heads<some.value>(step.q + head * size, size, keys.data(), step.weights + head);
      });
      write(total, scores + (t - first) * room + place);
    }
  }
}

// The order of floats as integers; NaN is the largest, and zeros are equal.
inline uint32_t order_of(float x) {
  const float number = x + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  if (number != number) return 0xffffffff;
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// So many places with the largest scores, in order; of equal ones, the first.
inline void choose_places(const float* scores, int64_t length, int64_t count, int32_t* places) {
  static thread_local std::vector<uint32_t> order, sorted;
  order.resize(length);
  for (int64_t i = 0; i < length; ++i) order[i] = order_of(scores[i]);
  sorted = order;
  std::nth_element(sorted.begin(), sorted.begin() + count - 1, sorted.end(), std::greater<uint32_t>());
  const uint32_t least = sorted[count - 1];
  int64_t equal = count - std::count_if(sorted.begin(), sorted.begin() + count, [&](uint32_t each) { return each > least; });
  for (int64_t i = 0; i < length; ++i)
    if (order[i] > least || (order[i] == least && equal-- > 0)) *places++ = static_cast<int32_t>(i);
}

constexpr int64_t kIndexTokens = 8, kIndexPlaces = 1024;  // of one task
constexpr int64_t kIndexScores = 1 << 22;                 // at a time, of all tokens

// The places [T, num_chosen] of the tokens that have more before them; those of other tokens are not written.
template <typename stored>
void choose_places(const IndexStep<stored>& step, int32_t* places, int num_threads) {
  static thread_local std::vector<float> space;
  struct Task {
    const int64_t* table;
    int64_t first, last, begin, end;
  };
  const int64_t longest = *std::max_element(step.positions, step.positions + step.num_tokens) + 1;
  if (longest <= step.num_chosen) return;
  const int64_t room = (longest + kLanes) / kLanes * kLanes, at_once = std::max<int64_t>(1, kIndexScores / room);
  if (static_cast<int64_t>(space.size()) < std::min(at_once, step.num_tokens) * room)
    space.resize(std::min(at_once, step.num_tokens) * room);
  float* scores = space.data();
  for (int64_t from = 0; from < step.num_tokens; from += at_once) {
    const int64_t to = std::min(step.num_tokens, from + at_once);
    std::vector<Task> tasks;
    for (int64_t s = 0; s < step.num_sequences; ++s)
      for (int64_t t = std::max(from, step.starts[s]), stop = std::min(to, step.starts[s + 1]); t < stop;) {
        const int64_t last = std::min(stop, t + kIndexTokens);
        const int64_t end = *std::max_element(step.positions + t, step.positions + last) + 1;
        for (int64_t begin = 0; end > step.num_chosen && begin < end; begin += kIndexPlaces)
          tasks.push_back({step.tables + s * step.table_width, t, last, begin, std::min(end, begin + kIndexPlaces)});
        t = last;
      }
    Threads::of_process().share(tasks.size(), num_threads, [&](int64_t number) {
      const Task& task = tasks[number];
      score_keys(step, task.first, task.last, task.table, task.begin, task.end, scores + (task.first - from) * room, room);
    });
    Threads::of_process().share(to - from, num_threads, [&](int64_t i) {
      const int64_t t = from + i, length = step.positions[t] + 1;
      if (length > step.num_chosen)
        choose_places(scores + i * room, length, step.num_chosen, places + t * step.num_chosen);
    });
  }
}

}  // namespace flambeau

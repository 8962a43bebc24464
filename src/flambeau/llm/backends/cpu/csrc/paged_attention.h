// Attention over the blocks of a KV cache; the keys and values of the step are written first.
//
// A token attends to one contiguous range of places (causal, perhaps with a window), so nothing is masked: places
// outside the range are never read. Sums run over places in order: a sequence gets the same bits in any batch.
//
// Shapes: T tokens of the step, S sequences, P blocks, K tokens of a block, H heads, G key-value heads, D head size.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "matrix.h"
#include "threads.h"
#include "vectors.h"

namespace flambeau {

constexpr int64_t kTokensPerTask = 16;  // of one sequence
constexpr int64_t kBlocksAhead = 2, kLineBytes = 64;

// `stored` is the type of the cache; all sums are in float32.
template <typename stored>
struct PagedStep {
  const float *q, *k, *v;   // [T, H, D], [T, G, D] twice
  stored *keys, *values;    // [P, K, G, D]
  float* out;               // [T, H, D]
  // From one token to the next; the heads of a token are contiguous.
  int64_t q_stride, k_stride, v_stride;
  const int64_t *positions, *slots, *starts, *tables;  // [T], [T], [S + 1], [S, table_width]
  int64_t num_tokens, num_sequences, heads, kv_heads, block_size, table_width, window;
  float scale, softcap;  // a softcap of 0: none

  template <typename other>
  PagedStep<other> with() const {
    return {q, k, v, static_cast<other*>(keys), static_cast<other*>(values), out, q_stride, k_stride, v_stride, positions,
            slots, starts, tables, num_tokens, num_sequences, heads, kv_heads, block_size, table_width, window, scale,
            softcap};
  }

  int64_t first_seen(int64_t place) const { return window > 0 ? std::max<int64_t>(0, place + 1 - window) : 0; }
};

// Turns scores into weights that sum to one. The buffer holds a whole number of vectors; the rest is filled.
inline void softmax(float* scores, int64_t length) {
  const int64_t room = (length + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = length; i < room; ++i) scores[i] = scores[0];
  Floats high = load(scores);
  for (int64_t i = kLanes; i < room; i += kLanes) {
    const Floats x = load(scores + i);
    high = x > high ? x : high;
  }
  float highest = high[0];
  for (int lane = 1; lane < kLanes; ++lane) highest = std::max(highest, high[lane]);
  for (int64_t i = 0; i < room; ++i) scores[i] = exponential(std::max(scores[i] - highest, -87.0f));
  std::fill(scores + length, scores + room, 0.0f);
  Floats total = load(scores);
  for (int64_t i = kLanes; i < room; i += kLanes) total += load(scores + i);
  const float share = 1.0f / sum(total);
  for (int64_t i = 0; i < length; ++i) scores[i] *= share;
}

// Prefetches the rows of a block: blocks are scattered, so the hardware cannot predict the next one.
template <int64_t size, typename stored>
inline void prefetch(const stored* cache, int64_t block, int64_t block_size, int64_t stride) {
  const stored* row = cache + block * block_size * stride;
  for (int64_t i = 0; i < block_size; ++i, row += stride)
    for (size_t at = 0; at < size * sizeof(stored); at += kLineBytes)
      __builtin_prefetch(reinterpret_cast<const char*>(row) + at);
}

// Calls visit(place, rows, count) for each run of places from begin to end whose rows are contiguous.
template <int64_t size, typename stored, typename Visit>
inline void for_each_run(const stored* cache, const int64_t* table, int64_t block_size, int64_t stride,
                         int64_t begin, int64_t end, const Visit& visit) {
  const int64_t last = (end - 1) / block_size;
  for (int64_t place = begin; place < end;) {
    const int64_t number = place / block_size, offset = place % block_size;
    const int64_t stop = std::min(end, place - offset + block_size);
    if (number + kBlocksAhead <= last) prefetch<size>(cache, table[number + kBlocksAhead], block_size, stride);
    visit(place, cache + (table[number] * block_size + offset) * stride, stop - place);
    place = stop;
  }
}

template <int parts, typename stored>
inline Floats product_of(const Floats* query, const stored* key) {
  Floats product = query[0] * load(key);
  for (int i = 1; i < parts; ++i) product += query[i] * load(key + i * kLanes);
  return product;
}

// One token and some heads that share keys and values, which are loaded once for all; parts = D / kLanes. Each head
// has `room` scores.
template <int parts, int heads, typename stored>
void attend_heads(const PagedStep<stored>& step, const float* q, float* out, const int64_t* table, int64_t kv_head,
                  int64_t place, float* scores, int64_t room) {
  constexpr int64_t size = parts * kLanes;
  const int64_t stride = step.kv_heads * size, begin = step.first_seen(place), end = place + 1;
  Floats query[heads][parts], total[heads][parts] = {};
  for (int h = 0; h < heads; ++h)
    for (int i = 0; i < parts; ++i) query[h][i] = load(q + h * size + i * kLanes) * step.scale;
  for_each_run<size>(step.keys + kv_head * size, table, step.block_size, stride, begin, end,
       [&](int64_t at, const stored* key, int64_t count) {
         float* score = scores + at - begin;
         for (; count >= 4; count -= 4, score += 4, key += 4 * stride)
           for (int h = 0; h < heads; ++h) {
             Floats products[4];
             for (int i = 0; i < 4; ++i) products[i] = product_of<parts>(query[h], key + i * stride);
             const Quarter four = sums_of(products);
             std::memcpy(score + h * room, &four, sizeof four);
           }
         for (; count > 0; --count, ++score, key += stride)
           for (int h = 0; h < heads; ++h) score[h * room] = sum(product_of<parts>(query[h], key));
       });
  if (step.softcap > 0)
    for (int64_t i = 0; i < heads * room; ++i) scores[i] = step.softcap * std::tanh(scores[i] / step.softcap);
  for (int h = 0; h < heads; ++h) softmax(scores + h * room, end - begin);
  for_each_run<size>(step.values + kv_head * size, table, step.block_size, stride, begin, end,
       [&](int64_t at, const stored* value, int64_t count) {
         const float* weight = scores + at - begin;
         for (; count > 0; --count, value += stride, ++weight)
           for (int i = 0; i < parts; ++i) {
             const Floats part = load(value + i * kLanes);
             for (int h = 0; h < heads; ++h) total[h][i] += weight[h * room] * part;
           }
       });
  for (int h = 0; h < heads; ++h)
    for (int i = 0; i < parts; ++i) std::memcpy(out + h * size + i * kLanes, &total[h][i], sizeof total[h][i]);
}

// All heads of a group, as many at a time as fit into registers.
template <int parts, typename stored>
void attend_group(const PagedStep<stored>& step, int64_t t, const int64_t* table, int64_t kv_head) {
  constexpr int64_t size = parts * kLanes, most = std::clamp(8 / parts, 1, 4);
  static thread_local std::vector<float> scores;
  const int64_t group = step.heads / step.kv_heads, place = step.positions[t];
  const int64_t room = (place + 1 + kLanes) / kLanes * kLanes;
  scores.resize(most * room);
  int64_t head = kv_head * group;
  const auto attend = [&](auto heads) {
    attend_heads<parts, heads.value>(step, step.q + t * step.q_stride + head * size,
                                     step.out + (t * step.heads + head) * size, table, kv_head, place, scores.data(),
                                     room);
    head += heads.value;
  };
  while (head + most <= (kv_head + 1) * group) attend(std::integral_constant<int, most>{});
  while (head < (kv_head + 1) * group) attend(std::integral_constant<int, 1>{});
}

template <int parts, typename stored>
void attend_paged(const PagedStep<stored>& step, int num_threads) {
  constexpr int64_t size = parts * kLanes;
  const int64_t row = step.kv_heads * size;
  struct Task {
    int64_t sequence, first, last;
  };
  std::vector<Task> tasks;
  for (int64_t s = 0; s < step.num_sequences; ++s)
    for (int64_t t = step.starts[s]; t < step.starts[s + 1]; t += kTokensPerTask)
      tasks.push_back({s, t, std::min(t + kTokensPerTask, step.starts[s + 1])});
  for (int64_t t = 0; t < step.num_tokens; ++t) {
    for (int64_t i = 0; i < row; ++i) narrow(step.k[t * step.k_stride + i], step.keys + step.slots[t] * row + i);
    for (int64_t i = 0; i < row; ++i) narrow(step.v[t * step.v_stride + i], step.values + step.slots[t] * row + i);
  }
  // The heads of a place are adjacent in memory: one thread reads them all, unless there are too few tasks.
  const int64_t count = tasks.size(), splits = count < 4 * num_threads ? step.kv_heads : 1;
  Threads::of_process().share(count * splits, num_threads, [&](int64_t number) {
    const Task& task = tasks[number / splits];
    const int64_t* table = step.tables + task.sequence * step.table_width;
    for (int64_t head = number % splits; head < step.kv_heads; head += splits)
      for (int64_t t = task.first; t < task.last; ++t) attend_group<parts>(step, t, table, head);
  });
}

// Runs the kernel for this head size; false if there is none.
template <typename stored>
bool attend_paged(const PagedStep<stored>& step, int64_t head_size, int num_threads) {
  switch (head_size) {
    case 16: return attend_paged<1>(step, num_threads), true;
    case 32: return attend_paged<2>(step, num_threads), true;
    case 64: return attend_paged<4>(step, num_threads), true;
    case 80: return attend_paged<5>(step, num_threads), true;
    case 96: return attend_paged<6>(step, num_threads), true;
    case 128: return attend_paged<8>(step, num_threads), true;
    case 256: return attend_paged<16>(step, num_threads), true;
    default: return false;
  }
}

// The same for a cache of any type.
inline bool attend_paged(const PagedStep<void>& step, int64_t kind, int64_t head_size, int num_threads) {
  switch (kind) {
    case kFloat32: return attend_paged(step.with<float>(), head_size, num_threads);
    case kBfloat16: return attend_paged(step.with<bfloat>(), head_size, num_threads);
    case kFloat16: return attend_paged(step.with<half>(), head_size, num_threads);
    default: return false;
  }
}

}  // namespace flambeau

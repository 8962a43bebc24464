// Attention over the blocks of a KV cache; the keys and values of the step are written first, if there are any.
//
// A token attends to one contiguous range of places (causal, perhaps with a window), so nothing is masked: places
// outside the range are never read. Sums run over places in order: a sequence gets the same bits in any batch.
//
// Shapes: T tokens of the step, S sequences, P blocks, K tokens of a block, H heads, G key-value heads, D head size.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention_tiles.h"
#include "cached_rows.h"
#include "matrix.h"
#include "paged_step.h"
#include "threads.h"
#include "vectors.h"

namespace flambeau {

constexpr int64_t kTokensPerTask = 16;  // of one sequence
constexpr int64_t kTokensOfTiles = 16;  // from so many tokens of a sequence on, queries are computed in tiles
constexpr int64_t kScoresOfTile = 1 << 16;
constexpr int64_t kBlocksAhead = 2, kLineBytes = 64;

// Prefetches the rows of a block: blocks are scattered, so the hardware cannot predict the next one.
template <int64_t size, typename stored>
inline void prefetch(const stored* cache, int64_t block, int64_t block_size, int64_t stride) {
  const stored* row = cache + block * block_size * stride;
  for (int64_t i = 0; i < block_size; ++i, row += stride)
    for (size_t at = 0; at < room_of_head<stored>(size) * sizeof(stored); at += kLineBytes)
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
void attend_heads(const PagedStep<stored>& step, int64_t t, int64_t head, const int64_t* table, int64_t kv_head,
                  int64_t place, float* scores, int64_t room) {
  constexpr int64_t size = parts * kLanes, room_in_cache = room_of_head<stored>(size);
  const float* q = step.q + t * step.q_stride + head * size;
  float* out = step.out + (t * step.heads + head) * size;
  constexpr bool is_scaled = std::is_same_v<stored, byte>;
  const int64_t stride = step.kv_heads * room_in_cache, begin = step.first_seen(place), end = place + 1;
  Floats query[heads][parts], total[heads][parts] = {};
  for (int h = 0; h < heads; ++h)
    for (int i = 0; i < parts; ++i) query[h][i] = load(q + h * size + i * kLanes) * step.scale;
  for_each_run<size>(step.keys + kv_head * room_in_cache, table, step.block_size, stride, begin, end,
       [&](int64_t at, const stored* key, int64_t count) {
         float* score = scores + at - begin;
         for (; count >= 4; count -= 4, score += 4, key += 4 * stride) {
           Quarter scales{};
           if constexpr (is_scaled)
             for (int i = 0; i < 4; ++i) scales[i] = scale_of<size>(key + i * stride);
           Floats products[heads][4] = {};
           for (int part = 0; part < parts; ++part)
             for (int i = 0; i < 4; ++i) {  // each number is loaded, and widened, once for all heads
               const Floats numbers = load(key + i * stride + part * kLanes);
               for (int h = 0; h < heads; ++h) products[h][i] += query[h][part] * numbers;
             }
           for (int h = 0; h < heads; ++h) {
             const Quarter four = is_scaled ? sums_of(products[h]) * scales : sums_of(products[h]);
             std::memcpy(score + h * room, &four, sizeof four);
           }
         }
         for (; count > 0; --count, ++score, key += stride)
           for (int h = 0; h < heads; ++h)
             score[h * room] = sum(product_of<parts>(query[h], key)) * scale_of<size>(key);
       });
  for (int h = 0; h < heads; ++h) weigh(step, head + h, begin, scores + h * room, end - begin);
  for_each_run<size>(step.values + kv_head * room_in_cache, table, step.block_size, stride, begin, end,
       [&](int64_t at, const stored* value, int64_t count) {
         const float* weight = scores + at - begin;
         for (; count > 0; --count, value += stride, ++weight)
           for (int i = 0; i < parts; ++i) {
             const Floats part = load(value + i * kLanes) * scale_of<size>(value);
             for (int h = 0; h < heads; ++h) total[h][i] += weight[h * room] * part;
           }
       });
  for (int h = 0; h < heads; ++h)
    for (int i = 0; i < parts; ++i) write(total[h][i], out + h * size + i * kLanes);
}

// All heads of a group, as many at a time as fit into registers.
template <int parts, typename stored>
void attend_group(const PagedStep<stored>& step, int64_t t, const int64_t* table, int64_t kv_head) {
  constexpr int64_t most = std::clamp((kRowsAtOnce == 8 ? 16 : 8) / parts, 1, 4);
  static thread_local std::vector<float> scores;
  const int64_t group = step.heads / step.kv_heads, place = step.positions[t];
  const int64_t room = (place + 1 + kLanes) / kLanes * kLanes;
  if (static_cast<int64_t>(scores.size()) < most * room) scores.resize(most * room);
  for (int64_t done = 0; done < group;) {
    const int64_t head = kv_head * group + done, count = std::min(most, group - done);
    const auto attend = [&](auto heads) {
      attend_heads<parts, heads.value>(step, t, head, table, kv_head, place, scores.data(), room);
    };
    if constexpr (most >= 4)
      if (count == 4) attend(std::integral_constant<int, 4>{});
    if constexpr (most >= 3)
      if (count == 3) attend(std::integral_constant<int, 3>{});
    if constexpr (most >= 2)
      if (count == 2) attend(std::integral_constant<int, 2>{});
    if (count == 1) attend(std::integral_constant<int, 1>{});
    done += count;
  }
}

// The scores of `rows` queries for sixteen keys, which are transposed [D, 16].
template <int parts, int rows>
FLAMBEAU_ONCE void score_tile(const float* const* queries, const float* keys, float* scores, int64_t room) {
  Floats sums[rows] = {};
  for (int64_t d = 0; d < parts * kLanes; ++d) {
    const Floats key = load(keys + d * kLanes);
    for (int m = 0; m < rows; ++m) sums[m] += queries[m][d] * key;
  }
  for (int m = 0; m < rows; ++m) write(sums[m], scores + m * room);
}

template <int parts, int rows, typename stored>
inline void add_values(const PagedStep<stored>& step, const int64_t* table, int64_t kv_head, int64_t begin, int64_t end,
                       const float* weights, int64_t room, float* const* outs) {
  constexpr int64_t size = parts * kLanes;
  const int64_t stride = step.kv_heads * room_of_head<stored>(size);
  Floats total[rows][parts] = {};
  for_each_run<size>(step.values + kv_head * room_of_head<stored>(size), table, step.block_size, stride, begin, end,
       [&](int64_t at, const stored* value, int64_t count) {
         const float* weight = weights + at - begin;
         for (; count > 0; --count, value += stride, ++weight)
           for (int i = 0; i < parts; ++i) {
             const Floats part = load(value + i * kLanes) * scale_of<size>(value);
             for (int m = 0; m < rows; ++m) total[m][i] += weight[m * room] * part;
           }
       });
  for (int m = 0; m < rows; ++m)
    for (int i = 0; i < parts; ++i) write(total[m][i], outs[m] + i * kLanes);
}

// All heads of a group for consecutive tokens of a sequence: keys are transposed once for all queries, so that scores
// need no sums over lanes. Places that a token does not see get a weight of zero.
template <int parts, typename stored>
void attend_tile(const PagedStep<stored>& step, int64_t first, int64_t last, const int64_t* table, int64_t kv_head) {
  constexpr int64_t size = parts * kLanes;
  constexpr int together = std::clamp((kRowsAtOnce == 8 ? 16 : 8) / parts, 1, 4);
  static thread_local std::vector<float> scores, queries;
  const int64_t group = step.heads / step.kv_heads, rows = (last - first) * group;
  const int64_t stride = step.kv_heads * room_of_head<stored>(size);
  const int64_t begin = step.first_seen(step.positions[first]), end = step.positions[last - 1] + 1;
  const int64_t room = (end - begin + kLanes) / kLanes * kLanes;
  if (static_cast<int64_t>(scores.size()) < rows * room) scores.resize(rows * room);
  if (static_cast<int64_t>(queries.size()) < rows * size) queries.resize(rows * size);
  std::vector<const float*> from(rows);
  std::vector<float*> to(rows);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t t = first + row / group, head = kv_head * group + row % group;
    const float* q = step.q + t * step.q_stride + head * size;
    for (int64_t d = 0; d < size; ++d) queries[row * size + d] = q[d] * step.scale;
    from[row] = queries.data() + row * size, to[row] = step.out + (t * step.heads + head) * size;
  }
  for (int64_t place = begin; place < end; place += kLanes) {
    alignas(64) float rows_of_keys[kLanes][size], keys[size * kLanes];
    const int64_t count = std::min<int64_t>(kLanes, end - place);
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t at = place + std::min(i, count - 1);
      const stored* key = step.keys + (table[at / step.block_size] * step.block_size + at % step.block_size) * stride +
                          kv_head * room_of_head<stored>(size);
      for (int part = 0; part < parts; ++part) {
        write(load(key + part * kLanes) * scale_of<size>(key), &rows_of_keys[i][part * kLanes]);
      }
    }
    for (int64_t d = 0; d < size; ++d)
      for (int64_t i = 0; i < kLanes; ++i) keys[d * kLanes + i] = rows_of_keys[i][d];
    in_portions<kRowsAtOnce>(rows, [&](auto some, int64_t row) {
      score_tile<parts, some.value>(&from[row], keys, &scores[row * room + place - begin], room);
    });
  }
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t place = step.positions[first + row / group], seen = step.first_seen(place) - begin;
    float* mine = &scores[row * room];
    std::fill(mine, mine + seen, 0.0f);
    weigh(step, kv_head * group + row % group, begin + seen, mine + seen, place + 1 - begin - seen);
    std::fill(mine + place + 1 - begin, mine + room, 0.0f);
  }
  in_portions<together>(rows, [&](auto some, int64_t row) {
    add_values<parts, some.value>(step, table, kv_head, begin, end, &scores[row * room], room, &to[row]);
  });
}

// The scores of `rows` queries of any size for sixteen keys, which are transposed [size, 16].
template <int rows>
FLAMBEAU_ONCE void score_sixteen(const float* queries, int64_t width, int64_t size, const float* keys, float* scores,
                                 int64_t room) {
  Floats sums[rows] = {};
  for (int64_t d = 0; d < size; ++d) {
    const Floats key = load(keys + d * kLanes);
    for (int m = 0; m < rows; ++m) sums[m] += queries[m * width + d] * key;
  }
  for (int m = 0; m < rows; ++m) write(sums[m], scores + m * room);
}

constexpr int64_t kTransposedRows = 8;  // for fewer queries, each product is summed over its lanes

// Heads of any size, of a group and some tokens of a sequence: keys and values are widened sixteen at a time, and read
// once for all of them. Places that a token does not see get a weight of zero.
template <typename stored>
void attend_rows(const PagedStep<stored>& step, int64_t size, int64_t first, int64_t last, const int64_t* table,
                 int64_t kv_head) {
  static thread_local std::vector<float> scores, queries, totals, numbers, transposed;
  const int64_t group = step.heads / step.kv_heads, rows = (last - first) * group;
  const int64_t width = (size + kLanes - 1) / kLanes * kLanes, each = room_of_head<stored>(size);
  const auto place_of = [&](int64_t row) { return step.positions[first + row / group]; };
  const auto head_of = [&](int64_t row) { return kv_head * group + row % group; };
  queries.assign(rows * width, 0.0f), totals.assign(rows * width, 0.0f), numbers.assign(kLanes * width, 0.0f);
  transposed.resize(size * kLanes);
  int64_t begin = step.first_seen(place_of(0)), end = 0;
  for (int64_t row = 0; row < rows; ++row) {
    begin = std::min(begin, step.first_seen(place_of(row))), end = std::max(end, place_of(row) + 1);
    const float* q = step.q + (first + row / group) * step.q_stride + head_of(row) * size;
    for (int64_t d = 0; d < size; ++d) queries[row * width + d] = q[d] * step.scale;
  }
  const int64_t room = (end - begin + kLanes) / kLanes * kLanes;
  if (static_cast<int64_t>(scores.size()) < rows * room) scores.resize(rows * room);
  const auto each_sixteen = [&](const stored* cache, const auto& visit) {
    for (int64_t place = begin; place < end; place += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, end - place);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t slot = table[(place + i) / step.block_size] * step.block_size + (place + i) % step.block_size;
        read_row(cache + (slot * step.kv_heads + kv_head) * each, size, &numbers[i * width]);
      }
      visit(place - begin, count);
    }
  };
  each_sixteen(step.keys, [&](int64_t at, int64_t count) {
    if (rows >= kTransposedRows) {
      for (int64_t d = 0; d < size; ++d)
        for (int64_t i = 0; i < kLanes; ++i) transposed[d * kLanes + i] = numbers[i * width + d];
      in_portions<kRowsAtOnce>(rows, [&](auto some, int64_t row) {
        score_sixteen<some.value>(&queries[row * width], width, size, transposed.data(), &scores[row * room + at], room);
      });
      return;
    }
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < count; ++i) {
        Floats product{};
        for (int64_t d = 0; d < width; d += kLanes) product += load(&queries[row * width + d]) * load(&numbers[i * width + d]);
        scores[row * room + at + i] = sum(product);
      }
  });
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t seen = step.first_seen(place_of(row)) - begin, stop = place_of(row) + 1 - begin;
    float* mine = &scores[row * room];
    std::fill(mine, mine + seen, 0.0f), std::fill(mine + stop, mine + room, 0.0f);
    weigh(step, head_of(row), begin + seen, mine + seen, stop - seen);
  }
  each_sixteen(step.values, [&](int64_t at, int64_t count) {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t d = 0; d < width; d += kLanes) {
        Floats total = load(&totals[row * width + d]);
        for (int64_t i = 0; i < count; ++i) total += load(&numbers[i * width + d]) * scores[row * room + at + i];
        write(total, &totals[row * width + d]);
      }
  });
  for (int64_t row = 0; row < rows; ++row)
    std::copy_n(&totals[row * width], size, step.out + ((first + row / group) * step.heads + head_of(row)) * size);
}

// Whether the tokens are at one place after the other; padding is not.
template <typename stored>
bool are_consecutive(const PagedStep<stored>& step, int64_t first, int64_t last) {
  for (int64_t t = first + 1; t < last; ++t)
    if (step.positions[t] != step.positions[t - 1] + 1) return false;
  return true;
}

// All heads of a group for consecutive tokens of a sequence.
template <int parts, typename stored>
void attend_tokens(const PagedStep<stored>& step, int64_t first, int64_t last, const int64_t* table, int64_t kv_head) {
#if defined(FLAMBEAU_TILES)
  constexpr bool has_numbers = std::is_same_v<stored, bfloat> || std::is_same_v<stored, byte>;
  if constexpr (has_numbers && parts % 2 == 0)
    if (may_use_tiles()) return TiledAttention<parts, stored>(step, first, last, table, kv_head).run();
#endif
  attend_tile<parts>(step, first, last, table, kv_head);
}

// Heads of so many vectors; 0: of any size.
template <int parts, typename stored>
void attend_paged(const PagedStep<stored>& step, int num_threads, int64_t size = parts * kLanes) {
  const int64_t row = step.kv_heads * room_of_head<stored>(size);
  struct Task {
    int64_t sequence, first, last;
    bool is_tile;
  };
  std::vector<Task> tasks;
  const int64_t group = step.heads / step.kv_heads;
  for (int64_t s = 0; s < step.num_sequences; ++s) {
    const int64_t stop = step.starts[s + 1];
    const bool is_tile =
        parts == 0 || (stop - step.starts[s] >= kTokensOfTiles && are_consecutive(step, step.starts[s], stop));
    for (int64_t t = step.starts[s]; t < stop;) {
      const int64_t most = std::max<int64_t>(1, kScoresOfTile / (group * (step.positions[t] + kTokensPerTask)));
      const int64_t count = is_tile ? std::min(kTokensPerTask, most) : kTokensPerTask;
      tasks.push_back({s, t, std::min(t + count, stop), is_tile});
      t += count;
    }
  }
  for (int64_t t = 0; step.k && t < step.num_tokens; ++t) {
    write_heads(step.k + t * step.k_stride, step.kv_heads, size, step.keys + step.slots[t] * row);
    write_heads(step.v + t * step.v_stride, step.kv_heads, size, step.values + step.slots[t] * row);
  }
  // The heads of a place are adjacent in memory: one thread reads them all, unless there are too few tasks.
  const int64_t count = tasks.size(), splits = count < 4 * num_threads ? step.kv_heads : 1;
  Threads::of_process().share(count * splits, num_threads, [&](int64_t number) {
    const Task& task = tasks[count - 1 - number / splits];  // the longest first
    const int64_t* table = step.tables + task.sequence * step.table_width;
    for (int64_t head = number % splits; head < step.kv_heads; head += splits)
      if constexpr (parts == 0)
        attend_rows(step, size, task.first, task.last, table, head);
      else if (task.is_tile)
        attend_tokens<parts>(step, task.first, task.last, table, head);
      else
        for (int64_t t = task.first; t < task.last; ++t) attend_group<parts>(step, t, table, head);
  });
}

// Runs the kernel for this head size.
template <typename stored>
void attend_paged(const PagedStep<stored>& step, int64_t head_size, int num_threads) {
  switch (head_size) {
    case 16: return attend_paged<1>(step, num_threads);
    case 32: return attend_paged<2>(step, num_threads);
    case 64: return attend_paged<4>(step, num_threads);
    case 80: return attend_paged<5>(step, num_threads);
    case 96: return attend_paged<6>(step, num_threads);
    case 128: return attend_paged<8>(step, num_threads);
    case 256: return attend_paged<16>(step, num_threads);
    case 512: return attend_paged<32>(step, num_threads);
    default: return attend_paged<0>(step, num_threads, head_size);
  }
}

// Each is compiled in a file of its own.
extern template void attend_paged(const PagedStep<float>&, int64_t, int);
extern template void attend_paged(const PagedStep<bfloat>&, int64_t, int);
extern template void attend_paged(const PagedStep<half>&, int64_t, int);
extern template void attend_paged(const PagedStep<byte>&, int64_t, int);

// The same for a cache of any type.
inline void attend_paged(const PagedStep<void>& step, int64_t kind, int64_t head_size, int num_threads) {
  switch (kind) {
    case kBfloat16: return attend_paged(step.with<bfloat>(), head_size, num_threads);
    case kFloat16: return attend_paged(step.with<half>(), head_size, num_threads);
    case kInt8: return attend_paged(step.with<byte>(), head_size, num_threads);
    default: return attend_paged(step.with<float>(), head_size, num_threads);
  }
}

}  // namespace flambeau

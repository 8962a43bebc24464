// Latent attention (MLA): all heads attend to one small vector of each token, its latent and a rotated key, which is
// all that the cache has. The weights that would make keys are applied to queries, those for values to the results.
//
// A token's sums run over places in order, each row of them alone: a sequence gets the same bits in any batch.
//
// Shapes: T tokens of the step, S sequences, H heads, R latent, P rotated part of a head, N the rest of it, V value of a
// head, D = R + P: a multiple of the lanes of a vector.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "matrix.h"
#include "norms.h"
#include "paged_attention.h"
#include "sparse_attention.h"
#include "threads.h"
#include "vectors.h"

namespace flambeau {

struct LatentAttention {
  Matrix query_down, query_up;  // no weights of query_down: queries have no latent of their own
  Matrix latent;                // [R + P, hidden]
  Norm query_norm, latent_norm;
  const Matrix *to_keys, *to_values;  // [H]: [R, N] and [V, R]
  int64_t latent_size, rotary_size, unrotated_size, value_size;
  int64_t is_paired;  // the two coordinates of a rotation lie side by side
  float epsilon;      // of both norms
  Matrix head_gate;   // [H, hidden], a gate for what each head gives, or there is none
  const Indexer* indexer = nullptr;  // or none
  int64_t num_chosen = 0;  // attention is to so many places at most, which the last indexer has chosen; 0: to all
};

// Rotates the coordinates of one head; those of the output are its two halves. Without angles, they stay as they are.
inline void rotate_head(const float* from, float* to, const float* cos, const float* sin, int64_t half, bool is_paired) {
  if (!cos) {
    std::copy_n(from, 2 * half, to);
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    const float first = is_paired ? from[2 * i] : from[i], second = is_paired ? from[2 * i + 1] : from[half + i];
    to[i] = first * cos[i] - second * sin[i];
    to[half + i] = second * cos[i] + first * sin[i];
  }
}

template <typename stored>
struct LatentStep {
  const float* q;  // [T, H, D], `q_stride` from one token to the next
  const float* k;  // [T, D]
  stored* cache;   // [blocks, block_size, D], with a scale in a cache of bytes
  float* out;      // [T, H, D], of which the first R are written
  int64_t q_stride;
  const int64_t *positions, *slots, *starts, *tables;
  int64_t num_tokens, num_sequences, heads, size, latent_size, block_size, table_width;
  float scale;
  const int32_t* places;  // [T, num_chosen]: what is attended to, in order, by tokens that have more before them; or null
  int64_t num_chosen;

  int64_t row() const { return room_of_head<stored>(size); }
};

// The scores of some heads for some rows, which are read once for all of them.
template <int heads, typename stored>
FLAMBEAU_ONCE void score_places(const LatentStep<stored>& step, const float* q, const stored* const* keys, int64_t count,
                                float* scores, int64_t room) {
  const int64_t size = step.size;
  int64_t at = 0;
  for (; at + 4 <= count; at += 4, keys += 4) {
    Floats products[heads][4] = {};
    for (int64_t d = 0; d < size; d += kLanes)
      for (int i = 0; i < 4; ++i) {
        const Floats key = load(keys[i] + d);
        for (int h = 0; h < heads; ++h) products[h][i] += load(q + h * size + d) * key;
      }
    for (int h = 0; h < heads; ++h) {
      const Quarter four = sums_of(products[h]);
      for (int i = 0; i < 4; ++i) scores[h * room + at + i] = four[i] * scale_of_row(keys[i], size) * step.scale;
    }
  }
  for (; at < count; ++at, ++keys)
    for (int h = 0; h < heads; ++h) {
      Floats product{};
      for (int64_t d = 0; d < size; d += kLanes) product += load(q + h * size + d) * load(*keys + d);
      scores[h * room + at] = sum(product) * scale_of_row(*keys, size) * step.scale;
    }
}

// Adds rows with their weights to some heads of the output, as many numbers as `parts` vectors have.
template <int heads, int parts, typename stored>
inline void add_places(const LatentStep<stored>& step, const stored* const* values, int64_t offset, int64_t count,
                       const float* weights, int64_t room, float* out) {
  const int64_t size = step.size;
  Floats total[heads][parts];
  for (int h = 0; h < heads; ++h)
    for (int i = 0; i < parts; ++i) total[h][i] = load(out + h * size + offset + i * kLanes);
  for (int64_t at = 0; at < count; ++at) {
    const float scale = scale_of_row(values[at], size);
    for (int i = 0; i < parts; ++i) {
      const Floats part = load(values[at] + offset + i * kLanes) * scale;
      for (int h = 0; h < heads; ++h) total[h][i] += weights[h * room + at] * part;
    }
  }
  for (int h = 0; h < heads; ++h)
    for (int i = 0; i < parts; ++i) write(total[h][i], out + h * size + offset + i * kLanes);
}

constexpr int64_t kLatentPlaces = 64;  // of one turn, in which all heads read them
constexpr int kScoredHeads = kRowsAtOnce == 8 ? 4 : 1, kAddedHeads = kRowsAtOnce == 8 ? 4 : 2;
constexpr int kAddedParts = kRowsAtOnce == 8 ? 4 : 2;

// One token and the heads from first to last.
template <typename stored>
void attend_latents(const LatentStep<stored>& step, int64_t t, const int64_t* table, int64_t first, int64_t last) {
  static thread_local std::vector<float> scores;
  const int64_t size = step.size, before = step.positions[t] + 1;
  const int32_t* places = step.places && before > step.num_chosen ? step.places + t * step.num_chosen : nullptr;
  const int64_t end = places ? step.num_chosen : before, room = (end + kLanes) / kLanes * kLanes;
  const int64_t heads = last - first, whole = (step.latent_size + kLanes - 1) / kLanes * kLanes;
  if (static_cast<int64_t>(scores.size()) < heads * room) scores.resize(heads * room);
  const float* q = step.q + t * step.q_stride + first * size;
  float* out = step.out + (t * step.heads + first) * size;
  const auto each_run = [&](const auto& visit) {
    const uint32_t block = static_cast<uint32_t>(step.block_size);
    const int64_t row = step.row();
    const stored* rows[kLatentPlaces];
    for (int64_t at = 0; at < end; at += kLatentPlaces) {
      const int64_t count = std::min(end - at, kLatentPlaces);
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t place = static_cast<uint32_t>(places ? places[at + i] : at + i), number = place / block;
        rows[i] = step.cache + (table[number] * block + (place - number * block)) * row;
      }
      visit(at, rows, count);
    }
  };
  each_run([&](int64_t place, const stored* const* keys, int64_t count) {
    in_portions<kScoredHeads>(heads, [&](auto some, int64_t h) {
      score_places<some.value>(step, q + h * size, keys, count, &scores[h * room + place], room);
    });
  });
  for (int64_t h = 0; h < heads; ++h) {
    softmax(&scores[h * room], end, nullptr);
    std::fill_n(out + h * size, whole, 0.0f);
  }
  each_run([&](int64_t place, const stored* const* values, int64_t count) {
    in_portions<kAddedHeads>(heads, [&](auto some, int64_t h) {
      const float* weights = &scores[h * room + place];
      int64_t offset = 0;
      for (; offset + kAddedParts * kLanes <= whole; offset += kAddedParts * kLanes)
        add_places<some.value, kAddedParts>(step, values, offset, count, weights, room, out + h * size);
      for (; offset < whole; offset += kLanes)
        add_places<some.value, 1>(step, values, offset, count, weights, room, out + h * size);
    });
  });
}

template <typename stored>
void attend_latents(const LatentStep<stored>& step, int num_threads) {
  std::vector<int64_t> sequences(step.num_tokens);
  for (int64_t s = 0; s < step.num_sequences; ++s)
    std::fill(sequences.begin() + step.starts[s], sequences.begin() + step.starts[s + 1], s);
  for (int64_t t = 0; t < step.num_tokens; ++t)
    write_row(step.k + t * step.size, step.size, step.cache + step.slots[t] * step.row());
  // One thread reads the places of a token for all heads, unless there are too few tokens.
  const int64_t count = step.num_tokens, some = std::max<int64_t>(4, step.heads / (4 * num_threads));
  const int64_t together = count < 4 * num_threads && num_threads > 1 ? some : step.heads;
  const int64_t splits = (step.heads + together - 1) / together;
  Threads::of_process().share(count * splits, num_threads, [&](int64_t task) {
    const int64_t t = count - 1 - task / splits, first = task % splits * together;  // the longest first
    attend_latents(step, t, step.tables + sequences[t] * step.table_width, first, std::min(step.heads, first + together));
  });
}

// The same for a cache of any type.
inline void attend_latents(const LatentStep<void*>& step, void* cache, int64_t kind, int num_threads) {
  const auto attend = [&](auto* typed) {
    using stored = std::remove_pointer_t<decltype(typed)>;
    attend_latents(LatentStep<stored>{step.q, step.k, typed, step.out, step.q_stride, step.positions, step.slots,
                                      step.starts, step.tables, step.num_tokens, step.num_sequences, step.heads,
                                      step.size, step.latent_size, step.block_size, step.table_width, step.scale,
                                      step.places, step.num_chosen},
                   num_threads);
  };
  switch (kind) {
    case kBfloat16: return attend(static_cast<bfloat*>(cache));
    case kFloat16: return attend(static_cast<half*>(cache));
    case kInt8: return attend(static_cast<byte*>(cache));
    default: return attend(static_cast<float*>(cache));
  }
}

}  // namespace flambeau

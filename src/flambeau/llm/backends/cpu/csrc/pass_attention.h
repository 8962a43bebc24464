// Attention to keys and values, and to latents.
#pragma once
#include "pass.h"

namespace flambeau {

inline void Pass::attend(const Layer& layer, const float* input) {
  take_widths(layer);
  if (layer.attention_gate.weights)
    layer.attention_gate.multiply(input, attention_gates_, tokens_.num_tokens, false, num_threads_);
  if (layer.latent) return attend_latent(layer, *layer.latent, input);
  multiply(layer, kLoraQkv, layer.qkv, input, net_.gates_attention ? gated_qkv_ : qkv_);
  each_token([&](int64_t t) {
    if (net_.gates_attention) take_gates(layer, t);
    position(layer, t);
  });
  attend_heads(layer);
  if (layer.attention_gate.weights) gate_attention(layer);
  if (net_.gates_attention)
    each_token([&](int64_t t) {
      const float* gates = gated_qkv_ + t * (qkv_width_ + heads_width_);
      float* row = attended_ + t * heads_width_;
      for (int64_t i = 0; i < heads_width_; ++i) row[i] *= gates[i];
    });
  normalize_rows(layer.attention_inner_norm, attended_, heads_width_);
  add(layer, kLoraOut, layer.out, attended_, layer.attention_post_norm, net_.attention_output_scale);
}

// Attention of the queries, keys and values of the step, which are stored.
inline void Pass::attend_heads(const Layer& layer) {
  const float *k = layer.has_shared_keys ? nullptr : qkv_ + heads_width_;
  const float *v = layer.has_shared_keys ? nullptr : k + layer.kv_heads * layer.head_size;
  const PagedStep<void> step{
      qkv_, k, v, layer.keys, layer.values, attended_, qkv_width_, qkv_width_,
      qkv_width_, tokens_.positions, tokens_.slots, tokens_.starts, tokens_.tables, tokens_.num_tokens,
      tokens_.num_sequences, layer.heads, layer.kv_heads, net_.block_size, tokens_.table_width, layer.window,
      layer.attention_scale, net_.softcap, layer.sinks, net_.biases, net_.num_places, layer.chunk};
  attend_paged(step, net_.cache_kind, layer.head_size, num_threads_);
}

// Divides heads of queries and gates that follow each other; leaves the gates' factors at the start of the row.
inline void Pass::take_gates(const Layer& layer, int64_t t) {
  const int64_t size = layer.head_size;
  float *from = gated_qkv_ + t * (qkv_width_ + heads_width_), *to = qkv_ + t * qkv_width_;
  for (int64_t h = 0; h < layer.heads; ++h) {
    std::copy_n(from + 2 * h * size, size, to + h * size);
    for (int64_t i = 0; i < size; ++i) from[h * size + i] = logistic(from[(2 * h + 1) * size + i]);
  }
  std::copy_n(from + 2 * heads_width_, qkv_width_ - heads_width_, to + heads_width_);
}

// What queries, keys and values are before attention.
inline void Pass::position(const Layer& layer, int64_t t) {
  float* heads = qkv_ + t * qkv_width_;
  const int64_t half = layer.rotary_size / 2, size = layer.head_size;
  if (layer.qk_norm && !net_.late_qk_norm) normalize_heads(layer, heads);
  if (net_.clip > 0)
    for (int64_t i = 0; i < qkv_width_; ++i) heads[i] = std::min(std::max(heads[i], -net_.clip), net_.clip);
  if (const Turn turn = turn_of(layer, t); turn.cos) rope(heads, num_rotated(layer), size, turn.cos, turn.sin, half);
  if (layer.qk_norm && net_.late_qk_norm) normalize_heads(layer, heads);
  if (layer.value_norm && !layer.has_shared_keys)
    for (int64_t v = num_rotated(layer) * size; v < qkv_width_; v += size)
      layer.value_norm.apply(heads + v, heads + v, size, net_.epsilon);
  if (layer.query_scales)
    for (int64_t i = 0; i < heads_width_; ++i) heads[i] *= layer.query_scales[tokens_.positions[t]];
}

inline void Pass::normalize_heads(const Layer& layer, float* heads) {
  const Norm& norm = layer.qk_norm;
  const int64_t size = layer.head_size, queries = layer.heads * size, all = num_rotated(layer) * size;
  if (net_.wide_qk_norm) {
    norm.apply(heads, heads, queries, net_.epsilon);
    norm.apply(heads + queries, heads + queries, all - queries, net_.epsilon, queries);
  } else {
    for (int64_t at = 0; at < all; at += size) norm.apply(heads + at, heads + at, size, net_.epsilon, at);
  }
}

// A factor for each number that attention gives, or for each head.
inline void Pass::gate_attention(const Layer& layer) {
  const bool is_soft = net_.attention_gate == kSoftplusGate || net_.attention_gate == kSoftplusHeadGate;
  const int64_t count = layer.attention_gate.num_outputs(), each = heads_width_ / count;
  each_token([&](int64_t t) {
    const float* gates = attention_gates_ + t * count;
    float* row = attended_ + t * heads_width_;
    for (int64_t i = 0; i < count; ++i) {
      const float x = gates[i], soft = x > 20 ? x : std::log1p(std::exp(x)), gate = is_soft ? soft : sigmoid(x);
      for (int64_t d = i * each; d < (i + 1) * each; ++d) row[d] *= gate;
    }
  });
}

inline void Pass::attend_latent(const Layer& layer, const LatentAttention& latent, const float* input) {
  Workspace& space = Workspace::of_thread();
  const int64_t count = tokens_.num_tokens, heads = layer.heads, size = layer.head_size, rotated = latent.rotary_size;
  const int64_t head = latent.unrotated_size + rotated, rank = latent.latent_size, half = rotated / 2;
  if (latent.query_down.weights) {
    const int64_t width = latent.query_down.num_outputs();
    float* down = space.grown(space.latents, count * width);
    multiply(layer, kLoraQueryDown, latent.query_down, input, down);
    each_token([&](int64_t t) { latent.query_norm.apply(down + t * width, down + t * width, width, latent.epsilon); });
    if (latent.indexer) choose(layer, *latent.indexer, rotated, input, down);
    multiply(layer, kLoraQkv, latent.query_up, down, space.grown(space.queries, count * heads * head));
  } else {
    multiply(layer, kLoraQkv, latent.query_up, input, space.grown(space.queries, count * heads * head));
  }
  if (layer.query_scales) scale_queries(layer, space.queries.data(), heads * head);
  const float* queries = space.queries.data();
  float* latents = space.grown(space.latents, count * size);
  multiply(layer, kLoraLatent, latent.latent, input, latents);
  float* keys = space.grown(space.keys, count * size);
  each_token([&](int64_t t) {
    const auto [cos, sin] = turn_of(layer, t);
    latent.latent_norm.apply(latents + t * size, keys + t * size, rank, latent.epsilon);
    rotate_head(latents + t * size + rank, keys + t * size + rank, cos, sin, half, latent.is_paired);
    for (int64_t h = 0; h < heads; ++h) {
      const float* query = queries + (t * heads + h) * head + latent.unrotated_size;
      rotate_head(query, qkv_ + t * qkv_width_ + h * size + rank, cos, sin, half, latent.is_paired);
    }
  });
  multiply_heads(latent.to_keys, heads, queries, heads * head, head, qkv_, qkv_width_, size, count, num_threads_);
  const LatentStep<void*> step{qkv_, keys, nullptr, attended_, qkv_width_, tokens_.positions, tokens_.slots,
                               tokens_.starts, tokens_.tables, count, tokens_.num_sequences, heads, size, rank,
                               net_.block_size, tokens_.table_width, net_.scale,
                               latent.num_chosen ? space.places.data() : nullptr, latent.num_chosen};
  attend_latents(step, layer.keys, net_.cache_kind, num_threads_);
  const int64_t width = heads * latent.value_size;
  float* values = space.grown(space.values, count * width);
  multiply_heads(latent.to_values, heads, attended_, heads * size, size, values, width, latent.value_size, count,
                 num_threads_);
  if (latent.head_gate.weights) {
    float* gates = space.grown(space.latents, count * heads);
    latent.head_gate.multiply(input, gates, count, false, num_threads_);
    each_token([&](int64_t t) {
      for (int64_t i = 0; i < width; ++i) values[t * width + i] *= logistic(gates[t * heads + i / latent.value_size]);
    });
  }
  add(layer, kLoraOut, layer.out, values, layer.attention_post_norm, net_.attention_output_scale);
}

// Queries that grow with the position.
inline void Pass::scale_queries(const Layer& layer, float* queries, int64_t width) {
  each_token([&](int64_t t) {
    const float scale = layer.query_scales[tokens_.positions[t]];
    for (int64_t i = t * width; i < (t + 1) * width; ++i) queries[i] *= scale;
  });
}

// Stores the keys of an indexer, and the places that this layer and those without an indexer attend to.
inline void Pass::choose(const Layer& layer, const Indexer& indexer, int64_t rotated, const float* input, const float* query_latents) {
  Workspace& space = Workspace::of_thread();
  const int64_t count = tokens_.num_tokens, size = indexer.size, heads = indexer.heads;
  const auto rotate = [&](int64_t t, float* rows, int64_t num_rows) {
    const Turn turn = turn_of(layer, t);
    std::vector<float> turned(rotated);
    for (float* row = rows; row < rows + num_rows * size; row += size) {
      rotate_head(row, turned.data(), turn.cos, turn.sin, rotated / 2, indexer.is_paired);
      std::copy(turned.begin(), turned.end(), row);
    }
  };
  float* keys = space.grown(space.index_keys, count * size);
  indexer.key.multiply(input, keys, count, false, num_threads_);
  each_token([&](int64_t t) {
    float* key = keys + t * size;
    indexer.key_norm.apply(key, key, size, indexer.epsilon);
    rotate(t, key, 1);
    with_cache(indexer.keys, [&](auto* cache) {
      using stored = std::remove_pointer_t<decltype(cache)>;
      write_row(key, size, cache + tokens_.slots[t] * room_of_head<stored>(size));
    });
  });
  int32_t* places = space.grown(space.places, count * indexer.num_chosen);
  if (std::all_of(tokens_.positions, tokens_.positions + count, [&](int64_t at) { return at < indexer.num_chosen; }))
    return;  // they attend to all tokens before them
  float* queries = space.grown(space.index_queries, count * heads * size);
  indexer.query_up.multiply(query_latents, queries, count, false, num_threads_);
  each_token([&](int64_t t) { rotate(t, queries + t * heads * size, heads); });
  float* weights = space.grown(space.index_weights, count * heads);
  indexer.weights.multiply(input, weights, count, false, num_threads_);
  with_cache(indexer.keys, [&](const auto* cache) {
    using stored = std::remove_cv_t<std::remove_pointer_t<decltype(cache)>>;
    const IndexStep<stored> step{queries, weights, cache, tokens_.positions, tokens_.starts, tokens_.tables, count,
                                 tokens_.num_sequences, tokens_.table_width, net_.block_size, heads, size,
                                 indexer.num_chosen};
    choose_places(step, places, num_threads_);
  });
}

}  // namespace flambeau

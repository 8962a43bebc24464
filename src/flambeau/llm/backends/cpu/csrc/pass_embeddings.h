// Embeddings: those of tokens and of positions, and those that each layer has of its own.
#pragma once
#include "pass.h"

namespace flambeau {

inline void Pass::embed() {
  if (!net_.project_in.weights || tokens_.hidden) {
    each_token([&](int64_t t) {
      embed(t, net_.hidden, x_ + t * net_.hidden);
      place(t);
    });
    return;
  }
  const int64_t size = net_.project_in.size;
  each_token([&](int64_t t) { embed(t, size, added_ + t * size); });
  net_.project_in.multiply(added_, x_, tokens_.num_tokens, false, num_threads_);
  each_token([&](int64_t t) { place(t); });
}

// Some numbers of a table, in float32.
inline void Pass::read(const void* table, int64_t kind, int64_t at, int64_t size, float* to) {
  if (kind == kBfloat16)
    widen(static_cast<const bfloat*>(table) + at, to, size);
  else if (kind == kFloat16)
    widen(static_cast<const half*>(table) + at, to, size);
  else
    std::copy_n(static_cast<const float*>(table) + at, size, to);
}

inline void Pass::embed(int64_t t, int64_t size, float* to) {
  if (tokens_.hidden) {
    std::copy_n(tokens_.hidden + t * size, size, to);
    return;
  }
  if (!net_.embedding)
    net_.embedding_rows.read_row(tokens_.ids[t], to);
  else
    read(net_.embedding, net_.embedding_kind, tokens_.ids[t] * size, size, to);
  if (net_.embedding_scale != 1)
    for (int64_t i = 0; i < size; ++i) to[i] *= net_.embedding_scale;
}

// What is added to an embedding for its place, and the norm of both.
inline void Pass::place(int64_t t) {
  if (tokens_.hidden) return;
  const int64_t size = net_.hidden;
  float* to = x_ + t * size;
  if (net_.positions) {
    const float* place = net_.positions + tokens_.positions[t] * size;
    for (int64_t i = 0; i < size; ++i) to[i] += place[i];
  }
  if (net_.embedding_norm) net_.embedding_norm.apply(to, to, size, net_.epsilon);
}

// The embeddings that each layer has of its own [T, L, P].
inline void Pass::embed_own() {
  const int64_t size = net_.own_size, width = net_.num_layers * size;
  net_.own_projection.multiply(x_, own_, tokens_.num_tokens, false, num_threads_);
  each_token([&](int64_t t) {
    const int64_t id = tokens_.ids[t] < net_.own_vocab ? tokens_.ids[t] : 0;
    std::vector<float> row(width);
    if (net_.own_embedding)
      read(net_.own_embedding, net_.own_kind, id * width, width, row.data());
    else
      net_.own_rows.read_row(id, row.data());
    for (int64_t i = 0; i < net_.num_layers; ++i) {
      float* to = own_ + t * width + i * size;
      for (int64_t p = 0; p < size; ++p) to[p] *= net_.own_projection_scale;
      net_.own_norm.apply(to, to, size, net_.epsilon);
      const float* own = row.data() + i * size;
      for (int64_t p = 0; p < size; ++p) to[p] = (to[p] + own[p] * net_.own_scale) * 0.70710678f;
    }
  });
}

// x += what a layer makes of its own embeddings.
inline void Pass::add_own(const Layer& layer, int64_t number) {
  make_own(layer, number);
  add(layer.input_norm);
}

inline void Pass::make_own(const Layer& layer, int64_t number) {
  const int64_t size = net_.own_size;
  layer.input_gate.multiply(x_, own_gates_, tokens_.num_tokens, false, num_threads_);
  each_token([&](int64_t t) {
    float* row = own_gates_ + t * size;
    activate(net_.activation, row, own_ + (t * net_.num_layers + number) * size, row, size);
  });
  layer.input_projection.multiply(own_gates_, added_, tokens_.num_tokens, false, num_threads_);
}

}  // namespace flambeau

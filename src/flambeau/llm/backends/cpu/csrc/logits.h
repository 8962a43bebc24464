// From hidden states to logits, and to the most likely tokens of one step or of several.
#pragma once
#include "pass_attention.h"
#include "pass_blocks.h"
#include "pass_embeddings.h"
#include "pass_feed_forward.h"
#include "pass_streams.h"

namespace flambeau {

// The logits [N, V] of some of the tokens.
inline void Pass::find_logits(const int64_t* rows, int64_t num_rows, float* logits) {
  for (int64_t i = 0; i < num_rows; ++i) {
    const float* row = x_ + (rows ? rows[i] : i) * net_.hidden;
    if (net_.last_norm)
      net_.last_norm.apply(row, normal_ + i * net_.hidden, net_.hidden, net_.epsilon);
    else
      std::copy_n(row, net_.hidden, normal_ + i * net_.hidden);
  }
  const float* rows_of_head = normal_;
  if (net_.project_out.weights) {
    net_.project_out.multiply(normal_, added_, num_rows, false, num_threads_);
    rows_of_head = added_;
  }
  if (net_.head_layer.weights) {
    net_.head_layer.multiply(normal_, added_, num_rows, false, num_threads_);
    each_row(num_rows, [&](int64_t i) {
      float* row = added_ + i * net_.hidden;
      activate(net_.head_activation, row, nullptr, row, net_.hidden);
      net_.head_layer_norm.apply(row, row, net_.hidden, net_.epsilon);
    });
    rows_of_head = added_;
  }
  net_.head.multiply(rows_of_head, logits, num_rows, false, num_threads_);
  if (tokens_.adapters) {
    adapters_of(num_rows, [&](int64_t i) { return rows ? rows[i] : i; });
    adapt(row_adapters_.data(), net_.num_layers * net_.lora_per_layer(), net_.head, rows_of_head, logits, num_rows);
  }
  const int64_t size = num_rows * net_.head.width;
  if (net_.logit_scale != 1)
    for (int64_t i = 0; i < size; ++i) logits[i] *= net_.logit_scale;
  if (net_.logit_softcap > 0)
    for (int64_t i = 0; i < size; ++i) logits[i] = net_.logit_softcap * std::tanh(logits[i] / net_.logit_softcap);
}

// The index of the largest number, the first of equals; -1 if it is not finite or if there is a NaN.
inline int64_t argmax(const float* logits, int64_t size) {
  Floats high = Floats{} - INFINITY;
  Words nans{};
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats x = load(logits + i);
    high = larger(x, high);
    nans = nans | as<Words>(x != x);
  }
  float highest = largest(high);
  bool has_nan = sum(nans & 1) != 0;
  for (int64_t i = whole; i < size; ++i) highest = std::max(highest, logits[i]), has_nan |= logits[i] != logits[i];
  return has_nan || !std::isfinite(highest) ? -1 : std::find(logits, logits + size, highest) - logits;
}

// The most likely token of each row.
inline void argmax_rows(const float* logits, int64_t num_rows, int64_t size, int64_t* found) {
  for (int64_t i = 0; i < num_rows; ++i) found[i] = argmax(logits + i * size, size);
}

// Greedy tokens for each sequence [num_ahead, S]: the most likely one after those of the step, then the most likely
// after that one, at these positions and slots [num_ahead - 1, S]. If logits are not finite, token 0 is taken.
inline void argmax_steps(const Network& net, const Tokens& tokens, const int64_t* positions, const int64_t* slots,
                         int64_t num_ahead, int64_t* found, int num_threads) {
  const int64_t count = tokens.num_sequences, width = net.head.width;
  Workspace& space = Workspace::of_thread();
  float* logits = space.grown(space.logits, count * width);
  std::vector<int64_t> rows(count), starts(count + 1);
  for (int64_t s = 0; s < count; ++s) rows[s] = tokens.starts[s + 1] - 1, starts[s + 1] = s + 1;
  Pass(net, tokens, num_threads).run(rows.data(), count, logits);
  for (int64_t place = 0;; ++place, positions += count, slots += count, found += count) {
    argmax_rows(logits, count, width, found);
    std::replace(found, found + count, int64_t{-1}, int64_t{0});
    if (place + 1 == num_ahead) return;
    Tokens next{found, positions, slots, starts.data(), tokens.tables, count, count, tokens.table_width};
    next.state_slots = tokens.state_slots;
    Pass(net, next, num_threads).run(nullptr, count, logits);
  }
}

}  // namespace flambeau

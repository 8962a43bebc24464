// Feed-forward layers and experts.
#pragma once
#include "pass.h"

namespace flambeau {

inline void Pass::feed_forward(const Layer& layer, const float* input) {
  if (layer.channel_mix) return mix_channels(layer, *layer.channel_mix, input);
  if (layer.has_both()) return mix_beside(layer, *layer.experts, input);
  if (layer.experts) {
    mix(layer, *layer.experts, input, input);
    return add(layer.mlp_post_norm);
  }
  make_gated(layer, input);
  add(layer, kLoraDown, layer.down, gated_, layer.mlp_post_norm, net_.mlp_output_scale);
}

// The input of the last matrix of a feed-forward layer.
inline void Pass::make_gated(const Layer& layer, const float* input) {
  multiply(layer, kLoraGateUp, layer.gate_up, input, gate_up_);
  if (net_.gate_scale != 1)
    each_token([&](int64_t t) {
      float* row = gate_up_ + t * layer.gate_up.num_outputs();
      for (int64_t i = 0; i < layer.down.size; ++i) row[i] *= net_.gate_scale;
    });
  if (layer.cuts_gates)
    each_token([&](int64_t t) {
      cut_gates(gate_up_ + t * layer.gate_up.num_outputs(), layer.down.size, layer.gate_threshold);
    });
  gate(tokens_.num_tokens, layer.down.size, [&](const float* gate, const float* up, float* out, int64_t size) {
    if (net_.activation == kXielu)
      activate(gate, up, out, size, [&](const auto& x) { return xielu(x, layer.xielu); });
    else
      activate_within(layer.mlp_limit, net_.activation, gate, up, out, size);
  });
  normalize_rows(layer.mlp_inner_norm, gated_, layer.down.size);
}

// A feed-forward layer and experts, which read x itself, each with norms of their own.
inline void Pass::mix_beside(const Layer& layer, const Experts& experts, const float* input) {
  const int64_t count = tokens_.num_tokens, size = net_.hidden;
  make_gated(layer, input);
  multiply(layer, kLoraDown, layer.down, gated_, beside_);
  each_token([&](int64_t t) { layer.dense_norm.apply(beside_ + t * size, beside_ + t * size, size, net_.epsilon); });
  const float* of_experts = normalized(layer.expert_norm, normal_);
  mix(layer, experts, of_experts, normalized(layer.router_norm, other_normal_));
  for (int64_t t = 0; t < count; ++t) {
    float* row = added_ + t * size;
    layer.sparse_norm.apply(row, row, size, net_.epsilon);
    for (int64_t i = 0; i < size; ++i) row[i] += beside_[t * size + i];
  }
  add(layer.mlp_post_norm);
}

// A token's experts are added up in the order of their numbers, whatever other tokens there are.
inline void Pass::mix(const Layer& layer, const Experts& experts, const float* input, const float* of_router) {
  const bool is_projected = experts.latent_in.weights != nullptr;
  const int64_t count = tokens_.num_tokens, num_chosen = experts.num_chosen;
  const int64_t size = is_projected ? experts.latent_in.num_outputs() : net_.hidden;
  multiply(layer, kLoraRouter, experts.router, of_router, scores_);
  each_token([&](int64_t t) {
    choose_experts(experts, scores_ + t * experts.count, chosen_ + t * num_chosen, weights_ + t * num_chosen);
  });
  const Routing routing(chosen_, weights_, count, experts);
  const float* source = input;
  float* sums = added_;
  if (is_projected) {
    Workspace& space = Workspace::of_thread();
    float* latents = space.grown(space.latents, count * size);
    experts.latent_in.multiply(input, latents, count, false, num_threads_);
    source = latents, sums = space.grown(space.values, count * size);
    gathered_ = space.grown(space.gathered, count * std::max(size, net_.hidden));
  }
  std::fill_n(sums, count * size, 0.0f);
  for (int64_t n = 0; n < experts.count; ++n) {
    const Routing::Row* rows = routing.rows.data() + routing.starts[n];
    const int64_t num_rows = routing.starts[n + 1] - routing.starts[n];
    if (!num_rows) continue;
    each_row(num_rows, [&](int64_t i) {
      const float *from = source + rows[i].token * size, scale = experts.scales_inputs ? rows[i].weight : 1.0f;
      for (int64_t e = 0; e < size; ++e) gathered_[i * size + e] = from[e] * scale;
    });
    if (tokens_.adapters) adapters_of(num_rows, [&](int64_t i) { return rows[i].token; });
    const int64_t place = place_of(layer) + kLoraExperts + 2 * n;
    experts.gate_up[n].multiply(gathered_, gate_up_, num_rows, false, num_threads_);
    adapt(row_adapters_.data(), place, experts.gate_up[n], gathered_, gate_up_, num_rows);
    gate(num_rows, experts.down[n].size, [&](const float* gate, const float* up, float* out, int64_t width) {
      if (experts.limit > 0)
        clamped_swiglu(gate, up, out, width, experts.limit, experts.alpha);
      else
        activate_within(experts.late_limit, experts.activation, gate, up, out, width);
    });
    experts.down[n].multiply(gated_, gathered_, num_rows, false, num_threads_);
    adapt(row_adapters_.data(), place + 1, experts.down[n], gated_, gathered_, num_rows);
    each_row(num_rows, [&](int64_t i) {
      const float weight = experts.scales_inputs ? 1.0f : rows[i].weight;
      add_row(sums + rows[i].token * size, weight, gathered_ + i * size, size);
    });
  }
  if (is_projected) experts.latent_out.multiply(sums, added_, count, false, num_threads_);
  if (experts.shared_down.weights) add_shared(layer, experts, input);
}

// The expert for all tokens.
inline void Pass::add_shared(const Layer& layer, const Experts& experts, const float* input) {
  const bool is_gated = experts.shared_gate.weights != nullptr;
  multiply(layer, kLoraGateUp, experts.shared_gate_up, input, gate_up_);
  gate(tokens_.num_tokens, experts.shared_down.size, [&](const float* gate, const float* up, float* out, int64_t width) {
    activate_within(layer.mlp_limit, experts.activation, gate, up, out, width);
  });
  multiply(layer, kLoraDown, experts.shared_down, gated_, gathered_);
  if (is_gated) multiply(layer, kLoraSharedGate, experts.shared_gate, input, scores_);
  const int64_t size = net_.hidden;
  each_token([&](int64_t t) {
    add_row(added_ + t * size, is_gated ? sigmoid(scores_[t]) : 1.0f, gathered_ + t * size, size);
  });
}

// x += what RWKV's feed-forward layer gives.
inline void Pass::mix_channels(const Layer& layer, const Recurrence& mix, const float* input) {
  const StepSequences sequences = step_sequences();
  RecurrentPass pass(mix, sequences, num_threads_);
  mix.out.multiply(pass.run(input), added_, tokens_.num_tokens, false, num_threads_);
  const float* factors = pass.receptances();
  each_token([&](int64_t t) {
    for (int64_t i = t * net_.hidden; i < (t + 1) * net_.hidden; ++i) added_[i] *= factors[i];
  });
  add(layer.mlp_post_norm);
}

}  // namespace flambeau

// Experts: a router sends each token to a few feed-forward layers; each of these computes all its tokens at once.
//
// Shapes: T tokens of the step, N experts, A experts of a token, E hidden.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "activations.h"
#include "expert_groups.h"
#include "matrix.h"

namespace flambeau {

// How scores become weights: all by a softmax; one by one; one by one after the choice (Llama 4); a sparse mixer.
enum RouterKind : int64_t { kSoftmax, kSigmoid, kLateSigmoid, kSparseMixer };

struct Experts {
  Matrix router;               // [N, E]
  const float* score_bias;     // [N]: decides on the choice, no part of the weights; or null
  const Matrix *gate_up, *down;  // [N]
  Matrix shared_gate_up, shared_down;  // an expert for all tokens; no weights: there is none
  Matrix shared_gate;                  // [1, E]: its sigmoid is the factor of that expert; no weights: 1
  int64_t count, num_chosen;
  int64_t router_kind;
  int64_t normalizes;   // the weights of the chosen experts sum to one
  int64_t activation;
  float weight_scale;   // of the weights of the chosen experts
  float limit, alpha;   // of a clamped SwiGLU; a limit of 0: the activation
  int64_t num_groups = 1, num_chosen_groups = 1;  // experts are chosen from so many of the groups
  int64_t scales_inputs = 0;  // inputs of experts are multiplied with their weights, not the outputs
  float jitter = 0;           // of a sparse mixer
  const float* scales = nullptr;  // [N]: of the weights of each expert, or null
  Matrix latent_in{}, latent_out{};  // what experts read and write is projected; no weights: it is the hidden state
  float late_limit = 0;  // of activated gates and what they gate; 0: there is none
};

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// gpt-oss: the gate and what it multiplies are clamped.
inline void clamped_swiglu(const float* gate, const float* up, float* out, int64_t size, float limit, float alpha) {
  const auto swiglu = [&](const auto& from, const auto& with) {
    const auto x = at_most(from, limit), y = at_most(at_least(with, -limit), limit);
    return x / (exponential(at_most(at_least(x * -alpha, -87.0f), 87.0f)) + 1.0f) * (y + 1.0f);
  };
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) write(swiglu(load(gate + i), load(up + i)), out + i);
  for (int64_t i = whole; i < size; ++i) out[i] = swiglu(gate[i], up[i]);
}

// Scores [N] become weights: all that the router says, before experts are chosen.
inline void weigh_experts(const Experts& experts, float* scores) {
  const int64_t count = experts.count;
  if (experts.router_kind != kSoftmax) {
    for (int64_t n = 0; n < count; ++n) scores[n] = sigmoid(scores[n]);
    return;
  }
  const float highest = *std::max_element(scores, scores + count);
  float total = 0;
  for (int64_t n = 0; n < count; ++n) total += scores[n] = std::exp(scores[n] - highest);
  for (int64_t n = 0; n < count; ++n) scores[n] /= total;
}

// Experts of other groups than the best come last; without a bias (DeepSeek V2), they have no weight either.
inline void leave_best_groups(const Experts& experts, float* scores, float* ranks) {
  const bool adds_two = experts.score_bias != nullptr;
  const int64_t size = experts.count / experts.num_groups;
  const auto is_chosen = best_groups(ranks, experts.count, experts.num_groups, experts.num_chosen_groups, adds_two);
  for (int64_t n = 0; n < experts.count; ++n) {
    if (is_chosen[n / size]) continue;
    ranks[n] = adds_two ? -INFINITY : 0.0f;
    if (!adds_two) scores[n] = 0;
  }
}

inline void finish_weights(const Experts& experts, float total, float* weights) {
  const float scale = experts.weight_scale;
  for (int64_t a = 0; a < experts.num_chosen; ++a) weights[a] = (experts.normalizes ? weights[a] / total : weights[a]) * scale;
}

// One expert after another; each is weighed against those close to it that are left (Phi-3.5-MoE).
inline void mix_sparsely(const Experts& experts, const float* scores, int64_t* chosen, float* weights) {
  std::vector<float> left(scores, scores + experts.count);
  float total = 0;
  for (int64_t a = 0; a < experts.num_chosen; ++a) {
    const int64_t best = std::max_element(left.begin(), left.end()) - left.begin();
    const float highest = left[best];
    float sum = 0;
    for (int64_t n = 0; n < experts.count; ++n) {
      const float distance = (highest - scores[n]) / std::max(std::fabs(scores[n]), highest);
      if (!(distance > 2 * experts.jitter)) sum += std::exp(left[n] - highest);
    }
    chosen[a] = best, total += weights[a] = 1.0f / sum;
    left[best] = -INFINITY;
  }
  finish_weights(experts, total, weights);
}

// Chooses the experts of a token by the router's scores [N], which are used up; writes their numbers and weights [A].
inline void choose_experts(const Experts& experts, float* scores, int64_t* chosen, float* weights) {
  if (experts.router_kind == kSparseMixer) return mix_sparsely(experts, scores, chosen, weights);
  std::vector<bool> is_taken(experts.count);
  std::vector<float> ranks(scores, scores + experts.count);
  weigh_experts(experts, scores);
  if (experts.router_kind != kLateSigmoid) ranks.assign(scores, scores + experts.count);
  if (experts.score_bias)
    for (int64_t n = 0; n < experts.count; ++n) ranks[n] += experts.score_bias[n];
  if (experts.num_groups > 1) leave_best_groups(experts, scores, ranks.data());
  float total = 0;
  for (int64_t a = 0; a < experts.num_chosen; ++a) {
    int64_t best = -1;
    for (int64_t n = 0; n < experts.count; ++n)
      if (!is_taken[n] && (best < 0 || ranks[n] > ranks[best])) best = n;
    is_taken[best] = true;
    chosen[a] = best, weights[a] = scores[best], total += scores[best];
  }
  finish_weights(experts, total, weights);
  for (int64_t a = 0; experts.scales && a < experts.num_chosen; ++a) weights[a] *= experts.scales[chosen[a]];
}

// The tokens of each expert, in their order.
struct Routing {
  struct Row {
    int64_t token;
    float weight;
  };
  std::vector<Row> rows;        // [T * A], by experts
  std::vector<int64_t> starts;  // [N + 1]

  Routing(const int64_t* chosen, const float* weights, int64_t num_tokens, const Experts& experts)
      : rows(num_tokens * experts.num_chosen), starts(experts.count + 1) {
    const int64_t count = static_cast<int64_t>(rows.size());
    for (int64_t i = 0; i < count; ++i) ++starts[chosen[i] + 1];
    for (int64_t n = 0; n < experts.count; ++n) starts[n + 1] += starts[n];
    std::vector<int64_t> next(starts);
    for (int64_t i = 0; i < count; ++i) rows[next[chosen[i]]++] = {i / experts.num_chosen, weights[i]};
  }
};

}  // namespace flambeau

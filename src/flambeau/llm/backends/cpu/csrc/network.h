// A whole step of a decoder in one call, one layer after the other.
//
// Shapes: T tokens of the step, E hidden, H heads, G key-value heads, D head size, F intermediate, V vocabulary.
#pragma once
#include <cstdint>
#include <vector>

#include "activations.h"
#include "experts.h"
#include "lora.h"
#include "matrix.h"
#include "norms.h"
#include "paged_attention.h"

namespace flambeau {

struct Layer {
  Norm attention_norm, mlp_norm;            // before them
  Norm attention_post_norm, mlp_post_norm;  // after them
  Norm qk_norm;                             // [H + G, D]: of each head of queries and keys, or of all at once
  const float *cos, *sin;                            // [places, rotary_size / 2], or null: not rotated
  Matrix qkv, out, gate_up, down;
  const Experts* experts;  // in the place of gate_up and down, or null
  void *keys, *values;
  int64_t window;
  const float* sinks;  // of attention [H], or null
};

struct Network {
  int64_t hidden, heads, kv_heads, head_size, rotary_size, block_size, num_layers;
  int64_t intermediate;  // of the widest feed-forward layer
  int64_t max_experts;   // of a layer; 0: no layer has experts
  int64_t activation, has_gate, cache_kind, embedding_kind;
  int64_t is_parallel;     // attention and the feed-forward layer have the same input
  int64_t wide_qk_norm;    // one norm over all heads of queries, and one over those of keys
  int64_t late_qk_norm;    // after the rotation
  const Layer* layers;
  const void* embedding;   // [V, E], or null: embedding_rows
  const float* positions;  // [places, E]: embeddings that are added, or null
  Norm embedding_norm, last_norm;
  Matrix head;
  float epsilon, scale, softcap;  // of attention; a softcap of 0: none
  const float* biases;            // of attention [H, num_places], or null
  int64_t num_places;
  float clip;  // the largest absolute value of queries, keys and values; 0: any
  float embedding_scale, residual_scale, logit_scale, logit_softcap;
  const int64_t* recorded;  // [M] layers whose inputs a step writes to Tokens::states; num_layers: the last output
  int64_t num_recorded;
  Matrix embedding_rows{};  // [V, E] of integers

  int64_t gate_up_width() const { return has_gate ? 2 * intermediate : intermediate; }
};

struct Tokens {
  const int64_t *ids, *positions, *slots, *starts, *tables;  // [T] three times, [S + 1], [S, table_width]
  int64_t num_tokens, num_sequences, table_width;
  const int64_t* adapters = nullptr;  // [T], or none has one
  const LoraLayer* lora = nullptr;  // [adapters, layers, 4]: qkv, out, gate_up and down
  float* states = nullptr;  // [T, M, E], or nobody reads them
  const float* hidden = nullptr;  // [T, E]: the input of the first layer, or null: embeddings of the ids
  const float* attention_input = nullptr;  // of the first layer [T, inputs of qkv], or null: its normalized input
};

// Rotary positions of the heads of one token: the two halves of what is rotated are the two coordinates.
inline void rope(float* heads, int64_t count, int64_t size, const float* cos, const float* sin, int64_t half) {
  for (float* head = heads; head < heads + count * size; head += size)
    for (int64_t i = 0; i < half; ++i) {
      const float first = head[i], second = head[half + i];
      head[i] = first * cos[i] - second * sin[i];
      head[half + i] = second * cos[i] + first * sin[i];
    }
}

template <typename stored>
inline void widen(const stored* from, float* to, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) write(load(from + i), to + i);
  stored rest[kLanes] = {};
  if (i == size) return;
  std::copy(from + i, from + size, rest);
  float wide[kLanes];
  write(load(rest), wide);
  std::copy_n(wide, size - i, to + i);
}

// The buffers of a thread's steps; they keep their memory from one step to the next.
struct Workspace {
  std::vector<float> x, normal, other_normal, qkv, attended, gate_up, gated, added, gathered, scores, weights, logits;
  std::vector<int64_t> chosen;

  static Workspace& of_thread() {
    static thread_local Workspace workspace;
    return workspace;
  }

  template <typename Number>
  static Number* grown(std::vector<Number>& buffer, int64_t size) {
    if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
    return buffer.data();
  }
};

// One forward pass over the tokens of a step.
class Pass {
 public:
  Pass(const Network& net, const Tokens& tokens, int num_threads)
      : net_(net), tokens_(tokens), num_threads_(num_threads), heads_width_(net.heads * net.head_size),
        qkv_width_((net.heads + 2 * net.kv_heads) * net.head_size) {
    const int64_t count = tokens.num_tokens;
    Workspace& space = Workspace::of_thread();
    x_ = space.grown(space.x, count * net.hidden), normal_ = space.grown(space.normal, count * net.hidden);
    qkv_ = space.grown(space.qkv, count * qkv_width_), attended_ = space.grown(space.attended, count * heads_width_);
    gate_up_ = space.grown(space.gate_up, count * net.gate_up_width());
    gated_ = space.grown(space.gated, count * net.intermediate);
    added_ = space.grown(space.added, count * net.hidden);
    if (net.is_parallel) other_normal_ = space.grown(space.other_normal, count * net.hidden);
    if (!net.max_experts) return;
    gathered_ = space.grown(space.gathered, count * net.hidden);
    scores_ = space.grown(space.scores, count * net.max_experts);
    weights_ = space.grown(space.weights, count * net.max_experts);
    chosen_ = space.grown(space.chosen, count * net.max_experts);
  }

  // The logits [N, V] of some of the tokens.
  FLAMBEAU_ONCE void run(const int64_t* rows, int64_t num_rows, float* logits) {
    each_token([&](int64_t t) { embed(t); });
    for (int64_t i = 0; i < net_.num_layers; ++i) {
      record(i);
      compute(net_.layers[i]);
    }
    record(net_.num_layers);
    if (!num_rows) return;
    for (int64_t i = 0; i < num_rows; ++i) {
      const float* row = x_ + (rows ? rows[i] : i) * net_.hidden;
      if (net_.last_norm)
        net_.last_norm.apply(row, normal_ + i * net_.hidden, net_.hidden, net_.epsilon);
      else
        std::copy_n(row, net_.hidden, normal_ + i * net_.hidden);
    }
    net_.head.multiply(normal_, logits, num_rows, false, num_threads_);
    const int64_t size = num_rows * net_.head.width;
    if (net_.logit_scale != 1)
      for (int64_t i = 0; i < size; ++i) logits[i] *= net_.logit_scale;
    if (net_.logit_softcap > 0)
      for (int64_t i = 0; i < size; ++i) logits[i] = net_.logit_softcap * std::tanh(logits[i] / net_.logit_softcap);
  }

 private:
  // In groups of four: fewer rows are not worth another thread.
  template <typename Work>
  void each_token(const Work& work) {
    each_row(tokens_.num_tokens, work);
  }

  template <typename Work>
  void each_row(int64_t count, const Work& work) {
    const int64_t group = 4;
    Threads::of_process().share((count + group - 1) / group, num_threads_, [&](int64_t task) {
      for (int64_t t = task * group; t < std::min(count, (task + 1) * group); ++t) work(t);
    });
  }

  void embed(int64_t t) {
    const int64_t size = net_.hidden;
    float* to = x_ + t * size;
    if (tokens_.hidden) {
      std::copy_n(tokens_.hidden + t * size, size, to);
      return;
    }
    const int64_t at = tokens_.ids[t] * size;
    if (!net_.embedding)
      net_.embedding_rows.read_row(tokens_.ids[t], to);
    else if (net_.embedding_kind == kBfloat16)
      widen(static_cast<const bfloat*>(net_.embedding) + at, to, size);
    else if (net_.embedding_kind == kFloat16)
      widen(static_cast<const half*>(net_.embedding) + at, to, size);
    else
      std::copy_n(static_cast<const float*>(net_.embedding) + at, size, to);
    if (net_.embedding_scale != 1)
      for (int64_t i = 0; i < size; ++i) to[i] *= net_.embedding_scale;
    if (net_.positions) {
      const float* place = net_.positions + tokens_.positions[t] * size;
      for (int64_t i = 0; i < size; ++i) to[i] += place[i];
    }
    if (net_.embedding_norm) net_.embedding_norm.apply(to, to, size, net_.epsilon);
  }

  // Copies the input of a layer to where it is asked for.
  void record(int64_t layer) {
    if (!tokens_.states) return;
    const int64_t size = net_.hidden, stride = net_.num_recorded * size;
    for (int64_t m = 0; m < net_.num_recorded; ++m)
      if (net_.recorded[m] == layer)
        for (int64_t t = 0; t < tokens_.num_tokens; ++t)
          std::copy_n(x_ + t * size, size, tokens_.states + t * stride + m * size);
  }

  void compute(const Layer& layer) {
    if (net_.is_parallel) {
      const float* input = normalized(layer.attention_norm, normal_);
      const float* other = layer.mlp_norm ? normalized(layer.mlp_norm, other_normal_) : input;
      attend(layer, input);
      feed_forward(layer, other);
    } else {
      const bool is_given = tokens_.attention_input && &layer == net_.layers;
      attend(layer, is_given ? tokens_.attention_input : normalized(layer.attention_norm, normal_));
      feed_forward(layer, normalized(layer.mlp_norm, normal_));
    }
  }

  // The input of attention or of the feed-forward layer; without a norm, x itself.
  const float* normalized(const Norm& norm, float* out) {
    if (!norm) return x_;
    const int64_t size = net_.hidden;
    each_token([&](int64_t t) { norm.apply(x_ + t * size, out + t * size, size, net_.epsilon); });
    return out;
  }

  void multiply(const Layer& layer, int64_t which, const Matrix& matrix, const float* input, float* output) {
    matrix.multiply(input, output, tokens_.num_tokens, false, num_threads_);
    adapt(layer, which, matrix, input, output);
  }

  // x += the product, perhaps normalized and scaled.
  void add(const Layer& layer, int64_t which, const Matrix& matrix, const float* input, const Norm& post_norm) {
    const bool is_direct = !post_norm && net_.residual_scale == 1;
    float* output = is_direct ? x_ : added_;
    matrix.multiply(input, output, tokens_.num_tokens, is_direct, num_threads_);
    adapt(layer, which, matrix, input, output);
    if (!is_direct) add(post_norm);
  }

  // x += what was computed before, perhaps normalized and scaled.
  void add(const Norm& post_norm) {
    const int64_t size = net_.hidden;
    each_token([&](int64_t t) {
      float *x = x_ + t * size, *y = added_ + t * size;
      if (post_norm) post_norm.apply(y, y, size, net_.epsilon);
      for (int64_t i = 0; i < size; ++i) x[i] += y[i] * net_.residual_scale;
    });
  }

  void normalize_heads(const Norm& norm, float* heads) {
    const int64_t size = net_.head_size, queries = net_.heads * size, all = queries + net_.kv_heads * size;
    if (net_.wide_qk_norm) {
      norm.apply(heads, heads, queries, net_.epsilon);
      norm.apply(heads + queries, heads + queries, all - queries, net_.epsilon, queries);
    } else {
      for (int64_t at = 0; at < all; at += size) norm.apply(heads + at, heads + at, size, net_.epsilon, at);
    }
  }

  // What queries, keys and values are before attention.
  void position(const Layer& layer, int64_t t) {
    float* heads = qkv_ + t * qkv_width_;
    const int64_t half = net_.rotary_size / 2, at = tokens_.positions[t] * half;
    if (layer.qk_norm && !net_.late_qk_norm) normalize_heads(layer.qk_norm, heads);
    if (net_.clip > 0)
      for (int64_t i = 0; i < qkv_width_; ++i) heads[i] = std::min(std::max(heads[i], -net_.clip), net_.clip);
    if (layer.cos) rope(heads, net_.heads + net_.kv_heads, net_.head_size, layer.cos + at, layer.sin + at, half);
    if (layer.qk_norm && net_.late_qk_norm) normalize_heads(layer.qk_norm, heads);
  }

  void attend(const Layer& layer, const float* input) {
    multiply(layer, 0, layer.qkv, input, qkv_);
    each_token([&](int64_t t) { position(layer, t); });
    const float* k = qkv_ + heads_width_;
    const PagedStep<void> step{
        qkv_, k, k + net_.kv_heads * net_.head_size, layer.keys, layer.values, attended_, qkv_width_, qkv_width_,
        qkv_width_, tokens_.positions, tokens_.slots, tokens_.starts, tokens_.tables, tokens_.num_tokens,
        tokens_.num_sequences, net_.heads, net_.kv_heads, net_.block_size, tokens_.table_width, layer.window, net_.scale,
        net_.softcap, layer.sinks, net_.biases, net_.num_places};
    attend_paged(step, net_.cache_kind, net_.head_size, num_threads_);
    add(layer, 1, layer.out, attended_, layer.attention_post_norm);
  }

  void feed_forward(const Layer& layer, const float* input) {
    if (layer.experts) return mix(layer, *layer.experts, input);
    multiply(layer, 2, layer.gate_up, input, gate_up_);
    gate(tokens_.num_tokens, layer.down.size, [&](const float* gate, const float* up, float* out, int64_t size) {
      activate(net_.activation, gate, up, out, size);
    });
    add(layer, 3, layer.down, gated_, layer.mlp_post_norm);
  }

  // What is between the two matrices of a feed-forward layer.
  template <typename Activate>
  void gate(int64_t num_rows, int64_t size, const Activate& activate) {
    each_row(num_rows, [&](int64_t row) {
      const float* from = gate_up_ + row * (net_.has_gate ? 2 * size : size);
      activate(from, net_.has_gate ? from + size : nullptr, gated_ + row * size, size);
    });
  }

  // A token's experts are added up in the order of their numbers, whatever other tokens there are.
  void mix(const Layer& layer, const Experts& experts, const float* input) {
    const int64_t count = tokens_.num_tokens, size = net_.hidden, num_chosen = experts.num_chosen;
    experts.router.multiply(input, scores_, count, false, num_threads_);
    each_token([&](int64_t t) {
      choose_experts(experts, scores_ + t * experts.count, chosen_ + t * num_chosen, weights_ + t * num_chosen);
    });
    const Routing routing(chosen_, weights_, count, experts);
    std::fill_n(added_, count * size, 0.0f);
    for (int64_t n = 0; n < experts.count; ++n) {
      const Routing::Row* rows = routing.rows.data() + routing.starts[n];
      const int64_t num_rows = routing.starts[n + 1] - routing.starts[n];
      if (!num_rows) continue;
      each_row(num_rows, [&](int64_t i) { std::copy_n(input + rows[i].token * size, size, gathered_ + i * size); });
      experts.gate_up[n].multiply(gathered_, gate_up_, num_rows, false, num_threads_);
      gate(num_rows, experts.down[n].size, [&](const float* gate, const float* up, float* out, int64_t width) {
        if (experts.limit > 0)
          clamped_swiglu(gate, up, out, width, experts.limit, experts.alpha);
        else
          activate(experts.activation, gate, up, out, width);
      });
      experts.down[n].multiply(gated_, gathered_, num_rows, false, num_threads_);
      each_row(num_rows, [&](int64_t i) { add_row(rows[i].token, rows[i].weight, gathered_ + i * size); });
    }
    if (experts.shared_down.weights) add_shared(layer, experts, input);
    add(layer.mlp_post_norm);
  }

  // The expert for all tokens.
  void add_shared(const Layer& layer, const Experts& experts, const float* input) {
    const bool is_gated = experts.shared_gate.weights != nullptr;
    multiply(layer, 2, experts.shared_gate_up, input, gate_up_);
    gate(tokens_.num_tokens, experts.shared_down.size, [&](const float* gate, const float* up, float* out, int64_t width) {
      activate(experts.activation, gate, up, out, width);
    });
    multiply(layer, 3, experts.shared_down, gated_, gathered_);
    if (is_gated) experts.shared_gate.multiply(input, scores_, tokens_.num_tokens, false, num_threads_);
    each_token([&](int64_t t) { add_row(t, is_gated ? sigmoid(scores_[t]) : 1.0f, gathered_ + t * net_.hidden); });
  }

  void add_row(int64_t t, float weight, const float* row) {
    float* to = added_ + t * net_.hidden;
    for (int64_t i = 0; i < net_.hidden; ++i) to[i] += weight * row[i];
  }

  // Adds the adapters of the tokens to the outputs of a matrix, of which each layer has four.
  void adapt(const Layer& layer, int64_t which, const Matrix& matrix, const float* input, float* output) {
    if (!tokens_.adapters) return;
    const LoraLayer* lora = tokens_.lora + (&layer - net_.layers) * 4 + which;
    add_lora(tokens_.adapters, lora, net_.num_layers * 4, input, output, tokens_.num_tokens, matrix.size,
             matrix.num_outputs(), num_threads_);
  }

  const Network& net_;
  const Tokens& tokens_;
  const int num_threads_;
  const int64_t heads_width_, qkv_width_;
  float *x_, *normal_, *other_normal_ = nullptr, *qkv_, *attended_, *gate_up_, *gated_, *added_;
  float *gathered_ = nullptr, *scores_ = nullptr, *weights_ = nullptr;  // of layers with experts
  int64_t* chosen_ = nullptr;
};

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
    const Tokens next{found, positions, slots, starts.data(), tokens.tables, count, count, tokens.table_width};
    Pass(net, next, num_threads).run(nullptr, count, logits);
  }
}

}  // namespace flambeau

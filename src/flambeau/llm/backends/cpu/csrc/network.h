// A whole step of a plain Llama-shaped network in one call: no biases, no experts, no normalized queries.
//
// Shapes: T tokens of the step, E hidden, H heads, G key-value heads, D head size, F intermediate, V vocabulary.
#pragma once
#include <cstdint>
#include <vector>

#include "linear.h"
#include "lora.h"
#include "packed_linear.h"
#include "paged_attention.h"

namespace flambeau {

struct Matrix {  // [width, size], packed or plain
  const uint32_t* packed = nullptr;
  const float* plain = nullptr;
  int64_t size = 0, width = 0;

  void multiply(const float* x, float* out, int64_t num_rows, bool adds, int num_threads) const {
    if (packed) return multiply_packed(x, packed, out, num_rows, size, width, adds, num_threads);
    flambeau::multiply(x, plain, out, num_rows, size, width, adds, num_threads);
  }
};

struct Layer {
  const float *attention_norm, *mlp_norm;
  Matrix qkv, out, gate_up, down;
  float *keys, *values;
  int64_t window;
};

struct Network {
  int64_t hidden, heads, kv_heads, head_size, intermediate, block_size, num_layers;
  const Layer* layers;
  const float *embedding, *cos, *sin, *last_norm;  // [V, E], [places, D / 2] twice, [E]
  Matrix head;
  float epsilon, scale;
};

struct Tokens {
  const int64_t *ids, *positions, *slots, *starts, *tables;  // [T] three times, [S + 1], [S, table_width]
  int64_t num_tokens, num_sequences, table_width;
  const int64_t* adapters = nullptr;  // [T], or none has one
  const LoraLayer* lora = nullptr;  // [adapters, layers, 4]: qkv, out, gate_up and down
};

inline void normalize(const float* x, const float* weight, float* out, int64_t size, float epsilon) {
  float lanes[kLanes] = {}, total = 0;
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += x[i + lane] * x[i + lane];
  for (int lane = 0; lane < kLanes; ++lane) total += lanes[lane];
  for (int64_t i = whole; i < size; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(size) + epsilon);
  for (int64_t i = 0; i < size; ++i) out[i] = x[i] * factor * weight[i];
}

// Rotary positions of the heads of one token: the two halves of a head are the two coordinates.
inline void rope(float* heads, int64_t count, const float* cos, const float* sin, int64_t half) {
  for (float* head = heads; head < heads + count * 2 * half; head += 2 * half)
    for (int64_t i = 0; i < half; ++i) {
      const float first = head[i], second = head[half + i];
      head[i] = first * cos[i] - second * sin[i];
      head[half + i] = second * cos[i] + first * sin[i];
    }
}

inline void gate(const float* gate_up, float* out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const float x = gate_up[i], bounded = std::min(std::max(x, -87.0f), 87.0f);
    out[i] = x / (1.0f + exponential(-bounded)) * gate_up[size + i];
  }
}

// One forward pass over the tokens of a step.
class Pass {
 public:
  Pass(const Network& net, const Tokens& tokens, int num_threads)
      : net_(net), tokens_(tokens), num_threads_(num_threads) {
    const int64_t count = tokens.num_tokens, width = (net.heads + 2 * net.kv_heads) * net.head_size;
    x_.resize(count * net.hidden), normal_.resize(count * net.hidden), qkv_.resize(count * width);
    attended_.resize(count * net.heads * net.head_size);
    gate_up_.resize(count * 2 * net.intermediate), gated_.resize(count * net.intermediate);
  }

  // The logits [N, V] of some of the tokens.
  void run(const int64_t* rows, int64_t num_rows, float* logits) {
    for (int64_t t = 0; t < tokens_.num_tokens; ++t)
      std::copy_n(net_.embedding + tokens_.ids[t] * net_.hidden, net_.hidden, &x_[t * net_.hidden]);
    for (int64_t i = 0; i < net_.num_layers; ++i) {
      attend(net_.layers[i]);
      feed_forward(net_.layers[i]);
    }
    for (int64_t i = 0; i < num_rows; ++i) {
      const int64_t row = rows ? rows[i] : i;
      normalize(&x_[row * net_.hidden], net_.last_norm, &normal_[i * net_.hidden], net_.hidden, net_.epsilon);
    }
    net_.head.multiply(normal_.data(), logits, num_rows, false, num_threads_);
  }

 private:
  // In groups of four: fewer rows are not worth another thread.
  template <typename Work>
  void each_token(const Work& work) {
    const int64_t group = 4, count = tokens_.num_tokens;
    Threads::of_process().share((count + group - 1) / group, num_threads_, [&](int64_t task) {
      for (int64_t t = task * group; t < std::min(count, (task + 1) * group); ++t) work(t);
    });
  }

  void attend(const Layer& layer) {
    const int64_t width = (net_.heads + 2 * net_.kv_heads) * net_.head_size, half = net_.head_size / 2;
    each_token([&](int64_t t) {
      normalize(&x_[t * net_.hidden], layer.attention_norm, &normal_[t * net_.hidden], net_.hidden, net_.epsilon);
    });
    layer.qkv.multiply(normal_.data(), qkv_.data(), tokens_.num_tokens, false, num_threads_);
    adapt(layer, 0, layer.qkv, normal_, qkv_);
    for (int64_t t = 0; t < tokens_.num_tokens; ++t) {
      const int64_t at = tokens_.positions[t] * half;
      rope(&qkv_[t * width], net_.heads + net_.kv_heads, net_.cos + at, net_.sin + at, half);
    }
    const float* k = qkv_.data() + net_.heads * net_.head_size;
    const PagedStep<float> step{
        qkv_.data(), k, k + net_.kv_heads * net_.head_size, layer.keys, layer.values, attended_.data(), width, width, width,
        tokens_.positions, tokens_.slots, tokens_.starts, tokens_.tables, tokens_.num_tokens, tokens_.num_sequences,
        net_.heads, net_.kv_heads, net_.block_size, tokens_.table_width, layer.window, net_.scale};
    attend_paged(step, net_.head_size, num_threads_);
    layer.out.multiply(attended_.data(), x_.data(), tokens_.num_tokens, true, num_threads_);
    adapt(layer, 1, layer.out, attended_, x_);
  }

  void feed_forward(const Layer& layer) {
    each_token([&](int64_t t) {
      normalize(&x_[t * net_.hidden], layer.mlp_norm, &normal_[t * net_.hidden], net_.hidden, net_.epsilon);
    });
    layer.gate_up.multiply(normal_.data(), gate_up_.data(), tokens_.num_tokens, false, num_threads_);
    adapt(layer, 2, layer.gate_up, normal_, gate_up_);
    each_token([&](int64_t t) {
      gate(&gate_up_[t * 2 * net_.intermediate], &gated_[t * net_.intermediate], net_.intermediate);
    });
    layer.down.multiply(gated_.data(), x_.data(), tokens_.num_tokens, true, num_threads_);
    adapt(layer, 3, layer.down, gated_, x_);
  }

  // Adds the adapters of the tokens to the outputs of a matrix, of which each layer has four.
  void adapt(const Layer& layer, int64_t which, const Matrix& matrix, const std::vector<float>& x,
             std::vector<float>& out) {
    if (!tokens_.adapters) return;
    const LoraLayer* lora = tokens_.lora + (&layer - net_.layers) * 4 + which;
    add_lora(tokens_.adapters, lora, net_.num_layers * 4, x.data(), out.data(), tokens_.num_tokens, matrix.size,
             matrix.width, num_threads_);
  }

  const Network& net_;
  const Tokens& tokens_;
  const int num_threads_;
  std::vector<float> x_, normal_, qkv_, attended_, gate_up_, gated_;
};

// The index of the largest number, the first of equals; -1 if it is not finite or if there is a NaN.
inline int64_t argmax(const float* logits, int64_t size) {
  Floats high = Floats{} - INFINITY;
  auto is_nan = high != high;
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats x = load(logits + i);
    high = x > high ? x : high;
    is_nan |= x != x;
  }
  float highest = -INFINITY;
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) highest = std::max(highest, high[lane]), has_nan |= is_nan[lane] != 0;
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
  std::vector<float> logits(count * width);
  std::vector<int64_t> rows(count), starts(count + 1);
  for (int64_t s = 0; s < count; ++s) rows[s] = tokens.starts[s + 1] - 1, starts[s + 1] = s + 1;
  Pass(net, tokens, num_threads).run(rows.data(), count, logits.data());
  for (int64_t place = 0;; ++place, positions += count, slots += count, found += count) {
    argmax_rows(logits.data(), count, width, found);
    std::replace(found, found + count, int64_t{-1}, int64_t{0});
    if (place + 1 == num_ahead) return;
    const Tokens next{found, positions, slots, starts.data(), tokens.tables, count, count, tokens.table_width};
    Pass(net, next, num_threads).run(nullptr, count, logits.data());
  }
}

}  // namespace flambeau

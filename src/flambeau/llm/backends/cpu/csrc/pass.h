// One forward pass over the tokens of a step: the way through the layers, and what all their parts share.
#pragma once
#include "network.h"
#include "workspace.h"

namespace flambeau {

// The angles of a token [rotary_size / 2], or null: it is not rotated.
struct Turn {
  const float *cos, *sin;
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

class Pass {
 public:
  Pass(const Network& net, const Tokens& tokens, int num_threads)
      : net_(net), tokens_(tokens), num_threads_(num_threads) {
    const int64_t count = tokens.num_tokens;
    int64_t widest_heads = 0, widest_qkv = 0;
    for (int64_t i = 0; i < net.num_layers; ++i) {
      take_widths(net.layers[i]);
      widest_heads = std::max(widest_heads, heads_width_), widest_qkv = std::max(widest_qkv, qkv_width_);
    }
    find_angles();
    Workspace& space = Workspace::of_thread();
    x_ = space.grown(space.x, count * net.hidden), normal_ = space.grown(space.normal, count * net.hidden);
    qkv_ = space.grown(space.qkv, count * widest_qkv), attended_ = space.grown(space.attended, count * widest_heads);
    gate_up_ = space.grown(space.gate_up, count * net.gate_up_width());
    gated_ = space.grown(space.gated, count * net.intermediate);
    const int64_t widest = std::max({net.hidden, net.project_in.size, net.project_out.num_outputs()});
    added_ = space.grown(space.added, count * widest);
    if (net.own_size) {
      own_ = space.grown(space.own, count * net.num_layers * net.own_size);
      own_gates_ = space.grown(space.own_gates, count * net.own_size);
    }
    if (net.num_streams) {
      streams_ = space.grown(space.streams, count * net.num_streams * net.hidden);
      modalities_ = space.grown(space.modalities, count * net.num_streams);
      stream_factors_ = space.grown(space.stream_factors, count * net.num_streams * net.num_streams);
    }
    if (net.attention_gate) attention_gates_ = space.grown(space.attention_gates, count * widest_heads);
    const bool has_both = std::any_of(net.layers, net.layers + net.num_layers, [](const Layer& layer) { return layer.has_both(); });
    if (has_both) beside_ = space.grown(space.beside, count * net.hidden);
    if (net.is_parallel || net.attention_input_scale != 1 || has_both)
      other_normal_ = space.grown(space.other_normal, count * net.hidden);
    const bool has_blocks = std::any_of(net.layers, net.layers + net.num_layers, [](const Layer& layer) { return layer.block; });
    if (has_blocks) {
      embedded_ = space.grown(space.embedded, count * net.hidden);
      widened_ = space.grown(space.widened, count * 2 * net.hidden);
    }
    if (net.gates_attention) gated_qkv_ = space.grown(space.gated_qkv, count * (widest_qkv + widest_heads));
    if (!net.max_experts) return;
    gathered_ = space.grown(space.gathered, count * net.hidden);
    scores_ = space.grown(space.scores, count * net.max_experts);
    weights_ = space.grown(space.weights, count * net.max_experts);
    chosen_ = space.grown(space.chosen, count * net.max_experts);
  }

  // The logits [N, V] of some of the tokens, or of the first ones.
  FLAMBEAU_ONCE void run(const int64_t* rows, int64_t num_rows, float* logits) {
    embed();
    if (net_.own_size) embed_own();
    if (net_.num_streams) spread();
    if (embedded_) std::copy_n(x_, tokens_.num_tokens * net_.hidden, embedded_);
    for (int64_t i = 0; i < net_.num_layers; ++i) {
      record(i);
      if (net_.layers[i].altup) {
        compute_streams(net_.layers[i], *net_.layers[i].altup, i);
        continue;
      }
      compute(net_.layers[i]);
      if (net_.layers[i].input_gate.weights) add_own(net_.layers[i], i);
      scale_output(net_.layers[i].output_scale);
    }
    if (net_.num_streams) merge();
    record(net_.num_layers);
    if (num_rows) find_logits(rows, num_rows, logits);
  }

 private:
  // pass_embeddings.h
  void embed();
  static void read(const void* table, int64_t kind, int64_t at, int64_t size, float* to);
  void embed(int64_t t, int64_t size, float* to);
  void place(int64_t t);
  void embed_own();
  void add_own(const Layer& layer, int64_t number);
  void make_own(const Layer& layer, int64_t number);

  // pass_streams.h
  void spread();
  void merge();
  void take_stream(int64_t s);
  void compute_streams(const Layer& layer, const AltUp& altup, int64_t number);
  void find_modalities(const AltUp& altup);
  void add_laurel(const AltUp& altup, const float* input);

  // pass_attention.h
  void attend(const Layer& layer, const float* input);
  void attend_heads(const Layer& layer);
  void take_gates(const Layer& layer, int64_t t);
  void position(const Layer& layer, int64_t t);
  void normalize_heads(const Layer& layer, float* heads);
  void gate_attention(const Layer& layer);
  void attend_latent(const Layer& layer, const LatentAttention& latent, const float* input);
  void scale_queries(const Layer& layer, float* queries, int64_t width);
  void choose(const Layer& layer, const Indexer& indexer, int64_t rotated, const float* input, const float* query_latents);

  // pass_blocks.h
  const float* with_block(const Layer& layer, const SharedBlock& block);
  void add_product(const Matrix& down, const Matrix& up, const float* input, float* output, int64_t stride);

  // pass_feed_forward.h
  void feed_forward(const Layer& layer, const float* input);
  void make_gated(const Layer& layer, const float* input);
  void mix_beside(const Layer& layer, const Experts& experts, const float* input);
  void mix(const Layer& layer, const Experts& experts, const float* input, const float* of_router);
  void add_shared(const Layer& layer, const Experts& experts, const float* input);
  void mix_channels(const Layer& layer, const Recurrence& mix, const float* input);

  // logits.h
  void find_logits(const int64_t* rows, int64_t num_rows, float* logits);

  // What they share.

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

  // The angles of the step's places, where there are no tables.
  void find_angles() {
    for (int64_t i = 0; i < net_.num_layers; ++i) {
      const Layer& layer = net_.layers[i];
      const auto is_same = [&](const Angles& known) { return known.inverse == layer.inverse; };
      if (!layer.inverse || std::any_of(angles_.begin(), angles_.end(), is_same)) continue;
      const int64_t half = layer.rotary_size / 2, size = tokens_.num_tokens * half;
      Angles& made = angles_.emplace_back(Angles{layer.inverse, std::vector<float>(size), std::vector<float>(size)});
      each_token([&](int64_t t) {
        for (int64_t j = 0; j < half; ++j) {
          const float angle = static_cast<float>(tokens_.positions[t]) * layer.inverse[j];
          made.cos[t * half + j] = std::cos(angle) * layer.cos_factor;
          made.sin[t * half + j] = std::sin(angle) * layer.sin_factor;
        }
      });
    }
  }

  Turn turn_of(const Layer& layer, int64_t t) const {
    const int64_t half = layer.rotary_size / 2, at = tokens_.positions[t] * half;
    if (layer.cos) return {layer.cos + at, layer.sin + at};
    for (const Angles& known : angles_)
      if (known.inverse == layer.inverse) return {known.cos.data() + t * half, known.sin.data() + t * half};
    return {nullptr, nullptr};
  }

  void take_widths(const Layer& layer) {
    heads_width_ = layer.heads * layer.head_size;
    qkv_width_ = heads_width_ + (layer.has_shared_keys ? 0 : 2 * layer.kv_heads * layer.head_size);
  }

  float* stream(int64_t t, int64_t s) { return streams_ + (t * net_.num_streams + s) * net_.hidden; }

  void scale_output(float scale) {
    const int64_t size = net_.hidden;
    if (scale != 1)
      each_token([&](int64_t t) {
        for (int64_t i = t * size; i < (t + 1) * size; ++i) x_[i] *= scale;
      });
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
      return;
    }
    if (layer.attends() || layer.recurrence) {
      const bool is_given = tokens_.attention_input && &layer == net_.layers;
      const float* input = is_given ? tokens_.attention_input : normalized(layer.attention_norm, normal_);
      if (layer.block) input = with_block(layer, *layer.block);
      replace_stream(layer.stream_attention);
      if (layer.attends()) attend(layer, scaled(input, net_.attention_input_scale));
      if (layer.recurrence) recur(layer, *layer.recurrence, input);
      normalized(layer.attention_sum_norm, x_);
    }
    if (layer.feeds_forward()) {
      const float* input = normalized(layer.mlp_norm, normal_);
      replace_stream(layer.stream_mlp);
      feed_forward(layer, input);
    }
    normalized(layer.mlp_sum_norm, x_);
  }

  // x becomes its normalized self, scaled.
  void replace_stream(float scale) {
    if (scale == 0) return;
    const int64_t size = net_.hidden;
    each_token([&](int64_t t) {
      for (int64_t i = t * size; i < (t + 1) * size; ++i) x_[i] = normal_[i] * scale;
    });
  }

  const float* scaled(const float* input, float scale) {
    if (scale == 1) return input;
    const int64_t size = net_.hidden;
    each_token([&](int64_t t) {
      for (int64_t i = t * size; i < (t + 1) * size; ++i) other_normal_[i] = input[i] * scale;
    });
    return other_normal_;
  }

  StepSequences step_sequences() const {
    return {tokens_.starts, tokens_.positions, tokens_.state_slots, tokens_.num_sequences, tokens_.num_tokens,
            tokens_.state_ends};
  }

  void recur(const Layer& layer, const Recurrence& recurrence, const float* input) {
    const StepSequences sequences = step_sequences();
    const float* found = RecurrentPass(recurrence, sequences, num_threads_).run(input);
    add(layer, kNotAdapted, recurrence.out, found, layer.attention_post_norm, recurrence.output_scale);
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
  void add(const Layer& layer, int64_t which, const Matrix& matrix, const float* input, const Norm& post_norm,
           float scale = 1) {
    const bool is_direct = !post_norm && net_.residual_scale * scale == 1 && !tokens_.has_scales;
    float* output = is_direct ? x_ : added_;
    matrix.multiply(input, output, tokens_.num_tokens, is_direct, num_threads_);
    adapt(layer, which, matrix, input, output);
    if (!is_direct) add(post_norm, scale);
  }

  // x += what was computed before, perhaps normalized and scaled.
  void add(const Norm& post_norm, float scale = 1) {
    const int64_t size = net_.hidden;
    const float factor = net_.residual_scale * scale;
    each_token([&](int64_t t) {
      float *x = x_ + t * size, *y = added_ + t * size;
      if (post_norm) post_norm.apply(y, y, size, net_.epsilon);
      for (int64_t i = 0; i < size; ++i) x[i] += y[i] * factor;
    });
  }

  // Heads of queries, and of keys if the layer has its own.
  static int64_t num_rotated(const Layer& layer) { return layer.heads + (layer.has_shared_keys ? 0 : layer.kv_heads); }

  // Calls use(cache) with a pointer to numbers of its type.
  template <typename Use>
  void with_cache(void* cache, const Use& use) const {
    switch (net_.cache_kind) {
      case kBfloat16: return use(static_cast<bfloat*>(cache));
      case kFloat16: return use(static_cast<half*>(cache));
      case kInt8: return use(static_cast<byte*>(cache));
      default: return use(static_cast<float*>(cache));
    }
  }

  // Rows that the last matrix of a part reads.
  void normalize_rows(const Norm& norm, float* rows, int64_t size) {
    if (norm) each_token([&](int64_t t) { norm.apply(rows + t * size, rows + t * size, size, net_.epsilon); });
  }

  // What is between the two matrices of a feed-forward layer.
  template <typename Activate>
  void gate(int64_t num_rows, int64_t size, const Activate& activate) {
    each_row(num_rows, [&](int64_t row) {
      const float* from = gate_up_ + row * (net_.has_gate ? 2 * size : size);
      activate(from, net_.has_gate ? from + size : nullptr, gated_ + row * size, size);
    });
  }

  static void add_row(float* to, float weight, const float* row, int64_t size) {
    for (int64_t i = 0; i < size; ++i) to[i] += weight * row[i];
  }

  int64_t place_of(const Layer& layer) const { return (&layer - net_.layers) * net_.lora_per_layer(); }

  // Applies the adapters of the tokens to the outputs of a matrix of a layer.
  void adapt(const Layer& layer, int64_t which, const Matrix& matrix, const float* input, float* output) {
    if (which == kNotAdapted) return;
    adapt(tokens_.adapters, place_of(layer) + which, matrix, input, output, tokens_.num_tokens);
  }

  void adapt(const int64_t* adapters, int64_t place, const Matrix& matrix, const float* input, float* output,
             int64_t num_rows) {
    if (!tokens_.adapters) return;
    add_lora(adapters, tokens_.lora + place, net_.lora_stride(), input, output, num_rows, matrix.size,
             matrix.num_outputs(), num_threads_);
  }

  // The adapters of some rows, by their tokens.
  template <typename TokenOf>
  void adapters_of(int64_t num_rows, const TokenOf& token_of) {
    row_adapters_.resize(num_rows);
    for (int64_t i = 0; i < num_rows; ++i) row_adapters_[i] = tokens_.adapters[token_of(i)];
  }

  const Network& net_;
  const Tokens& tokens_;
  const int num_threads_;
  int64_t heads_width_ = 0, qkv_width_ = 0;  // of the layer that attends
  float *x_, *normal_, *other_normal_ = nullptr, *qkv_, *gated_qkv_ = nullptr, *attended_, *gate_up_, *gated_, *added_;
  float *streams_ = nullptr, *modalities_ = nullptr, *stream_factors_ = nullptr;
  float *embedded_ = nullptr, *widened_ = nullptr;  // with shared blocks: [T, E], [T, 2 E]
  float *own_ = nullptr, *own_gates_ = nullptr, *attention_gates_ = nullptr, *beside_ = nullptr;
  float *gathered_ = nullptr, *scores_ = nullptr, *weights_ = nullptr;  // of layers with experts
  int64_t* chosen_ = nullptr;
  struct Angles {
    const float* inverse;
    std::vector<float> cos, sin;  // [T, rotary_size / 2]
  };
  std::vector<Angles> angles_;
  std::vector<int64_t> row_adapters_;  // of rows that are not those of the step
};

}  // namespace flambeau

// A whole step of a decoder in one call, one layer after the other.
//
// Shapes: T tokens of the step, E hidden, H heads, G key-value heads, D head size, F intermediate, V vocabulary.
#pragma once
#include <cstdint>
#include <vector>

#include "activations.h"
#include "altup.h"
#include "experts.h"
#include "latent_attention.h"
#include "lora.h"
#include "matrix.h"
#include "norms.h"
#include "paged_attention.h"
#include "recurrent.h"

namespace flambeau {

enum LoraPlace : int64_t {
  kNotAdapted = -1,
  kLoraQkv,
  kLoraOut,
  kLoraGateUp,
  kLoraDown,
  kLoraQueryDown,
  kLoraLatent,
  kLoraRouter,
  kLoraSharedGate,
  kLoraExperts
};

struct Layer {
  Norm attention_norm, mlp_norm;            // before them
  Norm attention_post_norm, mlp_post_norm;  // after them
  Norm qk_norm;                             // [H + G, D]: of each head of queries and keys, or of all at once
  const float *cos, *sin;  // [places, rotary_size / 2], or null: see `inverse`
  Matrix qkv, out, gate_up, down;
  const Experts* experts;  // in the place of gate_up and down, or null
  void *keys, *values;
  int64_t window;
  const float* sinks;  // of attention [H], or null
  const Recurrence* recurrence = nullptr;  // in the place of attention, or beside it
  const LatentAttention* latent = nullptr;  // attention to latents: in the place of qkv
  int64_t chunk = 0;                        // of attention
  const float* query_scales = nullptr;      // [places]: what queries are multiplied with, or null
  Norm attention_sum_norm{}, mlp_sum_norm{};  // of x, after they were added
  Xielu xielu{};                              // of the feed-forward layer, if that is its activation
  int64_t heads = 0, kv_heads = 0, head_size = 0, rotary_size = 0;
  int64_t has_shared_keys = 0;  // the cache is that of another layer, and qkv makes queries only
  Norm value_norm{};            // [D]: of each head of values
  Matrix attention_gate{};      // of what attention gives, a layer of its own; its kind is that of Network
  Matrix input_gate{}, input_projection{};  // around the layer's own embeddings
  Norm input_norm{};
  float output_scale = 1, attention_scale = 1;
  // Of experts beside a feed-forward layer: of its output, of their sum, of their input and of the router's.
  Norm dense_norm{}, sparse_norm{}, expert_norm{}, router_norm{};
  float stream_attention = 0, stream_mlp = 0;  // of x, which is the input of a part; 0: x stays as it is
  Norm attention_inner_norm{}, mlp_inner_norm{};  // before the last matrix of each
  const AltUp* altup = nullptr;  // x is one of several streams; or null
  int64_t cuts_gates = 0;        // of the feed-forward layer: those below a threshold become zero
  float gate_threshold = 0;
  float cos_factor = 1, sin_factor = 1;
  const float* inverse = nullptr;  // [rotary_size / 2], of positions without a table: angles per place; null: not rotated

  // A layer may have only some of the parts.
  bool attends() const { return qkv.weights || latent; }
  bool feeds_forward() const { return experts || gate_up.weights; }
  bool has_both() const { return experts && gate_up.weights; }
};

enum GateKind : int64_t { kNoGate, kGate, kSoftplusGate, kHeadGate, kSoftplusHeadGate };

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
  int64_t gates_attention = 0;  // each head of queries is followed by a gate of what attention gives
  float attention_input_scale = 1, attention_output_scale = 1, gate_scale = 1, mlp_output_scale = 1;
  Matrix project_in{}, project_out{};  // from embeddings of another size to the hidden size, and back; or no weights
  int64_t attention_gate = 0;  // a GateKind
  // Embeddings that each layer has of its own: [own_vocab, num_layers, own_size], and what is computed from the others.
  const void* own_embedding = nullptr;
  int64_t own_kind = 0, own_size = 0, own_vocab = 0;
  Matrix own_projection{};
  Norm own_norm{};
  float own_scale = 1, own_projection_scale = 1;
  Matrix own_rows{};  // [own_vocab, num_layers * own_size] of integers, if own_embedding is null
  // Streams of hidden states, of which layers compute one; 0: there is one. The others have matrices [S - 1].
  int64_t num_streams = 0, active_stream = 0;
  const Matrix *stream_projections = nullptr, *stream_unembeddings = nullptr;

  int64_t gate_up_width() const { return has_gate ? 2 * intermediate : intermediate; }

  // What an adapter may change: of each layer qkv, out, gate_up, down, of latent attention query_down and latent, with
  // query_up in the place of qkv, the router, the gate of the shared expert and gate_up and down of each expert; then
  // the head.
  int64_t lora_per_layer() const { return kLoraExperts + 2 * max_experts; }
  int64_t lora_stride() const { return num_layers * lora_per_layer() + 1; }
};

struct Tokens {
  const int64_t *ids, *positions, *slots, *starts, *tables;  // [T] three times, [S + 1], [S, table_width]
  int64_t num_tokens, num_sequences, table_width;
  const int64_t* adapters = nullptr;  // [T], or none has one
  const LoraLayer* lora = nullptr;  // [adapters, lora_stride]: see Network
  int64_t has_scales = 0;           // whether an adapter scales outputs, which are then not added to others directly
  float* states = nullptr;  // [T, M, E], or nobody reads them
  const float* hidden = nullptr;  // [T, E]: the input of the first layer, or null: embeddings of the ids
  const float* attention_input = nullptr;  // of the first layer [T, inputs of qkv], or null: its normalized input
  const int64_t* state_slots = nullptr;  // [S]: where the states of sequences are, or there are none
  const int64_t* state_ends = nullptr;   // [T]: where the state after each token goes, or null: see StepSequences
};

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

// The buffers of a thread's steps; they keep their memory from one step to the next.
struct Workspace {
  std::vector<float> x, normal, other_normal, own, beside, own_gates, attention_gates, qkv, gated_qkv, attended, queries, latents, keys, values, gate_up, gated, added, gathered, scores, weights, logits;
  std::vector<float> streams, modalities, stream_factors, laurel;
  std::vector<float> index_queries, index_keys, index_weights;
  std::vector<int64_t> chosen;
  std::vector<int32_t> places;

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
    if (net.gates_attention) gated_qkv_ = space.grown(space.gated_qkv, count * (widest_qkv + widest_heads));
    if (!net.max_experts) return;
    gathered_ = space.grown(space.gathered, count * net.hidden);
    scores_ = space.grown(space.scores, count * net.max_experts);
    weights_ = space.grown(space.weights, count * net.max_experts);
    chosen_ = space.grown(space.chosen, count * net.max_experts);
  }

  // The logits [N, V] of some of the tokens.
  FLAMBEAU_ONCE void run(const int64_t* rows, int64_t num_rows, float* logits) {
    embed();
    if (net_.own_size) embed_own();
    if (net_.num_streams) spread();
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
    if (!num_rows) return;
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

  void embed() {
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

  // Some numbers of a table, in float32.
  static void read(const void* table, int64_t kind, int64_t at, int64_t size, float* to) {
    if (kind == kBfloat16)
      widen(static_cast<const bfloat*>(table) + at, to, size);
    else if (kind == kFloat16)
      widen(static_cast<const half*>(table) + at, to, size);
    else
      std::copy_n(static_cast<const float*>(table) + at, size, to);
  }

  // The embeddings that each layer has of its own [T, L, P].
  void embed_own() {
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
  void add_own(const Layer& layer, int64_t number) {
    make_own(layer, number);
    add(layer.input_norm);
  }

  void make_own(const Layer& layer, int64_t number) {
    const int64_t size = net_.own_size;
    layer.input_gate.multiply(x_, own_gates_, tokens_.num_tokens, false, num_threads_);
    each_token([&](int64_t t) {
      float* row = own_gates_ + t * size;
      activate(net_.activation, row, own_ + (t * net_.num_layers + number) * size, row, size);
    });
    layer.input_projection.multiply(own_gates_, added_, tokens_.num_tokens, false, num_threads_);
  }

  float* stream(int64_t t, int64_t s) { return streams_ + (t * net_.num_streams + s) * net_.hidden; }

  // The streams [T, S, E]: x, and what is computed from it, as large as it.
  void spread() {
    const int64_t size = net_.hidden;
    for (int64_t s = 0; s < net_.num_streams; ++s) {
      if (s) net_.stream_projections[s - 1].multiply(x_, added_, tokens_.num_tokens, false, num_threads_);
      each_token([&](int64_t t) {
        const float *x = x_ + t * size, *from = s ? added_ + t * size : x;
        const float factor = s ? factor_to_size_of(x, from, size) : 1;
        for (int64_t i = 0; i < size; ++i) stream(t, s)[i] = from[i] * factor;
      });
    }
  }

  // x becomes the mean of all streams, which are made as large as the first.
  void merge() {
    const int64_t size = net_.hidden;
    take_stream(0);
    for (int64_t s = 1; s < net_.num_streams; ++s) {
      each_token([&](int64_t t) { std::copy_n(stream(t, s), size, normal_ + t * size); });
      net_.stream_unembeddings[s - 1].multiply(normal_, added_, tokens_.num_tokens, false, num_threads_);
      each_token([&](int64_t t) {
        const float* from = added_ + t * size;
        const float factor = factor_to_size_of(stream(t, 0), from, size);
        for (int64_t i = 0; i < size; ++i) x_[t * size + i] += from[i] * factor;
      });
    }
    scale_output(1.0f / static_cast<float>(net_.num_streams));
  }

  void take_stream(int64_t s) {
    each_token([&](int64_t t) { std::copy_n(stream(t, s), net_.hidden, x_ + t * net_.hidden); });
  }

  // Numbers of x [T, S] that streams are predicted and corrected by.
  void find_modalities(const AltUp& altup) {
    const int64_t size = net_.hidden;
    each_token([&](int64_t t) {
      float* row = normal_ + t * size;
      altup.router_norm.apply(x_ + t * size, row, size, net_.epsilon);
      for (int64_t i = 0; i < size; ++i) row[i] /= static_cast<float>(size);
    });
    altup.router.multiply(normal_, modalities_, tokens_.num_tokens, false, num_threads_);
    for (int64_t i = 0; i < tokens_.num_tokens * net_.num_streams; ++i) modalities_[i] = std::tanh(modalities_[i]);
  }

  // A layer that computes one of the streams, by which it changes the others.
  void compute_streams(const Layer& layer, const AltUp& altup, int64_t number) {
    const int64_t size = net_.hidden, streams = net_.num_streams, count = tokens_.num_tokens;
    take_stream(net_.active_stream);
    find_modalities(altup);
    altup.prediction.multiply(modalities_, stream_factors_, count, false, num_threads_);
    each_token([&](int64_t t) {
      predict_streams(stream(t, 0), stream_factors_ + t * streams * streams, streams, size);
    });
    take_stream(net_.active_stream);
    const float* input = normalized(layer.attention_norm, normal_);
    add_laurel(altup, input);
    attend(layer, input);
    scale_output(0.70710678f);
    feed_forward(layer, normalized(layer.mlp_norm, normal_));
    find_modalities(altup);
    altup.correction.multiply(modalities_, stream_factors_, count, false, num_threads_);
    each_token([&](int64_t t) {
      float* error = x_ + t * size;
      for (int64_t i = 0; i < size; ++i) error[i] -= stream(t, net_.active_stream)[i];
      for (int64_t s = 0; s < streams; ++s) add_row(stream(t, s), stream_factors_[t * streams + s] + 1, error, size);
    });
    take_stream(net_.active_stream);
    if (altup.output_scale)
      each_token([&](int64_t t) {
        for (int64_t i = 0; i < size; ++i) x_[t * size + i] *= altup.output_scale[i];
      });
    make_own(layer, number);
    each_token([&](int64_t t) {
      float* row = added_ + t * size;
      layer.input_norm.apply(row, row, size, net_.epsilon);
      for (int64_t s = 1; s < streams; ++s) add_row(stream(t, s), 1, row, size);
    });
  }

  // x += the input of attention, and what two small matrices make of it.
  void add_laurel(const AltUp& altup, const float* input) {
    const int64_t size = net_.hidden, count = tokens_.num_tokens;
    Workspace& space = Workspace::of_thread();
    float* middle = space.grown(space.laurel, count * altup.laurel_left.num_outputs());
    altup.laurel_left.multiply(input, middle, count, false, num_threads_);
    altup.laurel_right.multiply(middle, added_, count, false, num_threads_);
    each_token([&](int64_t t) { add_row(x_ + t * size, 1, input + t * size, size); });
    add(altup.laurel_norm);
  }

  void scale_output(float scale) {
    const int64_t size = net_.hidden;
    if (scale != 1)
      each_token([&](int64_t t) {
        for (int64_t i = t * size; i < (t + 1) * size; ++i) x_[i] *= scale;
      });
  }

  void embed(int64_t t, int64_t size, float* to) {
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
  void place(int64_t t) {
    if (tokens_.hidden) return;
    const int64_t size = net_.hidden;
    float* to = x_ + t * size;
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
      return;
    }
    if (layer.attends() || layer.recurrence) {
      const bool is_given = tokens_.attention_input && &layer == net_.layers;
      const float* input = is_given ? tokens_.attention_input : normalized(layer.attention_norm, normal_);
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

  void recur(const Layer& layer, const Recurrence& recurrence, const float* input) {
    const StepSequences sequences{tokens_.starts, tokens_.positions, tokens_.state_slots, tokens_.num_sequences,
                                  tokens_.num_tokens, tokens_.state_ends};
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

  void normalize_heads(const Layer& layer, float* heads) {
    const Norm& norm = layer.qk_norm;
    const int64_t size = layer.head_size, queries = layer.heads * size, all = num_rotated(layer) * size;
    if (net_.wide_qk_norm) {
      norm.apply(heads, heads, queries, net_.epsilon);
      norm.apply(heads + queries, heads + queries, all - queries, net_.epsilon, queries);
    } else {
      for (int64_t at = 0; at < all; at += size) norm.apply(heads + at, heads + at, size, net_.epsilon, at);
    }
  }

  // Heads of queries, and of keys if the layer has its own.
  static int64_t num_rotated(const Layer& layer) { return layer.heads + (layer.has_shared_keys ? 0 : layer.kv_heads); }

  // What queries, keys and values are before attention.
  void position(const Layer& layer, int64_t t) {
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

  // Queries that grow with the position.
  void scale_queries(const Layer& layer, float* queries, int64_t width) {
    each_token([&](int64_t t) {
      const float scale = layer.query_scales[tokens_.positions[t]];
      for (int64_t i = t * width; i < (t + 1) * width; ++i) queries[i] *= scale;
    });
  }

  // Stores the keys of an indexer, and the places that this layer and those without an indexer attend to.
  void choose(const Layer& layer, const Indexer& indexer, int64_t rotated, const float* input, const float* query_latents) {
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

  void attend_latent(const Layer& layer, const LatentAttention& latent, const float* input) {
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

  // A factor for each number that attention gives, or for each head.
  void gate_attention(const Layer& layer) {
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

  void attend(const Layer& layer, const float* input) {
    take_widths(layer);
    if (layer.attention_gate.weights)
      layer.attention_gate.multiply(input, attention_gates_, tokens_.num_tokens, false, num_threads_);
    if (layer.latent) return attend_latent(layer, *layer.latent, input);
    multiply(layer, kLoraQkv, layer.qkv, input, net_.gates_attention ? gated_qkv_ : qkv_);
    each_token([&](int64_t t) {
      if (net_.gates_attention) take_gates(layer, t);
      position(layer, t);
    });
    const float *k = layer.has_shared_keys ? nullptr : qkv_ + heads_width_;
    const float *v = layer.has_shared_keys ? nullptr : k + layer.kv_heads * layer.head_size;
    const PagedStep<void> step{
        qkv_, k, v, layer.keys, layer.values, attended_, qkv_width_, qkv_width_,
        qkv_width_, tokens_.positions, tokens_.slots, tokens_.starts, tokens_.tables, tokens_.num_tokens,
        tokens_.num_sequences, layer.heads, layer.kv_heads, net_.block_size, tokens_.table_width, layer.window,
        layer.attention_scale, net_.softcap, layer.sinks, net_.biases, net_.num_places, layer.chunk};
    attend_paged(step, net_.cache_kind, layer.head_size, num_threads_);
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

  // Divides heads of queries and gates that follow each other; leaves the gates' factors at the start of the row.
  void take_gates(const Layer& layer, int64_t t) {
    const int64_t size = layer.head_size;
    float *from = gated_qkv_ + t * (qkv_width_ + heads_width_), *to = qkv_ + t * qkv_width_;
    for (int64_t h = 0; h < layer.heads; ++h) {
      std::copy_n(from + 2 * h * size, size, to + h * size);
      for (int64_t i = 0; i < size; ++i) from[h * size + i] = logistic(from[(2 * h + 1) * size + i]);
    }
    std::copy_n(from + 2 * heads_width_, qkv_width_ - heads_width_, to + heads_width_);
  }

  void feed_forward(const Layer& layer, const float* input) {
    if (layer.has_both()) return mix_beside(layer, *layer.experts, input);
    if (layer.experts) {
      mix(layer, *layer.experts, input, input);
      return add(layer.mlp_post_norm);
    }
    make_gated(layer, input);
    add(layer, kLoraDown, layer.down, gated_, layer.mlp_post_norm, net_.mlp_output_scale);
  }

  // The input of the last matrix of a feed-forward layer.
  void make_gated(const Layer& layer, const float* input) {
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
        activate(gate, up, out, size, [&](float x) { return xielu(x, layer.xielu); });
      else
        activate(net_.activation, gate, up, out, size);
    });
    normalize_rows(layer.mlp_inner_norm, gated_, layer.down.size);
  }

  // Rows that the last matrix of a part reads.
  void normalize_rows(const Norm& norm, float* rows, int64_t size) {
    if (norm) each_token([&](int64_t t) { norm.apply(rows + t * size, rows + t * size, size, net_.epsilon); });
  }

  // A feed-forward layer and experts, which read x itself, each with norms of their own.
  void mix_beside(const Layer& layer, const Experts& experts, const float* input) {
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

  // What is between the two matrices of a feed-forward layer.
  template <typename Activate>
  void gate(int64_t num_rows, int64_t size, const Activate& activate) {
    each_row(num_rows, [&](int64_t row) {
      const float* from = gate_up_ + row * (net_.has_gate ? 2 * size : size);
      activate(from, net_.has_gate ? from + size : nullptr, gated_ + row * size, size);
    });
  }

  // A token's experts are added up in the order of their numbers, whatever other tokens there are.
  void mix(const Layer& layer, const Experts& experts, const float* input, const float* of_router) {
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
          activate(experts.activation, gate, up, out, width);
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
  void add_shared(const Layer& layer, const Experts& experts, const float* input) {
    const bool is_gated = experts.shared_gate.weights != nullptr;
    multiply(layer, kLoraGateUp, experts.shared_gate_up, input, gate_up_);
    gate(tokens_.num_tokens, experts.shared_down.size, [&](const float* gate, const float* up, float* out, int64_t width) {
      activate(experts.activation, gate, up, out, width);
    });
    multiply(layer, kLoraDown, experts.shared_down, gated_, gathered_);
    if (is_gated) multiply(layer, kLoraSharedGate, experts.shared_gate, input, scores_);
    const int64_t size = net_.hidden;
    each_token([&](int64_t t) {
      add_row(added_ + t * size, is_gated ? sigmoid(scores_[t]) : 1.0f, gathered_ + t * size, size);
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

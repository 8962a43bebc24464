// A decoder and the tokens of a step, as bindings.py fills them.
//
// Shapes: T tokens of the step, E hidden, H heads, G key-value heads, D head size, F intermediate, V vocabulary.
#pragma once
#include <cstdint>

#include "activations.h"
#include "altup.h"
#include "experts.h"
#include "head_matrices.h"
#include "latent_attention.h"
#include "lora.h"
#include "matrix.h"
#include "norms.h"
#include "paged_attention.h"
#include "recurrent.h"
#include "shared_block.h"

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
  const Recurrence* channel_mix = nullptr;  // in the place of a feed-forward layer (RWKV), or null
  const SharedBlock* block = nullptr;       // whose output the recurrence reads beside x, or null
  float mlp_limit = 0;  // of activated gates of the feed-forward layer or the shared expert, and what they gate; 0: none

  // A layer may have only some of the parts.
  bool attends() const { return qkv.weights || latent; }
  bool feeds_forward() const { return experts || gate_up.weights || channel_mix; }
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
  Matrix head_layer{};  // between the last norm and the head, with this activation and another norm; or no weights
  Norm head_layer_norm{};
  int64_t head_activation = 0;

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

}  // namespace flambeau

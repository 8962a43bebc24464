// Recurrent layers: short convolutions, Mamba 1 and 2, gated delta nets, delta nets whose channels decay, lightning
// attention, gated linear recurrences (RG-LRU), and the two parts of RWKV 4. A sequence has a state instead of keys and
// values.
//
// Tokens are computed one after the other: a sequence gets the same bits in any batch, and in any chunks of its prompt.
// What is computed does not depend on other sequences, and a state is read and written in its slot.
//
// Shapes: T tokens of the step, S sequences, C channels of the convolution, W its width, I inner channels, H heads,
// P head size, N state size, G groups of heads (of a delta net: heads of keys, which have the size N).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "activations.h"
#include "head_matrices.h"
#include "matrix.h"
#include "norms.h"
#include "threads.h"
#include "vectors.h"

namespace flambeau {

enum RecurrentKind : int64_t {
  kShortConvolution,
  kMamba,
  kMamba2,
  kDeltaNet,
  kKimiDelta,
  kLightning,
  kGated,
  kTimeMix,
  kChannelMix
};

struct Recurrence {
  int64_t kind, channels, width, inner, heads, head_size, state_size, groups;
  int64_t rank;         // Mamba 1: of time steps
  int64_t is_grouped;   // delta net: the rows of `in` and `beta` are grouped by key head, with those of the gate and time
  int64_t norm_groups;  // of the norm of outputs
  int64_t gates_first;  // the gate is before the norm
  Matrix in, out;
  Matrix gate, beta, time;  // delta net; `time` of Mamba 1: from the rank to the channels
  Matrix parameters;        // Mamba 1: time steps, B and C
  const float *conv_weight, *conv_bias;  // [W, C], [C] or null
  const float* time_bias;                // [H]; of channels that decay [H, N]
  const float* decay;                    // [H]; Mamba 1: [I, N]. Negative: a factor of time steps
  const float* skip;                     // [H]; Mamba 1: [I]
  Norm norm;                             // of outputs [I], or there is none
  Norm time_norm, b_norm, c_norm;        // Mamba 1, or there are none
  const float* part_scales;              // of the outputs of `in`, or null
  float epsilon;                         // of all these norms
  float time_low, time_high, max_beta, input_scale, output_scale;
  float *windows, *states;  // [slots, C, W - 1]; [slots, H, P, N], [slots, I, N], or [slots, H, N, P] of a delta net
  Matrix gate_up, time_up;  // of channels that decay: `gate` and `time` may be narrow projections before these
  float lowest_log_decay;   // the same: of a token; 0: there is no limit
  float query_scale;        // lightning attention; its `decay` is what is left after a token [H], and inputs are grouped
  int64_t activates, half;  // by head, or not. Its inputs are activated; so many pairs of a query and a key are rotated,
  const float *cos, *sin;   // by [places, half]. Norms of these are `b_norm` and `c_norm`.
  // Gated linear recurrence: matrices of H blocks of channels make gates of inputs and of decays, whose biases are
  // `input_bias` and `time_bias` [I]; `decay` [I] is a factor of the latter. `gate` is activated.
  const Matrix *input_gates, *decay_gates;
  const float* input_bias;
  int64_t activation;
  float* begun;  // [slots]: 1 if a sequence has a state
  // RWKV: shares [E] of a token in its mixtures with the one before, which `windows` [slots, E] has. Of time mixing,
  // `in`, `beta` and `gate` make keys, values and receptances; `decay` [I] is subtracted from the logarithm of the factor
  // of a mean, whose numerator is in `states` [slots, I]; `skip` [I] is for the token itself. Of channel mixing, `gate`
  // makes receptances.
  const float *key_share, *value_share, *receptance_share;
  float *denominators, *log_factors;  // [slots, I]
};

// The sequences of a step. One whose first token is in this step has no state yet.
struct StepSequences {
  const int64_t *starts, *positions, *slots;  // [S + 1], [T], [S]
  int64_t num_sequences, num_tokens;
  const int64_t* ends;  // [T]: the slot of the state after each token; null: that after the last one, to `slots`

  bool is_new(int64_t s) const { return positions[starts[s]] == 0; }
};

// log(1 + exp(x)), by log(1 + z) = 2 artanh(z / (2 + z)): a loop of it is vectors, unlike one of std::log1p.
inline float softplus(float x) {
  const float z = exponential(-std::min(std::fabs(x), 87.0f)), s = z / (2.0f + z), square = s * s;
  float series = 1.0f / 15;
  for (float factor : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 0.2f, 1.0f / 3, 1.0f}) series = series * square + factor;
  return std::max(x, 0.0f) + 2.0f * s * series;
}

inline float logistic(float x) { return 1.0f / (1.0f + exponential(std::min(std::max(-x, -87.0f), 87.0f))); }

inline float decay_of(float log_decay) { return exponential(std::max(log_decay, -87.0f)); }

// 1 - exp(x) for x up to 0, by a series where it is small.
inline float rest_of(float x) {
  const float series = -x * (1.0f + x * (0.5f + x * (0.16666667f + x * 0.041666668f)));
  return x > -0.05f ? series : 1.0f - decay_of(x);
}

// The buffers of a thread's steps.
struct RecurrentSpace {
  std::vector<float> scaled, projected, gates, betas, times, mixed, parameters, inner_times, convolved, outputs;

  static RecurrentSpace& of_thread() {
    static thread_local RecurrentSpace space;
    return space;
  }

  static float* grown(std::vector<float>& buffer, int64_t size) {
    if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
    return buffer.data();
  }
};

// h ← decay · h + scale · x bᵀ; y = h c, for some rows of h [rows, N]. The sums of four rows have the bits of single ones.
template <int rows>
inline void advance_rows(float* state, const float* x, float scale, float decay, const float* b, const float* c,
                         int64_t size, float* y) {
  Floats sums[rows] = {};
  const int64_t whole = size / kLanes * kLanes;
  float added[rows];
  for (int p = 0; p < rows; ++p) added[p] = x[p] * scale;
  for (int64_t n = 0; n < whole; n += kLanes) {
    const Floats key = load(b + n), query = load(c + n);
    for (int p = 0; p < rows; ++p) {
      float* at = state + p * size + n;
      const Floats h = load(at) * decay + added[p] * key;
      write(h, at);
      sums[p] += h * query;
    }
  }
  float totals[rows];
  if constexpr (rows == 4) {
    const Quarter four = sums_of(sums);
    std::memcpy(totals, &four, sizeof four);
  } else {
    for (int p = 0; p < rows; ++p) totals[p] = sum(sums[p]);
  }
  for (int p = 0; p < rows; ++p) {
    for (int64_t n = whole; n < size; ++n) {
      float& h = state[p * size + n];
      h = h * decay + added[p] * b[n];
      totals[p] += h * c[n];
    }
    y[p] = totals[p];
  }
}

// The same for a channel of Mamba 1, whose numbers have decays of their own. Returns y.
inline float advance_channel(float* state, float x, float time, const float* decay, const float* b, const float* c,
                             int64_t size) {
  Floats sums{};
  const int64_t whole = size / kLanes * kLanes;
  const float added = time * x;
  for (int64_t n = 0; n < whole; n += kLanes) {
    alignas(64) float left[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) left[lane] = decay_of(time * decay[n + lane]);
    const Floats h = load(state + n) * load(left) + added * load(b + n);
    write(h, state + n);
    sums += h * load(c + n);
  }
  float total = sum(sums);
  for (int64_t n = whole; n < size; ++n) {
    state[n] = state[n] * decay_of(time * decay[n]) + added * b[n];
    total += state[n] * c[n];
  }
  return total;
}

// h ← decay · h; h ← h + k (beta · (v − hᵀk))ᵀ; y = hᵀq, for neighboring columns of h [N, P]. Each row may have a decay.
template <int parts, bool by_channel>
inline void advance_columns(float* state, int64_t stride, const float* q, const float* k, const float* v,
                            const float* decay, float beta, int64_t size, float* y) {
  Floats found[parts] = {}, total[parts] = {};
  for (int64_t n = 0; n < size; ++n)
    for (int i = 0; i < parts; ++i) {
      float* at = state + n * stride + i * kLanes;
      const Floats h = load(at) * decay[by_channel ? n : 0];
      write(h, at);
      found[i] += h * k[n];
    }
  for (int i = 0; i < parts; ++i) found[i] = (load(v + i * kLanes) - found[i]) * beta;
  for (int64_t n = 0; n < size; ++n)
    for (int i = 0; i < parts; ++i) {
      float* at = state + n * stride + i * kLanes;
      const Floats h = load(at) + found[i] * k[n];
      write(h, at);
      total[i] += h * q[n];
    }
  for (int i = 0; i < parts; ++i) write(total[i], y + i * kLanes);
}

template <bool by_channel>
inline void advance_column(float* state, int64_t stride, const float* q, const float* k, float v, const float* decay,
                           float beta, int64_t size, float* y) {
  float found = 0, total = 0;
  for (int64_t n = 0; n < size; ++n) found += (state[n * stride] *= decay[by_channel ? n : 0]) * k[n];
  const float added = (v - found) * beta;
  for (int64_t n = 0; n < size; ++n) total += (state[n * stride] += added * k[n]) * q[n];
  *y = total;
}

// What one layer computes for the tokens of a step.
class RecurrentPass {
 public:
  RecurrentPass(const Recurrence& layer, const StepSequences& sequences, int num_threads)
      : layer_(layer), sequences_(sequences), num_threads_(num_threads), space_(RecurrentSpace::of_thread()) {}

  // The inputs [T, I] of the layer's last matrix, for inputs [T, size of `in`].
  FLAMBEAU_ONCE const float* run(const float* input) {
    if (layer_.input_scale != 1) input = scaled(input);
    switch (layer_.kind) {
      case kShortConvolution: return short_convolution(input);
      case kMamba: return mamba(input);
      case kMamba2: return mamba_2(input);
      case kDeltaNet: return delta_net<false>(input);
      case kLightning: return lightning(input);
      case kGated: return gated(input);
      case kTimeMix: return time_mix(input);
      case kChannelMix: return channel_mix(input);
      default: return delta_net<true>(input);
    }
  }

  // After channel mixing: factors [T, E] of what the last matrix gives.
  const float* receptances() const { return space_.gates.data(); }

 private:
  static constexpr int64_t kChannelsPerTask = 256, kRowsPerTurn = 16, kColumnsPerTask = 64;

  float* room(std::vector<float>& buffer, int64_t width) {
    return RecurrentSpace::grown(buffer, sequences_.num_tokens * width);
  }

  template <typename Work>
  void each_token(const Work& work) {
    const int64_t group = 4, count = sequences_.num_tokens;
    Threads::of_process().share((count + group - 1) / group, num_threads_, [&](int64_t task) {
      for (int64_t t = task * group; t < std::min(count, (task + 1) * group); ++t) work(t);
    });
  }

  // Calls work(sequence, part) for some parts of every sequence.
  template <typename Work>
  void each_part(int64_t num_parts, const Work& work) {
    Threads::of_process().share(sequences_.num_sequences * num_parts, num_threads_,
                                [&](int64_t task) { work(task / num_parts, task % num_parts); });
  }

  const float* scaled(const float* input) {
    const int64_t size = layer_.in.size;
    float* out = room(space_.scaled, size);
    each_token([&](int64_t t) {
      for (int64_t i = t * size; i < (t + 1) * size; ++i) out[i] = input[i] * layer_.input_scale;
    });
    return out;
  }

  float* multiply(const Matrix& matrix, const float* input, std::vector<float>& buffer) {
    float* out = room(buffer, matrix.num_outputs());
    matrix.multiply(input, out, sequences_.num_tokens, false, num_threads_);
    return out;
  }

  int64_t state_size() const {
    if (layer_.kind == kGated) return layer_.inner;
    return layer_.kind == kMamba ? layer_.inner * layer_.state_size : layer_.heads * layer_.head_size * layer_.state_size;
  }

  // Where a sequence's state is; zeros if it is new.
  float* state(int64_t s, int64_t at, int64_t count) {
    float* found = layer_.states + sequences_.slots[s] * state_size() + at;
    if (sequences_.is_new(s)) std::fill_n(found, count, 0.0f);
    return found;
  }

  // The part of a state that token t changes: where it is, or a copy in the token's own slot. It may be some columns of
  // several rows, which are `stride` apart.
  float* next_state(float* h, int64_t t, int64_t at, int64_t count, int64_t rows = 1, int64_t stride = 0) {
    if (!sequences_.ends) return h;
    float* own = layer_.states + sequences_.ends[t] * state_size() + at;
    if (own != h)
      for (int64_t n = 0; n < rows; ++n) std::copy_n(h + n * stride, count, own + n * stride);
    return own;
  }

  // A causal convolution of each channel of x, whose rows are `stride` apart; keeps the inputs that the next token needs.
  float* convolve(const float* x, int64_t stride, bool activates) {
    const int64_t size = layer_.channels, num_parts = (size + kChannelsPerTask - 1) / kChannelsPerTask;
    float* out = room(space_.convolved, size);
    each_part(num_parts, [&](int64_t s, int64_t part) {
      const int64_t first = part * kChannelsPerTask, count = std::min(kChannelsPerTask, size - first);
      convolve(s, first, count, x + first, stride, out + first, activates);
    });
    return out;
  }

  void convolve(int64_t s, int64_t first, int64_t count, const float* x, int64_t stride, float* out, bool activates) {
    const int64_t before = layer_.width - 1, size = layer_.channels;
    const int64_t start = sequences_.starts[s], num_tokens = sequences_.starts[s + 1] - start;
    const auto slot = [&](int64_t number) {  // [channels, W - 1]
      return layer_.windows + (number * size + first) * before;
    };
    const float* kept = slot(sequences_.slots[s]);
    static thread_local std::vector<float> window;
    if (static_cast<int64_t>(window.size()) < before * kChannelsPerTask) window.resize(before * kChannelsPerTask);
    const bool is_new = sequences_.is_new(s);
    for (int64_t w = 0; w < before; ++w)
      for (int64_t c = 0; c < count; ++c) window[w * count + c] = is_new ? 0.0f : kept[c * before + w];
    // The inputs of a token of the step, or of one before it.
    const auto row = [&](int64_t place) {
      return place < 0 ? window.data() + (before + place) * count : x + (start + place) * stride;
    };
    for (int64_t place = 0; place < num_tokens; ++place) {
      float* __restrict to = out + (start + place) * size;
      std::fill_n(to, count, 0.0f);
      for (int64_t w = 0; w <= before; ++w) {
        const float *from = row(place - before + w), *weight = layer_.conv_weight + w * size + first;
        for (int64_t c = 0; c < count; ++c) to[c] += from[c] * weight[c];
      }
      if (layer_.conv_bias)
        for (int64_t c = 0; c < count; ++c) to[c] += layer_.conv_bias[first + c];
      if (activates)
        for (int64_t c = 0; c < count; ++c) to[c] = silu(to[c]);
    }
    for (int64_t end = sequences_.ends ? 1 : num_tokens; end <= num_tokens; ++end) {
      float* to = slot(sequences_.ends ? sequences_.ends[start + end - 1] : sequences_.slots[s]);
      for (int64_t w = 0; w < before; ++w) {
        const float* from = row(end - before + w);
        for (int64_t c = 0; c < count; ++c) to[c * before + w] = from[c];
      }
    }
  }

  // y [T, I] with its gate and its norm, in place.
  void gate_and_normalize(float* y, const float* gates, int64_t stride) {
    const int64_t size = layer_.inner, part = size / layer_.norm_groups;
    const bool is_logistic = layer_.kind == kKimiDelta || layer_.kind == kLightning;
    each_token([&](int64_t t) {
      float* row = y + t * size;
      const float* gate = gates + t * stride;
      if (!layer_.norm || layer_.gates_first)
        for (int64_t i = 0; i < size; ++i) row[i] *= silu(gate[i]);
      if (!layer_.norm) return;
      for (int64_t at = 0; at < size; at += part) layer_.norm.apply(row + at, row + at, part, layer_.epsilon, at);
      if (!layer_.gates_first)
        for (int64_t i = 0; i < size; ++i) row[i] *= is_logistic ? logistic(gate[i]) : silu(gate[i]);
    });
  }

  const float* short_convolution(const float* input) {
    const int64_t size = layer_.inner;
    float* parts = multiply(layer_.in, input, space_.projected);  // the gates before and after, then x
    each_token([&](int64_t t) {
      float* row = parts + t * 3 * size;
      for (int64_t i = 0; i < size; ++i) row[i] *= row[2 * size + i];
    });
    float* y = convolve(parts, 3 * size, false);
    each_token([&](int64_t t) {
      const float* gate = parts + t * 3 * size + size;
      for (int64_t i = 0; i < size; ++i) y[t * size + i] *= gate[i];
    });
    return y;
  }

  const float* mamba_2(const float* input) {
    const int64_t inner = layer_.inner, size = layer_.state_size, width = layer_.in.num_outputs(), channels = layer_.channels;
    float* parts = multiply(layer_.in, input, space_.projected);  // the gate, what is convolved, time steps
    if (layer_.part_scales)
      each_token([&](int64_t t) {
        for (int64_t i = 0; i < width; ++i) parts[t * width + i] *= layer_.part_scales[i];
      });
    const float* mixed = convolve(parts + inner, width, true);
    float* y = room(space_.outputs, inner);
    each_part(layer_.heads, [&](int64_t s, int64_t head) {
      const int64_t rows = layer_.head_size, start = sequences_.starts[s], stop = sequences_.starts[s + 1];
      const int64_t group = head / (layer_.heads / layer_.groups), at = head * rows;
      float* h = state(s, at * size, rows * size);
      static thread_local std::vector<float> times, decays;
      times.resize(stop - start), decays.resize(stop - start);
      for (int64_t t = start; t < stop; ++t) {
        const float time = softplus(parts[t * width + inner + channels + head] + layer_.time_bias[head]);
        times[t - start] = std::min(std::max(time, layer_.time_low), layer_.time_high);
        decays[t - start] = decay_of(times[t - start] * layer_.decay[head]);
      }
      // Some rows for all tokens, then the next: they stay in the nearest cache.
      for (int64_t first = 0; first < rows; first += kRowsPerTurn) {
        const int64_t last = std::min(rows, first + kRowsPerTurn);
        float* part = h + first * size;
        for (int64_t t = start; t < stop; ++t) {
          part = next_state(part, t, (at + first) * size, (last - first) * size);
          const float *x = mixed + t * channels + at, *b = mixed + t * channels + inner + group * size;
          const float *c = b + layer_.groups * size, time = times[t - start], decay = decays[t - start];
          float* to = y + t * inner + at;
          int64_t p = first;
          float* row = part;
          for (; p + 4 <= last; p += 4, row += 4 * size) advance_rows<4>(row, x + p, time, decay, b, c, size, to + p);
          for (; p < last; ++p, row += size) advance_rows<1>(row, x + p, time, decay, b, c, size, to + p);
          for (p = first; p < last; ++p) to[p] += x[p] * layer_.skip[head];
        }
      }
    });
    gate_and_normalize(y, parts, width);
    return y;
  }

  // Queries, keys and values of a token of lightning attention, in place.
  void position(float* row, int64_t place) {
    const int64_t size = layer_.state_size, half = layer_.half;
    const int64_t apart = layer_.is_grouped ? 3 * size : size, keys = layer_.is_grouped ? size : layer_.inner;
    if (layer_.activates)
      for (int64_t i = 0; i < 3 * layer_.inner; ++i) row[i] = silu(row[i]);
    for (int64_t head = 0; head < layer_.heads; ++head)
      for (int64_t which = 0; which < 2; ++which) {
        float* at = row + head * apart + which * keys;
        const Norm& norm = which ? layer_.c_norm : layer_.b_norm;
        if (norm) norm.apply(at, at, size, layer_.epsilon);
        for (int64_t i = 0; i < half; ++i) {
          const float cos = layer_.cos[place * half + i], sin = layer_.sin[place * half + i];
          const float first = at[i], second = at[half + i];
          at[i] = first * cos - second * sin;
          at[half + i] = second * cos + first * sin;
        }
        if (!which)
          for (int64_t i = 0; i < size; ++i) at[i] *= layer_.query_scale;
      }
  }

  const float* lightning(const float* input) {
    const int64_t inner = layer_.inner, size = layer_.state_size, rows = layer_.head_size, width = 3 * inner;
    const int64_t apart = layer_.is_grouped ? 3 * size : size, part = layer_.is_grouped ? size : inner;
    float* parts = multiply(layer_.in, input, space_.projected);
    const float* gates = multiply(layer_.gate, input, space_.gates);
    each_token([&](int64_t t) { position(parts + t * width, sequences_.positions[t]); });
    float* y = room(space_.outputs, inner);
    each_part(layer_.heads, [&](int64_t s, int64_t head) {
      const float decay = layer_.decay[head];
      float* h = state(s, head * rows * size, rows * size);
      for (int64_t first = 0; first < rows; first += kRowsPerTurn) {
        const int64_t last = std::min(rows, first + kRowsPerTurn);
        float* kept = h + first * size;
        for (int64_t t = sequences_.starts[s]; t < sequences_.starts[s + 1]; ++t) {
          kept = next_state(kept, t, (head * rows + first) * size, (last - first) * size);
          const float *q = parts + t * width + head * apart, *k = q + part, *v = k + part;
          float *to = y + t * inner + head * rows, *row = kept;
          int64_t p = first;
          for (; p + 4 <= last; p += 4, row += 4 * size) advance_rows<4>(row, v + p, 1.0f, decay, k, q, size, to + p);
          for (; p < last; ++p, row += size) advance_rows<1>(row, v + p, 1.0f, decay, k, q, size, to + p);
        }
      }
    });
    gate_and_normalize(y, gates, inner);
    return y;
  }

  const float* mamba(const float* input) {
    const int64_t inner = layer_.inner, size = layer_.state_size, rank = layer_.rank, width = rank + 2 * size;
    const float* parts = multiply(layer_.in, input, space_.projected);  // what is convolved, the gate
    const float* mixed = convolve(parts, 2 * inner, true);
    float* parameters = multiply(layer_.parameters, mixed, space_.parameters);  // time steps, B, C
    float* times = room(space_.inner_times, rank);
    each_token([&](int64_t t) {
      float* row = parameters + t * width;
      std::copy_n(row, rank, times + t * rank);
      if (layer_.time_norm) layer_.time_norm.apply(row, times + t * rank, rank, layer_.epsilon);
      if (layer_.b_norm) layer_.b_norm.apply(row + rank, row + rank, size, layer_.epsilon);
      if (layer_.c_norm) layer_.c_norm.apply(row + rank + size, row + rank + size, size, layer_.epsilon);
    });
    float* steps = multiply(layer_.time, times, space_.times);
    each_token([&](int64_t t) {
      for (int64_t i = t * inner; i < (t + 1) * inner; ++i) steps[i] = softplus(steps[i]);
    });
    float* y = room(space_.outputs, inner);
    const int64_t channels = kRowsPerTurn;  // of a task: their states stay in the nearest cache
    each_part((inner + channels - 1) / channels, [&](int64_t s, int64_t part) {
      const int64_t first = part * channels, last = std::min(inner, first + channels);
      float* h = state(s, first * size, (last - first) * size);
      for (int64_t t = sequences_.starts[s]; t < sequences_.starts[s + 1]; ++t) {
        h = next_state(h, t, first * size, (last - first) * size);
        const float *b = parameters + t * width + rank, *c = b + size;
        for (int64_t i = first; i < last; ++i) {
          const float x = mixed[t * inner + i], time = steps[t * inner + i];
          const float found = advance_channel(h + (i - first) * size, x, time, layer_.decay + i * size, b, c, size);
          y[t * inner + i] = found + x * layer_.skip[i];
        }
      }
    });
    gate_and_normalize(y, parts + inner, 2 * inner);
    return y;
  }

  const float* gated(const float* input) {
    const int64_t inner = layer_.inner, size = layer_.head_size, count = sequences_.num_tokens;
    const float* mixed = convolve(multiply(layer_.in, input, space_.projected), inner, false);
    float *added = room(space_.betas, inner), *decays = room(space_.times, inner), *y = room(space_.outputs, inner);
    multiply_heads(layer_.input_gates, layer_.heads, mixed, inner, size, added, inner, size, count, num_threads_);
    multiply_heads(layer_.decay_gates, layer_.heads, mixed, inner, size, decays, inner, size, count, num_threads_);
    const float* gates = multiply(layer_.gate, input, space_.gates);
    each_token([&](int64_t t) {
      for (int64_t i = 0, at = t * inner; i < inner; ++i, ++at) {
        added[at] = mixed[at] * logistic(added[at] + layer_.input_bias[i]);
        decays[at] = logistic(decays[at] + layer_.time_bias[i]) * layer_.decay[i];  // logarithms
      }
    });
    each_part((inner + kChannelsPerTask - 1) / kChannelsPerTask, [&](int64_t s, int64_t part) {
      const int64_t first = part * kChannelsPerTask, channels = std::min(kChannelsPerTask, inner - first);
      float* h = state(s, first, channels);
      for (int64_t t = sequences_.starts[s]; t < sequences_.starts[s + 1]; ++t) {
        h = next_state(h, t, first, channels);
        const bool is_first = sequences_.is_new(s) && t == sequences_.starts[s];  // which is added as it is
        const float *x = added + t * inner + first, *log_decay = decays + t * inner + first;
        for (int64_t i = 0; i < channels; ++i) {
          const float share = is_first ? 1.0f : std::sqrt(rest_of(2.0f * log_decay[i]));
          h[i] = h[i] * decay_of(log_decay[i]) + x[i] * share;
        }
        std::copy_n(h, channels, y + t * inner + first);
      }
    });
    for (int64_t s = 0; s < sequences_.num_sequences; ++s) {
      if (!sequences_.ends) layer_.begun[sequences_.slots[s]] = 1.0f;
      for (int64_t t = sequences_.starts[s]; sequences_.ends && t < sequences_.starts[s + 1]; ++t)
        layer_.begun[sequences_.ends[t]] = 1.0f;
    }
    each_token([&](int64_t t) {
      activate(layer_.activation, gates + t * inner, y + t * inner, y + t * inner, inner);
    });
    return y;
  }

  // The token before each one [T, E]; keeps the last one of each sequence.
  const float* earlier(const float* input) {
    const int64_t size = layer_.in.size;
    float* out = room(space_.mixed, size);
    each_part(1, [&](int64_t s, int64_t) {
      const int64_t start = sequences_.starts[s], stop = sequences_.starts[s + 1];
      float* kept = layer_.windows + sequences_.slots[s] * size;
      if (sequences_.is_new(s))
        std::fill_n(out + start * size, size, 0.0f);
      else
        std::copy_n(kept, size, out + start * size);
      std::copy_n(input + start * size, (stop - start - 1) * size, out + (start + 1) * size);
      if (!sequences_.ends) std::copy_n(input + (stop - 1) * size, size, kept);
      for (int64_t t = start; sequences_.ends && t < stop; ++t)
        std::copy_n(input + t * size, size, layer_.windows + sequences_.ends[t] * size);
    });
    return out;
  }

  // The product of a matrix and mixtures of tokens with those before them.
  float* multiply_mixed(const Matrix& matrix, const float* input, const float* before, const float* share,
                        std::vector<float>& buffer) {
    const int64_t size = layer_.in.size;
    float* mixtures = room(space_.parameters, size);
    each_token([&](int64_t t) {
      for (int64_t i = 0, at = t * size; i < size; ++i, ++at)
        mixtures[at] = input[at] * share[i] + before[at] * (1.0f - share[i]);
    });
    return multiply(matrix, mixtures, buffer);
  }

  const float* time_mix(const float* input) {
    const int64_t inner = layer_.inner;
    const float* before = earlier(input);
    const float* keys = multiply_mixed(layer_.in, input, before, layer_.key_share, space_.projected);
    const float* values = multiply_mixed(layer_.beta, input, before, layer_.value_share, space_.betas);
    const float* gates = multiply_mixed(layer_.gate, input, before, layer_.receptance_share, space_.gates);
    float* y = room(space_.outputs, inner);
    each_part((inner + kChannelsPerTask - 1) / kChannelsPerTask, [&](int64_t s, int64_t part) {
      const int64_t first = part * kChannelsPerTask, channels = std::min(kChannelsPerTask, inner - first);
      Mean mean(layer_, first, channels);
      mean.read(sequences_.slots[s], sequences_.is_new(s));
      for (int64_t t = sequences_.starts[s]; t < sequences_.starts[s + 1]; ++t) {
        const int64_t at = t * inner + first;
        mean.advance(keys + at, values + at, gates + at, y + at);
        if (sequences_.ends) mean.write(sequences_.ends[t]);
      }
      if (!sequences_.ends) mean.write(sequences_.slots[s]);
    });
    return y;
  }

  // The state of time mixing, of some channels: a mean whose numerator and denominator share a factor.
  struct Mean {
    static constexpr float kLowest = -1e38f;  // a logarithm of nothing

    Mean(const Recurrence& layer, int64_t first, int64_t count) : layer(layer), first(first), count(count) {}

    void read(int64_t slot, bool is_new) {
      const int64_t at = slot * layer.inner + first;
      for (int64_t i = 0; i < count; ++i) {
        top[i] = is_new ? 0.0f : layer.states[at + i];
        bottom[i] = is_new ? 0.0f : layer.denominators[at + i];
        log_factor[i] = bottom[i] == 0 ? kLowest : layer.log_factors[at + i];
      }
    }

    void write(int64_t slot) const {
      const int64_t at = slot * layer.inner + first;
      std::copy_n(top, count, layer.states + at);
      std::copy_n(bottom, count, layer.denominators + at);
      std::copy_n(log_factor, count, layer.log_factors + at);
    }

    // Adds a token; what is before it and the token itself make y.
    void advance(const float* keys, const float* values, const float* receptances, float* y) {
      const float *decay = layer.decay + first, *bonus = layer.skip + first;
      for (int64_t i = 0; i < count; ++i) {
        const float now = keys[i] + bonus[i], highest = std::max(log_factor[i], now);
        const float own = decay_of(log_factor[i] - highest), other = decay_of(now - highest);
        y[i] = logistic(receptances[i]) * (top[i] * own + values[i] * other) / (bottom[i] * own + other);
        const float left = log_factor[i] - decay[i], next = std::max(left, keys[i]);
        const float kept = decay_of(left - next), added = decay_of(keys[i] - next);
        top[i] = top[i] * kept + values[i] * added, bottom[i] = bottom[i] * kept + added, log_factor[i] = next;
      }
    }

    const Recurrence& layer;
    const int64_t first, count;
    float top[kChannelsPerTask], bottom[kChannelsPerTask], log_factor[kChannelsPerTask];
  };

  const float* channel_mix(const float* input) {
    const int64_t width = layer_.in.num_outputs(), size = layer_.gate.num_outputs();
    const float* before = earlier(input);
    float* gates = multiply_mixed(layer_.gate, input, before, layer_.receptance_share, space_.gates);
    float* up = multiply_mixed(layer_.in, input, before, layer_.key_share, space_.projected);
    each_token([&](int64_t t) {
      for (int64_t i = t * size; i < (t + 1) * size; ++i) gates[i] = logistic(gates[i]);
      activate(kReluSquared, up + t * width, nullptr, up + t * width, width);
    });
    return up;
  }

  // The parts of a delta net's projections [T, …]; rows may be grouped by key head.
  struct DeltaParts {
    float *mixed, *gates, *betas, *times;
  };

  DeltaParts project(const float* input) {
    const int64_t inner = layer_.inner, heads = layer_.heads, groups = layer_.groups, size = layer_.state_size;
    if (!layer_.is_grouped)
      return {multiply(layer_.in, input, space_.mixed), widened(layer_.gate, layer_.gate_up, input, space_.gates),
              multiply(layer_.beta, input, space_.betas), widened(layer_.time, layer_.time_up, input, space_.times)};
    const float* rows = multiply(layer_.in, input, space_.projected);      // [G]: a query, a key, values, their gates
    const float* pairs = multiply(layer_.beta, input, space_.parameters);  // [G]: betas, time steps
    const DeltaParts parts{room(space_.mixed, layer_.channels), room(space_.gates, inner), room(space_.betas, heads),
                           room(space_.times, heads)};
    const int64_t shared = heads / groups, values = shared * layer_.head_size;
    each_token([&](int64_t t) {
      for (int64_t g = 0; g < groups; ++g) {
        const float *row = rows + t * layer_.in.num_outputs() + g * 2 * (size + values), *pair = pairs + (t * groups + g) * 2 * shared;
        float* to = parts.mixed + t * layer_.channels;
        std::copy_n(row, size, to + g * size);
        std::copy_n(row + size, size, to + (groups + g) * size);
        std::copy_n(row + 2 * size, values, to + 2 * groups * size + g * values);
        std::copy_n(row + 2 * size + values, values, parts.gates + t * inner + g * values);
        std::copy_n(pair, shared, parts.betas + t * heads + g * shared);
        std::copy_n(pair + shared, shared, parts.times + t * heads + g * shared);
      }
    });
    return parts;
  }

  // The outputs of one matrix, or of two with few numbers between them.
  float* widened(const Matrix& down, const Matrix& up, const float* input, std::vector<float>& buffer) {
    if (!up.weights) return multiply(down, input, buffer);
    return multiply(up, multiply(down, input, space_.projected), buffer);
  }

  // From the outputs of a projection to the decays of a token: of heads, or of their channels.
  template <bool by_channel>
  void to_decays(float* time) {
    const int64_t each = by_channel ? layer_.state_size : 1;
    for (int64_t head = 0; head < layer_.heads; ++head)
      for (int64_t n = head * each; n < (head + 1) * each; ++n) {
        const float x = time[n] + layer_.time_bias[n], rate = layer_.decay[head];
        const float limit = layer_.lowest_log_decay;
        time[n] = decay_of(limit < 0 ? limit * logistic(-rate * x) : softplus(x) * rate);
      }
  }

  template <bool by_channel>
  const float* delta_net(const float* input) {
    const int64_t inner = layer_.inner, heads = layer_.heads, size = layer_.state_size, width = layer_.head_size;
    const int64_t keys = layer_.groups * size, channels = layer_.channels, shared = heads / layer_.groups;
    const int64_t decays = by_channel ? size : 1;  // of a head
    const DeltaParts parts = project(input);
    float* mixed = convolve(parts.mixed, channels, true);
    each_token([&](int64_t t) {
      float* row = mixed + t * channels;
      for (int64_t at = 0; at < 2 * keys; at += size) {  // vectors of length 1; queries are scaled like scores
        const float length = sum_of(row + at, size, [](float number) { return number * number; });
        const float factor = 1.0f / std::sqrt(length + 1e-6f) / (at < keys ? std::sqrt(static_cast<float>(size)) : 1.0f);
        for (int64_t i = 0; i < size; ++i) row[at + i] *= factor;
      }
      float* beta = parts.betas + t * heads;
      for (int64_t n = 0; n < heads; ++n) beta[n] = logistic(beta[n]) * layer_.max_beta;
      to_decays<by_channel>(parts.times + t * heads * decays);
    });
    float* y = room(space_.outputs, inner);
    each_part(heads, [&](int64_t s, int64_t head) {
      float* h = state(s, head * size * width, size * width);
      for (int64_t first = 0; first < width; first += kColumnsPerTask) {  // which stay in the nearest cache
        const int64_t last = std::min(width, first + kColumnsPerTask);
        float* part = h + first;
        for (int64_t t = sequences_.starts[s]; t < sequences_.starts[s + 1]; ++t) {
          part = next_state(part, t, head * size * width + first, last - first, size, width);
          const float *row = mixed + t * channels, *q = row + head / shared * size, *k = q + keys;
          const float *v = row + 2 * keys + head * width, *decay = parts.times + (t * heads + head) * decays;
          const float beta = parts.betas[t * heads + head];
          float* to = y + t * inner + head * width;
          int64_t at = first;
          if (at + 4 * kLanes <= last) {
            advance_columns<4, by_channel>(part + at - first, width, q, k, v + at, decay, beta, size, to + at);
            at += 4 * kLanes;
          }
          for (; at + kLanes <= last; at += kLanes)
            advance_columns<1, by_channel>(part + at - first, width, q, k, v + at, decay, beta, size, to + at);
          for (; at < last; ++at)
            advance_column<by_channel>(part + at - first, width, q, k, v[at], decay, beta, size, to + at);
        }
      }
    });
    gate_and_normalize(y, parts.gates, inner);
    return y;
  }

  const Recurrence& layer_;
  const StepSequences& sequences_;
  const int num_threads_;
  RecurrentSpace& space_;
};

}  // namespace flambeau

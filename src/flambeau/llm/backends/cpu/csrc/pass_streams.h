// Several streams of hidden states, of which layers compute one (Gemma 3n).
#pragma once
#include "pass.h"

namespace flambeau {

// The streams [T, S, E]: x, and what is computed from it, as large as it.
inline void Pass::spread() {
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
inline void Pass::merge() {
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

inline void Pass::take_stream(int64_t s) {
  each_token([&](int64_t t) { std::copy_n(stream(t, s), net_.hidden, x_ + t * net_.hidden); });
}

// A layer that computes one of the streams, by which it changes the others.
inline void Pass::compute_streams(const Layer& layer, const AltUp& altup, int64_t number) {
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

// Numbers of x [T, S] that streams are predicted and corrected by.
inline void Pass::find_modalities(const AltUp& altup) {
  const int64_t size = net_.hidden;
  each_token([&](int64_t t) {
    float* row = normal_ + t * size;
    altup.router_norm.apply(x_ + t * size, row, size, net_.epsilon);
    for (int64_t i = 0; i < size; ++i) row[i] /= static_cast<float>(size);
  });
  altup.router.multiply(normal_, modalities_, tokens_.num_tokens, false, num_threads_);
  for (int64_t i = 0; i < tokens_.num_tokens * net_.num_streams; ++i) modalities_[i] = std::tanh(modalities_[i]);
}

// x += the input of attention, and what two small matrices make of it.
inline void Pass::add_laurel(const AltUp& altup, const float* input) {
  const int64_t size = net_.hidden, count = tokens_.num_tokens;
  Workspace& space = Workspace::of_thread();
  float* middle = space.grown(space.laurel, count * altup.laurel_left.num_outputs());
  altup.laurel_left.multiply(input, middle, count, false, num_threads_);
  altup.laurel_right.multiply(middle, added_, count, false, num_threads_);
  each_token([&](int64_t t) { add_row(x_ + t * size, 1, input + t * size, size); });
  add(altup.laurel_norm);
}

}  // namespace flambeau

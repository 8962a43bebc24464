// Blocks of attention that recurrent layers share (Zamba 2).
#pragma once
#include "pass.h"

namespace flambeau {

// The input of a layer's recurrence: x, which stays as it is, and what a shared block makes of it.
inline const float* Pass::with_block(const Layer& layer, const SharedBlock& block) {
  const int64_t size = net_.hidden, count = tokens_.num_tokens, heads = layer.heads * layer.head_size;
  each_token([&](int64_t t) {
    float* row = widened_ + t * 2 * size;
    std::copy_n(x_ + t * size, size, row);
    std::copy_n(embedded_ + t * size, size, row + size);
    block.input_norm.apply(row, row, 2 * size, net_.epsilon);
  });
  take_widths(layer);
  block.qkv.multiply(widened_, qkv_, count, false, num_threads_);
  add_product(block.query_down, block.query_up, widened_, qkv_, qkv_width_);
  add_product(block.key_down, block.key_up, widened_, qkv_ + heads, qkv_width_);
  add_product(block.value_down, block.value_up, widened_, qkv_ + heads + layer.kv_heads * layer.head_size, qkv_width_);
  each_token([&](int64_t t) { position(layer, t); });
  attend_heads(layer);
  block.out.multiply(attended_, added_, count, false, num_threads_);
  each_token([&](int64_t t) { block.mlp_norm.apply(added_ + t * size, normal_ + t * size, size, net_.epsilon); });
  block.gate_up.multiply(normal_, gate_up_, count, false, num_threads_);
  add_product(block.gate_down, block.gate_widen, normal_, gate_up_, block.gate_up.num_outputs());
  gate(count, block.down.size, [&](const float* gate, const float* up, float* out, int64_t width) {
    activate(net_.activation, gate, up, out, width);
  });
  block.down.multiply(gated_, added_, count, false, num_threads_);
  block.projection.multiply(added_, normal_, count, false, num_threads_);
  each_token([&](int64_t t) {
    float* row = normal_ + t * size;
    add_row(row, 1, x_ + t * size, size);
    layer.attention_norm.apply(row, row, size, net_.epsilon);
  });
  return normal_;
}

// Adds a product with two small matrices to some outputs, whose rows are `stride` apart.
inline void Pass::add_product(const Matrix& down, const Matrix& up, const float* input, float* output, int64_t stride) {
  if (!down.weights) return;
  Workspace& space = Workspace::of_thread();
  const int64_t count = tokens_.num_tokens, width = up.num_outputs();
  float *middle = space.grown(space.products, count * (down.num_outputs() + width)), *found = middle + count * down.num_outputs();
  down.multiply(input, middle, count, false, num_threads_);
  up.multiply(middle, found, count, false, num_threads_);
  each_token([&](int64_t t) { add_row(output + t * stride, 1, found + t * width, width); });
}

}  // namespace flambeau

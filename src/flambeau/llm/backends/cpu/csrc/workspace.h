// The buffers of a step.
#pragma once
#include <cstdint>
#include <vector>

namespace flambeau {

// The buffers of a thread's steps; they keep their memory from one step to the next.
struct Workspace {
  std::vector<float> x, normal, other_normal, own, beside, own_gates, attention_gates, qkv, gated_qkv, attended, queries, latents, keys, values, gate_up, gated, added, gathered, scores, weights, logits;
  std::vector<float> streams, modalities, stream_factors, laurel;
  std::vector<float> embedded, widened, products;
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

}  // namespace flambeau

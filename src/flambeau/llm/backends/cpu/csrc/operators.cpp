// The functions that Python calls; bindings.py declares the structures once more.
//
// No torch headers: this builds in seconds, and one library works with every version of torch.
#include "network.h"

extern "C" {

// Returns false if there is no kernel for this head size.
bool flambeau_attend(const flambeau::PagedStep<float>* step, int64_t head_size, int num_threads) {
  return flambeau::attend_paged(*step, head_size, num_threads);
}

bool flambeau_attend_bfloat16(const flambeau::PagedStep<flambeau::bfloat>* step, int64_t head_size, int num_threads) {
  return flambeau::attend_paged(*step, head_size, num_threads);
}

// The logits [N, V] of some tokens of a step, or of all of them if rows is null.
void flambeau_step(const flambeau::Network* network, const flambeau::Tokens* tokens, const int64_t* rows,
                   int64_t num_rows, float* logits, int num_threads) {
  flambeau::Pass(*network, *tokens, num_threads).run(rows, num_rows, logits);
}

// The same, but only the most likely token of each; -1 if the logits are not finite.
void flambeau_argmax(const flambeau::Network* network, const flambeau::Tokens* tokens, const int64_t* rows,
                     int64_t num_rows, int64_t* found, int num_threads) {
  std::vector<float> logits(num_rows * network->head.width);
  flambeau::Pass(*network, *tokens, num_threads).run(rows, num_rows, logits.data());
  flambeau::argmax_rows(logits.data(), num_rows, network->head.width, found);
}

// Several greedy steps: see argmax_steps in network.h.
void flambeau_argmax_steps(const flambeau::Network* network, const flambeau::Tokens* tokens, const int64_t* positions,
                           const int64_t* slots, int64_t num_ahead, int64_t* found, int num_threads) {
  flambeau::argmax_steps(*network, *tokens, positions, slots, num_ahead, found, num_threads);
}
}

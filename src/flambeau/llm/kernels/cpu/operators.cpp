// What Python calls; the structures are spelled out once more in kernels/binding.py.
//
// No header of torch is needed: this builds in seconds, and one library serves every version of torch.
#include "network.h"

extern "C" {

// False: there is no kernel for heads of this size.
bool flambeau_attend(const flambeau::PagedStep<float>* step, int64_t head_size, int num_threads) {
  return flambeau::attend_paged(*step, head_size, num_threads);
}

bool flambeau_attend_bfloat16(const flambeau::PagedStep<flambeau::bfloat>* step, int64_t head_size, int num_threads) {
  return flambeau::attend_paged(*step, head_size, num_threads);
}

// The logits [N, V] of some of the tokens of a step, or of all of them where rows is null.
void flambeau_step(const flambeau::Network* network, const flambeau::Tokens* tokens, const int64_t* rows,
                   int64_t num_rows, float* logits, int num_threads) {
  flambeau::Pass(*network, *tokens, num_threads).run(rows, num_rows, logits);
}

// The same, but only the likeliest token of each; -1 where the logits are no numbers.
void flambeau_choose(const flambeau::Network* network, const flambeau::Tokens* tokens, const int64_t* rows,
                     int64_t num_rows, int64_t* found, int num_threads) {
  std::vector<float> logits(num_rows * network->head.width);
  flambeau::Pass(*network, *tokens, num_threads).run(rows, num_rows, logits.data());
  flambeau::choose(logits.data(), num_rows, network->head.width, found);
}

// Several steps in a row, each with the likeliest tokens of the one before: see go_ahead.
void flambeau_go_ahead(const flambeau::Network* network, const flambeau::Tokens* tokens, const int64_t* positions,
                       const int64_t* slots, int64_t num_ahead, int64_t* found, int num_threads) {
  flambeau::go_ahead(*network, *tokens, positions, slots, num_ahead, found, num_threads);
}
}

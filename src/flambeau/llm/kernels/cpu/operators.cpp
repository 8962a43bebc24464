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
}

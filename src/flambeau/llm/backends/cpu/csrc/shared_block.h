// Blocks of attention and a feed-forward layer that several layers share, with small changes of each (Zamba 2).
//
// Shapes: E hidden.
#pragma once
#include <cstdint>

#include "matrix.h"
#include "norms.h"

namespace flambeau {

// A block as one layer sees it. It reads hidden states beside embeddings [2 E].
struct SharedBlock {
  Norm input_norm, mlp_norm;
  Matrix qkv, out, gate_up, down;
  // Products of two small matrices that are added to queries, keys, values and the outputs of `gate_up`, or no weights.
  Matrix query_down, query_up, key_down, key_up, value_down, value_up, gate_down, gate_widen;
  Matrix projection;  // of what the block gives, which is added to the input of the layer's recurrence
};

}  // namespace flambeau

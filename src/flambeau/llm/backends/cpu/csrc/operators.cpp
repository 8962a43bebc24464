// The functions that Python calls; bindings.py declares the structures once more.
//
// No torch headers: this builds in seconds, and one library works with every version of torch.
#include "logits.h"
#include "pack.h"
#include "self_test.h"

extern "C" {

// The kinds of the cache are those of matrix.h.
void flambeau_attend(const flambeau::PagedStep<void>* step, int64_t kind, int64_t head_size, int num_threads) {
  flambeau::attend_paged(*step, kind, head_size, num_threads);
}

// out [M, N] = x [M, K] times the weights.
void flambeau_multiply(const flambeau::Matrix* matrix, const float* x, float* out, int64_t num_rows, int num_threads) {
  matrix->multiply(x, out, num_rows, false, num_threads);
}

// Rounds weights [width, size] of a floating-point kind to panels of kind int8 or int4.
void flambeau_quantize(const void* weights, int64_t weights_kind, int64_t kind, int64_t width, int64_t size,
                       int64_t group, uint32_t* panels, int num_threads) {
  const auto quantize = [&](const auto* numbers) {
    if (kind == flambeau::kInt8)
      flambeau::quantize_rows<8>(numbers, width, size, group, panels, num_threads);
    else
      flambeau::quantize_rows<4>(numbers, width, size, group, panels, num_threads);
  };
  switch (weights_kind) {
    case flambeau::kBfloat16: return quantize(static_cast<const flambeau::bfloat*>(weights));
    case flambeau::kFloat16: return quantize(static_cast<const flambeau::half*>(weights));
    default: return quantize(static_cast<const float*>(weights));
  }
}

// The smallest floating-point kind that represents all numbers exactly.
int64_t flambeau_narrowest(const float* numbers, int64_t count, int num_threads) {
  return flambeau::narrowest(numbers, count, num_threads);
}

// Puts weights [width, size] into panels of a floating-point kind that represents them exactly. They are float32, or of
// that kind, with two bytes each.
void flambeau_pack(const void* weights, int64_t weight_bytes, int64_t kind, int64_t width, int64_t size,
                   uint32_t* panels, int num_threads) {
  flambeau::pack(weights, weight_bytes, static_cast<flambeau::Kind>(kind), width, size, panels, num_threads);
}

// Puts fp8 weights [width, size] with scales [width, size / group] into panels of zeros, which represent them exactly.
void flambeau_pack_fp8(const uint8_t* weights, const float* scales, int64_t kind, int64_t width, int64_t size,
                       int64_t group, uint32_t* panels, int num_threads) {
  const auto pack = kind == flambeau::kFp8    ? flambeau::pack_fp8
                    : kind == flambeau::kFp4  ? flambeau::pack_fp4<flambeau::Bfloat16>
                                              : flambeau::pack_fp4<flambeau::Float32>;
  pack(weights, scales, width, size, group, panels, num_threads);
}

// Puts pairs of codes [width, size / 2] with scales [width, size / group] into panels of zeros; kCodes have a table.
void flambeau_pack_codes(const uint8_t* pairs, const float* scales, const float* table, int64_t kind, int64_t width,
                         int64_t size, int64_t group, uint32_t* panels, int num_threads) {
  const auto pack = kind == flambeau::kFp4 ? flambeau::pack_pairs<flambeau::Bfloat16> : flambeau::pack_pairs<flambeau::Float32>;
  pack(pairs, scales, kind == flambeau::kCodes ? table : nullptr, width, size, group, panels, num_threads);
}

// Whether 4 bits represent all numbers of fp8.
bool flambeau_fits_fp4(const uint8_t* numbers, int64_t count, int num_threads) {
  return flambeau::fits_fp4(numbers, count, num_threads);
}

// Puts levels [width, size] of an integer kind into panels, with the scales and minimums (or null) [width, groups] of
// their groups.
void flambeau_pack_levels(const uint8_t* levels, const float* scales, const float* minimums, int64_t kind, int64_t width,
                          int64_t size, int64_t group, uint32_t* panels, int num_threads) {
  flambeau::with_integers(kind, [&](auto bits, auto has_minimums) {
    flambeau::pack_integers<bits.value, has_minimums.value>(levels, scales, minimums, width, size, group, panels,
                                                            num_threads);
  });
}

// The weights [N, size] of some outputs of a matrix of integers.
void flambeau_read_rows(const flambeau::Matrix* matrix, const int64_t* rows, int64_t num_rows, float* out) {
  for (int64_t i = 0; i < num_rows; ++i) matrix->read_row(rows[i], out + i * matrix->size);
}

// 0 if the library works on this processor.
int flambeau_self_test() { return flambeau::self_test(); }

// The instructions that multiply small integers, as compiled.
const char* flambeau_instructions() { return flambeau::instructions(); }

// The logits [N, V] of some tokens of a step, or of all of them if rows is null.
void flambeau_step(const flambeau::Network* network, const flambeau::Tokens* tokens, const int64_t* rows,
                   int64_t num_rows, float* logits, int num_threads) {
  flambeau::Pass(*network, *tokens, num_threads).run(rows, num_rows, logits);
}

// The same, but only the most likely token of each; -1 if the logits are not finite.
void flambeau_argmax(const flambeau::Network* network, const flambeau::Tokens* tokens, const int64_t* rows,
                     int64_t num_rows, int64_t* found, int num_threads) {
  flambeau::Workspace& space = flambeau::Workspace::of_thread();
  float* logits = space.grown(space.logits, num_rows * network->head.width);
  flambeau::Pass(*network, *tokens, num_threads).run(rows, num_rows, logits);
  flambeau::argmax_rows(logits, num_rows, network->head.width, found);
}

// Several greedy steps: see argmax_steps in logits.h.
void flambeau_argmax_steps(const flambeau::Network* network, const flambeau::Tokens* tokens, const int64_t* positions,
                           const int64_t* slots, int64_t num_ahead, int64_t* found, int num_threads) {
  flambeau::argmax_steps(*network, *tokens, positions, slots, num_ahead, found, num_threads);
}
}

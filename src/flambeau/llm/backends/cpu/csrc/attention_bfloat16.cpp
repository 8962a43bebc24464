// Attention over a cache of bfloat16; a file of its own is compiled beside the others.
#include "paged_attention.h"

namespace flambeau {

template void attend_paged(const PagedStep<bfloat>&, int64_t, int);

}  // namespace flambeau

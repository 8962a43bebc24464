// Attention over a cache of int8; a file of its own is compiled beside the others.
#include "paged_attention.h"

namespace flambeau {

template void attend_paged(const PagedStep<byte>&, int64_t, int);

}  // namespace flambeau

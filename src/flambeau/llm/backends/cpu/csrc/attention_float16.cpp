// Attention over a cache of float16; a file of its own is compiled beside the others.
#include "paged_attention.h"

namespace flambeau {

template void attend_paged(const PagedStep<half>&, int64_t, int);

}  // namespace flambeau

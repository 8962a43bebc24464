// Attention of one new token of one sequence, from its projections: queries and keys are normalized and rotated, key and
// value are written to the cache.
//
// A cluster of SPLITS blocks has one key-value head and the queries that share it. Each block has some of the places, of
// which it loads the first keys and values before it waits for the projections. Blocks merge their results through each
// other's shared memory.
//
// Defined before this text: NH heads, NKV key-value heads, HD head size, SPLITS, KVBLOCK tokens of a block of the cache,
// WINDOW (0: none), ROTATES, NORMALIZES, NW warps, REHEARSES (there is a first pass without results).
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define GQ (NH / NKV)
#define LPT (HD / 8)       // threads for one place: 16 bytes each
#define TPW (32 / LPT)     // places that a warp reads at once
#define AHEAD (GQ > 4 ? 2 : 4)  // of them that are loaded together: more need too many registers
#define STEP (NW * TPW)
#define PAIRS (HD / 64)    // that a thread rotates
#define NONE -1e30f
#define SLICE (GQ * HD / SPLITS)  // outputs that a block merges

__device__ __forceinline__ u32 smem_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float lo2f(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float hi2f(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ u32 pack_bf(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
__device__ __forceinline__ float round_bf(float x) { return lo2f(pack_bf(x, 0.f)); }
__device__ __forceinline__ float ld_bf(const u16* p) {  // other multiprocessors wrote it: not from the L1 cache
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return lo2f(v);
}
__device__ __forceinline__ float warp_sum(float v) {
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void st_remote(float* p, int rank, float v) {
    u32 at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(smem_of(p)), "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}

struct Places {
    uint4 k[AHEAD], v[AHEAD];
};
__device__ __forceinline__ void load_places(Places& p, const u16* keys, const u16* values, const i64* table, int kv_head,
                                            int place, int end, int e) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        int t = place + i * STEP;
        p.k[i] = p.v[i] = make_uint4(0, 0, 0, 0);
        if (t < end) {
            i64 at = ((table[t / KVBLOCK] * KVBLOCK + t % KVBLOCK) * NKV + kv_head) * HD + e;
            p.k[i] = *(const uint4*)(keys + at);
            p.v[i] = *(const uint4*)(values + at);
        }
    }
}
__device__ __forceinline__ float score_of(const float* q, uint4 k) {
    float z = q[0] * lo2f(k.x) + q[1] * hi2f(k.x) + q[2] * lo2f(k.y) + q[3] * hi2f(k.y) + q[4] * lo2f(k.z) +
              q[5] * hi2f(k.z) + q[6] * lo2f(k.w) + q[7] * hi2f(k.w);
    for (int o = LPT / 2; o; o >>= 1) z += __shfl_xor_sync(~0u, z, o);
    return z;
}
__device__ __forceinline__ void add_values(float* sums, float weight, uint4 v) {
    sums[0] += weight * lo2f(v.x);
    sums[1] += weight * hi2f(v.x);
    sums[2] += weight * lo2f(v.y);
    sums[3] += weight * hi2f(v.y);
    sums[4] += weight * lo2f(v.z);
    sums[5] += weight * hi2f(v.z);
    sums[6] += weight * lo2f(v.w);
    sums[7] += weight * hi2f(v.w);
}
__device__ __forceinline__ uint4 pack8(const float* from) {
    return make_uint4(pack_bf(from[0], from[1]), pack_bf(from[2], from[3]), pack_bf(from[4], from[5]),
                      pack_bf(from[6], from[7]));
}

extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(32 * NW)
    attend(const u16* qkv, u16* keys, u16* values, const float* cos, const float* sin, const i64* position_at,
           const i64* slot_at, const i64* table, const u16* q_gain, const u16* k_gain, u16* out, float scale,
           float epsilon) {
    __shared__ __align__(16) float queries[GQ][HD], new_key[HD], new_value[HD];
    __shared__ float warp_sums[NW][GQ][HD], warp_high[NW][GQ], warp_total[NW][GQ];
    __shared__ float parts[SPLITS][3][SLICE];  // of this block's outputs, from all blocks: sums, highs and totals
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, rank = blockIdx.x, kv_head = blockIdx.y;
    cluster_arrive();  // other blocks may write to this one's shared memory
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    int position = (int)*position_at, earliest = WINDOW && position >= WINDOW ? position + 1 - WINDOW : 0;
    int share = (position - earliest + SPLITS - 1) / SPLITS, begin = earliest + rank * share,
        end = min(begin + share, position);
    const int first = begin + warp * TPW + lane / LPT, e = lane % LPT * 8;
    Places p;
    load_places(p, keys, values, table, kv_head, first, end, e);
    i64 slot = *slot_at;
    float c[PAIRS], s[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        c[i] = ROTATES ? cos[(i64)position * (HD / 2) + i * 32 + lane] : 1.f;
        s[i] = ROTATES ? sin[(i64)position * (HD / 2) + i * 32 + lane] : 0.f;
    }
    // A rehearsal comes before the projections are there: the second pass finds its instructions in the cache.
#pragma unroll 1
    for (int pass = REHEARSES ? 0 : 1; pass < 2; pass++) {
        bool is_real = pass == 1;
        if (is_real) asm volatile("griddepcontrol.wait;" ::: "memory");
        for (int row = warp; row <= GQ; row += NW) {  // the queries, and the new key
            const u16* from = qkv + (row < GQ ? kv_head * GQ + row : NH + kv_head) * HD;
            const u16* gain = row < GQ ? q_gain : k_gain;
            float a[PAIRS], b[PAIRS], squares = 0;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                a[i] = ld_bf(from + i * 32 + lane);
                b[i] = ld_bf(from + i * 32 + lane + HD / 2);
                squares += a[i] * a[i] + b[i] * b[i];
            }
            float root = NORMALIZES ? rsqrtf(warp_sum(squares) / HD + epsilon) : 1.f;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                int d = i * 32 + lane;
                if (NORMALIZES) {
                    a[i] = round_bf(a[i] * root * lo2f(gain[d]));
                    b[i] = round_bf(b[i] * root * lo2f(gain[d + HD / 2]));
                }
                float u = round_bf(a[i] * c[i] - b[i] * s[i]), v = round_bf(b[i] * c[i] + a[i] * s[i]);
                float* to = row < GQ ? queries[row] : new_key;
                float factor = row < GQ ? scale * 1.4426950408889634f : 1.f;  // powers of two from here on
                to[d] = u * factor;
                to[d + HD / 2] = v * factor;
            }
        }
        for (int d = tid; d < HD; d += 32 * NW) new_value[d] = ld_bf(qkv + (NH + NKV + kv_head) * HD + d);
        __syncthreads();
        if (rank == 0 && is_real)
            for (int d = tid; d < HD; d += 32 * NW) {
                keys[(slot * NKV + kv_head) * HD + d] = (u16)pack_bf(new_key[d], 0.f);
                values[(slot * NKV + kv_head) * HD + d] = (u16)pack_bf(new_value[d], 0.f);
            }

        float q[GQ][8], high[GQ], total[GQ], sums[GQ][8];
#pragma unroll
        for (int g = 0; g < GQ; g++) {
            high[g] = NONE;
            total[g] = 0;
            for (int i = 0; i < 8; i++) {
                q[g][i] = queries[g][e + i];
                sums[g][i] = 0;
            }
        }
        if (rank == 0 && warp == 0) {  // the new token itself
            uint4 k = pack8(new_key + e), v = pack8(new_value + e);
#pragma unroll
            for (int g = 0; g < GQ; g++) {
                float z = score_of(q[g], k);
                if (lane < LPT) {
                    high[g] = z;
                    total[g] = 1.f;
                    add_values(sums[g], 1.f, v);
                }
            }
        }
        int place = first, stop = is_real ? end : min(end, begin + STEP * AHEAD);
        for (int start = begin; start < stop; start += STEP * AHEAD, place += STEP * AHEAD) {
            if (start != begin) load_places(p, keys, values, table, kv_head, place, end, e);
#pragma unroll
            for (int g = 0; g < GQ; g++) {
                float scores[AHEAD], top = high[g];
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    float z = score_of(q[g], p.k[i]);
                    scores[i] = place + i * STEP < end ? z : NONE;
                    top = fmaxf(top, scores[i]);
                }
                float shrink = exp2f(high[g] - top);
                high[g] = top;
                total[g] *= shrink;
                for (int i = 0; i < 8; i++) sums[g][i] *= shrink;
#pragma unroll
                for (int i = 0; i < AHEAD; i++) {
                    float weight = place + i * STEP < end ? exp2f(scores[i] - top) : 0.f;
                    total[g] += weight;
                    add_values(sums[g], weight, p.v[i]);
                }
            }
        }
        // merge the places of a warp, the warps of a block, the blocks of the cluster
#pragma unroll
        for (int g = 0; g < GQ; g++) {
            for (int o = LPT; o < 32; o <<= 1) {
                float other = __shfl_xor_sync(~0u, high[g], o), top = fmaxf(high[g], other), a = exp2f(high[g] - top),
                      b = exp2f(other - top);
                total[g] = total[g] * a + __shfl_xor_sync(~0u, total[g], o) * b;
                high[g] = top;
                for (int i = 0; i < 8; i++) sums[g][i] = sums[g][i] * a + __shfl_xor_sync(~0u, sums[g][i], o) * b;
            }
            if (lane < LPT)
                for (int i = 0; i < 8; i++) warp_sums[warp][g][e + i] = sums[g][i];
            if (lane == 0) {
                warp_high[warp][g] = high[g];
                warp_total[warp][g] = total[g];
            }
        }
        __syncthreads();
        if (!is_real || !REHEARSES) cluster_wait();  // all blocks of the cluster have started
        for (int i = tid; i < GQ * HD; i += 32 * NW) {
            int g = i / HD, d = i % HD;
            float top = NONE, all = 0, y = 0;
#pragma unroll
            for (int w = 0; w < NW; w++) top = fmaxf(top, warp_high[w][g]);
#pragma unroll
            for (int w = 0; w < NW; w++) {
                float factor = exp2f(warp_high[w][g] - top);
                all += factor * warp_total[w][g];
                y += factor * warp_sums[w][g][d];
            }
            float* to = &parts[rank][0][i % SLICE];
            st_remote(to, i / SLICE, y);
            st_remote(to + SLICE, i / SLICE, top);
            st_remote(to + 2 * SLICE, i / SLICE, all);
        }
        cluster_arrive();
        cluster_wait();
        for (int i = tid; i < SLICE; i += 32 * NW) {
            float top = NONE, all = 0, y = 0;
#pragma unroll
            for (int j = 0; j < SPLITS; j++) top = fmaxf(top, parts[j][1][i]);
#pragma unroll
            for (int j = 0; j < SPLITS; j++) {
                float factor = exp2f(parts[j][1][i] - top);
                all += factor * parts[j][2][i];
                y += factor * parts[j][0][i];
            }
            if (is_real) out[kv_head * GQ * HD + rank * SLICE + i] = (u16)pack_bf(y / all, 0.f);
        }
        __syncthreads();
    }
}

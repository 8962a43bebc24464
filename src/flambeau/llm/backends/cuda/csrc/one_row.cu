// One row times a matrix, with the norm before it or the residual sum after it, for decode steps of one sequence.
//
// There is one block per multiprocessor. KW warps are a team: they divide the inputs, whose values stay in registers.
// Teams take R rows of weights at a time, which come through a ring in shared memory; a thread reads only what it copied
// itself. The ring is filled before the kernel waits for its input, so that weights load while the kernels before end.
// Sums of all warps are added up at the end: there is no barrier in between.
//
// Defined before this text: WT (0 bfloat16, 1 int8, 2 fp8, 3 int4 in groups), K inputs, NW warps, KW of a team, C times
// 512 bytes of a row for one warp, R rows of a block, S rows of the ring (a multiple of R), GROUP, GATED, NORM (the input
// is normalized), ADDS (`added` is added to it before, and the sum stored as `kept`), RESIDUAL (the outputs are added to
// `out`), WIDE (float32 outputs), REHEARSES (there is a first pass without results).
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define ROW_BYTES (WT == 0 ? K * 2 : WT == 3 ? K / 2 : K)
#define CHUNK 512                            // bytes that a warp reads at once
#define E (WT == 0 ? 8 : WT == 3 ? 32 : 16)  // weights in 16 bytes
#define TEAMS (NW / KW)
#define OUTS (GATED ? R / 2 : R)  // outputs of a block of rows
#define ROUND 64                  // blocks of rows between two epilogues
#define THREADS (32 * NW)
#define STAGES (S / R)
#define STAGE_BYTES (R * C * CHUNK)  // of a warp
#define PIECES (K / 64)
#define IS_FULL (C * KW * CHUNK == ROW_BYTES)
#define RING_BYTES (NW * S * C * CHUNK)
#define SCALE_BYTES (WT == 3 ? NW * STAGES * C * 256 : 0)
#define INPUT_BYTES (K * 2 + (WT == 3 ? K / 2 : 0))  // of the row, and of sums of 8 inputs

__device__ __forceinline__ u32 smem_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float lo2f(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float hi2f(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ u32 pack_bf(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
__device__ __forceinline__ u32 pack_h(float lo, float hi) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
__device__ __forceinline__ float round_bf(float x) { return lo2f(pack_bf(x, 0.f)); }
// copies if there is more to do; zeros if there is nothing at that place
__device__ __forceinline__ void copy16(bool more, u32 to, const void* from, bool is_there) {
    asm volatile(
        "{.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;}" ::"r"(to),
        "l"(from), "r"(is_there ? 16 : 0), "r"((int)more)
        : "memory");
}
__device__ __forceinline__ void copy8(bool more, u32 to, const void* from, bool is_there) {
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p cp.async.ca.shared.global [%0], [%1], 8, %2;}" ::"r"(to),
                 "l"(from), "r"(is_there ? 8 : 0), "r"((int)more)
                 : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_oldest() { asm volatile("cp.async.wait_group %0;" ::"n"(S - 1 + (REHEARSES ? R : 0)) : "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ uint4 lds128(u32 a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
__device__ __forceinline__ uint4 ld_cg(const void* p) {  // other multiprocessors wrote it: not from the L1 cache
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ __forceinline__ u32 ld_cg16(const void* p) {
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u32 hadd2(u32 a, u32 b) {
    u32 r;
    asm("add.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 hfma2(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
__device__ __forceinline__ float both(u32 h) {  // the sum of two float16 numbers
    float a, b;
    asm("{.reg .b16 l,h; mov.b32 {l,h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(h));
    return a + b;
}
__device__ __forceinline__ u32 fp8_pair(u32 w) {
    u32 r;
    asm("{.reg .b16 l,h; mov.b32 {l,h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(r) : "r"(w));
    return r;
}

// ---- inputs ----

// Powers of two that bring the largest input below a limit that float16 sums can bear, and what sums are to be
// multiplied with. int4: bits of integers are float16 numbers, 2^24 times smaller.
#define LIMIT (WT == 1 ? 5 : WT == 2 ? 4 : 15)
__device__ __forceinline__ void scales_of(float largest, float& scale, float& back) {
    u32 ex = (__float_as_uint(largest) >> 23) & 255;
    ex = ex < 30 ? 30 : ex > 220 ? 220 : ex;
    scale = __uint_as_float((253 + LIMIT - ex) << 23);
    back = __uint_as_float((ex - LIMIT + 1 + (WT == 3 ? 24 : 0)) << 23);
}

__device__ __forceinline__ float warp_sum(float v) {
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}

// Stores 8 inputs as the products read them: bfloat16, or scaled float16. int4: those of 16 bytes of weights together, in
// the order in which weights are widened, and sums of 8 inputs.
__device__ __forceinline__ void store_inputs(u32* x, float* input_sums, int k, const float (&v)[8], float scale,
                                             float back) {
#if WT == 0
    *(uint4*)(x + k / 2) = make_uint4(pack_bf(v[0], v[1]), pack_bf(v[2], v[3]), pack_bf(v[4], v[5]), pack_bf(v[6], v[7]));
#elif WT == 3
    int within = k % GROUP, upper = within < GROUP / 2, byte = k / GROUP * (GROUP / 2) + within % (GROUP / 2);
    u32* to = x + byte / 16 * 16 + byte % 16 + upper;
    float total = 0, factor = upper ? scale * 0.0625f : scale;
    for (int i = 0; i < 8; i++) total += v[i];
    to[0] = pack_h(v[0] * factor, v[2] * factor);
    to[2] = pack_h(v[1] * factor, v[3] * factor);
    to[4] = pack_h(v[4] * factor, v[6] * factor);
    to[6] = pack_h(v[5] * factor, v[7] * factor);
    input_sums[byte / 16 * 4 + byte % 16 / 8 * 2 + upper] = total / back;
#else
    *(uint4*)(x + k / 2) = make_uint4(pack_h(v[0] * scale, v[1] * scale), pack_h(v[2] * scale, v[3] * scale),
                                      pack_h(v[4] * scale, v[5] * scale), pack_h(v[6] * scale, v[7] * scale));
#endif
}

#define PER ((K + THREADS * 8 - 1) / (THREADS * 8))
struct Gains {
    uint4 of[PER];
};
#define WIDEN(TO, FROM)       \
    {                         \
        TO[0] = lo2f(FROM.x); \
        TO[1] = hi2f(FROM.x); \
        TO[2] = lo2f(FROM.y); \
        TO[3] = hi2f(FROM.y); \
        TO[4] = lo2f(FROM.z); \
        TO[5] = hi2f(FROM.z); \
        TO[6] = lo2f(FROM.w); \
        TO[7] = hi2f(FROM.w); \
    }

// Reads the row, normalizes it if NORM, and stores it; returns what sums are to be multiplied with. `shared` is for sums
// of warps.
__device__ __forceinline__ float prepare(const u16* row, const Gains& gains, u32* x, float* input_sums, float* shared,
                                         float epsilon, float factor, const u16* added, u16* kept) {
    int tid = threadIdx.x;
    float v[PER][8];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int k = (i * THREADS + tid) * 8;
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (k < K) raw = ld_cg(row + k);
        WIDEN(v[i], raw)
        if (ADDS && k < K) {
            float more[8];
            raw = ld_cg(added + k);
            WIDEN(more, raw)
            for (int e = 0; e < 8; e++) v[i][e] = round_bf(v[i][e] + factor * more[e]);
            if (kept != nullptr && blockIdx.x == 0)
                *(uint4*)(kept + k) = make_uint4(pack_bf(v[i][0], v[i][1]), pack_bf(v[i][2], v[i][3]),
                                                 pack_bf(v[i][4], v[i][5]), pack_bf(v[i][6], v[i][7]));
        }
    }
    float squares = 0, largest = 0, root = 1.f, back = 1.f, scale = 1.f;
    if (NORM || WT != 0) {
#pragma unroll
        for (int i = 0; i < PER; i++) {
            float g[8];
            if (NORM) WIDEN(g, gains.of[i])
            for (int e = 0; e < 8; e++) {
                squares += v[i][e] * v[i][e];
                if (NORM) v[i][e] *= g[e];
                largest = fmaxf(largest, fabsf(v[i][e]));
            }
        }
        if (NORM) squares = warp_sum(squares);
        if (WT != 0) largest = warp_max(largest);
        if (tid % 32 == 0) {
            shared[tid / 32] = squares;
            shared[NW + tid / 32] = largest;
        }
        __syncthreads();
        squares = largest = 0;
        for (int i = 0; i < NW; i++) {
            squares += shared[i];
            largest = fmaxf(largest, shared[NW + i]);
        }
        if (NORM) root = rsqrtf(squares / K + epsilon);
        if (WT != 0) scales_of(largest * root, scale, back);
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int k = (i * THREADS + tid) * 8;
        if (NORM)
            for (int e = 0; e < 8; e++) v[i][e] = round_bf(v[i][e] * root);
        if (k < K) store_inputs(x, input_sums, k, v[i], scale, back);
    }
    __syncthreads();
    return back;
}

// the inputs of a thread's weights, in registers
struct Inputs {
#if WT == 0
    float x[C][8];
#else
    u32 x[C][E / 2];  // pairs of float16
    float sum[C];     // int4: of the values in a chunk
#endif
};
__device__ __forceinline__ void load_inputs(Inputs& in, const u32* x, const float* input_sums, int kw) {
#pragma unroll
    for (int c = 0; c < C; c++) {
        int chunk = (kw * C + c) * 32 + (threadIdx.x & 31);  // of 16 bytes
        bool is_there = IS_FULL || chunk * 16 < ROW_BYTES;
#pragma unroll
        for (int i = 0; i < E / 8; i++) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (is_there) v = *(const uint4*)(x + chunk * (E / 2) + i * 4);
#if WT == 0
            WIDEN(in.x[c], v)
#else
            in.x[c][i * 4] = v.x;
            in.x[c][i * 4 + 1] = v.y;
            in.x[c][i * 4 + 2] = v.z;
            in.x[c][i * 4 + 3] = v.w;
#endif
        }
#if WT == 3
        in.sum[c] = 0;
        if (is_there)
            for (int i = 0; i < 4; i++) in.sum[c] += input_sums[chunk * 4 + i];
#endif
    }
}

// ---- weights ----

// the product of 16 bytes of weights with their inputs; int4 with the scale and the minimum of their group
__device__ __forceinline__ float product(uint4 w, const Inputs& in, int c, u32 scales) {
    u32 words[4] = {w.x, w.y, w.z, w.w};
#if WT == 0
    float a = 0, b = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a += lo2f(words[i]) * in.x[c][i * 2];
        b += hi2f(words[i]) * in.x[c][i * 2 + 1];
    }
    return a + b;
#else
    u32 a = 0, b = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 v = words[i];
#if WT == 1
        v ^= 0x80808080u;
        a = hfma2(hadd2(__byte_perm(v, 0x64646464u, 0x4140), 0xe480e480u), in.x[c][i * 2], a);
        b = hfma2(hadd2(__byte_perm(v, 0x64646464u, 0x4342), 0xe480e480u), in.x[c][i * 2 + 1], b);
#elif WT == 2
        a = hfma2(fp8_pair(v), in.x[c][i * 2], a);
        b = hfma2(fp8_pair(v >> 16), in.x[c][i * 2 + 1], b);
#else
        u32 v2 = v >> 8;
        a = hfma2(v & 0x000f000fu, in.x[c][i * 4], a);
        b = hfma2(v & 0x00f000f0u, in.x[c][i * 4 + 1], b);
        a = hfma2(v2 & 0x000f000fu, in.x[c][i * 4 + 2], a);
        b = hfma2(v2 & 0x00f000f0u, in.x[c][i * 4 + 3], b);
#endif
    }
    float y = both(hadd2(a, b));
    return WT == 3 ? lo2f(scales) * y + hi2f(scales) * in.sum[c] : y;
#endif
}

// what the team copies next
struct Next {
    const u8* weight;  // for this thread
    const u8* scales;
    int left;  // blocks
};

// begins to copy row r of a block; after the last row, moves on to the team's next block
__device__ __forceinline__ void copy_row(Next& next, int r, int N, int kw, u32 to, u32 scales_to) {
    int lane = threadIdx.x & 31;
    bool more = next.left > 0;
#pragma unroll
    for (int c = 0; c < C; c++) {
        bool is_there = IS_FULL || (kw * C + c) * CHUNK + lane * 16 < ROW_BYTES;
        const u8* from = is_there ? next.weight + c * CHUNK : next.weight - kw * C * CHUNK;
        copy16(more, to + (r * C + c) * CHUNK, from, is_there);
    }
    if (WT == 3 && r == 0 && lane < 16) {
#pragma unroll
        for (int c = 0; c < C; c++) {
            bool is_there = IS_FULL || (kw * C + c) * 16 + lane < PIECES;
            const u8* from = is_there ? next.scales + c * 16 * 64 : next.scales - kw * C * 16 * 64;
            if (GATED) {
                copy8(more, scales_to + c * 256, from, is_there);
                copy8(more, scales_to + c * 256 + 8, from + 32, is_there);
            } else
                copy16(more, scales_to + c * 256, from, is_there);
        }
    }
    // gated: the rows of a block are R / 2 gates and then the R / 2 values that they gate
    if (r == R - 1) {
        int step = gridDim.x * TEAMS * OUTS;  // a multiple of a tile of scales
        next.weight += ((i64)step + 1 - OUTS - (GATED ? N : 0)) * ROW_BYTES;
        if (WT == 3) next.scales += (i64)(step / (GATED ? 8 : 16)) * PIECES * 64;
        next.left--;
    } else
        next.weight += GATED && r == R / 2 - 1 ? (i64)(N + 1 - OUTS) * ROW_BYTES : ROW_BYTES;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    one_row(const u16* row, const u8* weight, const void* scales, const u16* bias, const u16* gain, void* out, int N,
            float epsilon, float factor, const u16* added, u16* kept) {
    extern __shared__ __align__(128) u8 smem[];
    u32* x = (u32*)(smem + RING_BYTES + SCALE_BYTES);
    float* input_sums = (float*)(x + K / 2);
    float* sums = (float*)((u8*)x + INPUT_BYTES);  // [ROUND * R][KW]
    float* shared = sums + ROUND * R * KW;         // [2 * NW]
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, kw = warp % KW, team = warp / KW;
    // the multiprocessor has the blocks blockIdx.x + i * gridDim.x, of which a team has every i with i % TEAMS == team
    int total = N / OUTS, count = (total - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    start_next();
    u32 ring = smem_of(smem) + warp * STAGES * STAGE_BYTES + lane * 16;
    u32 ring_scales = smem_of(smem) + RING_BYTES + warp * STAGES * C * 256;
    int first = (blockIdx.x + team * gridDim.x) * OUTS, tile = GATED ? 8 : 16;
    Next next = {weight + (i64)first * ROW_BYTES + kw * C * CHUNK + lane * 16,
                 (const u8*)scales + ((i64)(first / tile) * PIECES + kw * C * 16 + (lane & 15)) * 64 + first % tile * 4,
                 count > team ? (count - team + TEAMS - 1) / TEAMS : 0};
#pragma unroll 1
    for (int i = 0; i < STAGES; i++)
#pragma unroll
        for (int r = 0; r < R; r++) {
            copy_row(next, r, N, kw, ring + i * STAGE_BYTES, ring_scales + i * C * 256 + (lane & 15) * 16);
            commit();
        }
    Gains gains;
    if (NORM) {
#pragma unroll
        for (int i = 0; i < PER; i++) {
            int k = (i * THREADS + tid) * 8;
            gains.of[i] = k < K ? *(const uint4*)(gain + k) : make_uint4(0, 0, 0, 0);
        }
    }
    // A rehearsal has one block for each team and comes before the input is there: the second pass finds its instructions
    // in the cache. It commits R empty groups of copies.
    int own = (tid / OUTS * gridDim.x + blockIdx.x) * OUTS + tid % OUTS;  // this thread's first output
    float own_scale = 1.f, own_other = 1.f;
    if ((WT == 1 || WT == 2) && tid < count * OUTS) {
        own_scale = ((const float*)scales)[own];
        if (GATED) own_other = ((const float*)scales)[N + own];
    }
    const Next kept_next = next;
#pragma unroll 1
    for (int pass = REHEARSES ? 0 : 1; pass < 2; pass++) {
        bool is_real = pass == 1;
        int todo = is_real ? count : min(count, TEAMS);
        next = kept_next;
        if (!is_real) next.left = 0;
        if (is_real) wait_for_previous();
        float old = 0;  // of the residual stream
        if (RESIDUAL && tid < todo * OUTS) old = lo2f(ld_cg16((const u16*)out + own));
        float back = prepare(row, gains, x, input_sums, shared, epsilon, factor, added, is_real ? kept : nullptr);
        Inputs in;
        load_inputs(in, x, input_sums, kw);
        int done = team, stage = 0;
        for (int base = 0; base < todo; base += ROUND) {
            int end = min(todo, base + ROUND);
#pragma unroll 1
            for (; done < end; done += TEAMS) {
                u32 at = ring + stage * STAGE_BYTES, scales_at = ring_scales + stage * C * 256;
                float acc[R];
                uint4 pairs[C];  // int4: scale and minimum, of up to four rows
#pragma unroll
                for (int r = 0; r < R; r++) {
                    wait_for_oldest();
                    if (WT == 3 && r == 0) {
                        __syncwarp();  // other threads have copied them
#pragma unroll
                        for (int c = 0; c < C; c++) pairs[c] = lds128(scales_at + c * 256 + lane / 2 * 16);
                        __syncwarp();
                    }
                    uint4 w[C];
#pragma unroll
                    for (int c = 0; c < C; c++) w[c] = lds128(at + (r * C + c) * CHUNK);
                    acc[r] = 0;
#pragma unroll
                    for (int c = 0; c < C; c++) {
                        u32 scale = r == 0 ? pairs[c].x : r == 1 ? pairs[c].y : r == 2 ? pairs[c].z : pairs[c].w;
                        acc[r] += product(w[c], in, c, scale);
                    }
                    copy_row(next, r, N, kw, at, scales_at + (lane & 15) * 16);
                    commit();
                }
                if (++stage == STAGES) stage = 0;
                // sums over the warp, with one row for 32 / R lanes
                bool upper = lane & 16, odd = lane & 8;
                float y = (upper ? acc[R / 2] : acc[0]) + __shfl_xor_sync(~0u, upper ? acc[0] : acc[R / 2], 16);
                if (R == 4) {
                    float z = (upper ? acc[R - 1] : acc[1]) + __shfl_xor_sync(~0u, upper ? acc[1] : acc[R - 1], 16);
                    y = (odd ? z : y) + __shfl_xor_sync(~0u, odd ? y : z, 8);
                }
                for (int o = 16 / R; o; o >>= 1) y += __shfl_xor_sync(~0u, y, o);
                if (lane % (32 / R) == 0) sums[((done - base) * R + lane / (32 / R)) * KW + kw] = y;
            }
            __syncthreads();
            for (int o = tid; o < (end - base) * OUTS; o += THREADS) {
                int n = ((base + o / OUTS) * gridDim.x + blockIdx.x) * OUTS + o % OUTS;
                int r = GATED ? o / OUTS * R + o % OUTS : o;
                float y = 0, other = 0;
#pragma unroll
                for (int i = 0; i < KW; i++) {
                    y += sums[r * KW + i];
                    if (GATED) other += sums[(r + R / 2) * KW + i];
                }
                y *= back;
                other *= back;
                bool is_own = base == 0 && o < THREADS;  // its scale and residual value are loaded
                if (WT == 1 || WT == 2) {
                    y *= is_own ? own_scale : ((const float*)scales)[n];
                    if (GATED) other *= is_own ? own_other : ((const float*)scales)[N + n];
                }
                if (bias) {
                    y += lo2f(bias[n]);
                    if (GATED) other += lo2f(bias[N + n]);
                }
                if (GATED) y = y / (1.f + __expf(-y)) * other;
                if (RESIDUAL) y = (is_own ? old : lo2f(ld_cg16((const u16*)out + n))) + round_bf(y) * factor;
                if (is_real) {
                    if (WIDE)
                        ((float*)out)[n] = round_bf(y);
                    else
                        ((u16*)out)[n] = (u16)pack_bf(y, 0.f);
                }
            }
            if (base + ROUND < todo) __syncthreads();
        }
    }
}

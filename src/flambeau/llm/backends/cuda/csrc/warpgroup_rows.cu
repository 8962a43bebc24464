// A linear layer for up to 128 rows: y[T, N] = x[T, K] · w[N, K]ᵀ, by the warpgroup products of Hopper GPUs (wgmma).
//
// A block computes 16 · TILES outputs from one part of the inputs. One thread has the copy engine fill a ring of stages
// in shared memory with chunks of the weights and of all rows of inputs. Weights are the first operand. Those of 8 and 4
// bits go to registers and become bfloat16 there: an integer or level below 256 is the bits of a bfloat16 number that is
// 2^133 times smaller, an fp8 number those of one that is 2^120 times smaller, and one `fma` gives the weight, computed
// 2^66 times too small. The second operand is the inputs; for widened weights, the even ones of 16 come first, because
// that is how the weights of a word come apart. Bfloat16 weights and inputs are multiplied where they are.
//
// The next kernel may start at once: it loads its first weights before it waits for this kernel's outputs.
//
// Adapters of the rows may be part of the product, with bfloat16 weights. With SEGMENTS, their B is: after the chunks of
// the weights come those of a second matrix, the B of all slots side by side, [N, X], and its inputs are x · A, zero but
// for the row's own slot. A layer has up to three segments, such as queries, keys and values, whose A differ: each has
// inputs and sums of its own. With APPENDS, more blocks multiply the same inputs with the A of all slots, [X, K].
//
// Defined before this text: WT (0 bfloat16, 1 int8, 2 fp8, 3 int4), NR (rows, a multiple of 8), WM (warpgroups), TILES
// (of 16 outputs), STAGES, CHUNK (bytes of a row of weights in a stage), GROUP (of 4-bit weights), GATED (half of the
// outputs gate the other half), BLOCKS (that fit on a multiprocessor), SEGMENTS, APPENDS, WGMMA(c, a, b) with weights in
// registers and WGMMA_SHARED(c, a, b) with those in shared memory.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

struct __align__(64) TensorMap {  // as the driver encodes it
    u64 words[16];
};

constexpr int WARPS = 4 * WM, THREADS = 32 * WARPS, MT = (TILES + WARPS - 1) / WARPS;
constexpr int KC = WT == 0 ? CHUNK / 2 : WT == 3 ? CHUNK * 2 : CHUNK;  // inputs of a chunk
constexpr int PLANES = KC / 64, OCTETS = NR / 8;                       // of a chunk of inputs: 8 rows of 128 bytes
constexpr int PLANE = NR * 128, TILE = 16 * CHUNK;                     // bytes
constexpr int WEIGHTS = (WT == 0 ? MT * WARPS : TILES) * TILE;         // of a stage, and what wgmma reads beyond them
constexpr int SCALES_AT = WEIGHTS + (SEGMENTS > PLANES ? SEGMENTS : PLANES) * PLANE;
constexpr int STAGE = SCALES_AT + (WT == 3 ? (TILES * KC + 1023) / 1024 * 1024 : 0);
constexpr int OPERAND = PLANES * PLANE;
constexpr u32 LOADED = TILES * TILE + PLANES * PLANE + (WT == 3 ? TILES * KC : 0);
constexpr u32 LOADED_OF_ADAPTERS = TILES * TILE + SEGMENTS * PLANE;
static_assert(WT == 0 && MT == 1 || !SEGMENTS && !APPENDS, "adapters of bfloat16 weights");
static_assert(!GATED || !APPENDS && (SEGMENTS == 0 || SEGMENTS == 2), "gates, and what they gate");
static_assert(WT == 0 ? CHUNK == 128 : WT == 3 ? CHUNK == 64 : CHUNK == 64 || CHUNK == 128, "whole planes and groups");

__device__ __forceinline__ u32 lds32(u32 a) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
    return v;
}
__device__ __forceinline__ uint4 lds128(u32 a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
__device__ __forceinline__ void sts128(u32 a, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
// Four matrices of 8 rows and 16 bytes; a thread has 4 bytes of each.
__device__ __forceinline__ void load_matrices(u32 (&v)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(a));
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for(u32 barrier, u32 phase) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }"
        ::"r"(barrier), "r"(phase) : "memory");
}
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}
__device__ __forceinline__ float low(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ u16 bfloat(float x) {
    u16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// ---- loading ----

constexpr u64 READ_ONCE = 0x12f0000000000000ull;  // the L2 cache gives these lines up first

// What a block multiplies: chunks of inputs with weights, and then with SEGMENTS those of adapters.
struct Sources {
    const TensorMap *x, *weights, *scales, *inner, *b;
    int tile;    // the first one of the block
    int chunks;  // of the weights
    int width;   // numbers of a segment of `inner`

    __device__ __forceinline__ bool is_of_adapters(int chunk) const { return SEGMENTS && chunk >= chunks; }
};

__device__ __forceinline__ void load_weights(const Sources& from, u32 stage, u32 barrier, int chunk) {
    bool adapts = from.is_of_adapters(chunk);
    expect(barrier, adapts ? LOADED_OF_ADAPTERS : LOADED);
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2,%3,%3,%4}], [%5], %6;"
        ::"r"(stage), "l"(adapts ? from.b : from.weights), "r"((adapts ? chunk - from.chunks : chunk) * CHUNK), "r"(0),
        "r"(from.tile), "r"(barrier), "l"(READ_ONCE)
        : "memory");
    if (WT == 3)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%2,%3}], [%4], %5;"
            ::"r"(stage + SCALES_AT), "l"(from.scales), "r"(chunk * KC), "r"(from.tile), "r"(barrier), "l"(READ_ONCE)
            : "memory");
}

// 64 inputs of all rows, from one on.
__device__ __forceinline__ void load_plane(const TensorMap* x, u32 to, u32 barrier, int first) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3}], [%4];"
        ::"r"(to), "l"(x), "r"(first * 2), "r"(0), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void load_x(const Sources& from, u32 stage, u32 barrier, int chunk) {
    if (from.is_of_adapters(chunk)) {
#pragma unroll
        for (int s = 0; s < SEGMENTS; s++)
            load_plane(from.inner, stage + WEIGHTS + s * PLANE, barrier, s * from.width + (chunk - from.chunks) * KC);
    } else {
#pragma unroll
        for (int p = 0; p < PLANES; p++) load_plane(from.x, stage + WEIGHTS + p * PLANE, barrier, chunk * KC + p * 64);
    }
}

// Move inputs to the operand's place, each warp some: the even ones of 16 and then the odd ones.
__device__ __forceinline__ void move_x(u32 stage, u32 operand, int warp, int lane) {
    int row = lane & 7, s = lane >> 3;  // the s-th 16 of 64 inputs
#pragma unroll
    for (int first = 0; first < OCTETS * PLANES; first += WARPS) {
        int i = first + warp;
        if (i >= OCTETS * PLANES) break;
        u32 from = stage + WEIGHTS + i * 1024 + row * 128;
        uint4 v = lds128(from + ((2 * s) ^ row) * 16), w = lds128(from + ((2 * s + 1) ^ row) * 16);
        u32 to = operand + ((i / OCTETS * 8 + s * 2) * NR + i % OCTETS * 8 + row) * 16;
        sts128(to, __byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410), __byte_perm(w.x, w.y, 0x5410),
               __byte_perm(w.z, w.w, 0x5410));
        sts128(to + NR * 16, __byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x7632),
               __byte_perm(w.x, w.y, 0x7632), __byte_perm(w.z, w.w, 0x7632));
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- multiplying ----

// The weights of a thread for 16 inputs: of rows g and g + 8, even and odd ones.
struct Operand {
    u32 a[4];
};

constexpr u32 LEVEL = 0x000f000fu, BYTE = 0x00ff00ffu, SIGNS = 0x00800080u;
__device__ __forceinline__ u32 widened(u32 w, int odd) {  // of four 8-bit weights the even or the odd ones
    if (WT == 1) return fma2(((odd ? w >> 8 : w) ^ SIGNS) & BYTE, 0x61006100u, 0xa200a200u);  // 2^67, -2^-59
    u32 bits = odd ? (w >> 4 & 0x07f007f0u) | (w & 0x80008000u) : (w << 4 & 0x07f007f0u) | (w << 8 & 0x80008000u);
    return fma2(bits, 0x5a805a80u, 0x80008000u);  // 2^54, -0
}
__device__ __forceinline__ Operand widened(u32 w, u32 v) {
    return {widened(w, 0), widened(v, 0), widened(w, 1), widened(v, 1)};
}

// The scales and minimums of 64 inputs, of rows g and g + 8.
struct Scales {
    u32 scale[2], lower[2];
};
__device__ __forceinline__ Scales load_scales(u32 at) {
    u32 top = lds32(at), bottom = lds32(at + 32);
    return {{fma2(__byte_perm(top, 0, 0x1010), 0x61006100u, 0x80008000u),       // 2^67
             fma2(__byte_perm(bottom, 0, 0x1010), 0x61006100u, 0x80008000u)},
            {fma2(__byte_perm(top, 0, 0x3232), 0x1e801e80u, 0x80008000u),       // 2^-66
             fma2(__byte_perm(bottom, 0, 0x3232), 0x1e801e80u, 0x80008000u)}};
}
// Levels in the places of a mask in words of rows g and g + 8, and in the bytes after those.
__device__ __forceinline__ Operand widened(u32 w, u32 v, u32 mask, const Scales& s) {
    return {fma2(w & mask, s.scale[0], s.lower[0]), fma2(v & mask, s.scale[1], s.lower[1]),
            fma2(w >> 8 & mask, s.scale[0], s.lower[0]), fma2(v >> 8 & mask, s.scale[1], s.lower[1])};
}

// The weights of 64 inputs, from the plane `p` of a chunk on. `rows` is where this lane's row begins, of the matrices
// that it gives an address of.
__device__ __forceinline__ void load_operands(u32 rows, u32 scales, int p, Operand (&to)[4]) {
    u32 w[4];
    if constexpr (WT < 3) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            load_matrices(w, rows ^ (p * 4 + i * 2) * 16);
            to[2 * i] = widened(w[0], w[1]), to[2 * i + 1] = widened(w[2], w[3]);
        }
    } else if constexpr (GROUP == 64) {  // 32 bytes: the high halves are the first 32 inputs
        Scales s = load_scales(scales + p * 64), high = s;
        high.scale[0] = fma2(s.scale[0], 0x3d803d80u, 0x80008000u);  // 1 / 16
        high.scale[1] = fma2(s.scale[1], 0x3d803d80u, 0x80008000u);
        load_matrices(w, rows ^ p * 32);
        to[0] = widened(w[0], w[1], LEVEL << 4, high), to[1] = widened(w[2], w[3], LEVEL << 4, high);
        to[2] = widened(w[0], w[1], LEVEL, s), to[3] = widened(w[2], w[3], LEVEL, s);
    } else {  // 64 bytes: the high halves are the first 64 inputs
        Scales s = load_scales(scales + p * 64);
        if (p == 0) s.scale[0] = fma2(s.scale[0], 0x3d803d80u, 0x80008000u);  // 1 / 16
        if (p == 0) s.scale[1] = fma2(s.scale[1], 0x3d803d80u, 0x80008000u);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            load_matrices(w, rows ^ i * 32);
            to[2 * i] = widened(w[0], w[1], p ? LEVEL : LEVEL << 4, s);
            to[2 * i + 1] = widened(w[2], w[3], p ? LEVEL : LEVEL << 4, s);
        }
    }
}

// Products of 64 inputs with weights in shared memory, both with the copy engine's swizzle of 128 bytes: 1,024 bytes for
// eight rows.
__device__ __forceinline__ void multiply_shared(u32 weights, u32 inputs, float (&sums)[NR / 2]) {
    const u64 SWIZZLED = (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16;
    u64 a = SWIZZLED | weights >> 4, b = SWIZZLED | inputs >> 4;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int s = 0; s < 4; s++) WGMMA_SHARED(sums, a + s * 2, b + s * 2);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Products of a chunk; they go on when this returns.
__device__ __forceinline__ void multiply(u32 stage, u32 operand, int warp, int lane, float (&sums)[MT][NR / 2]) {
#pragma unroll
    for (int m = 0; m < MT; m++) {
        if (m * WARPS + (warp & ~3) >= TILES) break;
        if constexpr (WT == 0) {
            multiply_shared(stage + (m * WARPS + (warp & ~3)) * TILE, stage + WEIGHTS, sums[m]);
        } else {
            // Eight rows of 16 bytes are 128 bytes apart from the next eight, and NR · 16 from the next 8 inputs.
            u64 b = (u64)8 << 32 | (u64)NR << 16 | operand >> 4;
            int tile = min(m * WARPS + warp, TILES - 1), row = lane & 15;
            int swizzle = CHUNK == 128 ? row & 7 : row >> 1 & 3;
            u32 rows = stage + tile * TILE + row * CHUNK + (lane >> 4 ^ swizzle) * 16;
            u32 scales = stage + SCALES_AT + tile * KC + (lane >> 2) * 4;
#pragma unroll
            for (int p = 0; p < PLANES; p++) {
                Operand weights[4];
                load_operands(rows, scales, p, weights);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int s = 0; s < 4; s++) WGMMA(sums[m], weights[s].a, b + (p * 4 + s) * 2 * NR);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            }
        }
    }
}

// What adapters add to an output of a segment.
template <int COUNT>
__device__ __forceinline__ float of_segment(const float (&more)[COUNT][NR / 2], int segment, int i) {
    float found = more[0][i];
#pragma unroll
    for (int s = 1; s < COUNT; s++)
        if (segment == s) found = more[s][i];
    return found;
}

// row_scales: of 8-bit weights [N]. y: bfloat16, or float parts [gridDim.y, T, N] of the sums. N does not count the
// gates. With SEGMENTS, `second` is B and the segments after the first begin at two outputs; with APPENDS, `second` is A,
// and blocks from `own_blocks` on give parts [gridDim.y, T, X] of x · A.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    warpgroup_rows(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weights,
                   const __grid_constant__ TensorMap scales, const float* row_scales, const u16* bias, void* y, int T,
                   int N, int K
#if SEGMENTS || APPENDS
                   ,
                   const __grid_constant__ TensorMap second, const __grid_constant__ TensorMap inner, float* shrunk,
                   int X, int own_blocks, int second_begin, int third_begin
#endif
    ) {
    extern __shared__ __align__(1024) u8 smem[];
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    constexpr int EACH = GATED ? 8 : 16;  // outputs of a tile
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32, part = blockIdx.y, parts = gridDim.y;
#if SEGMENTS || APPENDS
    bool shrinks = APPENDS && blockIdx.x >= own_blocks;
    Sources from = {&x, shrinks ? &second : &weights, &scales, &inner, &second,
                    ((int)blockIdx.x - (shrinks ? own_blocks : 0)) * TILES, K / KC, X};
    int chunks = from.chunks + (SEGMENTS ? X / KC : 0);
    if (shrinks) N = X;
#else
    Sources from = {&x, &weights, &scales, nullptr, nullptr, (int)blockIdx.x * TILES, K / KC, 0};
    int chunks = from.chunks;
#endif
    int begin = chunks * part / parts, end = chunks * (part + 1) / parts;
    u32 ring = (u32)__cvta_generic_to_shared(smem), operands = ring + STAGES * STAGE;
    u32 full = operands + (WT ? 2 * OPERAND : 0);  // barriers: the stage's data has arrived
    if (threadIdx.x == 0) {
#pragma unroll
        for (int s = 0; s < STAGES; s++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + s * 8) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++)
            if (begin + s < end) load_weights(from, ring + s * STAGE, full + s * 8, begin + s);
    }
    float sums[MT][NR / 2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int i = 0; i < NR / 2; i++) sums[m][i] = 0.f;
#if SEGMENTS
    float more[SEGMENTS][NR / 2];
#pragma unroll
    for (int s = 0; s < SEGMENTS; s++)
#pragma unroll
        for (int i = 0; i < NR / 2; i++) more[s][i] = 0.f;
#endif
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x == 0)
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++)
            if (begin + s < end) load_x(from, ring + s * STAGE, full + s * 8, begin + s);
    wait_for(full, 0);
    if (WT) move_x(ring, operands, warp, lane);
    int stage = 0, free_stage = STAGES - 1, operand = 0, phase = 0;
#pragma unroll 1
    for (int chunk = begin; chunk < end; chunk++) {
        __syncthreads();  // all inputs are in their place, and nobody reads the free stage
        int next = chunk + STAGES - 1;
        if (threadIdx.x == 0 && next < end) {
            load_weights(from, ring + free_stage * STAGE, full + free_stage * 8, next);
            load_x(from, ring + free_stage * STAGE, full + free_stage * 8, next);
        }
#if SEGMENTS
        if (from.is_of_adapters(chunk)) {
            u32 at = ring + stage * STAGE;
#pragma unroll
            for (int s = 0; s < SEGMENTS; s++)
                multiply_shared(at + (warp & ~3) * TILE, at + WEIGHTS + s * PLANE, more[s]);
        } else
#endif
            multiply(ring + stage * STAGE, operands + operand * OPERAND, warp, lane, sums);
        free_stage = stage;
        if (++stage == STAGES) stage = 0, phase ^= 1;
        operand ^= 1;
        if (chunk + 1 < end) {
            wait_for(full + stage * 8, phase);
            if (WT) move_x(ring + stage * STAGE, operands + operand * OPERAND, warp, lane);
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    int g = lane >> 2, j = lane & 3;
    const float BACK = WT ? 73786976294838206464.f : 1.f;  // 2^66
#pragma unroll
    for (int m = 0; m < MT; m++) {
        int tile = m * WARPS + warp, at = (from.tile + tile) * EACH + g, other = GATED ? N + at : at + 8;
        if (tile >= TILES || at >= N) break;
        float scale = BACK, other_scale = BACK, start = 0.f, other_start = 0.f;
        if (WT == 1 || WT == 2) scale *= row_scales[at], other_scale *= row_scales[other];
#if APPENDS
        if (shrinks) {
#pragma unroll
            for (int i = 0; i < NR / 2; i++) {
                int t = i / 4 * 8 + 2 * j + (i & 1);
                if (t < T) shrunk[((i64)part * T + t) * N + (i & 2 ? other : at)] = sums[m][i];
            }
            break;
        }
#endif
        if (bias && part == 0) start = low(bias[at]), other_start = low(bias[other]);
#if SEGMENTS
        int segment = GATED ? 0 : (at >= second_begin) + (at >= third_begin);
        int other_segment = GATED ? 1 : (other >= second_begin) + (other >= third_begin);
#endif
#pragma unroll
        for (int i = 0; i < NR / 2; i++) {
            int t = i / 4 * 8 + 2 * j + (i & 1);
            if (i & 2 || t >= T) continue;
            float v = sums[m][i] * scale + start, u = sums[m][i + 2] * other_scale + other_start;
#if SEGMENTS
            v += of_segment(more, segment, i), u += of_segment(more, other_segment, i + 2);
#endif
            i64 to = (i64)t * N + at;
            if (GATED) {
                ((u16*)y)[to] = bfloat(v / (1.f + __expf(-v)) * u);
            } else if (parts > 1) {
                float* sum = (float*)y + (i64)part * T * N + to;
                sum[0] = v, sum[8] = u;
            } else {
                ((u16*)y)[to] = bfloat(v), ((u16*)y)[to + 8] = bfloat(u);
            }
        }
    }
}

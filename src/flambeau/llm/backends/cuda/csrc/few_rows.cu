// A quantized linear layer for a few rows: y[T, N] = x[T, K] · w[N, K]ᵀ, bound by reading the weights once.
//
// A block computes some outputs from one part of the inputs. Its teams of WM warps divide that part among themselves in
// chunks of 64 bytes of each row of weights; the warps of a team have different outputs and share the inputs. A team has
// a ring of stages of its own in shared memory, so teams meet only when their sums are added. Weights are the first
// operand of the tensor cores. Which thread holds which input is free, as long as it is the same for both operands:
// threads read 8 bytes of a row.
//
// 8-bit weights become bfloat16 by moving bits: the bits of an integer below 256 are those of a bfloat16 number that is
// 2^133 times smaller, and the bits of an fp8 number those of one that is 2^120 times smaller. Inputs are therefore
// multiplied by 2^100. 4-bit levels become 128 + level; scales and minimums are applied to the sums of each group.
//
// With SCALED, outputs are multiplied with factors of the rows; with STREAM parts, sums are added to the residual stream:
// see stream.cuh.
//
// Defined before this text, as is that of stream.cuh: WT (1 int8, 2 fp8, 3 int4), WM (warps of a team), MT (16 outputs of a warp each), NT (8 rows
// each), WK (teams), STAGES, GROUP (of 4-bit weights), GATED (half of the outputs gate the other half), OVERLAPS (0 no; 1
// the next kernel may start when this one starts; 2 when its sums are complete), SCALED, STREAM (0: none).
constexpr int BM = WM * MT * 16, ROWS = NT * 8, THREADS = WM * WK * 32;
constexpr int KC = WT == 3 ? 128 : 64;  // inputs of a chunk
constexpr int PIECES = KC / 8;          // of 16 bytes, of a row of x
constexpr int PLANES = PIECES / 4;      // [ROWS][64 bytes] each: read without bank conflicts
constexpr int PLANE = ROWS * 64 + 64;
constexpr int SCALES_AT = MT * 1024;
constexpr int WARP_STAGE = SCALES_AT + (WT == 3 ? MT * 128 : 0);
constexpr int X_AT = WM * WARP_STAGE;
constexpr int STAGE = X_AT + PLANES * PLANE;
constexpr int SUM_STRIDE = BM + 4;  // floats, against bank conflicts

__device__ __forceinline__ uint4 lds128(u32 a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
__device__ __forceinline__ uint2 lds64(u32 a) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
    return v;
}
__device__ __forceinline__ u32 lds32(u32 a) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
    return v;
}
__device__ __forceinline__ void copy16_if(u32 to, const void* from, bool is_row) {  // else zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_row ? 16 : 0) : "memory");
}
// With a cache policy as well, ptxas 13.0 writes an illegal instruction where the shared address is uniform.
__device__ __forceinline__ void copy16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 times_2_100(u32 x) {
    u32 y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0x71807180u), "r"(0x80008000u));
    return y;
}
// The first and the last two of four 8-bit weights.
template <int W>
__device__ __forceinline__ u32 first_two(u32 w) {
    if (W == 1) return __byte_perm(w, 0, 0x4140);
    u32 t = __byte_perm(w, 0, 0x1404);
    return ((t >> 4) & 0x07f007f0u) | (t & 0x80008000u);
}
template <int W>
__device__ __forceinline__ u32 last_two(u32 w) {
    if (W == 1) return __byte_perm(w, 0, 0x4342);
    u32 t = __byte_perm(w, 0, 0x3424);
    return ((t >> 4) & 0x07f007f0u) | (t & 0x80008000u);
}

struct Block {
    const u8* weights;  // at this lane's first piece
    const u8* scales;
    const u16* x;
    i64 eight_rows, up;  // bytes
    int K, T, wm;
    int tiles;  // of this warp's outputs: fewer in the last block
};

__device__ __forceinline__ void load_weights(const Block& b, u32 stage, int chunk, int lane) {
    const u8* from = b.weights + chunk * 64;
    int piece = lane & 3;
    piece ^= ((lane >> 3) & 1) << 1;  // against bank conflicts: threads read 8 bytes
    u32 to = stage + b.wm * WARP_STAGE + (lane >> 2) * 64 + piece * 16;
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        if (i / 2 >= b.tiles) break;
        if (GATED)
            copy16(to + i * 512, from + (i >> 1) * b.eight_rows + (i & 1 ? b.up : 0));
        else
            copy16(to + i * 512, from + i * b.eight_rows);
    }
    if (WT == 3) {  // [16 rows of outputs][piece of 64 inputs][16][scale, minimum]
#pragma unroll
        for (int i = lane; i < MT * 8; i += 32)
            if (i / 8 < b.tiles)
                copy16(stage + b.wm * WARP_STAGE + SCALES_AT + i * 16,
                       b.scales + (i >> 3) * (i64)b.K + chunk * 128 + (i & 7) * 16);
    }
}

__device__ __forceinline__ void load_x(const Block& b, u32 stage, int chunk, int lane) {
    constexpr int AT_ONCE = 32 / PIECES;  // rows
    int row = b.wm * AT_ONCE + lane / PIECES, piece = lane % PIECES;
    u32 to = stage + X_AT + (piece >> 2) * PLANE + row * 64 + (piece & 3) * 16;
    const u16* from = b.x + (i64)row * b.K + chunk * KC + piece * 8;
#pragma unroll
    for (int i = 0; i < ROWS; i += WM * AT_ONCE)
        if (i + WM * AT_ONCE <= ROWS || row + i < ROWS) copy16_if(to + i * 64, from + i * b.K, row + i < b.T);
}

__device__ __forceinline__ void meet(int team) {
    __syncwarp();
    if (WM > 1) asm volatile("barrier.sync %0, %1;" ::"r"(team + 1), "n"(WM * 32) : "memory");
}

__device__ __forceinline__ void multiply(u32 stage, int wm, int lane, float (&sums)[MT][NT][4],
                                         float (&x_sums)[NT][4]) {
    int g = lane >> 2, j = lane & 3;
    u32 mine = stage + wm * WARP_STAGE, ws = mine + g * 64, xs = stage + X_AT + g * 64 + j * 16;
    int swap = (g >> 1) & 1;  // of the halves of a row
    const u32 ONES = 0x3f803f80u;
    // Two tiles of outputs at a time: products that depend on each other are further apart.
    if constexpr (WT < 3) {
        u32 x[NT][8];
#pragma unroll
        for (int n = 0; n < NT; n++) {
            uint4 p = lds128(xs + n * 512), q = lds128(xs + PLANE + n * 512);
            x[n][0] = times_2_100(p.x), x[n][1] = times_2_100(p.y), x[n][2] = times_2_100(p.z);
            x[n][3] = times_2_100(p.w), x[n][4] = times_2_100(q.x), x[n][5] = times_2_100(q.y);
            x[n][6] = times_2_100(q.z), x[n][7] = times_2_100(q.w);
        }
        if (WT == 1 && wm == 0)
#pragma unroll
            for (int i = 0; i < 8; i += 2)
#pragma unroll
                for (int n = 0; n < NT; n++) mma(x_sums[n], ONES, ONES, ONES, ONES, x[n][i], x[n][i + 1]);
#pragma unroll
        for (int m = 0; m < MT; m += 2) {
            u32 w[2][4], v[2][4];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                u32 at = ws + (m + e) * 1024 + j * 8, first = at + swap * 32, last = at + (swap ^ 1) * 32;
                uint2 w0 = lds64(first), w1 = lds64(last), v0 = lds64(first + 512), v1 = lds64(last + 512);
                w[e][0] = w0.x, w[e][1] = w0.y, w[e][2] = w1.x, w[e][3] = w1.y;
                v[e][0] = v0.x, v[e][1] = v0.y, v[e][2] = v1.x, v[e][3] = v1.y;
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    u32 a = w[e][i], b = v[e][i];
                    if (WT == 1) a ^= 0x80808080u, b ^= 0x80808080u;
                    u32 a0 = first_two<WT>(a), a1 = first_two<WT>(b), a2 = last_two<WT>(a), a3 = last_two<WT>(b);
#pragma unroll
                    for (int n = 0; n < NT; n++) mma(sums[m + e][n], a0, a1, a2, a3, x[n][2 * i], x[n][2 * i + 1]);
                }
        }
    } else {
        constexpr int HALVES = GROUP == 64 ? 1 : 2;  // of a row's 64 bytes that belong to one group
        const u32 C = 0x43434343u, L = 0x0f0f0f0fu;
#pragma unroll 1
        for (int first = 0; first < 2; first += HALVES) {
            float group_sums[NT][4];
            u32 x[HALVES][NT][8];
#pragma unroll
            for (int n = 0; n < NT; n++) {
                group_sums[n][0] = group_sums[n][1] = group_sums[n][2] = group_sums[n][3] = 0.f;
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    uint4 p = lds128(xs + (GROUP == 64 ? 2 * first : h) * PLANE + n * 512);
                    uint4 q = lds128(xs + (GROUP == 64 ? 2 * first + 1 : 2 + h) * PLANE + n * 512);
                    x[h][n][0] = p.x, x[h][n][1] = p.y, x[h][n][2] = p.z, x[h][n][3] = p.w;
                    x[h][n][4] = q.x, x[h][n][5] = q.y, x[h][n][6] = q.z, x[h][n][7] = q.w;
#pragma unroll
                    for (int i = 0; i < 8; i += 2)
                        mma(group_sums[n], ONES, ONES, ONES, ONES, x[h][n][i], x[h][n][i + 1]);
                }
            }
#pragma unroll
            for (int m = 0; m < MT; m += 2) {
                float level_sums[2][NT][4];
                u32 top[2], bottom[2];  // scales and minimums
#pragma unroll
                for (int e = 0; e < 2; e++) {
#pragma unroll
                    for (int n = 0; n < NT; n++)
                        level_sums[e][n][0] = level_sums[e][n][1] = level_sums[e][n][2] = level_sums[e][n][3] = 0.f;
                    u32 both = mine + SCALES_AT + (m + e) * 128 + first * 64 + g * 4;
                    top[e] = lds32(both), bottom[e] = lds32(both + 32);
                }
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    uint2 w[2], v[2];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        u32 at = ws + (m + e) * 1024 + ((first + h) ^ swap) * 32 + j * 8;
                        w[e] = lds64(at), v[e] = lds64(at + 512);
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            u32 a = i & 1 ? w[e].y : w[e].x, b = i & 1 ? v[e].y : v[e].x;
                            if (i < 2) a >>= 4, b >>= 4;
                            a &= L, b &= L;
                            u32 a0 = __byte_perm(a, C, 0x4140), a2 = __byte_perm(a, C, 0x4342);
                            u32 a1 = __byte_perm(b, C, 0x4140), a3 = __byte_perm(b, C, 0x4342);
#pragma unroll
                            for (int n = 0; n < NT; n++)
                                mma(level_sums[e][n], a0, a1, a2, a3, x[h][n][2 * i], x[h][n][2 * i + 1]);
                        }
                }
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float scale0 = low(top[e]), scale1 = low(bottom[e]);
                    float shift0 = high(top[e]) - 128.f * scale0, shift1 = high(bottom[e]) - 128.f * scale1;
#pragma unroll
                    for (int n = 0; n < NT; n++) {
                        float *to = sums[m + e][n], *from = level_sums[e][n];
                        // Two instructions each; as one sum, three.
                        to[0] = fmaf(shift0, group_sums[n][0], fmaf(scale0, from[0], to[0]));
                        to[1] = fmaf(shift0, group_sums[n][1], fmaf(scale0, from[1], to[1]));
                        to[2] = fmaf(shift1, group_sums[n][0], fmaf(scale1, from[2], to[2]));
                        to[3] = fmaf(shift1, group_sums[n][1], fmaf(scale1, from[3], to[3]));
                    }
                }
            }
        }
    }
}

__device__ __forceinline__ float2 sum_of(const float* sums, int t, int row, float offset) {
    float2 y = {-offset, -offset};
#pragma unroll
    for (int w = 0; w < WK; w++) {
        float2 some = *(const float2*)(sums + (w * ROWS + t) * SUM_STRIDE + row);
        y.x += some.x, y.y += some.y;
    }
    return y;
}

// scales: of 8-bit weights float[N], or of 4-bit weights in the order of load_weights. y: bfloat16, or float parts
// [gridDim.y, T, N] of the sums. N does not count the gates.
#if STREAM > 1
#define CLUSTER __cluster_dims__(1, STREAM, 1)
#else
#define CLUSTER
#endif
extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, 1)
    few_rows(const u16* x, const u8* weights, const u8* scales, const u16* bias, void* y, int T, int N, int K
#if SCALED
             ,
             const float* squares, int groups, float epsilon
#endif
#if STREAM
             ,
             Stream stream
#endif
    ) {
    extern __shared__ __align__(128) u8 smem[];
#if SCALED
    __shared__ float factors[ROWS];
#endif
    int lane = threadIdx.x & 31, team = threadIdx.x / 32 / WM, wm = threadIdx.x / 32 % WM;
    int tile = blockIdx.x, part = blockIdx.y, parts = gridDim.y;
    i64 row_bytes = (i64)K * 64 / KC;
    Block b;
    b.K = K, b.T = T, b.x = x, b.wm = wm;
    b.eight_rows = 8 * row_bytes;
    b.up = N * row_bytes;
    int first_tile = (tile * WM + wm) * MT;
    b.tiles = N / (GATED ? 8 : 16) - first_tile;
    b.weights = weights + ((i64)first_tile * (GATED ? 8 : 16) + (lane >> 2)) * row_bytes + (lane & 3) * 16;
    b.scales = scales + (i64)first_tile * K;
    int chunks = K / KC, begin = chunks * part / parts, end = chunks * (part + 1) / parts;
    u32 ring = (u32)__cvta_generic_to_shared(smem) + team * STAGES * STAGE;
    float sums[MT][NT][4], x_sums[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x_sums[n][i] = 0.f;
#pragma unroll
            for (int m = 0; m < MT; m++) sums[m][n][i] = 0.f;
        }
    if (OVERLAPS == 1) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    int next = begin + team;  // the next chunk to load
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        if (next + s * WK < end) load_weights(b, ring + s * STAGE, next + s * WK, lane);
    if (OVERLAPS) asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (next < end) load_x(b, ring + s * STAGE, next, lane);
        commit();
        next += WK;
    }
#if SCALED
    find_factors<ROWS, THREADS / 32>(factors, squares, T, groups, K, epsilon);
#endif
    int stage = 0, free_stage = STAGES - 1;
#pragma unroll 1
    for (int chunk = begin + team; chunk < end; chunk += WK) {
        wait_copies<STAGES - 2>();
        meet(team);
        if (next < end) {
            load_weights(b, ring + free_stage * STAGE, next, lane);
            load_x(b, ring + free_stage * STAGE, next, lane);
        }
        commit();
        next += WK;
        multiply(ring + stage * STAGE, wm, lane, sums, x_sums);
        free_stage = stage;
        if (++stage == STAGES) stage = 0;
    }
    wait_copies<0>();
    if (OVERLAPS == 2) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    __syncthreads();
    float* all = (float*)smem;
    {
        int g = lane >> 2, j = lane & 3;
        float* mine = all + (team * ROWS + 2 * j) * SUM_STRIDE + wm * MT * 16 + g;
        constexpr float BACK = WT == 1 ? 8589934592.f : WT == 2 ? 1048576.f : 1.f;  // 2^33, 2^20
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int n = 0; n < NT; n++) {
                float* c = sums[m][n];
                float* to = mine + n * 8 * SUM_STRIDE + m * 16;
                to[0] = c[0] * BACK, to[SUM_STRIDE] = c[1] * BACK;
                to[8] = c[2] * BACK, to[SUM_STRIDE + 8] = c[3] * BACK;
            }
    }
    float* offsets = all + WK * ROWS * SUM_STRIDE;  // [teams][rows]
    if (WT == 1 && wm == 0 && lane < 4)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)  // an integer's sign bit was flipped, which added 128 to it
                offsets[team * ROWS + n * 8 + 2 * lane + e] = x_sums[n][e] * (128.f * 7.888609052210118e-31f);  // 2^-100
    __syncthreads();
    static_assert(THREADS >= (GATED ? BM / 4 : BM / 2), "a thread stores two outputs of some rows");
    constexpr int PAIRS = (GATED ? BM / 2 : BM) / 2;
    int pair = threadIdx.x % PAIRS, first = GATED ? (pair >> 2) * 16 + (pair & 3) * 2 : pair * 2;
    int at = tile * PAIRS * 2 + pair * 2;
    bool stores = at < N && threadIdx.x < THREADS / PAIRS * PAIRS;
#if !STREAM
    if (!stores) return;
#endif
    float2 one = {1.f, 1.f}, scale = one, up_scale = one, start = {0.f, 0.f}, up_start = start;
    if (stores && (WT == 1 || WT == 2)) {
        scale = *(const float2*)((const float*)scales + at);
        if (GATED) up_scale = *(const float2*)((const float*)scales + N + at);
    }
    if (stores && bias && part == 0) {
        start = make_float2(low(bias[at]), low(bias[at + 1]));
        if (GATED) up_start = make_float2(low(bias[N + at]), low(bias[N + at + 1]));
    }
    for (int t = threadIdx.x / PAIRS; stores && t < T; t += THREADS / PAIRS) {
        float offset = 0.f;
        if (WT == 1)
#pragma unroll
            for (int w = 0; w < WK; w++) offset += offsets[w * ROWS + t];
        float2 v = sum_of(all, t, first, offset);
#if SCALED
        float factor = factors[t];
#else
        constexpr float factor = 1.f;
#endif
        v.x = v.x * (scale.x * factor) + start.x, v.y = v.y * (scale.y * factor) + start.y;
#if STREAM
        *(float2*)(all + t * SUM_STRIDE + first) = v;  // only this thread has read it
        continue;
#endif
        if (GATED) {
            float2 u = sum_of(all, t, first + 8, offset);
            u.x = u.x * (up_scale.x * factor) + up_start.x, u.y = u.y * (up_scale.y * factor) + up_start.y;
            v.x = v.x / (1.f + __expf(-v.x)) * u.x, v.y = v.y / (1.f + __expf(-v.y)) * u.y;
        }
        i64 to = (i64)t * N + at;
        if (parts > 1)
            *(float2*)((float*)y + (i64)part * T * N + to) = v;
        else
            *(u32*)((u16*)y + to) = pack(v.x, v.y);
    }
#if STREAM
    add_to_stream<BM, SUM_STRIDE, STREAM, THREADS / 32>(stream, (u32)__cvta_generic_to_shared(all), T, N, tile * BM);
#endif
}

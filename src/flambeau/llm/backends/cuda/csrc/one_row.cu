// One row times a matrix, with the norm before it or the residual sum after it, for decode steps of one sequence.
//
// There is one block per multiprocessor. KW warps are a team: they divide the inputs, whose values stay in registers.
// Teams take R rows of weights at a time, which come through a ring in shared memory; a thread reads only what it copied
// itself. The ring is filled before the kernel waits for its input, so that weights load while the kernels before end.
// Sums of all warps are added up at the end: there is no barrier in between.
//
// Defined before this text: WT (0 bfloat16, 1 int8, 2 fp8, 3 int4 in groups), K inputs, NW warps, KW of a team, C times
// 512 bytes of a row for one warp, R rows of a block, S rows of the ring (a multiple of R), GROUP, GATED, NORM (the input
// is normalized), RESIDUAL (the outputs are added to `out`), WIDE (float32 outputs).
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
__device__ __forceinline__ void wait_for_oldest() { asm volatile("cp.async.wait_group %0;" ::"n"(S - 1) : "memory"); }
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

// ---- inputs in registers ----

struct Inputs {
#if WT == 0
    float x[C][8];
#else
    u32 x[C][E / 2];  // pairs of float16, in the order in which weights are widened
    float sum[C];     // int4: of the values in a chunk
#endif
};

// where the inputs of 16 bytes of weights begin; int4: those of the upper halves of bytes, the others are `half` further
__device__ __forceinline__ int input_at(int byte) {
    if (WT == 0) return byte / 2;
    if (WT == 3) return byte / (GROUP / 2) * GROUP + byte % (GROUP / 2);
    return byte;
}
template <bool SHARED>
__device__ __forceinline__ void load16(const u16* from, u32 (&to)[E / 2], int byte) {
    int k = input_at(byte);
#pragma unroll
    for (int i = 0; i < E / 8; i++) {
        const u16* at = from + k + (WT == 3 && i >= 2 ? GROUP / 2 + (i - 2) * 8 : i * 8);
        uint4 v = SHARED ? ld_cg(at) : *(const uint4*)at;
        to[i * 4] = v.x;
        to[i * 4 + 1] = v.y;
        to[i * 4 + 2] = v.z;
        to[i * 4 + 3] = v.w;
    }
}

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

// reads the row, normalizes it if NORM, and returns what sums are to be multiplied with
__device__ __forceinline__ float prepare(const u16* x, const u32 (&gains)[C][E / 2], Inputs& in, float* shared, int kw,
                                         float epsilon) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 raw[C][E / 2];
#pragma unroll
    for (int c = 0; c < C; c++) {
        int byte = (kw * C + c) * CHUNK + lane * 16;
        for (int i = 0; i < E / 2; i++) raw[c][i] = 0;
        if (byte < ROW_BYTES) load16<true>(x, raw[c], byte);
    }
    float squares = 0, largest = 0, root = 1.f, back = 1.f, scale = 1.f;
    if (NORM || WT != 0) {
#pragma unroll
        for (int c = 0; c < C; c++)
#pragma unroll
            for (int i = 0; i < E / 2; i++) {
                float a = lo2f(raw[c][i]), b = hi2f(raw[c][i]);
                if (NORM) {
                    squares += a * a + b * b;
                    a *= lo2f(gains[c][i]);
                    b *= hi2f(gains[c][i]);
                }
                largest = fmaxf(largest, fmaxf(fabsf(a), fabsf(b)));
            }
        if (NORM) squares = warp_sum(squares);
        if (WT != 0) largest = warp_max(largest);
        if (lane == 0) {
            shared[warp] = squares;
            shared[NW + warp] = largest;
        }
        __syncthreads();
        squares = largest = 0;
#pragma unroll
        for (int i = 0; i < KW; i++) {
            squares += shared[warp / KW * KW + i];
            largest = fmaxf(largest, shared[NW + warp / KW * KW + i]);
        }
        if (NORM) root = rsqrtf(squares / K + epsilon);
        if (WT != 0) scales_of(largest * root, scale, back);
    }
#pragma unroll
    for (int c = 0; c < C; c++) {
        float v[E];
        float total = 0;
#pragma unroll
        for (int i = 0; i < E / 2; i++) {
            v[i * 2] = lo2f(raw[c][i]);
            v[i * 2 + 1] = hi2f(raw[c][i]);
            if (NORM) {
                v[i * 2] = round_bf(v[i * 2] * root * lo2f(gains[c][i]));
                v[i * 2 + 1] = round_bf(v[i * 2 + 1] * root * hi2f(gains[c][i]));
            }
            total += v[i * 2] + v[i * 2 + 1];
        }
#if WT == 0
        for (int i = 0; i < 8; i++) in.x[c][i] = v[i];
#elif WT == 3
        in.sum[c] = total / back;
#pragma unroll
        for (int i = 0; i < 4; i++) {  // 4 bytes: 4 weights of the upper and 4 of the lower halves
            float* up = v + i * 4;
            float* low = v + 16 + i * 4;
            float less = scale * 0.0625f;
            in.x[c][i * 4] = pack_h(low[0] * scale, low[2] * scale);
            in.x[c][i * 4 + 1] = pack_h(up[0] * less, up[2] * less);
            in.x[c][i * 4 + 2] = pack_h(low[1] * scale, low[3] * scale);
            in.x[c][i * 4 + 3] = pack_h(up[1] * less, up[3] * less);
        }
#else
        for (int i = 0; i < 8; i++) in.x[c][i] = pack_h(v[i * 2] * scale, v[i * 2 + 1] * scale);
#endif
    }
    return back;
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
    one_row(const u16* x, const u8* weight, const void* scales, const u16* bias, const u16* gain, void* out, int N,
            float epsilon, float factor) {
    extern __shared__ __align__(128) u8 smem[];
    float* sums = (float*)(smem + RING_BYTES + SCALE_BYTES);  // [ROUND * R][KW]
    float* shared = sums + ROUND * R * KW;                    // [2 * NW]
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
    u32 gains[C][E / 2];
    if (NORM) {
#pragma unroll
        for (int c = 0; c < C; c++) {
            int byte = (kw * C + c) * CHUNK + lane * 16;
            for (int i = 0; i < E / 2; i++) gains[c][i] = 0;
            if (byte < ROW_BYTES) load16<false>(gain, gains[c], byte);
        }
    }
    int own = (tid / OUTS * gridDim.x + blockIdx.x) * OUTS + tid % OUTS;  // this thread's first output
    wait_for_previous();
    Inputs in;
    float old = 0;  // of the residual stream
    if (RESIDUAL && tid < count * OUTS) old = lo2f(ld_cg16((const u16*)out + own));
    float back = prepare(x, gains, in, shared, kw, epsilon);

    int done = team, stage = 0;
    for (int base = 0; base < count; base += ROUND) {
        int end = min(count, base + ROUND);
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
            int row = GATED ? o / OUTS * R + o % OUTS : o;
            float y = 0, other = 0;
#pragma unroll
            for (int i = 0; i < KW; i++) {
                y += sums[row * KW + i];
                if (GATED) other += sums[(row + R / 2) * KW + i];
            }
            y *= back;
            other *= back;
            if (WT == 1 || WT == 2) {
                y *= ((const float*)scales)[n];
                if (GATED) other *= ((const float*)scales)[N + n];
            }
            if (bias) {
                y += lo2f(bias[n]);
                if (GATED) other += lo2f(bias[N + n]);
            }
            if (GATED) y = y / (1.f + __expf(-y)) * other;
            if (WIDE) {
                ((float*)out)[n] = round_bf(y);
            } else {
                if (RESIDUAL) {
                    if (base || o >= THREADS) old = lo2f(ld_cg16((const u16*)out + n));
                    y = old + round_bf(y) * factor;
                }
                ((u16*)out)[n] = (u16)pack_bf(y, 0.f);
            }
        }
        if (base + ROUND < count) __syncthreads();
    }
}

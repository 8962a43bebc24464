// One decode step of a dense Llama-shaped network for one sequence, in one persistent kernel.
//
// There is one block per multiprocessor. Warp 11 streams weights through a ring in shared memory with bulk copies and
// never waits for a result; warps 0 to 10 compute. Blocks meet at a counter in global memory between the parts of a
// layer, and the ring fills meanwhile. Weights keep the row-major layout of the engine's layers.
//
// Defined before this text: WT and HEAD_WT (0 bfloat16, 1 int8, 2 fp8, 3 int4 in groups), HID, NH, NKV, HD, FF, LAYERS,
// VOCAB, GROUP, RB (bytes of a row that one copy moves), STAGES, NB (blocks), KVBLOCK, EPS, XBYTES.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define CONSUMERS 352
#define LPT (HD / 8)
#define TPW (32 / LPT)
#define NWARPS 11
#define QKV_N ((NH + 2 * NKV) * HD)
template <int W>
struct Kind {
    static constexpr int pad = W == 0 ? 16 : W == 3 ? 32 : 64, stride = RB + pad, scales = W == 3 ? RB / 32 * 64 : 0;
    template <int K>
    static constexpr int bytes = W == 0   ? K * 2
                                 : W == 3 ? K / 2
                                          : K;
};
#define STAGE_B (16 * (RB + (WT == 3 ? 32 : WT == 0 ? 16 : 64)) + (WT == 3 ? RB / 32 * 64 : 0))
#define MAXK (FF > HID ? (FF > NH * HD ? FF : NH * HD) : (HID > NH * HD ? HID : NH * HD))
#define NSPLIT_MAX (NB / NKV)
#define GQ (NH / NKV)

struct Params {
    const u64* weights;  // [layers * 4 + 1]
    const u64* scales;   // same
    const u64* gains;    // [layers * 2 + 1]
    const u64* keys;     // [layers]
    const u64* values;
    const float* cos;
    const float* sin;
    u16* h;
    u16* qkv;
    u16* act;
    float* part_o;
    float* part_ml;
    float* logits;
    u32* counter;
    const i64* slot;  // from here on: the step's own, set by the kernel
    const i64* length;
    const i64* table;
};

__device__ __forceinline__ u32 smem_of(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float bf2f(u32 b) { return __uint_as_float(b << 16); }
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
__device__ __forceinline__ void mbar_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void mbar_wait(u32 bar, u32 phase) {
    asm volatile(
        "{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:\n}" ::"r"(
            bar),
        "r"(phase)
        : "memory");
}
__device__ __forceinline__ void mbar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void bulk(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(dst),
        "l"(src), "r"(bytes), "r"(bar), "l"(0x12F0000000000000ull)
        : "memory");
}
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, 352;" ::: "memory"); }
__device__ __forceinline__ uint4 ld_cg(const void* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ __forceinline__ u16 ld_cg16(const void* p) {
    u16 v;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ float ld_cgf(const void* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void mma_bf(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_h(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
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
__device__ __forceinline__ u32 hsub2(u32 a, u32 b) {
    u32 r;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ __forceinline__ u32 hfma2(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
__device__ __forceinline__ u32 masked(u32 w, u32 m) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(w), "r"(m), "r"(0x64006400u));
    return r;
}
template <int W>
__device__ __forceinline__ u32 low2(u32 w) {
    if constexpr (W == 1) return hsub2(__byte_perm(w, 0x64646464u, 0x4140), 0x64806480u);
    u32 r;
    asm("{.reg .b16 l,h; mov.b32 {l,h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(r) : "r"(w));
    return r;
}
template <int W>
__device__ __forceinline__ u32 high2(u32 w) {
    if constexpr (W == 1) return hsub2(__byte_perm(w, 0x64646464u, 0x4342), 0x64806480u);
    u32 r;
    asm("{.reg .b16 l,h; mov.b32 {l,h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(r) : "r"(w));
    return r;
}

struct Shared {
    Params params;
    u64 full[STAGES];
    u64 empty[STAGES];
    float red[2][NWARPS][16];
    float2 sums[MAXK / 64 + 8];  // of x, per 64 inputs, and what the offsets of their weights add
    u32 tile[STAGES];
    float block[64];
};

__device__ __forceinline__ float warp_sum(float v) {
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}
// sum of a and maximum of b over the consumers, one barrier; `turn` alternates between two buffers
__device__ __forceinline__ void block_reduce(float& a, float& b, Shared* s, int& turn) {
    a = warp_sum(a);
    b = warp_max(b);
    int w = threadIdx.x >> 5;
    float* at = s->block + (turn & 1) * 2 * NWARPS;
    if ((threadIdx.x & 31) == 0) {
        at[w] = a;
        at[NWARPS + w] = b;
    }
    consumers_sync();
    a = 0;
    b = 0;
#pragma unroll
    for (int i = 0; i < NWARPS; i++) {
        a += at[i];
        b = fmaxf(b, at[NWARPS + i]);
    }
    turn++;
}

// x[K] as the products read it; returns what outputs are to be multiplied with
#define PER ((K + CONSUMERS * 8 - 1) / (CONSUMERS * 8))
template <int W, int K>
__device__ __forceinline__ float put_x(float (&v)[PER][8], float m, u16* x, Shared* s) {
    int tid = threadIdx.x;
    (void)tid;
    if constexpr (W == 0) {
        for (int i = 0; i < PER; i++) {
            int k = (i * CONSUMERS + tid) * 8;
            if (k < K) {
                uint4 w = make_uint4(pack_bf(v[i][0], v[i][1]), pack_bf(v[i][2], v[i][3]), pack_bf(v[i][4], v[i][5]),
                                     pack_bf(v[i][6], v[i][7]));
                *(uint4*)(x + k) = w;
            }
        }
        consumers_sync();
        return 1.f;
    } else {
        u32 ex = (__float_as_uint(m) >> 23) & 255;
        if (ex < 20) ex = 20;
        if (ex > 250) ex = 250;
        float back = __uint_as_float((ex - 9) << 23),
              scale = __uint_as_float((254 - ex + 9) << 23);  // largest in [512, 1024)
        for (int i = 0; i < PER; i++) {
            int k = (i * CONSUMERS + tid) * 8;
            if (k < K) {
                for (int e = 0; e < 8; e++) v[i][e] *= scale;
                if constexpr (W != 3) {
                    *(uint4*)(x + k) = make_uint4(pack_h(v[i][0], v[i][1]), pack_h(v[i][2], v[i][3]),
                                                  pack_h(v[i][4], v[i][5]), pack_h(v[i][6], v[i][7]));
                } else {
                    // pieces of 32 bytes, whose upper halves are 32 inputs of the first half of a group and lower
                    // halves those half a group on
                    int g = k / GROUP, in = k % GROUP;
                    int upper = in < GROUP / 2;
                    int p = upper ? in : in - GROUP / 2;
                    int piece = g * (GROUP / 64) + p / 32;
                    p %= 32;
                    u32* to = (u32*)(x + piece * 64 + (p / 8) * 16) + upper;
                    float t = 0;
                    for (int e = 0; e < 8; e++) t += v[i][e];
                    if (upper)
                        for (int e = 0; e < 8; e++) v[i][e] *= 0.0625f;
                    to[0] = pack_h(v[i][0], v[i][2]);
                    to[2] = pack_h(v[i][1], v[i][3]);
                    to[4] = pack_h(v[i][4], v[i][6]);
                    to[6] = pack_h(v[i][5], v[i][7]);
                    t += __shfl_xor_sync(~0u, t, 1);
                    t += __shfl_xor_sync(~0u, t, 2);
                    float other = __shfl_xor_sync(~0u, t, GROUP / 16);
                    if (upper && (threadIdx.x & 3) == 0)
                        s->sums[piece] = make_float2(t + other, 1024.f * (other + t * 0.0625f));
                }
            }
        }
        consumers_sync();
        return back;
    }
}
__device__ __forceinline__ float h2f(u32 h) {
    float f;
    asm("{.reg .b16 l,h; mov.b32 {l,h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(h));
    return f;
}
#define WIDEN_H(TO, FROM)          \
    {                              \
        TO[0] = h2f(FROM.x);       \
        TO[1] = h2f(FROM.x >> 16); \
        TO[2] = h2f(FROM.y);       \
        TO[3] = h2f(FROM.y >> 16); \
        TO[4] = h2f(FROM.z);       \
        TO[5] = h2f(FROM.z >> 16); \
        TO[6] = h2f(FROM.w);       \
        TO[7] = h2f(FROM.w >> 16); \
    }
#define EACH(i, k)                                                         \
    for (int i = 0, k = threadIdx.x * 8; i < PER; i++, k += CONSUMERS * 8) \
        if (k < K)
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
template <int K>
struct Gains {
    uint4 w[PER];
};
template <int K>
__device__ __forceinline__ Gains<K> load_gains(const u16* gain) {
    Gains<K> g;
    _Pragma("unroll") EACH(i, k) g.w[i] = *(const uint4*)(gain + k);
    return g;
}
template <int W, int K>
__device__ __forceinline__ float stage_norm(const u16* h, const Gains<K>& gains, u16* x, Shared* s, int& turn) {
    float v[PER][8];
    float q = 0, m = 0;
    uint4 w[PER];
#pragma unroll
    EACH(i, k) w[i] = ld_cg(h + k);
#pragma unroll
    EACH(i, k) {
        WIDEN(v[i], w[i]) float g[8];
        WIDEN(g, gains.w[i]) for (int e = 0; e < 8; e++) {
            q += v[i][e] * v[i][e];
            v[i][e] *= g[e];
            m = fmaxf(m, fabsf(v[i][e]));
        }
    }
    block_reduce(q, m, s, turn);
    float root = rsqrtf(q / K + EPS);
#pragma unroll
    EACH(i, k) for (int e = 0; e < 8; e++) v[i][e] = round_bf(v[i][e] * root);
    return put_x<W, K>(v, m * root, x, s);
}
template <int W, int K>
__device__ __forceinline__ float stage_plain(const u16* from, u16* x, Shared* s, int& turn) {
    float v[PER][8];
    float q = 0, m = 0;
    uint4 w[PER];
#pragma unroll
    EACH(i, k) w[i] = ld_cg(from + k);
#pragma unroll
    EACH(i, k) { WIDEN(v[i], w[i]) for (int e = 0; e < 8; e++) m = fmaxf(m, fabsf(v[i][e])); }
    if (W != 0) block_reduce(q, m, s, turn);
    return put_x<W, K>(v, m, x, s);
}
template <int W, int K>
__device__ __forceinline__ float stage_attention(const Params& P, int splits, u16* x, Shared* s, int& turn) {
    float v[PER][8];
    float q = 0, m = 0;
#pragma unroll
    EACH(i, k) {
        int head = k / HD;
        float top = -1e30f, l = 0;
        for (int e = 0; e < 8; e++) v[i][e] = 0;
        for (int j0 = 0; j0 < splits; j0 += 4) {
            uint4 a[4];
            float jm[4], jl[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                jm[j] = -1e30f;
                jl[j] = 0;
                a[j] = make_uint4(0, 0, 0, 0);
                if (j0 + j < splits) {
                    const float* ml = P.part_ml + ((j0 + j) * NH + head) * 2;
                    a[j] = ld_cg((const u16*)P.part_o + (i64)(j0 + j) * NH * HD + k);
                    jm[j] = ld_cgf(ml);
                    jl[j] = ld_cgf(ml + 1);
                }
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float next = fmaxf(top, jm[j]), f = exp2f(top - next), w = exp2f(jm[j] - next) * jl[j];
                top = next;
                l = l * f + w;
                float o[8];
                WIDEN_H(o, a[j])
                for (int e = 0; e < 8; e++) v[i][e] = v[i][e] * f + w * o[e];
            }
        }
        l = 1.f / l;
        for (int e = 0; e < 8; e++) {
            v[i][e] = round_bf(v[i][e] * l);
            m = fmaxf(m, fabsf(v[i][e]));
        }
    }
    if (W != 0) block_reduce(q, m, s, turn);
    return put_x<W, K>(v, m, x, s);
}

#define FIRST(op) ((blockIdx.x + (op)*37) % NB)

struct Ring {
    int stage;
    u32 phase;
};

// the weights of one matrix, tile by tile: the first is this block's own, the next are taken from a common counter, one
// ahead
template <int W, int N, int K, bool GATED>
__device__ __forceinline__ void produce(const u8* w, const u8* scales, int op, Ring& r, u8* ring, Shared* s) {
    constexpr int BYTES = Kind<W>::template bytes<K>;
    constexpr int tiles = GATED ? N / 8 : N / 16;
    int lane = threadIdx.x & 31, t = FIRST(op), next = 0;
    u32* claims = s->params.counter + 1 + op;
    while (t < tiles) {
        if (lane == 0) next = NB + atomicAdd(claims, 1);
        i64 row = GATED ? (lane < 8 ? t * 8 + lane : N + t * 8 + lane - 8) : t * 16 + lane;
        const u8* from = w + row * (i64)BYTES;
        for (int at = 0; at < BYTES; at += RB) {
            u32 bytes = min(RB, BYTES - at);
            u32 full = smem_of(&s->full[r.stage]), to = smem_of(ring + r.stage * STAGE_B);
            if (lane == 0) {
                mbar_wait(smem_of(&s->empty[r.stage]), r.phase ^ 1);
                if (at + RB >= BYTES) s->tile[r.stage] = next;  // known at the last part of a tile: which one follows
                mbar_expect(full, bytes * 16 + (Kind<W>::scales ? bytes / 32 * 64 : 0));
            }
            __syncwarp();
            if (lane < 16) bulk(to + lane * Kind<W>::stride, from + at, bytes, full);
            if (Kind<W>::scales && lane == 16)
                bulk(to + 16 * Kind<W>::stride, scales + (i64)t * (BYTES / 32 * 64) + at / 32 * 64, bytes / 32 * 64,
                     full);
            if (++r.stage == STAGES) {
                r.stage = 0;
                r.phase ^= 1;
            }
        }
        t = __shfl_sync(~0u, next, 0);
    }
}

template <int W, int N, int K, int KIND>  // 0 qkv, 1 add to h, 2 gated, 3 logits
__device__ __forceinline__ void consume(const Params& P, const float* row_scale, float back, int op, Ring& r, u8* ring,
                                        const u16* x, Shared* s, int& slot) {
    constexpr int BYTES = Kind<W>::template bytes<K>;
    const bool GATED = KIND == 2;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, j = lane & 3;
    const int tiles = GATED ? N / 8 : N / 16;
    u32 xs = smem_of(x);
    int next = 0;
    for (int t = FIRST(op); t < tiles; t = next) {
        float c[4] = {0, 0, 0, 0}, c2[4] = {0, 0, 0, 0};
        float acc0 = 0, acc1 = 0;
        for (int at = 0; at < BYTES; at += RB) {
            int bytes = min(RB, BYTES - at);
            u32 from = smem_of(ring + r.stage * STAGE_B);
            mbar_wait(smem_of(&s->full[r.stage]), r.phase);
            if constexpr (W == 0) {
                u32 a_at = from + ((lane & 7) + ((lane >> 3) & 1) * 8) * Kind<W>::stride + (lane >> 4) * 16;
#define STEP16(U, C)                                                                 \
    {                                                                                \
        u32 a0, a1, a2, a3, b0 = 0, b1 = 0;                                          \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" \
                     : "=r"(a0), "=r"(a1), "=r"(a2), "=r"(a3)                        \
                     : "r"(a_at + (U)*32));                                          \
        if (lane < 4) {                                                              \
            u32 xa = xs + at + (U)*32 + j * 4;                                       \
            b0 = lds32(xa);                                                          \
            b1 = lds32(xa + 16);                                                     \
        }                                                                            \
        mma_bf(C, a0, a1, a2, a3, b0, b1);                                           \
    }
#pragma unroll 2
                for (int u = warp; u < bytes / 32; u += 2 * NWARPS) {
                    STEP16(u, c)
                    if (u + NWARPS < bytes / 32) STEP16(u + NWARPS, c2)
                }
            } else if constexpr (W == 3) {
                for (int u = warp; u < bytes / 32; u += NWARPS) {
                    u32 at0 = from + row * Kind<W>::stride + u * 32 + j * 8;
                    uint2 w = lds64(at0), v = lds64(at0 + 8 * Kind<W>::stride);
                    uint4 x0 = make_uint4(0, 0, 0, 0), x1 = x0;
                    int piece = at / 32 + u;
                    if (lane < 4) {
                        u32 xa = xs + piece * 128 + j * 32;
                        x0 = lds128(xa);
                        x1 = lds128(xa + 16);
                    }
                    float d[4] = {0, 0, 0, 0}, d2[4] = {0, 0, 0, 0};
                    const u32 L = 0x000f000fu, H = 0x00f000f0u;
#define NIB(d, W, V, XA, XB, XC, XD)                                                  \
    {                                                                                 \
        u32 W2 = W >> 8, V2 = V >> 8;                                                 \
        mma_h(d, masked(W, L), masked(V, L), masked(W, H), masked(V, H), XA, XB);     \
        mma_h(d, masked(W2, L), masked(V2, L), masked(W2, H), masked(V2, H), XC, XD); \
    }
                    NIB(d, w.x, v.x, x0.x, x0.y, x0.z, x0.w)
                    NIB(d2, w.y, v.y, x1.x, x1.y, x1.z, x1.w)
                    u32 sc = from + 16 * Kind<W>::stride + u * 64;
                    u32 s0 = lds32(sc + row * 4), s1 = lds32(sc + row * 4 + 32);
                    float2 sum = s->sums[piece];
                    acc0 += lo2f(s0) * (d[0] + d2[0] - sum.y) + hi2f(s0) * sum.x;
                    acc1 += lo2f(s1) * (d[2] + d2[2] - sum.y) + hi2f(s1) * sum.x;
                }
            } else {
                for (int u = warp; u < bytes / 64; u += NWARPS) {
                    u32 at0 = from + row * Kind<W>::stride + u * 64 + j * 16;
                    uint4 w = lds128(at0), v = lds128(at0 + 8 * Kind<W>::stride);
                    uint4 x0 = make_uint4(0, 0, 0, 0), x1 = x0;
                    if (lane < 4) {
                        u32 xa = xs + (at + u * 64 + j * 16) * 2;
                        x0 = lds128(xa);
                        x1 = lds128(xa + 16);
                    }
                    if constexpr (W == 1) {
                        w.x ^= 0x80808080u;
                        w.y ^= 0x80808080u;
                        w.z ^= 0x80808080u;
                        w.w ^= 0x80808080u;
                        v.x ^= 0x80808080u;
                        v.y ^= 0x80808080u;
                        v.z ^= 0x80808080u;
                        v.w ^= 0x80808080u;
                    }
                    mma_h(c, low2<W>(w.x), low2<W>(v.x), high2<W>(w.x), high2<W>(v.x), x0.x, x0.y);
                    mma_h(c2, low2<W>(w.y), low2<W>(v.y), high2<W>(w.y), high2<W>(v.y), x0.z, x0.w);
                    mma_h(c, low2<W>(w.z), low2<W>(v.z), high2<W>(w.z), high2<W>(v.z), x1.x, x1.y);
                    mma_h(c2, low2<W>(w.w), low2<W>(v.w), high2<W>(w.w), high2<W>(v.w), x1.z, x1.w);
                }
            }
            if (at + RB >= BYTES) next = s->tile[r.stage];
            __syncwarp();
            if (lane == 0) mbar_arrive(smem_of(&s->empty[r.stage]));
            if (++r.stage == STAGES) {
                r.stage = 0;
                r.phase ^= 1;
            }
        }
        if (j == 0) {
            s->red[slot & 1][warp][row] = W == 3 ? acc0 : c[0] + c2[0];
            s->red[slot & 1][warp][row + 8] = W == 3 ? acc1 : c[2] + c2[2];
        }
        consumers_sync();
        if (warp == slot % NWARPS && lane < 16) {
            float y = 0;
            for (int i = 0; i < NWARPS; i++) y += s->red[slot & 1][i][lane];
            int n = GATED ? (lane < 8 ? t * 8 + lane : N + t * 8 + lane - 8) : t * 16 + lane;
            y *= back;
            if (W == 1 || W == 2) y *= row_scale[n];
            if (KIND == 2) {
                y = round_bf(y);
                float up = __shfl_down_sync(0xffff, y, 8);
                if (lane < 8) {
                    y = y / (1.f + __expf(-y)) * up;
                    P.act[n] = (u16)pack_bf(y, 0.f);
                }
            } else if (KIND == 0)
                P.qkv[n] = (u16)pack_bf(y, 0.f);
            else if (KIND == 1) {
                float h = bf2f(ld_cg16(P.h + n));
                P.h[n] = (u16)pack_bf(h + round_bf(y), 0.f);
            } else
                P.logits[n] = round_bf(y);
        }
        slot++;
    }
}

__device__ __forceinline__ void grid_sync(u32* counter, u32& target) {
    target += NB;
    consumers_sync();
    if (threadIdx.x == 0) {
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
        u32 seen;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        } while (seen < target);
    }
    consumers_sync();
}

struct Ahead {
    uint4 k[4], v[4];
};
__device__ __forceinline__ void load_kv(const Params& P, Ahead& a, const u16* keys, const u16* values, int kvh, int t0,
                                        int last, int length, int e) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int t = t0 + i * NWARPS * TPW;
        a.k[i] = make_uint4(0, 0, 0, 0);
        a.v[i] = a.k[i];
        if (t < last && t < length - 1) {
            i64 at = ((P.table[t / KVBLOCK] * KVBLOCK + t % KVBLOCK) * NKV + kvh) * HD + e;
            a.k[i] = *(const uint4*)(keys + at);
            a.v[i] = *(const uint4*)(values + at);
        }
    }
}
__device__ __forceinline__ void attention_ahead(const Params& P, Ahead& a, int layer, int splits, int chunk,
                                                int length) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kvh = blockIdx.x % NKV, split = blockIdx.x / NKV;
    int first = split * chunk, last = split < splits ? min(length, first + chunk) : 0;
    load_kv(P, a, (const u16*)P.keys[layer], (const u16*)P.values[layer], kvh, first + warp * TPW + lane / LPT, last,
            length, lane % LPT * 8);
}
__device__ __forceinline__ void attention(const Params& P, Ahead& a, int layer, int splits, int chunk, int length,
                                          float* buf, Shared* s) {
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    int kvh = blockIdx.x % NKV, split = blockIdx.x / NKV;
    if (split >= splits) return;
    int pos = length - 1;
    u16* keys = (u16*)P.keys[layer];
    u16* values = (u16*)P.values[layer];
    int first = split * chunk, last = min(length, first + chunk);
    // queries, turned, in buf[GQ][HD]; the new key in buf[GQ][HD..], the new value after it
    float* knew = buf + GQ * HD;
    float* vnew = knew + HD;
    for (int i = tid; i < (GQ + 1) * (HD / 2); i += CONSUMERS) {
        int g = i / (HD / 2), d = i % (HD / 2);
        const u16* from = P.qkv + (g < GQ ? (kvh * GQ + g) * HD : NH * HD + kvh * HD) + d;
        float a = bf2f(ld_cg16(from)), b = bf2f(ld_cg16(from + HD / 2)), co = P.cos[pos * (HD / 2) + d],
              si = P.sin[pos * (HD / 2) + d];
        float u = round_bf(a * co - b * si), v = round_bf(b * co + a * si);
        float f = g < GQ ? rsqrtf((float)HD) * 1.4426950408889634f : 1.f;
        float* to = g < GQ ? buf + g * HD : knew;
        to[d] = u * f;
        to[d + HD / 2] = v * f;
    }
    for (int d = tid; d < HD; d += CONSUMERS) vnew[d] = bf2f(ld_cg16(P.qkv + NH * HD + NKV * HD + kvh * HD + d));
    consumers_sync();
    if (last == length) {
        i64 at = (*P.slot * NKV + kvh) * HD;
        for (int d = tid; d < HD; d += CONSUMERS) {
            keys[at + d] = (u16)pack_bf(knew[d], 0.f);
            values[at + d] = (u16)pack_bf(vnew[d], 0.f);
        }
    }
    int sub = lane / LPT, e = lane % LPT * 8;
    float q[GQ][8], m[GQ], l[GQ], o[GQ][8];
    for (int g = 0; g < GQ; g++) {
        m[g] = -1e30f;
        l[g] = 0;
        for (int i = 0; i < 8; i++) {
            q[g][i] = buf[g * HD + e + i];
            o[g][i] = 0;
        }
    }
    const int STEP = NWARPS * TPW;
    for (int t0 = first + warp * TPW + sub; t0 - sub - warp * TPW < last; t0 += STEP * 4) {
        if (t0 != first + warp * TPW + sub) load_kv(P, a, keys, values, kvh, t0, last, length, e);
        uint4(&k4)[4] = a.k;
        uint4(&v4)[4] = a.v;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (t0 + i * STEP == length - 1 && length - 1 < last) {
                const float* a = knew + e;
                const float* b = vnew + e;
                k4[i] = make_uint4(pack_bf(a[0], a[1]), pack_bf(a[2], a[3]), pack_bf(a[4], a[5]), pack_bf(a[6], a[7]));
                v4[i] = make_uint4(pack_bf(b[0], b[1]), pack_bf(b[2], b[3]), pack_bf(b[4], b[5]), pack_bf(b[6], b[7]));
            }
#pragma unroll
        for (int g = 0; g < GQ; g++) {
            float sc[4], top = m[g];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint4 k = k4[i];
                float* qq = q[g];
                float z = qq[0] * lo2f(k.x) + qq[1] * hi2f(k.x) + qq[2] * lo2f(k.y) + qq[3] * hi2f(k.y) +
                          qq[4] * lo2f(k.z) + qq[5] * hi2f(k.z) + qq[6] * lo2f(k.w) + qq[7] * hi2f(k.w);
                for (int w = LPT / 2; w; w >>= 1) z += __shfl_xor_sync(~0u, z, w);
                sc[i] = t0 + i * STEP < last ? z : -1e30f;
                top = fmaxf(top, sc[i]);
            }
            float keep = exp2f(m[g] - top);
            m[g] = top;
            l[g] *= keep;
            for (int i = 0; i < 8; i++) o[g][i] *= keep;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float p = t0 + i * STEP < last ? exp2f(sc[i] - top) : 0.f;
                l[g] += p;
                uint4 v = v4[i];
                float* oo = o[g];
                oo[0] += p * lo2f(v.x);
                oo[1] += p * hi2f(v.x);
                oo[2] += p * lo2f(v.y);
                oo[3] += p * hi2f(v.y);
                oo[4] += p * lo2f(v.z);
                oo[5] += p * hi2f(v.z);
                oo[6] += p * lo2f(v.w);
                oo[7] += p * hi2f(v.w);
            }
        }
    }
    // merge the tokens of a warp, then the warps
    consumers_sync();
    for (int g = 0; g < GQ; g++) {
        for (int w = LPT; w < 32; w <<= 1) {
            float om = __shfl_xor_sync(~0u, m[g], w), ol = __shfl_xor_sync(~0u, l[g], w), top = fmaxf(m[g], om),
                  a = exp2f(m[g] - top), b = exp2f(om - top);
            l[g] = l[g] * a + ol * b;
            m[g] = top;
            for (int i = 0; i < 8; i++) {
                float other = __shfl_xor_sync(~0u, o[g][i], w);
                o[g][i] = o[g][i] * a + other * b;
            }
        }
        float* to = buf + (warp * GQ + g) * (HD + 2);
        if (lane < LPT)
            for (int i = 0; i < 8; i++) to[e + i] = o[g][i];
        if (lane == 0) {
            to[HD] = m[g];
            to[HD + 1] = l[g];
        }
    }
    consumers_sync();
    for (int i = tid; i < GQ * HD; i += CONSUMERS) {
        int g = i / HD, d = i % HD;
        float top = -1e30f, l = 0, o = 0;
        for (int w = 0; w < NWARPS; w++) top = fmaxf(top, buf[(w * GQ + g) * (HD + 2) + HD]);
        for (int w = 0; w < NWARPS; w++) {
            float* from = buf + (w * GQ + g) * (HD + 2);
            float f = exp2f(from[HD] - top);
            l += f * from[HD + 1];
            o += f * from[d];
        }
        int head = kvh * GQ + g;
        ((u16*)P.part_o)[((i64)split * NH + head) * HD + d] = (u16)pack_h(o / l, 0.f);
        if (d == 0) {
            P.part_ml[(split * NH + head) * 2] = top;
            P.part_ml[(split * NH + head) * 2 + 1] = l;
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    step(const Params* params, const i64* slot_at, const i64* length_at, const i64* table_at) {
    extern __shared__ __align__(128) u8 smem[];
    u8* ring = smem;
    u16* x = (u16*)(smem + STAGES * STAGE_B);
    Shared* s = (Shared*)(smem + STAGES * STAGE_B + XBYTES);
    if (threadIdx.x < sizeof(Params) / 8 - 3) ((u64*)&s->params)[threadIdx.x] = ((const u64*)params)[threadIdx.x];
    const Params& P = s->params;
    if (threadIdx.x == 0) {
        s->params.slot = slot_at;
        s->params.length = length_at;
        s->params.table = table_at;
        for (int i = 0; i < STAGES; i++) {
            mbar_init(smem_of(&s->full[i]), 1);
            mbar_init(smem_of(&s->empty[i]), NWARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    Ring r = {0, 0};
    if (threadIdx.x >= CONSUMERS) {
        for (int layer = 0; layer < LAYERS; layer++) {
            const u64* w = P.weights + layer * 4;
            const u64* sc = P.scales + layer * 4;
            produce<WT, QKV_N, HID, false>((const u8*)w[0], (const u8*)sc[0], layer * 4, r, ring, s);
            produce<WT, HID, NH * HD, false>((const u8*)w[1], (const u8*)sc[1], layer * 4 + 1, r, ring, s);
            produce<WT, FF, HID, true>((const u8*)w[2], (const u8*)sc[2], layer * 4 + 2, r, ring, s);
            produce<WT, HID, FF, false>((const u8*)w[3], (const u8*)sc[3], layer * 4 + 3, r, ring, s);
        }
        produce<HEAD_WT, VOCAB, HID, false>((const u8*)P.weights[LAYERS * 4], (const u8*)P.scales[LAYERS * 4],
                                            LAYERS * 4, r, ring, s);
        return;
    }
    u32 target = 0;
    int slot = 0;
    int length = max(1, (int)*P.length);  // 0 in buffers that were never filled
    int splits = min(NSPLIT_MAX, (length + 31) / 32), chunk = (length + splits - 1) / splits;
    splits = (length + chunk - 1) / chunk;
    int turn = 0;
    Gains<HID> gains = load_gains<HID>((const u16*)P.gains[0]);
    for (int layer = 0; layer < LAYERS; layer++) {
        const u64* sc = P.scales + layer * 4;
        float back = stage_norm<WT, HID>(P.h, gains, x, s, turn);
        consume<WT, QKV_N, HID, 0>(P, (const float*)sc[0], back, layer * 4, r, ring, x, s, slot);
        {
            Ahead ahead;
            attention_ahead(P, ahead, layer, splits, chunk, length);
            grid_sync(P.counter, target);
            attention(P, ahead, layer, splits, chunk, length, (float*)x, s);
        }
        grid_sync(P.counter, target);
        back = stage_attention<WT, NH * HD>(P, splits, x, s, turn);
        consume<WT, HID, NH * HD, 1>(P, (const float*)sc[1], back, layer * 4 + 1, r, ring, x, s, slot);
        gains = load_gains<HID>((const u16*)P.gains[layer * 2 + 1]);
        grid_sync(P.counter, target);
        back = stage_norm<WT, HID>(P.h, gains, x, s, turn);
        consume<WT, FF, HID, 2>(P, (const float*)sc[2], back, layer * 4 + 2, r, ring, x, s, slot);
        grid_sync(P.counter, target);
        back = stage_plain<WT, FF>(P.act, x, s, turn);
        consume<WT, HID, FF, 1>(P, (const float*)sc[3], back, layer * 4 + 3, r, ring, x, s, slot);
        gains = load_gains<HID>((const u16*)P.gains[layer * 2 + 2]);
        grid_sync(P.counter, target);
    }
    float back = stage_norm<HEAD_WT, HID>(P.h, gains, x, s, turn);
    consume<HEAD_WT, VOCAB, HID, 3>(P, (const float*)P.scales[LAYERS * 4], back, LAYERS * 4, r, ring, x, s, slot);
}

// One decode step of a dense Llama-shaped network for one sequence, in one persistent kernel.
//
// There is one block per multiprocessor. One warp streams weights through a ring in shared memory with bulk copies and
// never waits for a result; NW warps compute. Blocks meet at a counter in global memory between the parts of a layer,
// and the ring fills meanwhile. Weights keep the row-major layout of the engine's layers.
//
// Defined before this text: WT and HEAD_WT (0 bfloat16, 1 int8, 2 fp8, 3 int4 in groups), HID, NH, NKV, HD, FF, LAYERS,
// VOCAB, GROUP, RB (bytes of a row that one copy moves), STAGES, NB (blocks), NW (warps that compute: 8), KVBLOCK, EPS,
// XBYTES. What is being tried may be defined, too:
#ifndef DIRECT
#define DIRECT 0  // 1: threads prepare the inputs that they multiply; 0: all inputs of a block, in shared memory
#endif
#ifndef INTEGER
#define INTEGER 0  // 1, with DIRECT: int8 and int4 weights are multiplied as integers, by inputs of three 8-bit digits
#endif
#ifndef RELAXED
#define RELAXED 0  // 1: waiting at a barrier leaves the L1 cache as it is: what blocks exchange is not read from there
#endif
#ifndef CHECKED
#define CHECKED 0  // 1, with DIRECT: arriving at a barrier does not wait for writes; readers find out what is missing
#endif
#ifndef LOCAL
#define LOCAL 0  // 1: the blocks of a key-value head compute its queries, keys and values, and wait for each other only
#endif
#ifndef PREFETCH
#define PREFETCH 0  // stages of weights that another warp reads into the L2 cache, before there is room in the ring
#endif
#ifndef ALONE
#define ALONE 0  // 1: the kernel finds the token's embedding, and counters of arrivals are never reset
#endif
#ifndef ROUNDED
#define ROUNDED 0  // 1, with DIRECT: normed inputs are rounded to bfloat16 as in other kernels, after one more barrier
#endif
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define CONSUMERS (NW * 32)
#define LPT (HD / 8)
#define TPW (32 / LPT)
#define QKV_N ((NH + 2 * NKV) * HD)
#define NSPLIT_MAX (NB / NKV)
#define GQ (NH / NKV)
#define AHEAD (GQ > 2 ? 2 : 4)    // keys and values that a thread loads together
#define ROUND (NW * TPW * AHEAD)  // and a block
#define TILES 16                  // of outputs, whose sums are kept until all are there
// Registers belong to a quarter of a multiprocessor, so each has two warps that compute, and another one: the warp that
// copies, or one that ends at once. Those give most of their registers to the others.
#define THREADS (CONSUMERS + 128)
#define COMPUTE_REGISTERS 224
#define COPY_REGISTERS 56
#define IS_INTEGER(W) (INTEGER && ((W) == 1 || (W) == 3))

// how the rows of a matrix are divided: units of 16 rows go to warps in turn
template <int W, int K>
struct Rows {
    static constexpr int pad = W == 3 ? 32 : 64, stride = RB + pad;  // against bank conflicts
    static constexpr int bytes = W == 0 ? K * 2 : W == 3 ? K / 2 : K;
    static constexpr int unit = W == 3 ? 32 : 64;  // bytes of each row
    static constexpr int units = bytes / unit, in_stage = RB / unit, stages = (bytes + RB - 1) / RB;
    static constexpr int at_once = in_stage / NW;             // units of a stage that a warp multiplies
    static constexpr int octets = ((units + NW - 1) / NW + 7) / 8;  // of a warp's units
    static constexpr int words = W == 0 ? 4 : 8;              // of inputs that a thread keeps for an octet
};
#define STAGE_BYTES(W) (16 * (RB + ((W) == 3 ? 32 : 64)) + ((W) == 3 ? RB / 32 * 64 : 0))
#define STAGE_B (STAGE_BYTES(WT) > STAGE_BYTES(HEAD_WT) ? STAGE_BYTES(WT) : STAGE_BYTES(HEAD_WT))

struct Params {
    const u64* weights;  // [layers * 4 + 1]
    const u64* scales;   // same
    const u64* gains;    // [layers * 2 + 1]
    const u64* keys;     // [layers]
    const u64* values;
    const float* cos;
    const float* sin;
    const u16* h;  // the token's embedding; with ALONE those of all tokens
    u16* exchange;
    float* logits;
    u64* counter;
    const i64* slot;  // from here on: the step's own, set by the kernel
    const i64* length;
    const i64* table;
};
// what blocks of a layer give each other: bfloat16, but parts of attention are float16 with two floats for each head
struct __align__(16) Exchange {
    u16 qkv[QKV_N], middle[HID], act[FF], h[HID], part_o[NSPLIT_MAX][NH * HD];
    float2 part_ml[NSPLIT_MAX][NH];
};

// The thread's number, read where it is used: what is computed from it for all parts of a layer would take too many
// registers if it were kept.
__device__ __forceinline__ int thread() {
    int t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
}
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
__device__ __forceinline__ void prefetch(const void* p, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
}
__device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 100;"); }
__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }
__device__ __forceinline__ uint4 ld4(const void* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ __forceinline__ uint2 ld2(const void* p) {
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u32 ld1(const void* p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void st1(void* p, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void mma_bf(float (&d)[4], const float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                       u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
__device__ __forceinline__ void mma_h(float (&d)[4], const float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                      u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
// of 8-bit integers: those of the first operand have signs, or none
__device__ __forceinline__ void mma_s8(int (&d)[4], const int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                       u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
__device__ __forceinline__ void mma_u8(int (&d)[4], const int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                       u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
__device__ __forceinline__ void sts64(u32 a, u32 x, u32 y) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(a), "r"(x), "r"(y) : "memory");
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
__device__ __forceinline__ u32 masked(u32 w, u32 m) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(w), "r"(m), "r"(0x64006400u));
    return r;
}
// two 8-bit weights as float16: those of fp8, or of int8 (turned by 0x80 each) with 1152 added
template <int W>
__device__ __forceinline__ u32 low2(u32 w) {
    if constexpr (W == 1) return __byte_perm(w, 0x64646464u, 0x4140);
    u32 r;
    asm("{.reg .b16 l,h; mov.b32 {l,h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(r) : "r"(w));
    return r;
}
template <int W>
__device__ __forceinline__ u32 high2(u32 w) {
    if constexpr (W == 1) return __byte_perm(w, 0x64646464u, 0x4342);
    u32 r;
    asm("{.reg .b16 l,h; mov.b32 {l,h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(r) : "r"(w));
    return r;
}

// which part of attention a block has
struct Places {
    int length, splits, first, last, kv_head, split;
};
// With CHECKED, words of an exchange that are not written yet are these: a NaN that no conversion gives.
#define MISSING 0xffffffffu
__device__ __forceinline__ bool is_missing(uint4 v) {
    return CHECKED && (v.x == MISSING || v.y == MISSING || v.z == MISSING || v.w == MISSING);
}
__device__ __forceinline__ bool is_missing(uint2 v) { return CHECKED && (v.x == MISSING || v.y == MISSING); }
__device__ __forceinline__ bool is_missing(u32 v) { return CHECKED && v == MISSING; }
struct Shared {
    Params params;
    u64 full[STAGES];
    u64 empty[STAGES];
    float block[4 * NW];
    u32 issued;  // stages that the copying warp has filled
    Places at;
    int slots[2 * ROUND];  // in the cache, of the first tokens of this block's part of attention
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
    float* at = s->block + (turn & 1) * 2 * NW;
    if ((threadIdx.x & 31) == 0) {
        at[w] = a;
        at[NW + w] = b;
    }
    consumers_sync();
    a = 0;
    b = 0;
#pragma unroll
    for (int i = 0; i < NW; i++) {
        a += at[i];
        b = fmaxf(b, at[NW + i]);
    }
    turn++;
}

// A thread has PER times eight of K inputs.
#define PER ((K + CONSUMERS * 8 - 1) / (CONSUMERS * 8))
#define EACH(i, k)                                                      \
    for (int i = 0, k = thread() * 8; i < PER; i++, k += CONSUMERS * 8) \
        if ((i + 1) * CONSUMERS * 8 <= K || k < K)
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
__device__ __forceinline__ float h2f(u32 h) {
    float f;
    asm("{.reg .b16 l,h; mov.b32 {l,h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(h));
    return f;
}
__device__ __forceinline__ uint4 pack8(const float (&v)[8]) {
    return make_uint4(pack_bf(v[0], v[1]), pack_bf(v[2], v[3]), pack_bf(v[4], v[5]), pack_bf(v[6], v[7]));
}
// x[K] as the products read it, from bfloat16 values of at most m; returns what outputs are to be multiplied with
template <int W, int K>
__device__ __forceinline__ float put_x(const uint4 (&from)[PER], float m, u16* x) {
    u32 ex = min(max((__float_as_uint(m) >> 23) & 255, 20u), 250u);
    float back = __uint_as_float((ex - 9) << 23), scale = __uint_as_float((254 - ex + 9) << 23);
#pragma unroll
    EACH(i, k) {
        if constexpr (W == 0) {
            *(uint4*)(x + k) = from[i];
        } else {  // float16, the largest in [512, 1024)
            float v[8], to_scale = scale;
            WIDEN(v, from[i])
            // int4: pieces of 32 bytes, whose upper halves are 32 inputs of the first half of a group and lower halves
            // those half a group on
            const int in = k % GROUP, p = in % (GROUP / 2), piece = k / GROUP * (GROUP / 64) + p / 32;
            const bool is_upper = in < GROUP / 2;
            if (W == 3 && is_upper) to_scale *= 0.0625f;
            for (int e = 0; e < 8; e++) v[e] *= to_scale;
            if constexpr (W != 3) {
                *(uint4*)(x + k) =
                    make_uint4(pack_h(v[0], v[1]), pack_h(v[2], v[3]), pack_h(v[4], v[5]), pack_h(v[6], v[7]));
            } else {
                u32* to = (u32*)(x + piece * 64 + p % 32 / 8 * 16) + is_upper;
                to[0] = pack_h(v[0], v[2]);
                to[2] = pack_h(v[1], v[3]);
                to[4] = pack_h(v[4], v[6]);
                to[6] = pack_h(v[5], v[7]);
            }
        }
    }
    consumers_sync();
    return W == 0 ? 1.f : back;
}
template <int K>
struct Gains {
    uint4 w[PER];
};
template <int K>
__device__ __forceinline__ Gains<K> load_gains(const u16* gain) {
    Gains<K> gains = {};
#pragma unroll
    EACH(i, k) gains.w[i] = *(const uint4*)(gain + k);
    return gains;
}
template <int W, int K>
__device__ __forceinline__ float stage_norm(const u16* h, const Gains<K>& gains, u16* x, Shared* s, int& turn) {
    float squares = 0, m = 0;
    uint4 w[PER] = {};
#pragma unroll
    EACH(i, k) w[i] = ld4(h + k);
#pragma unroll
    EACH(i, k) {
        float v[8], g[8];
        WIDEN(v, w[i])
        WIDEN(g, gains.w[i])
        for (int e = 0; e < 8; e++) {
            squares += v[e] * v[e];
            m = fmaxf(m, fabsf(v[e] * g[e]));
        }
    }
    block_reduce(squares, m, s, turn);
    float root = rsqrtf(squares / K + EPS);
#pragma unroll
    EACH(i, k) {
        float v[8], g[8];
        WIDEN(v, w[i])
        WIDEN(g, gains.w[i])
        for (int e = 0; e < 8; e++) v[e] *= g[e] * root;
        w[i] = pack8(v);
    }
    return put_x<W, K>(w, m * root, x);
}
template <int W, int K>
__device__ __forceinline__ float stage_plain(const u16* from, u16* x, Shared* s, int& turn) {
    float none = 0, m = 0;
    uint4 w[PER] = {};
#pragma unroll
    EACH(i, k) w[i] = ld4(from + k);
    if (W != 0) {
#pragma unroll
        EACH(i, k) {
            float v[8];
            WIDEN(v, w[i])
            for (int e = 0; e < 8; e++) m = fmaxf(m, fabsf(v[e]));
        }
        block_reduce(none, m, s, turn);
    }
    return put_x<W, K>(w, m, x);
}
// eight outputs of attention, from the parts of the blocks
__device__ __forceinline__ uint4 merge_parts(const Exchange* ex, int splits, int k) {
    int head = k / HD;
    float v[8] = {0, 0, 0, 0, 0, 0, 0, 0}, top = -1e30f, l = 0;
    for (int j0 = 0; j0 < splits; j0 += 4) {
        uint4 a[4];
        uint2 ml[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            a[j] = make_uint4(0, 0, 0, 0);
            ml[j] = make_uint2(__float_as_uint(-1e30f), 0);
            if (j0 + j < splits) {
                a[j] = ld4(&ex->part_o[j0 + j][k]);
                ml[j] = ld2(&ex->part_ml[j0 + j][head]);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            while (is_missing(a[j])) a[j] = ld4(&ex->part_o[j0 + j][k]);
            while (is_missing(ml[j])) ml[j] = ld2(&ex->part_ml[j0 + j][head]);
            float high = __uint_as_float(ml[j].x), next = fmaxf(top, high), f = exp2f(top - next), o[8],
                  part = exp2f(high - next) * __uint_as_float(ml[j].y);
            top = next;
            l = l * f + part;
            WIDEN_H(o, a[j])
            for (int e = 0; e < 8; e++) v[e] = v[e] * f + part * o[e];
        }
    }
    for (int e = 0; e < 8; e++) v[e] /= l;
    return pack8(v);
}
template <int W, int K>
__device__ __forceinline__ float stage_attention(const Exchange* ex, int splits, u16* x, Shared* s, int& turn) {
    float none = 0, m = 0;
    uint4 w[PER] = {};
#pragma unroll
    EACH(i, k) {
        float v[8];
        w[i] = merge_parts(ex, splits, k);
        WIDEN(v, w[i])
        for (int e = 0; e < 8; e++) m = fmaxf(m, fabsf(v[e]));
    }
    if (W != 0) block_reduce(none, m, s, turn);
    return put_x<W, K>(w, m, x);
}

enum Output { QKV, RESIDUAL, GATED, LOGITS };
// The tiles of a block. The output and down layers have the same ones, whose residual sums stay in registers.
#define FIRST(op) ((op) & 1 ? blockIdx.x : (blockIdx.x + (op)*37) % NB)
#define HEAD_TILES (HD / 16)
template <int N, int KIND>
__device__ __forceinline__ int num_tiles(int op) {
    if (LOCAL && KIND == QKV) {
        int split = blockIdx.x / NKV;
        return split < NSPLIT_MAX ? ((GQ + 2) * HEAD_TILES - split + NSPLIT_MAX - 1) / NSPLIT_MAX : 0;
    }
    return ((KIND == GATED ? N / 8 : N / 16) - (int)FIRST(op) + NB - 1) / NB;
}
template <int N, int KIND>
__device__ __forceinline__ int tile_of(int op, int i) {
    if (LOCAL && KIND == QKV) {
        int kv_head = blockIdx.x % NKV, tile = blockIdx.x / NKV + i * NSPLIT_MAX, head = tile / HEAD_TILES;
        head = head < GQ ? kv_head * GQ + head : NH + (head - GQ) * NKV + kv_head;
        return head * HEAD_TILES + tile % HEAD_TILES;
    }
    return FIRST(op) + i * NB;
}

struct Ring {
    int stage;
    u32 phase;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// the weights of one matrix, tile by tile
template <int W, int N, int K, int KIND>
__device__ __forceinline__ void produce(const u8* w, const u8* scales, int op, Ring& r, u8* ring, Shared* s) {
    using R = Rows<W, K>;
    int lane = threadIdx.x & 31, count = num_tiles<N, KIND>(op);
    for (int i = 0; i < count; i++) {
        int t = tile_of<N, KIND>(op, i);
        i64 row = KIND == GATED ? (lane < 8 ? t * 8 + lane : N + t * 8 + lane - 8) : t * 16 + lane;
        const u8* from = w + row * (i64)R::bytes;
        for (int at = 0; at < R::bytes; at += RB) {
            u32 bytes = min(RB, R::bytes - at);
            u32 full = smem_of(&s->full[r.stage]), to = smem_of(ring + r.stage * STAGE_B);
            if (lane == 0) {
                mbar_wait(smem_of(&s->empty[r.stage]), r.phase ^ 1);
                mbar_expect(full, bytes * 16 + (W == 3 ? bytes / 32 * 64 : 0));
            }
            __syncwarp();
            if (lane < 16) bulk(to + lane * R::stride, from + at, bytes, full);
            if (W == 3 && lane == 16)
                bulk(to + 16 * R::stride, scales + (i64)t * (R::bytes / 32 * 64) + at / 32 * 64, bytes / 32 * 64, full);
            r.advance();
            if (PREFETCH && lane == 0) s->issued++;
        }
    }
}
// The same weights to the L2 cache; `stage` counts the stages of all matrices.
template <int W, int N, int K, int KIND>
__device__ __forceinline__ void prefetch_weights(const u8* w, const u8* scales, int op, u32& stage, Shared* s) {
    using R = Rows<W, K>;
    int lane = threadIdx.x & 31, count = num_tiles<N, KIND>(op);
    u32 issued = smem_of(&s->issued);
    for (int i = 0; i < count; i++) {
        int t = tile_of<N, KIND>(op, i);
        i64 row = KIND == GATED ? (lane < 8 ? t * 8 + lane : N + t * 8 + lane - 8) : t * 16 + lane;
        for (int at = 0; at < R::bytes; at += RB, stage++) {
            u32 bytes = min(RB, R::bytes - at), now = lds32(issued);
            while (stage >= now + PREFETCH) {
                pause();
                now = lds32(issued);
            }
            if (stage < now) continue;  // too late
            if (lane < 16) prefetch(w + row * (i64)R::bytes + at, bytes);
            if (W == 3 && lane == 16)
                prefetch(scales + (i64)t * (R::bytes / 32 * 64) + at / 32 * 64, bytes / 32 * 64);
        }
    }
}

// The inputs of a warp's units: each octet of units has the eight columns of the second operand, so that a product of
// one unit has its sums in one column, and rubbish in the others.
// Integers: a pair of units has the eight columns, each with three digits.
template <int W, int K>
struct Inputs {
    u32 x[Rows<W, K>::octets][IS_INTEGER(W) ? 16 : Rows<W, K>::words];
    float offset[Rows<W, K>::octets][2];  // what sums begin with, for two units: minus what is added to weights
    float sum[Rows<W, K>::octets][IS_INTEGER(W) ? 4 : 2];  // of the inputs of two units, or of one of each pair
};
template <int W, int K>
__device__ __forceinline__ void find_sums(Inputs<W, K>& in, int o) {
    using R = Rows<W, K>;
    const u32 ONES = 0x3c003c00u, SIXTEENS = 0x4c004c00u;
    if constexpr (W == 1 || W == 3) {
        float d[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < R::words; i += 2) mma_h(d, d, ONES, ONES, ONES, ONES, in.x[o][i], in.x[o][i + 1]);
        in.offset[o][0] = d[0] * (W == 1 ? -1152.f : -1024.f);
        in.offset[o][1] = d[1] * (W == 1 ? -1152.f : -1024.f);
    }
    if constexpr (W == 3) {  // inputs of upper halves of bytes were divided by 16
        float d[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < R::words; i += 2)
            mma_h(d, d, ONES, ONES, SIXTEENS, SIXTEENS, in.x[o][i], in.x[o][i + 1]);
        in.sum[o][0] = d[0];
        in.sum[o][1] = d[1];
    }
}
template <int W, int K>
__device__ __forceinline__ void load_inputs(Inputs<W, K>& in, const u16* x, int tid) {
    using R = Rows<W, K>;
    int lane = tid & 31, warp = tid >> 5, j = lane & 3;
#pragma unroll
    for (int o = 0; o < R::octets; o++) {
        int unit = warp + NW * (o * 8 + (lane >> 2));
        u32 from = smem_of(x) + unit * R::words * 16 + j * R::words * 4;
#pragma unroll
        for (int i = 0; i < R::words; i += 4) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (unit < R::units) v = lds128(from + i * 4);
            in.x[o][i] = v.x;
            in.x[o][i + 1] = v.y;
            in.x[o][i + 2] = v.z;
            in.x[o][i + 3] = v.w;
        }
        find_sums<W, K>(in, o);
    }
}

// With DIRECT, a thread reads the inputs that it multiplies, in runs of eight, and nobody else of its block does.
template <int W, int K>
struct Runs {
    static constexpr int octets = Rows<W, K>::octets, count = W == 0 ? 1 : 2;
    uint4 w[octets][count];
};
// the first input of a run; K or more if there is none
template <int W, int K>
__device__ __forceinline__ int place_of(int o, int run, int tid) {
    int unit = (tid >> 5) + NW * (o * 8 + (tid >> 2) % 8), j = tid & 3;
    if (unit >= Rows<W, K>::units) return K;
    if (W == 0) return unit * 32 + j * 8;
    if (W != 3) return unit * 64 + (IS_INTEGER(W) ? run * 32 + j * 8 : j * 16 + run * 8);
    // int4: first what lower halves of bytes are multiplied by
    return unit / (GROUP / 64) * GROUP + unit % (GROUP / 64) * 32 + j * 8 + (run ? 0 : GROUP / 2);
}
#define EACH_RUN                                         \
    _Pragma("unroll") for (int o = 0; o < R::octets; o++) \
        _Pragma("unroll") for (int run = 0; run < R::count; run++)
template <int W, int K>
__device__ __forceinline__ Runs<W, K> load_runs(const u16* from, bool is_exchanged) {
    using R = Runs<W, K>;
    R runs;
    int tid = thread();
    EACH_RUN {
        int k = place_of<W, K>(o, run, tid);
        runs.w[o][run] = make_uint4(0, 0, 0, 0);
        if (k < K) runs.w[o][run] = is_exchanged ? ld4(from + k) : *(const uint4*)(from + k);
    }
    if (CHECKED && is_exchanged) EACH_RUN {
            int k = place_of<W, K>(o, run, tid);
            while (is_missing(runs.w[o][run])) runs.w[o][run] = ld4(from + k);
        }
    return runs;
}
// three digits of four integers of up to 23 bits and a sign, to which 0x808080 was added
__device__ __forceinline__ void split_digits(u32 (&digits)[3], u32 a, u32 b, u32 c, u32 d) {
    u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    digits[0] = __byte_perm(__byte_perm(a, b, 0x0062), __byte_perm(c, d, 0x0062), 0x5410) ^ 0x80808080u;
    digits[1] = __byte_perm(ab, cd, 0x7632) ^ 0x80808080u;
    digits[2] = __byte_perm(ab, cd, 0x5410) ^ 0x80808080u;
}
#define PLANE 576  // bytes of one digit of an octet's inputs, which a warp divides among its threads
// The runs, multiplied by gains if there are any, as the products read them; returns what outputs of this warp are to
// be multiplied with. `room` is the warp's own.
template <int W, int K, bool HAS_GAINS>
__device__ __forceinline__ float prepare(Inputs<W, K>& in, const Runs<W, K>& runs, const Runs<W, K>& gains, float root,
                                         u8* room) {
    using R = Runs<W, K>;
    int lane = thread() & 31;
    float m = 0;
    EACH_RUN {
        float v[8], g[8];
        WIDEN(v, runs.w[o][run])
        if (HAS_GAINS) WIDEN(g, gains.w[o][run])
        for (int e = 0; e < 8; e++) m = fmaxf(m, fabsf(HAS_GAINS ? v[e] * g[e] : v[e]));
    }
    if (HAS_GAINS && ROUNDED) m = round_bf(m * root);
    // Integers have BITS bits, so that inputs of 4-bit weights may be multiplied by 17 below.
    const int BITS = W == 3 ? 18 : 21;
    u32 ex = min(max((__reduce_max_sync(~0u, __float_as_uint(m)) >> 23) & 255, 40u), 240u);
    float back = __uint_as_float((IS_INTEGER(W) ? ex + 1 - BITS : ex - 9) << 23);
    float scale = __uint_as_float((IS_INTEGER(W) ? 253 + BITS - ex : 263 - ex) << 23);
#pragma unroll
    for (int o = 0; o < R::octets; o++) {
        float v[R::count][8];
#pragma unroll
        for (int run = 0; run < R::count; run++) {
            float g[8];
            WIDEN(v[run], runs.w[o][run])
            if (HAS_GAINS) WIDEN(g, gains.w[o][run])
            for (int e = 0; e < 8; e++) {
                if (HAS_GAINS) v[run][e] *= g[e];
                if (HAS_GAINS && ROUNDED) v[run][e] = round_bf(v[run][e] * root);
                if (W != 0 && !IS_INTEGER(W)) v[run][e] *= W == 3 && run ? scale * 0.0625f : scale;
            }
        }
        if constexpr (W == 0) {
            uint4 w = pack8(v[0]);
            in.x[o][0] = w.x, in.x[o][1] = w.y, in.x[o][2] = w.z, in.x[o][3] = w.w;
        } else if constexpr (!IS_INTEGER(W)) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int e = i / 2 / 2 * 4 + i / 2 % 2;  // of int4: pairs (0, 2), (1, 3), (4, 6), (5, 7)
                in.x[o][i] = W == 3 ? pack_h(v[i % 2][e], v[i % 2][e + 2])
                                    : pack_h(v[i / 4][i % 4 * 2], v[i / 4][i % 4 * 2 + 1]);
            }
            find_sums<W, K>(in, o);
        } else {
            const float MAGIC = 12582912.f;  // 1.5 * 2^23: a float's last bits are an integer
            const u32 MAGIC_BITS = 0x4b400000u, BIAS = 0x808080u;
            u32 n[2][8], digits[4][3];
            float sum = 0;
#pragma unroll
            for (int e = 0; e < 8; e++) {
                float a = v[0][e] * scale + MAGIC, b = v[1][e] * scale + MAGIC;
                n[0][e] = __float_as_uint(a) - MAGIC_BITS;
                n[1][e] = __float_as_uint(b) - MAGIC_BITS;
                sum += (a - MAGIC) + (b - MAGIC);
                // A byte of two weights is multiplied by the first one, and its upper half by the second one.
                if (W == 3) {
                    n[0][e] *= 16;
                    n[1][e] -= n[0][e];
                }
                n[0][e] += BIAS;
                n[1][e] += BIAS;
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
                split_digits(digits[i], n[i / 2][i % 2 * 4], n[i / 2][i % 2 * 4 + 1], n[i / 2][i % 2 * 4 + 2],
                             n[i / 2][i % 2 * 4 + 3]);
            u32 to = smem_of(room);
#pragma unroll
            for (int d = 0; d < 3; d++)
#pragma unroll
                for (int run = 0; run < 2; run++) {
                    u32 place = W == 3 ? lane * 16 + run * 8 : (lane >> 2) * 64 + run * 32 + (lane & 3) * 8;
                    sts64(to + d * PLANE + place, digits[run * 2][d], digits[run * 2 + 1][d]);
                }
            __syncwarp();
            // column lane / 4 is digit lane / 4 % 4 of unit lane / 16 of a pair; the fourth one is not used
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                u32 plane = to + min((lane >> 2) & 3, 2) * PLANE;
                uint4 w = lds128(plane + (2 * pair + (lane >> 4)) * 64 + (lane & 3) * 16);
                in.x[o][pair * 4] = w.x, in.x[o][pair * 4 + 1] = w.y;
                in.x[o][pair * 4 + 2] = w.z, in.x[o][pair * 4 + 3] = w.w;
            }
            __syncwarp();
            if constexpr (W == 3) {
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
#pragma unroll
                for (int pair = 0; pair < 4; pair++) {
                    float of_unit = __shfl_sync(~0u, sum, (2 * pair + ((lane >> 1) & 1)) * 4);
                    in.sum[o][pair] = lane & 1 ? 0.f : of_unit;
                }
            }
        }
    }
    return W == 0 ? 1.f : back;
}
template <int W, int K>
__device__ __forceinline__ float sum_squares(const Runs<W, K>& runs) {
    using R = Runs<W, K>;
    float squares = 0;
    EACH_RUN {
        float v[8];
        WIDEN(v, runs.w[o][run])
        for (int e = 0; e < 8; e++) squares += v[e] * v[e];
    }
    return warp_sum(squares);
}

#define TOGETHER 4  // units whose products are computed side by side
// Part m of the product of one unit: w are a thread's weights of row lane / 4, v those of eight rows on.
template <int W, int K>
__device__ __forceinline__ void multiply(float (&d)[4], const u32* w, const u32* v, const Inputs<W, K>& in, int o,
                                         int m) {
    const float first = m == 0 && (W == 1 || W == 3) ? in.offset[o][0] : 0.f;
    const float second = m == 0 && (W == 1 || W == 3) ? in.offset[o][1] : 0.f;
    const float begin[4] = {m ? d[0] : first, m ? d[1] : second, m ? d[2] : first, m ? d[3] : second};
    const u32 x = in.x[o][2 * m], y = in.x[o][2 * m + 1];
    if constexpr (W == 0) {
        mma_bf(d, begin, w[2 * m], v[2 * m], w[2 * m + 1], v[2 * m + 1], x, y);
    } else if constexpr (W == 3) {
        const u32 L = 0x000f000fu, H = 0x00f000f0u;
        u32 a = w[m / 2], b = v[m / 2];
        if (m % 2) {
            a >>= 8;
            b >>= 8;
        }
        mma_h(d, begin, masked(a, L), masked(b, L), masked(a, H), masked(b, H), x, y);
    } else {
        const u32 turn = W == 1 ? 0x80808080u : 0;
        u32 a = w[m] ^ turn, b = v[m] ^ turn;
        mma_h(d, begin, low2<W>(a), low2<W>(b), high2<W>(a), high2<W>(b), x, y);
    }
}

// the warp's part of the sums of one tile, in all four threads of rows lane / 4 and eight rows on
template <int W, int K>
__device__ __forceinline__ void sum_tile(float& one, float& other, const Inputs<W, K>& in, Ring& r, u8* ring,
                                         Shared* s, int tid) {
    using R = Rows<W, K>;
    int lane = tid & 31, warp = tid >> 5, row = lane >> 2, j = lane & 3;
    one = other = 0;
    float kept[4] = {0, 0, 0, 0};  // int4: of two units, whose scales differ
#pragma unroll
    for (int stage = 0; stage < R::stages; stage++) {
        const int there = min(R::in_stage, R::units - stage * R::in_stage);  // units of this stage
        u32 from = smem_of(ring + r.stage * STAGE_B), at = from + row * R::stride + j * (R::unit / 4);
        mbar_wait(smem_of(&s->full[r.stage]), r.phase);
        u32 w[R::at_once][4], v[R::at_once][4];
#pragma unroll
        for (int q = 0; q < R::at_once; q++) {
            int unit = warp + q * NW;
            if (q * NW >= there || (q * NW + NW > there && unit >= there)) continue;
            u32 here = at + unit * R::unit;
            if constexpr (W == 3) {
                uint2 a = lds64(here), b = lds64(here + 8 * R::stride);
                w[q][0] = a.x, w[q][1] = a.y, v[q][0] = b.x, v[q][1] = b.y;
            } else {
                uint4 a = lds128(here), b = lds128(here + 8 * R::stride);
                w[q][0] = a.x, w[q][1] = a.y, w[q][2] = a.z, w[q][3] = a.w;
                v[q][0] = b.x, v[q][1] = b.y, v[q][2] = b.z, v[q][3] = b.w;
            }
        }
        const int before = stage * R::at_once % 8, o = stage * R::at_once / 8;  // units of the octet in earlier stages
        u32 scales[2][2] = {{0, 0}, {0, 0}};
        if constexpr (W == 3) {
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                int q = 2 * j + odd - before, unit = warp + q * NW;
                if (q >= 0 && q < R::at_once && unit < there) {
                    u32 at = from + 16 * R::stride + unit * 64 + row * 4;
                    scales[odd][0] = lds32(at);
                    scales[odd][1] = lds32(at + 32);
                }
            }
        }
        __syncwarp();
        if (lane == 0) mbar_arrive(smem_of(&s->empty[r.stage]));
        r.advance();
#pragma unroll
        for (int q0 = 0; q0 < R::at_once; q0 += TOGETHER) {
            float d[TOGETHER][4];
#pragma unroll
            for (int m = 0; m < R::words / 2; m++)
#pragma unroll
                for (int q = q0; q < q0 + TOGETHER && q < R::at_once; q++)
                    if (q * NW < there) multiply<W, K>(d[q - q0], w[q], v[q], in, o, m);
#pragma unroll
            for (int q = q0; q < q0 + TOGETHER && q < R::at_once; q++) {
                const int c = before + q;
                if (q * NW < there && j == c / 2 && (q * NW + NW <= there || warp + q * NW < there)) {
                    if constexpr (W == 3) {
                        kept[c % 2] = d[q - q0][c % 2];
                        kept[2 + c % 2] = d[q - q0][2 + c % 2];
                    } else {
                        one += d[q - q0][c % 2];
                        other += d[q - q0][2 + c % 2];
                    }
                }
            }
        }
        if constexpr (W == 3) {
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                one += lo2f(scales[odd][0]) * kept[odd] + hi2f(scales[odd][0]) * in.sum[o][odd];
                other += lo2f(scales[odd][1]) * kept[2 + odd] + hi2f(scales[odd][1]) * in.sum[o][odd];
            }
        }
    }
    one += __shfl_xor_sync(~0u, one, 1);
    other += __shfl_xor_sync(~0u, other, 1);
    one += __shfl_xor_sync(~0u, one, 2);
    other += __shfl_xor_sync(~0u, other, 2);
}

// The same with integers. Threads whose columns are the first unit's of a pair have its sums, others the second one's.
template <int W, int K>
__device__ __forceinline__ void sum_tile_of_integers(float& one, float& other, const Inputs<W, K>& in, Ring& r,
                                                     u8* ring, Shared* s, int tid) {
    using R = Rows<W, K>;
    int lane = tid & 31, warp = tid >> 5, row = lane >> 2, j = lane & 3;
    const bool is_first = j < 2;
    // Of four digits in columns 2 j and 2 j + 1, the last one is not used. Sums of int4 were multiplied by 16.
    const float high = (j & 1 ? 1.f : 65536.f) * (W == 3 ? 0.0625f : 1.f);
    const float low = (j & 1 ? 0.f : 256.f) * (W == 3 ? 0.0625f : 1.f);
    const int MAGIC = 0x4b400000;  // added to an integer, it makes a float of 1.5 * 2^23 more
    int sums[4][4] = {};           // int8: of first and second units, two for each
    one = other = 0;
#pragma unroll
    for (int stage = 0; stage < R::stages; stage++) {
        const int there = min(R::in_stage, R::units - stage * R::in_stage);  // units of this stage
        u32 from = smem_of(ring + r.stage * STAGE_B), at = from + row * R::stride + j * (R::unit / 4);
        mbar_wait(smem_of(&s->full[r.stage]), r.phase);
        u32 w[R::at_once][4] = {}, v[R::at_once][4] = {};
#pragma unroll
        for (int q = 0; q < R::at_once; q++) {
            int unit = warp + q * NW;
            if (q * NW >= there || (q * NW + NW > there && unit >= there)) continue;
            u32 here = at + unit * R::unit;
            if constexpr (W == 3) {
                uint2 a = lds64(here), b = lds64(here + 8 * R::stride);
                w[q][0] = a.x, w[q][1] = a.y, v[q][0] = b.x, v[q][1] = b.y;
            } else {
                uint4 a = lds128(here), b = lds128(here + 8 * R::stride);
                w[q][0] = a.x, w[q][1] = a.y, w[q][2] = a.z, w[q][3] = a.w;
                v[q][0] = b.x, v[q][1] = b.y, v[q][2] = b.z, v[q][3] = b.w;
            }
        }
        u32 scales[R::at_once / 2][2] = {};
        if constexpr (W == 3) {
#pragma unroll
            for (int pair = 0; pair < R::at_once / 2; pair++) {
                int unit = warp + (2 * pair + !is_first) * NW;
                if (2 * pair * NW < there && unit < there) {
                    u32 here = from + 16 * R::stride + unit * 64 + row * 4;
                    scales[pair][0] = lds32(here);
                    scales[pair][1] = lds32(here + 32);
                }
            }
        }
        __syncwarp();
        if (lane == 0) mbar_arrive(smem_of(&s->empty[r.stage]));
        r.advance();
        const int before = stage * R::at_once % 8, o = stage * R::at_once / 8;  // units of the octet in earlier stages
        if constexpr (W == 1) {
#pragma unroll
            for (int half = 0; half < 4; half += 2)
#pragma unroll
                for (int q = 0; q < R::at_once; q++) {
                    const u32* x = in.x[o] + (before + q) / 2 * 4 + half;
                    int(&to)[4] = sums[q % 2 * 2 + half / 2];
                    if (q * NW < there)
                        mma_s8(to, to, w[q][half], v[q][half], w[q][half + 1], v[q][half + 1], x[0], x[1]);
                }
        } else {
            const u32 UPPER = 0xf0f0f0f0u;
            int d[R::at_once][4];
#pragma unroll
            for (int q = 0; q < R::at_once; q++) {
                const int begin[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
                const u32* x = in.x[o] + (before + q) / 2 * 4;
                if (q * NW < there) mma_u8(d[q], begin, w[q][0], v[q][0], w[q][1], v[q][1], x[0], x[1]);
            }
#pragma unroll
            for (int q = 0; q < R::at_once; q++) {
                const u32* x = in.x[o] + (before + q) / 2 * 4 + 2;
                if (q * NW < there)
                    mma_u8(d[q], d[q], w[q][0] & UPPER, v[q][0] & UPPER, w[q][1] & UPPER, v[q][1] & UPPER, x[0], x[1]);
            }
#pragma unroll
            for (int pair = 0; pair < R::at_once / 2; pair++) {
                if (2 * pair * NW >= there) continue;
                float f[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int of_second = (2 * pair + 1) * NW < there ? d[2 * pair + 1][i] : MAGIC;
                    f[i] = __int_as_float(is_first ? d[2 * pair][i] : of_second) - 12582912.f;
                }
                const float sum = in.sum[o][before / 2 + pair];
                one += lo2f(scales[pair][0]) * (f[0] * high + f[1] * low) + hi2f(scales[pair][0]) * sum;
                other += lo2f(scales[pair][1]) * (f[2] * high + f[3] * low) + hi2f(scales[pair][1]) * sum;
            }
        }
    }
    if constexpr (W == 1) {
        float f[4];
#pragma unroll
        for (int i = 0; i < 4; i++) f[i] = (float)(is_first ? sums[0][i] + sums[1][i] : sums[2][i] + sums[3][i]);
        one = f[0] * high + f[1] * low;
        other = f[2] * high + f[3] * low;
    }
    one += __shfl_xor_sync(~0u, one, 1);
    other += __shfl_xor_sync(~0u, other, 1);
    one += __shfl_xor_sync(~0u, one, 2);
    other += __shfl_xor_sync(~0u, other, 2);
}

// The inputs of a layer: what blocks have exchanged, normed or not, or attention. x is a block's shared memory; what is
// returned is the factor of this warp's outputs.
#if DIRECT
__device__ __forceinline__ float root_of(const Shared* s, int size) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < NW; i++) squares += s->block[i];
    return rsqrtf(squares / size + EPS);
}
#define ROOM(x) ((u8*)(x) + TILES * NW * 64 + (thread() >> 5) * 3 * PLANE)
template <int W, int K>
using GainsOf = Runs<W, K>;
template <int W, int K>
__device__ __forceinline__ GainsOf<W, K> gains_of(const u16* gain) {
    return load_runs<W, K>(gain, false);
}
template <int W, int K>
__device__ __forceinline__ float norm_inputs(Inputs<W, K>& in, const u16* h, bool is_exchanged,
                                             const GainsOf<W, K>& gains, u16* x, Shared* s, int& turn) {
    Runs<W, K> runs = load_runs<W, K>(h, is_exchanged);
    float squares = sum_squares(runs);
    if (threadIdx.x % 32 == 0) s->block[threadIdx.x / 32] = squares;
    float root = 1.f;
    if (ROUNDED) {
        consumers_sync();
        root = root_of(s, K);
    }
    return prepare<W, K, true>(in, runs, gains, root, ROOM(x));
}
template <int W, int K>
__device__ __forceinline__ float plain_inputs(Inputs<W, K>& in, const u16* from, u16* x, Shared* s, int& turn) {
    Runs<W, K> runs = load_runs<W, K>(from, true);
    return prepare<W, K, false>(in, runs, runs, 1.f, ROOM(x));
}
template <int W, int K>
__device__ __forceinline__ float attention_inputs(Inputs<W, K>& in, const Exchange* ex, u16* x, Shared* s, int& turn) {
    using R = Runs<W, K>;
    R runs;
    int tid = thread();
    EACH_RUN {
        int k = place_of<W, K>(o, run, tid);
        runs.w[o][run] = make_uint4(0, 0, 0, 0);
        if (k < K) runs.w[o][run] = merge_parts(ex, s->at.splits, k);
    }
    return prepare<W, K, false>(in, runs, runs, 1.f, ROOM(x));
}
#else
template <int W, int K>
using GainsOf = Gains<K>;
template <int W, int K>
__device__ __forceinline__ GainsOf<W, K> gains_of(const u16* gain) {
    return load_gains<K>(gain);
}
template <int W, int K>
__device__ __forceinline__ float norm_inputs(Inputs<W, K>& in, const u16* h, bool is_exchanged,
                                             const GainsOf<W, K>& gains, u16* x, Shared* s, int& turn) {
    float back = stage_norm<W, K>(h, gains, x, s, turn);
    load_inputs<W, K>(in, x, thread());
    consumers_sync();
    return back;
}
template <int W, int K>
__device__ __forceinline__ float plain_inputs(Inputs<W, K>& in, const u16* from, u16* x, Shared* s, int& turn) {
    float back = stage_plain<W, K>(from, x, s, turn);
    load_inputs<W, K>(in, x, thread());
    consumers_sync();
    return back;
}
template <int W, int K>
__device__ __forceinline__ float attention_inputs(Inputs<W, K>& in, const Exchange* ex, u16* x, Shared* s, int& turn) {
    float back = stage_attention<W, K>(ex, s->at.splits, x, s, turn);
    load_inputs<W, K>(in, x, thread());
    consumers_sync();
    return back;
}
#endif

// Multiplies inputs; x is overwritten by sums: each warp's of up to TILES tiles, added up when all are there.
template <int W, int N, int K, int KIND>
__device__ __forceinline__ void consume(void* out, const float* row_scale, const Inputs<W, K>& in, float back, int op,
                                        Ring& r, u8* ring, u16* x, Shared* s, float& residual) {
    const int all = num_tiles<N, KIND>(op);
    int tid = thread(), lane = tid & 31, warp = tid >> 5, in_tile = tid % 16;
    float* sums = (float*)x;
    for (int begin = 0; begin < all; begin += TILES) {
        int count = min(TILES, all - begin), t = tile_of<N, KIND>(op, begin + tid / 16);
        bool is_mine = tid / 16 < count;
        int n = KIND == GATED ? (in_tile < 8 ? t * 8 + in_tile : N + t * 8 + in_tile - 8) : t * 16 + in_tile;
        float scale = (W == 1 || W == 2) && is_mine ? row_scale[n] : 1.f;
        for (int i = 0; i < count; i++) {
            float one, other;
            if constexpr (IS_INTEGER(W))
                sum_tile_of_integers<W, K>(one, other, in, r, ring, s, tid);
            else
                sum_tile<W, K>(one, other, in, r, ring, s, tid);
            if ((lane & 3) < 2)
                sums[(i * NW + warp) * 16 + (lane >> 2) + (lane & 3) * 8] = (lane & 3 ? other : one) * back;
        }
        consumers_sync();
        if (warp * 2 < count) {
            float y = 0;
#pragma unroll
            for (int i = 0; i < NW; i++) y += sums[(tid / 16 * NW + i) * 16 + in_tile];
            y *= scale;
#if DIRECT && !ROUNDED
            if (KIND != RESIDUAL) y *= root_of(s, K);  // inputs were not divided by their norm
#endif
            if (KIND == LOGITS) {
                if (is_mine) ((float*)out)[n] = round_bf(y);
            } else {
                y = round_bf(y);
                if (KIND == GATED) y = y / (1.f + __expf(-y)) * __shfl_down_sync(~0u, y, 8);
                if (KIND == RESIDUAL) y = residual = round_bf(residual + y);
                float next = __shfl_down_sync(~0u, y, 1);
                if (is_mine && in_tile % 2 == 0 && (KIND != GATED || in_tile < 8)) st1((u16*)out + n, pack_bf(y, next));
            }
        }
        consumers_sync();  // x may be written
    }
}

__device__ __forceinline__ int slot_of(const Params& P, int t) {
    return (int)P.table[t / KVBLOCK] * KVBLOCK + t % KVBLOCK;
}
__device__ __forceinline__ void find_places(const Params& P, Shared* s) {
    Places at;
    at.length = max(1, (int)*P.length);  // 0 in buffers that were never filled
    int splits = min(NSPLIT_MAX, (at.length + 31) / 32), chunk = (at.length + splits - 1) / splits;
    at.splits = (at.length + chunk - 1) / chunk;
    at.kv_head = blockIdx.x % NKV;
    at.split = blockIdx.x / NKV;
    at.first = at.split * chunk;
    at.last = at.split < at.splits ? min(at.length, at.first + chunk) : 0;
    for (int i = threadIdx.x; i < 2 * ROUND && at.first + i < at.last; i += CONSUMERS)
        s->slots[i] = slot_of(P, at.first + i);
    if (threadIdx.x == 0) s->at = at;
    consumers_sync();
}
struct Cached {
    uint4 k[AHEAD], v[AHEAD];
};
// keys and values of places t, t + NW * TPW, ... before the new one
__device__ __forceinline__ void load_cached(Cached& to, const Params& P, int layer, const Shared* s,
                                            int t) {
    const Places& at = s->at;
    const u16 *keys = (const u16*)P.keys[layer], *values = (const u16*)P.values[layer];
#pragma unroll
    for (int i = 0; i < AHEAD; i++, t += NW * TPW) {
        to.k[i] = to.v[i] = make_uint4(0, 0, 0, 0);
        if (t < at.last && t < at.length - 1) {
            int slot = t < at.first + 2 * ROUND ? s->slots[t - at.first] : slot_of(P, t);
            i64 from = ((i64)slot * NKV + at.kv_head) * HD + thread() % LPT * 8;
            to.k[i] = *(const uint4*)(keys + from);
            to.v[i] = *(const uint4*)(values + from);
        }
    }
}
struct Attended {
    float m[GQ], l[GQ], o[GQ][8];
};
// adds the tokens of a round; queries are in shared memory, and in registers where there are enough
__device__ __forceinline__ void attend(Attended& sums, const Cached& cached, const float (&q)[GQ > 4 ? 1 : GQ][8],
                                       u32 queries, int t0, int last) {
#pragma unroll
    for (int g = 0; g < GQ; g++) {
        float qq[8], sc[AHEAD], top = sums.m[g];
        if constexpr (GQ > 4) {
            uint4 a = lds128(queries + g * HD * 4), b = lds128(queries + g * HD * 4 + 16);
            u32 words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
            for (int i = 0; i < 8; i++) qq[i] = __uint_as_float(words[i]);
        } else {
            for (int i = 0; i < 8; i++) qq[i] = q[g][i];
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            uint4 k = cached.k[i];
            float z = qq[0] * lo2f(k.x) + qq[1] * hi2f(k.x) + qq[2] * lo2f(k.y) + qq[3] * hi2f(k.y) +
                      qq[4] * lo2f(k.z) + qq[5] * hi2f(k.z) + qq[6] * lo2f(k.w) + qq[7] * hi2f(k.w);
            for (int w = LPT / 2; w; w >>= 1) z += __shfl_xor_sync(~0u, z, w);
            sc[i] = t0 + i * NW * TPW < last ? z : -1e30f;
            top = fmaxf(top, sc[i]);
        }
        float keep = exp2f(sums.m[g] - top);
        sums.m[g] = top;
        sums.l[g] *= keep;
        for (int i = 0; i < 8; i++) sums.o[g][i] *= keep;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            float p = t0 + i * NW * TPW < last ? exp2f(sc[i] - top) : 0.f, v[8];
            sums.l[g] += p;
            WIDEN(v, cached.v[i])
            for (int e = 0; e < 8; e++) sums.o[g][e] += p * v[e];
        }
    }
}
__device__ __forceinline__ void attention(const Params& P, Cached (&cached)[2], Exchange* ex, int layer,
                                          float* buf, Shared* s) {
    int tid = thread(), lane = tid & 31, warp = tid >> 5;
    const Places& at = s->at;
    int kvh = at.kv_head, split = at.split, first = at.first, last = at.last, length = at.length;
    if (split >= at.splits) return;
    int pos = length - 1;
    // queries, turned, in buf[GQ][HD]; the new key in buf[GQ][HD..], the new value after it
    float* knew = buf + GQ * HD;
    float* vnew = knew + HD;
    for (int i = tid; i < (GQ + 2) * (HD / 4); i += CONSUMERS) {
        int g = i / (HD / 4), d = i % (HD / 4) * 2;
        const u16* from = ex->qkv + (g < GQ ? kvh * GQ + g : NH + (g - GQ) * NKV + kvh) * HD + d;
        float* to = buf + g * HD + d;
        float f = g < GQ ? rsqrtf((float)HD) * 1.4426950408889634f : 1.f;
        float2 co = make_float2(1.f, 1.f), si = make_float2(0.f, 0.f);
        if (g <= GQ) {
            co = *(const float2*)(P.cos + pos * (HD / 2) + d);
            si = *(const float2*)(P.sin + pos * (HD / 2) + d);
        }
        u32 a = ld1(from), b = ld1(from + HD / 2);
        while (is_missing(a)) a = ld1(from);
        while (is_missing(b)) b = ld1(from + HD / 2);
        to[0] = round_bf(lo2f(a) * co.x - lo2f(b) * si.x) * f;
        to[1] = round_bf(hi2f(a) * co.y - hi2f(b) * si.y) * f;
        to[HD / 2] = round_bf(lo2f(b) * co.x + lo2f(a) * si.x) * f;
        to[HD / 2 + 1] = round_bf(hi2f(b) * co.y + hi2f(a) * si.y) * f;
    }
    consumers_sync();
    if (last == length) {
        i64 to = (*P.slot * NKV + kvh) * HD;
        for (int d = tid; d < HD; d += CONSUMERS) {
            ((u16*)P.keys[layer])[to + d] = (u16)pack_bf(knew[d], 0.f);
            ((u16*)P.values[layer])[to + d] = (u16)pack_bf(vnew[d], 0.f);
        }
    }
    int e = lane % LPT * 8;
    float q[GQ > 4 ? 1 : GQ][8];
    Attended sums;
    for (int g = 0; g < GQ; g++) {
        sums.m[g] = -1e30f;
        sums.l[g] = 0;
        for (int i = 0; i < 8; i++) {
            if (GQ <= 4) q[g % (GQ > 4 ? 1 : GQ)][i] = buf[g * HD + e + i];
            sums.o[g][i] = 0;
        }
    }
    // Two rounds are under way: while one is added, the next one arrives.
    for (int begin = first; begin < last; begin += 2 * ROUND) {
#pragma unroll
        for (int round = 0; round < 2; round++) {
            int t0 = begin + round * ROUND + tid / LPT;
            if (begin + round * ROUND >= last) break;
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (t0 + i * NW * TPW == length - 1) {
                    cached[round].k[i] = pack8(*(const float(*)[8])(knew + e));
                    cached[round].v[i] = pack8(*(const float(*)[8])(vnew + e));
                }
            attend(sums, cached[round], q, smem_of(buf + e), t0, last);
            if (begin + (2 + round) * ROUND < last) load_cached(cached[round], P, layer, s, t0 + 2 * ROUND);
        }
    }
    // merge the tokens of a warp, then the warps
    consumers_sync();
    for (int g = 0; g < GQ; g++) {
        for (int w = LPT; w < 32; w <<= 1) {
            float m = __shfl_xor_sync(~0u, sums.m[g], w), l = __shfl_xor_sync(~0u, sums.l[g], w),
                  top = fmaxf(sums.m[g], m), a = exp2f(sums.m[g] - top), b = exp2f(m - top);
            sums.l[g] = sums.l[g] * a + l * b;
            sums.m[g] = top;
            for (int i = 0; i < 8; i++) {
                float other = __shfl_xor_sync(~0u, sums.o[g][i], w);
                sums.o[g][i] = sums.o[g][i] * a + other * b;
            }
        }
        float* to = buf + (warp * GQ + g) * (HD + 2);
        if (lane < LPT)
            for (int i = 0; i < 8; i++) to[e + i] = sums.o[g][i];
        if (lane == 0) {
            to[HD] = sums.m[g];
            to[HD + 1] = sums.l[g];
        }
    }
    consumers_sync();
    for (int i = tid; i < GQ * HD / 2; i += CONSUMERS) {
        int g = i / (HD / 2), d = i % (HD / 2) * 2;
        float top = -1e30f, l = 0, one = 0, other = 0;
#pragma unroll
        for (int w = 0; w < NW; w++) top = fmaxf(top, buf[(w * GQ + g) * (HD + 2) + HD]);
#pragma unroll
        for (int w = 0; w < NW; w++) {
            float* from = buf + (w * GQ + g) * (HD + 2);
            float f = exp2f(from[HD] - top);
            l += f * from[HD + 1];
            one += f * from[d];
            other += f * from[d + 1];
        }
        int head = kvh * GQ + g;
        st1(&ex->part_o[split][head * HD + d], pack_h(one / l, other / l));
        if (d == 0) {
            st1(&ex->part_ml[split][head].x, __float_as_uint(top));
            st1(&ex->part_ml[split][head].y, __float_as_uint(l));
        }
    }
    consumers_sync();  // x may be written
}

// Between the parts of a layer: all blocks have arrived before any goes on. What a thread loads in between does not
// delay its block's arrival.
__device__ __forceinline__ void arrive(u64* counter) {
    if (threadIdx.x == 0) {
#if CHECKED
        asm volatile("red.relaxed.gpu.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
#else
        asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
#endif
    }
}
// With LOCAL: a counter for each key-value head, too, in lines of their own
__device__ __forceinline__ u64* local_counter(u64* counter) { return counter + 16 * (1 + blockIdx.x % NKV); }
__device__ __forceinline__ void wait_for(u64* counter, u64& target, int num_blocks) {
    target += num_blocks;
    if (threadIdx.x == 0) {
        u64 seen;
        do {
#if RELAXED
            asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(counter) : "memory");
#else
            asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(counter) : "memory");
#endif
        } while (seen < target);
    }
    consumers_sync();
}
// The arrivals of earlier launches, each of which had this many. Of this one, there are fewer before this block's own.
__device__ __forceinline__ u64 arrivals_before(u64* counter, int of_a_launch) {
    u64 seen = 0;
#if ALONE
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(counter) : "memory");
#endif
    return seen - seen % of_a_launch;
}
// With CHECKED: what a layer gave is read, and the next step gives it again.
__device__ __forceinline__ void forget(Exchange* ex) {
    uint4* to = (uint4*)ex;
    for (int i = blockIdx.x * CONSUMERS + thread(); i < (int)(sizeof(Exchange) / 16); i += NB * CONSUMERS)
        to[i] = make_uint4(MISSING, MISSING, MISSING, MISSING);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    step(const Params* params, const i64* slot_at, const i64* length_at, const i64* table_at, const i64* id_at) {
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
        s->issued = 0;
        for (int i = 0; i < STAGES; i++) {
            mbar_init(smem_of(&s->full[i]), 1);
            mbar_init(smem_of(&s->empty[i]), NW);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    Ring r = {0, 0};
    if (threadIdx.x >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPY_REGISTERS));
        const int role = (threadIdx.x - CONSUMERS) / 32;
        if (role > (PREFETCH ? 1 : 0)) return;
        u32 stage = 0;
        for (int layer = 0; layer <= LAYERS; layer++) {
            const u64* w = P.weights + layer * 4;
            const u64* sc = P.scales + layer * 4;
#define EACH_MATRIX(DO, AT)                                                                            \
    if (layer < LAYERS) {                                                                              \
        DO<WT, QKV_N, HID, QKV>((const u8*)w[0], (const u8*)sc[0], layer * 4, AT);                     \
        DO<WT, HID, NH * HD, RESIDUAL>((const u8*)w[1], (const u8*)sc[1], layer * 4 + 1, AT);          \
        DO<WT, FF, HID, GATED>((const u8*)w[2], (const u8*)sc[2], layer * 4 + 2, AT);                  \
        DO<WT, HID, FF, RESIDUAL>((const u8*)w[3], (const u8*)sc[3], layer * 4 + 3, AT);               \
    } else {                                                                                           \
        DO<HEAD_WT, VOCAB, HID, LOGITS>((const u8*)w[0], (const u8*)sc[0], layer * 4, AT);             \
    }
#define TO_RING r, ring, s
#define TO_CACHE stage, s
            if (role == 0) {
                EACH_MATRIX(produce, TO_RING)
            } else {
                EACH_MATRIX(prefetch_weights, TO_CACHE)
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTE_REGISTERS));
    int turn = 0;
    u64 target = arrivals_before(P.counter, NB * LAYERS * (LOCAL ? 4 : 5));
    u64 local_target = LOCAL ? arrivals_before(local_counter(P.counter), NSPLIT_MAX * LAYERS) : 0;
    find_places(P, s);
    int mine = (blockIdx.x + threadIdx.x / 16 * NB) * 16 + threadIdx.x % 16;  // the output of layers with residual sums
    const u16* h = P.h + (ALONE ? *id_at * HID : 0);
    float residual = mine < HID ? bf2f(h[mine]) : 0.f;
    GainsOf<WT, HID> gains = gains_of<WT, HID>((const u16*)P.gains[0]);
    for (int layer = 0; layer < LAYERS; layer++) {
        Exchange* ex = (Exchange*)P.exchange + layer;
        const u64* sc = P.scales + layer * 4;
        {
            Inputs<WT, HID> in;
            float back = norm_inputs<WT, HID>(in, h, layer > 0, gains, x, s, turn);
            consume<WT, QKV_N, HID, QKV>(ex->qkv, (const float*)sc[0], in, back, layer * 4, r, ring, x, s, residual);
        }
        const bool has_part = blockIdx.x < NKV * NSPLIT_MAX;  // of attention
        if (!LOCAL)
            arrive(P.counter);
        else if (has_part)
            arrive(local_counter(P.counter));
        {
            Cached cached[2];
#pragma unroll
            for (int round = 0; round < 2; round++)
                load_cached(cached[round], P, layer, s, s->at.first + thread() / LPT + round * ROUND);
            if (!LOCAL)
                wait_for(P.counter, target, NB);
            else if (has_part)
                wait_for(local_counter(P.counter), local_target, NSPLIT_MAX);
            attention(P, cached, ex, layer, (float*)x, s);
        }
        arrive(P.counter);
        wait_for(P.counter, target, NB);
        {
            Inputs<WT, NH * HD> in;
            float back = attention_inputs<WT, NH * HD>(in, ex, x, s, turn);
            consume<WT, HID, NH * HD, RESIDUAL>(ex->middle, (const float*)sc[1], in, back, layer * 4 + 1, r, ring, x,
                                                s, residual);
        }
        arrive(P.counter);
        if (CHECKED) forget((Exchange*)P.exchange + (layer + LAYERS - 1) % LAYERS);
        gains = gains_of<WT, HID>((const u16*)P.gains[layer * 2 + 1]);
        wait_for(P.counter, target, NB);
        {
            Inputs<WT, HID> in;
            float back = norm_inputs<WT, HID>(in, ex->middle, true, gains, x, s, turn);
            consume<WT, FF, HID, GATED>(ex->act, (const float*)sc[2], in, back, layer * 4 + 2, r, ring, x, s, residual);
        }
        arrive(P.counter);
        wait_for(P.counter, target, NB);
        {
            Inputs<WT, FF> in;
            float back = plain_inputs<WT, FF>(in, ex->act, x, s, turn);
            consume<WT, HID, FF, RESIDUAL>(ex->h, (const float*)sc[3], in, back, layer * 4 + 3, r, ring, x, s,
                                           residual);
        }
        arrive(P.counter);
        gains = gains_of<WT, HID>((const u16*)P.gains[layer * 2 + 2]);
        wait_for(P.counter, target, NB);
        h = ex->h;
    }
    Inputs<HEAD_WT, HID> in;
    GainsOf<HEAD_WT, HID> last = gains_of<HEAD_WT, HID>((const u16*)P.gains[LAYERS * 2]);
    float back = norm_inputs<HEAD_WT, HID>(in, h, true, last, x, s, turn);
    consume<HEAD_WT, VOCAB, HID, LOGITS>(P.logits, (const float*)P.scales[LAYERS * 4], in, back, LAYERS * 4, r, ring, x,
                                         s, residual);
}

// One decode step of a dense Llama-shaped network for one sequence, in one persistent kernel.
//
// There is one block per multiprocessor. The last warp streams weights through a ring in shared memory with bulk copies
// and never waits for a result; the others compute. Blocks meet at a counter in global memory between the parts of a
// layer, and the ring fills meanwhile. Weights keep the row-major layout of the engine's layers.
//
// Defined before this text: WT and HEAD_WT (0 bfloat16, 1 int8, 2 fp8, 3 int4 in groups), HID, NH, NKV, HD, FF, LAYERS,
// VOCAB, GROUP, RB (bytes of a row that one copy moves), STAGES, NB (blocks), NW (warps that compute), KVBLOCK, EPS,
// XBYTES.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define CONSUMERS (NW * 32)
#define LPT (HD / 8)
#define TPW (32 / LPT)
#define AHEAD (NW > 8 ? 2 : 4)  // keys and values that a thread loads together
#define QKV_N ((NH + 2 * NKV) * HD)
#define NSPLIT_MAX (NB / NKV)
#define GQ (NH / NKV)
#define TILES 16             // of outputs, whose sums are kept until all are there

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
    const u16* h;  // the token's embedding
    u16* exchange;
    float* logits;
    u32* counter;
    const i64* slot;  // from here on: the step's own, set by the kernel
    const i64* length;
    const i64* table;
};
// what blocks of a layer give each other: bfloat16, but parts of attention are float16 with two floats for each head
struct __align__(16) Exchange {
    u16 qkv[QKV_N], middle[HID], act[FF], h[HID], part_o[NSPLIT_MAX][NH * HD];
    float2 part_ml[NSPLIT_MAX][NH];
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
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
__device__ __forceinline__ void mma_h(float (&d)[4], const float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                      u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
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

struct Shared {
    Params params;
    u64 full[STAGES];
    u64 empty[STAGES];
    float block[4 * NW];
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
                    if (upper)
                        for (int e = 0; e < 8; e++) v[i][e] *= 0.0625f;
                    to[0] = pack_h(v[i][0], v[i][2]);
                    to[2] = pack_h(v[i][1], v[i][3]);
                    to[4] = pack_h(v[i][4], v[i][6]);
                    to[6] = pack_h(v[i][5], v[i][7]);
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
    EACH(i, k) w[i] = ld4(h + k);
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
    EACH(i, k) w[i] = ld4(from + k);
#pragma unroll
    EACH(i, k) { WIDEN(v[i], w[i]) for (int e = 0; e < 8; e++) m = fmaxf(m, fabsf(v[i][e])); }
    if (W != 0) block_reduce(q, m, s, turn);
    return put_x<W, K>(v, m, x, s);
}
template <int W, int K>
__device__ __forceinline__ float stage_attention(const Exchange* ex, int splits, u16* x, Shared* s, int& turn) {
    float v[PER][8];
    float q = 0, m = 0;
#pragma unroll
    EACH(i, k) {
        int head = k / HD;
        float top = -1e30f, l = 0;
        for (int e = 0; e < 8; e++) v[i][e] = 0;
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
                float high = __uint_as_float(ml[j].x), next = fmaxf(top, high), f = exp2f(top - next),
                      w = exp2f(high - next) * __uint_as_float(ml[j].y);
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

// The first tile of a block. The output and down layers have the same ones, whose residual sums stay in registers.
#define FIRST(op) ((op) & 1 ? blockIdx.x : (blockIdx.x + (op)*37) % NB)

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
template <int W, int N, int K, bool GATED>
__device__ __forceinline__ void produce(const u8* w, const u8* scales, int op, Ring& r, u8* ring, Shared* s) {
    using R = Rows<W, K>;
    constexpr int tiles = GATED ? N / 8 : N / 16;
    int lane = threadIdx.x & 31;
    for (int t = FIRST(op); t < tiles; t += NB) {
        i64 row = GATED ? (lane < 8 ? t * 8 + lane : N + t * 8 + lane - 8) : t * 16 + lane;
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
        }
    }
}

// The inputs of a warp's units: each octet of units has the eight columns of the second operand, so that a product of
// one unit has its sums in one column, and rubbish in the others.
template <int W, int K>
struct Inputs {
    u32 x[Rows<W, K>::octets][Rows<W, K>::words];
    float offset[Rows<W, K>::octets][2];  // what sums begin with, for two units: minus what is added to weights
    float sum[Rows<W, K>::octets][2];     // of the inputs of two units
};
template <int W, int K>
__device__ __forceinline__ void load_inputs(Inputs<W, K>& in, const u16* x) {
    using R = Rows<W, K>;
    const u32 ONES = 0x3c003c00u, SIXTEENS = 0x4c004c00u;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, j = lane & 3;
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
            for (int i = 0; i < R::words; i += 2) mma_h(d, d, ONES, ONES, SIXTEENS, SIXTEENS, in.x[o][i], in.x[o][i + 1]);
            in.sum[o][0] = d[0];
            in.sum[o][1] = d[1];
        }
    }
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
                                         Shared* s) {
    using R = Rows<W, K>;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = lane >> 2, j = lane & 3;
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

enum Output { QKV, RESIDUAL, GATED, LOGITS };

// Multiplies x, which is overwritten by sums: each warp's of up to TILES tiles, added up when all are there.
template <int W, int N, int K, int KIND>
__device__ __forceinline__ void consume(void* out, const float* row_scale, float back, int op, Ring& r, u8* ring,
                                        u16* x, Shared* s, float& residual) {
    const int tiles = KIND == GATED ? N / 8 : N / 16, first = FIRST(op);
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, in_tile = tid % 16;
    float* sums = (float*)x;
    Inputs<W, K> in;
    load_inputs<W, K>(in, x);
    consumers_sync();
    for (int begin = first; begin < tiles; begin += TILES * NB) {
        int count = min(TILES, (tiles - begin + NB - 1) / NB), t = begin + tid / 16 * NB;
        bool is_mine = tid / 16 < count;
        int n = KIND == GATED ? (in_tile < 8 ? t * 8 + in_tile : N + t * 8 + in_tile - 8) : t * 16 + in_tile;
        float scale = (W == 1 || W == 2) && is_mine ? row_scale[n] : 1.f;
        for (int i = 0; i < count; i++) {
            float one, other;
            sum_tile<W, K>(one, other, in, r, ring, s);
            if ((lane & 3) < 2) sums[(i * NW + warp) * 16 + (lane >> 2) + (lane & 3) * 8] = lane & 3 ? other : one;
        }
        consumers_sync();
        if (warp * 2 < count) {
            float y = 0;
#pragma unroll
            for (int i = 0; i < NW; i++) y += sums[(tid / 16 * NW + i) * 16 + in_tile];
            y *= back * scale;
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

// which part of attention a block has, and where in the cache its first keys and values are
struct Places {
    int length, splits, first, last, kv_head, split;
    int slots[AHEAD];
};
__device__ __forceinline__ Places places_of(const Params& P) {
    Places at;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    at.length = max(1, (int)*P.length);  // 0 in buffers that were never filled
    int splits = min(NSPLIT_MAX, (at.length + 31) / 32), chunk = (at.length + splits - 1) / splits;
    at.splits = (at.length + chunk - 1) / chunk;
    at.kv_head = blockIdx.x % NKV;
    at.split = blockIdx.x / NKV;
    at.first = at.split * chunk;
    at.last = at.split < at.splits ? min(at.length, at.first + chunk) : 0;
    for (int i = 0; i < AHEAD; i++) {
        int t = at.first + warp * TPW + lane / LPT + i * NW * TPW;
        at.slots[i] = t < at.last ? (int)P.table[t / KVBLOCK] * KVBLOCK + t % KVBLOCK : 0;
    }
    return at;
}
struct Cached {
    uint4 k[AHEAD], v[AHEAD];
};
// keys and values of places t, t + NW * TPW, ... before the new one
__device__ __forceinline__ void load_cached(Cached& to, const Params& P, const Places& at, int layer,
                                            const int (&slots)[AHEAD], int t) {
    const u16 *keys = (const u16*)P.keys[layer], *values = (const u16*)P.values[layer];
#pragma unroll
    for (int i = 0; i < AHEAD; i++, t += NW * TPW) {
        to.k[i] = to.v[i] = make_uint4(0, 0, 0, 0);
        if (t < at.last && t < at.length - 1) {
            i64 from = ((i64)slots[i] * NKV + at.kv_head) * HD + threadIdx.x % LPT * 8;
            to.k[i] = *(const uint4*)(keys + from);
            to.v[i] = *(const uint4*)(values + from);
        }
    }
}
__device__ __forceinline__ void attention(const Params& P, const Places& at, Cached& cached, Exchange* ex, int layer,
                                          float* buf, Shared* s) {
    int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
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
    const int STEP = NW * TPW;
    for (int t0 = first + warp * TPW + sub; t0 - sub - warp * TPW < last; t0 += STEP * AHEAD) {
        if (t0 != first + warp * TPW + sub) {
            int slots[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                int t = t0 + i * STEP;
                slots[i] = t < last ? (int)P.table[t / KVBLOCK] * KVBLOCK + t % KVBLOCK : 0;
            }
            load_cached(cached, P, at, layer, slots, t0);
        }
        uint4(&k4)[AHEAD] = cached.k;
        uint4(&v4)[AHEAD] = cached.v;
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (t0 + i * STEP == length - 1 && length - 1 < last) {
                const float* a = knew + e;
                const float* b = vnew + e;
                k4[i] = make_uint4(pack_bf(a[0], a[1]), pack_bf(a[2], a[3]), pack_bf(a[4], a[5]), pack_bf(a[6], a[7]));
                v4[i] = make_uint4(pack_bf(b[0], b[1]), pack_bf(b[2], b[3]), pack_bf(b[4], b[5]), pack_bf(b[6], b[7]));
            }
#pragma unroll
        for (int g = 0; g < GQ; g++) {
            float sc[AHEAD], top = m[g];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
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
            for (int i = 0; i < AHEAD; i++) {
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
__device__ __forceinline__ void arrive(u32* counter) {
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ void wait_for_all(u32* counter, u32& target) {
    target += NB;
    if (threadIdx.x == 0) {
        u32 seen;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        } while (seen < target);
    }
    consumers_sync();
}

extern "C" __global__ void __launch_bounds__(32 * (NW + 1), 1)
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
            mbar_init(smem_of(&s->empty[i]), NW);
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
    int turn = 0;
    u32 target = 0;
    Places at = places_of(P);
    int mine = (blockIdx.x + threadIdx.x / 16 * NB) * 16 + threadIdx.x % 16;  // the output of layers with residual sums
    float residual = mine < HID ? bf2f(P.h[mine]) : 0.f;
    Gains<HID> gains = load_gains<HID>((const u16*)P.gains[0]);
    const u16* h = P.h;
    for (int layer = 0; layer < LAYERS; layer++) {
        Exchange* ex = (Exchange*)P.exchange + layer;
        const u64* sc = P.scales + layer * 4;
        float back = stage_norm<WT, HID>(h, gains, x, s, turn);
        consume<WT, QKV_N, HID, QKV>(ex->qkv, (const float*)sc[0], back, layer * 4, r, ring, x, s, residual);
        arrive(P.counter);
        {
            Cached cached;
            load_cached(cached, P, at, layer, at.slots, at.first + (threadIdx.x >> 5) * TPW + (threadIdx.x & 31) / LPT);
            wait_for_all(P.counter, target);
            attention(P, at, cached, ex, layer, (float*)x, s);
        }
        arrive(P.counter);
        wait_for_all(P.counter, target);
        back = stage_attention<WT, NH * HD>(ex, at.splits, x, s, turn);
        consume<WT, HID, NH * HD, RESIDUAL>(ex->middle, (const float*)sc[1], back, layer * 4 + 1, r, ring, x, s,
                                            residual);
        arrive(P.counter);
        gains = load_gains<HID>((const u16*)P.gains[layer * 2 + 1]);
        wait_for_all(P.counter, target);
        back = stage_norm<WT, HID>(ex->middle, gains, x, s, turn);
        consume<WT, FF, HID, GATED>(ex->act, (const float*)sc[2], back, layer * 4 + 2, r, ring, x, s, residual);
        arrive(P.counter);
        wait_for_all(P.counter, target);
        back = stage_plain<WT, FF>(ex->act, x, s, turn);
        consume<WT, HID, FF, RESIDUAL>(ex->h, (const float*)sc[3], back, layer * 4 + 3, r, ring, x, s, residual);
        arrive(P.counter);
        gains = load_gains<HID>((const u16*)P.gains[layer * 2 + 2]);
        wait_for_all(P.counter, target);
        h = ex->h;
    }
    float back = stage_norm<HEAD_WT, HID>(h, gains, x, s, turn);
    consume<HEAD_WT, VOCAB, HID, LOGITS>(P.logits, (const float*)P.scales[LAYERS * 4], back, LAYERS * 4, r, ring, x, s,
                                         residual);
}

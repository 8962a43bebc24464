// Attention of one new token of each sequence, from its projections: queries and keys are rotated, key and value are
// written to the cache.
//
// A block has one sequence and one key-value head with the GROUP queries that share it. Its warps take tiles of 16
// places in turn and merge their results at the end. Tensor cores multiply: they need few instructions, however few
// queries there are. For scores, the tile's keys are the first operand (16 places by 16 dimensions) and the queries the
// second (8 columns); for outputs, the values are (16 dimensions by 16 places), and the weights the second. Which of
// its dimensions a number belongs to is free, so every thread loads 16 bytes at a time and uses them as they are.
//
// Keys and values of the first tiles are loaded before the kernel waits for the projections.
//
// Defined before this text: HEADS, KV_HEADS, KV_BLOCK tokens of a block of the cache (a multiple of 16), FP8 (the cache
// is e4m3, else bfloat16), PARTS (of the projections, which are float32 then; 1: bfloat16), WINDOW (0: none),
// NUM_WARPS (even).
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

#define GROUP (HEADS / KV_HEADS)  // at most 8
#define SIZE 128                  // of a head
#define HALF (SIZE / 2)
#define TILE 16
#define BYTES (FP8 ? 1 : 2)       // of a number in the cache
#define ROW_BYTES (KV_HEADS * SIZE * BYTES)
#define PIECES (FP8 ? 2 : 4)      // of 16 bytes: what a thread has of a key
#define WIDTH ((HEADS + 2 * KV_HEADS) * SIZE)
#define THREADS (32 * NUM_WARPS)   // a multiple of HALF
#define ROUNDS (((GROUP + 2) * HALF + THREADS - 1) / THREADS)
#define NONE -1e30f
#define SLACK 8.f                 // weights may become so many powers of two large before sums are scaled down

__device__ __forceinline__ u32 to_pair(float low, float high) {  // as the tensor cores multiply them
    u32 pair;
    if (FP8)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float rounded(float x) {  // to bfloat16
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.f), "f"(x));
    return __uint_as_float(pair << 16);
}
__device__ __forceinline__ u32 widen(u32 word, int half) {  // two e4m3 to float16
    u32 pair;
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(pair)
        : "r"(half ? word >> 16 : word));
    return pair;
}
__device__ __forceinline__ float store_cached(u8* to, int i, float x) {  // returns what is read from there
    if (FP8) {
        u16 pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.f), "f"(x));
        to[i] = (u8)pair;
        u32 wide = widen(pair, 0);
        float back;
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(back) : "r"(wide));
        return back;
    }
    ((u16*)to)[i] = (u16)(__float_as_uint(x) >> 16);  // it is rounded
    return x;
}
__device__ __forceinline__ void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (FP8)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float power(float x) {  // of two
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ u32 transposed(u32 pair) {
    u32 y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(pair));
    return y;
}
__device__ __forceinline__ uint4 load16(const u8* from) {  // read once: not kept in the L1 cache
    uint4 y;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w) : "l"(from));
    return y;
}
// Numbers i and i + HALF of a token's projections. Other multiprocessors wrote them: not from the L1 cache.
__device__ __forceinline__ void load_pair(float& a, float& b, const void* qkv, int token, int T, int i) {
    if (PARTS == 1) {
        const u16* at = (const u16*)qkv + (i64)token * WIDTH + i;
        u16 low, high;
        asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(low) : "l"(at));
        asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(high) : "l"(at + HALF));
        a = __uint_as_float((u32)low << 16);
        b = __uint_as_float((u32)high << 16);
        return;
    }
    float low[PARTS], high[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const float* at = (const float*)qkv + ((i64)part * T + token) * WIDTH + i;
        asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(low[part]) : "l"(at));
        asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(high[part]) : "l"(at + HALF));
    }
    a = b = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        a += low[part];
        b += high[part];
    }
    a = rounded(a);
    b = rounded(b);
}

struct Tile {
    uint4 k[2][PIECES];      // of places g and g + 8
    uint4 v[4][PIECES / 2];  // of places 2t, 2t + 1, 2t + 8, 2t + 9
};
// A lane is 4g + t. Its dimensions of a key are 64-byte runs of the head's, those of a value 128-byte runs.
__device__ __forceinline__ void load_keys(Tile& tile, const u8* from, int last, int lane) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const u8* at = from + min(g + 8 * h, last) * ROW_BYTES + t * 16;
#pragma unroll
        for (int i = 0; i < PIECES; i++) tile.k[h][i] = load16(at + i * 64);
    }
}
__device__ __forceinline__ void load_values(Tile& tile, const u8* from, int last, int lane) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int h = 0; h < 4; h++) {
        const u8* at = from + min(2 * t + (h & 1) + 8 * (h >> 1), last) * ROW_BYTES + g * 16;
#pragma unroll
        for (int i = 0; i < PIECES / 2; i++) tile.v[h][i] = load16(at + i * 128);
    }
}
__device__ __forceinline__ u32 word_of(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attend_new_tokens(const void* qkv, u8* keys, u8* values, const i64* positions, const i64* slots, const i64* tables,
                      const float* cos, const float* sin, u16* out, float scale, int T, int table_stride) {
    __shared__ __align__(16) u16 queries[GROUP][SIZE];
    __shared__ float new_key[SIZE], new_value[SIZE], own[GROUP];
    __shared__ __align__(16) float warp_sums[NUM_WARPS][GROUP][SIZE];
    __shared__ float warp_high[NUM_WARPS][GROUP], warp_total[NUM_WARPS][GROUP];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
    const int kv_head = blockIdx.x, token = blockIdx.y;  // neighboring blocks read neighboring memory
    const int position = (int)positions[token];
    const i64 slot = slots[token];
    const int earliest = WINDOW && position >= WINDOW ? position + 1 - WINDOW : 0;
    const i64* table = tables + (i64)token * table_stride;
    const int num_tiles = (position + TILE - 1) / TILE;  // the new token is in none
    int tile = earliest / TILE + warp;
    Tile now;
    i64 block = 0;
    if (tile < num_tiles) {
        i64 at = (table[tile * TILE / KV_BLOCK] * KV_BLOCK + tile * TILE % KV_BLOCK) * ROW_BYTES + kv_head * SIZE * BYTES;
        load_keys(now, keys + at, position - 1 - tile * TILE, lane);
        load_values(now, values + at, position - 1 - tile * TILE, lane);
        if (tile + NUM_WARPS < num_tiles) block = table[(tile + NUM_WARPS) * TILE / KV_BLOCK];
    }
    const int d = tid % HALF;
    const float c = cos[(i64)position * HALF + d], s = sin[(i64)position * HALF + d];
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

    // Pairs of the queries, of the new key and of the new value, in this order: all are loaded before one is used.
    float first[ROUNDS], second[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        int row = tid / HALF + i * (THREADS / HALF);
        int head = row < GROUP ? kv_head * GROUP + row : HEADS + (row - GROUP) * KV_HEADS + kv_head;
        if (row < GROUP + 2) load_pair(first[i], second[i], qkv, token, T, head * SIZE + d);
    }
    const i64 to = (slot * KV_HEADS + kv_head) * SIZE * BYTES;
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        int row = tid / HALF + i * (THREADS / HALF);
        float a = first[i], b = second[i], x = rounded(a * c - b * s), y = rounded(b * c + a * s);
        if (row < GROUP) {
            u32 pair = to_pair(x, y);
            queries[row][d] = (u16)pair;
            queries[row][d + HALF] = (u16)(pair >> 16);
        } else if (row == GROUP) {
            new_key[d] = store_cached(keys + to, d, x);
            new_key[d + HALF] = store_cached(keys + to, d + HALF, y);
        } else if (row == GROUP + 1) {
            new_value[d] = store_cached(values + to, d, a);
            new_value[d + HALF] = store_cached(values + to, d + HALF, b);
        }
    }
    __syncthreads();

    const float unit = scale * 1.4426950408889634f;  // scores are in powers of two
    for (int head = warp; head < GROUP; head += NUM_WARPS) {
        float z = 0;
#pragma unroll
        for (int i = lane; i < SIZE; i += 32) {
            float q;
            if (FP8)
                asm("cvt.f32.f16 %0, %1;" : "=f"(q) : "h"(queries[head][i]));
            else
                q = __uint_as_float((u32)queries[head][i] << 16);
            z += q * new_key[i];
        }
        for (int o = 16; o; o >>= 1) z += __shfl_xor_sync(~0u, z, o);
        if (lane == 0) own[head] = z * unit;
    }
    u32 q[8][2];  // the second operand: query g, 4 dimensions in each of 8 steps
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int first_d = FP8 ? i / 4 * 64 + t * 16 + i % 4 * 4 : i / 2 * 32 + t * 8 + i % 2 * 4;
        uint2 pairs = g < GROUP ? *(const uint2*)&queries[min(g, GROUP - 1)][first_d] : make_uint2(0, 0);
        q[i][0] = pairs.x;
        q[i][1] = pairs.y;
    }
    float sums[8][4] = {}, high[2] = {NONE, NONE}, total[2] = {0, 0};  // of heads 2t and 2t + 1
    for (; tile < num_tiles; tile += NUM_WARPS) {
        const int next = tile + NUM_WARPS, place = tile * TILE + g;
        const bool has_next = next < num_tiles;
        i64 at = (block * KV_BLOCK + next * TILE % KV_BLOCK) * ROW_BYTES + kv_head * SIZE * BYTES;
        if (next + NUM_WARPS < num_tiles) block = table[(next + NUM_WARPS) * TILE / KV_BLOCK];
        float scores[4] = {}, z[4] = {};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (FP8) {
                u32 a = word_of(now.k[0][i / 4], i % 4), b = word_of(now.k[1][i / 4], i % 4);
                multiply(i & 1 ? z : scores, widen(a, 0), widen(b, 0), widen(a, 1), widen(b, 1), q[i][0], q[i][1]);
            } else {
                uint4 a = now.k[0][i / 2 % PIECES], b = now.k[1][i / 2 % PIECES];
                multiply(i & 1 ? z : scores, word_of(a, i % 2 * 2), word_of(b, i % 2 * 2), word_of(a, i % 2 * 2 + 1),
                         word_of(b, i % 2 * 2 + 1), q[i][0], q[i][1]);
            }
        }
        if (has_next) load_keys(now, keys + at, position - 1 - next * TILE, lane);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int p = place + (i >> 1) * 8;
            bool is_seen = p < position && (!WINDOW || p >= earliest);
            scores[i] = is_seen ? (scores[i] + z[i]) * unit : NONE;
        }
        float top[2] = {fmaxf(scores[0], scores[2]), fmaxf(scores[1], scores[3])};
        if (__any_sync(~0u, top[0] > high[0] + SLACK || top[1] > high[1] + SLACK)) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                for (int o = 4; o < 32; o <<= 1) top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], o));
                top[h] = fmaxf(top[h], high[h]);
                float shrink = power(high[h] - top[h]);
                high[h] = top[h];
                total[h] *= shrink;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    sums[j][h] *= shrink;
                    sums[j][h + 2] *= shrink;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) scores[i] = power(scores[i] - high[i & 1]);
        total[0] += scores[0] + scores[2];
        total[1] += scores[1] + scores[3];
        u32 weights[2] = {transposed(to_pair(scores[0], scores[1])), transposed(to_pair(scores[2], scores[3]))};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (FP8) {
                u32 order = j & 1 ? 0x7362 : 0x5140;
                u32 a = __byte_perm(word_of(now.v[0][0], j / 2), word_of(now.v[1][0], j / 2), order);
                u32 b = __byte_perm(word_of(now.v[2][0], j / 2), word_of(now.v[3][0], j / 2), order);
                multiply(sums[j], widen(a, 0), widen(a, 1), widen(b, 0), widen(b, 1), weights[0], weights[1]);
            } else {
                int i = j / 4 % (PIECES / 2);
                u32 a = word_of(now.v[0][i], j % 4), b = word_of(now.v[1][i], j % 4);
                u32 c = word_of(now.v[2][i], j % 4), d = word_of(now.v[3][i], j % 4);
                multiply(sums[j], __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
                         __byte_perm(c, d, 0x7632), weights[0], weights[1]);
            }
        }
        if (has_next) load_values(now, values + at, position - 1 - next * TILE, lane);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        for (int o = 4; o < 32; o <<= 1) total[h] += __shfl_xor_sync(~0u, total[h], o);
        int head = 2 * t + h;
        if (head < GROUP) {
            if (g == 0) {
                warp_high[warp][head] = high[h];
                warp_total[warp][head] = total[h];
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                int first_d = FP8 ? g * 16 + 2 * j : j / 4 * 64 + g * 8 + j % 4 * 2;
                *(float2*)&warp_sums[warp][head][first_d] = make_float2(sums[j][h], sums[j][h + 2]);
            }
        }
    }
    __syncthreads();
    for (int i = tid; i < GROUP * SIZE; i += THREADS) {
        int head = i / SIZE;
        float top = own[head];
#pragma unroll
        for (int w = 0; w < NUM_WARPS; w++) top = fmaxf(top, warp_high[w][head]);
        float all = power(own[head] - top), y = all * new_value[i % SIZE];
#pragma unroll
        for (int w = 0; w < NUM_WARPS; w++) {
            float factor = power(warp_high[w][head] - top);
            all += factor * warp_total[w][head];
            y += factor * warp_sums[w][head][i % SIZE];
        }
        out[((i64)token * HEADS + kv_head * GROUP) * SIZE + i] = (u16)(__float_as_uint(rounded(__fdividef(y, all))) >> 16);
    }
}

// What the products of a few rows before and after a norm do in its place. A norm multiplies each row with the inverse of
// its length, and each number of a row with its gain. The product before it adds its sums to the residual stream, and
// writes the stream's rows times the gains, and sums of the squares. The product after it multiplies its outputs with the
// rows' factors.
//
// The blocks that have parts of the same sums are a cluster. They read each other's parts from shared memory.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

__device__ __forceinline__ float low(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
    return x;
}

// What other multiprocessors wrote: not from the L1 cache.
__device__ __forceinline__ float load_float(const float* from) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from));
    return x;
}

// The factors of rows in shared memory, by all warps of a block, from parts [T, groups] of the sums of their squares.
template <int ROWS, int WARPS>
__device__ __forceinline__ void find_factors(float* factors, const float* squares, int T, int groups, int size,
                                             float epsilon) {
    constexpr int EACH = (ROWS + WARPS - 1) / WARPS;
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    float sums[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {  // all are loaded before one is used
        int t = warp + i * WARPS;
        sums[i] = t < T && lane < groups ? load_float(squares + t * groups + lane) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int t = warp + i * WARPS;
        if (t >= T) break;
        for (int group = lane + 32; group < groups; group += 32) sums[i] += load_float(squares + t * groups + group);
        float sum = sum_of_warp(sums[i]);
        if (lane == 0) factors[t] = rsqrtf(sum / size + epsilon);
    }
}

struct Stream {
    u16* x;             // [T, N], which is added to
    const float* gains;  // [N]
    u16* y;             // [T, N]: x times the gains
    float* squares;     // [T, gridDim.x]: parts of the sums of the squares of x
};

__device__ __forceinline__ void meet_in_cluster(int parts) {
    if (parts == 1)
        __syncthreads();
    else {
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
}

__device__ __forceinline__ float4 load_of_block(u32 at, int rank) {
    float4 v;
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(there));
    return v;
}

// Add some columns' sums to the stream. The PARTS blocks of a cluster have parts of them in shared memory, at the address
// `sums`: [rows, STRIDE] floats. Each block takes some of the rows.
template <int COLUMNS, int STRIDE, int PARTS, int WARPS>
__device__ __forceinline__ void add_to_stream(const Stream& stream, u32 sums, int T, int N, int first) {
    meet_in_cluster(PARTS);
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    for (int t = blockIdx.y + PARTS * warp; t < T; t += PARTS * WARPS) {
        float squares = 0.f;
        for (int column = lane * 4; column < COLUMNS && first + column < N; column += 128) {
            i64 at = (i64)t * N + first + column;
            uint2 old;
            asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(old.x), "=r"(old.y) : "l"(stream.x + at));
            float4 gain = *(const float4*)(stream.gains + first + column), part[PARTS];
#pragma unroll
            for (int p = 0; p < PARTS; p++) part[p] = load_of_block(sums + (t * STRIDE + column) * 4, p);
            float4 v = part[0];
#pragma unroll
            for (int p = 1; p < PARTS; p++) v.x += part[p].x, v.y += part[p].y, v.z += part[p].z, v.w += part[p].w;
            uint2 x = {pack(low(old.x) + v.x, high(old.x) + v.y), pack(low(old.y) + v.z, high(old.y) + v.w)};
            *(uint2*)(stream.x + at) = x;
            v = make_float4(low(x.x), high(x.x), low(x.y), high(x.y));
            *(uint2*)(stream.y + at) = make_uint2(pack(v.x * gain.x, v.y * gain.y), pack(v.z * gain.z, v.w * gain.w));
            squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
        squares = sum_of_warp(squares);
        if (lane == 0) stream.squares[t * gridDim.x + blockIdx.x] = squares;
    }
    meet_in_cluster(PARTS);  // the others have read this block's
}

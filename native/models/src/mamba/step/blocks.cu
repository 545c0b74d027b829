// A dense layer of a small batch with weights in blocks, along which its warps walk; the rest of it is in layer.cu. The
// host chooses also HELD, the eights of values of a row of x that a thread has.

__device__ __forceinline__ void load_eight(const float* from, float (&to)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        float4 four = *(const float4*)(from + i);
        to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
}

// The eights of a thread in a row.
struct Held { float of[HELD][8]; };

__device__ __forceinline__ i64 eight_of(int k) { return threadIdx.x + (i64)k * THREADS; }

__device__ __forceinline__ void load(Held& held, const float* row, i64 columns) {
#pragma unroll
    for (int k = 0; k < HELD; ++k)
        if (eight_of(k) * 8 < columns) load_eight(row + eight_of(k) * 8, held.of[k]);
}

// Quantizes like `quantized` but for ties and the last bits of scales, in few instructions and without branches, so that
// those of several rows overlap. Adding 1.5 * 2^23 rounds a number to an integer, whose lowest byte is that of the sum.
__device__ __forceinline__ Eight quickly_quantized(const float (&x)[8]) {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(x[i]) & 0x7fffffff);
    most = max(most, __shfl_xor_sync(ALL, most, 1));
    most = max(most, __shfl_xor_sync(ALL, most, 2));
    Eight to = {};
    to.scale = __uint_as_float(most) * (1 / 127.0f);
    float inverse = __fdividef(1, to.scale);
    unsigned bytes[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) bytes[i] = __float_as_uint(fmaf(x[i], inverse, 12582912.0f));
#pragma unroll
    for (int i = 0; i < 2; ++i)
        to.words[i] = __byte_perm(__byte_perm(bytes[4 * i], bytes[4 * i + 1], 0x40),
                                  __byte_perm(bytes[4 * i + 2], bytes[4 * i + 3], 0x40), 0x5410);
#if FORMAT == 4
    to.sum = __dp4a((int)to.words[0], 0x01010101, __dp4a((int)to.words[1], 0x01010101, 0));
    to.sum += __shfl_xor_sync(ALL, to.sum, 1);
    to.sum += __shfl_xor_sync(ALL, to.sum, 2);
#endif
    return to;
}

// The prologue: norms the rows of x with the weights in `norm`, and quantizes them.
__device__ __forceinline__ void take(const Dense& p, const Held& norm, i64 apart, unsigned char* ready) {
    Held x[BATCH] = {};
    REAL square[BATCH] = {}, scales[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) load(x[b], p.x + b * p.stride, p.columns);
#pragma unroll
    for (int b = 0; b < BATCH; ++b)
#pragma unroll
        for (int k = 0; k < HELD; ++k)
#pragma unroll
            for (int e = 0; NORM && e < 8; ++e) square[b] = fma(x[b].of[k][e], x[b].of[k][e], square[b]);
    if (NORM) find_scales(p, square, scales);
#pragma unroll
    for (int b = 0; b < BATCH; ++b)
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
#pragma unroll
            for (int e = 0; NORM && e < 8; ++e) x[b].of[k][e] *= scales[b] * norm.of[k][e];
            int eight = (int)eight_of(k), block = eight / 4;
            bool there = eight * 8 < p.columns;
            // Threads past the last block run along, because lanes exchange values.
            Eight all = quickly_quantized(x[b].of[k]);
            if (there) put_ready(all, ready + b * apart + block / 32 * READY, block % 32, eight % 4, FORMAT == 4 ? 8 : 0);
        }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS) step_blocks(Dense p) {
    extern __shared__ __align__(16) unsigned char shared[];
    let_others_begin();
    int warp = threadIdx.x / 32;
    i64 step = (i64)gridDim.x * WARPS * OUTPUTS, begin = ((i64)blockIdx.x * WARPS + warp) * OUTPUTS;
    i64 blocks = p.columns / 32, apart = (blocks + 31) / 32 * READY;
    Operands operands;
    auto ready = [&] {
        unsigned char* rows = shared + WARPS * STAGES * STAGE;
        Held norm = {};
        if (NORM) load(norm, p.norm, p.columns);
        read_ahead(p, begin, operands);
        wait_for_others();
        read_old(p, begin, operands);
        take(p, norm, apart, rows);
        return rows;
    };
    auto write = [&](i64 first, const float (&sums)[BATCH][OUTPUTS]) {
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o)
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                float sum = sum_of_warp(sums[b][o]);
                if (threadIdx.x % 32 == putter(o, b) && first + o < p.rows) put(p, first + o, sum, operands);
            }
        read_next(p, first + step, operands);
    };
    walk({(const unsigned char*)p.w, p.rows, blocks}, begin, step, apart, shared + warp * STAGES * STAGE, ready, write);
}

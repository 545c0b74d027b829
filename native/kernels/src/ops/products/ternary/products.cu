// Products with ternary weights in planes. A warp has OUTS rows of weights and ROWS rows of activations. ALIGNED says
// that rows of planes are whole units of 16 bytes.

// A word of a row of `bytes` bytes at any address, padded with zeros.
__device__ __forceinline__ unsigned word(const unsigned char* row, i64 at, i64 bytes) {
    unsigned all = 0;
    for (int j = 0; j < 4; j++) {
        if (4 * at + j < bytes) all |= (unsigned)row[4 * at + j] << (8 * j);
    }
    return all;
}

// Four words, from word 4 `at` on.
__device__ __forceinline__ uint4 words(const unsigned char* row, i64 at, i64 bytes) {
#if ALIGNED
    return asked(row + 16 * at);
#else
    return make_uint4(word(row, 4 * at, bytes), word(row, 4 * at + 1, bytes), word(row, 4 * at + 2, bytes),
                      word(row, 4 * at + 3, bytes));
#endif
}

struct Weights {
    uint4 planes[OUTS][2];
};

// Four words of each row, padded with zeros.
__device__ __forceinline__ Weights weights_of(const unsigned char* const (&planes)[OUTS][2], i64 at, i64 bytes) {
    Weights all;
#pragma unroll
    for (int o = 0; o < OUTS; o++)
#pragma unroll
        for (int plane = 0; plane < 2; plane++)
            all.planes[o][plane] = 16 * at < bytes ? words(planes[o][plane], at, bytes) : make_uint4(0, 0, 0, 0);
    return all;
}

// Products of 16 codes. Half of them stay shifted in their bytes: those go to `fours`, four times too large.
__device__ __forceinline__ void add_codes(uint2 of, int4 x, int& sum, int& fours) {
    sum = __dp4a((int)(of.x & 0x03030303), x.x, sum);
    sum = __dp4a((int)(of.y & 0x03030303), x.y, sum);
    fours = __dp4a((int)(of.x & 0x0c0c0c0c), x.z, fours);
    fours = __dp4a((int)(of.y & 0x0c0c0c0c), x.w, fours);
}

template <class T>
__device__ __forceinline__ T total(T sum) {
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    return sum;
}

extern "C" __global__ void ternary_product(Params p) {
    int lane = threadIdx.x % 32;
    i64 first_out = ((i64)blockIdx.x * WARPS + threadIdx.x / 32) * OUTS, first_row = (i64)blockIdx.y * ROWS;
    if (first_out >= p.outs) return;
    i64 bytes = (p.n + 7) / 8;
    Sum sums[OUTS][ROWS];
    const unsigned char* planes[OUTS][2];
#pragma unroll
    for (int o = 0; o < OUTS; o++) {
        // Rows past the last one repeat it, and are not written.
        i64 out = first_out + o < p.outs ? first_out + o : p.outs - 1;
        planes[o][0] = p.planes[0] + out * bytes;
        planes[o][1] = p.planes[1] + out * bytes;
#pragma unroll
        for (int r = 0; r < ROWS; r++) sums[o][r] = 0;
    }
#if FORM == I8
    int fours[OUTS][ROWS] = {};
#endif
    i64 row_of[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) row_of[r] = first_row + r < p.rows ? first_row + r : p.rows - 1;
#if FORM == F32
    wait_for_others();
    for (i64 at = 0; 32 * at < p.n; at++) {
        i64 i = 32 * at + lane;
        float x[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) x[r] = i < p.n ? widen(p.x[row_of[r] * p.n + i]) : 0.0f;
#pragma unroll
        for (int o = 0; o < OUTS; o++) {
#if ALIGNED
            unsigned a = __ldg((const unsigned*)planes[o][0] + at), b = __ldg((const unsigned*)planes[o][1] + at);
#else
            unsigned a = word(planes[o][0], at, bytes), b = word(planes[o][1], at, bytes);
#endif
            bool plus = (a & ~b) >> lane & 1, minus = (b & ~a) >> lane & 1;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (plus) sums[o][r] += x[r];
                if (minus) sums[o][r] -= x[r];
            }
        }
    }
#else
    Weights next = weights_of(planes, lane, bytes);
    wait_for_others();
    for (i64 at = lane; 16 * at < bytes; at += 32) {
        Weights weights = next;
        next = weights_of(planes, at + 32, bytes);
        // Keeps the loads above before this step's arithmetic.
        __syncwarp(__activemask());
#if FORM == TERNARY
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            uint4 x0 = words(p.x_planes[0] + row_of[r] * bytes, at, bytes);
            uint4 x1 = words(p.x_planes[1] + row_of[r] * bytes, at, bytes);
#pragma unroll
            for (int o = 0; o < OUTS; o++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    unsigned w0 = pick(weights.planes[o][0], k), w1 = pick(weights.planes[o][1], k), v0 = pick(x0, k), v1 = pick(x1, k);
                    unsigned both = (w0 ^ w1) & (v0 ^ v1);
                    sums[o][r] += __popc(both) - 2 * __popc(both & (w1 ^ v1));
                }
            }
        }
#else
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint2 of[OUTS];
#pragma unroll
            for (int o = 0; o < OUTS; o++) of[o] = pairs(pick(weights.planes[o][0], k), pick(weights.planes[o][1], k));
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int4* x = (const int4*)(p.bits + row_of[r] * p.stride + 32 * (4 * at + k));
                int4 low = x[0], high = x[1];
#pragma unroll
                for (int o = 0; o < OUTS; o++) {
                    add_codes(of[o], low, sums[o][r], fours[o][r]);
                    add_codes(make_uint2(of[o].x >> 4, of[o].y >> 4), high, sums[o][r], fours[o][r]);
                }
            }
        }
#endif
    }
#endif
#pragma unroll
    for (int o = 0; o < OUTS; o++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#if FORM == I8
            // Codes are the values plus one.
            Sum sum = total(sums[o][r] + (fours[o][r] >> 2)) - p.totals[row_of[r]];
#else
            Sum sum = total(sums[o][r]);
#endif
            if (lane == 0 && first_out + o < p.outs && first_row + r < p.rows) finish(p, first_row + r, first_out + o, sum);
        }
    }
}

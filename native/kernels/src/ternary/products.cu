// Products with ternary weights in planes. A warp has OUTS rows of weights and ROWS rows of activations; ALIGNED says that
// rows of planes are of whole 16 bytes.

constexpr int WARPS = 8;

// A word of a row of `bytes` bytes at any address; zeros after its end.
__device__ __forceinline__ unsigned word(const unsigned char* row, i64 at, i64 bytes) {
    unsigned all = 0;
    for (int j = 0; j < 4; j++) {
        if (4 * at + j < bytes) all |= (unsigned)row[4 * at + j] << (8 * j);
    }
    return all;
}

// Four words from the 4 at-th on.
__device__ __forceinline__ uint4 words(const unsigned char* row, i64 at, i64 bytes) {
#if ALIGNED
    return __ldg((const uint4*)row + at);
#else
    return make_uint4(word(row, 4 * at, bytes), word(row, 4 * at + 1, bytes), word(row, 4 * at + 2, bytes),
                      word(row, 4 * at + 3, bytes));
#endif
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
        // What is past the last row is computed again, and not written.
        i64 out = first_out + o < p.outs ? first_out + o : p.outs - 1;
        planes[o][0] = p.plane0 + out * bytes;
        planes[o][1] = p.plane1 + out * bytes;
#pragma unroll
        for (int r = 0; r < ROWS; r++) sums[o][r] = 0;
    }
    i64 row_of[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) row_of[r] = first_row + r < p.rows ? first_row + r : p.rows - 1;
#if FORM == 2
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
    for (i64 at = lane; 16 * at < bytes; at += 32) {
        uint4 a[OUTS], b[OUTS];
#pragma unroll
        for (int o = 0; o < OUTS; o++) {
            a[o] = words(planes[o][0], at, bytes);
            b[o] = words(planes[o][1], at, bytes);
        }
#if FORM == 0
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            uint4 x0 = words(p.x_plane0 + row_of[r] * bytes, at, bytes);
            uint4 x1 = words(p.x_plane1 + row_of[r] * bytes, at, bytes);
#pragma unroll
            for (int o = 0; o < OUTS; o++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    unsigned w0 = pick(a[o], k), w1 = pick(b[o], k), v0 = pick(x0, k), v1 = pick(x1, k);
                    unsigned both = (w0 ^ w1) & (v0 ^ v1);
                    sums[o][r] += __popc(both) - 2 * __popc(both & (w1 ^ v1));
                }
            }
        }
#else
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int of[OUTS][8];
#pragma unroll
            for (int o = 0; o < OUTS; o++) codes(pick(a[o], k), pick(b[o], k), of[o]);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const int4* x = (const int4*)(p.bits + row_of[r] * p.stride + 32 * (4 * at + k));
                int4 low = x[0], high = x[1];
                int values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                for (int o = 0; o < OUTS; o++) {
#pragma unroll
                    for (int i = 0; i < 8; i++) sums[o][r] = __dp4a(of[o][i], values[i], sums[o][r]);
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
            Sum sum = total(sums[o][r]);
#if FORM == 1
            // Codes are greater by one than what they are for.
            sum -= p.totals[row_of[r]];
#endif
            if (lane == 0 && first_out + o < p.outs && first_row + r < p.rows) finish(p, first_row + r, first_out + o, sum);
        }
    }
}

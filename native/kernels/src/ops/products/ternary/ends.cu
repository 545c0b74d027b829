// The common part of products: the codes of weights, and the steps from sums to y. FORM is the form of the activations:
// TERNARY (signs), I8 (bytes) or F32. FN is the activation function.

__device__ __forceinline__ unsigned pick(uint4 of, int which) {
    return which == 0 ? of.x : which == 1 ? of.y : which == 2 ? of.z : of.w;
}

// A load of 16 bytes that is issued here: only volatile loads are not moved after the wait.
__device__ __forceinline__ uint4 asked(const unsigned char* from) {
    uint4 to;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "l"(from)
                 : "memory");
    return to;
}

// The codes, value + 1, of 32 cells, two bits each: the even cells, then the odd ones.
__device__ __forceinline__ uint2 pairs(unsigned plane0, unsigned plane1) {
    unsigned low = ~(plane0 ^ plane1), high = plane0 & ~plane1;
    return make_uint2((low & 0x55555555) | (high & 0x55555555) << 1, (low >> 1 & 0x55555555) | (high & 0xaaaaaaaa));
}

#if FORM == F32
typedef float Sum;
#else
typedef int Sum;
#endif

__device__ __forceinline__ float scale_of(const Params& p, i64 row) { return p.y && p.x_scale ? p.x_scale[row] : 1; }

// The steps from a sum to y. The defaults change nothing where an input is missing.
struct End {
    float scale = 1, bias = -0.0f;

    End() = default;
    __device__ __forceinline__ End(const Params& p, i64 out) {
        if (p.y && p.w_scale) scale = p.w_scale[p.scales == 1 ? 0 : out];
        if (p.y && p.bias) bias = p.bias[out];
    }

    __device__ __forceinline__ STORAGE of(Sum sum, float x_scale) const {
        return finished(__fadd_rn(__fmul_rn(__fmul_rn((float)sum, x_scale), scale), bias));
    }
};

__device__ __forceinline__ void finish(const Params& p, i64 row, i64 out, Sum sum) {
    i64 at = row * p.outs + out;
    End end(p, out);
    float x_scale = scale_of(p, row);
#if FORM != F32
    if (p.acc) p.acc[at] = sum;
#endif
    if (p.y) p.y[at] = end.of(sum, x_scale);
}

// Finishes a block's sums, of LINES rows by WIDTH outputs; a thread takes those from `first` on in steps of STEP. It
// issues all reads before it waits for one, and calls `there` when they have arrived.
template <int LINES, int WIDTH, int STEP, class F, class G>
__device__ __forceinline__ void finish_all(const Params& p, i64 block, int first, F sum_of, G there) {
    constexpr int ALL = LINES * WIDTH, COUNT = (ALL + STEP - 1) / STEP;
    int sums[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) sums[k] = first + k * STEP < ALL ? sum_of(first + k * STEP) : 0;
    there();
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        int at = first + k * STEP;
        i64 row = blockIdx.y * (i64)LINES + at / WIDTH, out = block * WIDTH + at % WIDTH;
        if (at >= ALL || row >= p.rows || out >= p.outs) continue;
        // Codes are the values plus one.
        finish(p, row, out, p.totals ? sums[k] - p.totals[row] : sums[k]);
    }
}

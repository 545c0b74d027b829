// What is done element by element. The host chooses MAP, of so many INPUTS, and the function FN:
//   0 -exp(a)   1 a b   2 their sum   3 f(a)   4 f'(a)   5 f'(a) b   6 f(a) b   7 f'(a) b c

struct Params {
    const STORAGE* inputs[4];
    STORAGE* to;
    i64 count;
};

__device__ __forceinline__ REAL value(const REAL* v) {
#if MAP == 0
    return -exp(v[0]);
#elif MAP == 1
    return v[0] * v[1];
#elif MAP == 2
    REAL sum = v[0];
    for (int input = 1; input < INPUTS; ++input) sum += v[input];
    return sum;
#elif MAP == 3
    return activate<FN>(v[0]);
#elif MAP == 4
    return slope<FN>(v[0]);
#elif MAP == 5
    return slope<FN>(v[0]) * v[1];
#elif MAP == 6
    return activate<FN>(v[0]) * v[1];
#else
    return slope<FN>(v[0]) * v[1] * v[2];
#endif
}

// A thread loads all it needs before it computes, to have that many bytes under way.
extern "C" __global__ void elementwise(Params p) {
    i64 first = ((i64)blockIdx.x * TOGETHER * blockDim.x + threadIdx.x) * VEC;
    i64 step = (i64)blockDim.x * VEC;
    Pack in[TOGETHER][INPUTS];
#pragma unroll
    for (int k = 0; k < TOGETHER; ++k)
#pragma unroll
        for (int input = 0; input < INPUTS; ++input) in[k][input] = load(p.inputs[input], first + k * step, p.count);
#pragma unroll
    for (int k = 0; k < TOGETHER; ++k) {
        Pack out;
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            REAL v[INPUTS];
            for (int input = 0; input < INPUTS; ++input) v[input] = widen(in[k][input].of[e]);
            narrow(value(v), out.of[e]);
        }
        store(out, p.to, first + k * step, p.count);
    }
}

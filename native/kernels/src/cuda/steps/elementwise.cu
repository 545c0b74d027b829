// Elementwise operations. The host chooses MAP, its number of INPUTS, the function FN, and the limits
// LOW and HIGH:
//   0 -exp(a)   1 a b   2 their sum   3 f(a)   4 f'(a)   5 f'(a) b   6 f(a) b   7 f'(a) b c
//   8 s(a) or s(a) s(b) with s = sigmoid, within LOW and HIGH   9 the gradient of 8 by a, the last is the cotangent
//   10 c a + (1 - c) b + d b   11 (1 - a + b) c   12 (a - b) c
//   13 the factor times a   14 the sum of all, of the last by the factor

// Clamps to [LOW, HIGH]; NaN stays NaN.
__device__ __forceinline__ REAL within(REAL v) { return v < (REAL)LOW ? (REAL)LOW : v > (REAL)HIGH ? (REAL)HIGH : v; }

__device__ __forceinline__ REAL value(const REAL (&v)[INPUTS][VEC], int e, REAL factor) {
#if MAP == 0
    return -exp(v[0][e]);
#elif MAP == 1
    return v[0][e] * v[1][e];
#elif MAP == 2
    REAL sum = v[0][e];
    for (int input = 1; input < INPUTS; ++input) sum += v[input][e];
    return sum;
#elif MAP == 3
    return activate<FN>(v[0][e]);
#elif MAP == 4
    return slope<FN>(v[0][e]);
#elif MAP == 5
    return slope<FN>(v[0][e]) * v[1][e];
#elif MAP == 6
    return activate<FN>(v[0][e]) * v[1][e];
#elif MAP == 7
    return slope<FN>(v[0][e]) * v[1][e] * v[2][e];
#elif MAP == 8
    return within(INPUTS == 1 ? sigmoid(v[0][e]) : sigmoid(v[0][e]) * sigmoid(v[INPUTS - 1][e]));
#elif MAP == 9
    REAL other = INPUTS == 2 ? (REAL)1 : sigmoid(v[1][e]), decay = sigmoid(v[0][e]) * other;
    return decay < (REAL)LOW || decay > (REAL)HIGH ? (REAL)0 : slope<0>(v[0][e]) * other * v[INPUTS - 1][e];
#elif MAP == 10
    return v[2][e] * v[0][e] + (1 - v[2][e] + v[3][e]) * v[1][e];
#elif MAP == 11
    return (1 - v[0][e] + v[1][e]) * v[2][e];
#elif MAP == 12
    return (v[0][e] - v[1][e]) * v[2][e];
#elif MAP == 13
    return factor * v[0][e];
#else
    REAL sum = v[0][e];
    for (int input = 1; input + 1 < INPUTS; ++input) sum += v[input][e];
    return sum + factor * v[INPUTS - 1][e];
#endif
}

// A thread issues all its loads before it computes, to keep those bytes in flight.
template <bool WHOLE>
__device__ __forceinline__ void work(const Params& p, i64 first, i64 step) {
    Pack in[TOGETHER][INPUTS];
#pragma unroll
    for (int k = 0; k < TOGETHER; ++k)
#pragma unroll
        for (int input = 0; input < INPUTS; ++input)
            in[k][input] = load<WHOLE>(p.inputs[input], first + k * step, p.count);
#pragma unroll
    for (int k = 0; k < TOGETHER; ++k) {
        REAL v[INPUTS][VEC], to[VEC];
        for (int input = 0; input < INPUTS; ++input) widen(in[k][input], v[input]);
#pragma unroll
        for (int e = 0; e < VEC; ++e) to[e] = value(v, e, (REAL)p.factor);
        store<WHOLE>(narrow(to), p.to, first + k * step, p.count);
    }
}

extern "C" __global__ void elementwise(Params p) {
    i64 first = ((i64)blockIdx.x * TOGETHER * blockDim.x + threadIdx.x) * VEC, step = (i64)blockDim.x * VEC;
    if (first + (TOGETHER - 1) * step + VEC <= p.count)
        work<true>(p, first, step);
    else
        work<false>(p, first, step);
}

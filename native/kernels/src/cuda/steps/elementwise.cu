// Elementwise operations. The host chooses MAP, one of the functions below, its number of INPUTS, the activation
// function FN, and the limits LOW and HIGH.

// The inputs at one element. The functions are templates over it, since their numbers of inputs differ.
struct At {
    const REAL (&values)[INPUTS][VEC];
    int e;
    __device__ __forceinline__ REAL operator[](int input) const { return values[input][e]; }
};

// Clamps to [LOW, HIGH]; NaN stays NaN.
__device__ __forceinline__ REAL within(REAL v) { return v < (REAL)LOW ? (REAL)LOW : v > (REAL)HIGH ? (REAL)HIGH : v; }

#define MAPS template <class V> __device__ __forceinline__ REAL

MAPS negated_exp(V v, REAL) { return -exp(v[0]); }
MAPS product(V v, REAL) { return v[0] * v[1]; }
MAPS activated(V v, REAL) { return activate<FN>(v[0]); }
MAPS slope_of(V v, REAL) { return slope<FN>(v[0]); }
MAPS slope_times(V v, REAL) { return slope<FN>(v[0]) * v[1]; }
MAPS gated(V v, REAL) { return activate<FN>(v[0]) * v[1]; }
MAPS gate_slope(V v, REAL) { return slope<FN>(v[0]) * v[1] * v[2]; }
MAPS integrated(V v, REAL) { return v[2] * v[0] + (1 - v[2] + v[3]) * v[1]; }
MAPS carried(V v, REAL) { return (1 - v[0] + v[1]) * v[2]; }
MAPS difference_times(V v, REAL) { return (v[0] - v[1]) * v[2]; }
MAPS scaled(V v, REAL factor) { return factor * v[0]; }

// The sum of the first COUNT inputs.
template <int COUNT, class V>
__device__ __forceinline__ REAL sum_of(V v) {
    REAL sum = v[0];
    for (int input = 1; input < COUNT; ++input) sum += v[input];
    return sum;
}
MAPS sum(V v, REAL) { return sum_of<INPUTS>(v); }
MAPS plus_scaled(V v, REAL factor) { return sum_of<INPUTS - 1>(v) + factor * v[INPUTS - 1]; }

MAPS decay(V v, REAL) { return within(INPUTS == 1 ? sigmoid(v[0]) : sigmoid(v[0]) * sigmoid(v[INPUTS - 1])); }

// v is the first factor's argument, the optional second one's, and the cotangent.
MAPS decay_slope(V v, REAL) {
    REAL other = INPUTS == 2 ? (REAL)1 : sigmoid(v[1]), decay = sigmoid(v[0]) * other;
    return decay < (REAL)LOW || decay > (REAL)HIGH ? (REAL)0 : slope<Activation::Sigmoid>(v[0]) * other * v[INPUTS - 1];
}

// A thread issues all its loads before it computes, to keep many bytes in flight.
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
        for (int e = 0; e < VEC; ++e) to[e] = MAP(At{v, e}, (REAL)p.factor);
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

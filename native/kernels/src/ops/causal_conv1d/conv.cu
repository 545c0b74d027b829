// The causal convolution and its gradient. The formulas are in mod.rs; cuda.rs chooses the macros:
//   W       width              SILU   whether there is an activation
//   PART    FORWARD, BACKWARD (without the sums over batch and time) or SUMS
//
// A thread has one channel of one batch over a stretch (a chunk of rows), with its window of W rows in registers;
// adjacent threads have adjacent channels. The gradient goes by rows of xp: row r has all its terms once du[r] is
// known, and a stretch recomputes the W - 1 rows of du before its own. Each stretch writes partial sums for dw and
// dbias, which are then added up in order.

#define FORWARD 0
#define BACKWARD 1
#define SUMS 2

#if W <= 16
#define EACH _Pragma("unroll")
#else
#define EACH _Pragma("unroll 1")
#endif

__device__ __forceinline__ void push(REAL* window, REAL value) {
    EACH
    for (int j = 1; j < W; ++j) window[j - 1] = window[j];
    window[W - 1] = value;
}

// Row r of xp, in storage precision.
__device__ __forceinline__ STORAGE padded(const Params& p, i64 b, i64 r, i64 d) {
    if (r >= W - 1) return p.x[(b * p.length + r - (W - 1)) * p.channels + d];
    if (p.initial_state) return p.initial_state[(b * (W - 1) + r) * p.channels + d];
    STORAGE zero;
    narrow((REAL)0, zero);
    return zero;
}

// One channel's weights and window.
struct Taps {
    REAL w[W], window[W], bias;

    // Loads the window for time t - 1, to be moved to time t.
    __device__ __forceinline__ Taps(const Params& p, i64 b, i64 t, i64 d) {
        EACH
        for (int j = 0; j < W; ++j) {
            w[j] = p.w[d * W + j];
            window[j] = j > 0 ? (REAL)widen(padded(p, b, t + j - 1, d)) : (REAL)0;
        }
        bias = p.bias ? p.bias[d] : (REAL)0;
    }

    // Moves the window on by one step, to time t, and returns the sum there.
    __device__ __forceinline__ REAL sum(const Params& p, i64 b, i64 t, i64 d) {
        push(window, widen(padded(p, b, t + W - 1, d)));
        REAL sum = bias;
        EACH
        for (int j = 0; j < W; ++j) sum += w[j] * window[j];
        return sum;
    }
};

#if PART == FORWARD

extern "C" __global__ void causal_conv1d(Params p) {
    i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (id >= p.batch * p.stretches * p.channels) return;
    i64 d = id % p.channels, b = id / p.channels / p.stretches;
    i64 first = id / p.channels % p.stretches * p.stretch;
    i64 last = first + p.stretch < p.rows ? first + p.stretch : p.rows;
    if (first == 0 && p.last_state)
        for (i64 r = 0; r < W - 1; ++r)
            p.last_state[(b * (W - 1) + r) * p.channels + d] = padded(p, b, p.length + r, d);
    if (first >= last) return;
    Taps taps(p, b, first, d);
    for (i64 t = first; t < last; ++t) {
        REAL u = taps.sum(p, b, t, d);
        narrow(SILU ? silu(u) : u, p.y[(b * p.length + t) * p.channels + d]);
    }
}

#elif PART == BACKWARD

__device__ __forceinline__ REAL du(const Params& p, Taps& taps, i64 b, i64 t, i64 d) {
    REAL u = taps.sum(p, b, t, d);
    REAL dy = widen(p.dy[(b * p.length + t) * p.channels + d]);
    if (!SILU) return dy;
    REAL s = (REAL)1 / ((REAL)1 + exp(-u));
    return dy * (s * ((REAL)1 + u * ((REAL)1 - s)));
}

extern "C" __global__ void causal_conv1d(Params p) {
    i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (id >= p.batch * p.stretches * p.channels) return;
    i64 d = id % p.channels, of = id / p.channels, b = of / p.stretches;
    i64 first = of % p.stretches * p.stretch;
    i64 last = first + p.stretch < p.rows ? first + p.stretch : p.rows;
    i64 from = first > W - 1 ? first - (W - 1) : 0;
    REAL terms[W], dw[W], dbias = 0;
    EACH
    for (int j = 0; j < W; ++j) terms[j] = dw[j] = 0;
    if (from < p.length) {
        Taps taps(p, b, from, d);
        for (i64 r = from; r < last; ++r) {
            REAL term = r < p.length ? du(p, taps, b, r, d) : (REAL)0;
            push(terms, term);
            if (r < first) continue;
            if (r < p.length) {
                EACH
                for (int j = 0; j < W; ++j) dw[j] += term * taps.window[j];
                dbias += term;
            }
            REAL sum = r >= p.length && p.dlast_state
                ? (REAL)widen(p.dlast_state[(b * (W - 1) + r - p.length) * p.channels + d]) : (REAL)0;
            EACH
            for (int j = 0; j < W; ++j) sum += taps.w[j] * terms[W - 1 - j];
            if (r >= W - 1) narrow(sum, p.dx[(b * p.length + r - (W - 1)) * p.channels + d]);
            else if (p.dinitial_state) narrow(sum, p.dinitial_state[(b * (W - 1) + r) * p.channels + d]);
        }
    } else {
        // With a length of 0 the gradient of the initial state is the cotangent of the last state.
        for (i64 r = first; r < last && p.dinitial_state; ++r) {
            i64 at = (b * (W - 1) + r) * p.channels + d;
            narrow(p.dlast_state ? (REAL)widen(p.dlast_state[at]) : (REAL)0, p.dinitial_state[at]);
        }
    }
    EACH
    for (int j = 0; j < W; ++j) p.partial[(of * (W + 1) + j) * p.channels + d] = dw[j];
    p.partial[(of * (W + 1) + W) * p.channels + d] = dbias;
}

#else

extern "C" __global__ void causal_conv1d(Params p) {
    i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (id >= (W + 1) * p.channels) return;
    REAL sum = 0;
#pragma unroll 8
    for (i64 of = 0; of < p.batch * p.stretches; ++of) sum += p.partial[of * (W + 1) * p.channels + id];
    i64 j = id / p.channels, d = id % p.channels;
    if (j < W) p.dw[d * W + j] = sum;
    else if (p.dbias) p.dbias[d] = sum;
}

#endif

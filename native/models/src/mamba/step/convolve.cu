// One step of a channel's causal convolution, with fused SiLU. All loads are issued before anything is written.
struct Taps {
    STORAGE held[WIDTH > 1 ? WIDTH - 1 : 1];
    REAL factors[WIDTH], bias;
};

// Loads a channel's weights and its conv_state, whose samples are `apart` elements apart.
__device__ __forceinline__ Taps taps(const STORAGE* samples, i64 apart, const REAL* w, const REAL* b) {
    Taps taps;
#pragma unroll
    for (int step = 0; step < WIDTH; ++step) {
        if (step + 1 < WIDTH) taps.held[step] = samples[step * apart];
        taps.factors[step] = w[step];
    }
    taps.bias = b ? *b : (REAL)0;
    return taps;
}

// The output for the newest sample.
__device__ __forceinline__ REAL convolve(const Taps& taps, STORAGE newest) {
    REAL sum = taps.bias;
#pragma unroll
    for (int step = 0; step + 1 < WIDTH; ++step) sum = fma(taps.factors[step], widen(taps.held[step]), sum);
    return silu(fma(taps.factors[WIDTH - 1], widen(newest), sum));
}

// Writes the next conv_state: the samples shifted by the newest one.
__device__ __forceinline__ void keep(const Taps& taps, STORAGE* next, i64 apart, STORAGE newest) {
#pragma unroll
    for (int step = 0; step + 2 < WIDTH; ++step) next[step * apart] = taps.held[step + 1];
    if (WIDTH > 1) next[(WIDTH - 2) * apart] = newest;
}

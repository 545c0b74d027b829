// One step of a channel's causal convolution, with SiLU behind it: its samples, so far apart, move on by one. All that
// it reads is asked for before anything is written.
__device__ __forceinline__ REAL convolve(STORAGE* samples, i64 apart, const REAL* w, REAL sum, STORAGE newest) {
    STORAGE held[WIDTH];
    REAL factors[WIDTH];
#pragma unroll
    for (int step = 0; step < WIDTH; ++step) {
        if (step + 1 < WIDTH) held[step] = samples[step * apart];
        factors[step] = w[step];
    }
    held[WIDTH - 1] = newest;
#pragma unroll
    for (int step = 0; step < WIDTH; ++step) sum = fma(factors[step], widen(held[step]), sum);
#pragma unroll
    for (int step = 0; step + 1 < WIDTH; ++step) samples[step * apart] = held[step + 1];
    return silu(sum);
}

// One step of the selective scan of several sequences, with the fused projection of dt. LANES threads share a channel;
// each has RANKS weights of dt's projection and STATES states. Activations between layers are of type BETWEEN.
//
// A thread does little work, so the latency of loads dominates: all loads are issued before their first use, and loads
// of memory that no earlier kernel of the step writes, such as states, before the wait.

template <class T> __device__ __forceinline__ T total(T sum) {
#pragma unroll
    for (int distance = LANES / 2; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

template <class T, int N> struct alignas(N * sizeof(T)) Several { T of[N]; };

// The largest power of two that divides `n` elements into packs of at most 16 bytes.
template <class T> __device__ constexpr int at_once(int n) {
    int together = 1;
    while (n % (2 * together) == 0 && 2 * together * sizeof(T) <= 16) together *= 2;
    return together;
}

// A thread's share of a row of `count` numbers: N contiguous ones if the host guarantees aligned packs, else every
// LANES-th one, padded with zeros.
template <int N, class T> __device__ __forceinline__ void own(const T* row, i64 count, REAL (&to)[N]) {
    int lane = threadIdx.x % LANES;
#if ALIGNED
    constexpr int TOGETHER = at_once<T>(N);
#pragma unroll
    for (int k = 0; k < N; k += TOGETHER) {
        auto several = *(const Several<T, TOGETHER>*)(row + lane * N + k);
#pragma unroll
        for (int e = 0; e < TOGETHER; ++e) to[k + e] = widen(several.of[e]);
    }
#else
#pragma unroll
    for (int k = 0; k < N; ++k) to[k] = lane + k * LANES < count ? widen(row[lane + k * LANES]) : (REAL)0;
#endif
}

// Writes a thread's share back.
template <int N> __device__ __forceinline__ void give(const REAL (&from)[N], REAL* row, i64 count) {
    int lane = threadIdx.x % LANES;
#if ALIGNED
    constexpr int TOGETHER = at_once<REAL>(N);
#pragma unroll
    for (int k = 0; k < N; k += TOGETHER) {
        Several<REAL, TOGETHER> several;
#pragma unroll
        for (int e = 0; e < TOGETHER; ++e) several.of[e] = from[k + e];
        *(Several<REAL, TOGETHER>*)(row + lane * N + k) = several;
    }
#else
#pragma unroll
    for (int k = 0; k < N; ++k)
        if (lane + k * LANES < count) row[lane + k * LANES] = from[k];
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) step_scan(Scan p) {
    i64 channel = (i64)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES, sequence = blockIdx.y;
    bool there = channel < p.channels;
    // Threads past the last channel keep running, because the shuffles of `total` need whole warps.
    i64 of = there ? channel : p.channels - 1;
    REAL dt_w[RANKS], a[STATES], h[STATES], dt_b = p.dt_b[of], d = p.d[of];
    i64 state = (p.layer * p.channels + of) * p.count;
    own(p.dt_w + of * p.rank, p.rank, dt_w);
    own(p.a + of * p.count, p.count, a);
    own(p.states[sequence] + state, p.count, h);
    let_others_begin();
    wait_for_others();
    REAL delta[RANKS], b[STATES], c[STATES];
    const BETWEEN* projected = p.projected + sequence * (p.rank + 2 * p.count);
    own(projected, p.rank, delta);
    own(projected + p.rank, p.count, b);
    own(projected + p.rank + p.count, p.count, c);
    REAL x = widen(p.x[sequence * p.x_stride + of]), z = widen(p.z[sequence * p.z_stride + of]);
    REAL dt = 0, y = 0;
#pragma unroll
    for (int k = 0; k < RANKS; ++k) dt = fma(dt_w[k], delta[k], dt);
    dt = softplus(total(dt) + dt_b);
#pragma unroll
    for (int k = 0; k < STATES; ++k) {
        h[k] = exp2_fast(dt * a[k] * (REAL)LOG2_E) * h[k] + dt * x * b[k];
        y = fma(c[k], h[k], y);
    }
    y = total(y);
    if (!there) return;
    give(h, p.next_states[sequence] + state, p.count);
    if (threadIdx.x % LANES == 0) narrow(fma(d, x, y) * silu(z), p.y[sequence * p.channels + channel]);
}

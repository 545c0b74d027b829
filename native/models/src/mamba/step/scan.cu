// One step of the selective scan of several sequences, with the fused projection of dt. LANES threads share a channel;
// each has RANKS weights of dt's projection and STATES states. Activations between layers are of type BETWEEN. With NORMED
// the inputs of dt's projection, B and C are normed first, as in FalconMamba.
//
// A thread does little work, so the latency of loads dominates: all loads are issued before their first use, and loads
// of memory that no earlier kernel of the step writes, such as states, before the wait.

// Norms a row by its root mean square, without weights.
template <int N> __device__ __forceinline__ void norm(REAL (&share)[N], i64 count, REAL eps) {
    REAL square = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) square = fma(share[k], share[k], square);
    REAL r = 1 / sqrt(total(square) / count + eps);
#pragma unroll
    for (int k = 0; k < N; ++k) share[k] *= r;
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
    if (NORMED) norm(delta, p.rank, p.eps), norm(b, p.count, p.eps), norm(c, p.count, p.eps);
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

// One step of the selective scan of each of some sequences, with the projection of dt before it. LANES threads have a
// channel together, a part of its states each. What comes in between the layers is of type BETWEEN.

struct Params {
    const BETWEEN* x;          // (batch, channels), out of the convolution; rows apart by x_stride
    const BETWEEN* z;          // (batch, channels), the gate; rows apart by z_stride
    const BETWEEN* projected;  // (batch, rank + 2 states): dt's, B, C
    const STORAGE* dt_w;       // (channels, rank)
    const REAL* dt_b;          // (channels)
    const REAL* a;             // (channels, states)
    const REAL* d;             // (channels)
    REAL* const* states;       // the sequences' states, each (layers, channels, states)
    BETWEEN* y;                // (batch, channels)
    i64 layer, channels, rank, count, x_stride, z_stride;
};

template <class T> __device__ __forceinline__ T total(T sum) {
#pragma unroll
    for (int distance = LANES / 2; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

// Weights of dt's projection that a thread has before the others are waited for.
constexpr int HELD = 4;

extern "C" __global__ void __launch_bounds__(THREADS) step_scan(Params p) {
    i64 channel = (i64)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES, sequence = blockIdx.y;
    int lane = threadIdx.x % LANES;
    bool there = channel < p.channels;
    // Lanes past the last channel go along, for the sums.
    i64 of = there ? channel : p.channels - 1;
    const STORAGE* dt_w = p.dt_w + of * p.rank;
    REAL held[HELD], dt_b = p.dt_b[of], d = p.d[of], a = lane < p.count ? p.a[of * p.count + lane] : (REAL)0;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        i64 r = lane + k * LANES;
        held[k] = r < p.rank ? widen(dt_w[r]) : (REAL)0;
    }
    let_others_begin();
    wait_for_others();
    const BETWEEN* projected = p.projected + sequence * (p.rank + 2 * p.count);
    REAL dt = 0;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        i64 r = lane + k * LANES;
        if (r < p.rank) dt = fma(held[k], widen(projected[r]), dt);
    }
    for (i64 r = lane + HELD * LANES; r < p.rank; r += LANES) dt = fma(widen(dt_w[r]), widen(projected[r]), dt);
    dt = softplus(total(dt) + dt_b);
    REAL x = widen(p.x[sequence * p.x_stride + of]), z = widen(p.z[sequence * p.z_stride + of]);
    REAL* states = p.states[sequence] + (p.layer * p.channels + of) * p.count;
    const BETWEEN *b = projected + p.rank, *c = b + p.count;
    REAL y = 0;
    for (i64 n = lane; n < p.count; n += LANES) {
        if (n > lane) a = p.a[of * p.count + n];
        REAL h = exp2_fast(dt * a * (REAL)LOG2_E) * states[n] + dt * x * widen(b[n]);
        if (there) states[n] = h;
        y = fma(widen(c[n]), h, y);
    }
    y = total(y);
    if (there && lane == 0) narrow(fma(d, x, y) * silu(z), p.y[sequence * p.channels + channel]);
}

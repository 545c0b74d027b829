// One step of the selective scan of each of some sequences, with the projection of dt before it. LANES threads have a
// channel together, each RANKS of the weights of dt's projection and STATES of the states, of SEQUENCES sequences. What
// comes in between the layers is of type BETWEEN.
//
// A thread does little, and would wait for each thing that it reads by itself: all is asked for before it is used, and
// what the kernels before this one do not write, states too, before they are waited for.

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

// What a thread has of a row of so many numbers, zeros past its end.
template <int N, class T> __device__ __forceinline__ void own(const T* row, i64 count, REAL (&to)[N]) {
    int lane = threadIdx.x % LANES;
#pragma unroll
    for (int k = 0; k < N; ++k) to[k] = lane + k * LANES < count ? widen(row[lane + k * LANES]) : (REAL)0;
}

extern "C" __global__ void __launch_bounds__(THREADS) step_scan(Params p) {
    i64 channel = (i64)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES, first = (i64)blockIdx.y * SEQUENCES;
    int lane = threadIdx.x % LANES;
    bool there = channel < p.channels;
    // Lanes past the last channel go along, for the sums.
    i64 of = there ? channel : p.channels - 1;
    REAL dt_w[RANKS], a[STATES], dt_b = p.dt_b[of], d = p.d[of];
    REAL *states[SEQUENCES], h[SEQUENCES][STATES];
    own(p.dt_w + of * p.rank, p.rank, dt_w);
    own(p.a + of * p.count, p.count, a);
#pragma unroll
    for (int s = 0; s < SEQUENCES; ++s) {
        states[s] = p.states[first + s] + (p.layer * p.channels + of) * p.count;
        own(states[s], p.count, h[s]);
    }
    let_others_begin();
    wait_for_others();
    REAL x[SEQUENCES], z[SEQUENCES], dt[SEQUENCES][RANKS], b[SEQUENCES][STATES], c[SEQUENCES][STATES];
#pragma unroll
    for (int s = 0; s < SEQUENCES; ++s) {
        i64 sequence = first + s;
        const BETWEEN* projected = p.projected + sequence * (p.rank + 2 * p.count);
        own(projected, p.rank, dt[s]);
        own(projected + p.rank, p.count, b[s]);
        own(projected + p.rank + p.count, p.count, c[s]);
        x[s] = widen(p.x[sequence * p.x_stride + of]);
        z[s] = widen(p.z[sequence * p.z_stride + of]);
    }
#pragma unroll
    for (int s = 0; s < SEQUENCES; ++s) {
        REAL step = 0, y = 0;
#pragma unroll
        for (int k = 0; k < RANKS; ++k) step = fma(dt_w[k], dt[s][k], step);
        step = softplus(total(step) + dt_b);
#pragma unroll
        for (int k = 0; k < STATES; ++k) {
            h[s][k] = exp2_fast(step * a[k] * (REAL)LOG2_E) * h[s][k] + step * x[s] * b[s][k];
            y = fma(c[s][k], h[s][k], y);
        }
        y = total(y);
        if (!there) continue;
#pragma unroll
        for (int k = 0; k < STATES; ++k)
            if (lane + k * LANES < p.count) states[s][lane + k * LANES] = h[s][k];
        if (lane == 0) narrow(fma(d, x[s], y) * silu(z[s]), p.y[(first + s) * p.channels + channel]);
    }
}

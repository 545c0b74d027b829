// The linear recurrence and its gradient. The formulas are in mod.rs; cuda.rs chooses the macros:
//   BACKWARD   0 the recurrence, 1 its gradient: time runs backwards
//   ENDS       0 writes the outputs, 1 finds each chunk's last state from an initial state of zero
//
// A thread is one channel of one batch over one chunk of time; neighbouring threads are neighbouring
// channels. A thread composes the last states of the chunks before its own: over a chunk the state is multiplied
// by the product of its a. Loads of several steps are issued together.

constexpr int STEPS = 8;

// The carry into a chunk: h of the chunk before, or backwards a[t+1] g[t+1] of the chunk after.
__device__ REAL start(const Params& p, i64 row, i64 rows, i64 chunk) {
#if ENDS
    return 0;
#elif BACKWARD
    REAL state = p.dlast_state ? p.dlast_state[row] : (REAL)0;
    for (i64 c = p.chunks - 1; c > chunk; --c) state = p.products[c * rows + row] * state + p.ends[c * rows + row];
    return state;
#else
    REAL state = p.initial_state ? p.initial_state[row] : (REAL)0;
    for (i64 c = 0; c < chunk; ++c) state = p.products[c * rows + row] * state + p.ends[c * rows + row];
    return state;
#endif
}

extern "C" __global__ void linear_scan(Params p) {
    i64 id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 rows = p.batch * p.channels;
    if (id >= rows * p.chunks) return;
    i64 row = id % rows, chunk = id / rows;
    i64 first = chunk * p.chunk;
    i64 last = first + p.chunk < p.length ? first + p.chunk : p.length;
    i64 base = row / p.channels * p.length * p.channels + row % p.channels;
    REAL state = start(p, row, rows, chunk), product = 1;
#if BACKWARD
    for (i64 end = last; end > first; end -= STEPS) {
        REAL a[STEPS], dh[STEPS];
#if !ENDS
        REAL before[STEPS];
#endif
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            i64 t = end - 1 - s, at = base + t * p.channels;
            if (t < first) break;
            a[s] = widen(p.a[at]);
            dh[s] = widen(p.dh[at]);
#if !ENDS
            before[s] = t > 0 ? (REAL)widen(p.h[at - p.channels]) : p.initial_state ? p.initial_state[row] : (REAL)0;
#endif
        }
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            i64 t = end - 1 - s;
            if (t < first) break;
            REAL g = dh[s] + state;
#if !ENDS
            i64 at = base + t * p.channels;
            narrow(g, p.db[at]);
            narrow(g * before[s], p.da[at]);
#endif
            state = a[s] * g;
            product *= a[s];
        }
    }
#else
    for (i64 from = first; from < last; from += STEPS) {
        REAL a[STEPS], b[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            i64 at = base + (from + s) * p.channels;
            if (from + s >= last) break;
            a[s] = widen(p.a[at]);
            b[s] = widen(p.b[at]);
        }
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            if (from + s >= last) break;
            state = a[s] * state + b[s];
#if !ENDS
            narrow(state, p.to[base + (from + s) * p.channels]);
#endif
            product *= a[s];
        }
    }
#endif
#if ENDS
    p.products[id] = product;
    p.ends[id] = state;
#elif BACKWARD
    if (chunk == 0 && p.dinitial_state) p.dinitial_state[row] = state;
#else
    if (chunk == p.chunks - 1 && p.last_state) p.last_state[row] = state;
#endif
}

// Combines the states of chunks. On entry each chunk has its last state from an initial state of zero, the adjoint that
// it passes on for an incoming adjoint of zero, and the sum of its deltas; on return it has its last state and its
// incoming adjoint.

constexpr int BATCH = 8;

// Carries states forwards, or adjoints backwards, through all chunks.
template <bool BACK>
__device__ __forceinline__ void walk(const Compose& p, REAL carry, REAL a, i64 i) {
    i64 all = p.rows * p.width, row = i / p.width;
    for (i64 first = 0; first < p.chunks; first += BATCH) {
        // All loads are issued before the first use, since their latency dominates.
        REAL own[BATCH], decay[BATCH];
        REAL* place[BATCH];
#pragma unroll
        for (int s = 0; s < BATCH; s++) {
            i64 j = BACK ? p.chunks - 1 - first - s : first + s;
            if (j < 0 || j >= p.chunks) continue;
            i64 tile = (j + 1) * p.tiles_per_chunk - 1;
            bool last = tile >= p.tiles - 1;
            place[s] = BACK ? p.adjoints + j * all + i : last ? nullptr : p.bounds + tile * all + i;
            decay[s] = p.passed[(last ? p.tiles - 1 : tile) * p.rows + row] * a;
            if (place[s]) own[s] = *place[s];
        }
#pragma unroll
        for (int s = 0; s < BATCH; s++) {
            if (first + s >= p.chunks || !place[s]) continue;
            REAL before = carry;
            // An infinite decay must not turn zero into NaN.
            carry = carry == REAL(0) ? own[s] : fma(exp2_fast(decay[s]), carry, own[s]);
            *place[s] = BACK ? before : carry;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) compose(const __grid_constant__ Compose p) {
    i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.rows * p.width) return;
    i64 row = i / p.width, n = p.first_state + i % p.width, flat = row * p.state + n;
    REAL a = p.a[row % p.channels * p.state + n] * REAL(LOG2_E);
    if (blockIdx.y == 0) walk<false>(p, p.initial_state ? p.initial_state[flat] : REAL(0), a, i);
    else walk<true>(p, p.dlast_state ? p.dlast_state[flat] : REAL(0), a, i);
}

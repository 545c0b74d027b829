// Combines the states of chunks. On entry each chunk has its last state from an initial state of zero, the adjoint that
// it passes on for an incoming adjoint of zero, and the sum of its deltas; on return it has its last state and its
// incoming adjoint.

constexpr int BATCH = 8;

// The chunks of a channel's states: those of its sequence.
struct Chunks {
    const Compose& p;
    // The sequence's place among states and its length, and the row of its first tile.
    i64 batch, length, first_row, channel;

    __device__ __forceinline__ Chunks(const Compose& p, i64 row) : p(p), batch(row / p.channels), channel(row % p.channels) {
        length = p.length, first_row = batch;
        if (!PACKED) return;
        Sequence of = packed_sequence(p.sequences, batch);
        batch = of.place, length = of.length, first_row = packed_row(of.first, of.place);
    }

    __device__ __forceinline__ i64 count() const { return (length + p.chunk - 1) / p.chunk; }
    // The last tile of a chunk.
    __device__ __forceinline__ i64 last_tile(i64 chunk) const {
        i64 end = (chunk + 1) * p.chunk < length ? (chunk + 1) * p.chunk : length;
        return (end - 1) / TILE;
    }
    // The place of this channel in rows of chunks, and in rows of tiles.
    __device__ __forceinline__ i64 of_chunk(i64 chunk) const { return (chunk * p.batch + batch) * p.channels + channel; }
    __device__ __forceinline__ i64 of_tile(i64 tile) const {
        return (PACKED ? first_row + tile : tile * p.batch + first_row) * p.channels + channel;
    }
    __device__ __forceinline__ i64 of_state(i64 n) const { return (batch * p.channels + channel) * p.state + n; }
};

// Carries state n forwards, or its adjoint backwards, through all chunks.
template <bool BACK>
__device__ __forceinline__ void walk(const Chunks& of, REAL carry, REAL a, i64 n) {
    const Compose& p = of.p;
    i64 chunks = of.count();
    for (i64 first = 0; first < chunks; first += BATCH) {
        // All loads are issued before the first use, since their latency dominates.
        REAL own[BATCH], decay[BATCH];
        REAL* place[BATCH];
#pragma unroll
        for (int s = 0; s < BATCH; s++) {
            i64 j = BACK ? chunks - 1 - first - s : first + s;
            if (j < 0 || j >= chunks) continue;
            i64 tile = of.of_tile(of.last_tile(j));
            // No state after the last chunk is needed.
            place[s] = BACK ? p.adjoints + of.of_chunk(j) * p.width + n : j + 1 == chunks ? nullptr : p.bounds + tile * p.width + n;
            decay[s] = p.passed[tile] * a;
            if (place[s]) own[s] = *place[s];
        }
#pragma unroll
        for (int s = 0; s < BATCH; s++) {
            if (first + s >= chunks || !place[s]) continue;
            REAL before = carry;
            // An infinite decay must not turn zero into NaN.
            carry = carry == REAL(0) ? own[s] : fma(exp2_fast(decay[s]), carry, own[s]);
            *place[s] = BACK ? before : carry;
        }
    }
    if (BACK && p.dinitial_state) p.dinitial_state[of.of_state(p.first_state + n)] = carry;
}

extern "C" __global__ void __launch_bounds__(THREADS) compose(const __grid_constant__ Compose p) {
    i64 i = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= p.batch * p.channels * p.width) return;
    Chunks of(p, i / p.width);
    i64 n = i % p.width, flat = of.of_state(p.first_state + n);
    REAL a = p.a[of.channel * p.state + p.first_state + n] * REAL(LOG2_E);
    if (blockIdx.y == 0) walk<false>(of, p.initial_state ? p.initial_state[flat] : REAL(0), a, n);
    else walk<true>(of, p.dlast_state ? p.dlast_state[flat] : REAL(0), a, n);
}

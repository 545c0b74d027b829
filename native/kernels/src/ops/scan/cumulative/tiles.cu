// The scan of a row by the blocks of a cluster, tile after tile.

// A cluster scans the channels of one column of tiles. In a round its blocks take successive tiles of time.
__device__ __forceinline__ Place place(const Params& p) {
    Place at;
    i64 id = blockIdx.x / p.cluster;
    at.row = id / p.columns;
    at.channel = (id % p.columns * COLS + threadIdx.x % COLS) * VEC;
    at.inside = at.channel < p.width;
    at.step = own_rank() * STEPS;
    at.further = p.back ? -p.width : p.width;
    at.here = (at.row * p.length + (p.back ? p.length - 1 - at.step : at.step)) * p.width + at.channel;
    return at;
}

__device__ __forceinline__ Place next_round(const Params& p, Place at) {
    at.step += p.cluster * STEPS;
    at.here += p.cluster * STEPS * at.further;
    return at;
}

// The number of the tile's steps within the length, and whether a step follows.
__device__ __forceinline__ int steps(const Params& p, const Place& at) {
    i64 left = at.inside ? p.length - at.step : 0;
    return left < 0 ? 0 : left < STEPS ? left : STEPS;
}

__device__ __forceinline__ bool is_followed(const Params& p, const Place& at) {
    return at.inside && at.step + STEPS < p.length;
}

__device__ __forceinline__ void fetch(const Params& p, const Place& at, int stage) {
    if (is_followed(p, at)) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) ask<true>(p, at, stage, copied(r));
    } else {
        int count = steps(p, at);
        for (int r = 0; r < ROWS && copied(r) < count; ++r) ask<false>(p, at, stage, copied(r));
    }
    asked();
}

template <bool FULL>
__device__ __forceinline__ void summarize(const Params& p, const Place& at, int stage, Total (&own)[VEC]) {
    int count = steps(p, at);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (!FULL && computed(r) >= count) break;
        REAL all[READS][VEC];
        read_first<FULL>(p, at, stage, computed(r), all);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            REAL one[READS];
#pragma unroll
            for (int k = 0; k < READS; ++k) one[k] = all[k][v];
            own[v] = then(p, own[v], one);
        }
    }
}

// The total of a thread's steps.
__device__ __forceinline__ void summarize(const Params& p, const Place& at, int stage, Total (&own)[VEC]) {
#pragma unroll
    for (int v = 0; v < VEC; ++v) own[v] = identity();
    if (is_followed(p, at))
        summarize<true>(p, at, stage, own);
    else
        summarize<false>(p, at, stage, own);
}

// Replaces a thread's total by the prefix before it in its warp; the last lanes store the warp's total.
__device__ __forceinline__ void over_lanes(Total (&own)[VEC], Exchange& shared) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = COLS; distance < 32; distance *= 2) {
        Total left[VEC];
#pragma unroll
        for (int v = 0; v < VEC; ++v) left[v] = of_lane(own[v], lane - distance);
        if (lane >= distance) {
            append(left, own);
#pragma unroll
            for (int v = 0; v < VEC; ++v) own[v] = left[v];
        }
    }
    if (lane >= 32 - COLS)
        put(own, &shared.warps[0][threadIdx.x / 32][threadIdx.x % COLS * VEC], WARPS * CHANNELS);
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        own[v] = of_lane(own[v], lane - COLS);
        if (lane < COLS) own[v] = identity();
    }
}

// Stores a step's result: to global memory with OWN, else over its inputs in shared memory.
template <class T>
__device__ __forceinline__ void result(const Place& at, int stage, int step, int k, const REAL (&from)[VEC], T* to) {
    if (OWN)
        store_far(from, to + at.here + step * at.further);
    else
        store(from, (T*)there(stage, step, k));
}

template <bool FULL>
__device__ __forceinline__ void apply(const Params& p, const Place& at, int stage, State (&state)[VEC]) {
    int count = steps(p, at);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (!FULL && computed(r) >= count) break;
        REAL all[READS][VEC], y[VEC], log_y[VEC];
        read_again<FULL>(p, at, stage, computed(r), all);
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            REAL one[READS];
#pragma unroll
            for (int k = 0; k < READS; ++k) one[k] = all[k][v];
            y[v] = step(p, state[v], one, log_y[v]);
        }
        result(at, stage, computed(r), 0, y, p.to);
#if SCAN == EXP_PRODUCT && !GRADIENT
        result(at, stage, computed(r), 1, log_y, p.log_to);
#endif
    }
}

// Scans a thread's steps from `state`, and stores their results.
__device__ __forceinline__ void apply(const Params& p, const Place& at, int stage, State (&state)[VEC]) {
    if (is_followed(p, at))
        apply<true>(p, at, stage, state);
    else
        apply<false>(p, at, stage, state);
}

template <class T>
__device__ __forceinline__ void copy(const unsigned char* from, T* to) {
    constexpr int BYTES = VEC * sizeof(T), EACH = BYTES > 16 ? 16 : BYTES;
    struct alignas(EACH) Piece { unsigned char of[EACH]; };
#pragma unroll
    for (int b = 0; b < BYTES; b += EACH) *(Piece*)((char*)to + b) = *(const Piece*)(from + b);
}

__device__ __forceinline__ void write(const Params& p, const Place& at, int stage, int step) {
    i64 here = at.here + step * at.further;
    copy(there(stage, step, 0), p.to + here);
#if SCAN == EXP_PRODUCT && !GRADIENT
    copy(there(stage, step, 1), p.log_to + here);
#endif
}

// Copies a tile's results from shared to global memory; with OWN they are already there.
__device__ __forceinline__ void write(const Params& p, const Place& at, int stage) {
    if (OWN) return;
    __syncthreads();
    if (is_followed(p, at)) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) write(p, at, stage, copied(r));
    } else {
        int count = steps(p, at);
        for (int r = 0; r < ROWS && copied(r) < count; ++r) write(p, at, stage, copied(r));
    }
}

// Stores the last state, in the thread with the scan's last step.
__device__ __forceinline__ void end(const Params& p, const Place& at, const State (&state)[VEC]) {
    i64 mine = at.step + computed(0);
    if (!p.last || !at.inside || mine + ROWS < p.length || (mine >= p.length && mine > 0)) return;
#pragma unroll
    for (int v = 0; v < VEC; ++v)
        p.last[at.row * p.width + at.channel + v] = last(state[v], GRADIENT ? first(p, at, v) : (REAL)0);
}

// A round prefetches a later tile, waits for its own, computes the prefix before it and writes its results. Rounds
// alternate between two exchanges (double buffering): no block is two rounds ahead of another.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) cumulative(Params p) {
    __shared__ Exchange exchange[2];
    begin(exchange);
    Place at = place(p), ahead = at;
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        fetch(p, ahead, stage);
        ahead = next_round(p, ahead);
    }
    State starts[VEC];
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        REAL given = at.inside && p.start ? p.start[at.row * p.width + at.channel + v] : (REAL)0;
        starts[v] = start(given, p.start);
    }
    Total carry = identity();
    int stage = 0, free = STAGES - 1;
    for (i64 round = 0; round < p.rounds; ++round) {
        fetch(p, ahead, free);
        arrived();
        all_threads_copied();

        Total own[VEC], before[VEC];
        State state[VEC];
        summarize(p, at, stage, own);
        over_lanes(own, exchange[round % 2]);
        exchange_totals(p, exchange[round % 2], round, carry, own, before);
#pragma unroll
        for (int v = 0; v < VEC; ++v) state[v] = after(starts[v], before[v]);
        apply(p, at, stage, state);
        end(p, at, state);
        write(p, at, stage);

        at = next_round(p, at);
        ahead = next_round(p, ahead);
        free = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}

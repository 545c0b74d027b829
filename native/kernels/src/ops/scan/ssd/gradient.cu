// The gradient of the scan in chunks of CHUNK steps on tensor cores, for 16-bit storage, once the states before the
// chunks and the cotangents of the states after them are known; the formulas are in cuda/chunks/gradient.rs.
//   STATE, WIDTH     states of a row and rows of a head
//   HAS_BIAS, SOFTPLUS, CLAMP, MASK   as in step_size.cu
//   SKIP, GATE       whether D and z are given
//   SPLIT            warps that share 16 steps of a chunk, each with a part of the columns
//   STAGES           heads in shared memory: the current one, and with 2 the prefetched next one
// A block has a chunk and some heads of a group, which it processes one after the other: dB, dC and Q, the weights of B
// and C in them, are summed in registers. Reads of shared memory are the limit: for a chunk and head of 128 states a
// block takes about 1200 products of 16 x 8 x 16, and reads about as many groups of four tiles, at four cycles each.

// The terms with S and G, which do not need the chunk's weights: of `y`, the output, of `u`, which is that of dx, of dB
// and dC, and of the sums through decays.
__device__ __forceinline__ void through_states(Rows& u, Rows& y, Others& db, Others& dc, Shared& shared,
                                               const Stage& stage, const STORAGE* dy, const Work& at) {
    Parts& parts = shared.parts;
    float from_state[2] = {}, to_state[2] = {}, until[2], after[2], input[2], total = stage.decay[CHUNK - 1];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = at.row + sum_row(0, half);
        until[half] = exp2_fast(stage.decay[i]);
        after[half] = exp2_fast(total - stage.decay[i]);
        input[half] = after[half] * stage.delta[i];
    }
    read_state(y, from_state, shared.c, stage.before, dy, until, at);
    read_state(u, to_state, shared.b, stage.after, stage.x, after, at);
#pragma unroll
    for (int half = 0; half < 2; half++) to_state[half] *= stage.delta[at.row + sum_row(0, half)];
    write_rows(parts.from_state[at.column], at.row, from_state);
    write_rows(parts.to_state[at.column], at.row, to_state);
    add_states(dc, dy, stage.before, until, at);
    add_states(db, stage.x, stage.after, input, at);
    float all = through(stage);
    if (threadIdx.x % 32 == 0) parts.through[threadIdx.x / 32] = all;
}

// The gradients of a head; those of B and C go into db, dc and the weights `sum`. `cb` are the products C B.
__device__ __forceinline__ void head_gradients(Others& db, Others& dc, Scores& sum, const Scores& cb, Shared& shared,
                                               Stage& stage, const Params& p, const Work& at, int head) {
    const STORAGE* dy = GATE ? shared.gated : stage.dy;
    if (GATE) {
        gate(shared.gated, stage);
        __syncthreads();
    }
    Scores dyx;
    scores<WIDTH, WIDTH_APART>(dyx, dy, stage.x, at);
    weigh(sum, shared.weights, stage, at, cb, dyx);
    count(shared.parts, dyx, at);
    Rows u, y;
    through_states(u, y, db, dc, shared, stage, dy, at);
    __syncthreads();
    add_later<OWN_WIDTH, WIDTH_APART>(u, shared.weights, dy, at);
    if (GATE) add_earlier<OWN_WIDTH, WIDTH_APART>(y, shared.weights, stage.x, stage.delta, at);
    finish(stage, shared.parts, p, at, head, u, y);
    __syncthreads();
    write_out(p.dx, stage.before, p, at, head);
    if (GATE) write_out(p.dz, stage.after, p, at, head);
    if (threadIdx.x / 32 == WARPS - 1) write_steps(shared.parts, stage, p, at, head);
}

// Gradients of B and C through the weights, once these are summed over heads.
__device__ __forceinline__ void through_weights(Others& db, Others& dc, const Scores& sum, Shared& shared,
                                                const Work& at) {
    share(shared.weights, sum, at);
    __syncthreads();
    add_earlier<OWN_STATES, STATE_APART>(dc, shared.weights, shared.b, nullptr, at);
    add_later<OWN_STATES, STATE_APART>(db, shared.weights, shared.c, at);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) ssd_gradient(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *(Shared*)memory;
    Work at(p);
    fetch_group(shared, p, at);
    fetch(shared.stages[0], p, at, at.first);
    copied<0>();
    __syncthreads();
    Scores cb, sum;
    Others db, dc;
    scores<STATE, STATE_APART>(cb, shared.c, shared.b, at);
    clear(sum);
    clear(db);
    clear(dc);
#pragma unroll 1
    for (int head = at.first; head < at.last; head++) {
        int turn = (head - at.first) % STAGES;
        if (STAGES == 2 && head + 1 < at.last) fetch(shared.stages[1 - turn], p, at, head + 1);
        head_gradients(db, dc, sum, cb, shared, shared.stages[turn], p, at, head);
        if (STAGES == 1) {
            __syncthreads();
            if (head + 1 < at.last) fetch(shared.stages[0], p, at, head + 1);
        }
        copied<0>();
        __syncthreads();
    }
    through_weights(db, dc, sum, shared, at);
    write_states(p.db, p.part_b, db, p, at);
    write_states(p.dc, p.part_c, dc, p, at);
}

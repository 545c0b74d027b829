// States before chunks, or in REVERSE cotangents of states after chunks, from the last chunk to the first; the formulas
// are in cuda/chunks/forward.rs and cuda/chunks/gradient.rs.
//   EACH   whether to write those of each chunk, rounded to storage, or those at the ends of segments
//   STATES_FIRST   whether all segments have such an end, and start from zeros

constexpr bool GATED = REVERSE && GATE;

// The inputs of a chunk: B and x, or in REVERSE C, dy and z.
struct Stage {
    STORAGE states[CHUNK * STATE_APART], rows[CHUNK * WIDTH_APART], z[GATED ? CHUNK * WIDTH_APART : 8];
    float delta[CHUNK], decay[CHUNK];
};

// Queues copies of a chunk as one group.
__device__ __forceinline__ void fetch(Stage& stage, const Params& p, const Part& at, int chunk) {
    i64 first = at.step(chunk);
    int left = at.left(chunk), group = at.head / (p.heads / p.groups);
    i64 rows = (first * p.heads + at.head) * WIDTH, stride = (i64)p.heads * WIDTH;
    copy_rows<STATE / 8, STATE_APART>(stage.states, (REVERSE ? p.c : p.b) + (first * p.groups + group) * STATE,
                                      (i64)p.groups * STATE, left);
    copy_rows<WIDTH / 8, WIDTH_APART>(stage.rows, (REVERSE ? p.dy : p.x) + rows, stride, left);
    if (GATED) copy_rows<WIDTH / 8, WIDTH_APART>(stage.z, p.z + rows, stride, left);
    copy_steps(stage.delta, stage.decay, p, at.chunk(p, chunk));
    commit();
}

// Writes a warp's rows of the state, staged in shared memory so that stores are coalesced.
__device__ __forceinline__ void write(STORAGE* to, STORAGE* states, const State& state) {
    int own = threadIdx.x / 32 * 16;
    share(states, state);
    __syncwarp();
#pragma unroll
    for (int unit = threadIdx.x % 32; unit < 2 * STATE; unit += 32) {
        int row = own + unit / (STATE / 8), column = unit % (STATE / 8) * 8;
        *(int4*)(to + row * STATE + column) = *(const int4*)(states + row * STATE_APART + column);
    }
    __syncwarp();
}

__device__ __forceinline__ void advance(State& state, const Stage& stage) {
    float total = stage.decay[CHUNK - 1];
    auto weight = [&](int step) {
        return REVERSE ? exp2_fast(stage.decay[step]) : stage.delta[step] * exp2_fast(total - stage.decay[step]);
    };
    advance<GATED>(state, stage.rows, stage.z, stage.states, total, weight);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) ssd_states(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Stage* stages = (Stage*)memory;
    STORAGE* states = (STORAGE*)(stages + 2);
    Part at(p, blockIdx.x);
    if (!EACH && at.segments == 1 && !STATES_FIRST) return;
    bool is_first = at.segment == (REVERSE ? at.segments - 1 : 0);
    bool is_last = at.segment == (REVERSE ? 0 : at.segments - 1);
    const float* initial = !EACH && STATES_FIRST ? nullptr : REVERSE ? p.dlast : p.initial;
    auto chunk = [&](int turn) { return REVERSE ? at.last - 1 - turn : at.first + turn; };
    if (at.first < at.last) fetch(stages[0], p, at, chunk(0));
    State state;
    clear(state);
    if (EACH && at.segments > 1) load(state, p.starts + at.id * SIZE);
    else if (is_first && initial) load(state, initial + at.state(p));
    float total = 0;
#pragma unroll 1
    for (int turn = 0; turn < at.last - at.first; turn++) {
        Stage& stage = stages[turn % 2];
        STORAGE* to = (REVERSE ? p.after : p.before) + at.chunk(p, chunk(turn)) * SIZE;
        if (EACH) write(to, states, state);
        if (at.first + turn + 1 < at.last) fetch(stages[1 - turn % 2], p, at, chunk(turn + 1));
        else commit();
        copied<1>();
        __syncthreads();
        advance(state, stage);
        total += stage.decay[CHUNK - 1];
        __syncthreads();
    }
    if (!EACH) {
        store(state, p.starts + at.id * SIZE);
        if (threadIdx.x == 0) p.totals[at.id] = total;
    } else if (REVERSE && p.dinitial && is_last) {
        store(state, p.dinitial + at.state(p));
    }
}

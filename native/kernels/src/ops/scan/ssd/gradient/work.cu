// The work of a block of gradient.cu, and its shared memory.

// States including padding: each warp has whole tiles of columns, the last of which may be past the states.
constexpr int STATES = (STATE + 16 * SPLIT - 1) / (16 * SPLIT) * (16 * SPLIT);
// Rows in shared memory are an odd number of 16-byte units long, so that eight of them start at different banks.
constexpr int STATE_APART = (STATES > WIDTH ? STATES : WIDTH) + 8, WIDTH_APART = WIDTH + 8;
constexpr int WARPS = THREADS / 32, GROUPS = CHUNK / 16;
// Columns of a warp.
constexpr int SCORES = CHUNK / SPLIT, OWN_WIDTH = WIDTH / SPLIT, OWN_STATES = STATES / SPLIT;

typedef Sums Scores[1][SCORES / 8];
typedef Sums Rows[1][OWN_WIDTH / 8];
typedef Sums Others[1][OWN_STATES / 8];

// The data of a head. `before` and `after` are reused for dx and dz.
struct Stage {
    STORAGE x[CHUNK * WIDTH_APART], dy[CHUNK * WIDTH_APART], z[GATE ? CHUNK * WIDTH_APART : 8];
    STORAGE before[WIDTH * STATE_APART], after[WIDTH * STATE_APART];
    float delta[CHUNK], decay[CHUNK];
};

// Partial sums, over a warp's columns or over its steps.
struct Parts {
    // Contributions between steps: from a warp's columns to each step, and across each step among these columns.
    float rows[SPLIT][CHUNK], within[GROUPS][CHUNK];
    // From S to each step, and from each step to G; from S to G, by warp.
    float from_state[SPLIT][CHUNK], to_state[SPLIT][CHUNK], through[WARPS];
    // x u of each step, and dy x of each row of the head.
    float input[SPLIT][CHUNK], skip[GROUPS][WIDTH];
};

struct Shared {
    Stage stages[STAGES];
    STORAGE b[CHUNK * STATE_APART], c[CHUNK * STATE_APART], weights[CHUNK * WIDTH_APART];
    STORAGE gated[GATE ? CHUNK * WIDTH_APART : 8];
    Parts parts;
};

// The work of a block, and the rows and columns of a warp. The first p.whole chunks have a block for all heads of a group,
// the others one for each part of them.
struct Work {
    int start, chunk, group, part, first, last, left, row, column;

    __device__ __forceinline__ Work(const Params& p) {
        int heads = p.heads / p.groups, id = blockIdx.x, rest = id - p.whole * p.groups;
        part = rest < 0 ? 0 : rest % p.parts;
        if (rest >= 0) id = p.whole * p.groups + rest / p.parts;
        group = id % p.groups, chunk = id / p.groups;
        Sequence of = sequence_of(p, chunk);
        int before = (chunk - of.chunk) * CHUNK;
        start = of.first + before;
        first = group * heads + part * p.some_heads;
        last = least(first + (rest < 0 ? heads : p.some_heads), (group + 1) * heads);
        left = least(of.length - before, CHUNK);
        row = threadIdx.x / 32 / SPLIT * 16, column = threadIdx.x / 32 % SPLIT;
    }

    __device__ __forceinline__ static int least(int a, int b) { return a < b ? a : b; }

    // The index of a step of the chunk, of that step of a head, and of the chunk of a head.
    __device__ __forceinline__ i64 step(int i) const { return start + i; }
    __device__ __forceinline__ i64 step(const Params& p, int i, int head) const { return step(i) * p.heads + head; }
    __device__ __forceinline__ i64 of_head(const Params& p, int head) const { return (i64)chunk * p.heads + head; }
};

__device__ __forceinline__ void fetch(Stage& stage, const Params& p, const Work& at, int head) {
    i64 first = at.step(p, 0, head) * WIDTH, stride = (i64)p.heads * WIDTH, states = at.of_head(p, head) * SIZE;
    copy_rows<WIDTH / 8, WIDTH_APART>(stage.x, p.x + first, stride, at.left);
    copy_rows<WIDTH / 8, WIDTH_APART>(stage.dy, p.dy + first, stride, at.left);
    if (GATE) copy_rows<WIDTH / 8, WIDTH_APART>(stage.z, p.z + first, stride, at.left);
    copy_rows<STATE / 8, STATE_APART>(stage.before, p.before + states, STATE, WIDTH);
    copy_rows<STATE / 8, STATE_APART>(stage.after, p.after + states, STATE, WIDTH);
    copy_steps(stage.delta, stage.decay, p, at.of_head(p, head));
    commit();
}

__device__ __forceinline__ void fetch_group(Shared& shared, const Params& p, const Work& at) {
    i64 states = (at.step(0) * p.groups + at.group) * STATE, stride = (i64)p.groups * STATE;
    copy_rows<STATE / 8, STATE_APART>(shared.b, p.b + states, stride, at.left);
    copy_rows<STATE / 8, STATE_APART>(shared.c, p.c + states, stride, at.left);
}

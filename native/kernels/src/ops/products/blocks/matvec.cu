// Products of one row of x, where the device copies weights without using threads. Blocks of threads prepare x
// themselves while their first weights are in flight. A block of threads has OUTPUTS outputs, SIDE in each of SIDES
// warps side by side, and takes COLUMNS blocks of them at a time. GROUPS of such warps take turns, and SPLIT blocks, a
// cluster, share the columns. Without a cluster a block continues with further outputs.
//
// Weights are multiplied as stored, scales included, two units of 16 bytes at a time. The eight columns of a
// multiplication are the eight blocks of a piece: each column holds x at the positions of its own block, and zeros
// elsewhere. So after all units of a piece its sums are those of single blocks, and each is scaled once, by two scales.
// With Q4_0 the upper halves of bytes stay in place, 16 times too large; so the sums of lower halves are multiplied by
// 16.
//
// The host gives FORMAT, BYTES (of a block), COLUMNS, SIDE, SIDES, GROUPS, SPLIT, STAGES, FN, and bytes of shared
// memory: STAGE of weights in a stage, X_AT before the prepared x, X_PIECE of x in a piece, and WORDS of its words.

constexpr int OUTPUTS = SIDE * SIDES, THREADS = 32 * SIDES * GROUPS;
// Bytes of a row in shared memory: an odd number of units, so that adjacent rows fall into different banks.
constexpr int PITCH = STAGE / OUTPUTS, STEPS = (PITCH / 16 + 1) / 2;

// The part of x that a piece is multiplied with. The words of a block are those of two steps, ordered by lane, lower
// halves first. After all words come scales and start values of the blocks, then zeros.
constexpr int LANE = WORDS / (COLUMNS * 4), STEP = LANE / 2, KINDS = STEP / 8;

__device__ __forceinline__ i64 pieces(const Params& p) { return (p.blocks + COLUMNS - 1) / COLUMNS; }

// Fetches pieces of weights.
struct Producer {
    const Params& p;
    unsigned char* shared;
    Stages& stages;

    __device__ __forceinline__ void weights(const Place& at, int i, Turn turn) const {
        Barrier* full = begin(stages, turn, STAGE);
        copy_box<STREAMED>(shared + turn.stage * STAGE, &p.matrix, (at.begin + i) * (PITCH / 2), at.column * OUTPUTS, full);
    }

    __device__ __forceinline__ void x(const Place&, int, Turn) const {}
};

// The step in which a block of a piece begins.
__device__ __forceinline__ int first_step(int block) { return block * BYTES / 32; }

// The offset of the words of a block that lane t of four multiplies.
__device__ __forceinline__ int words_of(int block, int t) { return (block * 4 + t) * LANE; }

// Writes a quarter of a block to the words of x for its place in a piece.
__device__ __forceinline__ void put(const Eight& all, int block, int quarter, unsigned char* piece) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int value = quarter * 8 + 2 * i, upper = FORMAT == 8 ? 0 : value / 16;
        int at = block * BYTES + 2 + value - upper * 16, unit = at / 16;
        unsigned char* to = piece + words_of(block, at % 16 / 4) + (unit / 2 - first_step(block)) * STEP;
        *(unsigned short*)(to + upper * 8 + unit % 2 * 4 + at % 4) = (unsigned short)(all.words[i / 2] >> 16 * (i % 2));
    }
    // Sums of Q4_0 are 16 times too large, and their values too large by 8.
    constexpr float LARGE = FORMAT == 8 ? 1 : 16;
    int2 number = {__float_as_int(all.scale / LARGE), FORMAT == 8 ? 0 : -128 * all.sum};
    if (quarter == 0) *(int2*)(piece + WORDS + block * 8) = number;
}

// Prepares x for a place's columns; four adjacent lanes share a block.
__device__ __forceinline__ void make_all(const Params& p, const Place& at, unsigned char* ready) {
    constexpr int KEPT = 2, QUADS = THREADS / 4;
    for (int i = threadIdx.x; i < at.count * (X_PIECE / 16); i += THREADS) ((uint4*)ready)[i] = make_uint4(0, 0, 0, 0);
    meet_first<THREADS>();
    wait_for_others();
    int count = at.count * COLUMNS, quarter = threadIdx.x % 4;
    for (int first = threadIdx.x / 4; first < count; first += KEPT * QUADS) {
        float x[KEPT][8] = {};
        // All loads are issued before any is waited for.
#pragma unroll
        for (int k = 0; k < KEPT; ++k) {
            int own = first + k * QUADS;
            i64 block = at.begin * (i64)COLUMNS + own;
            if (own < count && block < p.blocks) eight(p.x + block * 32 + quarter * 8, x[k]);
        }
#pragma unroll
        for (int k = 0; k < KEPT; ++k) {
            int own = first + k * QUADS;
            Eight all = quantized(x[k]);
            if (own < count) put(all, own % COLUMNS, quarter, ready + own / COLUMNS * X_PIECE);
        }
    }
    meet_first<THREADS>();
}

// A lane's addresses of weights and scales in the first stage, and of x and its scales in a piece.
struct Own {
    int group, output;
    unsigned weights, scales, x[STEPS], scales_of_x;

    __device__ __forceinline__ Own(unsigned shared) {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        group = warp / SIDES, output = warp % SIDES * 16;
        // Sixteen lanes give the row addresses of a unit, the other sixteen those of the next unit.
        weights = kept(shared + (output + lane % 16) * PITCH + lane / 16 * 16);
        scales = kept((output + g) * PITCH + 2 * t * BYTES);
        // A lane multiplies x of block g, which has words in two steps. Its sums belong to blocks 2 t and 2 t + 1.
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            int number = step - first_step(g);
            x[step] = kept(number == 0 || number == 1 ? words_of(g, t) + number * STEP : X_PIECE - 16);
        }
        scales_of_x = kept(WORDS + t * 16);
    }
};

// A warp's factors for a piece: two units of sixteen rows at a time. After the last unit x has zeros.
struct Factors {
    unsigned a[STEPS][4];

    __device__ __forceinline__ Factors(unsigned from) {
#pragma unroll
        for (int i = 0; i < STEPS - 1; ++i) deal(from + i * 32, a[i][0], a[i][1], a[i][2], a[i][3]);
        deal(from + (STEPS - 1) * 32, a[STEPS - 1][0], a[STEPS - 1][1]);
        a[STEPS - 1][2] = a[STEPS - 1][3] = 0;
    }
};

#define MULTIPLY(type) \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." type ".s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3]) \
        : "r"(a[0] & mask), "r"(a[1] & mask), "r"(a[2] & mask), "r"(a[3] & mask), "r"(b[0]), "r"(b[1]))

__device__ __forceinline__ void multiply_add(int (&to)[4], const unsigned (&a)[4], unsigned mask, const unsigned (&b)[2]) {
    if constexpr (FORMAT == 8) MULTIPLY("s8"); else MULTIPLY("u8");
}

#undef MULTIPLY

// Adds one step. With Q4_0 there are two sums, of lower and of upper halves.
__device__ __forceinline__ void add_step(int (&sums)[KINDS][4], const unsigned (&a)[4], const unsigned char* x) {
    unsigned b[KINDS][2];
    memcpy(b, __builtin_assume_aligned(x, STEP), STEP);
    if constexpr (FORMAT == 8) {
        multiply_add(sums[0], a, 0xffffffff, b[0]);
    } else {
        multiply_add(sums[0], a, 0x0f0f0f0f, b[0]);
        multiply_add(sums[1], a, 0xf0f0f0f0, b[1]);
    }
}

// Adds a piece to the sums of two outputs.
__device__ __forceinline__ void add_piece(const unsigned char* shared, int stage, const unsigned char* x, const Own& own,
                                          float (&sums)[2]) {
    Factors factors(own.weights + stage);
    // Scales of two blocks, and the start values of their sums.
    int4 two = *(const int4*)(x + own.scales_of_x);
    int all[KINDS][4] = {};
    if constexpr (KINDS == 2) all[1][0] = all[1][2] = two.y, all[1][1] = all[1][3] = two.w;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) add_step(all, factors.a[i], x + own.x[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int sum = KINDS == 2 ? all[0][i] * 16 + all[KINDS - 1][i] : all[0][i], half = i / 2, second = i % 2;
        float d = widen(*(const f16*)(shared + stage + own.scales + half * 8 * PITCH + second * BYTES));
        // Rounded only once.
        float product = (float)sum * __int_as_float(second ? two.z : two.x);
        sums[half] = fmaf(product, d, sums[half]);
    }
}

// Visits the pieces that are this group's turn. A stage always belongs to the same group, so that the group can track
// its phases.
__device__ __forceinline__ void consume(const Place& at, const unsigned char* shared, const unsigned char* ready,
                                        Stages& stages, const Own& own, Turn turn, float (&sums)[2]) {
    static_assert(STAGES % GROUPS == 0, "turns");
    int first = (own.group + GROUPS - turn.stage % GROUPS) % GROUPS;
    turn.skip(first);
    for (int i = first; i < at.count; i += GROUPS, turn.skip(GROUPS)) {
        wait(&stages.full[turn.stage], turn.parity);
        add_piece(shared, turn.stage * STAGE, ready + i * X_PIECE, own, sums);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&stages.free[turn.stage]);
    }
}

// Writes a warp's sums to shared memory, where all are added up. Each lane has those of a quarter of the blocks.
__device__ __forceinline__ void leave(const float (&sums)[2], const Own& own, float* all) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = sums[half];
        sum += __shfl_xor_sync(ALL, sum, 1);
        sum += __shfl_xor_sync(ALL, sum, 2);
        if (threadIdx.x % 4 == 0) all[own.group * OUTPUTS + own.output + half * 8 + threadIdx.x % 32 / 4] = sum;
    }
}

// The sum over all groups of all parts.
__device__ __forceinline__ float added(const float* sums) {
    float sum = 0;
#pragma unroll
    for (int part = 0; part < SPLIT; ++part)
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) sum += of_part(sums + group * OUTPUTS, part);
    return sum;
}

// Computes one place and writes its results.
__device__ __forceinline__ void multiply_place(const Params& p, const Place& at, const unsigned char* shared,
                                               const unsigned char* ready, float* all, Stages& stages, const Own& own,
                                               Turn& turn) {
    int i = own_part() * THREADS + threadIdx.x;
    i64 output = at.column * (i64)OUTPUTS + i;
    bool writes = i < OUTPUTS && output < p.outputs;
    float bias = p.b && writes ? p.b[output] : 0, sums[2] = {};
    consume(at, shared, ready, stages, own, turn, sums);
    turn.skip_all(at.count);
    // Waits until no thread still reads the previous place's sums.
    if (SPLIT == 1) meet_first<THREADS>();
    leave(sums, own, all);
    meet_all<THREADS>();
    float sum = writes ? added(all + i) : 0;
    __syncwarp();
    if constexpr (SPLIT > 1) done_in_cluster();
    if (writes) p.y[output] = finished(sum + bias);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32) blocks_matvec(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char shared[];
    float* all = (float*)(shared + STAGES * STAGE);
    unsigned char* ready = shared + X_AT;
    Stages& stages = *((Stages*)ready - 1);
    auto multiply_all = [&] {
        make_all(p, place(p, blockIdx.x / SPLIT), ready);
        Own own(address(shared));
        Turn turn = {};
        each_place(p, [&](const Place& at) { multiply_place(p, at, shared, ready, all, stages, own, turn); });
    };
    fetch_and_multiply<THREADS>(stages, SIDES, [&] { fetch_all<0>(Producer{p, shared, stages}, true); }, multiply_all);
}

// Products by four warps that multiply as one, instead of tile.cu for compute capability 9 and more than one row, where the
// device copies weights by itself. A block of threads has 64 outputs and 8 NT rows of x, and goes along COLUMNS blocks of each
// at a time. Each of its teams of four warps has a pair of blocks; SPLIT neighbours, a cluster, share the columns.
//
// Two multiplications do a block: one of its bytes, and one that makes the products of the scales of weights with those of x,
// each exact as it is the only one of its sum that is not zero. So a sum takes one operation that makes a float of it, and one
// that adds it.

constexpr int OUTPUTS = 64, TEAMS = COLUMNS / 2, WARPS = 4 * TEAMS, THREADS = 32 * WARPS, ROWS = 8 * NT;
// Of a row in shared memory: an odd number of units, so that neighbours lie in different banks.
constexpr int PITCH = COLUMNS * BYTES;
// Bytes of a stage: weights, then x.
constexpr int STAGE = OUTPUTS * PITCH + X_PIECE;
// So many pieces of weights are asked for before x, which comes behind them: Q4_0 multiplies for longer than it fetches.
constexpr int MOST = FORMAT == 8 ? 6 : 3, SOON = STAGES < MOST ? STAGES : MOST;

struct alignas(64) Params {
    unsigned char matrix[128];  // the weights, as the device describes them to itself
    const unsigned char* ready;
    const float* b;
    STORAGE* y;
    i64 rows, outputs, blocks;
    int columns, tiles;  // blocks of outputs, and those of all eights of rows
};

__device__ __forceinline__ i64 pieces(const Params& p) { return (p.blocks + COLUMNS - 1) / COLUMNS; }

// Fetches pieces of weights and of x.
struct Producer {
    const Params& p;
    unsigned char* shared;
    Stages& stages;

    __device__ __forceinline__ void weights(const Place& at, int i, Turn turn) const {
        Barrier* full = begin(stages, turn, STAGE);
        copy_box<STREAMED>(shared + turn.stage * STAGE, p.matrix, (at.begin + i) * (PITCH / 2), at.column * OUTPUTS, full);
    }

    // The other part of a stage, which makes it full.
    __device__ __forceinline__ void x(const Place& at, int i, Turn turn) const {
        const unsigned char* from = p.ready + (at.group * pieces(p) + at.begin + i) * X_PIECE;
        copy_bytes(shared + turn.stage * STAGE + OUTPUTS * PITCH, from, X_PIECE, &stages.full[turn.stage]);
    }
};

// Where a lane finds weights and x of its team's pair in the first stage; how it joins words of both of the pair's blocks, and by
// what it multiplies or masks words that may have a scale, which only one lane of four keeps.
struct Own {
    int pair, output, ends[2], joins[2], up, below, high;
    unsigned bytes, scales;

    __device__ __forceinline__ Own(unsigned shared) {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
        pair = warp / 4, output = warp % 4 * 16;
        // Sixteen lanes tell where the rows of a unit are, and as many those of another one: of Q4_0 the next one, of Q8_0 the
        // one left of it for the first block, and right of it for the second.
        int row = shared + (output + lane % 16) * PITCH + pair * (WORDS / 2) * 16;
        ends[0] = kept(row + (FORMAT == 8 ? 1 - lane / 16 : lane / 16) * 16);
        ends[1] = kept(row + (3 + lane / 16) * 16);
        joins[0] = kept(joined(t, pair, false)), joins[1] = kept(joined(t, pair, true));
        up = kept(t == pair ? 0x10000 : 0), below = kept(t == pair ? 0xffff0000 : 0);
        high = kept(0xf0f0f0f0);
        bytes = matrices(shared + OUTPUTS * PITCH + 2 * pair * X_BLOCK);
        scales = matrices(shared + OUTPUTS * PITCH + COLUMNS * X_BLOCK);
    }
};

// What is read once of a pair: of Q8_0 the unit that both blocks have a part of, of Q4_0 all units.
struct Pair {
    unsigned of[FORMAT == 8 ? 1 : UNITS][2];

    __device__ __forceinline__ Pair(int stage, const Own& own) {
        unsigned from = stage + own.ends[0];
        if constexpr (FORMAT == 4) {
            deal(from, of[0][0], of[0][1], of[1][0], of[1][1]);
            deal(from + 32, of[2][0], of[2][1]);
        } else {
            deal(from + 16, of[0][0], of[0][1]);
        }
    }
};

// What a warp multiplies of a block: bytes and scales.
struct Factors {
    unsigned bytes[4], scales[4];

    __device__ __forceinline__ void pin() { pinned(bytes), pinned(scales); }
};

// A scale in the lower half of a word of a pair's first block, or in the upper one of its second. Both come to the upper half,
// those of second blocks to the other half of the columns.
template <int SECOND>
__device__ __forceinline__ void put_scale(Factors& to, int half, unsigned word, const Own& own) {
    to.scales[2 * SECOND + half] = SECOND ? word & own.below : word * own.up;
    to.scales[2 * (1 - SECOND) + half] = 0;
}

template <int SECOND>
__device__ __forceinline__ void factor(Factors& to, const Pair& pair, int stage, const Own& own) {
    if constexpr (FORMAT == 8) {
        deal(stage + own.ends[SECOND], to.bytes[0], to.bytes[1], to.bytes[2], to.bytes[3]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned middle = pair.of[0][half], end = to.bytes[2 + half];
            put_scale<SECOND>(to, half, SECOND ? middle : end, own);
            to.bytes[2 + half] =
                SECOND ? __byte_perm(middle, end, own.joins[1]) : __byte_perm(end, middle, own.joins[0]);
        }
    } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned word = pair.of[SECOND][half];
            unsigned both = __byte_perm(word, pair.of[SECOND + (FORMAT == 4)][half], own.joins[SECOND]);
            put_scale<SECOND>(to, half, word, own);
            // 16 times the values, as bytes with a sign.
            to.bytes[half] = (both << 4 & own.high) ^ 0x80808080;
            to.bytes[2 + half] = (both & own.high) ^ 0x80808080;
        }
    }
}

// A block: what is multiplied, and what becomes of it.
struct Block {
    Factors factors;
    int bytes[NT][4];
    float scales[NT][4];

    // Adds block `number` of the pair.
    __device__ __forceinline__ void add_to(float (&sums)[NT][4], const Own& own, int stage, int number) {
        factors.pin();
        multiplications();
        multiply(bytes, factors.bytes, described(own.bytes + stage / 16) + number * (X_BLOCK / 16));
        multiply(scales, factors.scales, described(own.scales + stage / 16));
        grouped();
        multiplied<0>();
        factors.pin();
        pinned(bytes), pinned(scales);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[n][i] = fmaf((float)bytes[n][i], scales[n][i], sums[n][i]);
    }
};

// Goes along all pieces.
__device__ __forceinline__ void consume(const Place& at, Stages& stages, const Own& own, Turn& turn,
                                        float (&sums)[NT][4]) {
    for (int i = 0; i < at.count; ++i, turn.skip(1)) {
        wait(&stages.full[turn.stage], turn.parity);
        int stage = turn.stage * STAGE;
        Pair pair(stage, own);
        Block first, second;
        factor<0>(first.factors, pair, stage, own);
        first.add_to(sums, own, stage, 0);
        factor<1>(second.factors, pair, stage, own);
        second.add_to(sums, own, stage, 1);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&stages.free[turn.stage]);
    }
}

// Sums of rows lie so far apart that lanes write to different banks.
constexpr int SUMS_PITCH = OUTPUTS + 4;

// A warp's sums to where all are added up.
__device__ __forceinline__ void leave(const float (&sums)[NT][4], const Own& own, float* all) {
    // Values of Q4_0 are 16 times as large, which is exact.
    constexpr float SMALL = FORMAT == 8 ? 1 : 1.0f / 16;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float* to = all + (own.pair * ROWS + 2 * t) * SUMS_PITCH + own.output + g;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) to[(n * 8 + i % 2) * SUMS_PITCH + i / 2 * 8] = sums[n][i] * SMALL;
}

// What all parts have of four neighbours.
__device__ __forceinline__ float4 added(const float* fours) {
    float4 sum = {};
#pragma unroll
    for (int part = 0; part < SPLIT; ++part)
#pragma unroll
        for (int team = 0; team < TEAMS; ++team) {
            int4 bits = of_part((const int4*)(fours + team * ROWS * SUMS_PITCH), part);
            sum.x += __int_as_float(bits.x), sum.y += __int_as_float(bits.y);
            sum.z += __int_as_float(bits.z), sum.w += __int_as_float(bits.w);
        }
    return sum;
}

// Writes four neighbouring outputs of a row, or those that there are.
__device__ __forceinline__ void write(const Params& p, i64 row, i64 output, float4 four) {
    i64 left = row < p.rows ? p.outputs - output : 0, at = row * p.outputs + output;
    float sums[4] = {four.x, four.y, four.z, four.w};
    struct alignas(4 * sizeof(STORAGE)) Results { STORAGE of[4]; } y;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (p.b && j < left) sums[j] += p.b[output + j];
        narrow(activate<FN>(sums[j]), y.of[j]);
    }
    bool whole = left >= 4 && (unsigned long long)(p.y + at) % sizeof(y) == 0;
    if (whole) *(Results*)(p.y + at) = y;
#pragma unroll
    for (int j = 0; j < 4; ++j)
        if (!whole && j < left) p.y[at + j] = y.of[j];
}

// A place, until its results are written.
__device__ __forceinline__ void multiply_place(const Params& p, const Place& at, float* all, Stages& stages,
                                               const Own& own, Turn& turn) {
    constexpr int WIDE = OUTPUTS / 4, ALL = ROWS * WIDE, STEP = SPLIT * THREADS, COUNT = (ALL + STEP - 1) / STEP;
    int first = own_part() * THREADS + threadIdx.x;
    float sums[NT][4] = {};
    consume(at, stages, own, turn, sums);
    // Nobody reads sums of the place before.
    if (SPLIT == 1) meet_first<THREADS>();
    leave(sums, own, all);
    meet_all<THREADS>();
    float4 of_all[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        int i = first + k * STEP;
        if (i < ALL) of_all[k] = added(all + i / WIDE * SUMS_PITCH + i % WIDE * 4);
    }
    __syncwarp();
    if constexpr (SPLIT > 1) done_in_cluster();
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        int i = first + k * STEP;
        if (i < ALL) write(p, at.group * (i64)ROWS + i / WIDE, at.column * (i64)OUTPUTS + i % WIDE * 4, of_all[k]);
    }
}

extern "C" __global__ void blocks_box(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char shared[];
    if (idle(p)) return;
    float* all = (float*)(shared + STAGES * STAGE);
    Stages& stages = *(Stages*)(all + TEAMS * ROWS * SUMS_PITCH);
    auto multiply_all = [&] {
        Own own(address(shared));
        Turn turn = {};
        each_place(p, [&](const Place& at) { multiply_place(p, at, all, stages, own, turn); });
    };
    fetch_and_multiply<THREADS>(stages, WARPS, [&] { fetch_all<SOON>(Producer{p, shared, stages}, false); }, multiply_all);
}

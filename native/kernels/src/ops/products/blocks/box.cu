// Products by teams of warps, where the device copies weights without using threads (tensor maps). It replaces tile.cu
// on compute capability 9 for more than one row. A block of threads has OUTPUTS outputs and 8 NT rows of x, and takes
// COLUMNS blocks of each at a time. SPLIT blocks, a cluster, share the columns. The host gives FN, SHARED (bytes of
// shared memory), and the macros of tiles.cu and teams.cu.
//
// Each block takes two multiplications: one of its bytes, and one of the scales of weights and of x. The latter are
// exact, because each sum has only one term that is not zero. So adding a block's sum takes one conversion to float and
// one fused multiply-add.

// Bytes of a row of weights in a stage: an odd number of units, so that adjacent rows fall into different banks. Then
// bytes of a stage: weights, then x.
constexpr int PITCH = COLUMNS * BYTES, STAGE = OUTPUTS * PITCH + X_PIECE;
// Pieces of weights that are fetched before x. With few rows, weights arrive no faster than they are multiplied; with
// many, multiplying takes longer.
constexpr int MOST = NT < 4 ? STAGES : FORMAT == 8 ? 4 : 2, SOON = STAGES < MOST ? STAGES : MOST;
// Words of a block that a lane multiplies: every fourth one.
constexpr int OWN = FORMAT == 8 ? 2 : 1;

__device__ __forceinline__ i64 pieces(const Tiled& p) { return (p.blocks + COLUMNS - 1) / COLUMNS; }

// Fetches pieces of weights and of x.
struct Producer {
    const Tiled& p;
    unsigned char* shared;
    Stages& stages;

    __device__ __forceinline__ void weights(const Place& at, int i, Turn turn) const {
        Barrier* full = begin(stages, turn, STAGE);
        copy_box<STREAMED>(shared + turn.stage * STAGE, &p.matrix, (at.begin + i) * (PITCH / 2), at.column * OUTPUTS, full);
    }

    // Fetches x for a stage, whose weights are in flight already; after that the stage is full.
    __device__ __forceinline__ void x(const Place& at, int i, Turn turn) const {
        const unsigned char* from = p.ready + (at.group * pieces(p) + at.begin + i) * X_PIECE;
        copy_bytes(shared + turn.stage * STAGE + OUTPUTS * PITCH, from, X_PIECE, &stages.full[turn.stage]);
    }
};

// A lane's addresses of weights, scales and x in the first stage, and the selector that joins the words around a scale.
struct Own {
    Team team;
    int words, scales, join, high;
    unsigned x;

    __device__ __forceinline__ Own(unsigned shared) {
        int lane = threadIdx.x % 32, t = lane % 4, row = shared + (team.output + lane / 4) * PITCH;
        words = kept(row + t * 4);
        scales = kept(row + t * 2 * BYTES);
        join = kept(t == 0 ? 0x5432 : 0x3210);
        high = kept(0xf0f0f0f0);
        x = shared + OUTPUTS * PITCH;
    }
};

__device__ __forceinline__ unsigned word_at(int from) {
    unsigned word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
    return word;
}

// The scales of a piece as factors: those of the first blocks of pairs, then those of the second. A lane has the scales
// of one pair, and x holds zeros in the columns of other pairs. The second half of the columns is unused.
struct Scales {
    unsigned of[2][4];

    __device__ __forceinline__ Scales(int from) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            of[0][half] = word_at(from + half * 8 * PITCH) & 0xffff;
            of[1][half] = word_at(from + half * 8 * PITCH + WORDS * 4) & 0xffff0000;
            of[0][2 + half] = of[1][2 + half] = 0;
        }
    }
};

// A lane's words of a pair of blocks, for two outputs. The words of the first block come first, and the first of them
// may start with the scale. Then come the word where that block ends, and the words of the second block.
struct Pair {
    unsigned first[2][OWN], end[2], second[2][OWN];

    __device__ __forceinline__ Pair(int from) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int at = from + half * 8 * PITCH;
            end[half] = word_at(at + WORDS * 4);
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                first[half][i] = word_at(at + i * 16);
                second[half][i] = word_at(at + WORDS * 4 + 4 + i * 16);
            }
        }
    }
};

// A warp's factors for a block.
struct Factors {
    unsigned of[4];

    template <int SECOND>
    __device__ __forceinline__ void make(const Pair& pair, const Own& own) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned joined = __byte_perm(pair.first[half][0], pair.end[half], own.join);
            unsigned word = SECOND ? pair.second[half][0] : joined;
            if constexpr (FORMAT == 8) {
                of[half] = word;
                of[2 + half] = SECOND ? pair.second[half][1] : pair.first[half][1];
            } else {
                // 16 times the values, as signed bytes.
                of[half] = (word << 4 & own.high) ^ 0x80808080;
                of[2 + half] = (word & own.high) ^ 0x80808080;
            }
        }
    }
};

// The products of a block: those of its bytes, and those of its scales.
struct Products {
    int bytes[NT][4];
    float scales[NT][4];

    __device__ __forceinline__ void begin(Factors& a, unsigned (&a_scales)[4], unsigned x, unsigned x_scales) {
        pinned(a.of), pinned(a_scales);
        multiplications();
        multiply(bytes, a.of, described(x));
        multiply(scales, a_scales, described(x_scales));
        grouped();
    }

    __device__ __forceinline__ void add_to(float (&sums)[NT][4], Factors& a, unsigned (&a_scales)[4]) {
        multiplied<0>();
        pinned(a.of), pinned(a_scales);
        pinned(bytes), pinned(scales);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[n][i] = fmaf((float)bytes[n][i], scales[n][i], sums[n][i]);
    }
};

// Adds a piece. The next factors are prepared while multiplications are in flight.
__device__ __forceinline__ void add_piece(int stage, const Own& own, Products& products, float (&sums)[NT][4]) {
    unsigned x = matrices(own.x + stage), all = eights(own.x + stage);
    Scales scales(stage + own.scales);
    Pair pair(stage + own.words);
    Factors first, second;
    first.make<0>(pair, own);
#pragma unroll
    for (int k = 0; k < COLUMNS; k += 2) {
        unsigned others = all + x_scales(k / 2) / 16;
        products.begin(first, scales.of[0], x + k * (X_BLOCK / 16), others);
        second.make<1>(pair, own);
        pinned(second.of);
        if (k + 2 < COLUMNS) pair = Pair(stage + own.words + (k + 2) * BYTES);
        products.add_to(sums, first, scales.of[0]);
        products.begin(second, scales.of[1], x + (k + 1) * (X_BLOCK / 16), others);
        if (k + 2 < COLUMNS) first.make<0>(pair, own), pinned(first.of);
        products.add_to(sums, second, scales.of[1]);
    }
}

// Partial sums in shared memory that leave the most room for stages.
constexpr int ROOM = FORMAT == 8 ? 1 : DEEP;
static_assert(SHARED == STAGES * STAGE + ROOM * SUMS * sizeof(float) + sizeof(Stages), "what the host counts");

// Writes four adjacent outputs of a row, as far as they exist.
__device__ __forceinline__ void write(const Tiled& p, i64 row, i64 output, float4 four) {
    i64 left = row < p.rows ? p.outputs - output : 0, at = row * p.outputs + output;
    float sums[4] = {four.x, four.y, four.z, four.w};
    struct alignas(4 * sizeof(STORAGE)) Results { STORAGE of[4]; } y;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        if (p.b && j < left) sums[j] += p.b[output + j];
        y.of[j] = finished(sums[j]);
    }
    bool whole = left >= 4 && (unsigned long long)(p.y + at) % sizeof(y) == 0;
    if (whole) *(Results*)(p.y + at) = y;
#pragma unroll
    for (int j = 0; j < 4; ++j)
        if (!whole && j < left) p.y[at + j] = y.of[j];
}

// Computes one place and writes its results.
__device__ __forceinline__ void multiply_place(const Tiled& p, const Place& at, float* all, Stages& stages,
                                               const Own& own, Turn& turn) {
    constexpr int WIDE = OUTPUTS / 4, ALL = ROWS * WIDE, STEP = SPLIT * THREADS, COUNT = (ALL + STEP - 1) / STEP;
    int first = own_part() * THREADS + threadIdx.x;
    Products products = {};
    float sums[NT][4] = {};
    take_turns(at, stages, own.team, turn, [&](int stage) { add_piece(stage * STAGE, own, products, sums); });
    turn.skip_all(at.count);
    // Waits until no thread still reads the previous place's sums.
    if (SPLIT == 1) meet_first<THREADS>();
    // Sums of Q4_0 are 16 times too large; dividing by 16 is exact.
    leave_all<ROOM>(sums, own.team, all, [](float sum) { return FORMAT == 8 ? sum : sum / 16; });
    float4 of_all[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        int i = first + k * STEP;
        if (i < ALL) of_all[k] = added<ROOM>((const float4*)all + i / WIDE * (SUMS_PITCH / 4) + i % WIDE);
    }
    __syncwarp();
    if constexpr (SPLIT > 1) done_in_cluster();
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        int i = first + k * STEP;
        if (i < ALL) write(p, at.group * (i64)ROWS + i / WIDE, at.column * (i64)OUTPUTS + i % WIDE * 4, of_all[k]);
    }
}

extern "C" __global__ void blocks_box(const __grid_constant__ Tiled p) {
    extern __shared__ __align__(128) unsigned char shared[];
    if (idle(p)) return;
    float* all = (float*)(shared + STAGES * STAGE);
    Stages& stages = *(Stages*)(all + ROOM * SUMS);
    auto multiply_all = [&] {
        Own own(address(shared));
        Turn turn = {};
        each_place(p, [&](const Place& at) { multiply_place(p, at, all, stages, own, turn); });
    };
    fetch_and_multiply<THREADS>(stages, WARPS / DEEP, [&] { fetch_all<SOON>(Producer{p, shared, stages}, false); }, multiply_all);
}

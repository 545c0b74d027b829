// Products on tensor cores. A block of threads has OUTPUTS outputs and 8 NT rows of x, and takes COLUMNS blocks of each
// at a time; STAGES of these pieces are in shared memory or in flight. SIDES warps side by side have SIDE outputs each,
// and four rows of such warps take a pair of blocks each. SPLIT blocks, a cluster, share the columns. All partial sums
// are added up at the end. Without a cluster a block continues with further outputs, whose weights are in flight before
// the previous ones are done. A multiplication is one block of 16 outputs and 8 rows. Its sums start from the bits of a
// float, so that the results are floats without a conversion; one multiply-add subtracts that float.
//
// PIECE is 0 where bulk copies fetch weights: rows must be whole units of 16 bytes at aligned addresses.
// Otherwise it is the largest piece that divides all rows of weights. The host gives FORMAT, COLUMNS, NT, SIDE, SIDES,
// SPLIT, STAGES, SHARED (bytes of shared memory), PIECE, PRODUCERS (threads that fetch) and FN.

constexpr int MT = SIDE / 16, OUTPUTS = SIDE * SIDES, WARPS = 4 * SIDES, THREADS = 32 * WARPS;
// Bytes of a row in shared memory: an odd number of units, so that adjacent rows fall into different banks.
constexpr int PITCH = COLUMNS * BYTES;
// Bytes of a stage: weights, then x.
constexpr int STAGE = OUTPUTS * PITCH + COLUMNS * X_BYTES;
constexpr int ROWS = 8 * NT;
// Pieces that are fetched before x is ready: with fewer of them the first ones arrive sooner.
constexpr int SOON = STAGES < 6 ? STAGES : 6;

__device__ __forceinline__ i64 pieces(const Tiled& p) { return (p.blocks + COLUMNS - 1) / COLUMNS; }

// Fetches pieces of weights and of x.
struct Producer {
    const Tiled& p;
    unsigned char* shared;
    Stages& stages;

    __device__ __forceinline__ void weights(const Place& at, int i, Turn turn) const {
        Barrier* full = &stages.full[turn.stage];
        unsigned char* to = shared + turn.stage * STAGE;
        i64 skipped = (at.begin + i) * (i64)PITCH;
        // In the first phase every stage is free: waiting on the opposite parity returns at once.
        wait(&stages.free[turn.stage], turn.parity ^ 1);
#if PIECE
        i64 row_bytes = p.blocks * BYTES;
        for (int n = threadIdx.x - THREADS; n < OUTPUTS * (PITCH / PIECE); n += PRODUCERS) {
            // Rows past the last one repeat it, and are not written.
            i64 row = at.column * (i64)OUTPUTS + n / (PITCH / PIECE), from = skipped + n % (PITCH / PIECE) * PIECE;
            row = row < p.outputs ? row : p.outputs - 1;
            bool there = from < row_bytes;
            copy_piece<PIECE>(to + n * PIECE, p.w + row * row_bytes + (there ? from : 0), there);
        }
#else
        expect(full, STAGE);
        copy_box<STREAMED>(to, &p.matrix, (int)(skipped / 2), at.column * OUTPUTS, full);
#endif
    }

    // Fetches x for a stage, whose weights are in flight already; after that the stage is full.
    __device__ __forceinline__ void x(const Place& at, int i, Turn turn) const {
        Barrier* full = &stages.full[turn.stage];
        unsigned char* to = shared + turn.stage * STAGE + OUTPUTS * PITCH;
        const unsigned char* from = p.ready + (at.group * pieces(p) + at.begin + i) * (COLUMNS * X_BYTES);
#if PIECE
        for (int n = (threadIdx.x - THREADS) * 16; n < COLUMNS * X_BYTES; n += PRODUCERS * 16)
            copy_piece<16>(to + n, from + n, true);
        arrive_copied<PIECE>(full);
#else
        copy_bytes(to, from, COLUMNS * X_BYTES, full);
#endif
    }
};

// A lane's addresses of its factors, and constants that it needs throughout.
struct Own {
    int pair, g, t, ends[2], middle, scales, words_of_x, scales_of_x, joins[2], start[4], high;

    __device__ __forceinline__ Own() {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32, side = warp % SIDES * SIDE;
        pair = warp / SIDES, g = lane / 4, t = lane % 4;
        int units = pair * (WORDS / 2) * 16, x = OUTPUTS * PITCH + 2 * pair * X_BYTES;
        // Sixteen lanes give the row addresses of a unit, the other sixteen those of the unit to its left or right.
        ends[0] = kept((side + lane % 16) * PITCH + units + (1 - lane / 16) * 16);
        ends[1] = kept((side + lane % 16) * PITCH + units + (3 + lane / 16) * 16);
        middle = kept((side + lane) * PITCH + units + (FORMAT == 8 ? 32 : 0));
        scales = kept((side + g) * PITCH + 2 * pair * BYTES);
        words_of_x = kept(x + lane * TWO * 8);
        scales_of_x = kept(x + NT * 256 + t * NT * 8);
#pragma unroll
        for (int second = 0; second < 2; ++second) joins[second] = kept(joined(t, pair, second));
#pragma unroll
        for (int i = 0; i < 4; ++i) start[i] = kept(START);
        high = kept(0xf0f0f0f0);
    }
};

// Units of a pair that are read once: with Q8_0 the one that both blocks share, with Q4_0 all.
constexpr int ONCE = FORMAT == 8 ? 1 : UNITS;
struct Pair {
    unsigned of[ONCE][MT][2];

    __device__ __forceinline__ Pair(const unsigned char* stage, const Own& own) {
#pragma unroll
        for (int i = 0; i < ONCE; ++i)
#pragma unroll
            for (int m = 0; m < MT; m += 2)
                deal(address(stage + own.middle + m * 16 * PITCH + i * 16), of[i][m][0], of[i][m][1], of[i][m + 1][0],
                     of[i][m + 1][1]);
    }
};

// One block of a pair, for 16 outputs, in the layout of a multiplication.
template <int SECOND>
__device__ __forceinline__ void factor(const unsigned char* stage, const Pair& pair, const Own& own, int m, unsigned (&a)[4]) {
    if constexpr (FORMAT == 8) {
        deal(address(stage + own.ends[SECOND] + m * 16 * PITCH), a[0], a[1], a[2], a[3]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned middle = pair.of[0][m][half], end = a[2 + half];
            a[2 + half] = SECOND ? __byte_perm(middle, end, own.joins[1]) : __byte_perm(end, middle, own.joins[0]);
        }
    } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unsigned both = __byte_perm(pair.of[SECOND][m][half], pair.of[SECOND + (FORMAT == 4)][m][half], own.joins[SECOND]);
            // 16 times the values, as signed bytes.
            a[half] = (both << 4 & own.high) ^ 0x80808080;
            a[2 + half] = (both & own.high) ^ 0x80808080;
        }
    }
}

// A block of x: two words of each eight of rows, and the scales of two rows.
struct Rows {
    unsigned words[NT][2];
    float scales[NT][2];
};

// Reads adjacent words with as few instructions as possible.
template <int N, class T>
__device__ __forceinline__ void read(const unsigned char* from, T* to) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            uint4 four = ((const uint4*)from)[i / 4];
            memcpy(to + i, &four, sizeof(four));
        }
    } else {
        static_assert(N == 2, "words");
        uint2 two = *(const uint2*)from;
        memcpy(to, &two, sizeof(two));
    }
}

// Reads a block of x from a stage.
template <int SECOND>
__device__ __forceinline__ Rows rows_of(const unsigned char* stage, const Own& own) {
    Rows all;
#pragma unroll
    for (int n = 0; n < NT; n += TWO) read<TWO * 2>(stage + own.words_of_x + SECOND * X_BYTES + n * 256, all.words[n]);
    read<NT * 2>(stage + own.scales_of_x + SECOND * X_BYTES, all.scales[0]);
    return all;
}

__device__ __forceinline__ void multiply(int (&to)[4], const unsigned (&a)[4], const unsigned (&b)[2], const int (&start)[4]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, "
        "%13};"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(start[0]), "r"(start[1]), "r"(start[2]),
          "r"(start[3]));
}

// Adds one block of a pair.
template <int SECOND>
__device__ __forceinline__ void add(const unsigned char* stage, const Pair& pair, const Rows& x, const Own& own,
                                    float (&sums)[MT][NT][4]) {
    unsigned a[MT][4];
    float d[MT][2];
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        factor<SECOND>(stage, pair, own, m, a[m]);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            d[m][half] = widen(*(const f16*)(stage + own.scales + SECOND * BYTES + (m * 16 + half * 8) * PITCH));
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        // Subtracts the float that sums start from. That is exact, as it has two significant bits and a scale has 11.
        // An infinite scale gives NaN.
        float away[2] = {-__int_as_float(START) * x.scales[n][0], -__int_as_float(START) * x.scales[n][1]};
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            int to[4];
            multiply(to, a[m], x.words[n], own.start);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // Rounded only once.
                float product = fmaf(__int_as_float(to[i]), x.scales[n][i % 2], away[i % 2]);
                sums[m][n][i] = fmaf(product, d[m][i / 2], sums[m][n][i]);
            }
        }
    }
}

// Multiplies all pieces of a place.
__device__ __forceinline__ void consume(const Place& at, const unsigned char* shared, Stages& stages, const Own& own, Turn& turn,
                                        float (&sums)[MT][NT][4]) {
    for (int i = 0; i < at.count; ++i, turn.skip(1)) {
        wait(&stages.full[turn.stage], turn.parity);
        const unsigned char* from = shared + turn.stage * STAGE;
        Pair pair(from, own);
        add<0>(from, pair, rows_of<0>(from, own), own, sums);
        add<1>(from, pair, rows_of<1>(from, own), own, sums);
        __syncwarp();
        if (PIECE || threadIdx.x % 32 == 0) arrive(&stages.free[turn.stage]);
    }
}

// Rows of sums are padded so that lanes write to different banks.
constexpr int SUMS_PITCH = OUTPUTS + 4;
static_assert(SHARED == STAGES * STAGE + 4 * ROWS * SUMS_PITCH * sizeof(float), "what the host counts");

// Adds the sums of the warps that share outputs, in the first part of `all`.
__device__ __forceinline__ void add_warps(const float (&sums)[MT][NT][4], const Own& own, float* all) {
    float* to = all + threadIdx.x / 32 / SIDES * ROWS * SUMS_PITCH + threadIdx.x / 32 % SIDES * SIDE + own.g;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int row = n * 8 + 2 * own.t + i % 2;
                to[row * SUMS_PITCH + m * 16 + i / 2 * 8] = sums[m][n][i];
            }
    meet_first<THREADS>();
    constexpr int FOURS = ROWS * SUMS_PITCH / 4;
    float4* fours = (float4*)all;
    for (int at = threadIdx.x; at < FOURS; at += THREADS) {
        float4 z = fours[at];
#pragma unroll
        for (int warp = 1; warp < WARPS / SIDES; ++warp) {
            float4 other = fours[warp * FOURS + at];
            z.x += other.x, z.y += other.y, z.z += other.z, z.w += other.w;
        }
        fours[at] = z;
    }
}

// Adds the sums of the blocks of a cluster; each block writes a part. All loads are issued before the first wait.
__device__ __forceinline__ void write(const Tiled& p, const Place& at, const float* all) {
    constexpr int ALL = ROWS * OUTPUTS, EACH = (ALL + SPLIT * THREADS - 1) / (SPLIT * THREADS);
    int first = threadIdx.x + own_part() * THREADS;
    float z[EACH][SPLIT] = {};
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        int i = first + e * SPLIT * THREADS;
#pragma unroll
        for (int part = 0; part < SPLIT; ++part)
            if (i < ALL) z[e][part] = of_part(all + i / OUTPUTS * SUMS_PITCH + i % OUTPUTS, part);
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        int i = first + e * SPLIT * THREADS;
#pragma unroll
        for (int part = 1; part < SPLIT; ++part) z[e][0] += z[e][part];
        i64 row = at.group * (i64)ROWS + i / OUTPUTS, output = at.column * (i64)OUTPUTS + i % OUTPUTS;
        if (i >= ALL || row >= p.rows || output >= p.outputs) continue;
        p.y[row * p.outputs + output] = finished(z[e][0], p.b, output);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCERS, 1) blocks_tile(const __grid_constant__ Tiled p) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Stages stages;
    Place at = place(p, blockIdx.x / SPLIT);
    float* all = (float*)(shared + STAGES * STAGE);
    // Where threads fetch weights, every lane arrives: racecheck does not understand one lane arriving for its warp.
    open(stages, PIECE ? PRODUCERS : 1, PIECE ? THREADS : WARPS);
    if (threadIdx.x >= THREADS) {
        let_others_begin();
        if (PIECE || threadIdx.x == THREADS) fetch_all<SOON>(Producer{p, shared, stages}, false);
    } else {
        Own own;
        Turn turn = {};
        each_place(p, [&](const Place& at) {
            float sums[MT][NT][4] = {};
            consume(at, shared, stages, own, turn, sums);
            // Waits until no thread still reads the previous place's sums.
            meet_first<THREADS>();
            add_warps(sums, own, all);
            meet_first<THREADS>();
            if constexpr (SPLIT == 1) write(p, at, all);
        });
    }
    if constexpr (SPLIT > 1) {
        meet();
        if (threadIdx.x < THREADS) write(p, at, all);
        // A block must not exit while other blocks still read its sums.
        meet();
    }
}

// Products of many rows of bytes with ternary weights, where the device copies planes without using threads (tensor
// maps). It replaces tile.cu on compute capability 9 for planes whose rows are whole units of 16 bytes. A block of
// threads has OUTPUTS outputs and 8 NT rows of x, and takes CHUNK columns at a time. SPLIT blocks, a cluster, share the
// columns. The host gives CHUNK and FN, SHARED (bytes of shared memory), and the macros of tiles.cu and teams.cu.
//
// A lane holds one word of each plane, 32 columns. Two-bit values, sign above magnitude, are moved to the top of bytes.
// So four values take two operations, and are scaled by 64; cells with both bits set still become 0. In turn k, lane t
// of four multiplies columns 8 j + 2 k and 8 j + 2 k + 1 of the t-th 32, for j from 0 to 3. x is stored in that order:
// see Matrices in parts.cu.

// Bytes of a row of a plane in a stage, of a whole plane, of x for one turn, and of a stage (planes, then x).
constexpr int UNITS = CHUNK / 128, WIDTH = CHUNK / 8, PLANE = OUTPUTS * WIDTH, X_BYTES = 32 * ROWS, STAGE = 2 * PLANE + CHUNK * ROWS;
// Values are multiplied by 2^HIGH.
constexpr int HIGH = 6;

__device__ __forceinline__ i64 pieces(const Boxed& p) { return p.of.stride / CHUNK; }

// Fetches pieces of weights and of x.
struct Producer {
    const Boxed& p;
    unsigned char* shared;
    Stages& stages;

    __device__ __forceinline__ void weights(const Place& at, int i, Turn turn) const {
        Barrier* full = begin(stages, turn, STAGE);
        unsigned char* to = shared + turn.stage * STAGE;
#pragma unroll
        for (int plane = 0; plane < 2; plane++)
            copy_box<STREAMED>(to + plane * PLANE, &p.planes[plane], (at.begin + i) * (WIDTH / 2), at.column * OUTPUTS, full);
    }

    // Fetches x for a stage, whose planes are in flight already; after that the stage is full.
    __device__ __forceinline__ void x(const Place& at, int i, Turn turn) const {
        const signed char* from = p.of.bits + (at.group * pieces(p) + at.begin + i) * (CHUNK * ROWS);
        copy_bytes(shared + turn.stage * STAGE + 2 * PLANE, from, CHUNK * ROWS, &stages.full[turn.stage]);
    }
};

// A lane's addresses of weights and x, for the first unit of the first stage.
struct Own {
    Team team;
    int planes;
    unsigned x;

    __device__ __forceinline__ Own(unsigned shared) {
        // For each matrix eight lanes give the row addresses: upper and lower rows of each plane. The tensor map has
        // swizzled units of 16 bytes, so that those of neighbouring rows fall into different banks.
        int lane = threadIdx.x % 32, row = team.output + lane % 16;
        planes = kept(shared + lane / 16 * PLANE + row * WIDTH + row / 2 % 4 * 16);
        x = shared + 2 * PLANE;
    }
};

// Selects bits by `mask`: those of `there` where it is set, else those of `other`.
__device__ __forceinline__ unsigned mixed(unsigned there, unsigned other, unsigned mask) {
    unsigned both;
    // Inline assembly, because the compiler turns the expression into more operations.
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(both) : "r"(there), "r"(other), "r"(mask));
    return both;
}

// A row's 32 columns as four pairs of words, with sixteen values per pair at the top of its bytes.
__device__ __forceinline__ void spread(unsigned plane0, unsigned plane1, unsigned (&a)[4][4], int half) {
    unsigned size = plane0 ^ plane1, sign = plane1 & ~plane0;
    unsigned even = mixed(size, sign << 1, 0x55555555), odd = mixed(size >> 1, sign, 0x55555555);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        a[k][half] = even << (HIGH - 2 * k) & 0xc0c0c0c0;
        a[k][2 + half] = odd << (HIGH - 2 * k) & 0xc0c0c0c0;
    }
}

// A warp's factors for a unit: sixteen outputs, in four turns.
struct Factors {
    unsigned a[4][4];

    __device__ __forceinline__ void make(int stage, const Own& own, int unit) {
        unsigned words[4];
        deal((stage + own.planes) ^ unit * 16, words[0], words[1], words[2], words[3]);
        spread(words[0], words[2], a, 0);
        spread(words[1], words[3], a, 1);
    }
};

// Adds a unit. The registers of the previous unit's factors stay reserved until its multiplications are done.
__device__ __forceinline__ void add(Factors& factors, Factors& before, unsigned x, int unit, int (&sums)[NT][4]) {
    pinned(factors.a);
    multiplications();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply_add(sums, factors.a[k], described(x + (unit * 4 + k) * (X_BYTES / 16)));
    grouped();
    multiplied<1>();
    pinned(before.a);
}

// Adds one stage's piece.
__device__ __forceinline__ void add_piece(int stage, const Own& own, int (&sums)[NT][4]) {
    unsigned x = matrices(own.x + stage);
    Factors factors[2] = {};
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++) {
        factors[unit % 2].make(stage, own, unit);
        add(factors[unit % 2], factors[(unit + 1) % 2], x, unit, sums);
    }
    multiplied<0>();
    pinned(sums);
    pinned(factors[(UNITS - 1) % 2].a);
}

// Partial sums that fit into shared memory: two teams share one.
constexpr int ROOM = (DEEP + 1) / 2;

// A block's partial sums, and the scale and bias of each output.
struct alignas(16) Results {
    int sums[ROOM][SUMS];
    End ends[OUTPUTS];
};

static_assert(SHARED == STAGES * STAGE + sizeof(Results) + sizeof(Stages), "what the host counts");

// Writes four adjacent outputs of a row, as far as they exist.
__device__ __forceinline__ void write(const Params& p, i64 row, i64 out, int4 four, float x_scale, const End* ends) {
    i64 left = row < p.rows ? p.outs - out : 0, at = row * p.outs + out;
    int sums[4] = {four.x, four.y, four.z, four.w};
    struct alignas(4 * sizeof(STORAGE)) Four { STORAGE of[4]; } y;
#pragma unroll
    for (int j = 0; j < 4; j++) y.of[j] = ends[j].of(sums[j], x_scale);
    bool whole = p.y && left >= 4 && (unsigned long long)(p.y + at) % sizeof(y) == 0;
    if (whole) *(Four*)(p.y + at) = y;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (p.acc && j < left) p.acc[at + j] = sums[j];
        if (p.y && !whole && j < left) p.y[at + j] = y.of[j];
    }
}

// Computes one place and writes its results. The loads of scales and biases, per output and per row, are issued before
// the sums are ready.
__device__ __forceinline__ void multiply_place(const Boxed& p, const Place& at, Stages& stages, const Own& own, Turn& turn,
                                               Results& all) {
    static_assert(OUTPUTS <= THREADS && ROWS <= 32, "threads");
    constexpr int WIDE = OUTPUTS / 4, ALL = ROWS * WIDE, STEP = SPLIT * THREADS, COUNT = (ALL + STEP - 1) / STEP;
    int first = own_part() * THREADS + threadIdx.x, lane = threadIdx.x % 32;
    i64 out = at.column * (i64)OUTPUTS + threadIdx.x, own_row = at.group * (i64)ROWS + lane;
    End end;
    if (threadIdx.x < OUTPUTS && out < p.of.outs) end = End(p.of, out);
    float x_scale = lane < ROWS && own_row < p.of.rows ? scale_of(p.of, own_row) : 0;
    int sums[NT][4] = {};
    take_turns(at, stages, own.team, turn, [&](int stage) { add_piece(stage * STAGE, own, sums); });
    turn.skip_all(at.count);
    // Waits until no thread still reads the previous place's results.
    if (SPLIT == 1) meet_first<THREADS>();
    if (threadIdx.x < OUTPUTS) all.ends[threadIdx.x] = end;
    leave_all<ROOM>(sums, own.team, all.sums[0], [](int sum) { return sum >> HIGH; });
    int4 of_all[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        int i = first + k * STEP;
        if (i < ALL) of_all[k] = added<ROOM>((const int4*)all.sums + i / WIDE * (SUMS_PITCH / 4) + i % WIDE);
    }
    __syncwarp();
    if constexpr (SPLIT > 1) done_in_cluster();
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        int i = first + k * STEP, row = i / WIDE, four = i % WIDE * 4;
        float scale = __shfl_sync(0xffffffff, x_scale, row);
        if (i < ALL) write(p.of, at.group * (i64)ROWS + row, at.column * (i64)OUTPUTS + four, of_all[k], scale, all.ends + four);
    }
}

extern "C" __global__ void ternary_box(const __grid_constant__ Boxed p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    if (idle(p)) return;
    // No static shared memory is declared, so that stages start at the alignment that the swizzle above assumes.
    Results& all = *(Results*)(shared + STAGES * STAGE);
    Stages& stages = *(Stages*)(&all + 1);
    auto multiply_all = [&] {
        Own own(address(shared));
        Turn turn = {};
        // The kernel that prepares x writes its scales too.
        wait_for_others();
        each_place(p, [&](const Place& at) { multiply_place(p, at, stages, own, turn, all); });
    };
    fetch_and_multiply<THREADS>(stages, WARPS / DEEP, [&] { fetch_all<STAGES>(Producer{p, shared, stages}, false); }, multiply_all);
}

// Products of many rows of bytes with ternary weights where the device copies planes by itself: instead of tile.cu for compute
// capability 9 and rows of planes of whole 16 bytes. A block of threads has OUTPUTS outputs and 8 NT rows of x, and goes along
// CHUNK columns of each at a time; SIDES teams side by side have 16 MT outputs a warp, and DEEP ones behind one another take
// units of 128 columns in turn. TOGETHER: a team is four warps, which multiply as one and leave x in shared memory; else it is
// a warp.
//
// A lane has a word of each plane, that is 32 columns. Values of two bits, sign above size, are moved to the upper end of
// bytes: so four of them take two operations, are the values 64 times, and both bits set are 0 still. Lane t of four
// multiplies in turn k columns 8 j + 2 k and 8 j + 2 k + 1 of the t-th 32, for j from 0 to 3; x lies in that order, as Matrices
// of rules.cu have it.

constexpr int TEAM = TOGETHER ? 4 : 1, SIDE = 16 * MT * TEAM, OUTPUTS = SIDE * SIDES, WARPS = TEAM * SIDES * DEEP;
constexpr int THREADS = 32 * WARPS, ROWS = 8 * NT, UNITS = CHUNK / 128;
// Bytes of a row of a plane in a stage, of all of them, of the x of one turn, and of a stage: planes, then x.
constexpr int WIDTH = CHUNK / 8, PLANE = OUTPUTS * WIDTH, X_BYTES = 32 * ROWS, STAGE = 2 * PLANE + CHUNK * ROWS;
// Values are multiplied by 2 to this.
constexpr int HIGH = 6;

struct alignas(64) Box {
    unsigned char planes[2][128];  // as the device describes them to itself
    Params of;
    int columns, tiles;  // blocks of outputs, and those of all groups of rows
};

__device__ __forceinline__ i64 pieces(const Box& p) { return p.of.stride / CHUNK; }

// Fetches pieces of weights and of x.
struct Producer {
    const Box& p;
    unsigned char* shared;
    Stages& stages;

    __device__ __forceinline__ void weights(const Place& at, int i, Turn turn) const {
        Barrier* full = &stages.full[turn.stage];
        unsigned char* to = shared + turn.stage * STAGE;
        // At first nobody has to leave.
        wait(&stages.free[turn.stage], turn.parity ^ 1);
        expect(full, STAGE);
#pragma unroll
        for (int plane = 0; plane < 2; plane++)
            copy_box(to + plane * PLANE, p.planes[plane], (int)(at.begin + i) * (WIDTH / 2), (int)at.first, full);
    }

    // The other part of a stage, which makes it full.
    __device__ __forceinline__ void x(const Place& at, int i, Turn turn) const {
        const signed char* from = p.of.bits + (at.group * pieces(p) + at.begin + i) * (CHUNK * ROWS);
        copy_bytes(shared + turn.stage * STAGE + 2 * PLANE, from, CHUNK * ROWS, &stages.full[turn.stage]);
    }

    __device__ __forceinline__ void run() const {
        Turn turn = {};
        bool waited = false;
        each_place<OUTPUTS>(p, [&](const Place& at) { fetch_all<STAGES>(*this, at, waited, turn); });
    }
};

// Where a lane finds weights and x, of its first unit.
struct Own {
    int deep, output, planes, x;

    __device__ __forceinline__ Own() {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / TEAM;
        deep = team / SIDES, output = team % SIDES * SIDE + warp % TEAM * 16;
        // Eight lanes each tell where rows of a plane are, the upper ones and the lower ones. The device has exchanged units of
        // 16 bytes, so that those of neighbours lie in different banks.
        int row = output + lane % 16, units = WIDTH == 128 ? row % 8 : row / 2 % 4;
        planes = kept(lane / 16 * PLANE + row * WIDTH + (units ^ deep) * 16);
        x = kept(2 * PLANE + deep * 4 * X_BYTES + (TOGETHER ? 0 : lane * 16));
    }
};

// How far apart the sixteens of a warp are.
constexpr int APART = 16 * TEAM;

// Bits of one word where the mask has them, else of the other.
__device__ __forceinline__ unsigned mixed(unsigned there, unsigned other, unsigned mask) {
    unsigned both;
    // Not as an expression, of which the compiler makes more operations.
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(both) : "r"(there), "r"(other), "r"(mask));
    return both;
}

// A row's 32 columns as four pairs of words, each of which has sixteen values at the upper end of its bytes.
__device__ __forceinline__ void spread(unsigned plane0, unsigned plane1, unsigned (&a)[4][4], int half) {
    unsigned size = plane0 ^ plane1, sign = plane1 & ~plane0;
    unsigned even = mixed(size, sign << 1, 0x55555555), odd = mixed(size >> 1, sign, 0x55555555);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        a[k][half] = even << (HIGH - 2 * k) & 0xc0c0c0c0;
        a[k][2 + half] = odd << (HIGH - 2 * k) & 0xc0c0c0c0;
    }
}

// What a warp multiplies of a unit: MT sixteens of outputs, in four turns.
struct Factors {
    unsigned a[MT][4][4];

    __device__ __forceinline__ Factors(unsigned stage, const Own& own, int unit) {
#pragma unroll
        for (int m = 0; m < MT; m++) {
            unsigned words[4];
            deal(((stage + own.planes) ^ unit * 16) + m * APART * WIDTH, words[0], words[1], words[2], words[3]);
            spread(words[0], words[2], a[m], 0);
            spread(words[1], words[3], a[m], 1);
        }
    }
};

#if TOGETHER
// Where x lies, as multiplications take it: matrices of 8 rows by 16 bytes, one after the other, of which those of the other
// half of the columns and of the next eight rows are named.
struct Activations {
    unsigned long long at;

    __device__ __forceinline__ Activations(unsigned from) {
        constexpr unsigned OTHER = 128 / 16, NEXT = 256 / 16;
        // The same for all lanes, which the compiler is told so.
        at = __shfl_sync(0xffffffff, from / 16 | OTHER << 16, 0) | (unsigned long long)NEXT << 32;
    }
};

#define SUMS(i) "+r"(to[i][0]), "+r"(to[i][1]), "+r"(to[i][2]), "+r"(to[i][3])

// Registers belong to the multiplications under way until they are waited for.
__device__ __forceinline__ void multiply(int (&to)[NT][4], const unsigned (&a)[4], unsigned long long x) {
    static_assert(NT == 1 || NT == 2 || NT == 4, "eights of rows");
    if constexpr (NT == 1)
        asm volatile("{ .reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, add; }"
                     : SUMS(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
    if constexpr (NT == 2)
        asm volatile("{ .reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, add; }"
                     : SUMS(0), SUMS(NT - 1) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
    if constexpr (NT == 4)
        asm volatile("{ .reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, add; }"
                     : SUMS(0), SUMS(NT / 4), SUMS(NT / 2), SUMS(NT - 1)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

// Waits for all multiplications but those of the latest LEFT units.
template <int LEFT>
__device__ __forceinline__ void multiplied() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

// Registers have their values here, which the compiler would not know of multiplications under way.
template <class T>
__device__ __forceinline__ void pinned(T (&numbers)[4]) {
    asm volatile("" : "+r"(numbers[0]), "+r"(numbers[1]), "+r"(numbers[2]), "+r"(numbers[3])::"memory");
}

// The sums of all units are there.
__device__ __forceinline__ void multiplied(int (&sums)[MT][NT][4]) {
    multiplied<0>();
#pragma unroll
    for (int i = 0; i < MT * NT; i++) pinned(sums[i / NT][i % NT]);
}

__device__ __forceinline__ void add(Factors& factors, const Activations& x, int unit, int (&sums)[MT][NT][4]) {
#pragma unroll
    for (int i = 0; i < MT * 4; i++) pinned(factors.a[i / 4][i % 4]);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int m = 0; m < MT; m++)
            multiply(sums[m], factors.a[m][k], x.at + (unit * 4 + k) * (X_BYTES / 16));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    // The registers of the unit before are written next.
    multiplied<1>();
}
#else
struct Activations {
    unsigned at;

    __device__ __forceinline__ Activations(unsigned from) : at(from) {}
};

__device__ __forceinline__ void multiply(int (&to)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiplied(int (&)[MT][NT][4]) {}

__device__ __forceinline__ void add(const Factors& factors, const Activations& from, int unit, int (&sums)[MT][NT][4]) {
    unsigned x[4 * NT][2];
#pragma unroll
    for (int i = 0; i < 4 * NT; i += 2)
        deal(from.at + unit * 4 * X_BYTES + i * 256, x[i][0], x[i][1], x[i + 1][0], x[i + 1][1]);
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int m = 0; m < MT; m++) multiply(sums[m][n], factors.a[m][k], x[k * NT + n][0], x[k * NT + n][1]);
}
#endif

// Goes along all pieces.
__device__ __forceinline__ void consume(const Place& at, const unsigned char* shared, Stages& stages, const Own& own,
                                        Turn& turn, int (&sums)[MT][NT][4]) {
    for (int i = 0; i < at.count; i++, turn.skip(1)) {
        wait(&stages.full[turn.stage], turn.parity);
        unsigned stage = address(shared) + turn.stage * STAGE;
        Activations x(stage + own.x);
#pragma unroll
        for (int unit = 0; unit < UNITS; unit += DEEP) {
            Factors factors(stage, own, unit);
            add(factors, x, unit, sums);
        }
        multiplied(sums);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&stages.free[turn.stage]);
    }
}

// Sums of rows lie so far apart that lanes write to different banks.
constexpr int SUMS_PITCH = OUTPUTS + 4;

// A warp's sums to where all are added up.
__device__ __forceinline__ void leave(const int (&sums)[MT][NT][4], const Own& own, int* all) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int* to = all + (own.deep * ROWS + 2 * t) * SUMS_PITCH + own.output + g;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                to[(n * 8 + i % 2) * SUMS_PITCH + m * APART + i / 2 * 8] = sums[m][n][i] >> HIGH;
}

// What all parts have of four neighbours.
__device__ __forceinline__ int4 added(const int4* fours) {
    int4 sum = {};
#pragma unroll
    for (int part = 0; part < SPLIT; part++)
#pragma unroll
        for (int deep = 0; deep < DEEP; deep++) {
            int4 other = of_part(fours + deep * (ROWS * SUMS_PITCH / 4), part);
            sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
        }
    return sum;
}

// Four neighbouring outputs of a row, and what becomes of them, which is asked for before they are there.
struct Four {
    i64 row, out;
    int count;
    End ends[4];

    __device__ __forceinline__ Four(const Params& p, i64 row, i64 out) : row(row), out(out) {
        i64 left = row < p.rows ? p.outs - out : 0;
        count = left < 4 ? (int)left : 4;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j < count) ends[j] = End(p, row, out + j);
    }

    __device__ __forceinline__ void finish(const Params& p, int4 four) const {
        int sums[4] = {four.x, four.y, four.z, four.w};
        struct alignas(4 * sizeof(STORAGE)) Results { STORAGE of[4]; } y;
#pragma unroll
        for (int j = 0; j < 4; j++) y.of[j] = ends[j].of(sums[j]);
        i64 at = row * p.outs + out;
        bool whole = p.y && count == 4 && (unsigned long long)(p.y + at) % sizeof(y) == 0;
        if (whole) *(Results*)(p.y + at) = y;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (p.acc && j < count) p.acc[at + j] = sums[j];
            if (p.y && !whole && j < count) p.y[at + j] = y.of[j];
        }
    }
};

// A place, until its results are written.
template <class F>
__device__ __forceinline__ void multiply_place(const Box& p, const Place& at, const unsigned char* shared, int* all,
                                               Stages& stages, const Own& own, Turn& turn, F meet_all) {
    constexpr int WIDE = OUTPUTS / 4, ALL = ROWS * WIDE, STEP = SPLIT * THREADS, COUNT = (ALL + STEP - 1) / STEP;
    int sums[MT][NT][4] = {}, first = own_part() * THREADS + threadIdx.x;
    consume(at, shared, stages, own, turn, sums);
    // The kernel that made x ready made its scales as well.
    wait_for_others();
    auto four_of = [&](int k) {
        int i = first + k * STEP;
        return Four(p.of, i < ALL ? at.group * ROWS + i / WIDE : p.of.rows, at.first + i % WIDE * 4);
    };
    Four next = four_of(0);
    // Nobody reads sums of the place before.
    if (SPLIT == 1) meet_first<THREADS>();
    leave(sums, own, all);
    meet_all();
    int4 of_all[COUNT];
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        int i = first + k * STEP;
        if (i < ALL) of_all[k] = added((const int4*)all + i / WIDE * (SUMS_PITCH / 4) + i % WIDE);
    }
    __syncwarp();
    if constexpr (SPLIT > 1) done_in_cluster();
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        Four four = next;
        if (k + 1 < COUNT) next = four_of(k + 1);
        if (four.count > 0) four.finish(p.of, of_all[k]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) ternary_box(const __grid_constant__ Box p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    int* all = (int*)(shared + STAGES * STAGE);
    // Nothing is declared, so that stages begin where the device exchanges units as told above.
    Stages& stages = *(Stages*)(all + DEEP * ROWS * SUMS_PITCH);
    open(stages, 1, WARPS);
    if (threadIdx.x >= THREADS) {
        let_others_begin();
        if (threadIdx.x == THREADS) Producer{p, shared, stages}.run();
        __syncwarp();
        if constexpr (SPLIT > 1) meet_in_cluster(), done_in_cluster();
    } else {
        Own own;
        Turn turn = {};
        auto meet_all = [] {
            if constexpr (SPLIT > 1) meet(); else meet_first<THREADS>();
        };
        each_place<OUTPUTS>(p, [&](const Place& at) { multiply_place(p, at, shared, all, stages, own, turn, meet_all); });
    }
    // Nobody leaves whose sums are still read.
    __syncwarp();
    if constexpr (SPLIT > 1) wait_for_cluster();
}

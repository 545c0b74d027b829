// Products of many rows of bytes with ternary weights on tensor cores; rows of planes must be whole units of 16 bytes.
// A block of threads has 8 NT rows of activations, and SIDE rows of weights in each of SIDES warps side by side. GROUPS
// of these warps, in each of CLUSTER blocks of a cluster, take chunks of CHUNK columns in turn and add up at the end. A
// thread reads planes straight from memory, two chunks ahead, and makes codes of them. Activations, which all warps of
// a group need, come through shared memory, STAGES - 1 chunks ahead.

constexpr int MT = SIDE / 16, OUTS = SIDES * SIDE, GROUP = 32 * SIDES, THREADS = GROUP * GROUPS, ROWS = 8 * NT;
constexpr int PARTS = GROUPS * CLUSTER;
// 16-byte units of activations per chunk.
constexpr int UNITS = ROWS * CHUNK / 16;
static_assert(SHARED == 16 * GROUPS * STAGES * UNITS, "what the host counts");
static_assert(SHARED >= GROUPS * ROWS * OUTS * sizeof(int), "sums reuse the memory of the stages");

// A thread's rows of planes, starting at its columns of the first chunk.
struct Planes {
    const unsigned char* of[MT][2][2];
    i64 left;

    __device__ __forceinline__ Planes(const Params& p, i64 first) {
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        i64 bytes = (p.n + 7) / 8;
        left = bytes - t * 16;
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                i64 out = first + m * 16 + half * 8 + g;
                // Rows past the last one repeat it, and are not written.
                i64 from = (out < p.outs ? out : p.outs - 1) * bytes + t * 16;
                of[m][half][0] = p.planes[0] + from;
                of[m][half][1] = p.planes[1] + from;
            }
    }
};

struct Weights {
    uint4 planes[MT][2][2];
};

// Columns past the end of a row are multiplied with zeros in x.
__device__ __forceinline__ Weights weights_of(const Planes& from, i64 chunk) {
    i64 at = chunk * (CHUNK / 8);
    bool there = at < from.left;
    Weights all;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int plane = 0; plane < 2; plane++)
                all.planes[m][half][plane] = there ? asked(from.of[m][half][plane] + at) : make_uint4(0, 0, 0, 0);
    return all;
}

__device__ __forceinline__ void multiply(int (&to)[4], int a0, int a1, int a2, int a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Starts the copies of a group's x for a chunk.
__device__ __forceinline__ void fetch(const Params& p, i64 tiles, i64 chunk, uint4* stage) {
    const uint4* from = (const uint4*)p.bits + (chunk * tiles + blockIdx.y * (i64)NT) * (8 * CHUNK / 16);
    for (int at = threadIdx.x % GROUP; at < UNITS; at += GROUP)
        copy16(stage + at, from + at);
}

// Waits until all but the latest LEFT chunks have arrived, for all groups, and until all are done with earlier ones. A
// barrier per group would be 1 to 2% faster, but race checkers do not follow it.
template <int LEFT>
__device__ __forceinline__ void arrived() {
    copied<LEFT>();
    __syncthreads();
}

// Separates codes: byte j of code b is that of cell 8 j + b.
__device__ __forceinline__ void codes(uint2 pairs, int (&to)[8]) {
#pragma unroll
    for (int b = 0; b < 8; b += 2) {
        to[b] = pairs.x >> b & 0x03030303;
        to[b + 1] = pairs.y >> b & 0x03030303;
    }
}

// Adds 128 columns of each row: word `which` of a thread's four.
__device__ __forceinline__ void add_words(const Weights& weights, const uint4* x, int which, int (&sums)[MT][NT][4]) {
    int of[MT][2][8];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4(&planes)[2] = weights.planes[m][half];
            codes(pairs(pick(planes[0], which), pick(planes[1], which)), of[m][half]);
        }
#pragma unroll
    for (int n = 0; n < NT; n++) {
        uint4 low = x[(n * 8 + which * 2) * 32], high = x[(n * 8 + which * 2 + 1) * 32];
        unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int b = 0; b < 8; b += 2)
                multiply(sums[m][n], of[m][0][b], of[m][1][b], of[m][0][b + 1], of[m][1][b + 1], words[b], words[b + 1]);
    }
}

// Cluster barrier in two halves: `done` says that this block's earlier accesses are over, `all_done` waits for those of
// all blocks.
__device__ __forceinline__ void done() {
    if constexpr (CLUSTER > 1) done_in_cluster();
}
__device__ __forceinline__ void all_done() {
    if constexpr (CLUSTER > 1) wait_for_cluster();
}

__device__ __forceinline__ int there(const int* here, int block) {
    if constexpr (CLUSTER > 1) return of_block(here, block);
    return *here;
}

extern "C" __global__ void __launch_bounds__(THREADS) ternary_tile(Params p) {
    extern __shared__ __align__(16) unsigned char shared[];
    int group = threadIdx.x / GROUP, warp = threadIdx.x % GROUP / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int block = blockIdx.x % CLUSTER, part = block * GROUPS + group;
    uint4* stages = (uint4*)shared + group * STAGES * UNITS;
    i64 tiles = (p.rows + ROWS - 1) / ROWS * NT, chunks = p.stride / CHUNK;
    i64 side = blockIdx.x / CLUSTER, first = side * OUTS + warp * SIDE;
    Planes planes(p, first);
    Weights next = weights_of(planes, part), after = weights_of(planes, part + PARTS);
    wait_for_others();
    let_others_begin();
    for (int stage = 0; stage < STAGES - 1; stage++) {
        i64 chunk = part + stage * PARTS;
        if (chunk < chunks) fetch(p, tiles, chunk, stages + stage * UNITS);
        commit();
    }
    int sums[MT][NT][4] = {};
    int turns = (int)((chunks + PARTS - 1) / PARTS);
    for (int turn = 0; turn < turns; turn++) {
        i64 chunk = part + turn * (i64)PARTS;
        Weights weights = next;
        next = after;
        after = weights_of(planes, chunk + 2 * PARTS);
        arrived<STAGES - 2>();
        i64 ahead = chunk + (STAGES - 1) * PARTS;
        if (ahead < chunks) fetch(p, tiles, ahead, stages + (turn + STAGES - 1) % STAGES * UNITS);
        commit();
        if (chunk >= chunks) continue;
#pragma unroll
        for (int which = 0; which < 4; which++) add_words(weights, stages + turn % STAGES * UNITS + lane, which, sums);
    }
    // The sums of all groups reuse the memory of the activations.
    copied<0>();
    __syncthreads();
    int* all = (int*)shared;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int out = warp * SIDE + m * 16 + i / 2 * 8 + g, row = n * 8 + 2 * t + i % 2;
                all[(group * ROWS + row) * OUTS + out] = sums[m][n][i];
            }
    __syncthreads();
    done();
    all_done();
    auto sum_of = [&](int at) {
        int sum = 0;
#pragma unroll
        for (int other = 0; other < PARTS; other++)
            sum += there(all + other % GROUPS * ROWS * OUTS + at, other / GROUPS);
        return sum;
    };
    finish_all<ROWS, OUTS, CLUSTER * THREADS>(p, side, block * THREADS + threadIdx.x, sum_of, done);
    // A block must not exit while other blocks read its sums.
    all_done();
}

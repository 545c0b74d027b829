// Few queries over many keys, as in decoding. Memory is the limit: all multiprocessors together read keys and values
// once. After common.cu, score.cu and pack.cu. cuda/few.rs chooses the macros:
//   LANES        lanes that share a row, VEC elements at a time
//   PACKS, VALUE_PACKS   packs of a key, and of a value, per lane
//   ROWS         query rows of a block, from all heads that read its key head
//   TOGETHER     keys that a crew processes at a time
//   WARPS, STAGES   warps of a block, and pipeline stages, including the one being processed
//   COPY         the size of a pack, or 0 where it has no asynchronous copy
//   KEPT         the offset in shared memory of a block's results
//   HAS_MASK, HAS_BIAS   whether the call has these inputs
//
// A block processes a part of a head's keys (split-K). Its lanes form crews of LANES, each of which has keys and an
// online softmax of its own. These are joined at the end, and then those of all parts (parts.cu), in an order that
// depends on the sizes alone. Keys and values go through shared memory, since there are not enough registers for the
// loads in flight: STAGES times TOGETHER keys, one stage of which is being processed. A lane reads only data that it
// copied itself, so lanes need not synchronize.

constexpr int THREADS = 32 * WARPS, CREWS = THREADS / LANES;
constexpr int HELD = PACKS * VEC, VALUES = VALUE_PACKS * VEC, ALL_PACKS = PACKS + VALUE_PACKS;

// The state of a query's online softmax.
struct Softmax {
    REAL top, total, sums[VALUES];

    __device__ __forceinline__ void clear() {
        top = hidden(), total = 0;
#pragma unroll
        for (int e = 0; e < VALUES; ++e) sums[e] = 0;
    }

    // Raises the maximum to at least `highest` and rescales the sums; returns the shift of scores.
    __device__ __forceinline__ REAL raise(REAL highest) {
        highest = largest(highest, top);
        // A query without visible keys so far has no maximum to subtract.
        REAL by = highest == hidden() ? (REAL)0 : highest, fade = exp2_fast((top - by) * (REAL)LOG2_E);
        top = highest, total *= fade;
#pragma unroll
        for (int e = 0; e < VALUES; ++e) sums[e] *= fade;
        return by;
    }

    __device__ __forceinline__ void join(REAL other_top, REAL other_total, const REAL (&other_sums)[VALUES]) {
        REAL weight = exp2_fast((other_top - raise(other_top)) * (REAL)LOG2_E);
        total = fma(weight, other_total, total);
#pragma unroll
        for (int e = 0; e < VALUES; ++e) sums[e] = fma(weight, other_sums[e], sums[e]);
    }

    // Joins the states of the warp's crews; all lanes get the result.
    __device__ __forceinline__ void join_warp() {
#pragma unroll
        for (int apart = LANES; apart < 32; apart *= 2) {
            REAL theirs[VALUES], their_top = __shfl_xor_sync(0xffffffff, top, apart);
            REAL their_total = __shfl_xor_sync(0xffffffff, total, apart);
#pragma unroll
            for (int e = 0; e < VALUES; ++e) theirs[e] = __shfl_xor_sync(0xffffffff, sums[e], apart);
            join(their_top, their_total, theirs);
        }
    }
};

// The column of a lane's element `e`.
__device__ __forceinline__ int column(int e) { return (e / VEC * LANES + threadIdx.x % LANES) * VEC + e % VEC; }

extern __shared__ __align__(16) unsigned char shared[];

// Where a lane keeps pack `i` of key `u` of a stage; packs from PACKS on are those of the value.
__device__ __forceinline__ Pack* kept(int stage, int u, int i) {
    return (Pack*)shared + ((stage * TOGETHER + u) * ALL_PACKS + i) * THREADS + threadIdx.x;
}

// Queues copies of a lane's packs of a row, with zeros past its end.
template <int FIRST, int COUNT>
__device__ __forceinline__ void queue(int stage, int u, const STORAGE* row, int width) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        bool there = column(i * VEC) < width;
        const STORAGE* from = row + (there ? column(i * VEC) : 0);
#if COPY
        copy_or_zero(shared_address(kept(stage, u, FIRST + i)), from, there);
#else
        *kept(stage, u, FIRST + i) = there ? *(const Pack*)from : Pack{};
#endif
    }
}

template <int FIRST, int COUNT>
__device__ __forceinline__ void take(int stage, int u, REAL (&to)[COUNT * VEC]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        REAL some[VEC];
        widen(*kept(stage, u, FIRST + i), some);
#pragma unroll
        for (int e = 0; e < VEC; ++e) to[i * VEC + e] = some[e];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, sizeof(REAL) == 4 ? 4 : 1) attention_few(Params p) {
    int part = blockIdx.x % p.parts, rest = blockIdx.x / p.parts;
    int row = rest % p.tiles * ROWS, key_head = rest / p.tiles % p.key_heads, batch = rest / p.tiles / p.key_heads;
    int sharing = p.heads / p.key_heads, rows = sharing * p.queries, crew = threadIdx.x / LANES;
    const STORAGE* keys = p.k + start(p.k_at, batch, key_head);
    const STORAGE* values = p.v + start(p.v_at, batch, key_head);

    REAL q[ROWS][HELD];
    Softmax of[ROWS];
    int head[ROWS], query[ROWS], end = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        // Rows past the last one repeat it: its results are written twice, with equal values.
        int at = least(row + i, rows - 1);
        head[i] = key_head * sharing + at / p.queries, query[i] = at % p.queries;
        end = most(end, visible(p, query[i]));
        const STORAGE* from = p.q + start(p.q_at, batch, head[i]) + query[i] * p.q_at.row;
#pragma unroll
        for (int e = 0; e < HELD; ++e) q[i][e] = column(e) < p.width ? widen(from[column(e)]) : 0;
        of[i].clear();
    }

    int first = (i64)part * p.keys / p.parts, last = least((i64)(part + 1) * p.keys / p.parts, end);
    auto queue_keys = [&](int stage, int j) {
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
            int key = j + u * CREWS;
            bool there = key < last;
            queue<0, PACKS>(stage, u, keys + (there ? key * p.k_at.row : 0), there ? p.width : 0);
            queue<PACKS, VALUE_PACKS>(stage, u, values + (there ? key * p.v_at.row : 0), there ? p.value_width : 0);
        }
        end_group();
    };
    constexpr int STEP = CREWS * TOGETHER;
#pragma unroll
    for (int ahead = 0; ahead < STAGES - 1; ++ahead) queue_keys(ahead, first + crew + ahead * STEP);
    int stage = 0;
    // All lanes of a warp must have equally many iterations, since they exchange values.
    for (int j = first + crew; j - crew < last; j += STEP) {
        queue_keys(stage ? stage - 1 : STAGES - 1, j + (STAGES - 1) * STEP);
        wait_groups<STAGES - 1>();
        REAL s[ROWS][TOGETHER];
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
            REAL k[HELD];
            take<0, PACKS>(stage, u, k);
            int key = j + u * CREWS;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                REAL product = 0;
#pragma unroll
                for (int e = 0; e < HELD; ++e) product = fma(q[i][e], k[e], product);
#pragma unroll
                for (int apart = LANES / 2; apart; apart /= 2) product += __shfl_xor_sync(0xffffffff, product, apart);
                s[i][u] = key < last ? score(p, {0, batch, head[i]}, query[i], key, product) : hidden();
            }
        }
        REAL by[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            REAL highest = hidden();
#pragma unroll
            for (int u = 0; u < TOGETHER; ++u) highest = largest(s[i][u], highest);
            by[i] = of[i].raise(highest);
        }
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
            REAL v[VALUES];
            take<PACKS, VALUE_PACKS>(stage, u, v);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                // The value of a masked key, which may be NaN, must not reach the output.
                if (s[i][u] == hidden()) continue;
                REAL weight = exp2_fast((s[i][u] - by[i]) * (REAL)LOG2_E);
                of[i].total += weight;
#pragma unroll
                for (int e = 0; e < VALUES; ++e) of[i].sums[e] = fma(weight, v[e], of[i].sums[e]);
            }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    // From here on the memory holds sums.
    wait_groups<0>();
    __syncthreads();
    REAL(*sums)[ROWS][VALUES * LANES + 2] = (REAL(*)[ROWS][VALUES * LANES + 2])shared;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        of[i].join_warp();
        if (lane < LANES) {
            REAL* to = sums[warp][i];
            to[0] = of[i].top, to[1] = of[i].total;
#pragma unroll
            for (int e = 0; e < VALUES; ++e) to[2 + e * LANES + lane] = of[i].sums[e];
        }
    }
    __syncthreads();
    REAL* kept = (REAL*)(shared + KEPT);
#pragma unroll
    for (int i = 0; i < ROWS && threadIdx.x < LANES; ++i) {
        for (int other = 1; other < WARPS; ++other) {
            const REAL* from = sums[other][i];
            REAL theirs[VALUES];
#pragma unroll
            for (int e = 0; e < VALUES; ++e) theirs[e] = from[2 + e * LANES + lane];
            of[i].join(from[0], from[1], theirs);
        }
        REAL* to = result(p, kept, i, ((i64)batch * p.heads + head[i]) * p.queries + query[i], part);
        if (lane == 0) to[0] = of[i].top, to[1] = of[i].total;
#pragma unroll
        for (int e = 0; e < VALUES; ++e)
            if (column(e) < p.value_width) to[2 + column(e)] = of[i].sums[e];
    }
#if JOINED
    join_rows(least(ROWS, rows - row), part, p.parts, [&](int i) {
        int at = row + i;
        join_row(p, kept + i * apart(p), batch, key_head * sharing + at / p.queries, at % p.queries);
    });
#endif
}

// Few queries over many keys, as decoding has them: what counts is that all multiprocessors read keys and
// values, each once. After common.cu, score.cu and pack.cu. cuda/few.rs chooses the macros:
//   LANES        lanes that have a row together, VEC elements at a time
//   PACKS, VALUE_PACKS   packs of a key, and of a value, that a lane holds
//   ROWS         queries that a block has, of all heads that read its head of keys
//   HAS_MASK, HAS_BIAS   what the call has
//
// A block has a part of a head's keys. Its lanes fall into crews of LANES, each of which goes through keys of
// its own with an online softmax of its own; these are joined at the end, and those of all parts by a second
// kernel, in an order that depends on the sizes alone.

constexpr int WARPS = 4, CREWS = 32 / LANES * WARPS;
// Keys whose loads a crew has under way.
constexpr int TOGETHER = 4;
constexpr int HELD = PACKS * VEC, VALUES = VALUE_PACKS * VEC;

// What is known of a query after some keys.
struct Softmax {
    REAL top, total, sums[VALUES];

    __device__ __forceinline__ void clear() {
        top = hidden(), total = 0;
#pragma unroll
        for (int e = 0; e < VALUES; ++e) sums[e] = 0;
    }

    // Makes room for scores up to `highest`; gives what they are to be shifted by.
    __device__ __forceinline__ REAL raise(REAL highest) {
        highest = largest(highest, top);
        // Who has seen nothing yet has no top to be shifted by.
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

    // Joins what the other crews of the warp have; all of them then have all of it.
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

// The element of a row that a lane has at `e` of what it holds.
__device__ __forceinline__ int column(int e) { return (e / VEC * LANES + threadIdx.x % LANES) * VEC + e % VEC; }

template <int COUNT>
__device__ __forceinline__ void load_row(Pack (&to)[COUNT], const STORAGE* row, int width) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i] = load(row, column(i * VEC), width);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) attention_few(Params p) {
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
        // Rows that there are not are the last again, which is then written twice, with the same.
        int at = least(row + i, rows - 1);
        head[i] = key_head * sharing + at / p.queries, query[i] = at % p.queries;
        end = most(end, visible(p, query[i]));
        Pack packs[PACKS];
        load_row(packs, p.q + start(p.q_at, batch, head[i]) + query[i] * p.q_at.row, p.width);
#pragma unroll
        for (int e = 0; e < HELD; ++e) q[i][e] = widen(packs[e / VEC].of[e % VEC]);
        of[i].clear();
    }

    int first = (i64)part * p.keys / p.parts, last = least((i64)(part + 1) * p.keys / p.parts, end);
    // All lanes of a warp go round equally often, for they talk to each other.
    for (int j = first + crew; j - crew < last; j += CREWS * TOGETHER) {
        Pack k[TOGETHER][PACKS], v[TOGETHER][VALUE_PACKS];
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
            int key = j + u * CREWS;
            load_row(k[u], keys + key * p.k_at.row, key < last ? p.width : 0);
            load_row(v[u], values + key * p.v_at.row, key < last ? p.value_width : 0);
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            REAL s[TOGETHER], highest = hidden();
#pragma unroll
            for (int u = 0; u < TOGETHER; ++u) {
                REAL product = 0;
#pragma unroll
                for (int e = 0; e < HELD; ++e) product = fma(q[i][e], (REAL)widen(k[u][e / VEC].of[e % VEC]), product);
#pragma unroll
                for (int apart = LANES / 2; apart; apart /= 2) product += __shfl_xor_sync(0xffffffff, product, apart);
                int key = j + u * CREWS;
                s[u] = key < last ? score(p, {0, batch, head[i]}, query[i], key, product) : hidden();
                highest = largest(s[u], highest);
            }
            REAL by = of[i].raise(highest);
#pragma unroll
            for (int u = 0; u < TOGETHER; ++u) {
                REAL weight = exp2_fast((s[u] - by) * (REAL)LOG2_E);
                of[i].total += weight;
                // What a hidden key has for a value must not come out, be it NaN.
                if (s[u] == hidden()) continue;
#pragma unroll
                for (int e = 0; e < VALUES; ++e)
                    of[i].sums[e] = fma(weight, (REAL)widen(v[u][e / VEC].of[e % VEC]), of[i].sums[e]);
            }
        }
    }

    __shared__ REAL shared[WARPS][ROWS][VALUES * LANES + 2];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        of[i].join_warp();
        if (lane < LANES) {
            REAL* to = shared[warp][i];
            to[0] = of[i].top, to[1] = of[i].total;
#pragma unroll
            for (int e = 0; e < VALUES; ++e) to[2 + e * LANES + lane] = of[i].sums[e];
        }
    }
    __syncthreads();
    if (threadIdx.x >= LANES) return;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        for (int other = 1; other < WARPS; ++other) {
            const REAL* from = shared[other][i];
            REAL theirs[VALUES];
#pragma unroll
            for (int e = 0; e < VALUES; ++e) theirs[e] = from[2 + e * LANES + lane];
            of[i].join(from[0], from[1], theirs);
        }
        i64 at = (((i64)batch * p.heads + head[i]) * p.queries + query[i]) * p.parts + part;
        REAL* to = p.delta + at * (p.value_width + 2);
        if (lane == 0) to[0] = of[i].top, to[1] = of[i].total;
#pragma unroll
        for (int e = 0; e < VALUES; ++e)
            if (column(e) < p.value_width) to[2 + column(e)] = of[i].sums[e];
    }
}

// What does not depend on states where each key has a decay: q with the decays from the start of the chunk and scale, k
// with those to its end, the decays of the chunk, and P. A block for each chunk of a head.
// Limit: memory, since g, q and k pass through it once; the products of near steps keep it from that.

struct Shared {
    STORAGE q[CHUNK * KEY_APART], k[CHUNK * KEY_APART], scores[CHUNK * STEP_APART];
    Decays<KEYS> decays;
};

// A warp has NEAR steps. Eight neighbouring threads share a row of their products, then the row as far from the end, which
// together have as many products for each of them. A thread has EACH keys, in fours.
constexpr int SHARE = 32 / (NEAR / 2), EACH = KEYS / SHARE;
static_assert(THREADS / 32 * NEAR == CHUNK, "warps have all steps");
__device__ __forceinline__ int own_key(int four) { return 4 * (threadIdx.x % SHARE + SHARE * four); }

__device__ __forceinline__ void load_own(float (&to)[EACH], const STORAGE* row) {
#pragma unroll
    for (int i = 0; i < EACH; i += 4) {
        int2 four = *(const int2*)(row + own_key(i / 4));
        widen((const STORAGE*)&four.x, to[i], to[i + 1]);
        widen((const STORAGE*)&four.y, to[i + 2], to[i + 3]);
    }
}

// The products of near steps. From each step to the one before it, q takes one decay more.
__device__ __forceinline__ void find_near(Shared& shared, float scale) {
    int begin = warp() * NEAR, pair = threadIdx.x % 32 / SHARE;
    int row = begin + pair, column = row;
    float q[EACH];
    load_own(q, shared.q + row * KEY_APART);
#pragma unroll 1
    for (int i = 0; i <= NEAR; i++) {
        float k[EACH], sum = 0;
        load_own(k, shared.k + column * KEY_APART);
#pragma unroll
        for (int i = 0; i < EACH; i += 4) {
            float4 decay = *(const float4*)(shared.decays.step[column] + own_key(i / 4));
#pragma unroll
            for (int e = 0; e < 4; e++) {
                sum = fmaf(q[i + e], k[i + e], sum);
                q[i + e] *= (&decay.x)[e];
            }
        }
#pragma unroll
        for (int distance = 1; distance < SHARE; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        if (threadIdx.x % SHARE == 0) narrow(scale * sum, shared.scores[row * STEP_APART + column]);
        if (column-- > begin) continue;
        row = column = begin + NEAR - 1 - pair;
        load_own(q, shared.q + row * KEY_APART);
    }
}

// A pair of factors times the decays of two keys from one step to another.
__device__ __forceinline__ unsigned decayed(unsigned pair, const Shared& shared, int from, int to, int key) {
    float2 first = *(const float2*)(shared.decays.log[from] + key), last = *(const float2*)(shared.decays.log[to] + key);
    return weighted(pair, exp2_fast(last.x - first.x), exp2_fast(last.y - first.y));
}

// The products of the steps of a tile from `rows` on and those of an earlier one from `columns` on; with SAME_TILE, of the
// later and the earlier half of a tile.
template <bool SAME_TILE>
__device__ __forceinline__ void find_far(Shared& shared, int rows, int columns, float scale) {
    int boundary = columns + (SAME_TILE ? NEAR : TILE) - 1;
    unsigned q_at = left_at<KEY_APART>(shared.q + rows * KEY_APART), k_at = right_at<KEY_APART>(shared.k + columns * KEY_APART);
    Sums sums[1][TILE / 8];
    clear(sums);
#pragma unroll 2
    for (int d = 0; d < KEYS; d += 16) {
        Left q, k;
        load_tiles(q, q_at + 2 * d);
        load_tiles(k, k_at + 2 * d);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            // Elements 0 and 2 of q are of the earlier half of its steps, 2 and 3 of k of the later.
            if (SAME_TILE && e % 2 == 0) q[e] = 0;
            else q[e] = decayed(q[e], shared, boundary, rows + sum_row(0, e % 2), d + sum_column(e / 2));
            if (SAME_TILE && e >= 2) continue;
            k[e] = decayed(k[e], shared, columns + sum_row(0, e / 2), boundary, d + sum_column(e % 2));
        }
        multiply_add(sums[0][0], q, k[0], k[1]);
        if (!SAME_TILE) multiply_add(sums[0][1], q, k[2], k[3]);
    }
#pragma unroll
    for (int n = 0; n < (SAME_TILE ? 1 : 2); n++)
#pragma unroll
        for (int half = SAME_TILE; half < 2; half++)
            *(unsigned*)(shared.scores + (rows + sum_row(0, half)) * STEP_APART + columns + sum_column(n)) =
                pack(scale * sums[0][n][2 * half], scale * sums[0][n][2 * half + 1]);
}

// The products of all steps that are not near: six pairs of tiles, and the halves of four tiles.
__device__ __forceinline__ void find_all_far(Shared& shared, float scale) {
    static_assert(CHUNK / TILE == 4 && THREADS / 32 == 8, "each warp has a pair of tiles, or two tiles");
    if (warp() < 6) {
        int later = warp() < 1 ? 1 : warp() < 3 ? 2 : 3, earlier = warp() - later * (later - 1) / 2;
        find_far<false>(shared, later * TILE, earlier * TILE, scale);
        return;
    }
#pragma unroll 1
    for (int tile = warp() - 6; tile < 4; tile += 2) find_far<true>(shared, tile * TILE, tile * TILE, scale);
}

// Writes rows of keys, each key times its factor.
template <class Factor>
__device__ __forceinline__ void write_keys(STORAGE* to, const STORAGE* rows, const Params& p, const Chunk& at, Factor of) {
    to += at.of_head(p) * p.keys;
    for (int unit = threadIdx.x; unit < CHUNK * KEYS / 8; unit += THREADS) {
        int step = unit / (KEYS / 8), key = unit % (KEYS / 8) * 8;
        if (step >= at.left() || key >= p.keys) continue;
        int4 eight = *(const int4*)(rows + step * KEY_APART + key);
#pragma unroll
        for (int e = 0; e < 4; e++)
            ((unsigned*)&eight)[e] = weighted(((unsigned*)&eight)[e], of(step, key + 2 * e), of(step, key + 2 * e + 1));
        *(int4*)(to + (i64)step * p.heads * p.keys + key) = eight;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) matrix_state_by_key(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *(Shared*)memory;
    const Decays<KEYS>& decays = shared.decays;
    Chunk at(p, blockIdx.x);
    copy_keys(shared.q, p.q, p, at);
    copy_keys(shared.k, p.k, p, at);
    commit();
    for (int i = threadIdx.x; i < CHUNK * STEP_APART / 8; i += THREADS) ((int4*)shared.scores)[i] = {};
    shared.decays.load(p, at, 0);
    copied<0>();
    __syncthreads();
    find_near(shared, p.scale);
    find_all_far(shared, p.scale);
    write_keys(p.by_key[0], shared.q, p, at, [&](int step, int key) { return (float)p.scale * decays.between(-1, step, key); });
    write_keys(p.by_key[1], shared.k, p, at, [&](int step, int key) { return decays.between(step, CHUNK - 1, key); });
    if (threadIdx.x < KEYS) ((Factors*)p.factors)[at.id(p)].log[threadIdx.x] = decays.log[CHUNK - 1][threadIdx.x];
    __syncthreads();
    STORAGE* to = p.scores + at.id(p) * SQUARE;
    for (int i = threadIdx.x; i < SQUARE / 8; i += THREADS)
        ((int4*)to)[i] = *(const int4*)(shared.scores + i / (CHUNK / 8) * STEP_APART + i % (CHUNK / 8) * 8);
}

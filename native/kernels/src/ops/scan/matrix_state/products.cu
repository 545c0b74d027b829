// The sums over a chunk's values from which the gradients of its steps follow. A warp has 16 steps, and a part of the keys
// or of the other steps.
//   PART     keys of a block
//   WIDTH    values of a stage
//   GROUPED  whether heads share q and k: then their gradients are written for each head, in f32, that of q without scale

// Warps that share 16 steps, and threads that share one in other sums.
constexpr int SPLIT = THREADS * 16 / 32 / CHUNK, SHARE = THREADS / CHUNK;
constexpr int OWN_KEYS = PART / SPLIT, OWN_SCORES = CHUNK / SPLIT;
constexpr int PART_APART = PART + 8;

struct Stage {
    STORAGE dy[CHUNK * VALUE_APART], u[CHUNK * VALUE_APART];
    STORAGE dz[OF_DELTA<CHUNK * VALUE_APART>], v[OF_DELTA<CHUNK * VALUE_APART>];
    STORAGE before[PART * VALUE_APART], after[PART * VALUE_APART];
};

// The sum over the first COUNT neighbouring threads, in all of them.
template <int COUNT>
__device__ __forceinline__ float sum_over(float sum) {
#pragma unroll
    for (int distance = 1; distance < COUNT; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

typedef Sums Keys[1][OWN_KEYS / 8];
typedef Sums Squares[1][OWN_SCORES / 8];

__device__ __forceinline__ int own_step() { return warp() % 4 * 16; }
__device__ __forceinline__ int own_part() { return warp() / 4; }

// Queues copies of a block of values, and of the states of keys from `first_key` on, as one group.
__device__ __forceinline__ void fetch(Stage& stage, const Params& p, const Chunk& at, int first, int first_key = 0) {
    i64 rows = at.values(p) + first, stride = (i64)p.heads * p.values;
    int left = at.left() < CHUNK ? at.left() : CHUNK, width = p.values - first;
    copy_rows<WIDTH / 8, VALUE_APART>(stage.dy, p.dy + rows, stride, left, width);
    copy_rows<WIDTH / 8, VALUE_APART>(stage.u, (DELTA ? p.inputs : p.v) + rows, stride, left, width);
    if (DELTA) {
        copy_rows<WIDTH / 8, VALUE_APART>(stage.dz, p.dz + rows, stride, left, width);
        copy_rows<WIDTH / 8, VALUE_APART>(stage.v, p.v + rows, stride, left, width);
    }
    i64 state = (at.id(p) * p.keys + first_key) * p.values + first;
#pragma unroll
    for (int key = 0; key < PART; key += CHUNK) {
        i64 from = state + (i64)key * p.values;
        copy_rows<WIDTH / 8, VALUE_APART>(stage.before + key * VALUE_APART, p.before + from, p.values, p.keys - first_key - key, width);
        copy_rows<WIDTH / 8, VALUE_APART>(stage.after + key * VALUE_APART, p.after + from, p.values, p.keys - first_key - key, width);
    }
    commit();
}

// A warp's sums over values.
struct Products {
    Keys dy_before, dz_before, u_after;
    Squares dy_u, dz_u;
};

__device__ __forceinline__ void add(Products& to, const Stage& stage) {
    auto left = [&](const STORAGE* rows) { return left_at<VALUE_APART>(rows + own_step() * VALUE_APART); };
    unsigned dy_at = left(stage.dy), dz_at = left(stage.dz), u_at = left(stage.u);
    unsigned before = right_at<VALUE_APART>(stage.before + own_part() * OWN_KEYS * VALUE_APART);
    unsigned after = right_at<VALUE_APART>(stage.after + own_part() * OWN_KEYS * VALUE_APART);
    unsigned others = right_at<VALUE_APART>(stage.u + own_part() * OWN_SCORES * VALUE_APART);
#pragma unroll
    for (int d = 0; d < WIDTH; d += 16) {
        Left dy, dz, u;
        load_tiles(dy, dy_at + 2 * d);
        if (DELTA) load_tiles(dz, dz_at + 2 * d);
        load_tiles(u, u_at + 2 * d);
#pragma unroll
        for (int n = 0; n < OWN_KEYS; n += 16) {
            unsigned right[4], other[4];
            load_tiles(right, before + 2 * (n * VALUE_APART + d));
            load_tiles(other, after + 2 * (n * VALUE_APART + d));
#pragma unroll
            for (int e = 0; e < 2; e++) {
                multiply_add(to.dy_before[0][n / 8 + e], dy, right[2 * e], right[2 * e + 1]);
                if (DELTA) multiply_add(to.dz_before[0][n / 8 + e], dz, right[2 * e], right[2 * e + 1]);
                multiply_add(to.u_after[0][n / 8 + e], u, other[2 * e], other[2 * e + 1]);
            }
        }
#pragma unroll
        for (int n = 0; n < OWN_SCORES; n += 16) {
            unsigned right[4];
            load_tiles(right, others + 2 * (n * VALUE_APART + d));
#pragma unroll
            for (int e = 0; e < 2; e++) {
                multiply_add(to.dy_u[0][n / 8 + e], dy, right[2 * e], right[2 * e + 1]);
                if (DELTA) multiply_add(to.dz_u[0][n / 8 + e], dz, right[2 * e], right[2 * e + 1]);
            }
        }
    }
}

// Calls `use` with each pair of a lane's sums of keys, its step and its first key in the part.
template <class Use>
__device__ __forceinline__ void each_pair(Keys& keys, Use use) {
#pragma unroll
    for (int n = 0; n < OWN_KEYS / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            use(&keys[0][n][2 * half], half, own_step() + sum_row(0, half), own_part() * OWN_KEYS + sum_column(n));
}

// Writes a warp's sums of keys of a head in f32.
__device__ __forceinline__ void write_for_group(float* to, Keys& keys, const Params& p, const Chunk& at,
                                                int first_key = 0) {
    each_pair(keys, [&](const float* pair, int, int step, int key) {
        if (step < at.left() && first_key + key < p.keys)
            *(float2*)(to + (at.of_head(p) + (i64)step * p.heads) * p.keys + first_key + key) = {pair[0], pair[1]};
    });
}

// Writes a warp's rows of keys, from shared memory.
__device__ __forceinline__ void store_keys(STORAGE* to, const STORAGE* rows, const Params& p, const Chunk& at,
                                           int first_key = 0) {
    to += at.keys(p) + first_key;
#pragma unroll
    for (int unit = threadIdx.x % 32; unit < 16 * OWN_KEYS / 8; unit += 32) {
        int step = own_step() + unit / (OWN_KEYS / 8), key = own_part() * OWN_KEYS + unit % (OWN_KEYS / 8) * 8;
        if (step < at.left() && first_key + key < p.keys)
            *(int4*)(to + (i64)step * p.groups * p.keys + key) = *(const int4*)(rows + step * PART_APART + key);
    }
}

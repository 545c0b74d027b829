// The gradients of a chunk's steps where each key has a decay, from states and their cotangents, on tensor cores; after
// products.cu and decays.cu. A block for each chunk of a head and PART keys. With A = dY V', up to the diagonal, and the
// decay w between two steps,
//   dq_i = scale (exp(l_i) * S dy_i + sum_{j <= i} A_ij w_ij * k_j)
//   dk_j = exp(l_T - l_j) * G v_j + scale sum_{i >= j} A_ij w_ij * q_i
// dg of step t sums what passes from before t to t or later. Pairs of other steps are in q dq and in k dk alike, and leave
// their difference.
// Limit: memory, since both states of a chunk, in the storage type, are as long as four of its rows of keys.

static_assert(TILE == 16, "a warp has the steps of a tile");

// Sums over the steps of each tile for dg: of what comes from before them, and of what goes to after them.
struct Passing {
    float from[CHUNK / TILE][PART], to[CHUNK / TILE][PART];
};

// What the work after the sums over values needs: decays, and A.
struct Pairs {
    Decays<PART> decays;
    STORAGE pairs[CHUNK * STEP_APART];
};

// It takes the place of the values and states.
union Slot {
    Stage stage;
    Pairs after;
};

struct Shared {
    STORAGE q[CHUNK * PART_APART], k[CHUNK * PART_APART];
    Slot slot;
    Passing passing;
    float ends[PART]; // sums of the products of both states
};

// A thread's part of the products of a key's row of both states; neighbouring threads share a key.
constexpr int SHARE_KEY = THREADS / PART;
__device__ __forceinline__ float between_states(const Stage& stage) {
    int row = threadIdx.x / SHARE_KEY * VALUE_APART;
    float sum = 0;
#pragma unroll
    for (int i = threadIdx.x % SHARE_KEY * 8; i < WIDTH; i += 8 * SHARE_KEY)
        sum += dot(stage.before + row + i, stage.after + row + i);
    return sum;
}

// Writes A.
__device__ __forceinline__ void share_pairs(STORAGE* to, const Squares& dy_u) {
#pragma unroll
    for (int n = 0; n < OWN_SCORES / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = own_step() + sum_row(0, half), column = own_part() * OWN_SCORES + sum_column(n);
            const float* pair = &dy_u[0][n][2 * half];
            *(unsigned*)(to + row * STEP_APART + column) =
                pack(column <= row ? pair[0] : 0.0f, column + 1 <= row ? pair[1] : 0.0f);
        }
}

// Multiplies each sum of the earlier (0) or the later half of a tile's steps by the factor of its step and key.
template <int WHICH, class Factor>
__device__ __forceinline__ void scale_half(Keys& keys, Factor of) {
    each_pair(keys, [&](float* pair, int half, int step, int key) {
        if (half == WHICH) pair[0] *= of(step, key), pair[1] *= of(step, key + 1);
    });
}
template <class Factor>
__device__ __forceinline__ void scale(Keys& keys, Factor of) {
    scale_half<0>(keys, of);
    scale_half<1>(keys, of);
}

// to += x times a tile's rows of keys from step `first` on, each key times its weight. With SAME_TILE, x has the later half of a
// tile's steps and the earlier half of those rows, or the other way round where LATER.
template <bool SAME_TILE, bool LATER, class Weight>
__device__ __forceinline__ void add_tile(Keys& to, Left& x, const STORAGE* rows, int first, Weight weight) {
    unsigned at = turned_at<PART_APART>(rows + first * PART_APART + own_part() * OWN_KEYS);
    // Elements 1 and 3 of x are of the later steps, 2 and 3 of the later rows.
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (SAME_TILE && e != (LATER ? 2 : 1)) x[e] = 0;
#pragma unroll
    for (int n = 0; n < OWN_KEYS; n += 16) {
        unsigned right[4];
        load_turned_tiles(right, at + 2 * n);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int step = first + 8 * (e % 2) + sum_column(0), key = own_part() * OWN_KEYS + n + 8 * (e / 2) + sum_row(0, 0);
            if (SAME_TILE && e % 2 != LATER) right[e] = 0;
            else right[e] = weighted(right[e], weight(step, key), weight(step + 1, key));
        }
        multiply_add(to[0][n / 8], x, right[0], right[1]);
        multiply_add(to[0][n / 8 + 1], x, right[2], right[3]);
    }
}

// Adds to each step what near steps give: rows of k of earlier ones, or with LATER rows of q of later ones. From each step
// to the next farther one, the weight takes one decay more.
template <bool LATER>
__device__ __forceinline__ void add_near(Keys& to, const STORAGE* rows, const Shared& shared) {
    const Decays<PART>& decays = shared.slot.after.decays;
    const STORAGE* pairs = shared.slot.after.pairs;
    Keys weights;
#pragma unroll
    for (int n = 0; n < OWN_KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) weights[0][n][e] = 1;
#pragma unroll 1
    for (int i = 1; i < NEAR; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int step = own_step() + sum_row(0, half), other = own_step() + NEAR * half + (LATER ? i : NEAR - 1 - i);
            bool takes = LATER ? other > step : other < step;
            float pair = takes ? widen(pairs[LATER ? other * STEP_APART + step : step * STEP_APART + other]) : 0.0f;
#pragma unroll
            for (int n = 0; n < OWN_KEYS / 8; n++) {
                int key = own_part() * OWN_KEYS + sum_column(n);
                float2 decay = *(const float2*)(decays.step[LATER ? other : other + 1] + key);
                float *weight = &weights[0][n][2 * half], *sum = &to[0][n][2 * half], low, high;
                widen(rows + other * PART_APART + key, low, high);
                weight[0] *= takes ? decay.x : 1.0f, weight[1] *= takes ? decay.y : 1.0f;
                sum[0] = fmaf(pair * low, weight[0], sum[0]), sum[1] = fmaf(pair * high, weight[1], sum[1]);
            }
        }
    }
}

// Adds to each step what it gives to itself.
__device__ __forceinline__ void add_self(Keys& to, const STORAGE* rows, float factor, const STORAGE* pairs) {
    each_pair(to, [&](float* pair, int, int step, int key) {
        float own = factor * widen(pairs[step * (STEP_APART + 1)]), low, high;
        widen(rows + step * PART_APART + key, low, high);
        pair[0] = fmaf(own, low, pair[0]), pair[1] = fmaf(own, high, pair[1]);
    });
}

// dq without scale, and without what steps give to themselves. Sums are decayed up to the start of the tile, those of its
// later half then up to its middle, and at last all of them up to each step.
__device__ __forceinline__ void find_dq(Keys& dq, const Shared& shared) {
    const Decays<PART>& decays = shared.slot.after.decays;
    int before = own_step() - 1, middle = own_step() + NEAR - 1;
    unsigned pairs = left_at<STEP_APART>(shared.slot.after.pairs + own_step() * STEP_APART);
    Left x;
    if (own_step() > 0) scale(dq, [&](int, int key) { return decays.between(-1, before, key); });
#pragma unroll 1
    for (int first = 0; first < own_step(); first += TILE) {
        load_tiles(x, pairs + 2 * first);
        add_tile<false, false>(dq, x, shared.k, first, [&](int step, int key) { return decays.between(step, before, key); });
    }
    scale_half<1>(dq, [&](int, int key) { return decays.between(before, middle, key); });
    load_tiles(x, pairs + 2 * own_step());
    add_tile<true, false>(dq, x, shared.k, own_step(), [&](int step, int key) { return decays.between(step, middle, key); });
    scale_half<0>(dq, [&](int step, int key) { return decays.between(before, step, key); });
    scale_half<1>(dq, [&](int step, int key) { return decays.between(middle, step, key); });
    add_near<false>(dq, shared.k, shared);
}

// What later steps give to k, without scale, and without what steps give to themselves. Sums are decayed from the end of the
// tile, those of its earlier half then from its middle, and at last all of them from each step.
__device__ __forceinline__ void find_dk(Keys& dk, const Shared& shared) {
    const Decays<PART>& decays = shared.slot.after.decays;
    int end = own_step() + TILE - 1, middle = own_step() + NEAR - 1;
    unsigned pairs = right_at<STEP_APART>(shared.slot.after.pairs + own_step());
    Left x;
#pragma unroll 1
    for (int first = own_step() + TILE; first < CHUNK; first += TILE) {
        load_turned_tiles(x, pairs + 2 * first * STEP_APART);
        add_tile<false, true>(dk, x, shared.q, first, [&](int step, int key) { return decays.between(end, step, key); });
    }
    scale_half<0>(dk, [&](int, int key) { return decays.between(middle, end, key); });
    load_turned_tiles(x, pairs + 2 * own_step() * STEP_APART);
    add_tile<true, true>(dk, x, shared.q, own_step(), [&](int step, int key) { return decays.between(middle, step, key); });
    scale_half<0>(dk, [&](int step, int key) { return decays.between(step, middle, key); });
    scale_half<1>(dk, [&](int step, int key) { return decays.between(step, end, key); });
    add_near<true>(dk, shared.q, shared);
}

// What passes from before each step to it, less what it passes on to later ones of the chunk; and what it adds to the state
// after the chunk. Without what steps give to themselves.
__device__ __forceinline__ void find_passing(Keys& from, Keys& to, const Products& products, const Keys& dk,
                                             const Shared& shared, float scale) {
#pragma unroll
    for (int n = 0; n < OWN_KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int place = (own_step() + sum_row(0, e / 2)) * PART_APART + own_part() * OWN_KEYS + sum_column(n) + e % 2;
            float q = widen(shared.q[place]), k = widen(shared.k[place]);
            from[0][n][e] = scale * fmaf(q, products.dy_before[0][n][e], -k * dk[0][n][e]);
            to[0][n][e] = k * products.u_after[0][n][e];
        }
}

// Each lane's sums over the steps of its tile up to a row, or with LATER from it on.
template <bool LATER>
__device__ __forceinline__ float sum_steps(float sum) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
        float other = LATER ? __shfl_down_sync(~0u, sum, distance) : __shfl_up_sync(~0u, sum, distance);
        if (LATER ? lane + distance < 32 : lane >= distance) sum += other;
    }
    return sum;
}

// The sums of `from` over a step of a tile and later ones, and of `to` over earlier ones, in place of `from`. Writes the
// sums over the tile. Rows r and r + 8 are in one lane.
__device__ __forceinline__ void sum_passing(Keys& from, const Keys& to, Passing& passing) {
    int lane = threadIdx.x % 32, tile = own_step() / TILE;
#pragma unroll
    for (int n = 0; n < OWN_KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int key = own_part() * OWN_KEYS + sum_column(n) + e;
            float later = sum_steps<true>(from[0][n][e + 2]);
            float all = sum_steps<true>(from[0][n][e]) + __shfl_sync(~0u, later, lane % 4);
            float earlier = sum_steps<false>(to[0][n][e]), rest = sum_steps<false>(to[0][n][e + 2]);
            float first = __shfl_sync(~0u, earlier, 28 + lane % 4);
            if (lane < 4) passing.from[tile][key] = all;
            if (lane >= 28) passing.to[tile][key] = first + rest;
            float before = __shfl_up_sync(~0u, earlier, 4), between = __shfl_up_sync(~0u, rest, 4);
            from[0][n][e] = all + (lane < 4 ? 0.0f : before);
            from[0][n][e + 2] = later + first + (lane < 4 ? 0.0f : between);
        }
}

// Writes dg from the sums within tiles.
__device__ __forceinline__ void write_gates(Keys& sums, const Shared& shared, const Params& p, const Chunk& at, int first_key) {
    const Decays<PART>& decays = shared.slot.after.decays;
    int tile = own_step() / TILE;
    auto across = [&](int key) {
        float sum = decays.between(-1, CHUNK - 1, key) * shared.ends[key];
#pragma unroll
        for (int i = 0; i < CHUNK / TILE; i++)
            if (i != tile) sum += i < tile ? shared.passing.to[i][key] : shared.passing.from[i][key];
        return sum;
    };
    each_pair(sums, [&](float* pair, int, int, int key) { pair[0] += across(key), pair[1] += across(key + 1); });
    write_for_group(p.dg, sums, p, at, first_key);
}

// Writes dq or dk. Rows of the input are reused.
__device__ __forceinline__ void write_keys(STORAGE* to, Keys& keys, STORAGE* rows, const Params& p, const Chunk& at,
                                           int first_key) {
    each_pair(keys, [&](const float* pair, int, int step, int key) {
        *(unsigned*)(rows + step * PART_APART + key) = pack(pair[0], pair[1]);
    });
    __syncwarp();
    store_keys(to, rows, p, at, first_key);
}

// Queues copies of a part of the keys of q or k.
__device__ __forceinline__ void fetch(STORAGE* to, const STORAGE* from, const Params& p, const Chunk& at, int first_key) {
    copy_rows<PART / 8, PART_APART>(to, from + at.keys(p) + first_key, (i64)p.groups * p.keys, at.left(), p.keys - first_key);
}

// The sums over values; A and decays take the place of these.
__device__ __forceinline__ void multiply(Products& products, Shared& shared, const Params& p, const Chunk& at, int first_key) {
    Stage& stage = shared.slot.stage;
    float ends = 0;
    clear(products.dy_before), clear(products.u_after), clear(products.dy_u);
#pragma unroll 1
    for (int first = 0; first < p.values; first += WIDTH) {
        fetch(stage, p, at, first, first_key);
        copied<0>();
        __syncthreads();
        add(products, stage);
        ends += between_states(stage);
        __syncthreads();
    }
    ends = sum_over<SHARE_KEY>(ends);
    if (threadIdx.x % SHARE_KEY == 0) shared.ends[threadIdx.x / SHARE_KEY] = ends;
    share_pairs(shared.slot.after.pairs, products.dy_u);
    shared.slot.after.decays.load(p, at, first_key);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) matrix_state_key_gradients(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *(Shared*)memory;
    int parts = (p.keys + PART - 1) / PART, first_key = blockIdx.x % parts * PART;
    Chunk at(p, blockIdx.x / parts);
    fetch(shared.q, p.q, p, at, first_key);
    fetch(shared.k, p.k, p, at, first_key);
    Products products;
    multiply(products, shared, p, at, first_key);
    const Decays<PART>& decays = shared.slot.after.decays;
    const STORAGE* pairs = shared.slot.after.pairs;
    Keys &dq = products.dy_before, &to_end = products.u_after, dk, from, to;
    clear(dk);
    find_dq(dq, shared);
    find_dk(dk, shared);
    scale(to_end, [&](int step, int key) { return decays.between(step, CHUNK - 1, key); });
    float factor = p.scale;
    find_passing(from, to, products, dk, shared, factor);
    sum_passing(from, to, shared.passing);
    add_self(dq, shared.k, 1, pairs);
    add_self(dk, shared.q, 1, pairs);
#pragma unroll
    for (int n = 0; n < OWN_KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) dk[0][n][e] = fmaf(factor, dk[0][n][e], to_end[0][n][e]);
    __syncthreads();
    write_gates(from, shared, p, at, first_key);
    if (GROUPED) {
        write_for_group(p.sums[0], dq, p, at, first_key);
        write_for_group(p.sums[2], dk, p, at, first_key);
        return;
    }
    scale(dq, [&](int, int) { return factor; });
    write_keys(p.dq, dq, shared.q, p, at, first_key);
    write_keys(p.dk, dk, shared.k, p, at, first_key);
}

// The matrices of each chunk by the delta rule, which do not depend on states: (I + L)^-1 and P. A block for each chunk of a head: two
// warps compute the one, two the other. Limit: memory, since q, k and both matrices pass through it once; how long a
// block waits for forward substitution keeps it from that.

constexpr int BLOCK = CHUNK / 2;

struct Shared {
    STORAGE q[CHUNK * KEY_APART], k[CHUNK * KEY_APART];
    float lower[CHUNK * STEP_APART];
    Factors factors;
};

// The inverse of a row's norm, or 1 without NORM; two neighbouring threads share a row.
__device__ __forceinline__ float inverse_norm(const STORAGE* rows) {
    if (!NORM) return 1;
    const STORAGE* row = rows + threadIdx.x / 2 * KEY_APART + threadIdx.x % 2 * (KEYS / 2);
    float square = 0;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i += 8) square += dot(row + i, row + i);
    square += __shfl_xor_sync(~0u, square, 1);
    return rsqrtf(square + (float)EPS);
}

__device__ __forceinline__ void find_factors(Shared& shared, const Params& p, const Chunk& at) {
    float q = inverse_norm(shared.q), k = inverse_norm(shared.k);
    int row = threadIdx.x / 2;
    if (threadIdx.x % 2 == 0) {
        shared.factors.q[row] = q;
        shared.factors.k[row] = k;
    } else {
        shared.factors.beta[row] = row < at.left() ? widen(p.beta[at.of_head(p) + (i64)row * p.heads]) : 0.0f;
    }
    if (warp() == 0) sum_decays(shared.factors, p, at);
}

// Calls `use` with the row, the column and the sum of each pair of elements of 16 rows of q k' or k k', up to the
// diagonal.
template <class Use>
__device__ __forceinline__ void each_product(const STORAGE* left, const STORAGE* k, int rows, Use use) {
    Sums sums[1][CHUNK / 8];
    clear(sums);
    unsigned a = left_at<KEY_APART>(left + rows * KEY_APART), b = right_at<KEY_APART>(k);
#pragma unroll
    for (int d = 0; d < KEYS; d += 16) {
        Left own;
        load_tiles(own, a + 2 * d);
#pragma unroll
        for (int n = 0; n < CHUNK; n += 16) {
            if (n > rows) break;
            unsigned right[4];
            load_tiles(right, b + 2 * (n * KEY_APART + d));
            multiply_add(sums[0][n / 8], own, right[0], right[1]);
            multiply_add(sums[0][n / 8 + 1], own, right[2], right[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            use(rows + sum_row(0, half), sum_column(n), sums[0][n][2 * half], sums[0][n][2 * half + 1]);
}

__device__ __forceinline__ float decay(const Factors& factors, int to, int from) {
    return exp2_fast(factors.log[to] - factors.log[from]);
}

// The rows of L below the diagonal.
__device__ __forceinline__ void find_lower(Shared& shared, int rows) {
    const Factors& factors = shared.factors;
    each_product(shared.k, shared.k, rows, [&](int row, int column, float low, float high) {
        float factor = factors.beta[row] * factors.k[row];
        auto element = [&](int column, float product) {
            return column < row ? factor * factors.k[column] * decay(factors, row, column) * product : 0.0f;
        };
        float* to = shared.lower + row * STEP_APART + column;
        *(float2*)to = {element(column, low), element(column + 1, high)};
    });
}

// The rows of P, up to the diagonal; the rest is zero.
__device__ __forceinline__ void write_scores(Shared& shared, STORAGE* to, int rows, float scale) {
    const Factors& factors = shared.factors;
    each_product(shared.q, shared.k, rows, [&](int row, int column, float low, float high) {
        float factor = scale * factors.q[row];
        auto element = [&](int column, float product) {
            return column <= row ? factor * factors.k[column] * decay(factors, row, column) * product : 0.0f;
        };
        *(unsigned*)(to + row * CHUNK + column) = pack(element(column, low), element(column + 1, high));
    });
}

// Replaces a diagonal block of L by its block of (I + L)^-1, by forward substitution. A warp has a block, a lane a column.
__device__ __forceinline__ void invert(float* lower) {
    int column = threadIdx.x % 32;
    float x[BLOCK];
#pragma unroll
    for (int row = 0; row < BLOCK; row++) {
        float sums[4] = {column == row ? 1.0f : 0.0f, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < row; i += 4) {
            float4 four = *(const float4*)(lower + row * STEP_APART + i);
            sums[0] = fmaf(-four.x, x[i], sums[0]);
            if (i + 1 < row) sums[1] = fmaf(-four.y, x[i + 1], sums[1]);
            if (i + 2 < row) sums[2] = fmaf(-four.z, x[i + 2], sums[2]);
            if (i + 3 < row) sums[3] = fmaf(-four.w, x[i + 3], sums[3]);
        }
        x[row] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
    __syncwarp();
#pragma unroll
    for (int row = 0; row < BLOCK; row++) lower[row * STEP_APART + column] = x[row];
}

__device__ __forceinline__ unsigned tf32(float v) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(v));
    return rounded;
}

// Calls `use` with the row, the column and the sum of each pair of elements of a warp's 16 rows of a b, blocks in f32
// that are rounded to tf32.
template <class Use>
__device__ __forceinline__ void each_block_product(const float* a, const float* b, Use use) {
    int lane = threadIdx.x % 32, rows = warp() % 2 * 16, row = lane / 4, inner = lane % 4;
    a += (rows + row) * STEP_APART + inner;
    b += inner * STEP_APART + row;
    Sums sums[1][BLOCK / 8];
    clear(sums);
#pragma unroll
    for (int k = 0; k < BLOCK; k += 8) {
        unsigned left[4];
#pragma unroll
        for (int e = 0; e < 4; e++) left[e] = tf32(a[e % 2 * 8 * STEP_APART + k + e / 2 * 4]);
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++) {
            unsigned right[2] = {tf32(b[k * STEP_APART + 8 * n]), tf32(b[(k + 4) * STEP_APART + 8 * n])};
            float(&to)[4] = sums[0][n];
            asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                "{%0,%1,%2,%3};"
                : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
                : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
        }
    }
#pragma unroll
    for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            use(rows + sum_row(0, half), sum_column(n), sums[0][n][2 * half], sums[0][n][2 * half + 1]);
}

// Waits for the two warps that compute the inverse.
__device__ __forceinline__ void wait_for_both() { asm volatile("bar.sync 1, 64;" ::: "memory"); }

// Writes the inverse of I + L. With A and D the inverses of its diagonal blocks, and L21 the block below the first, it is
// A, 0 over -D L21 A, D.
__device__ __forceinline__ void write_inverse(Shared& shared, STORAGE* to) {
    float *a = shared.lower, *product = a + BLOCK, *below = a + BLOCK * STEP_APART, *d = below + BLOCK;
    invert(warp() == 0 ? a : d);
    wait_for_both();
    each_block_product(below, a, [&](int row, int column, float low, float high) {
        *(float2*)(product + row * STEP_APART + column) = {low, high};
    });
    wait_for_both();
    auto write = [&](int row, int column, float low, float high) {
        *(unsigned*)(to + row * CHUNK + column) = pack(low, high);
    };
    each_block_product(d, product, [&](int row, int column, float low, float high) {
        write(BLOCK + row, column, -low, -high);
    });
    int first = warp() * BLOCK, lane = threadIdx.x % 32;
#pragma unroll
    for (int row = lane / 16; row < BLOCK; row += 2) {
        int column = first + lane % 16 * 2;
        float2 pair = *(const float2*)(shared.lower + (first + row) * STEP_APART + column);
        write(first + row, column, pair.x, pair.y);
        if (warp() == 1) write(row, column, 0, 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) matrix_state_inner(Params p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& shared = *(Shared*)memory;
    Chunk at(p, blockIdx.x);
    copy_keys(shared.q, p.q, p, at);
    copy_keys(shared.k, p.k, p, at);
    commit();
    copied<0>();
    __syncthreads();
    find_factors(shared, p, at);
    __syncthreads();
    // The rows of a warp: together they are as long as those of the other.
    int rows = warp() % 2 * 16, others = CHUNK - 16 - rows;
    if (warp() < 2) {
        find_lower(shared, rows);
        find_lower(shared, others);
        wait_for_both();
        write_inverse(shared, p.inverses + at.id(p) * SQUARE);
    } else {
        STORAGE* to = p.scores + at.id(p) * SQUARE;
        write_scores(shared, to, rows, p.scale);
        write_scores(shared, to, others, p.scale);
        Factors& factors = ((Factors*)p.factors)[at.id(p)];
        for (int i = threadIdx.x - 64; i < sizeof(Factors) / 4; i += 64)
            ((float*)&factors)[i] = ((const float*)&shared.factors)[i];
    }
}

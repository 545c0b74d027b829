// Training kernels, for the trait `Learn` in learn.rs.

constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ REAL warp_sum(REAL sum) {
#pragma unroll
    for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

#if ENTROPY

// One warp per row.
extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy(Entropy p) {
    i64 row = (i64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= p.rows) return;
    STORAGE* logits = p.logits + row * p.width;
    i64 target = p.targets[row];
    int lane = threadIdx.x % 32;
    REAL largest = widen(logits[target]), of_target = largest;
    for (i64 at = lane; at < p.width; at += 32) {
        REAL v = widen(logits[at]);
        largest = v > largest ? v : largest;
    }
#pragma unroll
    for (int distance = 16; distance; distance /= 2) {
        REAL other = __shfl_xor_sync(~0u, largest, distance);
        largest = other > largest ? other : largest;
    }
    REAL sum = 0;
    for (i64 at = lane; at < p.width; at += 32) sum += exp(widen(logits[at]) - largest);
    sum = warp_sum(sum);
    if (!lane) p.losses[row] = log(sum) + largest - of_target;
    if (p.scale == 0) return;
    REAL by = p.scale / sum;
    for (i64 at = lane; at < p.width; at += 32)
        narrow(exp(widen(logits[at]) - largest) * by - (at == target ? p.scale : 0), logits[at]);
}

#elif SCATTER

// One block per row of the table, one thread per column.
extern "C" __global__ void __launch_bounds__(THREADS) scatter(Scatter p) {
    unsigned start = p.starts[blockIdx.x], end = p.starts[blockIdx.x + 1];
    for (i64 column = threadIdx.x; column < p.width; column += THREADS) {
        REAL sum = 0;
#pragma unroll 8
        for (unsigned at = start; at < end; ++at) sum += p.from[p.order[at] * p.width + column];
        p.to[blockIdx.x * p.width + column] += sum;
    }
}

#elif SQUARES

extern "C" __global__ void __launch_bounds__(THREADS) squares(Squares p) {
    REAL sum = 0;
    for (i64 at = (i64)blockIdx.x * THREADS + threadIdx.x; at < p.count; at += (i64)gridDim.x * THREADS)
        sum += p.of[at] * p.of[at];
    __shared__ REAL sums[WARPS];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (int warp = 1; warp < WARPS; ++warp) sum += sums[warp];
    p.sums[blockIdx.x] = sum;
}

#else

extern "C" __global__ void __launch_bounds__(THREADS) update(Changing p) {
    i64 at = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (at >= p.count) return;
    REAL g = p.gradient[at] * p.scale;
    REAL mean = p.beta1 * p.means[at] + (1 - p.beta1) * g;
    REAL square = p.beta2 * p.squares[at] + (1 - p.beta2) * g * g;
    REAL weight = p.weights[at] * (at < p.decayed ? p.keep : 1);
    p.weights[at] = weight - p.rate * mean / (sqrt(square * p.correction) + p.eps);
    p.means[at] = mean;
    p.squares[at] = square;
}

#endif

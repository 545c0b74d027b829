// Joins the results for the parts of a query's keys, after common.cu: one block per query, whose threads divide first
// the parts among them, then the columns. cuda/few.rs plans at most MOST_PARTS parts.

// Reduces a value over the block, in an order that depends on the sizes alone.
template <typename Join>
__device__ __forceinline__ REAL of_block(REAL value, Join join) {
    __shared__ REAL each[WARPS];
#pragma unroll
    for (int apart = 16; apart; apart /= 2) value = join(value, __shfl_xor_sync(0xffffffff, value, apart));
    __syncthreads();
    if (threadIdx.x % 32 == 0) each[threadIdx.x / 32] = value;
    __syncthreads();
    value = each[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) value = join(value, each[warp]);
    return value;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) attention_join(Params p) {
    __shared__ REAL weights[MOST_PARTS];
    i64 row = blockIdx.x;
    int query = row % p.queries, head = row / p.queries % p.heads;
    i64 apart = p.value_width + 2;
    const REAL* parts = p.delta + row * p.parts * apart;
    REAL top = hidden(), total = 0;
    for (int part = threadIdx.x; part < p.parts; part += blockDim.x) top = largest(parts[part * apart], top);
    top = of_block(top, [](REAL a, REAL b) { return largest(a, b); });
    REAL by = top == hidden() ? (REAL)0 : top;
    for (int part = threadIdx.x; part < p.parts; part += blockDim.x) {
        weights[part] = exp2_fast((parts[part * apart] - by) * (REAL)LOG2_E);
        total = fma(weights[part], parts[part * apart + 1], total);
    }
    // This barrier also makes all weights visible.
    total = of_block(total, [](REAL a, REAL b) { return a + b; });
    STORAGE* to = p.to + start(p.y_at, row / p.queries / p.heads, head) + query * p.y_at.row;
    for (int c = threadIdx.x; c < p.value_width; c += blockDim.x) {
        REAL sum = 0;
#pragma unroll 8
        for (int part = 0; part < p.parts; ++part) sum = fma(weights[part], parts[part * apart + 2 + c], sum);
        narrow(total == 0 ? (REAL)0 : sum / total, to[c]);
    }
    if (threadIdx.x == 0) p.to_lse[row] = total == 0 ? hidden() : top + log(total);
}

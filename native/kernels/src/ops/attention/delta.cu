// Statistics of each query that the gradient needs in addition to its scores. Included after common.cu.
//   LANES    threads per query: a warp, or one, which adds in the order in which the general kernels compute dP.
//            There y is v where a query sees a single key, and dP - delta must be exactly 0.
//   BINARY   whether scores, and so their shift, are exponents of 2
//   PRESET   whether sums of products begin with the statistics: then they are negative, and the shift is not yet scaled
//
// delta = dy.y - dlse. The shift is lse; it is infinite where a query has no visible keys, so that all its P are 0, and for
// the padding that follows the queries of a head.

extern "C" __global__ void attention_delta(Params p) {
    i64 id = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES, head = id / p.all_queries;
    if (head >= (i64)p.batch * p.heads) return;
    int lane = threadIdx.x % LANES, query = id % p.all_queries;
    bool there = query < p.queries;
    i64 row = start(p.y_at, head / p.heads, head % p.heads) + query * p.y_at.row, own = head * p.queries + query;
    REAL sum = 0;
    for (int c = there ? lane : p.value_width; c < p.value_width; c += LANES)
        sum = fma((REAL)widen(p.dy[row + c]), (REAL)widen(p.y[row + c]), sum);
#pragma unroll
    for (int apart = LANES / 2; apart; apart /= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
    if (lane) return;
    REAL lse = there ? p.lse[own] : hidden();
    bool blind = lse == hidden();
#if PRESET
    p.shift[id] = blind ? hidden() : -lse / p.scale;
    p.delta[id] = blind ? (REAL)0 : p.dlse ? p.dlse[own] - sum : -sum;
#else
    p.shift[id] = blind ? -hidden() : BINARY ? lse * (REAL)LOG2_E : lse;
    p.delta[id] = blind ? (REAL)0 : p.dlse ? sum - p.dlse[own] : sum;
#endif
}

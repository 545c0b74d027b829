// Statistics of each query that the gradient needs in addition to its scores. Included after common.cu.
//   LANES    threads per query: a warp, or one, which adds in the order in which the general kernels compute dP.
//            There y is v where a query sees a single key, and dP - delta must be exactly 0.
//   BINARY   whether scores, and so their shift, are exponents of 2
//
// delta = dy.y - dlse. The shift is lse; it is infinite where a query has no visible keys, so that all its P are 0.

extern "C" __global__ void attention_delta(Params p) {
    i64 id = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    if (id >= (i64)p.batch * p.heads * p.queries) return;
    int lane = threadIdx.x % LANES, query = id % p.queries, head = id / p.queries % p.heads;
    i64 row = start(p.y_at, id / p.queries / p.heads, head) + query * p.y_at.row;
    REAL sum = 0;
    for (int c = lane; c < p.value_width; c += LANES) sum = fma((REAL)widen(p.dy[row + c]), (REAL)widen(p.y[row + c]), sum);
#pragma unroll
    for (int apart = LANES / 2; apart; apart /= 2) sum += __shfl_xor_sync(0xffffffff, sum, apart);
    if (lane) return;
    REAL lse = p.lse[id];
    bool blind = lse == hidden();
    p.shift[id] = blind ? -hidden() : BINARY ? lse * (REAL)LOG2_E : lse;
    p.delta[id] = blind ? (REAL)0 : p.dlse ? sum - p.dlse[id] : sum;
}

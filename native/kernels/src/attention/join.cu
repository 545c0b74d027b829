// Joins what the parts of a query's keys came to, after common.cu: a warp a query.

extern "C" __global__ void attention_join(Params p) {
    i64 row = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= (i64)p.batch * p.heads * p.queries) return;
    int lane = threadIdx.x % 32, query = row % p.queries, head = row / p.queries % p.heads;
    i64 apart = p.value_width + 2;
    const REAL* parts = p.delta + row * p.parts * apart;
    REAL top = hidden(), total = 0;
    for (int part = 0; part < p.parts; ++part) top = largest(parts[part * apart], top);
    REAL by = top == hidden() ? (REAL)0 : top;
    for (int part = 0; part < p.parts; ++part)
        total = fma(exp2_fast((parts[part * apart] - by) * (REAL)LOG2_E), parts[part * apart + 1], total);
    STORAGE* to = p.to + start(p.y_at, row / p.queries / p.heads, head) + query * p.y_at.row;
    for (int c = lane; c < p.value_width; c += 32) {
        REAL sum = 0;
        for (int part = 0; part < p.parts; ++part)
            sum = fma(exp2_fast((parts[part * apart] - by) * (REAL)LOG2_E), parts[part * apart + 2 + c], sum);
        narrow(total == 0 ? (REAL)0 : sum / total, to[c]);
    }
    if (lane == 0) p.to_lse[row] = total == 0 ? hidden() : top + log(total);
}

// The input rows of a step: rows of the embedding for some tokens, or features.

extern "C" __global__ void __launch_bounds__(THREADS) step_embed(Embed p) {
    let_others_begin();
    wait_for_others();
    i64 row = p.tokens ? p.tokens[blockIdx.x] : blockIdx.x;
    for (i64 at = threadIdx.x; at < p.width; at += THREADS)
        p.sum[blockIdx.x * p.width + at] = widen(p.from[row * p.width + at]);
}

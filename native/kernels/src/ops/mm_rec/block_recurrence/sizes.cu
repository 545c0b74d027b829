// What the norm divides each state by: a block for each time of each sequence.

struct Params {
    const STORAGE *z, *gamma, *b_gate, *b_mix;
    const REAL *before, *first, *second;
    REAL* sizes;
    i64 width;
    REAL mix;
};

extern "C" __global__ void __launch_bounds__(THREADS) recurrence_sizes(Params p) {
    REAL squares = 0;
    for (i64 column = threadIdx.x; column < p.width; column += THREADS) {
        i64 at = blockIdx.x * p.width + column;
        REAL z = widen(p.z[at]), h = p.before[at], kept = widen(p.gamma[at]) * h;
        REAL u = fma(z, sigmoid(p.first[at] + widen(p.b_gate[column])), kept);
        if (p.second) {
            REAL m = sigmoid(p.second[at] + widen(p.b_mix[column]));
            u = fma(fma(m, z - h, h + kept), p.mix, u);
        }
        squares = fma(u, u, squares);
    }
    squares = block_sum(squares);
    if (threadIdx.x == 0) p.sizes[blockIdx.x] = sqrt(squares / (REAL)p.width) + (REAL)1e-6;
}

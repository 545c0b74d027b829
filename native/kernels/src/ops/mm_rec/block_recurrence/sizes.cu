// The norm's divisor of each state: one block per time of each sequence.

extern "C" __global__ void __launch_bounds__(THREADS) recurrence_sizes(Sizes p) {
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
    if (threadIdx.x == 0) p.sizes[blockIdx.x] = sqrt(squares / (REAL)p.width) + (REAL)EPS;
}

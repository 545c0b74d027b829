// Copies rows of a table; each thread copies one word.

extern "C" __global__ void gather(Params p) {
    i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    i64 row = at / p.words, word = at % p.words;
    if (row < p.count) p.to[at] = p.table[p.rows[row] * p.words + word];
}

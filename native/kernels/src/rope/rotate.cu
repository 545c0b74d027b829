// Rotation of pairs. A thread has one pair of one position, and computes its angle once for all rows of
// that position that are its block's.

struct Params {
    const STORAGE* x;
    STORAGE* y;
    const double* rates;
    i64 inner, length, rows, width;
    double first_position, sign;
};

extern "C" __global__ void rope(Params p) {
    i64 pairs = p.width / 2, id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (id >= pairs * p.length) return;
    i64 pair = id % pairs, position = id / pairs;
    double sine, cosine;
    sincos(p.sign * (p.first_position + (double)position) * p.rates[pair], &sine, &cosine);
    REAL sin = (REAL)sine, cos = (REAL)cosine;
    i64 a = INTERLEAVED ? 2 * pair : pair, b = INTERLEAVED ? a + 1 : pair + pairs;
    for (i64 row = blockIdx.y; row < p.rows; row += gridDim.y) {
        i64 first = ((row / p.inner * p.length + position) * p.inner + row % p.inner) * p.width;
        REAL va = widen(p.x[first + a]), vb = widen(p.x[first + b]);
        narrow(va * cos - vb * sin, p.y[first + a]);
        narrow(va * sin + vb * cos, p.y[first + b]);
    }
}

// Sines and cosines of positions, added to rows. A thread has one pair of one position, and computes its
// angle once for all rows of that position that are its block's.

struct Params {
    const STORAGE* x;
    STORAGE* y;
    const double* rates;
    i64 batch, length, width;
    double first_position;
};

extern "C" __global__ void sinusoidal_positions(Params p) {
    i64 pairs = (p.width + 1) / 2, id = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (id >= pairs * p.length) return;
    i64 pair = id % pairs, position = id / pairs;
    double sine, cosine;
    sincos((p.first_position + (double)position) * p.rates[pair], &sine, &cosine);
    REAL sin = (REAL)sine, cos = (REAL)cosine;
    // The last cosine of an odd width has no place.
    bool both = 2 * pair + 1 < p.width;
    for (i64 row = blockIdx.y; row < p.batch; row += gridDim.y) {
        i64 first = (row * p.length + position) * p.width + 2 * pair;
        narrow(widen(p.x[first]) + sin, p.y[first]);
        if (both) narrow(widen(p.x[first + 1]) + cos, p.y[first + 1]);
    }
}

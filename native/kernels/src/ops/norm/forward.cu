// A norm of rows. History: rows in registers read memory once. A block of many threads per row reached 65 to 85% of a
// copy's speed: it waited for its reductions with no loads in flight, and read the weights for every row. Then blocks
// became persistent, hold their weights, and load the next row before they reduce the current one. 16-bit rows were
// still slow, at 60 to 75%: bounds checks of single elements were most of the instructions, and the words of the next
// row were split right after its loads were issued, which waits for them.

extern "C" __global__ void __launch_bounds__(THREADS * ROWS, RESIDENT) norm_forward(Params p) {
    Weights of(p);
    i64 step = (i64)gridDim.x * ROWS, at = (i64)blockIdx.x * ROWS + slot();
    Row next;
    next.begin(p, p.x, at);
    int set = 0;
    for (i64 first = (i64)blockIdx.x * ROWS; first < p.rows; first += step, at += step, set ^= 1) {
        Row row = next;
        next.begin(p, p.x, at + step);
        Statistics s = statistics(p, row, set);
        EACH_PACK {
            REAL x[VEC], y[VEC];
            row.values(p, k, x);
            of.again(p, k);
            EACH_ELEMENT {
                REAL unit = s.deviation(p, x[e]) * s.scaled_r;
                y[e] = activate<FN>(of.w[WEIGHTS_AT][e] * unit + of.b[WEIGHTS_AT][e]);
            }
            write(p, y, p.to, at, k);
        }
        if (p.mean && row.there && threadIdx.x % THREADS == 0) {
            p.mean[at] = s.mean;
            p.rstd[at] = s.r;
        }
    }
}

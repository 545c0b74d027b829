// A norm of rows. History: a row in registers reads memory once. A block of many threads for each row
// reached 65 to 85% of a copy's speed: it waited for its sums with nothing under way, and read weights anew. Now
// blocks stay, hold their weights, and have asked for the next row before they sum up one.

extern "C" __global__ void __launch_bounds__(THREADS * ROWS, RESIDENT) norm_forward(Params p) {
    Weights of(p);
    i64 step = (i64)gridDim.x * ROWS;
    Row next;
    next.begin(p, p.x, (i64)blockIdx.x * ROWS + slot());
    int set = 0;
    for (i64 first = (i64)blockIdx.x * ROWS; first < p.rows; first += step, set ^= 1) {
        i64 at = first + slot();
        Row row = next;
        next.begin(p, p.x, at + step);
        Statistics s = statistics(p, row, set);
        EACH_PACK {
            Pack pack = row.pack(k), out;
            of.again(p, k);
            EACH_ELEMENT {
                REAL unit = (widen(pack.of[e]) - s.mean) * s.r;
                narrow(activate<FN>(of.w[WEIGHTS_AT][e] * unit + of.b[WEIGHTS_AT][e]), out.of[e]);
            }
            store(out, p.to + at * p.columns, column(k), row.count);
        }
        if (p.mean && at < p.rows && threadIdx.x % THREADS == 0) {
            p.mean[at] = s.mean;
            p.rstd[at] = s.r;
        }
    }
}

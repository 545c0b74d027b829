// A norm of rows. History: a row in registers reads memory once; with a row per block of as many threads
// as packs, all loads of a thread are under way at once.

extern "C" __global__ void __launch_bounds__(THREADS * ROWS) norm_forward(Params p) {
    i64 at = (i64)blockIdx.x * ROWS + slot();
    Row row(p, at);
    int packs = row.packs;
    Statistics s = statistics(p, row);
    EACH_PACK {
        Pack pack = row.pack(p, k), out;
        Weights of = weights(p, k);
#pragma unroll
        for (int e = 0; e < VEC; ++e) {
            REAL unit = (widen(pack.of[e]) - s.mean) * s.r;
            narrow(activate<FN>(of.w[e] * unit + of.b[e]), out.of[e]);
        }
        store(out, p.to + row.first, column(k), row.count);
    }
    if (p.mean && row.count && threadIdx.x % THREADS == 0) {
        p.mean[at] = s.mean;
        p.rstd[at] = s.r;
    }
}

// The gradient of a norm. A slot of threads goes through its rows and holds its columns' sums for dw and db in
// registers (in its row of p.dw and p.db where PACKS is 0); norm_sums adds up those of all slots.

extern "C" __global__ void __launch_bounds__(THREADS * ROWS, RESIDENT) norm_backward(Params p) {
    Weights of(p);
    i64 step = (i64)gridDim.x * ROWS, own = (i64)blockIdx.x * ROWS + slot();
    REAL* dw_sums = p.dw + own * p.columns;
    REAL* db_sums = HAS_B ? p.db + own * p.columns : nullptr;
    REAL dw[HELD][VEC] = {}, db[HELD][VEC] = {};
    Row next_x, next_dy;
    next_x.begin(p, p.x, own);
    next_dy.begin(p, p.dy, own);
    int set = 0;
    for (i64 first = (i64)blockIdx.x * ROWS; first < p.rows; first += step, set ^= 1) {
        i64 at = first + slot();
        Row x = next_x, dy = next_dy;
        next_x.begin(p, p.x, at + step);
        next_dy.begin(p, p.dy, at + step);
        Statistics s = statistics(p, x, set);
        REAL sums[2] = {0, 0}, u[HELD][VEC];
        EACH_PACK {
            Pack px = x.pack(k), pdy = dy.pack(k);
            of.again(p, k);
            REAL dz[VEC], unit[VEC];
            EACH_ELEMENT {
                unit[e] = (widen(px.of[e]) - s.mean) * s.r;
                dz[e] = widen(pdy.of[e]) * slope<FN>(of.w[WEIGHTS_AT][e] * unit[e] + of.b[WEIGHTS_AT][e]);
                u[AT][e] = rounded_product(dz[e], of.w[WEIGHTS_AT][e]);
                sums[0] += u[AT][e];
                sums[1] += u[AT][e] * unit[e];
            }
#if PACKS == 0
            // The row of sums is this thread's at its columns, and not yet anything before its first row.
            EACH_ELEMENT if (column(k) + e < p.columns) {
                dw[0][e] = first == blockIdx.x * ROWS ? 0 : dw_sums[column(k) + e];
                if (HAS_B) db[0][e] = first == blockIdx.x * ROWS ? 0 : db_sums[column(k) + e];
            }
#endif
            // Past the last row dy is 0, but what it is multiplied by may be infinite.
            EACH_ELEMENT if (x.count) {
                dw[AT][e] += dz[e] * unit[e];
                db[AT][e] += dz[e];
            }
#if PACKS == 0
            EACH_ELEMENT if (column(k) + e < p.columns) {
                dw_sums[column(k) + e] = dw[0][e];
                if (HAS_B) db_sums[column(k) + e] = db[0][e];
            }
#endif
        }
        row_sums<2>(sums, set);
        REAL mean = CENTERED ? sums[0] / p.count : 0, along = sums[1] / p.count;
        EACH_PACK {
            Pack px = x.pack(k), out;
#if PACKS == 0
            Pack pdy = dy.pack(k);
            of.again(p, k);
#endif
            EACH_ELEMENT {
                REAL v = widen(px.of[e]) - s.mean;
#if PACKS == 0
                REAL dz = widen(pdy.of[e]) * slope<FN>(of.w[0][e] * (v * s.r) + of.b[0][e]);
                u[0][e] = rounded_product(dz, of.w[0][e]);
#endif
                narrow(s.r * (u[AT][e] - mean - v * s.t * along), out.of[e]);
            }
            store(out, p.to + at * p.columns, column(k), x.count);
        }
    }
#if PACKS
    EACH_PACK EACH_ELEMENT if (column(k) + e < p.columns) {
        dw_sums[column(k) + e] = dw[AT][e];
        if (HAS_B) db_sums[column(k) + e] = db[AT][e];
    }
#endif
}

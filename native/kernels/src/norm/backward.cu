// The gradient of a norm. A slot of threads goes through `rows_each` rows and holds its columns' sums for
// dw and db in registers (in its part of memory where PACKS is 0).

extern "C" __global__ void __launch_bounds__(THREADS * ROWS) norm_backward(Params p) {
    i64 at = (i64)blockIdx.x * ROWS + slot();
    REAL* dw_part = p.dw + at * p.columns;
    REAL* db_part = p.db + at * p.columns;
#if PACKS
    REAL dw[PACKS][VEC] = {}, db[PACKS][VEC] = {};
#endif
    for (i64 i = 0; i < p.rows_each; ++i) {
        Row row(p, at * p.rows_each + i);
        int packs = row.packs;
        const STORAGE* dy = p.dy + row.first;
#if PACKS
        // Asked for before the sums are waited for.
        Pack cotangent[PACKS];
        EACH_PACK cotangent[k] = load(dy, column(k), row.count);
#define COTANGENT cotangent[k]
#else
#define COTANGENT load(dy, column(k), row.count)
#endif
        Statistics s = statistics(p, row);
        REAL mean = 0, along = 0;
        EACH_PACK {
            Pack x = row.pack(p, k), d = COTANGENT;
            Weights of = weights(p, k);
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                REAL unit = (widen(x.of[e]) - s.mean) * s.r;
                REAL dz = widen(d.of[e]) * slope<FN>(of.w[e] * unit + of.b[e]);
                mean += dz * of.w[e];
                along += dz * of.w[e] * unit;
#if PACKS
                // Past the last row dy is 0, but x is none.
                if (row.count) {
                    dw[k][e] += dz * unit;
                    db[k][e] += dz;
                }
#else
                i64 c = column(k) + e;
                if (c < row.count) {
                    dw_part[c] = (i ? dw_part[c] : 0) + dz * unit;
                    if (HAS_B) db_part[c] = (i ? db_part[c] : 0) + dz;
                }
#endif
            }
        }
        row_sums(mean, along);
        mean = CENTERED ? mean * p.by_columns : 0;
        along *= p.by_columns;
        EACH_PACK {
            Pack x = row.pack(p, k), d = COTANGENT, out;
            Weights of = weights(p, k);
#pragma unroll
            for (int e = 0; e < VEC; ++e) {
                REAL v = widen(x.of[e]) - s.mean;
                REAL u = of.w[e] * widen(d.of[e]) * slope<FN>(of.w[e] * (v * s.r) + of.b[e]);
                narrow(s.r * (u - mean - v * s.t * along), out.of[e]);
            }
            store(out, p.to + row.first, column(k), row.count);
        }
    }
#if PACKS
    EACH_PACK
#pragma unroll
    for (int e = 0; e < VEC; ++e)
        if (column(k) + e < p.columns) {
            dw_part[column(k) + e] = dw[k][e];
            if (HAS_B) db_part[column(k) + e] = db[k][e];
        }
#endif
}
